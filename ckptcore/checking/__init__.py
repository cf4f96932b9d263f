"""checking: a room of ckptcore."""
