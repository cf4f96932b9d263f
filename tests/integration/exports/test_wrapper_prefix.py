"""Test exports under other names than the model saves: of attributes around it, of earlier versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.errors import AmbiguousModel, NameMismatch
from ckptcore.naming.rename import strip_wrappers

transformers: Any = pytest.importorskip("transformers")

import small_models  # noqa: E402


def _dcp(state: dict[str, Any], folder: Path) -> str:
    dcp.save({"model": state}, checkpoint_id=folder, no_dist=True)
    return str(folder)


def _flat_file(state: dict[str, Any], folder: Path) -> str:
    folder.mkdir()
    torch.save(state, folder / "w.pt")
    return str(folder / "w.pt")


def _deepspeed(state: dict[str, Any], folder: Path) -> str:
    step = folder / "global_step1"
    step.mkdir(parents=True)
    meta = {"ds_version": "0.19.8", "global_steps": 1, "dp_world_size": 1, "mp_world_size": 1}
    more = {"optimizer": None, "ds_config": {}, "buffer_names": []}
    torch.save({"module": state, **meta, **more}, step / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step1")
    return str(folder)


def _rank_files(state: dict[str, Any], folder: Path) -> str:
    folder.mkdir()
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    return str(folder)


def _safetensors(state: dict[str, Any], folder: Path) -> str:
    folder.mkdir()
    save_file(state, folder / "w.safetensors")
    return str(folder / "w.safetensors")


KINDS = {
    "dcp": _dcp,
    "flat .pt": _flat_file,
    "deepspeed": _deepspeed,
    "rank files": _rank_files,
    "safetensors": _safetensors,
}


@pytest.fixture
def model(tmp_path: Path) -> Any:
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        architectures=["BertForMaskedLM"],
    )
    config.save_pretrained(tmp_path / "config")
    return transformers.BertForMaskedLM(config)


def saved(model: Any, prefix: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, folder / "w.pt")
    return str(folder / "w.pt")


@pytest.mark.alike(2)
@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("found", [False, True], ids=["named", "found"])
@pytest.mark.parametrize(
    "prefix",
    [
        "model.",
        pytest.param("net.", marks=pytest.mark.soak),
        pytest.param("policy.net.", marks=pytest.mark.soak),
        pytest.param("module._orig_mod.", marks=pytest.mark.soak),
        "net.module._orig_mod.",
    ],
)
def test_attributes_around_a_model_are_removed(prefix: str, found: bool, model: Any, tmp_path: Path) -> None:
    source = saved(model, prefix, tmp_path / ("config" if found else "run"))
    more = {} if found else {"config": str(tmp_path / "config")}
    result = ckptcore.convert(source, str(tmp_path / "out"), verb="export", **more)
    assert_saved(model, tmp_path)
    removed = [w.message.split()[4] for w in result.warnings if w.code == "exact-names"]
    wrapper = strip_wrappers(prefix)  # the rest is known as a wrapper's
    assert removed == ([f"{wrapper},"] if wrapper else [])
    assert not verified(tmp_path / "out", source)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in ("dcp", "deepspeed") else pytest.mark.soak) for k in KINDS]
)
@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(f, marks=pytest.mark.soak) for f in ("llama", "mixtral"))]
)
def test_names_are_those_that_are_saved_whatever_the_source(family: str, kind: str, tmp_path: Path) -> None:
    """Also where the loader of transformers forgives the prefix, which is the base model's."""
    model = small_models.filled(family)
    model.config.save_pretrained(tmp_path / "config")
    attribute = f"{model.base_model_prefix}."
    state = {attribute + name: value.clone() for name, value in model.state_dict().items()}
    source = KINDS[kind](state, tmp_path / "run")
    ckptcore.convert(source, str(tmp_path / "out"), verb="export", config=str(tmp_path / "config"))
    assert_saved(model, tmp_path)
    assert not verified(tmp_path / "out", source)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("names", ["without the base model's prefix", "of earlier versions"])
def test_names_that_only_the_loader_forgives_become_exact(names: str, model: Any, tmp_path: Path) -> None:
    def earlier(name: str) -> str:
        if names == "of earlier versions":
            return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
        return name.removeprefix("bert.")

    state = {earlier(name): value for name, value in model.state_dict().items()}
    (tmp_path / "run").mkdir()
    torch.save(state, tmp_path / "run/w.pt")
    source, config = str(tmp_path / "run/w.pt"), str(tmp_path / "config")
    result = ckptcore.convert(source, str(tmp_path / "out"), verb="export", config=config)
    assert [w.code for w in result.warnings if w.code == "exact-names"]
    assert_saved(model, tmp_path)
    assert not verified(tmp_path / "out", source)
    kept = ckptcore.convert(source, str(tmp_path / "kept"), verb="export", config=config, names="stored")
    assert [w.code for w in kept.warnings if w.code == "fused-names"]
    assert load_file(tmp_path / "kept/model.safetensors").keys() >= {n for n in state if "decoder" not in n}


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("beside", "options"),
    [
        ({"v_head.summary.weight": (1, 8), "v_head.summary.bias": (1,)}, ":"),
        ({"ref.": None, "critic.head.weight": (1, 8)}, " (or model.ref.):"),
    ],
    ids=["a value head", "two models and a critic"],
)
def test_a_model_beside_others_is_refused_with_the_prefix_that_works(
    beside: dict[str, Any], options: str, model: Any, tmp_path: Path
) -> None:
    state = {f"net.{name}": value for name, value in model.state_dict().items()}
    heads = {n: s for n, s in beside.items() if s is not None}
    for prefix in beside.keys() - heads.keys():
        state |= {prefix + name: value for name, value in model.state_dict().items()}
    state |= {name: torch.ones(shape) for name, shape in heads.items()}
    source = KINDS["dcp"](state, tmp_path / "run")
    more = {"verb": "export", "config": str(tmp_path / "config")}
    with pytest.raises((NameMismatch, AmbiguousModel)) as caught:
        ckptcore.convert(source, str(tmp_path / "out"), **more)
    assert f"model_prefix='model.net.'{options}" in caught.value.hint
    assert next(iter(heads)) in caught.value.hint
    ckptcore.convert(source, str(tmp_path / "out"), model_prefix="model.net.", **more)
    assert_saved(model, tmp_path)


def assert_saved(model: Any, folder: Path) -> None:
    """``folder/out`` has what the model saves."""
    model.save_pretrained(folder / "hub")
    wanted, written = (
        {n: t for f in (folder / name).glob("*.safetensors") for n, t in load_file(f).items()}
        for name in ("hub", "out")
    )
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)


def verified(out: Path, source: str) -> list[str]:
    """Names of the checks that fail."""
    proof = ckptcore.verify_export(str(out), against=source)
    return [check.name for check in proof.checks if check.verdict != "ok"]


@pytest.mark.parametrize(
    ("prefix", "named"), [("model.", "model."), ("net.", "net."), ("", ""), ("module.", "")]
)
def test_without_a_config_a_prefix_of_every_name_is_reported(
    prefix: str, named: str, model: Any, tmp_path: Path
) -> None:
    source = saved(model, prefix, tmp_path / "run")
    result = ckptcore.convert(source, str(tmp_path / "out"), verb="export")
    (warning,) = [w for w in result.warnings if w.code == "not-loadable"]
    assert ("--rename" in warning.hint) == bool(named)
    assert f"--rename {named}=" in warning.hint or not named
    assert (f"every name begins with {named}" in warning.message) == bool(named)


@pytest.mark.parametrize("prefix", ["net.", ""])
def test_without_transformers_a_prefix_of_every_name_is_reported(
    prefix: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptcore.planning.config_folder.find_spec", lambda name: None)
    source = saved(model, prefix, tmp_path / "run")
    result = ckptcore.convert(
        source, str(tmp_path / "out"), verb="export", config=str(tmp_path / "config"), catalog=False
    )
    (warning,) = [w for w in result.warnings if w.code == "names-unchecked"]
    assert ("every name begins with net." in warning.message) == bool(prefix)
    assert ("--rename net.=" in (warning.hint or "")) == bool(prefix)


def test_names_of_the_hub_are_no_wrapper(tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.norm.weight")
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "w.pt")
    result = ckptcore.convert(str(tmp_path / "w.pt"), str(tmp_path / "out"), verb="export")
    (warning,) = [w for w in result.warnings if w.code == "not-loadable"]
    assert "--rename" not in warning.hint
