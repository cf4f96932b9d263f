"""Read quantised Hugging Face folders: the values are those of torch's own reader, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from driver import run_process
from hf_folders import folder
from samples import FIXTURES, differences, expected_tensors, read_safetensors, read_torch, tensors_of, value

import ckptcore
from ckptcore.core.box import Box
from ckptcore.core.dequantize import FP4

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver import Cli, Outcome

SAMPLE = FIXTURES / "torch" / "hf_fp8_block"


def fp8(rows: int, columns: int, block: tuple[int, int] = (128, 128), seed: int = 0) -> dict[str, Any]:
    """A weight of random bytes (NaN among them) with its scales."""
    import torch

    maker = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=maker)
    shape = [-(-n // b) for n, b in zip((rows, columns), block, strict=True)]
    scales = torch.rand(shape, generator=maker) * 3
    return {"l.weight": raw.view(torch.float8_e4m3fn), "l.weight_scale_inv": scales}


def mxfp4(*shape: int, seed: int = 0) -> dict[str, Any]:
    """Blocks and scales of every bit pattern; shape: [..., G]."""
    import torch

    maker = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=maker)
    return {"m_blocks": blocks, "m_scales": torch.randint(0, 256, shape, dtype=torch.uint8, generator=maker)}


def values_of_fp8(tensors: dict[str, Any], block: tuple[int, int] = (128, 128)) -> Any:
    """The formula, one block at a time."""
    import torch

    weight, scale = tensors["l.weight"], tensors["l.weight_scale_inv"]
    out = torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            out[part] = weight[part].to(torch.float32) * scale[i, j].to(torch.float32)
    return out


def values_of_mxfp4(tensors: dict[str, Any]) -> Any:
    """The formula, one value at a time, in Python's doubles and rounded once; exact within float32."""
    import torch

    blocks, scales = tensors["m_blocks"], tensors["m_scales"]
    table = torch.tensor(FP4)
    pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1)
    values = pairs.reshape(*blocks.shape[:-1], 32)
    exponent = scales.to(torch.int32).unsqueeze(-1) - 127
    return torch.ldexp(values, exponent).reshape(*scales.shape[:-1], -1)


def consolidated(cli: Callable[..., Outcome], source: Path, dst: Path, *flags: str) -> Any:
    done = cli("consolidate", source, dst, "--output", "json", *flags)
    assert done.code == 0, done
    return tensors_of(read_torch(dst)) if dst.suffix == ".pt" else read_safetensors(dst)


def same(one: Any, other: Any) -> bool:
    return bool(value(one) == value(other))


# --- values ----------------------------------------------------------------------------------


def test_the_sample(cli: Cli, tmp_path: Path) -> None:
    truth = expected_tensors(SAMPLE / "expected.safetensors")
    found = consolidated(cli, SAMPLE / "ckpt", tmp_path / "out")
    assert sorted(found) == sorted(truth)
    assert not differences(truth, found)
    file = SAMPLE / "ckpt" / "model-00001-of-00001.safetensors"
    assert not differences(truth, consolidated(cli, file, tmp_path / "of-file"))


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 517), (640, 3), (2, 1000)])
def test_fp8_as_torch_reads_it(shape: tuple[int, int], tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

    source = folder(tmp_path / "s", fp8(*shape, seed=sum(shape)))
    theirs = {"l.weight": torch.zeros(shape)}
    dcp.load(theirs, storage_reader=QuantizedHuggingFaceStorageReader(str(source)), no_dist=True)
    ours = ckptcore.read(ckptcore.open(str(source)), "l.weight")
    assert same(ours, theirs["l.weight"])


@pytest.mark.parametrize("scale", ["bfloat16", "float16", "float32", "float64", "float8_e8m0fnu"])
@pytest.mark.parametrize("weight", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_dtypes_of_weights_and_scales(weight: str, scale: str, tmp_path: Path) -> None:
    import torch

    made = fp8(200, 150)
    made["l.weight"] = made["l.weight"].view(getattr(torch, weight))
    made["l.weight_scale_inv"] = (made["l.weight_scale_inv"] + 0.1).to(getattr(torch, scale))
    manifest = ckptcore.open(str(folder(tmp_path / "s", made)))
    assert same(ckptcore.read(manifest, "l.weight"), values_of_fp8(made))


@pytest.mark.parametrize("block", [(1, 128), (64, 32), (7, 5), (1000, 1000), (1, 1)])
def test_the_block_is_that_of_the_config(block: tuple[int, int], cli: Cli, tmp_path: Path) -> None:
    made = fp8(130, 257, block)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    source = folder(tmp_path / "s", made, config=config)
    found = consolidated(cli, source, tmp_path / "out", "--memory", "1MiB", "--workers", "1")
    assert found["l.weight"] == value(values_of_fp8(made, block))


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 8, 3), (5, 1), (1, 300), (3, 2, 2, 2)])
def test_mxfp4(shape: tuple[int, ...], cli: Cli, tmp_path: Path) -> None:
    made = mxfp4(*shape)
    found = consolidated(cli, folder(tmp_path / "s", made), tmp_path / "out")
    assert found == {"m_blocks": value(values_of_mxfp4(made))}


def test_mxfp4_as_torch_computes_it(tmp_path: Path) -> None:
    """Compare with torch's reader.

    It fills only the first values of each row, because its chunks keep the stored shape.
    """
    import torch
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

    made = mxfp4(2, 3, 5)
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path))

    class Request:
        storage_offsets, lengths = (0, 0, 0), (2, 3, 160)

    theirs = reader._dequantize_tensor_mxfp4(made["m_blocks"], made["m_scales"], Request(), 0, 0)
    ours = ckptcore.read(ckptcore.open(str(folder(tmp_path / "s", made))), "m_blocks")
    assert same(ours, theirs)
    assert ours.dtype == torch.float32


def test_boxes_tiles_and_budgets_change_no_bit(cli: Cli, tmp_path: Path) -> None:
    """Tiles that begin inside of blocks and groups; the input spread over files."""
    made, four = fp8(700, 1300, seed=3), mxfp4(9, 2001, seed=4)
    weight = {"l.weight": made["l.weight"], "m_scales": four["m_scales"]}
    scale = {"l.weight_scale_inv": made["l.weight_scale_inv"], "m_blocks": four["m_blocks"]}
    source = folder(tmp_path / "s", weight, scale)
    expected = {"l.weight": values_of_fp8(made), "m_blocks": values_of_mxfp4(four)}
    truth = {k: value(v) for k, v in expected.items()}
    for number, flags in enumerate(
        (
            ["--memory", "1MiB", "--workers", "1"],
            ["--memory", "1MiB", "--workers", "4"],
            ["--no-verify", "--no-digest", "--workers", "2", "--memory", "2MiB"],
            ["--max-file-size", "1MB"],
        )
    ):
        assert consolidated(cli, source, tmp_path / str(number), *flags) == truth
    assert consolidated(cli, source, tmp_path / "all.pt", "--memory", "1MiB") == truth
    manifest = ckptcore.open(str(source))
    for fqn, box in (
        ("l.weight", Box((127, 129), (3, 300))),
        ("l.weight", Box((0, 0), (700, 1))),
        ("m_blocks", Box((3, 31), (2, 34))),
        ("m_blocks", Box((8, 64_000), (1, 32))),
        ("m_blocks", Box((0, 5), (9, 1))),
        ("m_blocks", Box((2, 0), (0, 5))),
    ):
        index = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
        assert same(ckptcore.read(manifest, fqn, box), expected[fqn][index])


def test_into_a_live_model(tmp_path: Path) -> None:
    import torch

    made = fp8(300, 200)
    manifest = ckptcore.open(str(folder(tmp_path / "s", made | {"norm": torch.ones(3)})))
    live = {"l.weight": torch.zeros(300, 200, dtype=torch.bfloat16), "norm": torch.zeros(3)}
    assert ckptcore.load_into(manifest, live) == []
    assert same(live["l.weight"], values_of_fp8(made).to(torch.bfloat16))


def test_casts_follow_dequantization(cli: Cli, tmp_path: Path) -> None:
    import torch

    made = fp8(300, 200)
    source = folder(tmp_path / "s", made)
    found = consolidated(cli, source, tmp_path / "out", "--dtype", "bf16", "--memory", "1MiB")
    assert found["l.weight"] == value(values_of_fp8(made).to(torch.bfloat16))


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """As a user starts it: a fork of a process that has used CUDA cannot use it."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    made, four = fp8(700, 1300, seed=3), mxfp4(9, 201, seed=4)
    scaled = {"r.weight": fp8(300, 200)["l.weight"], "r.weight_scale": torch.rand(300, 1)}
    scaled |= {"t.weight": fp8(300, 200)["l.weight"], "t.weight_scale": torch.rand(())}
    source = folder(tmp_path / "s", made | four | scaled)
    for dtype in ("fp32", "bf16"):
        here = consolidated(run_process, source, tmp_path / dtype, "--dtype", dtype)
        done = ["--dtype", dtype, "--device", "cuda"]
        assert consolidated(run_process, source, tmp_path / f"{dtype}-cuda", *done) == here


# --- as they are stored ----------------------------------------------------------------------


def test_kept_on_request(cli: Cli, tmp_path: Path) -> None:
    source = folder(tmp_path / "s", fp8(130, 140) | mxfp4(2, 3))
    stored = read_safetensors(source)
    found = consolidated(cli, source, tmp_path / "out", "--keep-quantized")
    assert found == stored
    inspected = cli("inspect", source, "--keep-quantized", "--output", "json").json
    assert (inspected["format"], inspected["num_tensors"]) == ("safetensors", 4)
    assert cli("validate", source, "--keep-quantized", "--level", "values", "--output", "json").code == 0


def test_inspect_and_plan_report_computed_tensors(cli: Cli, tmp_path: Path) -> None:
    """inspect and plan name what a tensor is computed from, and the plan can be saved and applied."""
    source = folder(tmp_path / "s", fp8(130, 140))
    inspected = cli("inspect", source, "--output", "json").json
    assert inspected["format"] == "hf_quantized"
    (row,) = inspected["tensors"]
    computed = "fp8_block of l.weight, l.weight_scale_inv"
    assert (row["dtype"], row["shape"], row["computed"]) == ("float32", [130, 140], computed)
    assert computed in cli("inspect", source).stdout
    saved = cli("plan", source, tmp_path / "out", "--save", tmp_path / "plan", "--output", "json")
    assert saved.json["computed"] == [["l.weight", computed]]
    repeated = cli("plan", source, tmp_path / "out", "--output", "json")
    assert repeated.json["plan_digest"] == saved.json["plan_digest"]
    kept = cli("plan", source, tmp_path / "out", "--keep-quantized", "--output", "json")
    assert kept.json["plan_digest"] != saved.json["plan_digest"]
    assert cli("apply", tmp_path / "plan", "--output", "json").code == 0
    assert read_safetensors(tmp_path / "out")["l.weight"][:2] == ("float32", (130, 140))


def test_the_manifest_travels(tmp_path: Path) -> None:
    from ckptcore.core.manifest import Manifest

    manifest = ckptcore.open(str(folder(tmp_path / "s", fp8(130, 140) | mxfp4(2, 3))))
    back = Manifest.load(manifest.dump())
    assert back.digest == manifest.digest
    assert same(ckptcore.read(back, "m_blocks"), ckptcore.read(manifest, "m_blocks"))


def test_globs_and_renames(cli: Cli, tmp_path: Path) -> None:
    """They mean the computed tensor; its inputs come along."""
    source = folder(tmp_path / "s", fp8(130, 140) | mxfp4(2, 3))
    flags = ["--exclude", "m_*", "--rename", "l.=model.l."]
    found = consolidated(cli, source, tmp_path / "out", *flags)
    assert found == {"model.l.weight": value(values_of_fp8(fp8(130, 140)))}


def test_values_are_not_tied(cli: Cli, tmp_path: Path) -> None:
    made = fp8(130, 140)
    source = folder(tmp_path / "s", made | {f"k{n[1:]}": t.clone() for n, t in made.items()})
    done = cli("consolidate", source, tmp_path / "o", "--tie", "k.weight=l.weight", "--output", "json")
    assert (done.code, "--keep-quantized" in done.json["error"]["hint"]) == (2, True), done


def test_an_export_of_values_is_not_called_quantised() -> None:
    """transformers would take the values for stored weights, and look for their scales."""
    from ckptcore.planning.config_folder import ConfigFolder

    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    beside = ConfigFolder("", {"config.json": json.dumps(config).encode()})
    plain = json.loads(beside.files("float32", plain=True)["config.json"])
    assert plain == {"model_type": "llama", "dtype": "float32"}
    assert json.loads(beside.files(None)["config.json"]) == config


# --- what does not fit -----------------------------------------------------------------------


def test_pairs_that_do_not_fit_are_refused(cli: Cli, tmp_path: Path) -> None:
    import torch

    made = fp8(300, 200)
    odd = {
        "one-scale": made | {"l.weight_scale_inv": torch.ones(1)},
        "other-block": made | {"l.weight_scale_inv": torch.ones(6, 4)},
        "no-rank-2": {"l.weight": made["l.weight"].reshape(2, 150, 200), "l.weight_scale_inv": torch.ones(1)},
        "wide": made | {"l.weight": torch.ones(300, 200, dtype=torch.bfloat16)},
        "integers": made | {"l.weight_scale_inv": torch.ones(3, 2, dtype=torch.int32)},
        "groups": mxfp4(2, 3) | {"m_scales": torch.ones(2, 4, dtype=torch.uint8)},
        "lost-scale": made | {"k.weight": made["l.weight"].clone()},
        "half": mxfp4(2, 3) | {"m_blocks": torch.ones(2, 3, 8, dtype=torch.uint8)},
    }
    for name, tensors in odd.items():
        source = folder(tmp_path / name, tensors)
        done = cli("validate", source, "--output", "json")
        assert done.code == 1, (name, done)
        assert {f["code"] for f in done.json["findings"]} == {"unfit-quantization"}, name
        refused = cli("consolidate", source, tmp_path / "out", "--output", "json")
        assert (refused.code, (tmp_path / "out").exists()) == (1, False)
        assert "--keep-quantized" in refused.json["error"]["hint"]
        found = consolidated(cli, source, tmp_path / f"{name}-kept", "--keep-quantized")
        assert found == read_safetensors(source)


def test_names_alone_are_no_evidence(cli: Cli, tmp_path: Path) -> None:
    """Float blocks and scales, a scale without its weight."""
    import torch

    plain = {
        "a_blocks": torch.ones(3, 16),
        "a_scales": torch.ones(3),
        "b.weight_scale_inv": torch.ones(1, 1),
        "c.weight": torch.ones(3, 3).to(torch.float8_e4m3fn),
    }
    source = folder(tmp_path / "s", plain)
    assert cli("inspect", source, "--output", "json").json["format"] == "safetensors"
    assert consolidated(cli, source, tmp_path / "out") == read_safetensors(source)


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        '{"quantization_config": 3}',
        '{"quantization_config": {"weight_block_size": [0, 1]}}',
        '{"quantization_config": {"weight_block_size": "big"}}',
        '{"quantization_config": {"config_groups": [1]}}',
        '{"quantization_config": {"config_groups": {"g": {"weights": [1]}}}}',
        '{"quantization_config": {"config_groups": {"g": {"weights": {"strategy": "block"}}}}}',
        '{"compression_config": "big"}',
        "[" * 100_000,
    ],
)
def test_a_config_that_cannot_be_read(config: str, cli: Cli, tmp_path: Path) -> None:
    source = folder(tmp_path / "s", fp8(130, 140), config=config)
    done = cli("inspect", source, "--output", "json")
    assert (done.code, done.json["error"]["code"]) == (1, "malformed"), done
    assert consolidated(cli, source, tmp_path / "out", "--keep-quantized") == read_safetensors(source)


def test_inputs_that_are_missing(cli: Cli, tmp_path: Path) -> None:
    """The scales are in another file, which is missing or cut."""
    made = fp8(300, 200)
    source = folder(tmp_path / "s", {"l.weight": made.pop("l.weight")}, made)
    second = source / "model-00002-of-00002.safetensors"
    cut = shutil.copytree(source, tmp_path / "cut")
    (cut / second.name).write_bytes(second.read_bytes()[:-4])
    second.unlink()
    for folder_ in (source, cut):
        done = cli("consolidate", folder_, tmp_path / "out", "--output", "json")
        assert (done.code, (tmp_path / "out").exists()) == (1, False), done


def test_stored_values_are_checked(cli: Cli, tmp_path: Path) -> None:
    import torch

    made = fp8(300, 200)
    made["l.weight"] = torch.ones(300, 200).to(torch.float8_e4m3fn)
    made["l.weight_scale_inv"][1, 1] = float("nan")
    done = cli("validate", folder(tmp_path / "s", made), "--level", "values", "--output", "json")
    assert {f["fqn"] for f in done.json["findings"] if f["code"] == "not-finite"} == {"l.weight_scale_inv"}
