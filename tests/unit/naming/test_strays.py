"""Tensors that the optimizer trains are the model's, wherever they are: odd layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.errors import AmbiguousModel
from ckptcore.naming.model_part import find_model
from ckptcore.naming.rename import ModelPart

W = ("embed.weight", "layers.0.w", "layers.0.b", "norm.weight")
SHAPES = {"embed.weight": (8, 4), "layers.0.w": (4, 4), "layers.0.b": (4,), "norm.weight": (4,)}
PROJ = "scheduler.proj.weight"


def manifest_of(
    names: Sequence[str], shapes: Mapping[str, Any] | None = None, blobs: Sequence[str] = ()
) -> Manifest:
    builder = Builder()
    for name in names:
        shape = next((s for n, s in {**SHAPES, **(shapes or {})}.items() if n in name), (4, 4))
        scalar = name.endswith((".step", ".last_epoch"))
        builder.tensor(TensorSpec(name, "int64" if scalar else "float32", () if scalar else shape))
    builder.blobs += [Blob(key, -1, 1) for key in blobs]
    return builder.build("test", "nowhere", {})


def under(root: str, names: Sequence[str] = W) -> list[str]:
    return [f"{root}.{n}" if root else n for n in names]


def adam(root: str, names: Sequence[str] = W) -> list[str]:
    return [f"{root}.state.{n}.{key}" for n in names for key in ("exp_avg", "exp_avg_sq", "step")]


def kept(part: ModelPart, names: Sequence[str]) -> set[str]:
    return {n for n in names if part.holds(n)}


# layout -> (tensors, the part's prefix, strays, names in the part beside W, other parts)
Found = tuple[Sequence[str], str, Sequence[str], Sequence[str], Sequence[str]]
CASES: dict[str, Found] = {
    # at the top level a trained tensor is in the model, whatever it is called
    "scheduler at the top": ([*W, PROJ, *adam("optim", (*W, PROJ))], "", [], [PROJ], []),
    "scheduler beside a scheduler": (
        [*W, PROJ, "scheduler.last_epoch", *adam("optim", (*W, PROJ))],
        "",
        [],
        [PROJ],
        [],
    ),
    "its untrained neighbour": (
        [*W, PROJ, "scheduler.mean", "scheduler.last_epoch", *adam("optim", (*W, PROJ))],
        "",
        [],
        [PROJ, "scheduler.mean"],
        [],
    ),
    "a submodule without an optimizer": ([*W, PROJ], "", [], [PROJ], []),
    "a submodule rng without an optimizer": ([*W, "rng.net.weight"], "", [], ["rng.net.weight"], []),
    "a submodule optimizer": (
        [*W, "optimizer.enc.w", *adam("optim", (*W, "optimizer.enc.w"))],
        "",
        [],
        ["optimizer.enc.w"],
        [],
    ),
    "a submodule in the optimizer's own name": (
        [*W, "optim.enc.w", *adam("optim", (*W, "optim.enc.w"))],
        "",
        [],
        ["optim.enc.w"],
        [],
    ),
    "optimizer_net": (
        [*W, "optimizer_net.w", *adam("optim", (*W, "optimizer_net.w"))],
        "",
        [],
        ["optimizer_net.w"],
        [],
    ),
    "an unknown key of the optimizer": ([*W, *adam("optim"), "optim.state.norm.weight.odd"], "", [], [], []),
    "an unknown part of the optimizer": ([*W, *adam("optim"), "optim.memory"], "", [], [], []),
    "an average in the optimizer": ([*W, *adam("optim"), *under("optim.ema")], "", [], [], []),
    "a frozen parameter": ([*W, "frozen.w", *adam("optim")], "", [], ["frozen.w"], []),
    "step and lr in the model": (
        [*W, "sched.step", "lr", *adam("optim", (*W, "lr"))],
        "",
        [],
        ["sched.step", "lr"],
        [],
    ),
    "torchtitan's own entries": (
        [*W, *adam("optimizer"), "train_state.step", "ema_state.norm.weight"],
        "",
        [],
        [],
        [],
    ),
    # below a container a trained tensor outside is a stray
    "scheduler beside model": ([*under("model"), PROJ, *adam("optim", (*W, PROJ))], "model.", [PROJ], [], []),
    "sampler beside model": (
        [*under("model"), "sampler.proj.w", *adam("optim", (*W, "sampler.proj.w"))],
        "model.",
        ["sampler.proj.w"],
        [],
        [],
    ),
    "two of three": (
        [*under("model"), PROJ, "scheduler.mean", "scaler.net.w", *adam("optim", (*W, PROJ, "scaler.net.w"))],
        "model.",
        [PROJ, "scaler.net.w"],
        [],
        [],
    ),
    "a head with any name": (
        [*under("model"), "head.w", *adam("optim", (*W, "head.w"))],
        "model.",
        ["head.w"],
        [],
        [],
    ),
    "deeper than its name": (
        [*under("model"), f"net.{PROJ}", *adam("optim", (*W, PROJ))],
        "model.",
        [f"net.{PROJ}"],
        [],
        [],
    ),
    "a copy with one tensor more": (
        [*under("model"), *under("backup"), "backup.lm_head.w", *adam("optim", W)],
        "model.",
        [],
        [],
        ["backup."],
    ),
    "wrapped names": (
        [*under("model._orig_mod"), "module.scheduler.w", *adam("optim", (*W, "scheduler.w"))],
        "model.",
        ["module.scheduler.w"],
        [],
        [],
    ),
    "a second optimizer's one scalar": (
        [*under("model"), "log_alpha", *adam("optim"), *adam("alpha_optim", ("log_alpha",))],
        "model.",
        ["log_alpha"],
        [],
        [],
    ),
    "tied and stored nowhere": ([*under("model"), *adam("optim", (*W, "lm_head.w"))], "model.", [], [], []),
    "tied, and in an average": (
        [*under("model"), "ema.lm_head.w", *adam("optim", (*W, "lm_head.w"))],
        "model.",
        [],
        [],
        [],
    ),
    "a part of a copy": (
        [*under("model"), *under("backup", W[2:]), "backup.lm_head.w", *adam("optim", (*W, "lm_head.w"))],
        "model.",
        ["backup.lm_head.w"],  # half of a copy could be more than a copy
        [],
        [],
    ),
    "a loss scaler's own scale": (
        [*under("model"), "scaler.scale", *adam("optim", (*W, "scale"))],
        "model.",
        [],
        [],
        [],
    ),
    "names with the prefix": ([*under("model"), *adam("optim", under("model"))], "", [], under("model"), []),
    # several models, several optimizers
    "two optimizers of one model": (
        [*under("model"), *adam("muon", W[:2]), *adam("adam", W[2:])],
        "model.",
        [],
        [],
        [],
    ),
    "one of two has an average": (
        [*under("model"), *under("ema"), *adam("muon", W[:2]), *adam("adam", W[2:])],
        "model.",
        [],
        [],
        ["ema."],
    ),
    "a critic with its own optimizer": (
        [
            *under("model"),
            *under("critic", ("v.w", "v.b")),
            *adam("optim"),
            *adam("critic_optim", ("v.w", "v.b")),
        ],
        "model.",
        [],
        [],
        ["critic."],
    ),
    "a larger critic with the same names": (
        [*under("model"), *under("critic", (*W, "v.w")), *adam("optim"), *adam("critic_optim", (*W, "v.w"))],
        "model.",
        [],
        [],
        ["critic."],
    ),
    "a reference that nothing trains": (
        [*under("model"), *under("ref"), *adam("optim")],
        "model.",
        [],
        [],
        ["ref."],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_found(case: str) -> None:
    names, prefix, strays, own, others = CASES[case]
    part = find_model(manifest_of(names))
    assert part.prefix == prefix
    assert part.strays == tuple(strays)
    assert part.other_prefixes == tuple(others)
    model = {n for n in names if n.startswith(prefix)} if prefix else {*W, *own} & {*names}
    assert kept(part, names) == model


@pytest.mark.parametrize("case", [c for c, found in CASES.items() if found[2]])
def test_a_prefix_that_the_user_names_decides(case: str) -> None:
    names, prefix, *_ = CASES[case]
    assert find_model(manifest_of(names), prefix).strays == ()
    everything = find_model(manifest_of(names), "")
    assert {*CASES[case][2]} <= kept(everything, names)


@pytest.mark.parametrize(
    "names",
    [
        [*under("gen"), *under("disc", ("d.w", "d.b")), *adam("g_optim"), *adam("d_optim", ("d.w", "d.b"))],
        [*under("gen"), *under("disc"), *adam("g_optim"), *adam("d_optim")],
        [
            *under("actor"),
            *under("critic", (*W, "v.w")),
            *adam("actor_opt"),
            *adam("critic_opt", (*W, "v.w")),
        ],
    ],
    ids=["other names", "the same names", "more names"],
)
def test_two_trained_models_are_a_question(names: list[str]) -> None:
    with pytest.raises(AmbiguousModel) as caught:
        find_model(manifest_of(names))
    assert len(caught.value.values["candidates"]) == 2


def numbered(shapes: Sequence[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"optim.state.{n}.exp_avg": shape for n, shape in enumerate(shapes)}


@pytest.mark.parametrize(
    ("more", "shapes", "strays"),
    [
        ({PROJ: (4, 4)}, [(8, 4), (4, 4), (4,), (4,)], ()),  # frozen
        ({PROJ: (4, 4)}, [(8, 4), (4, 4), (4,), (4,), (4, 4)], (PROJ,)),
        ({PROJ: (3, 5)}, [(8, 4), (4, 4), (4,), (4,), (3, 5)], (PROJ,)),
        (
            {"ema.layers.0.w": (4, 4)},
            [(8, 4), (4, 4), (4,), (4,), (4, 4)],
            (),
        ),  # of a tensor that is not there
        ({PROJ: (4, 4)}, [(99,)], ()),  # flat
        ({"scheduler.last_epoch": ()}, [(8, 4), (4, 4), (4,), (4,), ()], ()),
    ],
)
def test_numbers_tell_shapes(
    more: dict[str, Any], shapes: list[tuple[int, ...]], strays: tuple[str, ...]
) -> None:
    states = numbered(shapes)
    model = {f"model.{n}": SHAPES[n] for n in W}
    names = [*model, *more, *states]
    builder = Builder()
    for name in names:
        builder.tensor(TensorSpec(name, "float32", {**model, **more, **states}[name]))
    builder.origin = {}
    manifest = builder.build("test", "nowhere", {"model": {"prefix": "model.", "because": "the format"}})
    assert find_model(manifest).strays == strays
