"""Name tensors: renaming, maps between worlds of names, the model part, and owners of optimizer state.

Knows manifests; no format by name, no bytes.

- `maps` converts trainers' names and layouts to those of the hub, and back, by rules that are data.
- `rename.remap` renames the tensors of a manifest; `rename.matches` is the only rule for globs.
- `model_part.find_model` finds the model, by evidence.
- `peft.find_adapter` finds a LoRA adapter in a model, and its names on the hub.
- `optimizer_state` assigns optimizer state to parameters.
- `transformers_private` has all uses of what transformers does not document.
"""
