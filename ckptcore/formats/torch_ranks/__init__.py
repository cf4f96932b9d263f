"""torch_ranks: a room of ckptcore."""
