"""utils: a room of ckptcore."""
