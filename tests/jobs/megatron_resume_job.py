"""A job of TP x PP x EP ranks: Megatron-Core's own GPTModel loads by its `sharded_state_dict`, and trains.

    RANK=0 python megatron_resume_job.py ASKED OUT

ASKED is a file of torch: ``tp``, ``pp``, ``vpp`` (model chunks of a rank, or None), ``ep`` and ``steps``, and
``cases``. Each case has the question of megatron_logits_job.py (``config``, ``model``, ``ids``) and
``folders``, name -> folder of torch_dist. Every rank builds the model of its stage, loads it with
`dist_checkpointing.load` and, where one stage has all layers, computes logits and makes steps of SGD. OUT:
where rank 0 puts the JSON of, by rank, case and folder: digests of the loaded tensors by name, the logits,
the losses, and digests of the weights behind them.

Ranks of experts see the same tokens. An expert computes each of them once for every rank: its gradient is
divided by their number, as Megatron's `DistributedDataParallel` does.

The replacements are those of mcore_job.py and megatron_logits_job.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore_job import stand_in
from megatron_logits_job import built, stand_in_for_gpus

warnings.filterwarnings("ignore")
RATE = 0.05


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + raw).hexdigest()


def model_inputs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their positions, and which of them each does not see."""
    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length).triu(1).bool()  # true: not seen
    return ids, torch.arange(length)[None].expand_as(ids), mask


class Job:
    def __init__(self, asked: dict[str, Any]) -> None:
        from megatron.core import parallel_state

        self.tp, self.pp, self.vpp = asked["tp"], asked["pp"], asked["vpp"]
        self.ep, self.steps = asked["ep"], asked["steps"]
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp,
            expert_model_parallel_size=self.ep,
        )
        self.stage = parallel_state.get_pipeline_model_parallel_rank()

    def chunks(self, case: dict[str, Any]) -> list[Any]:
        """The models of this rank: one, or one for each virtual stage."""
        more = {"tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp}
        more["expert_model_parallel_size"] = self.ep
        if self.pp > 1:
            more |= {"pipeline_dtype": torch.float32}
        if self.vpp:
            more |= {"virtual_pipeline_model_parallel_size": self.vpp}
        question = {**case, "config": {**case["config"], **more}}
        found = []
        for n in range(self.vpp or 1):
            stage = {
                "pre_process": self.stage == 0 and n == 0,
                "post_process": self.stage == self.pp - 1 and n == (self.vpp or 1) - 1,
            }
            torch.manual_seed(11 * n + dist.get_rank())
            found.append(built(question, **stage, **({"vp_stage": n} if self.vpp else {})))
        return found

    def resume(self, case: dict[str, Any], folder: str) -> dict[str, Any]:
        from megatron.core import dist_checkpointing

        models = self.chunks(case)
        asked = {f"model{n}": model.sharded_state_dict() for n, model in enumerate(models)}
        got = dist_checkpointing.load(asked, folder)
        for n, model in enumerate(models):
            model.load_state_dict(got[f"model{n}"])
        tensors = {
            f"{n}.{name}": digest(tensor)
            for n, model in enumerate(models)
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }
        logits, losses = [], []
        if self.pp == 1:
            with torch.no_grad():
                logits = models[0](*model_inputs(case["ids"])).float().tolist()
            losses = self.train(models[0].train(), case["ids"])
        after = [digest(p) for p in models[0].parameters()]
        return {"tensors": tensors, "logits": logits, "losses": losses, "after": after}

    def train(self, model: Any, ids: torch.Tensor) -> list[str]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
        inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        for _ in range(self.steps):
            optimizer.zero_grad()
            loss = model(*model_inputs(inputs), labels=labels).float().mean()
            loss.backward()
            for parameter in model.parameters():
                if not getattr(parameter, "allreduce", True):  # of an expert
                    parameter.grad.div_(self.ep)
            optimizer.step()
            found.append(float(loss.detach()).hex())
        return found


def main(file: str, out: str) -> None:
    asked = torch.load(file, weights_only=True)
    stand_in()
    stand_in_for_gpus()
    rank, world = int(os.environ["RANK"]), asked["tp"] * asked["pp"] * asked["ep"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}.store", world), rank=rank, world_size=world)
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    moe_utils: Any = import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.15 asks for it without Transformer Engine, too
        moe_utils.te_general_gemm = None
    job = Job(asked)
    found = {
        name: {way: job.resume(case, folder) for way, folder in case["folders"].items()}
        for name, case in asked["cases"].items()
    }
    results: list[Any] = [None] * world
    dist.all_gather_object(results, found)
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


if __name__ == "__main__":
    main(*sys.argv[1:])
