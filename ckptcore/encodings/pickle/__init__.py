"""pickle: a room of ckptcore."""
