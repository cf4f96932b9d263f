"""Load a checkpoint into the tensors of a running program, each rank its own boxes.

Depends on reading and topology; calls torch, but no collectives, and writes no file.

- `load_into.load_into` is the entry point.
- `live_state` finds tensors in a state dict, `live_tensors` computes which boxes a (D)Tensor holds,
  `plain_values` restores what is not a tensor.
"""
