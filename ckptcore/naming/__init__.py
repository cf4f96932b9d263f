"""naming: a room of ckptcore."""
