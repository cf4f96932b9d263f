"""What nanotron begins from: files as its loader looks for them, and the config of its model class."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckptcore
from ckptcore.errors import NameMismatch, UnsupportedFormat, UsageError

pytest.importorskip("transformers", minversion="5.0")

import trainer_names

hub_model = cache(trainer_names.hub_model)


def hub(folder: Path, family: str, **fields: Any) -> Path:
    config, state = hub_model(family)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | fields))
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def start(source: Path, target: Path, names: str = "nanotron", **options: Any) -> ckptcore.Result:
    options = {"verb": "consolidate", "to": "nanotron", "allow_untried": True, "catalog": False} | options
    return ckptcore.convert(str(source), str(target), names=names, **options)


@pytest.mark.parametrize(
    ("family", "names", "form"),
    [("llama", "nanotron", "halves"), ("qwen2", "nanotron:interleaved", "interleaved")],
)
def test_files_and_config_are_those_that_nanotron_loads(
    tmp_path: Path, family: str, names: str, form: str
) -> None:
    """The files of one rank, from which every other number of ranks takes its parts."""
    source = hub(tmp_path / "hub", family)
    codes = {w.code for w in start(source, tmp_path / "out", names).warnings}
    config, state = hub_model(family)
    expected = trainer_names.nanotron(config, dict(state), form)
    paths = {
        p.relative_to(tmp_path / "out/model"): p for p in (tmp_path / "out/model").rglob("*.safetensors")
    }
    for name, tensor in expected.items():
        module, _, leaf = name.rpartition(".")
        ranks = "" if "norm" in module else "_pp-rank-0-of-1_tp-rank-0-of-1"
        path = paths.pop(Path(module.replace(".", "/"), f"model_{leaf}{ranks}.safetensors"))
        with safe_open(path, "pt") as file:
            texts = file.metadata()
            assert torch.equal(file.get_tensor("data"), tensor)
        assert (texts is None) == (not ranks)
        if texts is not None:
            rest = "|None,None,None" * (tensor.dim() - 1)
            boxes = f"None,None,None{rest}#0,{tensor.shape[0]},None{rest}"
            assert (texts["unsharded_shape"], texts["local_global_slices_pairs"]) == (
                str(tuple(tensor.shape)),
                boxes,
            )
    assert not paths
    own = json.loads((tmp_path / "out/model_config.json").read_text())
    assert own.items() >= trainer_names.nanotron_config(config, form).items()
    assert own[f"is_{family}_config"] is True
    assert (own["vocab_size"], own["intermediate_size"]) == (
        config["vocab_size"],
        config["intermediate_size"],
    )
    assert own["attention_bias"] == (family == "qwen2")
    assert own["tie_word_embeddings"] == config["tie_word_embeddings"]
    assert "unstated-arguments" not in codes
    assert ckptcore.open(str(tmp_path / "out")).findings == ()


def test_it_comes_back_from_the_step_alone(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub", "qwen2")
    start(source, tmp_path / "out", "nanotron:interleaved")
    options = {"verb": "consolidate", "catalog": False, "names": "hf-hub", "arch": "qwen2"}
    ckptcore.convert(str(tmp_path / "out"), str(tmp_path / "back.safetensors"), **options)
    manifest = ckptcore.open(str(tmp_path / "back.safetensors"))
    _, state = hub_model("qwen2")
    assert {t.fqn for t in manifest.tensors} == state.keys()
    assert all(torch.equal(ckptcore.read(manifest, n), t) for n, t in state.items())


def test_what_nanotron_does_not_compute_is_refused(tmp_path: Path) -> None:
    """It reads no scaling of rotary embeddings, and its heads are as wide as the model by their number."""
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    source = hub(tmp_path / "hub", "llama", rope_parameters=rope)
    with pytest.raises(NameMismatch, match=r"nothing in model_config.json says what the config does"):
        start(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"allow_untried": False}, UsageError, "the map of llama from hf-hub to nanotron is untried"),
        ({"names": "hf-hub"}, UsageError, "its loaders look for those of nanotron"),
        ({"verb": "reshard", "mesh": "tp=2"}, UsageError, "nanotron is not written for the ranks of a mesh"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    source = hub(tmp_path / "hub", "llama")
    with pytest.raises(error, match=message):
        start(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_step_without_a_config_is_refused(tmp_path: Path) -> None:
    start(hub(tmp_path / "hub", "llama"), tmp_path / "step")
    with pytest.raises(UnsupportedFormat, match="without the config of its model"):
        start(tmp_path / "step", tmp_path / "out", "stored")
