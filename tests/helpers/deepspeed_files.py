"""Write small DeepSpeed checkpoints with torch alone, cut by a plain re-enactment of ZeRO's partitions."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any
from unittest import mock

import torch

Tensors = Mapping[str, torch.Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")


def tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random parameters in float32."""
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def moment(key: str, value: torch.Tensor) -> torch.Tensor:
    """Return what the written optimizer has for a parameter."""
    return value * 0.5 + 1 if key == "exp_avg" else value * value


def shapes_of(values: Tensors) -> OrderedDict[str, torch.Size]:
    return OrderedDict((name, value.shape) for name, value in values.items())


def together(values: Tensors, ranks: int) -> list[torch.Tensor]:
    """Cut a group as ZeRO-1 and ZeRO-2 do: one flat buffer, filled up to a multiple of twice the ranks."""
    flat = torch.cat([v.reshape(-1) for v in values.values()])
    size = -(-len(flat) // (2 * ranks)) * 2
    flat = torch.cat([flat, torch.full((ranks * size - len(flat),), -77.0)])
    return [flat[r * size : (r + 1) * size].clone() for r in range(ranks)]


def stripped(values: Tensors, ranks: int) -> list[torch.Tensor]:
    """Cut a group, without the padding at the end."""
    left, made = sum(v.numel() for v in values.values()), []
    for part in together(values, ranks):
        made.append(part[: max(min(left, len(part)), 0)].clone())
        left -= len(part)
    return made


def each(values: Tensors, ranks: int) -> list[torch.Tensor]:
    """Cut each parameter by itself, as ZeRO-3 does; what fills the last part up is not a number."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for value in values.values():
        size = -(-value.numel() // ranks)
        flat = torch.cat([value.reshape(-1), torch.full((ranks * size - value.numel(),), float("nan"))])
        for r in range(ranks):
            parts[r].append(flat[r * size : (r + 1) * size])
    return [torch.cat(p).clone() for p in parts]


def partitions(groups: Sequence[Tensors], ranks: int, *, elastic: bool = False) -> list[dict[str, Any]]:
    """Return the ``optimizer_state_dict`` of every rank (ZeRO-1 and ZeRO-2)."""
    made = []
    for r in range(ranks):
        cut = stripped if elastic else together
        states = [
            {
                "step": torch.tensor(5.0) if not elastic else 5,
                **{k: cut({n: moment(k, v) for n, v in g.items()}, ranks)[r] for k in MOMENTS},
            }
            for g in groups
        ]
        groups_of = [{"lr": 0.1, "params": [n]} for n in range(len(groups))]
        base = states if elastic else {"state": dict(enumerate(states)), "param_groups": groups_of}
        made.append(
            {
                "zero_stage": 2,
                "loss_scaler": None,
                "overflow": False,
                "partition_count": [ranks] * len(groups),
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": [stripped(g, ranks)[r] for g in groups],
            }
        )
    return made


def model_states(dp: int, mp: int = 1, **fields: Any) -> dict[str, Any]:
    """Return the dict of a model-state file."""
    return {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "global_steps": 5,
        "dp_world_size": dp,
        "mp_world_size": mp,
        "ds_config": {"zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
        **fields,
    }


def save(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write files; an optimizer's state gets the dict around it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tree in files.items():
        wrapped = {"optimizer_state_dict": tree} if name.endswith("optim_states.pt") else tree
        torch.save(wrapped, folder / name)
    return folder


@contextmanager
def deepspeed_classes() -> Iterator[types.SimpleNamespace]:
    """Make the classes of DeepSpeed that its files name, under the names of their modules."""
    scaler = type("DynamicLossScaler", (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})
    stage = IntEnum("ZeroStageEnum", {"gradients": 2}, module="deepspeed.runtime.zero.config")
    modules: dict[str, types.ModuleType] = {}
    for cls in (scaler, stage):
        parts = cls.__module__.split(".")
        for n in range(len(parts)):
            path = ".".join(parts[: n + 1])
            modules.setdefault(path, types.ModuleType(path))
        setattr(modules[cls.__module__], cls.__name__, cls)
    with mock.patch.dict(sys.modules, modules):
        yield types.SimpleNamespace(DynamicLossScaler=scaler, ZeroStageEnum=stage)
