"""Compare two checkpoints, and fingerprint one, whatever their formats and topologies.

Knows checking, names and the reading of boxes; writes nothing.

- `diff.diff` gives a `result.Difference`; `fingerprint.fingerprint` gives `fingerprint.Fingerprints`.
- `box_walk.walk_boxes` reads the boxes of many tensors in several threads, for both.
- `tensor_compare` compares tensors, `object_leaves` plain values.
"""
