"""Float8 weights of experts in one tensor, and DeepSeek-V3's own names: values, computed by torch alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hf_folders import compressed, folder, quantization
from samples import read_safetensors, value

import ckptcore
from ckptcore.core.box import Box

if TYPE_CHECKING:
    from driver import Cli

BLOCK = (128, 128)
E4M3 = "float8_e4m3fn"
FBGEMM = quantization("fbgemm_fp8", modules_to_not_convert=[])
FP8 = quantization("fp8", weight_block_size=[128, 128])
SMALL = quantization("fp8", weight_block_size=[64, 32])


def codes(*shape: int, dtype: str = E4M3) -> Any:
    """Every bit pattern of a dtype of one byte, NaN among them."""
    import torch

    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return raw.view(getattr(torch, dtype))


def scales(*shape: int, dtype: str = "float32") -> Any:
    import torch

    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.01
    return drawn.to(getattr(torch, dtype))


def product(weight: Any, scale: Any, block: tuple[int, int] | None) -> Any:
    """Weight * scale in float32, the scale repeated to the weight's shape."""
    import torch

    factors = scale.to(torch.float32)
    if block is not None:
        factors = factors.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        factors = factors[..., : weight.shape[-2], : weight.shape[-1]]
    elif factors.ndim == 1 and factors.numel() > 1:
        factors = factors[:, None, None]
    return weight.to(torch.float32) * factors


# Shape of the scale, block, config.
EXPERTS: dict[str, tuple[str, tuple[int, ...], tuple[int, int] | None, Any]] = {
    "one": ("e.w_scale", (1,), None, None),
    "expert": ("e.w_scale", (3,), None, None),
    "expert, three dims": ("e.w_scale", (3, 1, 1), None, compressed("tensor")),
    "row": ("e.w_scale", (3, 300, 1), None, compressed("channel")),
    "column, fbgemm": ("e.w_scale", (3, 1, 200), None, FBGEMM),
    "block": ("e.w_scale_inv", (3, 3, 2), BLOCK, FP8),
    "block, no config": ("e.w_scale_inv", (3, 3, 2), BLOCK, None),
    "small block": ("e.w_scale_inv", (3, 5, 7), (64, 32), SMALL),
}


@pytest.mark.grid
@pytest.mark.parametrize("form", EXPERTS)
@pytest.mark.parametrize("dtype", [E4M3, "float8_e5m2", "int8"])
@pytest.mark.parametrize("scale", ["float32", "bfloat16"])
def test_values_of_experts(form: str, dtype: str, scale: str, cli: Cli, tmp_path: Path) -> None:
    """Files, tiles, slices and the shards of a mesh change no bit."""
    import torch

    name, shape, block, config = EXPERTS[form]
    if dtype == "int8" and config is None:
        config = quantization("modelopt")
    weight, factors = codes(3, 300, 200, dtype=dtype), scales(*shape, dtype=scale)
    truth = product(weight, factors, block)
    source = folder(tmp_path / "s", {"e.w": weight}, {name: factors}, config=config)
    assert ckptcore.open(str(source)).findings == ()
    assert cli("consolidate", source, tmp_path / "o", "--memory", "1MiB", "--workers", "1").code == 0
    assert read_safetensors(tmp_path / "o") == {"e.w": value(truth)}
    done = cli("export", source, tmp_path / "h", "--dtype", "bf16", "--config", "none")
    assert done.code == 0
    assert read_safetensors(tmp_path / "h") == {"e.w": value(truth.to(torch.bfloat16))}
    manifest = ckptcore.open(str(source))
    for box in (Box((1, 127, 31), (2, 3, 66)), Box((2, 299, 0), (1, 1, 200)), Box((0, 5, 199), (3, 0, 1))):
        index = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
        assert value(ckptcore.read(manifest, "e.w", box)) == value(truth[index].contiguous())
    assert cli("reshard", source, tmp_path / "r", "--mesh", "fsdp=2").code == 0
    assert value(ckptcore.read(ckptcore.open(str(tmp_path / "r")), "e.w")) == value(truth)


@pytest.mark.parametrize(
    ("name", "shape", "config"),
    [
        ("e.w_scale", (3, 2), None),  # one for gate and one for up
        ("e.w_scale", (200,), None),
        ("e.w_scale", (1, 300, 1), None),
        ("e.w_scale", (3,), compressed("channel")),
        ("e.w_scale", (3, 300, 1), compressed("tensor")),
        ("e.w_scale_inv", (3, 2, 3), FP8),
        ("e.w_scale_inv", (3, 2), FP8),
    ],
)
def test_another_formula_is_refused(
    name: str, shape: tuple[int, ...], config: Any, cli: Cli, tmp_path: Path
) -> None:
    made = {"e.w": codes(3, 300, 200), name: scales(*shape)}
    source = folder(tmp_path / "s", made, config=config)
    assert [(f.code, f.fqn) for f in ckptcore.open(str(source)).findings] == [("unfit-quantization", "e.w")]
    done = cli("export", source, tmp_path / "o", "--dtype", "bf16", "--config", "none")
    assert done.code == 1
    assert not (tmp_path / "o").exists()


# --- DeepSeek-V3's names ---------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["float32", "float8_e8m0fnu"])
@pytest.mark.parametrize(
    ("config", "block"),
    [(None, BLOCK), ({"dtype": "fp8", "dim": 7168}, BLOCK), (FP8, BLOCK), (SMALL, (64, 32))],
)
def test_scales_by_deepseek_s_own_names(
    config: Any, block: tuple[int, int], scale: str, cli: Cli, tmp_path: Path
) -> None:
    import torch

    shape = (math.ceil(300 / block[0]), math.ceil(200 / block[1]))
    weight, factors = codes(300, 200), scales(*shape, dtype=scale)
    ends = {name: torch.ones(4, 4) for name in ("embed.weight", "norm.weight")}
    other = {"layers.0.attn_norm.weight": torch.ones(4), **ends}
    made = {"layers.0.attn.wq_a.weight": weight, "layers.0.attn.wq_a.scale": factors}
    source = folder(tmp_path / "s", made, other, config=config)
    manifest = ckptcore.open(str(source))
    assert (manifest.format, manifest.findings) == ("hf_quantized", ())
    assert cli("consolidate", source, tmp_path / "o").code == 0
    truth = {"layers.0.attn.wq_a.weight": product(weight, factors, block)} | other
    assert read_safetensors(tmp_path / "o") == {n: value(t) for n, t in truth.items()}


@pytest.mark.parametrize(("shape", "dtype"), [((1,), E4M3), ((300,), E4M3), ((3, 2), "int8"), ((2, 2), E4M3)])
def test_what_else_is_called_scale_is_carried(shape: tuple[int, ...], dtype: str, tmp_path: Path) -> None:
    made = {"a.weight": codes(300, 200, dtype=dtype), "a.scale": scales(*shape)}
    manifest = ckptcore.open(str(folder(tmp_path / "s", made)))
    assert (manifest.format, manifest.findings) == ("safetensors", ())
    ckptcore.convert(str(tmp_path / "s"), str(tmp_path / "o"), dtype="bf16", catalog=False)
    assert read_safetensors(tmp_path / "o") == {n: value(t) for n, t in made.items()}


def test_lost_scales_and_weights_of_deepseek_are_found(tmp_path: Path) -> None:
    made = {f"{n}.weight": codes(300, 200) for n in "ab"} | {f"{n}.scale": scales(3, 2) for n in "ac"}
    made |= {"gain.scale": scales(7)}  # a parameter
    manifest = ckptcore.open(str(folder(tmp_path / "s", made)))
    assert {(f.code, f.fqn) for f in manifest.findings} == {
        ("unfit-quantization", "b.weight"),
        ("unfit-quantization", "c.scale"),
    }
