"""A model that holds weights as an inference engine does, and a loader for it, where there is no engine.

Projections are joined, cut for ranks, and the vocabulary is padded, as in vLLM's layers; the loader has the
methods of vLLM's `DefaultModelLoader` that a plug-in builds on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

JOINED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
CUT_BY_COLUMNS = ("o_proj", "down_proj")
PADDED = 64  # rows of the vocabulary are a multiple of it, as in vLLM


class Engine(torch.nn.Module):
    """The part of a model that one rank holds.

    Args:
        shapes: Name -> shape of each tensor of the files.
        rank: Its number.
        ranks: How many share the model.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.places: dict[str, tuple[str, int, int]] = {}  # name -> (parameter, first row, dim that is cut)
        rows: dict[str, int] = {}
        sizes: dict[str, list[int]] = {}
        for name, shape in shapes.items():
            layer = name.split(".")[-2]
            cut = 1 if layer in CUT_BY_COLUMNS else 0 if layer in JOINED or "embed" in name else -1
            size = [n // ranks if dim == cut else n for dim, n in enumerate(shape)]
            if "embed" in name:
                size[0] = -(-size[0] // PADDED) * PADDED
            parameter = name.replace(layer, JOINED.get(layer, layer)).replace(".", "/")
            self.places[name] = parameter, rows.get(parameter, 0), cut
            rows[parameter] = rows.get(parameter, 0) + (size[0] if size else 0)
            sizes[parameter] = [rows[parameter], *size[1:]]
        self.weights = torch.nn.ParameterDict({n: torch.zeros(size) for n, size in sizes.items()})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take tensors of the files, as vLLM's weight loaders do."""
        for name, loaded in weights:
            parameter, first, cut = self.places[name]
            target = self.weights[parameter].data
            if cut >= 0:
                part = loaded.shape[cut] // self.ranks
                loaded = loaded.narrow(cut, self.rank * part, part)
            rows = target.narrow(0, first, loaded.shape[0])
            if cut == 1:
                rows[:] = loaded.t().contiguous().t()
            else:
                rows.copy_(loaded.to(rows.dtype))
            if "embed" in name:
                target[loaded.shape[0] :].fill_(0)
        return set(self.weights)


class FileLoader:
    """The loader that takes tensors from files."""

    def __init__(self, load_config: Any) -> None:
        if load_config.model_loader_extra_config:
            raise ValueError(f"Unexpected extra config keys: {load_config.model_loader_extra_config}")
        self.load_config = load_config

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of files."""
        raise NotImplementedError

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Give them to the model."""
        model.load_weights(self.get_all_weights(model_config, model))

    def load_model(self, vllm_config: Any, model_config: Any) -> Any:
        """Make the model, load it, and let the engine rearrange it."""
        model = vllm_config.model
        self.load_weights(model, model_config)
        vllm_config.rearrange(model)
        return model


def configs(model: Any, folder: Any, rearrange: Any = lambda _: None, **options: Any) -> Any:
    """The configs that the engine gives to a loader: of the loader, of the model, and of the engine."""
    return SimpleNamespace(
        load=SimpleNamespace(model_loader_extra_config=options),
        model=SimpleNamespace(model=str(folder), hf_config_path=None),
        engine=SimpleNamespace(model=model, rearrange=rearrange),
    )
