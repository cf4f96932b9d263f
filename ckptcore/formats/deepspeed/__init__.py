"""Read DeepSpeed checkpoints (ZeRO 0 to 3, pipeline, AutoTP, MoE, universal); write universal folders.

`file_names` names the files, `pickle_globals` the classes in them, `rank_files` reads and cross-checks them,
`tensor_parallel` joins the shards of tensor-parallel ranks, `assembly` puts tensors into a manifest,
`optimizer_states` finds parameters in the flat buffers of ZeRO's optimizer, `universal` reads the universal
form, `reader` puts all together, and `format` is the seam.

`universal_writer` lays out universal folders, which `universal_format` names for ``--to``: `universal_names`
names the values of any source, and `universal_contents` collects parameter groups, sorts the values, and
refuses what DeepSpeed would not load.
"""
