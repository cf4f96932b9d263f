"""Lay out a step folder of OLMo-core: the DCP folder, the trainer's state, and the marker after them.

`.metadata` names torch's storage class, which both OLMo-core's reader
(olmo_core/distributed/checkpoint/filesystem.py) and plain torch accept. For a mesh all ranks share the DCP
folder; a rank without its own `train/rank{R}.pt` loads that of rank 0 (olmo_core/train/checkpoint.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from ckptcore.core.object_tree import TensorRef, decode, tensors_in
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.errors import UnsupportedFormat
from ckptcore.formats.base import Arrangement, FileLayout, Literal, natural
from ckptcore.formats.common.trees import leaves_below
from ckptcore.formats.dcp.writer import arrange_folder
from ckptcore.formats.olmo.common import CONFIG, DCP, MARKER
from ckptcore.formats.torch_save.layout import torch_file

PREFIX = "train."
_MOST_RANKS = 1 << 14
_RANK = re.compile(r"^rank(\d{1,9})\.(.+)$")
WORLD = f"{PREFIX}world_size"
_RANDOM = re.compile(rf"{re.escape(PREFIX)}(rank\d+\.)?rng(\.|$)")


def train_files(request: Arrangement, classes: Classes) -> list[FileLayout]:
    """Lay out a file per rank of the job that saved it, as far as recorded; each has the shared values.

    Args:
        request: The tensors and objects of the output.
        classes: Whose classes the files may name, as the format's layout declares.

    Raises:
        UnsupportedFormat: The names do not nest.
    """
    leaves: dict[str, Any] = {t.fqn: TensorRef(t.fqn) for t in request.tensors if t.fqn.startswith(PREFIX)}
    for key in request.objects:
        if key.startswith(PREFIX):
            inside = leaves_below(decode(request.objects[key]), key, TensorRef)
            leaves |= {path: leaf for path, _, leaf in inside}
    shared: dict[str, Any] = {}
    ranks: dict[int, dict[str, Any]] = {}
    for name in sorted(leaves, key=natural):
        below = name.removeprefix(PREFIX)
        match = _RANK.match(below)
        if match:
            ranks.setdefault(int(match[1]), {})[match[2]] = leaves[name]
        else:
            shared[below] = leaves[name]
    if not shared and not ranks:
        return []
    number = {t.fqn: i for i, t in enumerate(request.tensors)}
    world = shared.get("world_size")
    # A state that all ranks share still needs a file per rank: a reader counts them.
    all_ranks = range(world) if type(world) is int and 0 < world <= _MOST_RANKS else ()
    files = []
    for rank in sorted({0, *ranks, *all_ranks}):
        tree = _nested_tree({**shared, **ranks.get(rank, {})})
        order = [number[ref] for ref in tensors_in(tree)]
        # The trainers load it with weights_only=False, so numpy's random state stays numpy.
        files.append(torch_file(f"train/rank{rank}.pt", tree, request.tensors, order, classes=classes))
    return files


def _nested_tree(leaves: dict[str, Any]) -> Any:
    """Return the tree of dotted names. A value that was stored as one stays as it is, whatever its keys."""
    top: dict[str, Any] = {}
    dict_ids = {id(top)}  # dicts made from names; nothing is added to values
    for name, value in leaves.items():
        *parents, last = name.split(".")
        node = top
        for part in parents:
            if part not in node:
                node[part] = {}
                dict_ids.add(id(node[part]))
            node = node[part]
            if id(node) not in dict_ids:
                break
        if id(node) not in dict_ids or last in node:
            raise UnsupportedFormat(
                f"cannot write {PREFIX}{name}: it is inside another value",
                hint=f"leave one out: --exclude '{PREFIX}{name}'",
            )
        node[last] = value
    return _lists(top, dict_ids)


def _lists(tree: Any, dict_ids: set[int]) -> Any:
    """Return the tree with lists in place of dicts made from names 0, 1, 2, ..."""
    if id(tree) not in dict_ids:
        return tree
    if tree and list(tree) == [str(n) for n in range(len(tree))]:
        return [_lists(v, dict_ids) for v in tree.values()]
    return {k: _lists(v, dict_ids) for k, v in tree.items()}


def arrange_step(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out the files of a step."""
    stored = [i for i, t in enumerate(request.tensors) if not t.fqn.startswith(PREFIX)]
    objects = {k: v for k, v in request.objects.items() if not k.startswith(PREFIX)}
    part = replace(request, tensors=[request.tensors[i] for i in stored], objects=objects)
    layouts = [
        replace(layout, tensors=tuple(stored[t] for t in layout.tensors))
        for layout in arrange_folder(part, folder=DCP, commit=False)
    ]
    data = json.dumps({"ephemeral": False}).encode()
    return (
        *layouts,
        *train_files(_without_world_size(request), Classes.LIBRARIES),
        FileLayout(MARKER, len(data), (), (), (Literal(0, data),), commit=True),
    )


def arrange_start(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out a step that a run begins from: weights, and the model's config in front of the marker.

    A trainer loads it with ``load_trainer_state=False``.
    """
    objects = {k: v for k, v in request.objects.items() if k != CONFIG}
    *layouts, last = arrange_step(replace(request, objects=objects))
    data = json.dumps(decode(request.objects[CONFIG]), indent=2).encode()
    return (*layouts, FileLayout(f"{CONFIG}.json", len(data), (), (), (Literal(0, data),)), last)


def _without_world_size(request: Arrangement) -> Arrangement:
    """Set the world size of a mesh to 0 where the trainer's state has no random states.

    A trainer restores them when ``world_size`` is its own (olmo_core/train/trainer.py, load_state_dict), and
    fails where they are missing.
    """
    if request.topology is None or WORLD not in request.objects:
        return request
    if any(_RANDOM.match(key) for key in request.objects):
        return request
    return replace(request, objects={**request.objects, WORLD: 0})
