"""Read DeepSpeed checkpoints: ZeRO stages 0 to 3, BF16_Optimizer, pipeline, AutoTP, native MoE, universal.

`file_names` names the files, `pickle_globals` the classes in them, `rank_files` reads and cross-checks them,
`flat_partitions` finds parameters in the flat buffers, `tensor_parallel` joins the shards of tensor-parallel
ranks, `assembly` puts tensors into a manifest, `optimizer_states` and `universal` read the optimizer,
`reader` puts all together, and `format` is the seam.
"""
