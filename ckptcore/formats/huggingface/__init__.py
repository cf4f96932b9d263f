"""Read and write safetensors files and Hugging Face folders, and read two relatives of them.

`safetensors.FORMAT` (also written; `folder` reads it), `quantized.FORMAT` (fp8 blocks and MXFP4, read as
their values) and `shards.FORMAT` (torch's HuggingFaceStorageWriter; `shard_headers` proves that no shard is
missing, `expected_shapes` and `whole_files` are what else tells shapes).
"""
