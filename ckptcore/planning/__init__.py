"""planning: a room of ckptcore."""
