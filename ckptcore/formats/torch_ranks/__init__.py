"""Read and write one torch.save file per rank: DTensor, ShardedTensor, or full tensors (verl, FSDP scripts).

`format` declares the formats. `reader` reads the files and joins the ranks, `placement` finds the
boxes of a DTensor by an allow-list, and `optimizer` names numbered states. `writer` lays out what such a job
would have saved. Other families use `reader.read_ranks`. `checkpointing_reader` reads torch_checkpointing,
`meta_reader` the model-parallel files of Meta's Llama. One such file alone is a full state dict
(family ``torch_save``).
"""
