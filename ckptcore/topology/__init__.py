"""topology: a room of ckptcore."""
