"""conversion: a room of ckptcore."""
