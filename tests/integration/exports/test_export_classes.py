"""Exports whose config names no class, one that transformers lacks, or ties what was trained apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import NameMismatch

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import small_models  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


def edited(folder: Path, **fields: Any) -> None:
    """Change fields of a config; None removes one."""
    path = folder / "config.json"
    form = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in form.items() if v is not None}))


def saved(model: Any, folder: Path) -> str:
    """Return a flat file of the model's tensors; its config is in ``folder/hub``."""
    model.save_pretrained(folder / "hub")
    torch.save({n: t.clone() for n, t in model.state_dict().items()}, folder / "w.pt")
    return str(folder / "w.pt")


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    "model_type", ["t5", "qwen2", *(pytest.param(t, marks=pytest.mark.soak) for t in ("clip", "bert"))]
)
def test_a_config_without_a_class(model_type: str, tmp_path: Path) -> None:
    """The class is the one of the model type that the tensors are exactly of."""
    model = small_models.filled(model_type)
    if model_type == "qwen2":
        model.config.num_labels, model.config.pad_token_id = 3, 0
        model = transformers.Qwen2ForSequenceClassification(model.config)
    source = saved(model, tmp_path)
    edited(tmp_path / "hub", architectures=None)
    out = tmp_path / "out"
    done = ckptcore.convert(source, str(out), verb="export", config=str(tmp_path / "hub"), catalog=False)
    assert not [w.code for w in done.warnings if w.code == "names-unchecked"]
    assert tensors(out).keys() == tensors(tmp_path / "hub").keys()
    assert all(torch.equal(t, tensors(tmp_path / "hub")[n]) for n, t in tensors(out).items())
    assert ("assumed-class" in {w.code for w in done.warnings}) == (model_type in ("clip", "qwen2"))
    state = torch.load(source)
    del state[next(n for n in state if re.search(r"(layers?|block)\.0\..*weight$", n))]
    torch.save(state, source)
    with pytest.raises(NameMismatch, match="missing"):
        ckptcore.convert(source, str(out), verb="export", config=str(tmp_path / "hub"), overwrite=True)


@pytest.mark.usefixtures("asked_here")
def test_the_class_of_a_config_without_one_is_an_option(tmp_path: Path) -> None:
    model = small_models.filled("bert")
    source = saved(model, tmp_path)
    edited(tmp_path / "hub", architectures=None)
    options: dict[str, Any] = {"verb": "export", "config": str(tmp_path / "hub"), "catalog": False}
    ckptcore.convert(source, str(tmp_path / "out"), arch=type(model).__name__, **options)
    with pytest.raises(NameMismatch, match="does not fit BertForSequenceClassification"):
        ckptcore.convert(source, str(tmp_path / "no"), arch="BertForSequenceClassification", **options)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "LlamaForRewardModelWithGating"])
def test_a_class_that_transformers_lacks(name: str, tmp_path: Path) -> None:
    """Its model type is known: names, which are another model's, are not checked, and files are kept."""
    source = saved(small_models.filled("llama"), tmp_path)
    state = {f"midlayer.{n}": t for n, t in torch.load(source).items()} | {"d2t": torch.arange(3)}
    torch.save(state, source)
    code = {"AutoModel": f"modeling.{name}"}
    edited(tmp_path / "hub", architectures=[name], auto_map=code, draft_vocab_size=40)
    (tmp_path / "hub/modeling.py").write_text("raise SystemExit('never run')\n")
    out = tmp_path / "out"
    done = ckptcore.convert(source, str(out), verb="export", config=str(tmp_path / "hub"), catalog=False)
    (warning,) = [w for w in done.warnings if w.code == "names-unchecked"]
    assert name in warning.message
    assert tensors(out).keys() == state.keys()
    assert (out / "modeling.py").read_bytes() == (tmp_path / "hub/modeling.py").read_bytes()
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 40


@pytest.mark.usefixtures("asked_here")
def test_a_trained_head_under_a_tied_config_is_no_damage(tmp_path: Path) -> None:
    config = small_models.filled("llama").config
    config.tie_word_embeddings = True
    source = saved(transformers.LlamaForCausalLM(config), tmp_path)
    state = torch.load(source)
    state["lm_head.weight"] += 1
    torch.save(state, source)
    options: dict[str, Any] = {"verb": "export", "config": str(tmp_path / "hub"), "catalog": False}
    with pytest.raises(NameMismatch, match=r"lm_head\.weight is tied .*tie_word_embeddings") as caught:
        ckptcore.convert(source, str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()
    assert '"tie_word_embeddings": false' in caught.value.hint
    edited(tmp_path / "hub", tie_word_embeddings=False)
    ckptcore.convert(source, str(tmp_path / "out"), **options)
    assert torch.equal(tensors(tmp_path / "out")["lm_head.weight"], state["lm_head.weight"])
