"""A job under FSDP1 or FSDP2 that saves a file for each rank, and jobs of other sizes that resume from them.

    python rank_resume_job.py save FOLDER CASE...
    python rank_resume_job.py load FOLDER TARGET...

``save`` runs each case of `CASES` on 4 gloo ranks: three steps, then ``FOLDER/CASE/ckpt`` by the case's
keeper, ``truth.pt`` with the complete tensors, gathered by torch, and ``uninterrupted.json`` with the losses
of the next two steps. ``load`` resumes each ``FOLDER/CASE/TARGET``, which ckptcore wrote for the ranks that
TARGET names, as in ``verl_fsdp2/ranks,fsdp=3``, with the keeper's code and from ``truth.pt`` with
`torch.distributed.checkpoint.state_dict`. ``CASE/TARGET.json`` gets of both ways a digest of each complete
tensor behind the load, the schedule, two losses, and a digest of the weights behind them.

Keepers: `Verl` is verl's own ``FSDPCheckpointManager``, `Named` FSDP1's state dicts by name in torch.save,
`Dcp` `torch.distributed.checkpoint` on what a reshard wrote.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import start_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import OptimStateKeyType, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

State = dict[str, Any]
STEPS, MORE = 3, 2
FULL = StateDictOptions(full_state_dict=True)
TOKENS = torch.arange(48).reshape(4, 12) * 7 % 89


@dataclass(frozen=True)
class Case:
    """How a job trains and saves.

    Attributes:
        keeper: Who saves and loads.
        fsdp: 1 or 2.
        axes: The mesh of the job that saves.
        use_orig_params: Of FSDP1.
        optimizer: Whether the optimizer is in what is resumed.
    """

    keeper: str
    fsdp: int
    axes: tuple[tuple[str, int], ...] = (("fsdp", 4),)
    use_orig_params: bool = False
    optimizer: bool = True


CASES = {
    "verl_fsdp2": Case("verl", 2),
    "verl_hsdp": Case("verl", 2, (("ddp", 2), ("fsdp", 2))),
    "verl_fsdp1": Case("verl", 1, optimizer=False),
    "verl_fsdp1_orig": Case("verl", 1, use_orig_params=True, optimizer=False),
    "fsdp1": Case("named", 1),
    "fsdp1_orig": Case("named", 1, use_orig_params=True),
}


class Job:
    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self.case = case
        torch.manual_seed(3)
        config = Qwen2Config(
            vocab_size=89,
            hidden_size=24,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
        model = Qwen2ForCausalLM(config)
        self.model: Any = model
        if case.fsdp == 1:
            self.model = FSDP1(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Qwen2DecoderLayer}),
                device_id=torch.device("cpu"),
                use_orig_params=case.use_orig_params,
                device_mesh=mesh,
            )
        else:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.8, 0.9), foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))

    def train(self, steps: int) -> list[str]:
        """Return the loss of each step; every rank has the same tokens."""
        found = []
        for _ in range(steps):
            logits = self.model(input_ids=TOKENS[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            found.append(float(loss.detach()).hex())
        return found

    def complete(self) -> State:
        """Return weights and optimizer, every tensor complete."""
        weights, states = get_state_dict(self.model, self.optimizer, options=FULL)
        return {"model": weights, "optim": states}

    def outcome(self) -> State:
        """Return what was loaded, and how the job goes on."""
        tensors = digests(self.complete())
        schedule = {k: repr(v) for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"}
        losses = self.train(MORE)
        return {"tensors": tensors, "schedule": schedule, "losses": losses, "after": digests(self.complete())}


class Verl:
    """verl's own checkpoint manager."""

    def __init__(self, job: Job) -> None:
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        parts = ["model", *(["optimizer"] if job.case.optimizer else []), "extra"]
        asked = {"load_contents": parts, "save_contents": ["model", "optimizer", "extra"]}
        self.manager = FSDPCheckpointManager(
            model=job.model, optimizer=job.optimizer, lr_scheduler=job.scheduler, checkpoint_config=asked
        )

    def save(self, folder: Path) -> None:
        self.manager.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        self.manager.load_checkpoint(str(folder))


class Named:
    """FSDP1's sharded state dicts, the optimizer's by name, one file for each rank and each of them."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def files(self, folder: Path) -> list[Path]:
        rank, world = dist.get_rank(), dist.get_world_size()
        return [folder / f"{k}_world_size_{world}_rank_{rank}.pt" for k in ("model", "optim", "extra_state")]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model, optimizer = self.job.model, self.job.optimizer
        with FSDP1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            states = (
                model.state_dict(),
                FSDP1.optim_state_dict(model, optimizer),
                {"lr_scheduler": self.job.scheduler.state_dict()},
            )
        for state, path in zip(states, self.files(folder), strict=True):
            torch.save(state, path)

    def load(self, folder: Path) -> None:
        model, optimizer = self.job.model, self.job.optimizer
        weights, states, extra = (torch.load(path, weights_only=True) for path in self.files(folder))
        with FSDP1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(weights)
            named = FSDP1.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_NAME, plain(model))
            optimizer.load_state_dict(FSDP1.optim_state_dict_to_load(model, optimizer, named))
        self.job.scheduler.load_state_dict(extra["lr_scheduler"])


def plain(model: Any) -> torch.nn.Module:
    """Return a model without FSDP1, for the names of its parameters."""
    return Qwen2ForCausalLM(model.module.config)


class Dcp:
    """`torch.distributed.checkpoint` and its state dicts by name."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def load(self, folder: Path) -> None:
        model, optimizer = self.job.model, self.job.optimizer
        weights, states = get_state_dict(model, optimizer)
        extra = {"lr_scheduler": self.job.scheduler.state_dict()}  # random states are of the ranks that saved
        tree: State = {"model": weights, "optim": states, "extra_state": extra}
        dcp.load(tree, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
        self.job.scheduler.load_state_dict(tree["extra_state"]["lr_scheduler"])


def native(job: Job, truth: State) -> None:
    """Resume from complete tensors by torch's own functions."""
    if job.case.optimizer:
        set_state_dict(
            job.model,
            job.optimizer,
            model_state_dict=truth["model"],
            optim_state_dict=truth["optim"],
            options=FULL,
        )
    else:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(job.model, truth["model"], options=FULL)
    job.scheduler.load_state_dict(truth["schedule"])


def digests(tree: Any, name: str = "") -> dict[str, str]:
    """Return a digest of each tensor by its name, and the other values as text."""
    if isinstance(tree, dict):
        return {k: v for key, inner in tree.items() for k, v in digests(inner, f"{name}.{key}").items()}
    if isinstance(tree, (list, tuple)):  # betas: torch's own resume makes them a list
        return {k: v for n, inner in enumerate(tree) for k, v in digests(inner, f"{name}.{n}").items()}
    if not isinstance(tree, torch.Tensor):
        return {name: repr(tree)}
    data = tree.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {name: hashlib.sha256(f"{tree.dtype} {tuple(tree.shape)}".encode() + data).hexdigest()}


def save_main(rank: int, folder: Path, meet: str, name: str) -> None:
    case = CASES[name]
    mesh = started(rank, meet, case.axes)
    job = Job(case, mesh)
    job.train(STEPS)
    torch.manual_seed(100 + rank)  # random states are of each rank
    random.seed(rank)
    here = folder / name
    {"verl": Verl, "named": Named}[case.keeper](job).save(here / "ckpt")
    truth = copy.deepcopy({**job.complete(), "schedule": job.scheduler.state_dict()})  # steps are shared
    losses = job.train(MORE)
    if rank == 0:
        torch.save(truth, here / "truth.pt")
        (here / "uninterrupted.json").write_text(json.dumps({"truth": digests(truth), "losses": losses}))
    finish()


def load_main(rank: int, folder: Path, meet: str, target: str, axes: list[tuple[str, int]]) -> None:
    name, how = target.split("/")
    case = CASES[name]
    mesh = started(rank, meet, axes)
    truth = torch.load(folder / name / "truth.pt")
    first = Job(case, mesh)
    native(first, truth)
    found = {"native": first.outcome()}
    second = Job(case, mesh)
    keepers = {"dcp": Dcp, "ranks": {"verl": Verl, "named": Named}[case.keeper]}
    keepers[how.split(",")[0]](second).load(folder / target)
    found["written"] = second.outcome()
    if rank == 0:
        (folder / name / f"{how}.json").write_text(json.dumps(found))
    finish()


def started(rank: int, meet: str, axes: Any) -> DeviceMesh:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names, sizes = zip(*axes, strict=True)
    world = torch.Size(sizes).numel()
    dist.init_process_group("gloo", init_method=f"file://{meet}/r", rank=rank, world_size=world)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def finish() -> None:
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def main() -> None:
    verb, folder, *names = sys.argv[1:]
    top = Path(folder).resolve()
    if any(name.startswith("verl") for name in names):
        import verl.utils.checkpoint.fsdp_checkpoint_manager  # noqa: F401  # once, before ranks are forked
    for name in names:
        with tempfile.TemporaryDirectory() as meet:
            if verb == "save":
                start_ranks(save_main, (top, meet, name), 4)
            else:
                axes = [(a, int(n)) for a, n in (p.split("=") for p in name.split(",")[1:])]
                world = torch.Size(n for _, n in axes).numel()
                start_ranks(load_main, (top, meet, name, axes), world)


if __name__ == "__main__":
    main()
