"""Compare two models of transformers: everything that `from_pretrained` gives a model."""

from __future__ import annotations

from typing import Any

import torch
from export_cells import same

Tensors = dict[str, torch.Tensor]


def require_same(model: Any, other: Any) -> None:
    """Raise AssertionError unless class, tensors, ties, configs, mode and logits are equal, bit for bit."""
    assert type(model) is type(other)
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = tensors_of(model, kind), tensors_of(other, kind)
        assert list(ours) == list(theirs)
        assert [n for n in ours if not same(ours[n], theirs[n])] == []
        assert [t.requires_grad for t in ours.values()] == [t.requires_grad for t in theirs.values()]
    assert ties(model) == ties(other)
    assert settings(model.config) == settings(other.config)
    assert model.generation_config.to_dict() == other.generation_config.to_dict()
    assert model.training == other.training
    logits, right = (logits_of(each) for each in (model, other))
    if isinstance(logits, str) or isinstance(right, str):
        assert logits == right
    else:
        assert same(logits, right)


def tensors_of(model: Any, kind: str) -> Tensors:
    """Return every parameter or buffer, tied ones under each of their names."""
    return {name: tensor.detach() for name, tensor in getattr(model, kind)(remove_duplicate=False)}


def ties(model: Any) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if each[1:]]


def settings(config: Any) -> dict[str, Any]:
    """Return a config without the place that it was read from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def logits_of(model: Any) -> torch.Tensor | str:
    """Return logits; the message where torch has no kernel for tensors of a tiny model."""
    with torch.no_grad():
        try:
            logits: torch.Tensor = model(input_ids=torch.arange(8)[None]).logits
        except RuntimeError as error:  # grouped products want strides of 16 bytes
            return str(error)
    return logits
