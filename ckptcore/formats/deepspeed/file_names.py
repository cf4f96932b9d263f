"""Sort the files of a DeepSpeed checkpoint folder by kind and rank.

deepspeed/runtime/engine.py (0.19.8): `_get_ckpt_name`, `_get_optimizer_ckpt_name`, `_get_expert_ckpt_name`;
deepspeed/runtime/pipe/module.py: `ckpt_layer_path`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
# Field of `CheckpointFiles`, its names, and the number recorded for one that a name lacks.
_KINDS = (
    ("model", MODEL, -1),
    ("optim", OPTIM, -1),
    ("layers", LAYER, 0),
    ("experts", EXPERT, -1),
    ("expert_optim", EXPERT_OPTIM, -1),
)


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

    model: Mapping[tuple[int, int], str]
    optim: Mapping[tuple[int, int], str]
    layers: Mapping[tuple[int, int], str]
    experts: Mapping[tuple[int, int, int], str]
    expert_optim: Mapping[tuple[int, int], str]
    universal: Mapping[str, Mapping[str, str]]
    twice: tuple[tuple[str, str], ...]


def files_of(listing: Iterable[str]) -> CheckpointFiles:
    """Sort the paths of a folder; paths that are no file of DeepSpeed are left out."""
    rows: dict[str, dict[Any, str]] = {kind: {} for kind, *_ in _KINDS}
    universal: dict[str, dict[str, str]] = {}
    twice: list[tuple[str, str]] = []
    for path in listing:
        if not path.endswith(".pt"):
            continue
        for kind, pattern, default in _KINDS:
            if m := pattern.fullmatch(path):
                key = tuple(default if number is None else int(number) for number in m.groups())
                # `mp_rank_0` beside `mp_rank_00`; a run in float16 beside one in bfloat16, with a prefix.
                if key in rows[kind]:
                    twice.append((rows[kind][key], path))
                rows[kind][key] = path
                break
        else:
            if m := UNIVERSAL.fullmatch(path):
                universal.setdefault(m["name"], {})[m["key"]] = path
    in_order = {kind: {key: paths[key] for key in sorted(paths)} for kind, paths in rows.items()}
    return CheckpointFiles(**in_order, universal=universal, twice=tuple(twice))


def is_checkpoint(listing: Iterable[str]) -> bool:
    """Return whether a folder holds files that only DeepSpeed writes."""
    return any(
        p.endswith(".pt") and (MODEL.fullmatch(p) or OPTIM.fullmatch(p) or UNIVERSAL.fullmatch(p))
        for p in listing
    )
