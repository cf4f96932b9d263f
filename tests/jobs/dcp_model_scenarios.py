"""Scenarios of models and optimizers: FSDP, HSDP, DDP, tensor and pipeline parallelism, into each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_scenario import OTHER, SAVED, Job, Make, State, filled, leaves, load, raw, require_equal
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ckptcore

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WIDTH, INNER, VOCABULARY = 6, 12, 11  # tensor parallelism itself needs an even inner width


class Net(nn.Module):
    """Mostly shapes that 4 ranks do not divide, a buffer that is saved and one that is not."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.up = nn.Linear(width, INNER)
        self.down = nn.Linear(INNER, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("own", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


def ddp(job: Job, model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp1(job: Job, model: nn.Module) -> nn.Module:
    return FSDP1(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp1_mesh(job: Job, model: nn.Module) -> nn.Module:
    mesh = job.mesh()
    return FSDP1(model, device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh)


def hsdp1(job: Job, model: nn.Module) -> nn.Module:
    mesh = job.mesh(2, job.world // 2)
    return FSDP1(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )


def fsdp2(job: Job, model: nn.Module) -> nn.Module:
    return wholly(model, job.mesh())


def hsdp2(job: Job, model: nn.Module) -> nn.Module:
    return wholly(model, job.mesh(2, job.world // 2))


def wholly(model: nn.Module, mesh: Any) -> nn.Module:
    fully_shard(model.up, mesh=mesh)
    fully_shard(model.down, mesh=mesh)
    return fully_shard(model, mesh=mesh)


PLAN: dict[str, Any] = {"up": ColwiseParallel, "down": RowwiseParallel}


def tp(job: Job, model: nn.Module) -> nn.Module:
    return parallelize_module(model, job.mesh(), {n: how() for n, how in PLAN.items()})


def fsdp2_tp(job: Job, model: nn.Module) -> nn.Module:
    mesh = job.mesh(job.world // 2, 2)
    parallelize_module(model, mesh["b"], {n: how() for n, how in PLAN.items()})
    return wholly(model, mesh["a"])


def plain(job: Job, model: nn.Module) -> nn.Module:
    return model


Shape = Callable[[Job, nn.Module], nn.Module]
MESHES: tuple[Shape, ...] = (plain, ddp, fsdp1_mesh, hsdp1, fsdp2, hsdp2, tp, fsdp2_tp)


class App:
    """A model, and an optimizer with state; the values are those of the seed, on every mesh."""

    def __init__(
        self,
        job: Job,
        seed: int,
        shape: Shape,
        *,
        net: Callable[[], nn.Module] = Net,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        groups: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(7)
        self.model = shape(job, net())
        own = list(self.model.parameters())
        given: Any = (
            [{"params": own[:3], "weight_decay": 0.25 / seed}, {"params": own[3:]}] if groups else own
        )
        self.optimizer = optimizer(given, lr=0.01 * seed, **options)

    def state(self, seed: int, options: StateDictOptions | None = None) -> State:
        model, optim = get_state_dict(self.model, self.optimizer, options=options)
        return filled({"model": model, "optim": optim}, seed)

    def resumed(self, state: State, options: StateDictOptions | None = None) -> list[str]:
        """Two losses after the state has been set, and a digest of what the model then is."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=options,
        )
        found = []
        for _ in range(2):
            self.optimizer.zero_grad()
            loss = self.model(torch.arange(8).reshape(2, 4)).square().mean()
            loss.backward()
            self.optimizer.step()
            found.append(float(loss.detach()).hex())
        digest = hashlib.sha256()
        for parameter in leaves(get_model_state_dict(self.model)).values():
            digest.update(raw(parameter).numpy().tobytes())
        return [*found, digest.hexdigest()]


def made(job: Job, shape: Shape, *, flat: bool = False, **options: Any) -> Make:
    return lambda seed: App(job, seed, shape, **options).state(seed, FLAT if flat else None)


def each_into(job: Job, saved: tuple[Shape, ...], loaded: tuple[Shape, ...], **options: Any) -> None:
    """Save with some meshes, load into others, and go on training."""
    for source in saved:
        path = job.folder / source.__name__
        dcp.save(made(job, source, **options)(SAVED), checkpoint_id=path)
        for target in loaded:
            make = made(job, target, **options)
            job.loads(path, make, what=f"{source.__name__} into {target.__name__}")
            resumes(job, path, target, **options)
        job.rewrites(path, made(job, loaded[-1], **options), ("dcp", "mesh"))


def resumes(job: Job, path: Any, shape: Shape, *, flat: bool = False, **options: Any) -> None:
    """The steps that follow are the same, bit for bit, whoever loaded."""
    ran = []
    how = FLAT if flat else None
    for by_torch in (True, False):
        app = App(job, OTHER, shape, **options)
        state = app.state(OTHER, how)
        if by_torch:
            load(state, path)
        else:
            ckptcore.load_into(ckptcore.open(str(path)), state)
        ran.append(app.resumed(state, how))
    assert ran[0] == ran[1], ran
    job.checks.append("the next steps are the same")


def fsdp1_models(job: Job) -> None:
    """ShardedTensors and DTensors of FSDP1, with optimizers, into each other and FSDP2."""
    every_rank = {"net": lambda: Net(7)}  # of 7 rows each of 4 ranks has some
    each_into(job, (fsdp1, fsdp1_mesh), (fsdp1, fsdp1_mesh, fsdp2), **every_rank)


def fsdp1_empty_ranks(job: Job) -> None:
    """Some rank has no shard of a ShardedTensor: torch takes the save for one of version 2.3, and fails."""
    path, make = job.folder / "saved", made(job, fsdp1)
    dcp.save(make(SAVED), checkpoint_id=path)

    def refuses(state: State, path: Any) -> None:
        with pytest.raises(dcp.CheckpointException, match=r"optim\.param_groups"):
            load(state, path)
        ckptcore.load_into(ckptcore.open(str(path)), state)

    job.loads(path, make, by_torch=refuses, what="load_into equals what was saved; torch cannot load it")
    job.loads(path, made(job, fsdp2))
    job.rewrites(path, made(job, fsdp2), ("dcp", "mesh"))


def fsdp1_optimizer(job: Job) -> None:
    """`load_sharded_optimizer_state_dict`, which reads the checkpoint itself, is the oracle."""
    path = job.folder / "saved"

    def states(seed: int) -> tuple[State, State]:
        app = App(job, seed, fsdp1)
        get_optimizer_state_dict(app.model, app.optimizer)  # gives it state
        with FSDP1.state_dict_type(app.model, StateDictType.SHARDED_STATE_DICT):
            model = app.model.state_dict()
            optim = FSDP1.optim_state_dict(app.model, app.optimizer)
        return filled({"model": model}, seed), filled({"optim": optim}, seed)

    model, optim = states(SAVED)
    dcp.save(model | optim, checkpoint_id=path)
    theirs = load_sharded_optimizer_state_dict(model["model"], "optim", dcp.FileSystemReader(path))
    ours = load_sharded_optimizer_state_dict(model["model"], "optim", dcp.FileSystemReader(path))
    filled(ours, OTHER)
    left = ckptcore.load_into(ckptcore.open(str(path)), ours)
    assert all(name.startswith("model.") for name in left), left
    require_equal(ours, theirs, "what load_sharded_optimizer_state_dict loads")
    job.checks.append("load_into equals load_sharded_optimizer_state_dict")
    job.loads(path, lambda seed: {k: v for s in states(seed) for k, v in s.items()})


def hsdp(job: Job) -> None:
    each_into(job, (hsdp1, hsdp2), (hsdp1, hsdp2, fsdp1_mesh, fsdp2))


def hsdp_from_fsdp(job: Job) -> None:
    each_into(job, (fsdp1_mesh, fsdp2), (hsdp1, hsdp2))


def fsdp_and_tp(job: Job) -> None:
    each_into(job, (fsdp1_mesh, fsdp2, fsdp2_tp, tp), (fsdp2, tp, fsdp2_tp))


def end_to_end(job: Job) -> None:
    each_into(job, (fsdp2_tp,), (fsdp2,))


def every_mesh(job: Job) -> None:
    each_into(job, MESHES, MESHES)


def every_mesh_flat(job: Job) -> None:
    each_into(job, (plain, fsdp1_mesh, fsdp2, fsdp2_tp), (ddp, hsdp2, tp), flat=True)


def tp_on_meta(job: Job) -> None:
    """A tensor-parallel model is made on the meta device, filled, and assigned."""
    path = job.folder / "saved"

    def model(seed: int) -> nn.Module:
        module = tp(job, Net())
        filled(dict(module.state_dict()), seed)
        return module

    dcp.save({"model": model(SAVED).state_dict()}, checkpoint_id=path)
    outcomes = []
    for by_torch in (True, False):
        with torch.device("meta"):
            module = Net()
        tp(job, module)
        state = {"model": dict(module.state_dict())}
        if by_torch:
            load(state, path)
        else:
            assert ckptcore.load_into(ckptcore.open(str(path)), state) == []
        module.load_state_dict(state["model"], assign=True)
        outcomes.append(dict(module.state_dict()))
    require_equal(outcomes[1], outcomes[0], "what torch loads")
    require_equal(outcomes[1], dict(model(SAVED).state_dict()), "what was saved")
    job.checks.append("load_into equals torch's load")


class Tuned(nn.Module):
    """A pretrained body, frozen, and a head to train."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.body.requires_grad_(False)
        self.extra = nn.Linear(VOCABULARY, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(self.body(x))


def fine_tuning(job: Job) -> None:
    """Pretraining is saved; its model part alone is loaded into a greater model, which is saved in turn."""
    pretrained, tuned = job.folder / "pretrained", job.folder / "tuned"
    dcp.save(made(job, fsdp2)(SAVED), checkpoint_id=pretrained)
    inner = StateDictOptions(keep_submodule_prefixes=False)

    def full(seed: int) -> tuple[nn.Module, State]:
        torch.manual_seed(seed)
        model = Tuned()
        wholly(model.body, job.mesh())
        fully_shard(model, mesh=job.mesh())
        return model, {"model": get_model_state_dict(model, submodules={model.body}, options=inner)}

    def body(seed: int) -> State:
        return filled(full(seed)[1], seed)

    job.loads(pretrained, body, unused=lambda name: name.startswith("optim."))
    job.rewrites(pretrained, body, ("dcp", "mesh"))
    model, part = full(OTHER)
    ckptcore.load_into(ckptcore.open(str(pretrained)), part)
    set_model_state_dict(
        model, {f"body.{n}": t for n, t in part["model"].items()}, options=StateDictOptions(strict=False)
    )
    require_equal(
        {"model": get_model_state_dict(model, submodules={model.body}, options=inner)}, body(SAVED), ""
    )
    only = StateDictOptions(ignore_frozen_params=True)

    def trained(seed: int) -> State:
        model, _ = full(seed)
        own = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(own, lr=0.1 * seed)
        weights, optim = get_state_dict(model, optimizer, options=only)
        assert not any(n.startswith("body.up") for n in weights)
        return filled({"model": weights, "optim": optim}, seed)

    dcp.save(trained(SAVED), checkpoint_id=tuned)
    job.loads(tuned, trained)
    job.rewrites(tuned, trained, ("dcp", "mesh"))


def pipeline(job: Job) -> None:
    """Two stages, each with FSDP of its own: ranks have other keys. Into one model, and back."""
    mesh = job.mesh(2, job.world // 2, names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            full = Net()
            for name in (("embed", "up"), ("down", "norm", "head"))[stage]:
                setattr(self, name, getattr(full, name))

    def staged(job: Job, model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=mesh["dp"])

    def stages(seed: int) -> State:
        return App(job, seed, staged, net=Stage).state(seed, FLAT)

    def full(seed: int) -> State:
        state = App(job, seed, fsdp2).state(seed, FLAT)
        del state["model"]["scale"]
        return state

    job.conforms(stages, full)
    back = Job(job.name, job.rank, job.world, job.folder / "back", job.checks)
    here = set(leaves(stages(SAVED)))
    back.conforms(full, stages, unused=lambda name: name not in here)


def experts(job: Job) -> None:
    """Each half of the ranks has experts of its own, sharded among them; the rest all ranks share."""
    mesh = job.mesh(2, job.world // 2, names=("ep", "dp"))
    own = mesh.get_local_rank("ep")

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 2)
            self.experts = nn.ModuleDict({str(own): nn.Linear(WIDTH, INNER)})

    def shape(job: Job, model: nn.Module) -> nn.Module:
        fully_shard(model.experts[str(own)], mesh=mesh["dp"])
        return fully_shard(model, mesh=job.mesh())

    def wide(job: Job, model: nn.Module) -> nn.Module:
        fully_shard(model.experts[str(own)], mesh=mesh["dp"])
        return model

    others = f"experts.{1 - own}."
    job.conforms(
        made(job, shape, net=Mixture, flat=True),
        made(job, wide, net=Mixture, flat=True),
        unused=lambda name: others in name,
    )


def optimizers(job: Job) -> None:
    """State of other names and shapes than AdamW's, groups with options, and no state at all."""
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adamax, {}),
    ]
    for n, (optimizer, options) in enumerate(kinds):
        for flat in (False, True):
            part = Job(job.name, job.rank, job.world, job.folder / f"{n}-{flat}", job.checks)
            known = {"flat": flat, "optimizer": optimizer, "groups": True, **options}
            kinds_of_output = ("dcp", "mesh") if n == 1 else ("mesh",)
            part.conforms(made(job, fsdp2, **known), made(job, hsdp2, **known), rewritten=kinds_of_output)


def frozen_parameters(job: Job) -> None:
    """The optimizer has all parameters, and no state for those without a gradient."""

    def net() -> nn.Module:
        model = Net()
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
        return model

    for flat in (False, True):
        part = Job(job.name, job.rank, job.world, job.folder / f"{flat}", job.checks)
        each_into(part, (plain, fsdp2), (fsdp2_tp, hsdp2), net=net, flat=flat)


def full_state(job: Job) -> None:
    """A gathered state, full on every rank or on the first alone, and set again by broadcast."""
    for n, options in enumerate(
        (
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, cpu_offload=True),
            StateDictOptions(cpu_offload=True),
        )
    ):
        app = App(job, SAVED, fsdp2)
        app.optimizer.zero_grad()
        app.resumed(app.state(SAVED))
        model, optim = get_state_dict(app.model, app.optimizer, options=options)
        path = job.folder / str(n)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path)
        outcomes = []
        for by_torch in (True, False):
            other = App(job, OTHER, fsdp2_tp)
            state = other.state(OTHER)
            if by_torch:
                load(state, path)
            else:
                assert ckptcore.load_into(ckptcore.open(str(path)), state) == []
            outcomes.append((state, other.resumed(state)))
        assert outcomes[0][1] == outcomes[1][1]
        job.checks.append("the next steps are the same")
    # A full state is read by the first rank, and torch sends the others their parts.
    target = App(job, OTHER, fsdp2_tp)
    full = {n: torch.zeros(t.shape) for n, t in Net().state_dict().items()} if job.rank == 0 else {}
    if job.rank == 0:
        ckptcore.load_into(ckptcore.open(str(job.folder / "0")), {"model": full})
    send = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target.model, full, options=send)
    mine = {"model": get_model_state_dict(target.model)}
    theirs = {"model": App(job, OTHER, fsdp2_tp).state(OTHER)["model"]}
    load(theirs, job.folder / "0")
    require_equal(mine, theirs, "what torch loads")
    job.checks.append("broadcast from the first rank")


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def tied_weights(job: Job) -> None:
    """One parameter under two names, loaded into a tied and into an untied model."""
    shapes: tuple[Shape, ...] = (plain, fsdp2)
    for n, net in enumerate((Tied, Net)):
        part = Job(job.name, job.rank, job.world, job.folder / str(n), job.checks)
        path = part.folder / "saved"

        def weights(seed: int, net: Any = Tied, shape: Shape = fsdp2) -> State:
            return filled({"model": get_model_state_dict(shape(job, net()))}, seed)

        dcp.save(weights(SAVED), checkpoint_id=path)
        for shape in shapes:
            ours, theirs = weights(OTHER, net, shape), weights(OTHER, net, shape)
            assert ckptcore.load_into(ckptcore.open(str(path)), ours) == []
            load(theirs, path)
            require_equal(ours, theirs, "what torch loads")
            one, two = (leaves(ours)[f"model.{x}.weight"] for x in ("embed", "head"))
            assert torch.equal(one, two)
            job.checks.append("load_into equals torch's load")
        part.rewrites(path, weights, ("dcp", "mesh"))


class Extra(nn.Module):
    """State that is no parameter: of tensors, and of plain values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.seen: Any = {"calls": seed, "name": f"run-{seed}", "rate": seed / 3}
        self.norm = nn.BatchNorm1d(5)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class ExtraTensor(Extra):
    def get_extra_state(self) -> Any:
        return torch.full((4,), float(self.seen["calls"]))


def extra_state(job: Job) -> None:
    for n, kind in enumerate((Extra, ExtraTensor)):
        part = Job(job.name, job.rank, job.world, job.folder / str(n), job.checks)

        def state(seed: int, kind: Any = kind) -> State:
            return filled({"model": get_model_state_dict(kind(seed))}, seed)

        part.conforms(state)


RUNS: dict[str, Callable[[Job], None]] = {
    f.__name__: f
    for f in (
        fsdp1_models,
        fsdp1_empty_ranks,
        fsdp1_optimizer,
        hsdp,
        hsdp_from_fsdp,
        fsdp_and_tp,
        end_to_end,
        every_mesh,
        every_mesh_flat,
        tp_on_meta,
        fine_tuning,
        pipeline,
        experts,
        optimizers,
        frozen_parameters,
        full_state,
        tied_weights,
        extra_state,
    )
}
