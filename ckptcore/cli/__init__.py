"""cli: a room of ckptcore."""
