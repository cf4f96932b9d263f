"""Scenarios of the state dict itself: nesting, plain values, objects, names that one side lacks, planners."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_model_scenarios import App, Net, fsdp2
from dcp_scenario import OTHER, SAVED, Job, Make, State, filled, leaves, load, require_equal
from dcp_tensor_scenarios import ONE, UNEVEN, spread
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import ckptcore
from ckptcore.errors import NameMismatch


def zeros(job: Job, *names: str) -> State:
    """A row-sharded tensor for each name."""
    return {name: spread(UNEVEN, job.mesh(), ONE[1]) for name in names}


def nested(job: Job) -> None:
    """Dicts and lists in each other, keys that are numbers or have dots, empty ones."""

    def state(seed: int) -> State:
        deep = zeros(job, "a", "b", "c", "d")
        return filled(
            {
                "a.b": deep["a"],
                "layers": {
                    0: deep["b"],
                    1: {"w.x": deep["c"], "n": seed},
                    "2": [torch.zeros(3), {"y": deep["d"]}],
                },
                "mixed": [seed, torch.zeros(2), {"z": [torch.zeros(()), f"text {seed}"]}],
                "values": [seed, [seed, {"k": (seed, "v")}]],
                "empty": {},
                "none": [],
                "deep": {"x": {"y": {"z": {"value": seed, "empty": {}}}}},
                "ordered": OrderedDict(b=seed, a=torch.zeros(2)),
            },
            seed,
        )

    job.conforms(state, rewritten=("dcp", "mesh", "pt"))


def tuples(job: Job) -> None:
    """A tuple is one object, the tensors in it included; a rewrite stores these under names of their own."""
    path = job.folder / "saved"

    def state(seed: int) -> State:
        return filled({"pair": (torch.zeros(4), seed), "many": [(torch.zeros(2), 1), torch.zeros(3)]}, seed)

    dcp.save(state(SAVED), checkpoint_id=path)
    job.loads(path, state)


def plain_values(job: Job) -> None:
    """Every kind of value that `load_into` builds, as torch's loader gives it back."""

    def state(seed: int) -> State:
        return {
            "tensor": filled({"t": torch.zeros(2)}, seed)["t"],
            "none": None if seed == SAVED else 0,
            "true": seed == SAVED,
            "int": seed * 10**30,
            "negative": -seed,
            "float": seed / 3,
            "infinite": math.inf if seed == SAVED else -math.inf,
            "nan": math.nan if seed == SAVED else 0.0,
            "text": f"{seed} ß漢字🙂\n\0",
            "bytes": bytes([seed, 0, 255]),
            "complex": complex(seed, -0.5),
            "tuple": (seed, (0.5, None), "x"),
            "set": {seed, 3},
            "frozen": frozenset({seed}),
            "size": torch.Size([seed, 3]),
            "dtype": torch.bfloat16 if seed == SAVED else torch.float32,
            "device": torch.device("cpu", 0) if seed == SAVED else torch.device("meta"),
            "array": np.arange(6, dtype=np.int16).reshape(2, 3) + seed,
            "path": Path(f"/data/{seed}"),
            "random": random.Random(seed).getstate(),
        }

    path = job.folder / "saved"
    dcp.save(state(SAVED), checkpoint_id=path)
    job.loads(path, state)

    def portable(seed: int) -> State:
        """Files that torch opens with ``weights_only`` have no frozen sets and no paths."""
        return {k: v for k, v in state(seed).items() if k not in ("frozen", "path")}

    # Random states belong to ranks; a reshard for other ranks leaves them out.
    job.rewrites(path, portable, ("dcp",))


class Counter(Stateful):
    """An object with state of its own."""

    def __init__(self, seed: int) -> None:
        self.count, self.weights = seed, filled({"w": torch.zeros(3)}, seed)["w"]

    def state_dict(self) -> State:
        return {"count": self.count, "weights": self.weights, "history": [self.count, {"w": self.weights}]}

    def load_state_dict(self, state_dict: State) -> None:
        self.count, self.weights = state_dict["count"], state_dict["weights"]
        assert state_dict["history"][0] == self.count


def stateful_objects(job: Job) -> None:
    """`Stateful` objects, modules, optimizers, plain tensors; the state of a scheduler and of a scaler."""

    class Full(Stateful):
        def __init__(self, seed: int) -> None:
            self.app, self.seed = App(job, seed, fsdp2), seed
            self.app.state(seed)

        def state_dict(self) -> State:
            return dict(get_model_state_dict(self.app.model))

        def load_state_dict(self, state_dict: State) -> None:
            from torch.distributed.checkpoint.state_dict import set_model_state_dict

            set_model_state_dict(self.app.model, state_dict)

    def state(seed: int) -> State:
        model = Net()
        filled(dict(model.state_dict()), seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * seed, momentum=0.5)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(seed))
        optimizer.step()
        filled(dict(model.state_dict()), seed)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 * seed)
        return {
            "full": Full(seed),
            "counter": Counter(seed),
            "net": model,
            "optimizer": optimizer,
            "scheduler": scheduler.state_dict(),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed).state_dict(),
            "step": seed,
            "tensor": filled({"t": torch.zeros(5)}, seed)["t"],
        }

    job.conforms(state)


def lists_of_objects(job: Job) -> None:
    """Several optimizers and models in dicts, as a program with more than one has them."""

    def state(seed: int) -> State:
        apps = [App(job, seed + n, fsdp2) for n in range(2)]
        states = [app.state(seed) for app in apps]
        return {
            "models": {str(n): s["model"] for n, s in enumerate(states)},
            "optims": [s["optim"] for s in states],
            "one": Counter(seed),
            "two": Counter(seed + 4),
        }

    job.conforms(state)


def other_order(job: Job) -> None:
    """Ranks have their keys in other orders."""

    def state(seed: int) -> State:
        names = ["c", "a", "e", "b", "d"]
        random.Random(job.rank + seed).shuffle(names)
        plain = {name: spread(UNEVEN, job.mesh(), ONE[1]) for name in "abcde"}
        return filled({name: plain[name] for name in names} | {"n": seed}, seed)

    job.conforms(state)


def own_keys(job: Job) -> None:
    """Every rank saves tensors and values under names of its own, beside some that all have."""

    def state(seed: int) -> State:
        own = {
            f"rank{job.rank}.w": torch.zeros(3, job.rank + 1),
            f"rank{job.rank}.step": 10 * seed + job.rank,
        }
        return filled(own | zeros(job, "all") | {"epoch": seed}, seed)

    others = tuple(f"rank{r}." for r in range(job.world) if r != job.rank)
    job.conforms(state, unused=lambda name: name.startswith(others))


def partial_loads(job: Job) -> None:
    """A state of fewer names; one of more, with ``allow_partial_load`` there and ``strict=False`` here."""
    path = job.folder / "saved"

    def saved(seed: int) -> State:
        return filled({"model": zeros(job, "a", "b", "c"), "step": seed, "more": {"x": seed}}, seed)

    def fewer(seed: int) -> State:
        state = saved(seed)
        return {"model": {"b": state["model"]["b"]}, "more": state["more"]}

    dcp.save(saved(SAVED), checkpoint_id=path)
    job.loads(path, fewer, unused=lambda name: name in ("model.a", "model.c"))
    job.rewrites(path, fewer, ("dcp", "mesh"))

    def greater(seed: int) -> State:
        state = saved(seed)
        # What the checkpoint lacks keeps the value that it has, whatever the seed.
        state["model"]["new"] = torch.full((3,), 7.0)
        return state | {"absent": {"y": "kept"}}

    def leniently(state: State, path: Path) -> None:
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=path, planner=planner)

    job.loads(path, greater, by_torch=leniently, strict=False)


def refusals(job: Job) -> None:
    """Missing names, other shapes, a value for a tensor: both refuse, and `load_into` has changed nothing."""
    path = job.folder / "saved"

    def saved(seed: int) -> State:
        return filled(zeros(job, "a", "b") | {"step": seed}, seed)

    dcp.save(saved(SAVED), checkpoint_id=path)
    wrong: dict[str, Callable[[State], Any]] = {
        "a missing tensor": lambda state: state.update(zeros(job, "c")),
        "a missing value": lambda state: state.update(other=1),
        "another shape": lambda state: state.update(b=spread((5, 7), job.mesh(), ONE[1])),
        "fewer dims": lambda state: state.update(b=torch.zeros(35)),
        "a value for a tensor": lambda state: state.update(b="text"),
    }
    for what, spoil in wrong.items():
        state = saved(OTHER)
        spoil(state)
        before = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in leaves(state).items()}
        with pytest.raises(NameMismatch):
            ckptcore.load_into(ckptcore.open(str(path)), state)
        require_equal(leaves(state), before, f"what was there before {what}")
        with pytest.raises(dcp.CheckpointException):
            load(state, path)
        job.checks.append(f"both refuse {what}")
    dist.barrier()


def save_planners(job: Job) -> None:
    """Every flag of `DefaultSavePlanner`, and plans that a second save takes from the first."""

    def state(seed: int) -> State:
        full = {"same": torch.zeros(3, 4), "also": torch.zeros(5)}
        return filled(
            zeros(job, "a") | {"b": {"c": spread(UNEVEN, job.mesh(), ONE[0])}, "n": seed} | full, seed
        )

    def flat(seed: int) -> State:
        return filled(zeros(job, "a", "b.c") | {"same": torch.zeros(3, 4), "n": seed}, seed)

    flags: dict[str, tuple[Make, dict[str, Any]]] = {
        "lowest": (state, {"dedup_save_to_lowest_rank": True}),
        "deprecated": (state, {"dedup_replicated_tensors": True}),
        "unflattened": (flat, {"flatten_state_dict": False}),
        "unflattened_shards": (state, {"flatten_sharded_tensors": False}),
        "cached": (state, {"enable_plan_caching": True}),
        "again": (state, {"enable_plan_caching": True}),
        "grown": (lambda seed: state(seed) | {"later": seed}, {"enable_plan_caching": True}),
    }
    for name, (make, options) in flags.items():
        part = Job(job.name, job.rank, job.world, job.folder / name, job.checks)
        part.conforms(make, planner=dcp.DefaultSavePlanner(**options), rewritten=("mesh",))


def unflattened_dicts(job: Job) -> None:
    """``flatten_state_dict=False`` makes one object of a dict, with the tensors in it."""
    path = job.folder / "saved"

    def state(seed: int) -> State:
        inside = {"w": torch.zeros(3), "list": [torch.zeros(2), seed]}
        return filled({"top": torch.zeros(4), "dict": inside, "step": seed}, seed)

    def by_torch(state: State, path: Path) -> None:
        # With flatten_sharded_tensors torch loads plain values into a copy, which it drops.
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(state, checkpoint_id=path, planner=planner)

    dcp.save(state(SAVED), checkpoint_id=path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    job.loads(path, state, by_torch=by_torch)


class Scaled(dcp.DefaultSavePlanner):
    """Half precision on the way to the file, as torch's documentation has it."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object)

    def create_local_plan(self) -> Any:
        self.state_dict = {
            name: value.to(torch.float16) if isinstance(value, torch.Tensor) else value
            for name, value in self.state_dict.items()
        }
        return super().create_local_plan()


class Renamed(dcp.DefaultSavePlanner):
    """Everything below another name, as torch's documentation has it."""

    def set_up_planner(
        self, state_dict: State, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner({"renamed": state_dict}, storage_meta, is_coordinator)


def own_planners(job: Job) -> None:
    """Planners of a program: names below another, tensors in half precision."""

    def state(seed: int) -> State:
        return filled(zeros(job, "a", "b") | {"n": seed}, seed)

    path = job.folder / "renamed"
    dcp.save(state(SAVED), checkpoint_id=path, planner=Renamed())

    def below(inner: State, path: Path) -> None:
        dcp.load({"renamed": inner}, checkpoint_id=path)

    job.loads(path, state, by_torch=below, prefix="renamed.")
    path = job.folder / "scaled"
    dcp.save(state(SAVED), checkpoint_id=path, planner=Scaled())

    def coarse(seed: int) -> State:
        made_state = state(seed)
        for tensor in leaves(made_state).values():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(tensor.to(torch.float16))
        return made_state

    job.loads(path, coarse)
    job.rewrites(path, coarse, ("dcp", "mesh"))


RUNS: dict[str, Callable[[Job], None]] = {
    f.__name__: f
    for f in (
        nested,
        tuples,
        plain_values,
        stateful_objects,
        lists_of_objects,
        other_order,
        own_keys,
        partial_loads,
        refusals,
        save_planners,
        unflattened_dicts,
        own_planners,
    )
}
