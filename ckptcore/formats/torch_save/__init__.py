"""Read and write one torch.save file of a full state dict.

`format.FORMAT` is the format. Families with torch files use `tree` (from a pickled tree to tensors and
objects), and `common.torch_file` (from a tree to a file).
"""
