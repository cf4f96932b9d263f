"""A job for a process of its own: does Megatron-Core load a folder, and what does it get?

    python mcore_job.py FOLDER TRUTH OBJECTS OUT

TRUTH: a safetensors file with the tensors that are expected. OBJECTS: JSON, key -> grid. OUT: where the
JSON of what was loaded goes: tensors that differ, objects by type, common state by type.

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
    """Triton, where it is not installed, and CUDA calls."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *a: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment,method-assign]
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
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from safetensors.torch import load_file

    truth = load_file(truth_file)
    state: dict[str, Any] = {
        k: ShardedTensor.from_rank_offsets(k, torch.zeros_like(v)) for k, v in truth.items()
    }
    for key, shape in json.loads(grids).items():
        for offset in itertools.product(*map(range, shape)):
            state[f"{key} {offset}"] = ShardedObject(key, None, tuple(shape), offset)
    got = dist_checkpointing.load(state, folder)

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    told = {
        "listed": sorted(dist_checkpointing.load_tensors_metadata(folder)),
        "differ": [k for k, v in truth.items() if not torch.equal(raw(got[k]), raw(v))],
        "types": {k: type(v).__name__ for k, v in got.items() if k not in truth},
        "args": sorted(vars(got["args"])) if "args" in got else [],
    }
    Path(out).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
