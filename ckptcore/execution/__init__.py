"""execution: a room of ckptcore."""
