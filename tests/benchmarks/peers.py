"""Run the peers: other tools that convert a sharded checkpoint to complete tensors.

Each is what a user would run today, in its own process:

- `dcp_to_torch_save`: torch's own utility; with a cast, its own steps with the cast in between.
- `load_and_save_file`: fill tensors with `torch.distributed.checkpoint.load` in a single process,
  then `safetensors.torch.save_file`. With a cast the tensors are allocated in the target dtype, so
  that the load itself casts: no second pass, no second copy.

    python peers.py dcp_to_torch_save SRC OUT.pt [--dtype bf16]
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dcp_to_torch_save(source: Path, out: Path, dtype: str | None) -> None:
    """Run `torch.distributed.checkpoint.format_utils.dcp_to_torch_save`.

    Peak memory: the model, twice while it casts.
    """
    from torch.distributed.checkpoint import format_utils

    if dtype is None:
        format_utils.dcp_to_torch_save(source, out)
        return

    import torch

    # dcp_to_torch_save cannot cast: these are its two calls, with a cast between them.
    state_dict: dict[str, dict[str, torch.Tensor]] = {}
    format_utils._load_state_dict(
        state_dict,
        storage_reader=format_utils.FileSystemReader(source),
        planner=format_utils._EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    target = getattr(torch, _DTYPES[dtype])
    for part in state_dict.values():
        for name in part:
            part[name] = part[name].to(target)
    torch.save(state_dict, out)


def load_and_save_file(source: Path, out: Path, dtype: str | None) -> None:
    """Run `dcp.load` of the part "model" without a process group, then `save_file`.

    Peak memory: the model.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    metadata = dcp.FileSystemReader(source).read_metadata()
    model = {}
    for key, stored in metadata.state_dict_metadata.items():
        part, name = metadata.planner_data[key]
        if part != "model":
            raise ValueError(f"{key} is not part of the model")
        target = stored.properties.dtype if dtype is None else getattr(torch, _DTYPES[dtype])
        model[name] = torch.empty(stored.size, dtype=target)
    dcp.load({"model": model}, checkpoint_id=source, no_dist=True)
    save_file(model, out)


def unshard_checkpoint(source: Path, out: Path, dtype: str | None) -> None:
    """Run OLMo-core's `unshard_checkpoint`, to one file. Peak memory: the model."""
    from olmo_core.distributed.checkpoint import unshard_checkpoint as unshard

    unshard(source / "model_and_optim", out, optim=False)


def verl_merge(source: Path, out: Path, dtype: str | None) -> None:
    """Run verl's model merger for FSDP, to a Hugging Face folder. Peak memory: twice the model."""
    from verl.model_merger import base_model_merger as base
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    base.hf_tokenizer = base.hf_processor = lambda *_, **__: None  # the source has no tokenizer to copy
    config = base.ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(source),
        target_dir=str(out),
        hf_model_config_path=str(source / "huggingface"),
        use_cpu_initialization=True,
    )
    merger = FSDPModelMerger(config)
    merger.merge_and_save()
    merger.cleanup()


def consolidate_safetensors(source: Path, out: Path, dtype: str | None) -> None:
    """Run torch's `consolidate_safetensors_files_on_every_rank` in a gloo job of this machine.

    One process and one output file for each core, since a file is the work of one rank.
    """
    import json
    import tempfile

    import torch.distributed.checkpoint._consolidate_hf_safetensors  # noqa: F401  before the fork
    import torch.multiprocessing as mp

    sizes: dict[str, int] = {}
    for path in source.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                sizes[name] = sizes.get(name, 0) + end - begin
    ranks = len(os.sched_getaffinity(0))
    loads, files = [0] * ranks, {}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):  # files of about equal size
        lightest = loads.index(min(loads))
        files[name] = lightest + 1
        loads[lightest] += sizes[name]
    out.mkdir()
    with tempfile.TemporaryDirectory() as meeting:
        mp.start_processes(
            _consolidate_rank,
            args=(ranks, source, out, files, f"file://{meeting}/rendezvous"),
            nprocs=ranks,
            start_method="fork",
        )


def _consolidate_rank(
    rank: int, ranks: int, source: Path, out: Path, files: dict[str, int], meeting: str
) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files_on_every_rank,
    )

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=meeting)
    consolidate_safetensors_files_on_every_rank(str(source), str(out), files)
    os._exit(0)  # its threads can abort the interpreter at shutdown


RANKS, TP = 8, 2
_ROWWISE = ("o_proj.weight", "down_proj.weight")


def reshard_job(source: Path, out: Path, dtype: str | None) -> None:
    """Run a gloo job of 8 processes on fsdp=4,tp=2 that loads and saves with DCP.

    A team without the trainer would write this. Peak memory: the checkpoint, and torch 8 times.
    """
    import tempfile

    import torch.distributed.checkpoint  # before the fork: imported once, not once per rank
    import torch.distributed.tensor  # noqa: F401
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as meeting:
        mp.start_processes(
            _reshard_rank,
            args=(source, out, f"file://{meeting}/rendezvous"),
            nprocs=RANKS,
            start_method="fork",
        )


def _reshard_rank(rank: int, source: Path, out: Path, meeting: str) -> None:

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty
    from torch.distributed.tensor.placement_types import _StridedShard

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=meeting)
    mesh = init_device_mesh("cpu", (RANKS // TP, TP), mesh_dim_names=("fsdp", "tp"))
    metadata = dcp.FileSystemReader(source).read_metadata()
    state = {}
    for name, stored in metadata.state_dict_metadata.items():
        if any(part in name for part in _ROWWISE):
            where, placements = mesh, [Shard(0), Shard(1)]
        elif len(stored.size) == 2:
            where, placements = mesh, [_StridedShard(0, split_factor=TP), Shard(0)]
        else:
            where, placements = mesh["fsdp"], [Shard(0)]
        state[name] = empty(
            *stored.size, dtype=stored.properties.dtype, device_mesh=where, placements=placements
        )
    dcp.load(state, checkpoint_id=source)
    dcp.save(state, checkpoint_id=out)
    dist.barrier()  # gloo aborts a rank whose peer has exited
    os._exit(0)  # its threads can abort the interpreter at shutdown


PEERS: dict[str, Callable[[Path, Path, str | None], None]] = {
    "dcp_to_torch_save": dcp_to_torch_save,
    "load_and_save_file": load_and_save_file,
    "consolidate_safetensors": consolidate_safetensors,
    "unshard_checkpoint": unshard_checkpoint,
    "verl_merge": verl_merge,
    "reshard_job": reshard_job,
}


def main() -> int:
    """Run one peer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=_DTYPES, help="cast every tensor")
    args = parser.parse_args()
    # torch warns that no process group exists, which is intended in a single process.
    warnings.filterwarnings("ignore", message=".*single process.*")
    PEERS[args.peer](args.source, args.out, args.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
