"""Test exports of models whose names begin with a wrapper: the next step is the option that removes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import NameMismatch

transformers: Any = pytest.importorskip("transformers")


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


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("found", [False, True], ids=["named", "found"])
@pytest.mark.parametrize("prefix", ["model.", "net.", "policy.net."])
def test_the_option_that_removes_a_prefix_is_named(
    prefix: str, found: bool, model: Any, tmp_path: Path
) -> None:
    source = saved(model, prefix, tmp_path / ("config" if found else "run"))
    more = {} if found else {"config": str(tmp_path / "config")}
    with pytest.raises(NameMismatch) as caught:
        ckptcore.convert(source, str(tmp_path / "out"), verb="export", **more)
    assert f"rename='{prefix}='" in caught.value.hint
    ckptcore.convert(source, str(tmp_path / "out"), verb="export", rename=[(prefix, "")], **more)
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out")
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prefix_that_transformers_forgives_is_named(family: str, tmp_path: Path) -> None:
    """Names are those that the model saves, also where the loader of transformers removes a prefix."""
    sizes = {"vocab_size": 40, "tie_word_embeddings": False}
    if family == "llama":
        sizes |= {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        sizes |= {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model.save_pretrained(tmp_path / "config")
    prefix = f"{model.base_model_prefix}."
    source = saved(model, prefix, tmp_path / "run")
    with pytest.raises(NameMismatch, match="transformers 5 opens it all the same") as caught:
        ckptcore.convert(source, str(tmp_path / "out"), verb="export", config=str(tmp_path / "config"))
    assert f"rename='{prefix}='" in caught.value.hint
    more = {"config": str(tmp_path / "config"), "rename": [(prefix, "")]}
    ckptcore.convert(source, str(tmp_path / "out"), verb="export", **more)
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert read.keys() == load_file(tmp_path / "config" / "model.safetensors").keys()


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


def test_names_of_the_hub_are_no_wrapper(tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.norm.weight")
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "w.pt")
    result = ckptcore.convert(str(tmp_path / "w.pt"), str(tmp_path / "out"), verb="export")
    (warning,) = [w for w in result.warnings if w.code == "not-loadable"]
    assert "--rename" not in warning.hint
