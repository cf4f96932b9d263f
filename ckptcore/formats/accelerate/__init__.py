"""accelerate: a room of ckptcore."""
