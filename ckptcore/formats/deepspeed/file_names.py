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
NAME = "deepspeed"
# [0-9], because \d matches the digits of every script; {1,7} bounds the integers.
MODEL = re.compile(r"^(?:zero_pp_rank_(?P<dp>[0-9]{1,7})_)?mp_rank_(?P<mp>[0-9]{1,7})_model_states\.pt$")
OPTIM = re.compile(
    r"^(?:[a-z]+[0-9]+_)?zero_pp_rank_(?P<dp>[0-9]{1,7})_mp_rank_(?P<mp>[0-9]{1,7})_?optim_states\.pt$"
)
EXPERT = re.compile(
    r"^(?:layer_(?P<layer>[0-9]{1,7})_)?expert_(?P<expert>[0-9]{1,7})_mp_rank_(?P<mp>[0-9]{1,7})_model_states\.pt$"
)
EXPERT_OPTIM = re.compile(r"^expp_rank_(?P<ep>[0-9]{1,7})_mp_rank_(?P<mp>[0-9]{1,7})_optim_states\.pt$")
LAYER = re.compile(r"^layer_(?P<layer>[0-9]{1,7})(?:-model_(?P<tp>[0-9]{1,7}))?-model_states\.pt$")
UNIVERSAL = re.compile(r"^zero/(?P<name>.+)/(?P<key>[A-Za-z0-9_]+)\.pt$", re.DOTALL)


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
        twice: Pairs of files of one rank: nothing says which of them is the save's.
    """

    model: Mapping[tuple[int, int], str] = field(default_factory=dict)
    optim: Mapping[tuple[int, int], str] = field(default_factory=dict)
    layers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    experts: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optim: Mapping[tuple[int, int], str] = field(default_factory=dict)
    universal: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    twice: tuple[tuple[str, str], ...] = ()


def files_of(listing: Iterable[str]) -> CheckpointFiles:
    """Sort the paths of a folder; paths that are no file of DeepSpeed are left out."""
    model: dict[tuple[int, int], str] = {}
    optim: dict[tuple[int, int], str] = {}
    layers: dict[tuple[int, int], str] = {}
    experts: dict[tuple[int, int, int], str] = {}
    expert_optim: dict[tuple[int, int], str] = {}
    universal: dict[str, dict[str, str]] = {}
    twice: list[tuple[str, str]] = []

    def put(rows: dict[_Key, str], key: _Key, path: str) -> None:
        # `mp_rank_0` beside `mp_rank_00`; a run in float16 beside one in bfloat16, which adds a prefix.
        if key in rows:
            twice.append((rows[key], path))
        rows[key] = path

    for path in listing:
        if not path.endswith(".pt"):
            continue
        if m := MODEL.fullmatch(path):
            put(model, (int(m["dp"]) if m["dp"] else -1, int(m["mp"])), path)
        elif m := OPTIM.fullmatch(path):
            put(optim, (int(m["dp"]), int(m["mp"])), path)
        elif m := LAYER.fullmatch(path):
            put(layers, (int(m["layer"]), int(m["tp"] or 0)), path)
        elif m := EXPERT.fullmatch(path):
            put(experts, (int(m["layer"]) if m["layer"] else -1, int(m["expert"]), int(m["mp"])), path)
        elif m := EXPERT_OPTIM.fullmatch(path):
            put(expert_optim, (int(m["ep"]), int(m["mp"])), path)
        elif m := UNIVERSAL.fullmatch(path):
            universal.setdefault(m["name"], {})[m["key"]] = path
    return CheckpointFiles(
        _sorted(model),
        _sorted(optim),
        _sorted(layers),
        _sorted(experts),
        _sorted(expert_optim),
        universal,
        tuple(twice),
    )


def is_checkpoint(listing: Iterable[str]) -> bool:
    """Return whether a folder holds files that only DeepSpeed writes."""
    return any(
        p.endswith(".pt") and (MODEL.fullmatch(p) or OPTIM.fullmatch(p) or UNIVERSAL.fullmatch(p))
        for p in listing
    )


def _sorted(rows: dict[_Key, str]) -> dict[_Key, str]:
    return {key: rows[key] for key in sorted(rows)}
