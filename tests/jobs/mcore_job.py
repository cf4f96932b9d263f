"""A job of one or more ranks: Megatron-Core loads a folder, and the job records what it gets.

    RANK=0 WORLD_SIZE=2 python mcore_job.py FOLDER TRUTH OBJECTS OUT

TRUTH: a safetensors file with the tensors that are expected; each rank loads its rows where they can be
cut evenly, and all of it otherwise. OBJECTS: JSON, key -> grid. OUT: where rank 0 puts the JSON of what
was loaded: tensors that differ on any rank, objects by type, common state by type. The ranks meet at
OUT + ".store".

Megatron-Core wants CUDA and Triton; the stand-ins below touch no value.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import types
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")


class _Anything:
    """A decorator, a type, a function: whatever Triton kernels need while they are defined."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything()


def stand_in() -> None:
    """Triton, where it is not installed, CUDA calls, and a function that numpy 2 has under another name."""
    if not hasattr(np, "product"):
        np.product = np.prod  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *a: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment,method-assign]
    stand_in_for_triton()


def stand_in_for_triton() -> None:
    """Modules with which kernels can be defined, and not run, where Triton is not installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        # torch looks for Triton while these are imported, and must not find the stand-in.
        for name in ("_dynamo", "_inductor.compile_fx", "_inductor.runtime.triton_compat"):
            import_module(f"torch.{name}")

        for name in ("triton", "triton.language"):
            module: Any = types.ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            module.__getattr__ = _Anything().__getattr__
            sys.modules[name] = module
        made: Any = sys.modules["triton"]
        made.language, made.__version__ = sys.modules["triton.language"], "3.0.0"
        made.language.constexpr = int


def main(folder: str, truth_file: str, grids: str, out: str) -> None:
    stand_in()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}.store", world), rank=rank, world_size=world)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from safetensors.torch import load_file

    truth = load_file(truth_file)
    state: dict[str, Any] = {}
    for k, v in truth.items():
        if world > 1 and v.dim() and v.shape[0] and v.shape[0] % world == 0:
            truth[k] = v.chunk(world)[rank]
            state[k] = ShardedTensor.from_rank_offsets(k, torch.zeros_like(truth[k]), (0, rank, world))
        else:
            state[k] = ShardedTensor.from_rank_offsets(k, torch.zeros_like(v), replica_id=rank)
    for key, shape in json.loads(grids).items():
        for offset in itertools.product(*map(range, shape)):
            state[f"{key} {offset}"] = ShardedObject(key, None, tuple(shape), offset, replica_id=rank)
    got = dist_checkpointing.load(state, folder)

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    differ = [k for k, v in truth.items() if not torch.equal(raw(got[k]), raw(v))]
    everywhere: list[list[str]] = [[] for _ in range(world)]
    dist.all_gather_object(everywhere, differ)
    results = {
        "listed": sorted(dist_checkpointing.load_tensors_metadata(folder)),
        "differ": sorted({k for names in everywhere for k in names}),
        "types": {k: type(v).__name__ for k, v in got.items() if k not in truth},
        "args": sorted(vars(got["args"])) if "args" in got else [],
    }
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    main(*sys.argv[1:])
