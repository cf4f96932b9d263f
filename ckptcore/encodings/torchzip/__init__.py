"""Read and write the zip files of torch.save: a pickle, and a record per storage.

`reader.read_objects` returns the tree and the position of each storage, `writer` assembles a file from its
parts, and `templates` recognises files that differ only in their payload. Tensor bytes are neither read nor
written here.
"""
