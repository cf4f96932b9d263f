"""Read and write one torch.save file of a full state dict.

`format.FORMAT`; for families that keep torch files: `tree` (from a pickled tree to tensors and objects) and
`layout.torch_file` (a file from a tree).
"""
