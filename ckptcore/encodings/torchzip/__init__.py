"""torchzip: a room of ckptcore."""
