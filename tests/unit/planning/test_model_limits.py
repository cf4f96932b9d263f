"""A mesh that the model's own numbers make impossible is refused, with the numbers and their source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from samples import SAMPLES

import ckptcore
from ckptcore.errors import UsageError
from ckptcore.naming.maps.hyperparameters import Config
from ckptcore.planning import model_limits
from ckptcore.planning.compose import Composed, compose
from ckptcore.planning.model_limits import require_possible
from ckptcore.planning.request import Request
from ckptcore.topology.mesh_spec import parse_mesh

MEGATRON = ["decoder.layers.self_attention.linear_qkv.weight"]
TITAN = ["layers.0.attention_norm.weight"]
HF = ["model.layers.0.self_attn.q_proj.weight"]
ARGS = {"num_layers": 4, "num_attention_heads": 8, "num_query_groups": 2, "ffn_hidden_size": 48}


def found(
    monkeypatch: pytest.MonkeyPatch,
    names: list[str] | dict[str, tuple[int, ...]],
    world: str,
    content: dict[str, Any],
    mesh: str,
    *,
    repads: bool = False,
) -> list[str]:
    configs = [Config("the checkpoint's `args`", world, content)]
    monkeypatch.setattr(model_limits, "stored_configs", lambda source, world: configs)
    source: Any = None  # only its configs are read
    shapes = names if isinstance(names, dict) else dict.fromkeys(names, (8,))
    return [f.message for f in require_possible(source, shapes, parse_mesh(mesh), repads=repads)]


@pytest.mark.parametrize(
    ("mesh", "message", "hint"),
    [
        ("tp=3", "cannot run 8 attention heads with tp=3: the checkpoint's `args` says", "use tp=1, 2;"),
        ("tp=16", "cannot run 8 attention heads with tp=16", "use tp=1, 2;"),
    ],
)
def test_megatron_refuses(monkeypatch: pytest.MonkeyPatch, mesh: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        found(monkeypatch, MEGATRON, "megatron", ARGS, mesh)
    assert message in error.value.message
    assert hint in str(error.value.hint)


def test_megatron_replicates_groups_on_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = found(monkeypatch, MEGATRON, "megatron", ARGS, "tp=4")
    assert message.startswith("2 query groups (key-value heads) with tp=4")
    assert message.endswith("2 ranks replicate each group")
    six = ARGS | {"num_attention_heads": 12, "num_query_groups": 6}
    with pytest.raises(UsageError, match=r"cannot run 6 query groups .* with tp=4"):
        found(monkeypatch, MEGATRON, "megatron", six, "tp=4")


def test_what_megatron_cuts_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, MEGATRON, "megatron", ARGS, "pp=2,tp=2") == []
    with pytest.raises(UsageError, match=r"cannot cut 49 rows .*ffn_hidden_size = 49"):
        found(monkeypatch, MEGATRON, "megatron", ARGS | {"ffn_hidden_size": 49}, "tp=2")
    assert "4 layers on pp=3 stages are uneven" in found(monkeypatch, MEGATRON, "megatron", ARGS, "pp=3")[0]
    placed = ARGS | {"num_layers_in_first_pipeline_stage": 2}
    assert found(monkeypatch, MEGATRON, "megatron", placed, "pp=3") == []


# GPT-2's tokenizer, padded for tp=1: 50304 = 393 x 128 rows. Jobs with tp=8 have 51200 = 50 x 128 x 8.
ROWS = {**dict.fromkeys(MEGATRON, (4, 16, 8)), "embedding.word_embeddings.weight": (50304, 8)}
GPT2 = {"num_attention_heads": 40, "vocab_size": 50257, "make_vocab_size_divisible_by": 128}


def test_rows_that_pad_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, ROWS, "megatron", GPT2, "tp=1") == []
    with pytest.raises(UsageError) as error:
        found(monkeypatch, ROWS, "megatron", GPT2, "tp=5")
    assert "cannot cut 50304 rows of embedding.word_embeddings.weight with tp=5" in error.value.message
    assert "a job with tp=5 has 50560 rows" in error.value.message
    assert error.value.hint is not None
    assert "use tp=1, 2, 3, 4, 6, 8" in error.value.hint
    # A multiple of tp that is not what the job would have: the option that makes it so.
    (message,) = found(monkeypatch, ROWS, "megatron", GPT2, "tp=8")
    assert "50304 rows of embedding.word_embeddings.weight are not those of tp=8" in message
    assert "has 51200 rows; the checkpoint's `args` says vocab_size = 50257" in message
    step = 50304 // 8
    assert -(-50257 // (step * 8)) * step * 8 == 50304
    # Megatron-Core's own loader pads anew.
    (message,) = found(monkeypatch, ROWS, "megatron", GPT2, "tp=5", repads=True)
    assert "has 50560 rows" in message
    # Without the tokenizer's number only the cut is judged.
    unknown = {"num_attention_heads": 40, "padded_vocab_size": 50304}
    assert found(monkeypatch, ROWS, "megatron", unknown, "tp=8") == []
    with pytest.raises(UsageError, match="cannot cut 50304 rows"):
        found(monkeypatch, ROWS, "megatron", unknown, "tp=5")


def test_torchtitan_never_replicates(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"n_heads": 8, "n_kv_heads": 2}
    assert found(monkeypatch, TITAN, "torchtitan", content, "tp=2") == []
    with pytest.raises(UsageError, match="cannot run 2 query groups"):
        found(monkeypatch, TITAN, "torchtitan", content, "tp=4")


def test_names_of_many_trainers_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"num_attention_heads": 8, "num_key_value_heads": 2, "model_type": "llama"}
    (message,) = found(monkeypatch, HF, "hf-hub", content, "tp=4")
    assert "2 query groups" in message


def test_parts_of_heads_are_refused_for_all_names_and_unknown_heads_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"num_attention_heads": 4, "hidden_size": 8, "num_hidden_layers": 1}
    with pytest.raises(UsageError, match="cannot run 4 attention heads with tp=3") as error:
        found(monkeypatch, HF, "hf-hub", numbers, "tp=3")
    assert "--config none leaves heads unchecked" in str(error.value.hint)
    (message,) = found(monkeypatch, HF, "hf-hub", {"hidden_size": 8}, "tp=3")
    assert message == "nothing states the attention heads: whether tp=3 divides them is unchecked"
    for names, mesh in ((HF, "fsdp=3"), (["conv.weight"], "tp=3")):
        assert found(monkeypatch, names, "hf-hub", {}, mesh) == []


def plan_of(source: Path, **asked: Any) -> Composed:
    return compose(Request(str(source), "out", "reshard", **asked), ckptcore.open(str(source)))


def test_a_given_config_and_stages_of_a_plan(tmp_path: Path) -> None:
    state = {f"layers.{n}.attention.wq.weight": torch.zeros(8, 8) for n in range(4)}
    state |= {f"layers.{n}.attention_norm.weight": torch.zeros(8) for n in range(4)}
    state |= {"tok_embeddings.weight": torch.zeros(8, 8), "output.weight": torch.zeros(8, 8)}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "numbers.json").write_text(json.dumps({"n_heads": 4, "n_kv_heads": 2}))
    given = {"config": str(tmp_path / "numbers.json")}
    with pytest.raises(UsageError, match=r"--config .*numbers.json says n_kv_heads = 2"):
        plan_of(tmp_path / "model.safetensors", mesh="tp=4", **given)
    assert plan_of(tmp_path / "model.safetensors", mesh="tp=4", config="none").ranks is not None
    stages = plan_of(tmp_path / "model.safetensors", mesh="pp=2", **given).stages
    assert [(s.ranges, s.others) for s in stages] == [
        ("0-1", ("tok_embeddings.weight",)),
        ("2-3", ("output.weight",)),
    ]


def test_stored_arguments_and_stacked_layers(request: pytest.FixtureRequest) -> None:
    samples = {s.name: s for s in request.config.stash[SAMPLES]}
    source = samples["root_torch_dist_llama_0.19.2"].root / "ckpt"
    source = next(source.parent.rglob("metadata.json")).parent
    with pytest.raises(UsageError, match="cannot run 4 attention heads with tp=8"):
        plan_of(source, mesh="tp=8", to="torch_dist")
    composed = plan_of(source, mesh="pp=2,tp=4", to="torch_dist")
    assert [(s.ranges, len(s.others)) for s in composed.stages] == [("0-1", 1), ("2-3", 2)]
    assert {f.code for f in composed.warnings} == {"uneven-mesh", "dropped-keys"}


@pytest.mark.parametrize(("axis", "step"), [("vpp=2", "virtual = N"), ("etp=2", "leave it out")])
def test_axes_that_are_none(axis: str, step: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_mesh(f"pp=2,{axis}")
    assert step in str(error.value.hint)
