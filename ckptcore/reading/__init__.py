"""reading: a room of ckptcore."""
