"""comparison: a room of ckptcore."""
