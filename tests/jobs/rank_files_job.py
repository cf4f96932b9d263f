"""A job that loads its ranks' files: torch.load on every rank, then whole tensors against the truth.

Run as a program: ``rank_files_job.py FOLDER``. Every FOLDER/MESH, as in ``fsdp=2,tp=2``, is loaded by that
many gloo ranks; what failed is printed.

- MESH/ckpt: the files. MESH/truth.pt: name -> whole tensor. MESH/placements.pt: name -> (mesh axes,
  placements, stages), for those that must be distributed. MESH/builtin: the same again.
- MESH/trained.pt: a model and an optimizer, resumed from the files in MESH/resumed as verl does.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import start_ranks
from ranks_job import Model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

GATHERED = (torch.float32, torch.bfloat16, torch.int64)  # dtypes that gloo can gather


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def narrowed(full: torch.Tensor, part: DTensor) -> torch.Tensor:
    shape, offset = compute_local_shape_and_global_offset(full.shape, part.device_mesh, part.placements)
    for dim, (n, at) in enumerate(zip(shape, offset, strict=True)):
        full = full.narrow(dim, min(at, full.shape[dim]), n)
    return full


def same_mesh(found: DeviceMesh, wanted: DeviceMesh) -> None:
    """What a mesh pickles is what torch pickles of its own."""
    assert found == wanted
    assert hash(found) == hash(wanted)
    a, b = found.__getstate__(), wanted.__getstate__()
    assert a.keys() == b.keys()
    for key in a.keys() - {"_hash", "_rank_map", "_root_mesh", "_flatten_mapping"}:
        assert a[key] == b[key], (key, a[key], b[key])
    assert equal(a["_rank_map"], b["_rank_map"])


def part_of(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The mesh of some axes; ``a+b`` is two as one."""
    joined = [a for a in axes if "+" in a]
    for axis in joined:
        name = axis.replace("+", "_")
        if name not in mesh._flatten_mapping:
            mesh[tuple(axis.split("+"))]._flatten(name)
    names = tuple(a.replace("+", "_") for a in axes)
    return mesh if names == mesh.mesh_dim_names else mesh[names]


def compare(folder: Path, mesh: DeviceMesh) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    truth = torch.load(folder / "truth.pt")
    placed = torch.load(folder / "placements.pt", weights_only=False)
    found: dict[str, Any] = torch.load(folder / f"ckpt/model_world_size_{world}_rank_{rank}.pt")
    absent = {n for n, (_, _, stages) in placed.items() if stages and mesh.get_local_rank("pp") not in stages}
    assert found.keys() == truth.keys() - absent
    for name, tensor in found.items():
        axes, placements, _ = placed.get(name, ((), (), ()))
        assert isinstance(tensor, DTensor) is bool(axes), name
        if not axes:
            assert equal(tensor, truth[name]), name
            continue
        assert tuple(tensor.placements) == placements, name
        same_mesh(tensor.device_mesh, part_of(mesh, axes))
        full = truth[name]
        wanted = DTensor.from_local(
            tensor.to_local(),
            part_of(mesh, axes),
            placements,
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        assert tensor._spec == wanted._spec
        assert tensor._spec.__dict__.keys() == wanted._spec.__dict__.keys()
        assert tensor._spec.shard_order == wanted._spec.shard_order
        assert (tensor.dtype, tensor.requires_grad) == (full.dtype, False)
        assert equal(tensor.to_local(), narrowed(truth[name], tensor)), name
        if tensor.dtype in GATHERED and not tensor.is_complex():
            assert equal(tensor.full_tensor(), truth[name]), name
            assert tensor.stride() == truth[name].stride()


def resume(folder: Path, mesh: DeviceMesh) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = torch.load(folder / "trained.pt", weights_only=False)
    model: Any = fully_shard(Model(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    model.load_state_dict(torch.load(folder / f"resumed/model_world_size_{world}_rank_{rank}.pt"))
    optimizer.load_state_dict(torch.load(folder / f"resumed/optim_world_size_{world}_rank_{rank}.pt"))
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert equal(full, trained["model"][name]), name
    assert optimizer.param_groups[0]["lr"] == trained["optim"]["param_groups"][0]["lr"]
    count = 0
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            assert equal(full, trained["optim"]["state"][name][key]), (name, key)
            count += 1
    assert count == 18
    extra = torch.load(folder / f"resumed/extra_state_world_size_{world}_rank_{rank}.pt")
    assert extra == trained["extra_state"]


def rank_main(rank: int, world: int, folder: Path, axes: dict[str, int]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    compare(folder, mesh)
    if (folder / "builtin").exists():
        compare(folder / "builtin", mesh)
    if (folder / "trained.pt").exists():
        resume(folder, mesh)
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def main() -> None:
    failed = 0
    for folder in sorted(Path(sys.argv[1]).resolve().iterdir()):
        axes = {name: int(size) for name, size in (part.split("=") for part in folder.name.split(","))}
        world = torch.Size(axes.values()).numel()
        try:
            start_ranks(rank_main, (world, folder, axes), world)
            (folder / "equal").touch()
        except torch.multiprocessing.ProcessRaisedException as error:
            print(folder.name, error, flush=True)
            failed += 1
    sys.exit(failed)


if __name__ == "__main__":
    main()
