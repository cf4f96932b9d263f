"""megatron: a room of ckptcore."""
