"""Adapters of other kinds than LoRA inside checkpoints become what peft opens, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import NameMismatch, UsageError

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

from tiny_llama import tiny_llama  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
IDS = torch.arange(12)[None]
TARGETS = {"target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ADALORA": ("AdaLoraConfig", {**TARGETS, "init_r": 4, "target_r": 2, "total_step": 10}),
    "LOHA": ("LoHaConfig", {**TARGETS, "r": 4}),
    "LOKR": ("LoKrConfig", {**TARGETS, "r": 2}),
    "LOKR both": ("LoKrConfig", {**TARGETS, "r": 1, "decompose_both": True}),
    "VERA": ("VeraConfig", {"target_modules": ["q_proj", "o_proj"], "r": 4}),
    "VERA alone": ("VeraConfig", {"target_modules": ["q_proj", "o_proj"], "r": 4, "save_projection": False}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "OFT": ("OFTConfig", {**TARGETS, "r": 2, "oft_block_size": 0}),
    "LN_TUNING": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "TRAINABLE_TOKENS": (
        "TrainableTokensConfig",
        {"target_modules": ["embed_tokens"], "token_indices": [1, 3]},
    ),
    "PROMPT_TUNING": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "PREFIX_TUNING": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "saved": ("LoHaConfig", {**TARGETS, "r": 4, "modules_to_save": ["lm_head"]}),
}
NOT_SAVED = {  # what peft saves of these is computed, or of another model
    "PREFIX_TUNING": ("PrefixTuningConfig", {"num_virtual_tokens": 3, "prefix_projection": True}),
    "P_TUNING": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    "BOFT": ("BOFTConfig", {**TARGETS, "boft_block_size": 4}),
    "FOURIERFT": ("FourierFTConfig", {**TARGETS, "n_frequency": 8}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, as `save_pretrained` writes it."""
    folder: Path = tmp_path_factory.mktemp("base")
    tiny_llama(
        vocab_size=48, hidden_size=16, intermediate_size=24, tie_word_embeddings=False
    ).save_pretrained(folder)
    return folder


def trained(base: Path, config: str, options: dict[str, Any]) -> Any:
    """A live module with an adapter whose every tensor differs from its start."""
    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    live = peft.get_peft_model(model, getattr(peft, config)(task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) / 4
    return live.eval()


def put(live: Any, folder: Path) -> Path:
    dcp.save({"model": live.state_dict()}, checkpoint_id=folder, no_dist=True)
    live.peft_config["default"].save_pretrained(folder / "adapter")
    return folder


def export(source: Path, target: Path, **options: Any) -> Any:
    return ckptcore.convert(str(source), str(target), verb="export", catalog=False, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(input_ids=IDS).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_equal_bit_for_bit(base: Path, tmp_path: Path, kind: str) -> None:
    live = trained(base, *KINDS[kind])
    export(put(live, tmp_path / "ckpt"), tmp_path / "out")
    live.save_pretrained(tmp_path / "hub", save_embedding_layers=False)
    want = load_file(tmp_path / "hub/adapter_model.safetensors")
    got = load_file(tmp_path / "out/adapter_model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n], want[n]) for n in want)
    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(model, tmp_path / "out").eval()
    assert torch.equal(logits(opened), logits(live))
    kind_of_config = live.peft_config["default"].peft_type.value
    assert f"- adapter: {kind_of_config}" in (tmp_path / "out/README.md").read_text().replace("\\", "")


@pytest.mark.parametrize("kind", NOT_SAVED)
def test_other_kinds_are_refused_by_name(base: Path, tmp_path: Path, kind: str) -> None:
    live = trained(base, *NOT_SAVED[kind])
    with pytest.raises(UsageError, match="cannot export an adapter") as caught:
        export(put(live, tmp_path / "ckpt"), tmp_path / "out")
    assert "names='stored'" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lost", ["*.0.*hada_w1_a*", "*.q_proj.hada_*", "*v_proj.hada_w2_b*"])
def test_a_part_of_an_adapter_is_refused(base: Path, tmp_path: Path, lost: str) -> None:
    source = put(trained(base, *KINDS["LOHA"]), tmp_path / "ckpt")
    with pytest.raises(NameMismatch):
        export(source, tmp_path / "out", exclude=[lost])


def test_the_config_of_another_kind(base: Path, tmp_path: Path) -> None:
    source = put(trained(base, *KINDS["LOHA"]), tmp_path / "ckpt")
    path = source / "adapter" / "adapter_config.json"
    for kind in ("LORA", "LOKR", "IA3", "NEW"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "peft_type": kind}))
        with pytest.raises(NameMismatch):
            export(source, tmp_path / "out")


def test_virtual_tokens_of_another_config(base: Path, tmp_path: Path) -> None:
    source = put(trained(base, *KINDS["PROMPT_TUNING"]), tmp_path / "ckpt")
    path = source / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_virtual_tokens": 4}))
    with pytest.raises(NameMismatch, match="3 virtual tokens"):
        export(source, tmp_path / "out")


def test_ranks_that_adalora_leaves_out(base: Path, tmp_path: Path) -> None:
    source = put(trained(base, *KINDS["ADALORA"]), tmp_path / "ckpt")
    path = source / "adapter" / "adapter_config.json"
    pattern = {"model.layers.0.self_attn.q_proj.lora_E": [True, False, True, False]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rank_pattern": pattern}))
    with pytest.raises(UsageError, match="rank_pattern"):
        export(source, tmp_path / "out")
