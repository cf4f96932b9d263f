"""Read checkpoints of torch_checkpointing: a file for each item and rank, and metadata.pkl.

`format.FORMAT` is the format. `metadata` reads metadata.pkl, and `reader` joins the ranks' files with the
reader of `ckptcore.formats.torch_ranks`.
"""
