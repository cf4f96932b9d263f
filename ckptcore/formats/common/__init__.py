"""common: a room of ckptcore."""
