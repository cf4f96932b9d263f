"""A job on a mesh in which transformers' model is loaded from a DCP folder, under FSDP2 and TP.

    python hf_mesh_job.py HUGGING_FACE_FOLDER WRITTEN FSDP TP OUT

Forks FSDP x TP gloo ranks. The model is loaded twice: from WRITTEN with `torch.distributed.checkpoint.load`,
and whole from the folder, before it is parallelized. OUT gets the JSON of the parameters that differ, and
both losses.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN: dict[str, Any] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def build(folder: str, mesh: DeviceMesh, weights: dict[str, torch.Tensor] | None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager")
    model = model.to(torch.float32)
    if weights is not None:
        model.load_state_dict(weights)
    return sharded(model, mesh)


def sharded(model: Any, mesh: DeviceMesh) -> Any:
    """The model with tensor parallelism, and FSDP2 of each layer."""
    parallelize_module(model, mesh["tp"], PLAN)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh["fsdp"])


def loss(model: Any) -> str:
    tokens = torch.arange(20).reshape(2, 10) * 3 % 60
    return float(model(input_ids=tokens, labels=tokens).loss).hex()


def rank_main(rank: int, fsdp: int, tp: int, folder: str, written: str, out: str, meet: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}/r", rank=rank, world_size=fsdp * tp)
    mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    truth = {k: t for p in sorted(Path(folder).glob("*.safetensors")) for k, t in load_file(p).items()}
    losses, differ = [], []
    for way in ("written", "whole"):
        model = build(folder, mesh, truth if way == "whole" else None)
        if way == "written":
            state = get_model_state_dict(model)
            dcp.load(state, checkpoint_id=written)
            set_model_state_dict(model, state)
        for name, tensor in get_model_state_dict(model).items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if not torch.equal(full, truth[name].to(full.dtype)):
                differ.append(f"{way}: {name}")
        losses.append(loss(model))
    results: list[Any] = [None] * (fsdp * tp)
    dist.all_gather_object(results, (differ, losses))
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    source, target, rows, columns, out_file = sys.argv[1:]
    import transformers  # noqa: F401  # once, before the ranks are forked

    with tempfile.TemporaryDirectory() as folder:
        start_ranks(
            rank_main, (int(rows), int(columns), source, target, out_file, folder), int(rows) * int(columns)
        )
