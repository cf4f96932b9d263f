"""Read and write safetensors files and Hugging Face folders, and read two relatives of them.

`safetensors.FORMAT` is also written; `folder` reads it. `quantized.FORMAT` reads float8, int8 and MXFP4
weights as their values. `shards.FORMAT` reads the files of torch's
HuggingFaceStorageWriter, and proves that no shard is missing, with shapes from
consolidated files, an index, or a model's config.
"""
