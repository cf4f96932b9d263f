"""operations: a room of ckptcore."""
