"""Write the checkpoints of DeepSpeed's ZeRO-3 that the benchmarks read.

Files are cut as deepspeed/runtime/zero/stage3.py cuts them, and saved by `torch.save`: each parameter is cut
by itself into ``ceil(numel / ranks)`` elements a rank, and a rank's pieces follow each other in one buffer.
Moments are there, as holes of sparse files: they belong to the layout, and no contender reads their bytes.
"""

from __future__ import annotations

import math
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from make_ckpt import Source

TAG = "global_step100"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def write(source: Source, folder: Path) -> None:
    """Write what a job of ``source.ranks`` ranks saves, a rank at a time.

    Peak memory: three times a rank's part of the model, and the largest tensor.
    """
    import torch
    from make_ckpt import shard

    tag = _begun(folder)
    for rank in range(source.ranks):
        parts = []
        for index, (_, shape) in enumerate(source.tensors):
            count = math.prod(shape)
            size = -(-count // source.ranks)
            part = shard(source, index, 0).reshape(-1)[rank * size : (rank + 1) * size]
            parts.append(torch.nn.functional.pad(part, (0, size - len(part)), value=float("nan")))
        for name, state in _states(source, torch.cat(parts), rank).items():
            full = tag / f"{name}.full"
            torch.save(state, full)
            _copy(full, tag / name)
            full.unlink()


def write_hollow(source: Source, folder: Path) -> None:
    """Write the headers of such a job; its tensors are holes, so that hundreds of ranks fit."""
    import torch

    tag = _begun(folder)
    size = sum(-(-math.prod(shape) // source.ranks) for _, shape in source.tensors)
    first = _states(source, torch.empty(size), 0)
    with torch.serialization.skip_data():
        for name, state in first.items():
            torch.save(state, tag / name)
    for rank in range(1, source.ranks):  # ranks of ZeRO-3 differ in the values of their tensors alone
        for name, other in zip(first, _names(rank), strict=True):
            _copy(tag / name, tag / other)


def _begun(folder: Path) -> Path:
    tag = folder / TAG
    tag.mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    return tag


def _copy(source: Path, path: Path) -> None:
    subprocess.run(["cp", "--sparse=always", str(source), str(path)], check=True)


def _names(rank: int) -> tuple[str, str]:
    both = f"zero_pp_rank_{rank}_mp_rank_00"
    return f"{both}_model_states.pt", f"bf16_{both}_optim_states.pt"


def _states(source: Source, flat: torch.Tensor, rank: int) -> dict[str, dict[str, Any]]:
    """Return file name -> what DeepSpeed saves in it."""
    return dict(zip(_names(rank), (_model_states(source), _optim_states(source, flat)), strict=True))


def _model_states(source: Source) -> dict[str, Any]:
    import torch

    shapes = OrderedDict((name, torch.Size(shape)) for name, shape in source.tensors)
    return {
        "module": OrderedDict((name, torch.zeros(0, dtype=torch.bfloat16)) for name in shapes),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": 100,
        "global_samples": 100 * source.ranks,
        "dp_world_size": source.ranks,
        "mp_world_size": 1,
        "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
        "ds_version": "0.19.8",
    }


def _optim_states(source: Source, flat: torch.Tensor) -> dict[str, Any]:
    import torch

    state = {"step": torch.tensor(100.0)} | {key: torch.zeros(len(flat)) for key in _MOMENTS}
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    return {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "loss_scaler": None,
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": source.ranks,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": [group]},
            "fp32_flat_groups": [flat],
        },
        "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
        "ds_version": "0.19.8",
    }
