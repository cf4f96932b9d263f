"""One rank of a job in which OLMo-core 0.1's own loader restores an FSDP model and its optimizer.

Run as a program by an interpreter that has ai2-olmo-core 0.1.0 and torch, with the environment of
torch.distributed: ``olmo_loader_job.py CHECKPOINT TRUTH``. Prints how many tensors were equal.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.distributed.checkpoint import (  # type: ignore[import-not-found]
    Checkpointer,
    init_optimizer_state,
    load_model_and_optim_state,
    unshard_model_state,
)
from olmo_core.io import deserialize_from_tensor  # type: ignore[import-not-found]
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def build(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose parameters have these names, shapes and dtypes."""
    root = torch.nn.Module()
    for name, tensor in weights.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, torch.nn.Parameter(torch.zeros_like(tensor)))
    return root


def main(folder: str, truth: str) -> None:
    dist.init_process_group("gloo")
    weights, moments = (
        load_file(f"{truth}/expected.safetensors"),
        load_file(f"{truth}/expected_optim.safetensors"),
    )
    state = unshard_model_state(folder)
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[k], v) for k, v in weights.items())
    model: Any = FSDP(build(weights), use_orig_params=True, device_id=torch.device("cpu"))
    flat = Checkpointer().unshard(f"{folder}/optim")
    groups = [deserialize_from_tensor(flat[f"param_group{i}"]) for i in range(int(flat["num_param_groups"]))]
    named = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
    optim = torch.optim.AdamW([{"params": [named[n] for n in g["_param_names"]]} for g in groups], lr=7.0)
    init_optimizer_state(optim)  # the loader would do it behind the weights, and decay them
    load_model_and_optim_state(folder, model, optim)
    assert [g["lr"] for g in optim.param_groups] == [g["lr"] for g in groups]
    count, handle = 0, model._handle.flat_param
    for name, param, info in zip(handle._fqns, handle._params, handle._shard_param_infos, strict=True):
        if not info.in_shard:
            continue
        part = slice(info.intra_param_start_idx, info.intra_param_end_idx + 1)
        assert torch.equal(param.data.reshape(-1), weights[name].reshape(-1)[part]), name
        for key, value in optim.state[param].items():
            wanted = moments[f"{name}::{key}"]
            wanted = wanted.reshape(-1)[part] if wanted.ndim else wanted
            assert torch.equal(value.reshape(-1), wanted.reshape(-1)), (name, key)
            count += 1
    print(f"equal: {count}", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's teardown is not what is tested


if __name__ == "__main__":
    main(*sys.argv[1:3])
