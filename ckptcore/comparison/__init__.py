"""Compare two checkpoints, fingerprint one, and verify exports, whatever their formats and topologies.

Knows checking, names and the reading of boxes; writes nothing.

- `diff.diff` gives a `result.Difference`; `fingerprint.fingerprint` gives `fingerprint.Fingerprints`.
- `box_walk.walk_boxes` reads the boxes of many tensors in several threads, for both.
- `tensor_compare` compares tensors, `object_leaves` plain values.
- `verify_export.verify_export` gives a `ckptcore.checking.export_proof.ExportProof`. Its checks:
  `element_use` and `element_problems` account for stored elements, `export_values` compares, `export_record`
  compares with a catalog's record where the source is gone, `export_near` takes cosines, `export_logits` asks
  transformers in a process of its own (`logits_process`); `not_finite` counts NaN, Inf.
"""
