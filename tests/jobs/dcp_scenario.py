"""What one rank of a scenario of `torch.distributed.checkpoint` does: fill, save, load, rewrite, compare.

A scenario makes a state from a seed. Seed 1 is what torch saves, seed 2 what is filled. What must be there
after a load is the same state of seed 1, made on the mesh that loads: nothing is gathered, and no rank
needs a file of truths.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fresh_job import random_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import ckptcore
from ckptcore.conversion.pipeline import convert
from ckptcore.loading.load_into import stateful
from ckptcore.planning.request import Request
from ckptcore.topology.layout import Mesh, Replicate, Shard, TensorLayout, Topology, _StridedShard

SAVED, OTHER = 1, 2  # seeds
State = dict[str, Any]
Make = Callable[[int], State]
Load = Callable[[State, Path], object]


@dataclass
class Job:
    """One rank.

    Attributes:
        folder: The scenario's own, the same for all ranks.
        checks: What was compared, for the report.
    """

    name: str
    rank: int
    world: int
    folder: Path
    checks: list[str] = field(default_factory=list)

    def mesh(self, *sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A mesh of this job's ranks; without sizes all in one axis."""
        sizes = sizes or (self.world,)
        return init_device_mesh("cpu", sizes, mesh_dim_names=names or tuple("abc"[: len(sizes)]))

    def alone(self, act: Callable[[], object]) -> None:
        """The first rank does something, and the others wait."""
        if self.rank == 0:
            act()
        dist.barrier()

    def conforms(
        self,
        saved: Make,
        loaded: Make | None = None,
        *,
        rewritten: tuple[str, ...] = ("dcp", "mesh"),
        unused: Callable[[str], bool] = lambda name: False,
        **options: Any,
    ) -> Path:
        """torch saves; `load_into` and torch load; ckptcore writes it again, and torch loads that."""
        path = self.folder / "saved"
        dcp.save(saved(SAVED), checkpoint_id=path, **options)
        self.loads(path, loaded or saved, unused=unused)
        self.rewrites(path, loaded or saved, rewritten)
        return path

    def loads(
        self,
        path: Path,
        make: Make,
        *,
        by_torch: Load | None = None,
        unused: Callable[[str], bool] = lambda name: False,
        what: str = "",
        incomplete: bool = False,
        **options: Any,
    ) -> None:
        """`load_into` fills what torch's loader fills, bit for bit, and both what was saved.

        incomplete: the save does not say how many ranks wrote it, so that its shapes are unproven.
        """
        if incomplete:
            unproven = ckptcore.check(ckptcore.open(str(path)), level="bytes")
            assert {f.code for f in unproven.findings if f.severity == "error"} == {"unproven-shape"}
        manifest = ckptcore.open(str(path), allow_incomplete=incomplete)
        checked = ckptcore.check(manifest, level="bytes")
        assert checked.ok, checked
        ours, theirs = make(OTHER), make(OTHER)
        before = places(ours)
        left = ckptcore.load_into(manifest, ours, **options)
        unknown = [name for name in left if not unused(name)]
        assert not unknown, f"tensors of the checkpoint that the state does not have: {unknown}"
        assert places(ours) == before, "a tensor was replaced, not filled in place"
        (by_torch or load)(theirs, path)
        require_equal(ours, theirs, "what torch loads")
        require_equal(ours, make(SAVED), "what was saved")
        require_other(ours, make(OTHER))
        self.checks.append(what or "load_into equals torch's load")
        dist.barrier()

    def rewrites(
        self,
        path: Path,
        make: Make,
        kinds: tuple[str, ...],
        *,
        by_torch: Load | None = None,
        incomplete: bool = False,
    ) -> None:
        """ckptcore writes it again; torch loads that, and so does `load_into`."""
        for kind in kinds:
            target = self.folder / f"{path.name}-{kind}"
            self.alone(lambda target=target, kind=kind: REWRITES[kind](path, target, recover=incomplete))
            theirs = make(OTHER)
            (by_torch or load)(theirs, target)
            require_equal(theirs, make(SAVED), f"what was saved, from {target.name}")
            ours = make(OTHER)
            ckptcore.load_into(ckptcore.open(str(target)), ours)
            require_equal(ours, theirs, f"what torch loads, from {target.name}")
            self.checks.append(f"torch loads it as {kind}")
            dist.barrier()


def load(state: State, path: Path) -> None:
    """torch's loader."""
    dcp.load(state, checkpoint_id=path)


def known(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The full tensor of a name and seed; numbers that a model can train with."""
    shape = tuple(tensor.shape)
    maker = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        full = torch.rand(shape, generator=maker, dtype=torch.float64) + 0.01
        return full.to(tensor.dtype)
    return random_tensor(name, tensor.dtype, shape, seed)


def filled(state: State, seed: int, values: Callable[..., torch.Tensor] = known) -> State:
    """The same state; every tensor has got the values of its name, each rank its part."""
    for name, tensor in leaves(state, full=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        full = values(name, tensor, seed)
        with torch.no_grad():
            for part, at in parts(tensor):
                box = tuple(slice(a, a + n) for a, n in zip(at, part.shape, strict=True))
                part.copy_(full[box])
    return state


def parts(tensor: torch.Tensor) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """This rank's memory of a tensor, and where torch says it is."""
    if isinstance(tensor, ShardedTensor):
        return [(s.tensor, tuple(s.metadata.shard_offsets)) for s in tensor.local_shards()]
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "__create_chunk_list__"):
        chunks = local.__create_chunk_list__()
        return [(shard_at(local, c.offsets), tuple(c.offsets)) for c in chunks]
    if not isinstance(tensor, DTensor):
        return [(tensor, (0,) * tensor.ndim)]
    if tensor.device_mesh.get_coordinate() is None:
        return []
    _, at = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [(local, tuple(at))] if local.numel() else []


def shard_at(tensor: Any, offsets: torch.Size) -> torch.Tensor:
    """What a tensor with chunks of its own has at these offsets."""
    found: torch.Tensor = tensor.__get_tensor_shard__(MetadataIndex("", offsets))
    return found


def leaves(value: Any, path: str = "", *, full: bool = False) -> State:
    """Leaves by name; tensors are this rank's parts of them, or ``full`` as they are in the state."""
    if stateful(value) and not isinstance(value, (torch.Tensor, DTensor)):
        value = value.state_dict()
    if isinstance(value, Mapping):
        rows: Any = value.items()
    elif isinstance(value, (list, tuple)) and _entered(value):
        rows = enumerate(value)
    elif full:
        return {path: value}
    else:
        local = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(value, ShardedTensor) or hasattr(local, "__create_chunk_list__"):
            return {f"{path}#{n}": part for n, (part, _) in enumerate(parts(value))}
        return {path: local}
    found: State = {}
    for key, child in rows:
        found |= leaves(child, f"{path}.{key}" if path else str(key), full=full)
    return found


def _entered(value: Any) -> bool:
    return any(isinstance(v, (torch.Tensor, Mapping)) or (_is_sequence(v) and _entered(v)) for v in value)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def places(state: State) -> dict[str, int]:
    """Where each tensor is in memory; a state dict that is made at every call has no place."""
    own = {n: t for n, t in leaves(state).items() if isinstance(t, torch.Tensor) and not t.is_meta}
    second = leaves(state)
    return {n: t.data_ptr() for n, t in own.items() if second[n].data_ptr() == t.data_ptr()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    """Same type and bits."""
    if type(one) is not type(other) and not isinstance(one, torch.Tensor):
        return False
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(raw(one), raw(other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if hasattr(one, "__array_interface__"):
        return one.dtype == other.dtype and bool((one == other).all())
    return bool(one == other) or (one != one and other != other)


def require_equal(state: State, wanted: State, whose: str) -> None:
    a, b = leaves(state), leaves(wanted)
    assert a.keys() == b.keys(), f"other names than in {whose}: {sorted(a.keys() ^ b.keys())}"
    wrong = [f"{n}: {a[n]!r:.300}, not {b[n]!r:.300}" for n in a if not same(a[n], b[n])]
    assert not wrong, f"differs from {whose}:\n" + "\n".join(wrong[:5])


def require_other(state: State, untouched: State) -> None:
    """A load that does nothing would be found: a state of another seed is another."""
    a, b = leaves(state), leaves(untouched)
    tensors = [n for n in a if isinstance(a[n], torch.Tensor) and a[n].numel() > 1]
    assert not tensors or any(not same(a[n], b[n]) for n in tensors), "nothing was loaded"


def topology(source: Path, axes: tuple[tuple[str, int], ...], incomplete: bool) -> Topology:
    """Placements of every kind, chosen by name."""
    names = tuple(a for a, _ in axes)
    layouts = {}
    for t in ckptcore.open(str(source), allow_incomplete=incomplete).tensors:
        dims, number = len(t.shape), zlib.crc32(t.fqn.encode())
        if not dims:
            continue
        last = dims - 1
        choices: list[tuple[Any, ...]] = [
            (Shard(0), Shard(last)),
            (Replicate(), Shard(number % dims)),
            (Shard(last), Replicate()),
            (Shard(0), Shard(0)),
        ]
        if t.shape[0] % prod(n for _, n in axes) == 0:
            choices.append((_StridedShard(0, split_factor=axes[1][1]), Shard(0)))
        layouts[t.fqn] = TensorLayout(names, choices[number // 7 % len(choices)])
    return Topology(Mesh(axes), layouts)


def _written(source: Path, target: Path, made: Topology | None = None, **options: Any) -> None:
    convert(Request(str(source), str(target), **options), catalog_url=False, topology=made)


def _to_mesh(source: Path, target: Path, **options: Any) -> None:
    axes = (("x", 3), ("y", 2))
    made = topology(source, axes, options["recover"])
    _written(source, target, made, verb="reshard", to="dcp", mesh="fsdp=3,tp=2", **options)


def _to_file_and_back(source: Path, target: Path, **options: Any) -> None:
    """One file of torch.save, as torch's own tool reads it."""
    file = target.with_suffix(".pt")
    _written(source, file, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_save_to_dcp(file, target)


REWRITES: dict[str, Callable[..., None]] = {
    "dcp": lambda source, target, **options: _written(source, target, to="dcp", **options),
    "mesh": _to_mesh,
    "pt": _to_file_and_back,
    "hf": lambda source, target, **options: _written(source, target, to="safetensors", **options),
}


def report(job: Job, wrong: str) -> str:
    """What this rank says, as JSON."""
    return json.dumps({"wrong": wrong, "checks": job.checks})
