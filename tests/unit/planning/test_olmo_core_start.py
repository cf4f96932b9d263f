"""What OLMo-core begins from: a step whose config.json builds the model, with weights below `model.`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.errors import NameMismatch, UsageError

pytest.importorskip("transformers", minversion="5.0")

import trainer_names


def hub(folder: Path, family: str, **fields: Any) -> Path:
    config, state = trainer_names.hub_model(family)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 3]} | fields))
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def start(source: Path, target: Path, names: str = "olmo_core", **options: Any) -> ckptcore.Result:
    options = {"verb": "consolidate", "to": "olmo_core", "catalog": False} | options
    return ckptcore.convert(str(source), str(target), names=names, **options)


def stated(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("family", "names", "block", "norms"),
    [
        ("llama", "olmo_core", "default", None),
        ("qwen3", "olmo_core", "default", True),
        ("olmo2", "olmo_core", "reordered_norm", False),
        ("olmoe", "olmo_core:dropless", "moe", False),
    ],
)
def test_the_step_is_the_trainers_and_comes_back(
    tmp_path: Path, family: str, names: str, block: str, norms: bool | None
) -> None:
    start(hub(tmp_path / "hub", family), tmp_path / "out", names)
    config, state = trainer_names.hub_model(family)
    form = "dropless" if names.endswith("dropless") else "one"
    expected = trainer_names.olmo_core(config, dict(state), form)
    manifest = ckptcore.open(str(tmp_path / "out"))
    assert manifest.format == "olmo_core"
    assert {t.fqn for t in manifest.tensors} >= {f"model.{n}" for n in expected}
    model, tokenizer = stated(tmp_path / "out")["model"], stated(tmp_path / "out")["dataset"]["tokenizer"]
    attention = model["block"]["sequence_mixer"]
    sizes = model["d_model"], model["n_layers"], attention["n_heads"], attention["n_kv_heads"]
    fields = "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    assert sizes == tuple(config[f] for f in fields)
    assert model["block"]["name"] == block
    assert (attention["qk_norm"] is not None, attention["use_head_qk_norm"]) == (
        norms is not None,
        norms is True,
    )
    assert model["vocab_size"] == config["vocab_size"]
    assert (tokenizer["eos_token_id"], tokenizer["vocab_size"]) == (2, config["vocab_size"])
    # The step alone says what it is: its config must not contradict its tensors, nor the hub's config.
    options = {"verb": "consolidate", "names": "hf-hub", "catalog": False, "config": str(tmp_path / "hub")}
    ckptcore.convert(str(tmp_path / "out"), str(tmp_path / "back.safetensors"), **options)
    back = ckptcore.open(str(tmp_path / "back.safetensors"))
    assert {t.fqn for t in back.tensors} == state.keys()
    assert all(torch.equal(ckptcore.read(back, name), tensor) for name, tensor in state.items())


def test_scalings_of_rotary_embeddings_have_its_fields(tmp_path: Path) -> None:
    """It states bands of frequencies as proportions, whose inverses transformers has."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    source = hub(tmp_path / "hub", "llama", rope_parameters=rope)
    result = start(source, tmp_path / "out")
    found = stated(tmp_path / "out")["model"]["block"]["sequence_mixer"]["rope"]
    assert found["theta"] == 500000
    assert found["scaling"] == {
        "factor": 8.0,
        "low_freq_proportion": 0.0,
        "high_freq_proportion": 0.25,
        "old_context_len": 8192,
        "_CLASS_": "olmo_core.nn.rope.StepwiseRoPEScalingConfig",
    }
    assert not [w for w in result.warnings if w.code == "unstated-arguments"]


def test_layers_with_a_window_are_stated_one_by_one(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    source = hub(tmp_path / "hub", "olmo3", layer_types=kinds, sliding_window=64)
    start(source, tmp_path / "out")
    window = stated(tmp_path / "out")["model"]["block"]["sequence_mixer"]["sliding_window"]
    assert window["pattern"] == [64, -1]
    assert not window["force_full_attention_on_first_layer"]
    assert not window["force_full_attention_on_last_layer"]


def test_what_has_no_place_is_refused_or_named(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub", "llama", eos_token_id=None)
    warnings = start(source, tmp_path / "out").warnings
    assert any("eos_token_id" in w.message for w in warnings if w.code == "unstated-arguments")
    assert "dataset" not in stated(tmp_path / "out")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    with pytest.raises(NameMismatch, match=r"nothing in config\.json says what the config does"):
        start(hub(tmp_path / "other", "llama", rope_parameters=rope), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_numbers_that_no_config_says(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub", "llama")
    (source / "config.json").unlink()
    with pytest.raises(UsageError, match=r"cannot write config\.json for OLMo-core: no config says"):
        start(source, tmp_path / "out", arch="LlamaForCausalLM")
    start(source, tmp_path / "weights", arch="llama", to="dcp")
    with pytest.raises(UsageError, match="no map of live modules is called 'Llama'") as caught:
        start(source, tmp_path / "none", arch="Llama", to="dcp")
    assert "did you mean llama" in str(caught.value.hint)
    with pytest.raises(NameMismatch, match="heads is not known") as unknown:
        start(source, tmp_path / "none", arch="llama", to="dcp", names="torchtitan")
    assert "with the model's config.json" in str(unknown.value.hint)


def test_heads_that_the_rows_contradict_are_refused(tmp_path: Path) -> None:
    """No rule of this map cuts rows by heads: only the config would be wrong."""
    source = hub(tmp_path / "hub", "llama", num_attention_heads=3)
    with pytest.raises(NameMismatch, match="16 rows of queries and 8 of keys are not 3 and 2 heads"):
        start(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
