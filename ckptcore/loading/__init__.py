"""loading: a room of ckptcore."""
