"""The data model: a manifest describes a checkpoint as boxes of tensors over byte ranges.

Plain values only. This package depends on `errors` and `utils` alone: no store, no format, no torch.

- `manifest.Manifest` and its columns; `manifest_builder.Builder` makes one.
- `box.Box` is an n-d interval, `dtype` the table of element types, `coverage` reports what is in no chunk.
- `object_tree` is the JSON form of plain values; `dequantize` computes derived tensors.
- `columnar_file` is the file format of manifests and plans; `metadata_budget` bounds their memory.
"""
