"""core: a room of ckptcore."""
