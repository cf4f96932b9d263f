"""Read DeepSpeed checkpoints (ZeRO 0 to 3, pipeline, AutoTP, MoE, universal); write universal folders.

`file_names` names the files, `rank_files` reads and cross-checks them by an allow-list of classes,
`tensor_parallel` joins the shards of tensor-parallel ranks, `assembly` puts tensors into a manifest,
`optimizer_states` finds parameters in the flat buffers of ZeRO's optimizer, `universal` reads the universal
form, `reader` puts all together, and `format` is the seam.

`universal_writer` lays out universal folders: it names the values of any source, collects parameter groups,
and refuses what DeepSpeed would not load.
"""
