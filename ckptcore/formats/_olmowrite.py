"""Laying out a step folder of OLMo-core: the DCP folder, the trainer's state, and the marker behind them.

`.metadata` names torch's own storage class, which OLMo-core's
reader takes as it takes its own (olmo_core/distributed/checkpoint/filesystem.py), and plain torch too.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from ckptcore.formats._dcpwrite import arrange_folder
from ckptcore.formats._torchfile import torch_file
from ckptcore.formats.base import Arrangement, FileLayout, Literal, natural
from ckptcore.objects import TensorRef, decode, tensors_in

_TRAIN = "train."
_MOST_RANKS = 1 << 14
_RANK = re.compile(r"^rank(\d{1,9})\.(.+)$")


def arrange_step(request: Arrangement, *, folder: str, marker: str) -> tuple[FileLayout, ...]:
    """The files of a step. folder: where model and optimizer go. marker: the file written last."""
    train = [i for i, t in enumerate(request.tensors) if t.fqn.startswith(_TRAIN)]
    stored = [i for i, t in enumerate(request.tensors) if not t.fqn.startswith(_TRAIN)]
    objects = {k: v for k, v in request.objects.items() if not k.startswith(_TRAIN)}
    part = replace(request, tensors=[request.tensors[i] for i in stored], objects=objects)
    layouts = [
        replace(layout, tensors=tuple(stored[t] for t in layout.tensors))
        for layout in arrange_folder(part, folder=folder, commit=False)
    ]
    told = json.dumps({"ephemeral": False}).encode()
    return (*layouts, *_train(request, train),
            FileLayout(marker, len(told), (), (), (Literal(0, told),), commit=True))  # fmt: skip


def _train(request: Arrangement, tensors: list[int]) -> list[FileLayout]:
    """One file per rank of the job that saved it, as far as that is told."""
    leaves: dict[str, Any] = {request.tensors[i].fqn: TensorRef(request.tensors[i].fqn) for i in tensors}
    leaves |= {k: decode(v) for k, v in request.objects.items() if k.startswith(_TRAIN)}
    shared: dict[str, Any] = {}
    ranks: dict[int, dict[str, Any]] = {}
    for name in sorted(leaves, key=natural):
        below = name.removeprefix(_TRAIN)
        own = _RANK.match(below)
        if own:
            ranks.setdefault(int(own[1]), {})[own[2]] = leaves[name]
        else:
            shared[below] = leaves[name]
    if not shared and not ranks:
        return []
    number = {request.tensors[i].fqn: i for i in tensors}
    files = []
    world = shared.get("world_size")
    # A state that all ranks share is still one file each: a reader counts them.
    every = range(world) if type(world) is int and 0 < world <= _MOST_RANKS else ()
    for rank in sorted({0, *ranks, *every}):
        tree = _nested({**shared, **ranks.get(rank, {})})
        order = [number[ref] for ref in tensors_in(tree)]
        # OLMo-core's trainer loads it with weights_only=False: numpy's random state stays numpy.
        files.append(torch_file(f"train/rank{rank}.pt", tree, request.tensors, order))
    return files


def _nested(leaves: dict[str, Any]) -> Any:
    """Dotted names as a tree; a dict whose keys count from 0 was a list."""
    top: dict[str, Any] = {}
    for name, value in leaves.items():
        *parents, last = name.split(".")
        at = top
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
    return _lists(top)


def _lists(tree: Any) -> Any:
    if type(tree) is not dict:
        return tree
    if tree and list(tree) == [str(n) for n in range(len(tree))]:
        return [_lists(v) for v in tree.values()]
    return {k: _lists(v) for k, v in tree.items()}
