"""torch_save: a room of ckptcore."""
