"""Read and write the zip files of torch.save: a pickle, and a record per storage.

`reader.read_objects` gives the tree and where each storage lies, `writer` lays a file out from its parts,
and `templates` has the small records that torch adds. Tensor bytes are neither read nor written here.
"""
