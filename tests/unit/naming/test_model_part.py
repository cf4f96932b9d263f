"""The model part: every nesting that trainers use is found with its evidence; doubt is an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptcore
from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.tree_paths import Paths
from ckptcore.errors import AmbiguousModel
from ckptcore.naming.model_part import find_model
from ckptcore.naming.rename import strip_wrappers

WEIGHTS = ("embed.weight", "layers.0.w", "layers.0.b", "norm.weight")


def manifest_of(paths: Sequence[tuple[str, ...]], *, recorded: bool = True) -> Manifest:
    """Tensors at these paths; recorded: the writer kept the paths (DCP's planner data)."""
    builder = Builder()
    for path in paths:
        builder.tensor(TensorSpec(".".join(path), "float32", ()))
    tree = Paths()
    for path in paths if recorded else ():
        assert tree.add(".".join(path), path)
    form = tree.form([t.fqn for t in builder.tensors], [])
    return builder.build("test", "nowhere", {"paths": form} if form else {})


def under(*container: str) -> list[tuple[str, ...]]:
    return [(*container, name) for name in WEIGHTS]


def adam(*container: str) -> list[tuple[str, ...]]:
    """State as `get_state_dict` nests it."""
    return [(*container, "state", w, key) for w in WEIGHTS for key in ("exp_avg", "exp_avg_sq", "step")]


def flat_adam(*container: str) -> list[tuple[str, ...]]:
    """State as torchtitan flattens it: one name, no nesting below the optimizer."""
    return [(*container, f"state.{w}.{key}") for w in WEIGHTS for key in ("exp_avg", "exp_avg_sq", "step")]


CASES = {
    "model beside optim": (under("model") + adam("optim"), "model."),
    "app.model": (under("app", "model") + adam("app", "optim"), "app.model."),
    "state_dict, several optimizers": (
        under("state_dict") + adam("optimizer_0") + adam("optimizer_1"),
        "state_dict.",
    ),
    "top level, as torchtitan": (under() + flat_adam("optimizer") + [("train_state", "step")], ""),
    "top level, nothing else": (under(), ""),
    "model alone": (under("model"), "model."),
    "model beside ema, by the optimizer": (under("model") + under("ema") + adam("optim"), "model."),
    "model beside ema, without an optimizer": (under("model") + under("ema_model"), "model."),
    "a module called actor": (under("actor") + adam("actor_optim"), "actor."),
    "buffers beside parameters": ([*under("model"), ("model", "rope.freqs"), *adam("optim")], "model."),
    "wrapped names": ([("model", f"_orig_mod.{w}") for w in WEIGHTS] + adam("optim"), "model."),
}


@pytest.mark.parametrize("name", [n for n, (_, root) in CASES.items() if root is not None])
@pytest.mark.parametrize("recorded", [True, False], ids=["paths", "names"])
def test_found(name: str, recorded: bool) -> None:
    paths, root = CASES[name]
    if name in ("model alone", "model beside ema, without an optimizer") and not recorded:
        pytest.skip("without paths, 'model.' may be part of the model's own names")
    assert find_model(manifest_of(paths, recorded=recorded)).prefix == root


@pytest.mark.parametrize(
    "paths",
    [under("net") + under("ema") + adam("optim"), under("policy") + under("critic"), adam("optim")],
    ids=["two places fit the optimizer", "two parts and no optimizer", "an optimizer alone"],
)
def test_doubt_is_an_error_that_lists_the_candidates(paths: list[tuple[str, ...]]) -> None:
    with pytest.raises(AmbiguousModel) as caught:
        find_model(manifest_of(paths))
    assert "--model-prefix" in caught.value.hint
    for container in {p[0] for p in paths} - {"optim"}:
        assert container in caught.value.message


def test_other_parts_that_could_be_the_model_are_findings() -> None:
    for paths in (under("model") + under("ema") + adam("optim"), under("model") + under("ema")):
        part = find_model(manifest_of(paths))
        assert (part.prefix, part.other_prefixes) == ("model.", ("ema.",))
    assert find_model(manifest_of(under("model") + adam("optim"))).other_prefixes == ()


@pytest.mark.parametrize("beside", ["ema_model", "ema", "averaged", "aa.ema"])
@pytest.mark.parametrize("optimizer", [adam("optim"), []], ids=["optimizer", "none"])
def test_a_copy_is_never_suggested(beside: str, optimizer: list[tuple[str, ...]]) -> None:
    paths = under(*beside.split(".")) + under("network") + optimizer
    with pytest.raises(AmbiguousModel) as caught:
        find_model(manifest_of(paths))
    assert caught.value.hint == "name one: --model-prefix network." or (
        caught.value.hint == "name it: --model-prefix network."
    )


def test_the_user_decides() -> None:
    manifest = manifest_of(under("model") + under("ema") + adam("optim"))
    assert find_model(manifest, "ema").prefix == "ema."
    assert find_model(manifest, "ema.").prefix == "ema."
    with pytest.raises(AmbiguousModel) as caught:
        find_model(manifest, "teacher")
    assert "ema, model, optim" in caught.value.hint


@pytest.mark.parametrize("root", ["state.", ""], ids=["file", "DCP folder"])
def test_composer_wraps_a_model_of_the_hub(root: str) -> None:
    """Its own record says so; a module of another class has the names that it was written with."""
    at = tuple(filter(None, root.split(".")))
    optimizer = [(*at, "optimizers", "AdamW", "state", f"model.{w}", "exp_avg") for w in WEIGHTS]
    manifest = manifest_of(under(*at, "model", "model") + optimizer)
    assert find_model(manifest).prefix == f"{root}model."
    one = Blob(f"{root}integrations", -1, {"huggingface": {"model": {}}})  # of a file
    for record in (Blob(f"{root}integrations.huggingface.model.config", -1, {}), one):
        assert find_model(replace(manifest, blobs=(record,))).prefix == f"{root}model.model."
    other = Blob(f"{root}integrations", -1, {})
    assert find_model(replace(manifest, blobs=(other,))).prefix == f"{root}model."


def test_the_trainers_own_entries_stay_out_at_the_top_level() -> None:
    paths = under() + flat_adam("optimizer") + [("train_state", "step"), ("dataloader", "rank_0")]
    part = find_model(manifest_of(paths))
    kept = [".".join(p) for p in paths if part.foreign(".".join(p)) is None]
    assert kept == list(WEIGHTS)


@pytest.mark.parametrize("wrapped", ["model.", "_orig_mod.model.", "_orig_mod.model._orig_mod."])
def test_lightning_of_a_compiled_module(wrapped: str, tmp_path: Path) -> None:
    """`torch.compile` of the LightningModule or of the module in it: the attribute is the same."""
    state = {f"{wrapped}{name}": torch.ones(1) for name in WEIGHTS}
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": state, "epoch": 0}, tmp_path / "a.ckpt")
    manifest = ckptcore.open(str(tmp_path / "a.ckpt"))
    part = find_model(manifest)
    assert {strip_wrappers(t.fqn[len(part.prefix) :]) for t in manifest.tensors} == set(WEIGHTS)
