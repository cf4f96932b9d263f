"""Read and write the byte-level encodings that formats share. None of them depends on a checkpoint.

They may depend on core (dtypes, plain values, the budget of metadata) and store (ranges of bytes). Everything
here bounds what it reads: no count or length in a file is trusted. Public: the packages `pickle` (restricted,
executes nothing) and `torchzip` (the zip of torch.save), `safetensors_header`, `zarr_v2`, `json_text` (JSON
with a budget), `codecs` (streams such as zstd) and `limits` (how large metadata may be).
"""
