"""Laying out ``train/rank{R}.pt``: the trainer's state, a file a rank."""

from __future__ import annotations

import re
from typing import Any

from ckptcore.errors import UnsupportedFormat
from ckptcore.formats._torchfile import torch_file
from ckptcore.formats._trees import leaves_below
from ckptcore.formats.base import Arrangement, FileLayout, natural
from ckptcore.objects import TensorRef, decode

_RANK = re.compile(r"^train\.rank(\d{1,9})\.(.+)$")


def train_files(request: Arrangement) -> list[FileLayout]:
    """A file a rank of which there is anything below ``train.``; shared values are in each."""
    names = [t.fqn for t in request.tensors if t.fqn.startswith("train.")]
    leaves: dict[str, Any] = {n: TensorRef(n) for n in names}
    for key in request.objects:
        if key.startswith("train."):
            inside = leaves_below(decode(request.objects[key]), key, TensorRef)
            leaves |= {path: leaf for path, _, leaf in inside}
    if not leaves:
        return []
    ranks = {int(m[1]) for n in leaves if (m := _RANK.match(n))} or {0}
    position = {t.fqn: i for i, t in enumerate(request.tensors)}
    layouts = []
    for rank in sorted(ranks):
        tree: dict[str, Any] = {}
        order: list[int] = []
        for name in sorted(leaves, key=natural):
            m = _RANK.match(name)
            if m and int(m[1]) != rank:
                continue
            _put(tree, (m[2] if m else name[6:]).split("."), leaves[name], name)
            if isinstance(leaves[name], TensorRef):
                order.append(position[leaves[name].fqn])
        layouts.append(torch_file(f"train/rank{rank}.pt", tree, request.tensors, order))
    return layouts


def _put(tree: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if type(tree) is not dict:
            raise UnsupportedFormat(f"{name} lies inside another value", hint=f"--exclude '{name}'")
    tree[path[-1]] = value
