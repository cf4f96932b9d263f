"""Test `ckptcore.fingerprint_model`: the fingerprint of the folder that a model would be saved in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import small_models  # noqa: E402
from export_sources import Tiny  # noqa: E402

import ckptcore  # noqa: E402
from ckptcore import errors  # noqa: E402

Tinies = Callable[[str], Tiny]
# Tied and transposed, joined, stacked experts, interleaved experts, buffers in float32.
FAMILIES = ("gpt2", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_fingerprint_of_the_export(tinies: Tinies, tmp_path: Path, family: str) -> None:
    ckptcore.convert(tinies(family).hub, tmp_path, verb="export", catalog=False, dtype="bfloat16")
    model = ckptcore.from_checkpoint(tinies(family).hub, dtype="bfloat16")
    live, saved = ckptcore.fingerprint_model(model), ckptcore.fingerprint(tmp_path)
    assert live.differing(saved) == ()
    assert live.fingerprint == saved.fingerprint


def test_one_bit_names_its_tensor_of_the_files(tinies: Tinies) -> None:
    """In the module all experts of a layer are one parameter."""
    model = ckptcore.from_checkpoint(tinies("mixtral").hub)
    before = ckptcore.fingerprint_model(model)
    experts = model.model.layers[1].mlp.experts
    experts.down_proj.data[3].view(torch.int32)[0, 0] ^= 1
    experts.gate_up_proj.data[2].view(torch.int32)[-1, -1] ^= 1 << 30
    prefix = "model.layers.1.block_sparse_moe.experts"
    assert ckptcore.fingerprint_model(model).differing(before) == (
        f"{prefix}.2.w3.weight",
        f"{prefix}.3.w2.weight",
    )


def test_parameters_in_another_order_of_memory(tinies: Tinies) -> None:
    model = ckptcore.from_checkpoint(tinies("mixtral").hub)
    before = ckptcore.fingerprint_model(model)
    experts = model.model.layers[0].mlp.experts
    experts.down_proj.data = experts.down_proj.data.transpose(0, 2).contiguous().transpose(0, 2)
    assert not experts.down_proj.is_contiguous()
    assert ckptcore.fingerprint_model(model).fingerprint == before.fingerprint


def test_what_is_not_comparable_is_named(tinies: Tinies, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UsageError, match="not comparable: Linear is no model of transformers"):
        ckptcore.fingerprint_model(torch.nn.Linear(2, 2))
    model = ckptcore.from_checkpoint(tinies("llama").hub)
    monkeypatch.setattr(model, "quantization_method", "bitsandbytes", raising=False)
    with pytest.raises(
        errors.UnsupportedDtype, match=r"not comparable: LlamaForCausalLM is quantised \(bitsandbytes\)"
    ):
        ckptcore.fingerprint_model(model)
    fused = small_models.build("ernie4_5_vl_moe")
    with pytest.raises(errors.UsageError, match=r"not comparable: .* which no rule can express"):
        ckptcore.fingerprint_model(fused)
    peft = pytest.importorskip("peft")
    model = ckptcore.from_checkpoint(tinies("llama").hub)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(errors.UsageError, match="not comparable: LlamaForCausalLM has a LoRA adapter"):
        ckptcore.fingerprint_model(model)
    config = tinies("llama").live.config
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    with pytest.raises(errors.UsageError, match=r"cannot fingerprint .*meta"):
        ckptcore.fingerprint_model(empty)


def test_a_compiled_model_has_the_names_of_its_module(tinies: Tinies) -> None:
    model = ckptcore.from_checkpoint(tinies("llama").hub)
    wrapped = SimpleNamespace(_orig_mod=model)
    assert ckptcore.fingerprint_model(wrapped) == ckptcore.fingerprint_model(model)
