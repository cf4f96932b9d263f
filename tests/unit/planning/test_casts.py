"""A cast leaves quantised values and what belongs to them: for every way that libraries store them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import grids
import pytest
from hf_folders import compressed, folder
from samples import read_safetensors, value

import ckptcore
from ckptcore.errors import UsageError

if TYPE_CHECKING:
    from driver import Cli


def stored(dtype: str, *shape: int) -> Any:
    import torch

    return torch.ones(shape).to(getattr(torch, dtype))


# What a library stores for a layer, by name: (dtype, shape...).
LIBRARIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "GPTQ": {
        "qweight": ("int32", 8, 16),
        "qzeros": ("int32", 1, 2),
        "scales": ("float16", 1, 16),
        "g_idx": ("int32", 64),
    },
    "AWQ": {"qweight": ("int32", 8, 16), "qzeros": ("int32", 1, 2), "scales": ("float16", 1, 16)},
    "bitsandbytes, 4 bits": {
        "weight": ("uint8", 128, 1),
        "weight.absmax": ("uint8", 4),
        "weight.nested_absmax": ("float32", 1),
        "weight.nested_quant_map": ("float32", 256),
        "weight.quant_map": ("float32", 16),
        "weight.quant_state.bitsandbytes__nf4": ("uint8", 90),
    },
    "bitsandbytes, 8 bits": {"weight": ("int8", 16, 16), "SCB": ("float32", 16)},
    "compressed-tensors, packed": {
        "weight_packed": ("int32", 16, 2),
        "weight_scale": ("float16", 16, 1),
        "weight_shape": ("int64", 2),
    },
    "compressed-tensors, NVFP4": {
        "weight_packed": ("uint8", 16, 8),
        "weight_scale": ("float8_e4m3fn", 16, 1),
        "weight_global_scale": ("float32", 1),
        "input_global_scale": ("float32", 1),
    },
    "ModelOpt, NVFP4": {
        "weight": ("uint8", 16, 8),
        "weight_scale": ("float8_e4m3fn", 16, 1),
        "weight_scale_2": ("float32",),
        "input_scale": ("float32",),
    },
    "DeepSeek": {"weight": ("float8_e4m3fn", 16, 16), "scale": ("float8_e8m0fnu", 1, 1)},
    "EETQ": {"weight": ("int8", 16, 16), "weight_scales": ("float16", 16)},
    "msmodelslim, 3 dims": {
        "weight": ("int8", 2, 16, 16),
        "weight_scale": ("float32", 2, 16, 1),
        "weight_offset": ("float32", 2, 16, 1),
    },
    "ComfyUI": {"weight": ("float8_e4m3fn", 16, 16), "scale_weight": ("float32",)},
    "quanto": {"weight._data": ("float8_e4m3fn", 16, 16), "weight._scale": ("float32", 16, 1)},
}


# Read as the values of the weights, or refused, unless they are to be kept.
PAIRS = ("DeepSeek", "msmodelslim, 3 dims")


@pytest.mark.parametrize(
    ("library", "flags"),
    grids.sliced(
        [(one, f) for one in LIBRARIES for f in ([], ["--keep-quantized"]) if f or one not in PAIRS],
        lambda row: (row[0], bool(row[1])),
    ),
)
def test_they_are_carried_as_stored(library: str, flags: list[str], cli: Cli, tmp_path: Path) -> None:
    layer = {f"m.l.{end}": stored(*form) for end, form in LIBRARIES[library].items()}
    source = folder(tmp_path / "s", layer | {"m.norm.weight": stored("float32", 3)})
    before = read_safetensors(source)
    done = cli("export", source, tmp_path / "o", "--config", "none", "--output", "json", *flags)
    assert (done.code, read_safetensors(tmp_path / "o")) == (0, before)
    done = cli(
        "export", source, tmp_path / "h", "--config", "none", "--dtype", "bf16", "--output", "json", *flags
    )
    assert done.code == 0, done
    assert read_safetensors(tmp_path / "h") == before | {"m.norm.weight": value(stored("bfloat16", 3))}
    (kept,) = [f for f in done.json["warnings"] if f["code"] == "kept-quantized"]
    floats = [name for name, tensor in layer.items() if tensor.dtype.is_floating_point]
    assert f"{len(floats)} tensor" in kept["message"], kept


def quantised() -> dict[str, Any]:
    layer = {"weight": stored("float8_e4m3fn", 16, 16), "weight_scale": stored("float32", 16, 1)}
    layer |= {"input_scale": stored("float32"), "bias": stored("float32", 16)}
    return {f"m.a.k.{n}": t for n, t in layer.items()} | {"m.a.k_scale": stored("float32")}


def test_a_cast_of_what_is_kept(cli: Cli, tmp_path: Path) -> None:
    """Under other names, of a part, and in another format, too."""
    source = folder(tmp_path / "s", quantised(), config=compressed("channel"))
    flags = ["--dtype", "bf16", "--keep-quantized", "--output", "json"]
    before = read_safetensors(source)
    after = before | {"m.a.k.bias": value(stored("bfloat16", 16))}
    assert cli("consolidate", source, tmp_path / "o", *flags).code == 0
    assert read_safetensors(tmp_path / "o") == after
    assert cli("export", source, tmp_path / "e", *flags, "--config", "none").code == 0
    assert read_safetensors(tmp_path / "e") == after
    proof = cli("verify-export", tmp_path / "e", "--against", source)
    assert proof.code in (0, 26), proof  # 26: there is no model to compare logits with
    part = ["--exclude", "*_scale", "--rename", "m.=n."]
    assert cli("consolidate", source, tmp_path / "p", *flags, *part).code == 0
    found = read_safetensors(tmp_path / "p")
    assert found == {f"n.a.k.{n}": after[f"m.a.k.{n}"] for n in ("weight", "bias")}
    assert cli("consolidate", source, tmp_path / "o.pt", "--keep-quantized").code == 0
    assert cli("consolidate", tmp_path / "o.pt", tmp_path / "q", "--dtype", "bf16").code == 0
    assert read_safetensors(tmp_path / "q") == after


def test_float8_without_scales_is_kept_on_request(cli: Cli, tmp_path: Path) -> None:
    source = folder(tmp_path / "s", {"a.weight": stored("float8_e5m2", 4, 4)}, config=compressed("channel"))
    assert cli("consolidate", source, tmp_path / "o", "--dtype", "bf16", "--keep-quantized").code == 0
    assert read_safetensors(tmp_path / "o") == read_safetensors(source)


def test_exceptions_cast_scales_and_no_codes(cli: Cli, tmp_path: Path) -> None:
    source = folder(tmp_path / "s", quantised())
    flags = ["--keep-quantized", "--output", "json", "--dtype-for"]
    done = cli("consolidate", source, tmp_path / "o", *flags, "*.weight_scale=fp64")
    assert done.code == 0, done
    assert read_safetensors(tmp_path / "o")["m.a.k.weight_scale"] == value(stored("float64", 16, 1))
    refused = cli("consolidate", source, tmp_path / "p", *flags, "m.a.*=bf16")
    assert (refused.code, (tmp_path / "p").exists()) == (2, False)
    assert "m.a.k.weight_scale" in refused.json["error"]["message"]


def test_a_live_model_gets_no_codes(tmp_path: Path) -> None:
    import torch

    manifest = ckptcore.open(str(folder(tmp_path / "s", quantised())), keep_quantized=True)
    live = {"m.a.k.weight": torch.zeros(16, 16, dtype=torch.bfloat16)}
    with pytest.raises(UsageError, match=r"m\.a\.k\.weight_scale"):
        ckptcore.load_into(manifest, live, strict=False)
    same = {"m.a.k.weight": torch.zeros(16, 16).to(torch.float8_e4m3fn)}
    ckptcore.load_into(manifest, same, strict=False)
    assert value(same["m.a.k.weight"]) == value(stored("float8_e4m3fn", 16, 16))
