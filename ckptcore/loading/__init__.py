"""Fill live state: read a checkpoint into the tensors of a running program, each rank its own boxes.

Knows reading and topology; calls torch, no collectives, and writes no file.

- `load_into.load_into` is the verb.
- `live_state` finds tensors in a state dict, `live_tensors` says which boxes a (D)Tensor holds,
  `plain_values` takes over what is no tensor.
"""
