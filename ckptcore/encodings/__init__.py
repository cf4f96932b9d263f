"""encodings: a room of ckptcore."""
