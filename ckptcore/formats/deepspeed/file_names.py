"""Sort the files of a DeepSpeed checkpoint folder by kind and rank.

deepspeed/runtime/engine.py (0.19.8): `_get_ckpt_name`, `_get_optimizer_ckpt_name`, `_get_expert_ckpt_name`;
deepspeed/runtime/pipe/module.py: `ckpt_layer_path`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_Key = TypeVar("_Key", bound=tuple[int, ...])
MODEL = re.compile(r"^(?:zero_pp_rank_(?P<dp>\d{1,7})_)?mp_rank_(?P<mp>\d{1,7})_model_states\.pt$")
OPTIM = re.compile(r"^(?:[a-z]+\d+_)?zero_pp_rank_(?P<dp>\d{1,7})_mp_rank_(?P<mp>\d{1,7})_?optim_states\.pt$")
EXPERT = re.compile(
    r"^(?:layer_(?P<layer>\d{1,7})_)?expert_(?P<expert>\d{1,7})_mp_rank_(?P<mp>\d{1,7})_model_states\.pt$"
)
EXPERT_OPTIM = re.compile(r"^expp_rank_(?P<ep>\d{1,7})_mp_rank_(?P<mp>\d{1,7})_optim_states\.pt$")
LAYER = re.compile(r"^layer_(?P<layer>\d{1,7})(?:-model_(?P<tp>\d{1,7}))?-model_states\.pt$")
UNIVERSAL = re.compile(r"^zero/(?P<name>[^/]+)/(?P<key>[A-Za-z0-9_]+)\.pt$")


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of one folder, by rank.

    Attributes:
        model: (data-parallel rank, model-parallel rank) -> path. The data-parallel rank is -1 where one file
            serves all of them (every stage but ZeRO-3).
        optim: (data-parallel rank, model-parallel rank) -> path of a ZeRO optimizer partition.
        layers: (pipeline layer, tensor-parallel rank) -> path.
        experts: (MoE layer, or -1; global expert; model-parallel rank) -> path.
        expert_optim: (expert-parallel rank, model-parallel rank) -> path, where ZeRO is off.
        universal: parameter -> {state: path} of a universal folder.
    """

    model: Mapping[tuple[int, int], str] = field(default_factory=dict)
    optim: Mapping[tuple[int, int], str] = field(default_factory=dict)
    layers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    experts: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optim: Mapping[tuple[int, int], str] = field(default_factory=dict)
    universal: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def files_of(listing: Iterable[str]) -> CheckpointFiles:
    """Sort the paths of a folder; paths that are no file of DeepSpeed are left out."""
    model: dict[tuple[int, int], str] = {}
    optim: dict[tuple[int, int], str] = {}
    layers: dict[tuple[int, int], str] = {}
    experts: dict[tuple[int, int, int], str] = {}
    expert_optim: dict[tuple[int, int], str] = {}
    universal: dict[str, dict[str, str]] = {}
    for path in listing:
        if m := MODEL.match(path):
            model[int(m["dp"]) if m["dp"] else -1, int(m["mp"])] = path
        elif m := OPTIM.match(path):
            optim[int(m["dp"]), int(m["mp"])] = path
        elif m := LAYER.match(path):
            layers[int(m["layer"]), int(m["tp"] or 0)] = path
        elif m := EXPERT.match(path):
            experts[int(m["layer"]) if m["layer"] else -1, int(m["expert"]), int(m["mp"])] = path
        elif m := EXPERT_OPTIM.match(path):
            expert_optim[int(m["ep"]), int(m["mp"])] = path
        elif m := UNIVERSAL.match(path):
            universal.setdefault(m["name"], {})[m["key"]] = path
    return CheckpointFiles(
        _sorted(model), _sorted(optim), _sorted(layers), _sorted(experts), _sorted(expert_optim), universal
    )


def is_checkpoint(listing: Iterable[str]) -> bool:
    """Whether a folder holds files that only DeepSpeed writes."""
    return any(MODEL.match(p) or OPTIM.match(p) or UNIVERSAL.match(p) for p in listing)


def _sorted(rows: dict[_Key, str]) -> dict[_Key, str]:
    return {key: rows[key] for key in sorted(rows)}
