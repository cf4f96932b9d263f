"""A small training job that saves random shapes, meshes, names and dtypes with torch.

Run as a program: ``fresh_job.py SEED FOLDER [--ranks N] [--cases N]``. Forks N gloo ranks, which
together write ``FOLDER/<case>/ckpt`` with torch.distributed.checkpoint; the first rank writes
``FOLDER/<case>/truth.pt``, the whole tensors as they were before they were sharded.
"""

from __future__ import annotations

import argparse
import json
import os
import string
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
NOT_IN_SAFETENSORS = (torch.complex128,)
LETTERS = string.ascii_letters + string.digits + "_-äß漢字🙂 /%'\"\\{}[]\u202e"


def random_tensor(name: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits of a dtype: every byte tells its place."""
    count = torch.Size(shape).numel()
    maker = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    if dtype == torch.bool:
        raw = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=maker)
    else:
        size = count * dtype.itemsize
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=maker)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def picked(full: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The elements of `full` at the flat indices, any dtype: by bytes, never by value."""
    if index.numel() == 0:
        return torch.empty(index.shape, dtype=full.dtype)
    rows = full.reshape(-1).view(torch.uint8).reshape(-1, full.dtype.itemsize)
    return rows[index.reshape(-1)].reshape(-1).view(full.dtype).reshape(index.shape)


def pieces(index: torch.Tensor, dim: int, parts: int) -> list[torch.Tensor]:
    """torch.chunk, with empty parts at the end where the dim is too short."""
    found = list(torch.chunk(index, parts, dim))
    empty = index.narrow(dim, 0, 0)
    return found + [empty] * (parts - len(found))


def local_index(index: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> torch.Tensor:
    """This rank's elements, by the rule of tensor parallelism: plain shards cut first, from the
    outer axis to the inner; strided shards cut what is left."""
    for strided in (False, True):
        for axis, placement in enumerate(placements):
            if isinstance(placement, _StridedShard) == strided and not placement.is_replicate():
                parts = pieces(index, placement.dim, mesh.size(axis))
                index = parts[mesh.get_local_rank(axis)]
    return index


def sharded(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], transpose: bool) -> DTensor:
    """A DTensor of `full` whose local part is cut by index."""
    index = torch.arange(full.numel()).reshape(full.shape)
    local = picked(full, local_index(index, mesh, placements))
    if transpose and local.dim() == 2 and local.numel():
        local = local.t().contiguous().t()
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=stride)


def several_shards(full: torch.Tensor, rng: Random) -> Any:
    """A ShardedTensor with rows cut at random places, several shards a rank."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as Piece

    world, rank = dist.get_world_size(), dist.get_rank()
    cuts = sorted(
        rng.sample(range(1, full.shape[0]), min(full.shape[0] - 1, rng.randint(world, max(world, 6))))
    )
    bounds = list(zip([0, *cuts], [*cuts, full.shape[0]], strict=True))
    owners = [i % world for i in range(len(bounds))]
    mine = []
    for (start, stop), owner in zip(bounds, owners, strict=True):
        if owner == rank:
            offsets = [start] + [0] * (full.dim() - 1)
            sizes = [stop - start, *full.shape[1:]]
            where = ShardMetadata(offsets, sizes, placement=f"rank:{rank}/cpu")
            index = torch.arange(full.numel()).reshape(full.shape)[start:stop]
            mine.append(Piece(picked(full, index), where))
    return sharded_tensor.init_from_local_shards(mine, *full.shape)


def placed(full: torch.Tensor, rng: Random, meshes: dict[str, DeviceMesh]) -> tuple[Any, str]:
    """The tensor in some distributed form, the same decision on every rank; and its name."""
    kind = rng.choice(["plain", "replicate", "one", "one", "two", "two", "strided", "hsdp", "shards"])
    dims, transpose = full.dim(), rng.random() < 0.3
    if kind == "shards" and dims and full.shape[0] >= 2 and full.numel():
        return several_shards(full, rng), kind
    if kind == "plain" or (not dims and kind != "replicate"):
        plain = full.t().contiguous().t() if transpose and dims == 2 else full
        return plain, "plain"
    if kind == "replicate":
        return sharded(full, meshes["one"], (Replicate(),), transpose), kind
    if kind == "one" or "two" not in meshes:
        return sharded(full, meshes["one"], (Shard(rng.randrange(dims)),), transpose), "one"
    mesh = meshes["two"]
    places: dict[str, tuple[Any, Any]] = {
        "two": (Shard(rng.randrange(dims)), Shard(rng.randrange(dims))),
        "hsdp": (Replicate(), Shard(rng.randrange(dims))),
        "strided": (_StridedShard(0, split_factor=mesh.size(1)), Shard(0)),
    }
    # On more than 2 x 2 ranks torch 2.13 itself tells other chunks of uneven rows than it stores.
    uneven = mesh.size() > 4 and full.shape[0] % mesh.size() != 0
    chosen = places["two"] if kind == "strided" and uneven else places.get(kind, places["two"])
    return sharded(full, mesh, chosen, transpose), f"{kind}{chosen}"


def random_state(
    rng: Random, seed: int, meshes: dict[str, DeviceMesh], *, safetensors: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """A state dict as a job holds it, the truth by flattened key, and what each key is."""
    state: dict[str, Any] = {}
    truth: dict[str, Any] = {}
    made: dict[str, str] = {}
    for number in range(rng.randint(4, 24)):
        name = f"{number}" + "".join(rng.choice(LETTERS) for _ in range(rng.randint(0, 12)))
        if rng.random() < 0.5:
            name = f"layers.{number}.{name}"
        dtype = rng.choice([d for d in DTYPES if not safetensors or d not in NOT_IN_SAFETENSORS])
        shape = tuple(rng.choice([0, 1, 2, 3, 5, 7, 16, 33]) for _ in range(rng.randint(0, 4)))
        if rng.random() < 0.8:
            shape = tuple(n or 4 for n in shape)
        full = random_tensor(name, dtype, shape, seed)
        value, how = placed(full, rng, meshes)
        if safetensors and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            value = value.contiguous()
        if safetensors and isinstance(value, DTensor):
            local = value.to_local().contiguous()
            stride = torch.empty(full.shape, device="meta").stride()
            value = DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=full.shape, stride=stride
            )
        path = rng.choice([("model",), ("optim", "state", f"p{number}"), ("lists",), ()])
        node = state
        for key in path:
            node = node.setdefault(key, {})
        node[name] = value
        truth[".".join((*path, name))] = full
        made[".".join((*path, name))] = f"{dtype} {shape} {how}"
    objects = {
        "step": rng.randint(0, 9),
        "lr": rng.random(),
        "name": "Ünï",
        "none": None,
        "betas": [0.9, 0.95],
        "flag": True,
        "big": 1 << 70,
    }
    for key, thing in rng.sample(sorted(objects.items()), rng.randint(0, len(objects))):
        state.setdefault("extra", {})[key] = thing
        truth[f"extra.{key}"] = thing
    if rng.random() < 0.5:
        row = [random_tensor(f"row{i}", torch.float32, (3, i), seed) for i in range(3)]
        state["row"] = [*row, 5]
        truth |= {f"row.{i}": t for i, t in enumerate([*row, 5])}
    return state, truth, made


def trained_model(
    rng: Random, seed: int, meshes: dict[str, DeviceMesh]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """A real FSDP2 model after one step of AdamW; the truth is what torch gathers."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    widths = [rng.choice([3, 5, 8, 17]) for _ in range(rng.randint(2, 4))]
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(widths)]
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(widths[-1]))
    model = model.to(rng.choice([torch.float32, torch.bfloat16]))
    mesh = meshes[rng.choice(sorted(meshes))]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, widths[0], dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optim": moments}
    truth: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, child in node.items():
                walk(child, f"{path}.{key}" if path else str(key))
        elif isinstance(node, torch.Tensor):
            truth[path] = node.full_tensor() if isinstance(node, DTensor) else node.clone()
        elif isinstance(node, list) and any(isinstance(n, (dict, torch.Tensor)) for n in node):
            for i, child in enumerate(node):
                walk(child, f"{path}.{i}")
        elif isinstance(node, (int, float, str, bool)):
            truth[path] = node

    walk(state, "")
    return state, truth, dict.fromkeys(truth, "fsdp2")


def write(rng: Random, seed: int, folder: Path, meshes: dict[str, DeviceMesh]) -> None:
    """One case: state, writer options and save, the same decisions on every rank."""
    safetensors = rng.random() < 0.15
    options: dict[str, Any] = {
        "single_file_per_rank": rng.random() < 0.7,
        "thread_count": rng.choice([1, 1, 2, 3]),
    }
    zstd = not safetensors and rng.random() < 0.2
    local = not safetensors and rng.random() < 0.15
    crc = rng.random() < 0.85
    if not crc:
        options["thread_count"] = 1  # torch keeps that option for the thread that has set it
    # torch prefers an old .metadata to new rank-local metadata: never both in one folder.
    leftovers = not local and rng.random() < 0.2
    lowest = rng.random() < 0.3
    make: Callable[..., Any] = (
        partial(trained_model, rng, seed, meshes)
        if rng.random() < 0.2
        else partial(random_state, rng, seed, meshes, safetensors=safetensors)
    )
    state, truth, made = make()
    if safetensors:
        from torch.distributed.checkpoint.filesystem import SerializationFormat  # torch 2.8

        options["serialization_format"] = SerializationFormat.SAFETENSORS
        if any(how.endswith("shards") for how in made.values()):
            options.pop("serialization_format")  # torch loses shards of one rank there
    if zstd:
        options["_extensions"] = [ZStandard()]
    path = folder / "ckpt"
    if leftovers:
        old = {"old": torch.full((97, 3), 7.0), "older": list(range(9))}
        dcp.save(old, storage_writer=FileSystemWriter(path, thread_count=3))
    torch.serialization.set_crc32_options(crc)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    dcp.save(
        state, storage_writer=FileSystemWriter(path, **options), planner=planner, use_collectives=not local
    )
    torch.serialization.set_crc32_options(True)
    if dist.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")
        job = {
            "options": {k: str(v) for k, v in options.items()},
            "rank-local": local,
            "crc": crc,
            "leftovers": leftovers,
            "ranks": dist.get_world_size(),
            "keys": made,
        }
        (folder / "job.json").write_text(json.dumps(job, indent=1, ensure_ascii=False))


def rank_main(rank: int, world: int, seed: int, cases: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    meshes = {"one": init_device_mesh("cpu", (world,), mesh_dim_names=("all",))}
    if world % 2 == 0:
        meshes["two"] = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
    for case in range(cases):
        here = folder / f"{seed}-{case}"
        if rank == 0:
            here.mkdir()
        dist.barrier()
        write(Random(f"{seed}/{case}"), seed * 1000 + case, here, meshes)
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--cases", type=int, default=4)
    given = parser.parse_args()
    world = given.ranks or Random(given.seed).choice([1, 2, 3, 4, 4])
    start_ranks(rank_main, (world, given.seed, given.cases, given.folder.resolve()), world)


if __name__ == "__main__":
    main()
