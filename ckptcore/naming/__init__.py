"""Name tensors: renaming, maps between worlds of names, the model part, and what optimizer state belongs to.

Knows manifests; no format by name, no bytes.

- `maps` takes trainers' names and layouts to those of the hub, and back, by rules that are data.
- `rename.remap` gives a manifest under other names; `rename.matches` is the one rule for globs.
- `model_part.find_model` finds the model, by evidence.
- `peft.find_adapter` finds a LoRA adapter in a model, and calls its tensors as the hub does.
- `optimizer_state` says which parameter a state belongs to.
"""
