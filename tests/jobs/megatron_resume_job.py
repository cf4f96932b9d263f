"""A job of TP x PP ranks: Megatron-Core's own GPTModel loads folders by its `sharded_state_dict`, and trains.

    RANK=0 python megatron_resume_job.py ASKED OUT

ASKED is a file of torch: ``tp``, ``pp``, ``vpp`` (model chunks of a rank, or None), and ``cases``. Each case
has the question of megatron_logits_job.py (``config``, ``model``, ``ids``) and ``folders``, name -> folder of
torch_dist. Every rank builds the model of its stage, loads it with `dist_checkpointing.load` and, where one
stage has all layers, makes two steps of SGD. OUT: where rank 0 puts the JSON of, by rank, case and folder:
digests of the loaded tensors by name, the losses, and digests of the weights behind them.

The replacements are those of mcore_job.py and megatron_logits_job.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore_job import stand_in
from megatron_logits_job import built, stand_in_for_gpus

warnings.filterwarnings("ignore")
STEPS, RATE = 2, 0.05


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + raw).hexdigest()


class Job:
    def __init__(self, asked: dict[str, Any]) -> None:
        from megatron.core import parallel_state

        self.tp, self.pp, self.vpp = asked["tp"], asked["pp"], asked["vpp"]
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp,
        )
        self.stage = parallel_state.get_pipeline_model_parallel_rank()

    def chunks(self, case: dict[str, Any]) -> list[Any]:
        """The models of this rank: one, or one for each virtual stage."""
        more = {"tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp}
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
        losses = self.train(models[0].train(), case["ids"]) if self.pp == 1 else []
        return {"tensors": tensors, "losses": losses, "after": [digest(p) for p in models[0].parameters()]}

    def train(self, model: Any, ids: torch.Tensor) -> list[str]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
        inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        length = inputs.shape[1]
        position = torch.arange(length)[None].expand_as(inputs)
        mask = torch.ones(1, 1, length, length).triu(1).bool()  # true: not seen
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(inputs, position, mask, labels=labels).float().mean()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()).hex())
        return found


def main(file: str, out: str) -> None:
    asked = torch.load(file, weights_only=True)
    stand_in()
    stand_in_for_gpus()
    rank, world = int(os.environ["RANK"]), asked["tp"] * asked["pp"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}.store", world), rank=rank, world_size=world)
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
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
