"""Open checkpoints as models that two gloo ranks share, and compare them with their exports.

    python from_checkpoint_job.py SOURCE CONFIG EXPORT ...

Each rank compares its part of every parameter, every buffer, and the logits; together they fingerprint the
model, also with one bit changed. Then one rank has a source that
is not there: both raise its error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from export_cells import same
from forked import start_ranks
from same_models import logits_of, tensors_of
from strict_exports import ask_here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import ckptcore
from ckptcore.errors import SourceUnreadable
from ckptcore.planning import transformers_process

RANKS = 2


def rank_main(rank: int, folder: str, cases: list[tuple[str, ...]]) -> None:
    """Be one rank."""
    warnings.simplefilter("ignore")
    library: Any = transformers
    library.logging.disable_progress_bar()
    transformers_process.ask = ask_here
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for source, config, export in cases:
        name = json.loads(Path(export, "config.json").read_text())["architectures"][0]
        right = getattr(library, name).from_pretrained(export)
        model = ckptcore.from_checkpoint(source, config, mesh=mesh)
        wanted = tensors_of(right, "named_parameters")
        sharded = dict(model.named_parameters(remove_duplicate=False))
        assert sharded.keys() == wanted.keys()
        for fqn, tensor in sharded.items():
            assert isinstance(tensor, DTensor), fqn
            part = distribute_tensor(wanted[fqn], mesh, tensor.placements).to_local()
            assert same(tensor.to_local().detach(), part), f"rank {rank}: {fqn} differs"
        buffers = tensors_of(right, "named_buffers")
        assert all(same(tensor, buffers[fqn]) for fqn, tensor in tensors_of(model, "named_buffers").items())
        saved = ckptcore.fingerprint(export)
        live = ckptcore.fingerprint_model(model, mesh)
        assert live.fingerprint == saved.fingerprint, live.differing(saved)
        # One bit of this rank, in the middle of each kind of parameter.
        for fqn in (next(iter(wanted)), max(wanted, key=lambda name: wanted[name].numel())):
            flat = sharded[fqn].to_local().detach().reshape(-1).view(torch.int32)
            flat[len(flat) // 2] ^= 1 << rank
            differing = ckptcore.fingerprint_model(model, mesh).differing(saved)
            flat[len(flat) // 2] ^= 1 << rank
            assert 1 <= len(differing) <= RANKS, f"{fqn}: {differing}"
        logits, expected = logits_of(model), logits_of(right)
        assert isinstance(logits, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert same(logits, expected)
        if rank == 0:
            print(Path(source).name, flush=True)
    absent = f"{folder}/absent"
    with pytest.raises(SourceUnreadable, match="absent"):
        ckptcore.from_checkpoint(cases[0][0] if rank == 0 else absent, cases[0][1], mesh=mesh)
    dist.barrier()
    os._exit(0)  # gloo's threads can abort an interpreter that is taken down


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        start_ranks(rank_main, (store, list(zip(*[iter(sys.argv[1:])] * 3, strict=True))), RANKS)
