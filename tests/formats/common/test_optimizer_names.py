"""Name numbered optimizer states where the names are proven, and nowhere else.

The states are torch's own; test_lightning_training.py has those that Lightning saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_cases import VERSION
from torch import nn

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.formats.common.optimizer_numbers import Row, forced_places

Model = Callable[[], nn.Module]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Decoder(nn.Module):
    """Equal layers, a batch norm, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([Block(4) for _ in range(3)])
        self.bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.bn(x))


def trained(net: nn.Module, *optimizers: torch.optim.Optimizer) -> list[dict[int, str]]:
    """Train one step; return number -> name, as torch numbers them."""
    net(torch.arange(8) % 9).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step(None)
    names = {id(p): n for n, p in net.named_parameters()}
    return [dict(enumerate(names[id(p)] for g in o.param_groups for p in g["params"])) for o in optimizers]


def read(folder: Path, net: nn.Module, *states: Any) -> Manifest:
    full = {**VERSION, "state_dict": net.state_dict(), "optimizer_states": list(states)}
    torch.save(full, folder / "full.ckpt")
    return ckptcore.open(str(folder / "full.ckpt"))


def names_by_number(manifest: Manifest) -> dict[int, dict[int, str]]:
    names = manifest.origin["lightning"].get("parameters", {})
    return {int(n): {int(i): name for i, name in row.items()} for n, row in names.items()}


def unnamed(manifest: Manifest) -> list[str | None]:
    return [f.fqn for f in manifest.findings if f.code == "unnamed-states"]


ONE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "NAdam": torch.optim.NAdam,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("kind", ONE)
def test_every_optimizer_of_torch(kind: str, tmp_path: Path) -> None:
    net = Decoder()
    optimizer = ONE[kind](net.parameters())
    truth = trained(net, optimizer)
    manifest = read(tmp_path, net, optimizer.state_dict())
    assert names_by_number(manifest) == dict(enumerate(truth))
    assert unnamed(manifest) == []


def test_groups_by_decay(tmp_path: Path) -> None:
    """As in trainers: matrices decay, vectors do not, and the embedding has its own rate."""
    net = Decoder()
    rest = [p for n, p in net.named_parameters() if not n.startswith("embed")]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            {"params": [net.embed.weight], "lr": 1e-4},
            {"params": []},
        ]
    )
    truth = trained(net, optimizer)
    manifest = read(tmp_path, net, optimizer.state_dict())
    assert names_by_number(manifest) == dict(enumerate(truth))
    assert list(truth[0].values()) != [n for n, _ in net.named_parameters()]


def test_frozen_parameters(tmp_path: Path) -> None:
    """Numbered without a state, or not numbered: then their shapes must be unique."""
    net = Decoder()
    net.layers[0].requires_grad_(False)
    inside = torch.optim.AdamW(net.parameters())
    truth = trained(net, inside)
    assert names_by_number(read(tmp_path, net, inside.state_dict())) == dict(enumerate(truth))
    outside = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    trained(net, outside)
    assert unnamed(read(tmp_path, net, outside.state_dict())) == ["optimizer_states.0"]
    net = Decoder()
    net.layers[0].requires_grad_(False)
    net.embed.requires_grad_(False)
    net.layers[1], net.layers[2] = Block(4).requires_grad_(False), nn.Linear(4, 7)
    net.bn, net.head = nn.BatchNorm1d(7), nn.Linear(7, 9)
    tuned = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    truth = trained(net, tuned)
    assert names_by_number(read(tmp_path, net, tuned.state_dict())) == dict(enumerate(truth))


class ActorCritic(nn.Module):
    """Two networks that differ only in their last layer, each with its optimizer."""

    def __init__(self, critic: int = 1) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, critic))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float().reshape(-1, 1)
        return self.actor(x).sum() + self.critic(x).sum()


def test_several_optimizers(tmp_path: Path) -> None:
    """Each parameter belongs to one optimizer if there are as many numbers as parameters."""
    net = ActorCritic()
    pair = torch.optim.AdamW(net.actor.parameters()), torch.optim.SGD(net.critic.parameters(), 0.1, 0.9)
    truth = trained(net, *pair)
    manifest = read(tmp_path, net, *(o.state_dict() for o in pair))
    assert names_by_number(manifest) == dict(enumerate(truth))
    assert unnamed(manifest) == []
    manifest = read(tmp_path, net, pair[1].state_dict())  # some of the parameters may be nobody's
    assert names_by_number(manifest) == {}
    assert unnamed(manifest) == ["optimizer_states.0"]


def test_one_optimizer_for_each_parameter(tmp_path: Path) -> None:
    """As made by a loop over the parameters; an unused one has no state."""
    net = Decoder()
    each = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()]
    truth = trained(net, *each)
    manifest = read(tmp_path, net, *(o.state_dict() for o in each))
    assert names_by_number(manifest) == dict(enumerate(truth))
    net.bn.requires_grad_(False)
    net.zero_grad()
    each = [torch.optim.AdamW([p]) for p in net.parameters()]
    truth = trained(net, *each)
    manifest = read(tmp_path, net, *(o.state_dict() for o in each))
    assert names_by_number(manifest) == {n: t for n, t in enumerate(truth) if "bn" not in t[0]}
    assert unnamed(manifest) == []
    some = [o.state_dict() for n, o in enumerate(each) if n % 2]  # nobody says which
    assert len(unnamed(read(tmp_path, net, *some))) > 0
    other = [o.state_dict() for o in reversed(each)]  # nothing fits this order
    assert names_by_number(read(tmp_path, net, *other)) == {}


@pytest.mark.soak
def test_very_many_optimizers(tmp_path: Path) -> None:
    """The cost of each does not grow with the model."""
    count = 3000
    each = []
    for n in range(count):  # a shape of its own, and one that all have
        state = {0: {"m": torch.zeros(0, n)}, 1: {"m": torch.zeros(1)}}
        each.append({"state": state, "param_groups": [{"params": [0]}, {"params": [1]}]})
    model = {f"p{n}": torch.zeros(0, n) for n in range(count)} | {f"q{n}": torch.zeros(1) for n in range(9)}
    torch.save({**VERSION, "state_dict": model, "optimizer_states": each}, tmp_path / "full.ckpt")
    begin = process_time()
    manifest = ckptcore.open(str(tmp_path / "full.ckpt"))
    assert process_time() - begin < 20
    assert len(unnamed(manifest)) == count


def test_twins_stay_numbers(tmp_path: Path) -> None:
    """Two equal networks: the optimizers could be swapped."""
    net = ActorCritic(critic=2)
    pair = torch.optim.AdamW(net.actor.parameters()), torch.optim.AdamW(net.critic.parameters())
    trained(net, *pair)
    manifest = read(tmp_path, net, *(o.state_dict() for o in pair))
    assert names_by_number(manifest) == {}
    assert unnamed(manifest) == ["optimizer_states.0", "optimizer_states.1"]
    assert all("more than one way" in f.message for f in manifest.findings)
    assert all(f.severity == "info" for f in manifest.findings)
    states = [n for n in manifest.index if n.startswith("optimizer_states.0.state.0.")]
    assert len(states) == 3, "they are carried as they are"


def test_names_recorded_by_the_optimizer(tmp_path: Path) -> None:
    """In any order; below the attribute of the module with the parameters."""
    net = nn.ModuleDict({"body": ActorCritic(critic=2), "other": nn.Linear(1, 1)})
    named = dict(net["body"].named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [(n, named[n]) for n in reversed(named) if n.startswith("critic")]},
            {"params": [(n, named[n]) for n in named if n.startswith("actor")], "lr": 0.1},
        ]
    )
    (truth,) = trained(net["body"], optimizer)
    state = optimizer.state_dict()
    assert names_by_number(read(tmp_path, net, state)) == {0: {i: f"body.{n}" for i, n in truth.items()}}
    state["param_groups"][0]["param_names"][0] = "body.nowhere"
    manifest = read(tmp_path, net, state)
    assert names_by_number(manifest) == {}
    assert unnamed(manifest) == ["optimizer_states.0"]


def test_recorded_names_that_do_not_fit(tmp_path: Path) -> None:
    net = ActorCritic()
    optimizer = torch.optim.AdamW(list(net.named_parameters()))
    (truth,) = trained(net, optimizer)
    state = optimizer.state_dict()
    names = state["param_groups"][0]["param_names"]
    names[0], names[1] = names[1], names[0]  # a matrix and a vector
    assert names_by_number(read(tmp_path, net, state)) == {0: truth}, "by order and shapes"


def by_model(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state numbered as by FSDP: in the order of the model's parameters."""
    order = {id(p): n for n, p in enumerate(net.parameters())}
    number = [order[id(p)] for g in optimizer.param_groups for p in g["params"]]
    state = optimizer.state_dict()
    groups = [{**g, "params": sorted(number[i] for i in g["params"])} for g in state["param_groups"]]
    return {"state": {number[i]: s for i, s in state["state"].items()}, "param_groups": groups}


def test_numbers_that_count_the_models_parameters(tmp_path: Path) -> None:
    """Twins, frozen layers and groups of any kind: the numbers themselves are the places."""
    net = Decoder()
    net.layers[1].requires_grad_(False)
    free = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": free[1::2]}, {"params": free[::2]}])
    trained(net, optimizer)
    order = [n for n, _ in net.named_parameters()]
    state = by_model(net, optimizer)
    manifest = read(tmp_path, net, state)
    numbers = {i for g in state["param_groups"] for i in g["params"]}
    assert names_by_number(manifest) == {0: {i: order[i] for i in numbers}}
    net = ActorCritic(critic=2)
    pair = torch.optim.AdamW(net.actor.parameters()), torch.optim.AdamW(net.critic.parameters())
    truth = trained(net, *pair)
    manifest = read(tmp_path, net, *(by_model(net, o) for o in pair))
    assert names_by_number(manifest) == {0: truth[0], 1: {i + 6: n for i, n in truth[1].items()}}


def adam(*shapes: tuple[int, ...], ids: list[int] | None = None) -> dict[str, Any]:
    ids = list(range(len(shapes))) if ids is None else ids
    state = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(s)} for i, s in zip(ids, shapes, strict=True)
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": ids}]}


A, B = (2, 3), (3,)
WRONG: dict[str, dict[str, Any]] = {
    "another shape": adam((4, 4)),
    "more than there are": adam(A, B, A, B, A),
    "another order": adam(B, A, A),
    "a number beyond the model": adam(A, B, ids=[0, 9]),
    "a number below 0": adam(A, B, ids=[-1, 0]),
    "two shapes of one parameter": {
        "state": {0: {"exp_avg": torch.zeros(A), "exp_avg_sq": torch.zeros(B)}},
        "param_groups": [{"params": [0]}],
    },
    "states that are one vector": {
        "state": {0: {"d": torch.zeros(18), "old_dirs": [torch.zeros(18)], "n_iter": 3}},
        "param_groups": [{"params": [0, 1, 2, 3]}],
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_no_fit_is_a_finding(case: str, tmp_path: Path) -> None:
    net = nn.ModuleDict({n: nn.Linear(3, 2, bias=False) for n in "ac"})
    for n in "bd":
        net[n] = nn.LayerNorm(3, bias=False)
    ordered = nn.ModuleDict({n: net[n] for n in "abcd"})
    manifest = read(tmp_path, ordered, WRONG[case])
    assert names_by_number(manifest) == {}
    assert unnamed(manifest) == ["optimizer_states.0"]
    assert any(w in manifest.findings[0].message for w in ("do not fit the model", "do not tell the shape"))


NOT_NUMBERED: dict[str, Any] = {
    "nothing": None,
    "no groups": {"state": {}},
    "a group that is no dict": {"state": {}, "param_groups": [3]},
    "names": {"state": {"a.weight": {}}, "param_groups": [{"params": ["a.weight"]}]},
    "a number twice": {"state": {}, "param_groups": [{"params": [0, 0]}]},
    "a state of no group": {"state": {5: {}}, "param_groups": [{"params": [0]}]},
    "no tensor": {"state": {0: {"step": 3}, 1: 7}, "param_groups": [{"params": [0, 1]}]},
    "no momentum": {"state": {}, "param_groups": [{"params": [0, 1]}]},
}


def test_counts_alone_prove_nothing(tmp_path: Path) -> None:
    """As many numbers as parameters, and only steps in the states."""
    net = nn.Linear(2, 2)
    state = {i: {"step": torch.tensor(1.0)} for i in range(2)}
    manifest = read(tmp_path, net, {"state": state, "param_groups": [{"params": [0, 1]}]})
    assert names_by_number(manifest) == {}
    assert unnamed(manifest) == ["optimizer_states.0"]


def test_the_adafactor_of_transformers(tmp_path: Path) -> None:
    """Its matrices have a row and a column, its vectors a moment."""
    net = Decoder()
    order = [n for n, _ in net.named_parameters()]
    state: dict[int, Any] = {}
    for n, p in enumerate(net.parameters()):
        value = p.detach()
        matrix = {"exp_avg_sq_row": value[..., 0], "exp_avg_sq_col": value.mean(0)}
        state[n] = {"step": 3, "RMS": 0.5, **(matrix if p.ndim > 1 else {"exp_avg_sq": value})}
    manifest = read(tmp_path, net, {"state": state, "param_groups": [{"params": list(state)}]})
    assert names_by_number(manifest) == {0: dict(enumerate(order))}


@pytest.mark.parametrize("case", NOT_NUMBERED)
def test_no_finding_without_numbers(case: str, tmp_path: Path) -> None:
    manifest = read(tmp_path, nn.Linear(2, 2), NOT_NUMBERED[case])
    assert names_by_number(manifest) == {}
    assert manifest.findings == ()


def test_contradicting_optimizers_that_count_the_model(tmp_path: Path) -> None:
    """A number means one parameter, which has one shape."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    square, row = adam((3, 3), ids=[1]), adam((3,), ids=[1])
    manifest = read(tmp_path, net, square, row)
    assert names_by_number(manifest) == {}
    assert unnamed(manifest) == ["optimizer_states.0", "optimizer_states.1"]


shapes = st.lists(st.sampled_from([(1,), (2,), (3,)]), max_size=6)
wanted = st.lists(st.sampled_from([None, (1,), (2,), (3,)]), max_size=4)


@settings(max_examples=300, deadline=None)
@given(shapes, st.lists(wanted, max_size=3))
def test_what_is_forced_is_in_every_solution(row: Any, chains: Any) -> None:
    found = forced_places(Row(row), chains)
    solutions = [
        way
        for way in itertools.product(*(itertools.combinations(range(len(row)), len(c)) for c in chains))
        if len({p for places in way for p in places}) == sum(map(len, chains))
        and all(
            s in (None, row[p])
            for chain, at in zip(chains, way, strict=True)
            for s, p in zip(chain, at, strict=True)
        )
    ]
    if found is None:
        assert solutions == []
        return
    for chain, places in enumerate(found):
        for n, place in enumerate(places):
            assert place is None or all(way[chain][n] == place for way in solutions)
