"""Define which writers shard for the ranks of a mesh, for which meshes, and by which rules.

Rules are made here for names of any kind, so that every checkpoint can be cut for every mesh: by the names of
its parameters, as TOML of `ckptcore reshard --sharding`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import gaps

import ckptcore
from ckptcore.comparison.result import Difference
from ckptcore.core.manifest import Manifest
from ckptcore.core.subset import select
from ckptcore.errors import CkptError, UnprovenCheckpoint, UnsupportedDtype, UnsupportedFormat, UsageError
from ckptcore.naming.optimizer_state import parameters
from ckptcore.planning.request import Settings
from ckptcore.topology.layout import Mesh, boxes
from ckptcore.topology.mesh_spec import parse_mesh
from ckptcore.topology.rules import ShardingRule, place

# Checkpoints of tests are small: one thread, a small budget.
SETTINGS = Settings(workers=1, memory=64 << 20)
MESHES = (
    "fsdp=1",
    "fsdp=2",
    "fsdp=3",
    "fsdp=4",
    "fsdp=8",
    "fsdp=2,tp=2",
    "dp_replicate=2,fsdp=2",
    "fsdp=2,tp=2,pp=2",
)
# What safetensors has no name for, and what OLMo-core 0.1 has none for beside.
_NOT_IN_SAFETENSORS = ("complex32", "complex128")
_NOT_IN_OLMO = (
    *_NOT_IN_SAFETENSORS,
    "complex64",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


@dataclass(frozen=True, slots=True)
class Writer:
    """How one format is written for a mesh.

    to: its name. options: of the request. lacks: dtypes that it has no name for. objects: whether it takes
    values of any name. own: whether it takes checkpoints of its own kind alone.
    """

    to: str
    options: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    objects: bool = True
    own: bool = False


WRITERS: dict[str, Writer] = {
    "dcp": Writer("dcp"),
    "dcp-safetensors": Writer("dcp", {"serialization": "safetensors"}, _NOT_IN_SAFETENSORS),
    "torch_ranks": Writer("torch_ranks"),
    "olmo_core": Writer("olmo_core"),
    "olmo_v01": Writer("olmo_v01", lacks=_NOT_IN_OLMO, objects=False),
    "torch_dist": Writer("torch_dist"),
    "lightning": Writer("lightning", own=True),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One reshard: what it left out by a rule, by name."""

    folder: Path
    dropped: frozenset[str]


def reshard(
    source: Path, target: Path, writer: Writer, mesh: str, sharding: str | None = None, **options: Any
) -> Step:
    """Writes a checkpoint for the ranks of a mesh, by the built-in rules where none are given."""
    options |= {"verb": "reshard", "to": writer.to, "mesh": mesh, "sharding": sharding, **writer.options}
    planned = ckptcore.plan(str(source), str(target), **options).plan
    ckptcore.convert(str(source), str(target), settings=SETTINGS, **options)
    return Step(target, frozenset(name for name, _ in planned.dropped))


def cut(source: Path, target: Path, writer: Writer, mesh: str) -> Step:
    """The same, by rules made from the names where the built-in ones do not speak of them."""
    try:
        return reshard(source, target, writer, mesh)
    except UsageError as error:
        if not re.search(r"no rule in .* parameters|parameters? fit|no pipeline stage", error.message):
            raise
    rules = plain_rules(ckptcore.open(str(source)), parse_mesh(mesh))
    return reshard(source, target, writer, mesh, rules)


def unlike(found: Difference, dropped: frozenset[str]) -> list[str]:
    """What two checkpoints differ in, but for what was left out by a rule that names it."""
    gone = re.compile("|".join(re.escape(n) for n in dropped) or "(?!)")
    out = [f"{t.name}: {', '.join(t.what)}" for t in found.tensors if t.name not in dropped]
    for row in found.objects:
        hit = gone.match(row.name)
        if not (hit and (hit.end() == len(row.name) or row.name[hit.end()] in "./")):
            out.append(f"{row.name}: {row.what} {row.a} {row.b}".rstrip())
    return out


def plain_rules(manifest: Manifest, mesh: Mesh) -> str:
    """Rules for these names: fsdp cuts dim 0, tp the last dim that it divides; layers by the first number."""
    rows = []
    shapes = parameters(manifest, None)[0]
    tp = dict(mesh.axes).get("tp", 1)
    for name, shape in shapes.items():
        dims = [d for d in range(1, len(shape)) if shape[d] % tp == 0]
        rows.append((name, {"tp": dims[-1]} if dims else {}))
    return _text(rows, list(shapes))


def random_rules(manifest: Manifest, mesh: Mesh, rng: Random, out: Collection[str] = ()) -> str:
    """Rules for these names, every parameter in its own way: any dims, strided, replicated, several axes.

    out: names that the request leaves out."""
    sizes = dict(mesh.axes)
    rows = [n for n, t in enumerate(manifest.tensors) if t.fqn not in out]
    manifest = select(manifest, rows, [manifest.tensors[n].fqn for n in rows])
    shapes = parameters(manifest, None)[0]
    rules = [(name, _random_rule(shape, mesh, sizes, rng)) for name, shape in shapes.items()]
    rng.shuffle(rules)
    return _text(rules, list(shapes), rng)


def _random_rule(shape: tuple[int, ...], mesh: Mesh, sizes: dict[str, int], rng: Random) -> dict[str, Any]:
    """The first of a few guesses that torch can cut."""
    dims: list[int | None] = [None, *range(-len(shape), len(shape))] if shape else [None]
    for _ in range(12):
        dim_of: dict[str, Any] = {
            a: rng.choice(dims) for a in ("fsdp", "tp", "ep") if a in sizes and rng.random() < 0.8
        }
        if dim_of.get("ep") is not None and shape[dim_of["ep"]] % sizes["ep"]:  # experts are never cut
            continue
        rule = ShardingRule.model_validate({"fqn": "*"} | {a: _place(d) for a, d in dim_of.items()})
        try:
            layout = place("", shape, mesh, rule)
            boxes(shape, mesh.along(layout.axes), layout.placements)
        except UsageError:
            continue
        return dim_of
    return {"fsdp": None}


def random_mesh(rng: Random, most: int = 12) -> str:
    """A mesh of random axes with random sizes, at most so many ranks."""
    while True:
        axes = rng.sample(["pp", "dp_replicate", "fsdp", "ep", "tp"], rng.randint(1, 3))
        sizes = [rng.choice([1, 2, 2, 3, 4, 5]) for _ in axes]
        if prod(sizes) <= most:
            return ",".join(f"{a}={n}" for a, n in zip(axes, sizes, strict=True))


def glob_of(name: str) -> str:
    """A glob that matches this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _place(dim: int | None) -> str:
    return "replicate" if dim is None else f"shard({dim})"


def _text(rows: list[tuple[str, dict[str, Any]]], names: list[str], rng: Random | None = None) -> str:
    """TOML of rules, and of stages: layers by the commonest beginning that a number follows."""
    lines = []
    for name, dim_of in rows:
        lines += ["[[rule]]", f"fqn = {_quoted(glob_of(name))}"]
        lines += [f'{axis} = "{_place(dim)}"' for axis, dim in dim_of.items()]
    heads = [m[0] for n in names if (m := re.match(r"[^0-9*?]*(?=[0-9]{1,6}(?![0-9]))", n))]
    head = max(sorted({*heads}), key=heads.count, default=None)
    layers = [n for n in names if head is not None and re.match(re.escape(head) + r"[0-9]{1,6}(?![0-9])", n)]
    rest = [n for n in names if n not in layers]
    first = rest[: len(rest) // 2] if rng is None else [n for n in rest if rng.random() < 0.5]
    lines += ["[stages]"] + ([f"layers = {_quoted(head + '{n}')}"] if head is not None else [])
    lines += [f"first = {_globs(first)}", f"last = {_globs([n for n in rest if n not in first])}"]
    return "\n".join(lines) + "\n"


def _globs(names: list[str]) -> str:
    return f"[{', '.join(_quoted(glob_of(n)) for n in names)}]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def impossible(error: CkptError, writer: Writer, manifest: Manifest) -> bool:
    """Return whether the error names a limit of the format, the mesh or the checkpoint."""
    if isinstance(error, UnsupportedDtype):
        return any(t.dtype in writer.lacks for t in manifest.tensors)
    if isinstance(error, UnprovenCheckpoint):  # optimizers by number, of a checkpoint that has lost the order
        return writer.to == "torch_ranks" and "nothing proves the order of group" in error.message
    if isinstance(error, UnsupportedFormat):
        reasons = ("in a list, and not every rank has it", "whose optimizers number their parameters")
        other = writer.own and manifest.format != writer.to
        return (
            other or any(r in error.message for r in reasons) or bool(manifest.blobs and not writer.objects)
        )
    return error.exit_code == 2 and bool(re.search(r"[0-9]", error.message))


def restated(row: str, *writers: str) -> bool:
    """Return whether `gaps.RESTATED` has a row of a difference for one of these writers."""
    name, what = row.split(": ", 1)
    return any(
        fnmatchcase(name, glob) and what.split()[0] in kinds
        for writer, glob, kinds, _ in gaps.RESTATED
        if writer in writers
    )
