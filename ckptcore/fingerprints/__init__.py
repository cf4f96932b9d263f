"""Sum tensors so that order, topology and file split do not matter.

Knows boxes and dtypes; no store, no plan.

- `sums.box_sum` sums a box, `sums.add` joins sums, `sums.tensor_fingerprint` and
  `sums.checkpoint_fingerprint` name what was summed.
- `sum_weights` says how much each element counts; `device_sums` does the same on an accelerator.
"""
