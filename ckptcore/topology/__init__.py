"""Compute which rank of a mesh holds which box of a tensor.

Depends on boxes; on no checkpoint, format or plan, and on torch only where callers pass torch's meshes.

- `layout.Mesh`, `layout.TensorLayout` and `layout.Topology` are the values, with torch's placements;
  `torch_chunk` is the arithmetic.
- `rules` place parameters by name (built-in families are in ``families/``, others come from a file);
  `pipeline_stages` places layers and experts.
- `mesh_spec` parses ``fsdp=4,tp=2``.
"""
