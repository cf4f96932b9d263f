"""Read Megatron's optimizer state by parameter: numbered, in flat buffers, or unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from legacy_ranks import (
    Case,
    E,
    Tensors,
    expected,
    folder,
    full_layer,
    local_layer,
    rank_models,
    ranks_of,
    require_equal,
    save,
)

import ckptcore
from ckptcore.formats.megatron.flat_buffers import lay_out, lay_out_buffer
from ckptcore.formats.megatron.parameter_order import Parameter, Unregistered
from ckptcore.formats.megatron.partition_rules import Placement

KINDS = ("exp_avg", "exp_avg_sq")


def states(case: Case, kind: str) -> tuple[Tensors, list[Tensors]]:
    """Return state values for a full model, in the shapes of the weights."""
    torch.manual_seed(len(kind))
    around = {
        "embedding.word_embeddings.weight": torch.randn(64, 16),
        "decoder.final_layernorm.weight": torch.randn(16),
        "output_layer.weight": torch.randn(64, 16),
    }
    layers = [{k: torch.randn(v.shape) for k, v in full_layer(case).items()} for _ in range(case.layers)]
    return around, layers


def rank_states(case: Case, kind: str, rank: tuple[int, int, int]) -> list[Tensors]:
    return rank_models(case, *states(case, kind), *rank)


def is_expert(case: Case, name: str) -> bool:
    return case.ep > 1 and ".mlp.experts." in name


def truth(case: Case, kind: str) -> Tensors:
    return expected(case, *states(case, kind))


# --- numbered -------------------------------------------------------------------------------------


def numbered(case: Case, rank: tuple[int, int, int], expert: bool) -> dict[str, Any]:
    """Return the state of a plain optimizer: groups with and without weight decay, and master copies."""
    by_kind = {kind: rank_states(case, kind, rank) for kind in (*KINDS, "fp32_param")}
    names = [
        (v, n) for v, chunk in enumerate(by_kind["exp_avg"]) for n in chunk if is_expert(case, n) == expert
    ]
    groups, state, masters, number = [], {}, [], 0
    for decay in (1.0, 0.0):
        mine = [k for k in names if (by_kind["exp_avg"][k[0]][k[1]].dim() == 1) == (decay == 0.0)]
        if not mine:
            continue
        numbers = list(range(number, number + len(mine)))
        groups.append(
            {
                "params": numbers,
                "wd_mult": decay,
                "lr_mult": 1.0,
                "lr": 1e-4,
                "is_expert_parallel": expert,
                "is_decoupled_lr": False,
            }
        )
        for n, (v, name) in zip(numbers, mine, strict=True):
            state[n] = {kind: by_kind[kind][v][name] for kind in KINDS} | {"step": torch.tensor(7.0)}
        masters.append([_marked(by_kind["fp32_param"][v][name]) for v, name in mine])
        number += len(mine)
    return {"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": masters}


def _marked(value: torch.Tensor) -> torch.Tensor:
    value.tensor_model_parallel = True  # Megatron's master copies carry attributes
    return value


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2),
        Case(tp=2, pp=2, vpp=2),
        Case(ep=2, experts="sequential"),
        Case(tp=2, experts="te"),
        Case(tp=2, pp=2, tied=True),
    ],
    ids=["tp2", "vpp2", "ep2", "ep1", "tied"],
)
def test_numbered_states(case: Case, tmp_path: Path) -> None:
    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        parts = [numbered(case, rank, False)] + ([numbered(case, rank, True)] if case.ep > 1 else [])
        tree["optimizer"] = parts if len(parts) > 1 else parts[0]

    save(case, tmp_path, edit)
    for kind in (*KINDS, "fp32_param"):
        manifest = require_equal(tmp_path, truth(case, kind), f"optimizer.state.{kind}.")
    assert not [f for f in manifest.findings if f.severity != "info"]


def test_numbers_that_do_not_fit_stay(tmp_path: Path) -> None:
    case = Case()

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["optimizer"] = numbered(case, rank, False)
        tree["optimizer"]["optimizer"]["param_groups"][0]["params"].pop()

    manifest = ckptcore.open(str(save(case, tmp_path, edit)))
    assert [f.code for f in manifest.findings] == ["flat-buffers"]
    assert "optimizer/mp_rank_00.optimizer.state.0.exp_avg" in manifest.index


def test_several_optimizers_by_number(tmp_path: Path) -> None:
    """Later releases store the optimizers of a chain in a dict by number."""
    case = Case(ep=2, experts="sequential")

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["optimizer"] = {1: numbered(case, rank, True), 0: numbered(case, rank, False)}

    save(case, tmp_path, edit)
    for kind in (*KINDS, "fp32_param"):
        require_equal(tmp_path, truth(case, kind), f"optimizer.state.{kind}.")


def test_an_empty_group_has_no_parameter(tmp_path: Path) -> None:
    case = Case()

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["optimizer"] = numbered(case, rank, False)
        tree["optimizer"]["optimizer"]["param_groups"].append({"params": [], "wd_mult": 1.0})
        tree["optimizer"]["fp32_from_fp16_params"].append([])

    save(case, tmp_path, edit)
    require_equal(tmp_path, truth(case, "exp_avg"), "optimizer.state.exp_avg.")


def _groups(optimizer: dict[str, Any]) -> Any:
    return optimizer["optimizer"]["param_groups"]


ODD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no groups": (lambda o: o["optimizer"].pop("param_groups"), "without parameter groups"),
    "no numbers": (lambda o: _groups(o)[0].pop("params"), "without numbers"),
    "another rate": (lambda o: _groups(o)[0].update(lr_mult=0.1), "different learning rates"),
    "a head's own rate": (lambda o: _groups(o)[0].update(is_decoupled_lr=True), "different learning rates"),
    "a state of another shape": (
        lambda o: o["optimizer"]["state"][0].update(exp_avg=torch.zeros(3)),
        r"a state of \[3\]",
    ),
    "masters of another group": (lambda o: o["fp32_from_fp16_params"].pop(), "different groups"),
    "a master is missing": (lambda o: o["fp32_from_fp16_params"][0].pop(), "different parameters"),
    "a master that is not a tensor": (
        lambda o: o["fp32_from_fp16_params"][0].__setitem__(0, 5),
        "is not a tensor",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_numbered_states_that_do_not_add_up_stay_numbered(name: str, tmp_path: Path) -> None:
    """Nothing is guessed and nothing is lost: every tensor keeps its number."""
    case, (change, reason) = Case(), ODD[name]

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["optimizer"] = numbered(case, rank, False)
        change(tree["optimizer"])

    manifest = ckptcore.open(str(save(case, tmp_path, edit)))
    (found,) = (f for f in manifest.findings if f.code == "flat-buffers")
    assert re.search(reason, found.message), found.message
    assert not [t.fqn for t in manifest.tensors if t.fqn.startswith("optimizer.state.")]
    states = torch.load(tmp_path / "iter_0000100/mp_rank_00/model_optim_rng.pt", weights_only=False)
    for number, state in states["optimizer"]["optimizer"]["state"].items():
        for kind, value in state.items():
            fqn = f"optimizer/mp_rank_00.optimizer.state.{number}.{kind}"
            assert torch.equal(ckptcore.read(manifest, fqn), value), fqn


# --- flat buffers ---------------------------------------------------------------------------------


def buffer(values: list[torch.Tensor]) -> torch.Tensor:
    """Return a flat buffer: last parameter first, each at a multiple of 64; gaps have any value."""
    parts: list[torch.Tensor] = []
    at = 0
    for value in reversed(values):
        gap = -at % 64
        parts += [torch.full((gap,), float("nan")), value.reshape(-1)]
        at += gap + value.numel()
    return torch.cat(parts)


def flat(case: Case, rank: tuple[int, int, int], expert: bool) -> dict[Any, Any]:
    out: dict[Any, Any] = {"buckets_coalesced": True}
    for v in range(case.vpp):
        stored: dict[str, Any] = {}
        for kind in (*KINDS, "param"):
            chunk = rank_states(case, kind, rank)[v]
            stored[kind] = buffer([t for n, t in chunk.items() if is_expert(case, n) == expert])
        stored["numel_unpadded"] = stored["param"].numel()
        out[v] = {(torch.bfloat16, torch.float32): stored}
    return out


def add_flat(case: Case, base: Path) -> None:
    for rank in ranks_of(case):
        parts: list[Any] = [flat(case, rank, False)]
        if case.ep > 1:
            # One rank of each data-parallel group writes; experts have their own groups.
            parts = [parts[0] if rank[2] == 0 else None, flat(case, rank, True)]
        torch.save(parts if len(parts) > 1 else parts[0], base / folder(case, *rank) / "distrib_optim.pt")


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2),
        Case(pp=2, vpp=2),
        Case(ep=2, experts="sequential"),
        Case(tp=2, ep=2, experts="grouped"),
        Case(tp=2, pp=2, tied=True),
        Case(tp=2, latent=True),
    ],
    ids=["tp2", "vpp2", "ep2", "grouped", "tied", "latent"],
)
def test_flat_buffers(case: Case, tmp_path: Path) -> None:
    add_flat(case, save(case, tmp_path))
    for kind in (*KINDS, "param"):
        manifest = require_equal(tmp_path, truth(case, kind), f"optimizer.state.{kind}.")
    assert ckptcore.check(manifest, level="values").ok
    assert not [f for f in ckptcore.check(manifest, level="values").findings if f.code == "not-finite"]


def in_buckets(values: list[torch.Tensor], full: int) -> list[torch.Tensor]:
    """Buckets of a buffer, last parameter first: each ends with the parameter that fills it."""
    buckets: list[list[torch.Tensor]] = [[]]
    for value in reversed(values):
        if buckets[-1] and len(buffer(buckets[-1])) >= full:
            buckets.append([])
        buckets[-1].insert(0, value)
    return [buffer(b) for b in buckets]


FULL = 513  # the last layer's norm fills the first bucket, which then does not end at a multiple of 64


def overlapped(case: Case, kept: Callable[[list[torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Write distrib_optim.pt; ``kept`` makes each buffer from its buckets."""

    def write(base: Path) -> None:
        for rank in ranks_of(case):
            stored = {
                kind: kept(in_buckets(list(rank_states(case, kind, rank)[0].values()), FULL))
                for kind in (*KINDS, "param")
            }
            state = {0: {(torch.bfloat16, torch.float32): stored}}
            torch.save(state, base / folder(case, *rank) / "distrib_optim.pt")

    return write


def _filled(buckets: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pad the last bucket for the data-parallel ranks."""
    return [*buckets[:-1], torch.cat([buckets[-1], torch.full((37,), float("nan"))])]


@pytest.mark.parametrize("kept", [torch.cat, list, _filled], ids=["joined", "a list", "a list, filled up"])
def test_buffers_of_several_buckets(kept: Callable[..., Any], tmp_path: Path) -> None:
    """With --overlap-grad-reduce a buffer has many buckets; until 0.6 they were stored as a list."""
    case = Case(tp=2, extra={"overlap_grad_reduce": True, "ddp_bucket_size": FULL})
    assert len(in_buckets(list(rank_states(case, "param", (0, 0, 0))[0].values()), FULL)) > 3
    overlapped(case, kept)(save(case, tmp_path))
    for kind in (*KINDS, "param"):
        require_equal(tmp_path, truth(case, kind), f"optimizer.state.{kind}.")


@pytest.mark.parametrize(
    "extra", [{"data_parallel_size": 2}, {"ddp_bucket_size": "x"}], ids=["default", "none"]
)
def test_buckets_of_another_size_than_recorded_stay(extra: dict[str, Any], tmp_path: Path) -> None:
    """The default of 40 million elements puts all parameters into one bucket, unlike these."""
    case = Case(tp=2, extra={"overlap_grad_reduce": True, **extra})
    overlapped(case, torch.cat)(save(case, tmp_path))
    manifest = ckptcore.open(str(tmp_path))
    assert [f.code for f in manifest.findings] == ["flat-buffers"] * 2


BROKEN: dict[str, tuple[Any, str]] = {
    "three optimizers": ([None, None, None], "3 distributed optimizers"),
    "a number": (5, "state is a int"),
    "a buffer that is none": ({0: 5}, "buffer 0 is a int"),
    "one dtype": ({0: {torch.float32: {}}}, "buffer 0 has unknown dtypes"),
    "another dtype": ({0: {(torch.float16, torch.float32): {}}}, "buffer 0 of float16 float32"),
    "a second buffer": ({1: {(torch.bfloat16, torch.float32): {}}}, "buffer 1 of bfloat16"),
    "two dims": ({0: {(torch.bfloat16, torch.float32): {"param": torch.zeros(2, 2)}}}, "not a flat tensor"),
    "no tensors": ({0: {(torch.bfloat16, torch.float32): {"param": [1, 2]}}}, "not a flat tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_distributed_state_of_another_form_stays(name: str, tmp_path: Path) -> None:
    state, reason = BROKEN[name]
    base = save(Case(), tmp_path)
    torch.save(state, base / "mp_rank_00" / "distrib_optim.pt")
    manifest = ckptcore.open(str(base))
    (found,) = manifest.findings
    assert (found.code, found.file) == ("flat-buffers", "mp_rank_00/distrib_optim.pt")
    assert reason in found.message
    assert not [t.fqn for t in manifest.tensors if t.fqn.startswith("optimizer.state.")]


def test_a_parameter_without_a_rule_leaves_buffers_unchanged(tmp_path: Path) -> None:
    case = Case(tp=2)
    base = save(case, tmp_path, lambda tree, rank: tree["model"].update({"odd.weight": torch.ones(2)}))
    add_flat(case, base)
    messages = [f.message for f in ckptcore.open(str(base)).findings if f.code == "flat-buffers"]
    assert len(messages) == 2
    assert all("no rule for how odd.weight" in m for m in messages)


def test_a_buffer_of_another_size_stays(tmp_path: Path) -> None:
    case = Case(tp=2)
    base = save(case, tmp_path)
    add_flat(case, base)
    path = base / "mp_rank_01" / "distrib_optim.pt"
    saved = torch.load(path, weights_only=False)
    part = saved[0][torch.bfloat16, torch.float32]
    part["exp_avg"] = torch.cat([part["exp_avg"], torch.zeros(64)])
    torch.save(saved, path)
    manifest = ckptcore.open(str(base))
    assert [f.code for f in manifest.findings] == ["flat-buffers"]
    assert any(t.fqn.startswith("distrib_optim/mp_rank_01") for t in manifest.tensors)


# --- placing parameters ----------------------------------------------------------------------------


def parameters(*sizes: int) -> list[Parameter]:
    return [
        Parameter(f"p{n}", (s,), "bfloat16", Placement(f"p{n}", (s,), (s,), ()), False)
        for n, s in enumerate(sizes)
    ]


def starts(segments: Any) -> Iterator[tuple[str, int, int]]:
    yield from ((s.parameter.name, s.bucket, s.start) for s in segments)


def test_buckets_are_filled_from_the_last_parameter() -> None:
    found = lay_out(parameters(10, 70, 100), [100, 128 + 10])
    assert list(starts(found)) == [("p2", 0, 0), ("p1", 1, 0), ("p0", 1, 128)]


@pytest.mark.parametrize("sizes", [[101, 138], [100, 137], [100], [100, 138, 64], [180]])
def test_buckets_that_do_not_add_up(sizes: list[int]) -> None:
    with pytest.raises(Unregistered):
        lay_out(parameters(10, 70, 100), sizes)


def test_a_parameter_with_its_own_bucket() -> None:
    """Tied embeddings: the bucket before them ends where they would have started."""
    found = lay_out(parameters(70, 10, 100), [138 + 54, 70], own_bucket=[True, False, False])
    assert list(starts(found)) == [("p2", 0, 0), ("p1", 0, 128), ("p0", 1, 0)]


def test_coalesced_buffers_and_full_buckets() -> None:
    """Without bucket borders on disk, the total size decides whether a layout is right."""
    three = parameters(10, 70, 100)
    assert [s[2] for s in starts(lay_out_buffer(three, 128 + 128 + 10))] == [0, 128, 256]
    # A full bucket ends unaligned, and the next one starts after it.
    assert [s[2] for s in starts(lay_out_buffer(three, 100 + 128 + 10, bucket=90))] == [0, 100, 228]
    with pytest.raises(Unregistered):
        lay_out_buffer(three, 100 + 128 + 10)


def test_helpers_agree() -> None:
    """The helper's ranks hold every expert once."""
    case = Case(ep=2, experts="sequential")
    layer = full_layer(case)
    ranks = [local_layer(case, layer, 0, ep) for ep in range(2)]
    assert sum("linear_fc2" in n and "local_experts" in n for h in ranks for n in h) == E
