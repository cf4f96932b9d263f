"""Quantised folders that keep their stored values: names are compared with the config that describes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_names import State, hub_model

import ckptcore
from ckptcore.errors import NameMismatch

pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.usefixtures("asked_here")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PER_TENSOR = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}},
}
PACKED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 8}}},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}
EIGHT_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def fp8(module: str, weight: torch.Tensor) -> State:
    return {
        f"{module}.weight": weight.to(torch.float8_e4m3fn),
        f"{module}.weight_scale_inv": torch.ones(1, 1),
    }


def per_tensor(module: str, weight: torch.Tensor) -> State:
    return {f"{module}.weight": weight.to(torch.float8_e4m3fn), f"{module}.weight_scale": torch.ones(1)}


def packed(module: str, weight: torch.Tensor) -> State:
    rows, columns = weight.shape
    return {
        f"{module}.weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32),
        f"{module}.weight_scale": torch.ones(rows, columns // 8),
        f"{module}.weight_shape": torch.tensor([rows, columns]),
    }


def gptq(module: str, weight: torch.Tensor) -> State:
    rows, columns = weight.shape
    return {
        f"{module}.qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        f"{module}.qzeros": torch.zeros(columns // 8, rows // 8, dtype=torch.int32),
        f"{module}.scales": torch.ones(columns // 8, rows),
        f"{module}.g_idx": torch.arange(columns, dtype=torch.int32) // 8,
    }


def eight_bits(module: str, weight: torch.Tensor) -> State:
    return {
        f"{module}.weight": weight.to(torch.int8),
        f"{module}.SCB": torch.ones(weight.shape[0]),
        f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


Layer = Callable[[str, torch.Tensor], State]
KINDS: dict[str, tuple[dict[str, Any], Layer]] = {
    "fp8": (FP8, fp8),
    "per-tensor": (PER_TENSOR, per_tensor),
    "packed": (PACKED, packed),
    "gptq": (GPTQ, gptq),
    "eight-bits": (EIGHT_BITS, eight_bits),
}


def quantised(folder: Path, family: str, kind: str, **more: Any) -> State:
    """Linear layers of attention and MLP are quantised. Values do not matter here."""
    config, hub = hub_model(family)
    stated, layer = KINDS[kind]
    state: State = {}
    for name, tensor in hub.items():
        linear = (".self_attn." in name or ".mlp." in name) and not name.endswith("gate.weight")
        new = layer(name.removesuffix(".weight"), tensor) if linear and tensor.dim() == 2 else {name: tensor}
        state |= {n: t.contiguous().clone() for n, t in new.items()}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated | more}))
    return state


def kept(source: Path, **options: Any) -> State:
    target = source.parent / "out"
    ckptcore.convert(str(source), str(target), verb="export", keep_quantized=True, catalog=False, **options)
    return load_file(target / "model.safetensors")


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_moe"])
def test_a_folder_with_its_own_config_keeps_every_bit(tmp_path: Path, family: str, kind: str) -> None:
    state = quantised(tmp_path / "in", family, kind)
    out = kept(tmp_path / "in")
    assert {n: bits(t) for n, t in out.items()} == {n: bits(t) for n, t in state.items()}
    form = json.loads((tmp_path / "out/config.json").read_text())
    assert form["quantization_config"] == KINDS[kind][0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_config_does_not_quantise_has_no_scales(tmp_path: Path, kind: str) -> None:
    quantised(tmp_path / "in", "llama", kind, modules_to_not_convert=["model.layers.0.mlp"])
    with pytest.raises(NameMismatch, match=r"unexpected: model\.layers\.0\.mlp"):
        kept(tmp_path / "in")


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_without_quantisation_fits_none(tmp_path: Path, kind: str) -> None:
    quantised(tmp_path / "in", "llama", kind)
    config, _ = hub_model("llama")
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    with pytest.raises(NameMismatch, match="unexpected"):
        kept(tmp_path / "in")


@pytest.mark.parametrize("kind", ["fp8", "per-tensor"])
def test_a_weight_that_lost_its_scale_is_named(tmp_path: Path, kind: str) -> None:
    state = quantised(tmp_path / "in", "llama", kind)
    lost = next(n for n in state if "_scale" in n)
    save_file({n: t for n, t in state.items() if n != lost}, tmp_path / "in/model.safetensors")
    with pytest.raises(NameMismatch, match=rf"no tensor is the scale of {lost.partition('_scale')[0]}"):
        kept(tmp_path / "in")


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_layer_is_missing(tmp_path: Path, kind: str) -> None:
    state = quantised(tmp_path / "in", "llama", kind)
    lost = "model.layers.1.mlp.up_proj"
    save_file({n: t for n, t in state.items() if not n.startswith(lost)}, tmp_path / "in/model.safetensors")
    with pytest.raises(NameMismatch, match=rf"missing: {lost}\.weight"):
        kept(tmp_path / "in")


@pytest.mark.parametrize("config", [b"{", b"[]", b'{"quantization_config": [1]}'])
def test_beside_an_unreadable_config_a_float8_tensor_is_one_finding(tmp_path: Path, config: bytes) -> None:
    state = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "b.weight": torch.ones(2, 2)}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(config)
    (found,) = ckptcore.open(str(tmp_path)).findings
    assert (found.code, found.fqn) == ("unfit-quantization", "a.weight")
    assert "config.json" in found.message
    target = tmp_path.parent / f"{tmp_path.name}-out"
    ckptcore.convert(str(tmp_path), str(target), catalog=False, exclude=["a.*"])
    assert bits(load_file(target / "model.safetensors")["b.weight"]) == bits(state["b.weight"])
