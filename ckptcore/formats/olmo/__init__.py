"""olmo: a room of ckptcore."""
