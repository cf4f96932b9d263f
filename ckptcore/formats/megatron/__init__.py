"""Read Megatron's checkpoints (torch_dist, zarr, FSDP, legacy mp_rank folders), and write the first two.

`torch_dist.FORMAT`, `torch_dist.FSDP_DTENSOR`, `torch_dist.TORCH_DCP`, `zarr.FORMAT` and `legacy.FORMAT`.
Megatron-Core: `config`, `sharded_objects`, `flat_buffers`, `parameter_order` (the
distributed optimizer), `writer`. Legacy: `legacy_reader`, `legacy_ranks`, `legacy_merge`. `partition_rules`
derives sizes and partitioning from the arguments, for both. `pickle_globals` is the allow-list.
"""
