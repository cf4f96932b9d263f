"""Compute which rank of a mesh holds which box of a tensor.

Depends on boxes and names; on no format and no plan, and on torch only where callers pass torch's meshes.

- `layout.Mesh`, `layout.TensorLayout` and `layout.Topology` are the values, with torch's placements;
  `torch_chunk` is the arithmetic.
- `rank_layout` lays tensors out by `rules` (built-in families are in ``families/``, others come from a
  `rules_file`); `pipeline_stages` places layers and experts, `fsdp_over_tp` the rest.
- `mesh_spec` parses ``fsdp=4,tp=2``; `unused_rules` finds rules that no name matches.
"""
