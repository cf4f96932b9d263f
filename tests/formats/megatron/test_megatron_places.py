"""Rank folders of legacy Megatron-LM that changed places, where the arguments have no rank."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from legacy_ranks import Case, folder, full_layer, local_layer, ranks_of, save

import ckptcore
from ckptcore.errors import DamagedCheckpoint

Place = tuple[int, int, int]  # tensor rank, stage, expert rank
Edit = Callable[[dict[str, Any], Place], None]
FOUR = Case(tp=2, pp=4)
SEED = 1234


def exchange(case: Case, base: Path, moved: Callable[[Place], Place]) -> None:
    """Give every folder the name of another place."""
    for place in ranks_of(case):
        (base / folder(case, *place)).rename(base / f"x{folder(case, *moved(place))}")
    for path in [p for p in base.iterdir() if p.name.startswith("x")]:
        path.rename(base / path.name[1:])


def stages(one: int, two: int) -> Callable[[Place], Place]:
    return lambda p: (p[0], {one: two, two: one}.get(p[1], p[1]), p[2])


def found(base: Path) -> list[str | None]:
    """Return the files of the findings, with which no conversion begins."""
    wrong = [f for f in ckptcore.open(str(base)).findings if f.code == "item-mismatch"]
    if wrong:
        with pytest.raises(DamagedCheckpoint):
            ckptcore.convert(str(base), str(base.parent / "out.safetensors"))
    return sorted(f"{f.file}".removesuffix("/model_optim_rng.pt") for f in wrong)


def names(case: Case, *places: tuple[int, int]) -> list[str]:
    return sorted(folder(case, t, p, 0) for t, p in places)


def seeded(tree: dict[str, Any], place: Place) -> None:
    """Put in random states as Megatron-LM seeds them (megatron/core/tensor_parallel/random.py)."""
    tp, pp, ep = place
    seed = SEED + 100 * pp
    device = {
        "data-parallel-rng": seed,
        "model-parallel-rng": seed + 2718 + tp,
        "expert-parallel-rng": seed + 1024 + 100 * ep + tp,
    }
    states = {k: torch.tensor([v, 16], dtype=torch.int64).view(torch.uint8) for k, v in device.items()}
    tree["rng_state"] = [
        {
            "torch_rng_state": torch.Generator().manual_seed(seed).get_state(),
            "cuda_rng_state": states["data-parallel-rng"],
            "rng_tracker_states": states,
        }
    ]
    tree["args"].seed = SEED


def unseeded(tree: dict[str, Any], place: Place) -> None:
    tree["rng_state"] = [{"torch_rng_state": torch.Generator().manual_seed(7 + sum(place)).get_state()}]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("one", "two", "wrong"), [(0, 3, (0, 3)), (0, 1, (1,)), (2, 3, (2,))])
def test_first_and_last_stages_are_known_by_what_they_have(
    one: int, two: int, wrong: tuple[int, ...], old: bool, tmp_path: Path
) -> None:
    """The first stage alone has embeddings, the last one the final norm and the output layer."""

    def edit(tree: dict[str, Any], place: Place) -> None:
        unseeded(tree, place)
        if old:
            tree["model"] = before_core(tree["model"])

    base = save(FOUR, tmp_path, edit)
    assert found(base) == []
    exchange(FOUR, base, stages(one, two))
    assert found(base) == names(FOUR, *((t, p) for t in (0, 1) for p in wrong))


def before_core(model: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in model.items():
        new = name.replace("decoder.", "encoder.").replace("linear_qkv", "query_key_value")
        new = new.replace("linear_proj", "dense").replace("linear_fc1", "dense_h_to_4h")
        new = new.replace("linear_fc2", "dense_4h_to_h").replace("pre_mlp", "post_attention")
        out[f"language_model.{new}"] = value
    return out


def test_stages_of_one_tensor_rank_that_changed_places(tmp_path: Path) -> None:
    base = save(FOUR, tmp_path, unseeded)
    exchange(FOUR, base, lambda p: stages(0, 3)(p) if p[0] else p)
    assert set(found(base)) >= set(names(FOUR, (1, 0), (1, 3)))


def test_middle_stages_are_known_by_their_numbers_of_layers(tmp_path: Path) -> None:
    layout = {"pipeline_model_parallel_layout": "Et|tt|t|tL"}
    case = Case(pp=4, layers=5, counts=[[1, 2, 1, 1]], extra=layout)
    base = save(case, tmp_path, unseeded)
    assert found(base) == []
    exchange(case, base, stages(1, 2))
    assert found(base) == names(case, (0, 1), (0, 2))


@pytest.mark.parametrize("frequency", [[1, 0, 1, 1], 2])
def test_middle_stages_are_known_by_their_kinds_of_layers(frequency: Any, tmp_path: Path) -> None:
    pattern = [int(n % 2 == 0) for n in range(4)] if frequency == 2 else frequency
    case = Case(pp=4, experts="sequential", extra={"moe_layer_freq": frequency})
    dense = Case(pp=4)

    def edit(tree: dict[str, Any], place: Place) -> None:
        unseeded(tree, place)
        if not pattern[place[1]]:
            layer = local_layer(dense, full_layer(dense), 0, 0)
            kept = {k: v for k, v in tree["model"].items() if not k.startswith("decoder.layers.")}
            tree["model"] = {**kept, **{f"decoder.layers.0.{k}": v for k, v in layer.items()}}

    base = save(case, tmp_path, edit)
    assert found(base) == []
    exchange(case, base, stages(1, 2))
    assert found(base) == names(case, (0, 1), (0, 2))


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    ("case", "moved", "wrong"),
    [
        (FOUR, stages(1, 2), [(t, p, 0) for t in (0, 1) for p in (1, 2)]),
        (FOUR, lambda p: (1 - p[0], *p[1:]), list(ranks_of(FOUR))),
        (FOUR, lambda p: (1 - p[0], *p[1:]) if p[1] == 2 else p, [(0, 2, 0), (1, 2, 0)]),
        (Case(tp=2, ep=2, experts="te"), lambda p: (*p[:2], 1 - p[2]), list(ranks_of(Case(tp=2, ep=2)))),
    ],
    ids=["stages", "tensor-ranks", "tensor-ranks-of-a-stage", "expert-ranks"],
)
@pytest.mark.parametrize("form", ["today", "top-level", "long"])
def test_ranks_are_known_by_their_random_states(
    case: Case, moved: Callable[[Place], Place], wrong: list[Place], form: str, tmp_path: Path
) -> None:
    """A generator's state begins with its seed; before 2022 states were beside the model."""

    def edit(tree: dict[str, Any], place: Place) -> None:
        seeded(tree, place)
        if form == "long":  # before torch 1.12 the states of a device had room for its threads
            states = tree["rng_state"][0]["rng_tracker_states"]
            room = torch.full((800,), 255, dtype=torch.uint8)
            tree["rng_state"][0]["rng_tracker_states"] = {k: torch.cat([room, v]) for k, v in states.items()}
        if form == "top-level":
            tree |= tree.pop("rng_state")[0]

    base = save(case, tmp_path, edit)
    assert found(base) == []
    exchange(case, base, moved)
    assert found(base) == sorted(folder(case, *place) for place in wrong)


def test_random_states_of_another_seed_are_no_evidence(tmp_path: Path) -> None:
    """A job that continued another one has its states, and its own argument."""

    def edit(tree: dict[str, Any], place: Place) -> None:
        seeded(tree, (0, place[1], 0))
        tree["args"].seed = SEED + 100

    assert found(save(FOUR, tmp_path, edit)) == []


@pytest.mark.parametrize("alike", [False, True])
def test_ranks_are_known_by_arguments_of_a_group(alike: bool, tmp_path: Path) -> None:
    """A tool that converts checkpoints writes the same arguments into all files."""

    def edit(tree: dict[str, Any], place: Place) -> None:
        unseeded(tree, place)
        ranks = (0, 0) if alike else place[:2]
        own = {"tensor_model_parallel_rank": ranks[0], "pipeline_model_parallel_rank": ranks[1]}
        tree["args"] = Namespace(**vars(tree["args"]), **own)

    base = save(FOUR, tmp_path, edit)
    assert ckptcore.open(str(base)).findings == ()
    exchange(FOUR, base, stages(1, 2))
    assert found(base) == ([] if alike else names(FOUR, *((t, p) for t in (0, 1) for p in (1, 2))))


def test_tied_embeddings_of_exchanged_tensor_ranks_differ(tmp_path: Path) -> None:
    case = Case(tp=2, pp=2, tied=True)
    base = save(case, tmp_path, unseeded)
    exchange(case, base, lambda p: (1 - p[0], *p[1:]) if p[1] == 0 else p)
    report = ckptcore.check(ckptcore.open(str(base)), level="bytes")
    assert "replica-mismatch" in {f.code for f in report.findings}
