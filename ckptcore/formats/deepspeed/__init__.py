"""Read DeepSpeed checkpoints (ZeRO 0 to 3, pipeline, AutoTP, MoE, universal); write universal folders.

`file_names` names the files, `pickle_globals` the classes in them, `rank_files` reads and cross-checks them,
`flat_partitions` finds parameters in the flat buffers, `tensor_parallel` joins the shards of tensor-parallel
ranks, `assembly` puts tensors into a manifest, `optimizer_states` and `universal` read the optimizer,
`reader` puts all together, and `format` is the seam.

`universal_writer` lays out universal folders, which `universal_format` names for ``--to``: `universal_names`
names the values of any source, `universal_groups` collects its parameter groups, and `universal_contents`
sorts them and refuses what DeepSpeed would not load.
"""
