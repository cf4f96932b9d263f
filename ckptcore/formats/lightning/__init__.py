"""lightning: a room of ckptcore."""
