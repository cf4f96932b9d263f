"""Compare two checkpoints, fingerprint one, and verify exports, whatever their formats and topologies.

The package uses checking, naming and the reading of boxes; it writes nothing.

- `diff.diff` returns a `result.Difference`; `fingerprint.fingerprint` returns `fingerprint.Fingerprints`.
- `box_walk.read_boxes` reads the boxes of many tensors in several threads, for both.
- `tensor_compare` compares tensors, `object_leaves` plain values.
- `verify_export.verify_export` returns a `ckptcore.checking.export_proof.ExportProof`. Its checks:
  `element_use` and `element_problems` account for stored elements, `export_values` compares values,
  `export_record` compares with the catalog's record where the source is gone, `export_near` computes cosines,
  `export_logits` runs transformers in a separate process (`logits_process`), `not_finite` counts NaN and Inf.
"""
