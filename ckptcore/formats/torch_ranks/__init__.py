"""Read and write one torch.save file per rank: DTensor, ShardedTensor, or whole tensors (verl, FSDP scripts).

`format.FORMAT`. `reader` joins the ranks, `file_reader` reads one file, `placement` finds the boxes of a
DTensor and `dtensor_globals` is the allow-list; `optimizer` names states that are numbered. `writer` and
`dtensor_writer` lay out what such a job would have saved. `reader.read_ranks` serves other families.
"""
