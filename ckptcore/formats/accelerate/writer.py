"""Lay out the folder of a job under Accelerate's FSDP, as `load_state` and the Trainer open it.

Models and optimizers are DCP folders, in which names begin with ``model`` and ``optimizer``, whatever their
number (accelerate/utils/fsdp_utils.py, save_fsdp_model, save_fsdp_optimizer). Schedulers, samplers and
scalers are torch files (accelerate/checkpointing.py, save_accelerator_state), and so is the random state of
each rank, where it is kept. `.metadata` of the first model comes last: the folder is recognised by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import TensorRef, decode, tensors_in
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.errors import UnsupportedFormat
from ckptcore.formats.base import Arrangement, FileLayout, Literal
from ckptcore.formats.common.join import renamed_tree
from ckptcore.formats.common.trees import built
from ckptcore.formats.dcp.writer import METADATA, arrange_folder
from ckptcore.formats.torch_save.layout import torch_file
from ckptcore.topology.layout import Topology

_ROLE = re.compile(r"(?P<kind>[a-z_]+?)(?:_(?P<number>\d+))?")
_FOLDERS = {"model": "pytorch_model_fsdp", "optimizer": "optimizer"}
_TRAINER = "trainer_state"  # of transformers' Trainer: its files have other suffixes
# Kind -> name of its file with a number, of its first file, and of the Trainer's.
_FILES = {
    "scheduler": ("scheduler_{}.bin", "scheduler.bin", "scheduler.pt"),
    "sampler": ("sampler_{}.bin", "sampler.bin", "sampler.bin"),
    "dl_state_dict": ("dl_state_dict_{}.bin", "dl_state_dict.bin", "dl_state_dict.bin"),
    "custom_checkpoint": ("custom_checkpoint_{}.pkl", "custom_checkpoint_0.pkl", "custom_checkpoint_0.pkl"),
    "scaler": ("scaler.pt", "scaler.pt", "scaler.pt"),
}
_OF_RANKS = {"random_states": "random_states_{}.pkl", "rng_state": "rng_state_{}.pth"}
_RANK = re.compile(r"(?P<key>.*)\.rank(?P<rank>\d+)")


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out all parts; raise `UnsupportedFormat` for a part that no file of Accelerate has."""
    names = [*(t.fqn for t in request.tensors), *request.objects]
    roles: dict[str, list[str]] = {}
    for name in names:
        roles.setdefault(name.partition(".")[0], []).append(name)
    world = 1 if request.topology is None else request.topology.mesh.size
    layouts: list[FileLayout] = []
    for role, inside in sorted(roles.items()):
        match = _ROLE.fullmatch(role)
        kind, number = (match["kind"], int(match["number"] or 0)) if match is not None else (role, 0)
        if kind in _FOLDERS:
            layouts += _folder(request, role, kind, number)
        elif kind in _FILES:
            which = 0 if number else 2 if _TRAINER in roles else 1
            layouts.append(_file(_FILES[kind][which].format(number), _tree(request, inside), request.tensors))
        elif kind in _OF_RANKS:
            layouts += _of_ranks(request, inside, _OF_RANKS[kind], world)
        elif role == _TRAINER and inside == [role]:
            data = canonical_json(decode(request.objects[role]))
            layouts.append(FileLayout(f"{role}.json", len(data), (), (), (Literal(0, data),)))
        else:
            raise UnsupportedFormat(
                f"cannot write {inside[0]}: no file of Accelerate has it",
                hint=f"leave it out with --exclude '{role}*'",
            )
    last = f"{_FOLDERS['model']}_0/{METADATA}"
    return (
        *(x for x in layouts if x.path != last),
        *(replace(x, commit=True) for x in layouts if x.path == last),
    )


def _folder(request: Arrangement, role: str, kind: str, number: int) -> Iterator[FileLayout]:
    """Yield the files of a model or an optimizer, under the names that it has in its own folder."""

    def inner(name: str) -> str:
        return kind + name.removeprefix(role)

    stored = [i for i, t in enumerate(request.tensors) if _is_of(t.fqn, role)]
    specs = [request.tensors[i] for i in stored]
    topology = request.topology
    if topology is not None:
        layouts = {inner(t.fqn): topology.layout(t.fqn) for t in specs}
        topology = Topology(topology.mesh, layouts)
    part = replace(
        request,
        tensors=[TensorSpec(inner(t.fqn), t.dtype, t.shape) for t in specs],
        objects={inner(k): renamed_tree(v, inner) for k, v in request.objects.items() if _is_of(k, role)},
        paths={inner(n): (kind, *p[1:]) for n, p in request.paths.items() if _is_of(n, role)},
        order=[inner(name) for name in request.order if _is_of(name, role)],
        topology=topology,
    )
    for layout in arrange_folder(part, folder=f"{_FOLDERS[kind]}_{number}", commit=False):
        yield replace(layout, tensors=tuple(stored[t] for t in layout.tensors))


def _is_of(name: str, role: str) -> bool:
    return name == role or name.startswith(f"{role}.")


def _tree(request: Arrangement, names: Sequence[str]) -> dict[Any, Any]:
    """Return the content of a torch file, whose keys are those below its role."""
    paths = (request.paths.get(name, tuple(name.split(".", 1)))[1:] for name in names)
    return built((name, path, _value(request, name)) for name, path in zip(names, paths, strict=True))


def _value(request: Arrangement, name: str) -> Any:
    return decode(request.objects[name]) if name in request.objects else TensorRef(name)


def _of_ranks(request: Arrangement, names: Sequence[str], pattern: str, world: int) -> Iterator[FileLayout]:
    """Yield the file of each rank: what is its own, and what all have."""
    common = [name for name in names if _RANK.fullmatch(name) is None]
    rank_names: dict[int, dict[str, str]] = {}
    for name in names:
        if (match := _RANK.fullmatch(name)) is not None:
            rank_names.setdefault(int(match["rank"]), {})[match["key"].partition(".")[2]] = name
    for rank in range(max(world, max(rank_names, default=-1) + 1)):
        tree = _tree(request, common)
        tree |= {key: _value(request, name) for key, name in rank_names.get(rank, {}).items()}
        yield _file(pattern.format(rank), tree, request.tensors)


def _file(path: str, tree: Mapping[Any, Any], tensors: Sequence[TensorSpec]) -> FileLayout:
    inside = set(tensors_in(tree))
    order = [i for i, spec in enumerate(tensors) if spec.fqn in inside]
    return torch_file(path, tree, tensors, order, classes=Classes.LIBRARIES)
