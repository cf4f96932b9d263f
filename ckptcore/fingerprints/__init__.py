"""Sum tensors so that order, topology and file split do not matter.

Depends on boxes and dtypes; on no store and no plan.

- `sums.box_sum` sums a box, `sums.add` adds sums, `sums.tensor_fingerprint` and
  `sums.checkpoint_fingerprint` make fingerprints of them.
- `device_sums` sums on an accelerator.
"""
