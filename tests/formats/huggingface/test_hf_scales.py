"""Float8 and int8 weights with a scale per tensor, row or block: their values, and scales that are lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hf_folders import compressed, folder, quantization
from samples import read_safetensors, value

import ckptcore
from ckptcore.core.box import Box
from ckptcore.errors import MalformedCheckpoint

if TYPE_CHECKING:
    from driver import Cli

BLOCK = (128, 128)


def codes(rows: int, columns: int, dtype: str = "float8_e4m3fn", seed: int = 0) -> Any:
    """Every bit pattern of a dtype of one byte, NaN among them."""
    import torch

    maker = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=maker)
    return raw.view(getattr(torch, dtype))


def scales(*shape: int, dtype: str = "float32", seed: int = 1) -> Any:
    import torch

    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.01).to(getattr(torch, dtype))


def values(weight: Any, scale: Any, block: tuple[int, int] | None = None) -> Any:
    """The formula with torch alone: weight * scale in float32, the scale repeated to the weight's shape."""
    import torch

    factors = scale.to(torch.float32)
    if block is not None:
        factors = factors.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        factors = factors[: weight.shape[0], : weight.shape[1]]
    elif factors.ndim == 1 and factors.numel() != 1:
        factors = factors[:, None]
    return weight.to(torch.float32) * factors


def same(one: Any, other: Any) -> bool:
    return bool(value(one) == value(other))


def findings(cli: Cli, source: Path) -> dict[str, str]:
    """Name of a tensor -> the code of the finding about it."""
    found = cli("validate", source, "--output", "json").json["findings"]
    return {f["fqn"]: f["code"] for f in found if f["severity"] == "error"}


def written(cli: Cli, verb: str, source: Path, dst: Path, *flags: str) -> Any:
    done = cli(verb, source, dst, "--output", "json", *flags)
    assert done.code == 0, done
    return read_safetensors(dst)


# --- values ----------------------------------------------------------------------------------

FORMS: dict[str, tuple[tuple[int, ...], tuple[int, int] | None, Any]] = {
    "tensor, compressed-tensors": ((1,), None, compressed("tensor")),
    "tensor, ModelOpt": ((), None, quantization("modelopt", quant_algo="FP8", ignore=["lm_head"])),
    "tensor, no config": ((), None, None),
    "channel, compressed-tensors": ((300, 1), None, compressed("channel")),
    "channel, fbgemm": ((300, 1), None, quantization("fbgemm_fp8", modules_to_not_convert=[])),
    "channel, flat": ((300,), None, None),
    "block, compressed-tensors": ((3, 2), BLOCK, compressed("block", block_structure=[128, 128])),
    "block, as text": ((3, 2), BLOCK, compressed("block", block_structure="128x128")),
    "block, fp8": ((5, 7), (64, 32), quantization("fp8", weight_block_size=[64, 32])),
    "group, compressed-tensors": ((300, 4), (1, 64), compressed("group", group_size=64)),
}


@pytest.mark.grid
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("scale", ["float32", "bfloat16"])
def test_values_are_weight_times_scale(form: str, dtype: str, scale: str, cli: Cli, tmp_path: Path) -> None:
    """In float32, and rounded once by a cast; shards, tiles and slices change no bit."""
    import torch

    shape, block, config = FORMS[form]
    made = {"l.weight": codes(300, 200, dtype), "l.weight_scale": scales(*shape, dtype=scale)}
    truth = values(*made.values(), block)
    other = {"norm.weight": torch.ones(3, dtype=torch.bfloat16), "l.weight_scale": made["l.weight_scale"]}
    source = folder(tmp_path / "s", {"l.weight": made["l.weight"]}, other, config=config)
    assert cli("inspect", source, "--output", "json").json["format"] == "hf_quantized"
    assert findings(cli, source) == {}
    found = written(cli, "consolidate", source, tmp_path / "o", "--memory", "1MiB", "--workers", "1")
    assert found == {"l.weight": value(truth), "norm.weight": value(other["norm.weight"])}
    half = written(cli, "export", source, tmp_path / "h", "--dtype", "bf16", "--config", "none")
    assert half["l.weight"] == value(truth.to(torch.bfloat16))
    manifest = ckptcore.open(str(source))
    for box in (Box((127, 63), (3, 66)), Box((299, 0), (1, 200)), Box((5, 199), (0, 1))):
        index = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
        assert same(ckptcore.read(manifest, "l.weight", box), truth[index])


@pytest.mark.parametrize("form", ["tensor, no config", "channel, flat", "block, compressed-tensors"])
def test_a_reshard_cuts_the_values(form: str, cli: Cli, tmp_path: Path) -> None:
    shape, block, config = FORMS[form]
    made = {"l.weight": codes(300, 200), "l.weight_scale": scales(*shape)}
    source = folder(tmp_path / "s", made, config=config)
    assert cli("reshard", source, tmp_path / "r", "--mesh", "fsdp=7", "--output", "json").code == 0
    manifest = ckptcore.open(str(tmp_path / "r"))
    assert same(ckptcore.read(manifest, "l.weight"), values(*made.values(), block))


@pytest.mark.parametrize("shape", [(1, 1), (1, 200), (200, 1), (129, 127), (0, 5)])
def test_odd_sizes(shape: tuple[int, int], tmp_path: Path) -> None:
    for number, scale in enumerate(((), (1,), (shape[0],), (shape[0], 1))):
        made = {"l.weight": codes(*shape), "l.weight_scale": scales(*scale)}
        manifest = ckptcore.open(str(folder(tmp_path / str(number), made)))
        assert manifest.tensors[0].dtype == "float32"
        assert same(ckptcore.read(manifest, "l.weight"), values(*made.values()))


def test_scale_inv_of_a_tensor_where_the_config_says_so(tmp_path: Path) -> None:
    """quant_method fp8 with a weight_block_size of null: one scale per tensor."""
    made = {"l.weight": codes(300, 200), "l.weight_scale_inv": scales(dtype="bfloat16")}
    config = quantization("fp8", weight_block_size=None, activation_scheme="static")
    manifest = ckptcore.open(str(folder(tmp_path / "s", made, config=config)))
    assert same(ckptcore.read(manifest, "l.weight"), values(*made.values()))


def test_a_file_of_its_own(cli: Cli, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    made = {"l.weight": codes(30, 20), "l.weight_scale": scales(30, 1)}
    save_file(made, tmp_path / "model.safetensors")
    manifest = ckptcore.open(str(tmp_path / "model.safetensors"))
    assert same(ckptcore.read(manifest, "l.weight"), values(*made.values()))


def test_the_config_of_values_has_no_quantisation() -> None:
    from ckptcore.planning.config_folder import ConfigFolder

    quantised = {"quantization_config": {"quant_method": "fp8"}, "compression_config": {}}
    config = {"model_type": "llava", **quantised, "text_config": {"hidden_size": 8, **quantised}}
    beside = ConfigFolder("", {"config.json": json.dumps(config).encode()})
    plain = json.loads(beside.files(None, plain=True)["config.json"])
    assert plain == {"model_type": "llava", "text_config": {"hidden_size": 8}}


# --- what is not the formula -----------------------------------------------------------------


def compressed_with_transform(*locations: str) -> dict[str, Any]:
    config = compressed("channel")
    apply = [{"targets": ["Linear"], "location": location} for location in locations]
    rotated = {"config_groups": {"v": {"type": "hadamard", "apply": apply}}}
    config["quantization_config"]["transform_config"] = rotated
    return config


def test_rotations_inside_weights_change_nothing(tmp_path: Path) -> None:
    made = {"l.weight": codes(30, 20), "l.weight_scale": scales(30, 1)}
    for number, config in enumerate(
        (compressed_with_transform("weight_input", "weight_output"), compressed_with_transform())
    ):
        manifest = ckptcore.open(str(folder(tmp_path / str(number), made, config=config)))
        assert same(ckptcore.read(manifest, "l.weight"), values(*made.values()))


@pytest.mark.parametrize("block", [(10**12, 10**12), (1, 10**18), (2**63 - 1, 7)])
def test_blocks_larger_than_any_weight(block: tuple[int, int], cli: Cli, tmp_path: Path) -> None:
    rows, columns = (-(-n // b) for n, b in zip((30, 20), block, strict=True))
    made = {"l.weight": codes(30, 20), "l.weight_scale": scales(rows, columns)}
    config = quantization("fp8", weight_block_size=list(block))
    source = folder(tmp_path / "s", made, config=config)
    truth = values(*made.values(), (min(block[0], 30), min(block[1], 20)))
    found = written(cli, "consolidate", source, tmp_path / "o", "--memory", "1MiB", "--workers", "1")
    assert found == {"l.weight": value(truth)}
    manifest = ckptcore.open(str(source))
    assert same(ckptcore.read(manifest, "l.weight", Box((3, 5), (20, 9))), truth[3:23, 5:14])


def test_numbers_of_thousands_of_digits(tmp_path: Path) -> None:
    """Are not repeated in the finding of every weight."""
    made = {"l.weight": codes(30, 20), "l.weight_scale": scales(2, 2)}
    config = quantization("fp8", weight_block_size=[2**63, 128])
    with pytest.raises(MalformedCheckpoint, match="two positive integers"):
        ckptcore.open(str(folder(tmp_path / "s", made, config=config)))


def odd_pairs() -> dict[str, tuple[dict[str, Any], Any]]:
    import torch

    weight, scale = codes(300, 200), scales(300, 1)
    int8 = {"l.weight": codes(300, 200, "int8"), "l.weight_scale": scale}
    made = {"l.weight": weight, "l.weight_scale": scale}
    zeros = {"l.weight_zero_point": torch.zeros(300, 1, dtype=torch.int8)}
    return {
        "zero points": (int8 | zeros, None),
        "asymmetric by its config": (int8, compressed("channel", type="int", symmetric=False)),
        "order of groups": (int8 | {"l.weight_g_idx": torch.zeros(200, dtype=torch.int32)}, None),
        "second scale": (made | {"l.weight_scale_2": torch.ones(())}, None),
        "offsets": (int8 | {"l.weight_offset": torch.zeros(300, 1)}, None),
        "offsets of experts": (
            {
                "e.up": codes(300, 200, "int8").reshape(3, 100, 200),
                "e.up_scale": torch.ones(3, 100, 1),
                "e.up_offset": torch.zeros(3, 100, 1),
            },
            None,
        ),
        "rotated inputs": (made, compressed_with_transform("weight_input", "input")),
        "scaled inputs": (made | {"l.pre_quant_scale": torch.ones(200)}, None),
        "both scales": (made | {"l.weight_scale_inv": scales(3, 2)}, None),
        "blocks of unknown size": (made | {"l.weight_scale": scales(3, 2)}, None),
        "not the config's strategy": (made, compressed("tensor")),
        "not the config's blocks": (made, quantization("fp8", weight_block_size=[128, 128])),
        "exponents": (made | {"l.weight_scale": torch.ones(300, 7, dtype=torch.uint8)}, None),
        "experts": ({"e.up": weight.reshape(3, 100, 200), "e.up_scale": scales(3, 2)}, None),
        "two sizes": (
            {"l.weight": codes(260, 200), "l.weight_scale": scales(3, 2)},
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {
                        str(n): {"weights": {"strategy": "block", "block_structure": [n, 128]}}
                        for n in (100, 128)
                    },
                }
            },
        ),
    }


@pytest.mark.parametrize("name", odd_pairs())
def test_other_formulas_are_not_guessed(name: str, cli: Cli, tmp_path: Path) -> None:
    tensors, config = odd_pairs()[name]
    plain = {"k.weight": codes(10, 10, seed=5), "k.weight_scale": scales()}
    tensors = tensors if config is not None else tensors | plain
    source = folder(tmp_path / "s", tensors, config=config)
    first = next(iter(tensors))
    assert findings(cli, source) == {first: "unfit-quantization"}
    refused = cli("export", source, tmp_path / "out", "--dtype", "bf16", "--config", "none")
    assert (refused.code, (tmp_path / "out").exists()) == (1, False)
    kept = written(cli, "consolidate", source, tmp_path / "kept", "--keep-quantized")
    assert kept == read_safetensors(source)


# --- lost scales and weights -----------------------------------------------------------------

SAYS = {
    "fp8": quantization("fp8", weight_block_size=[128, 128], modules_to_not_convert=["lm_head"]),
    "fbgemm": quantization("fbgemm_fp8", modules_to_not_convert=["lm_head"]),
    "compressed-tensors": compressed("channel"),
    "older": {"compression_config": compressed("channel")["quantization_config"]},
    "globs": quantization("modelopt", quant_algo="FP8", ignore=["*head*"]),
    "schemes by name": quantization(
        "compressed-tensors", config_groups={"FP8": ["Linear"]}, ignore=["lm_head"]
    ),
    "no lists": quantization("fp8", config_groups=None, modules_to_not_convert="ab", ignore=["lm_head", 3]),
    "expressions": quantization("compressed-tensors", ignore=["re:.*lm_head"]),
    "of the text model": {"text_config": compressed("channel")},
}


@pytest.mark.parametrize("name", SAYS)
def test_all_scales_are_lost(name: str, cli: Cli, tmp_path: Path) -> None:
    """The config alone says that the float8 values are not the weights."""
    made = {"a.weight": codes(30, 20), "b.weight": codes(9, 9), "lm_head.weight": codes(8, 8)}
    source = folder(tmp_path / "s", made, config=SAYS[name])
    assert findings(cli, source) == dict.fromkeys(("a.weight", "b.weight"), "unfit-quantization")
    refused = cli("consolidate", source, tmp_path / "out", "--dtype", "bf16")
    assert (refused.code, (tmp_path / "out").exists()) == (1, False)
    assert written(cli, "consolidate", source, tmp_path / "k", "--keep-quantized") == read_safetensors(source)


def test_all_scales_are_lost_and_modelopt_says_so(cli: Cli, tmp_path: Path) -> None:
    made = {"a.weight": codes(30, 20), "lm_head.weight": codes(8, 8)}
    source = folder(tmp_path / "s", made, config={"model_type": "llama"})
    form = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (source / "hf_quant_config.json").write_text(json.dumps(form))
    assert findings(cli, source) == {"a.weight": "unfit-quantization"}


@pytest.mark.parametrize("config", [None, {"model_type": "llama"}])
def test_float8_values_without_scales_stay(config: Any, cli: Cli, tmp_path: Path) -> None:
    import torch

    made = {"a.weight": codes(30, 20), "b.weight": codes(9, 9)}
    source = folder(tmp_path / "s", made, config=config)
    assert cli("inspect", source, "--output", "json").json["format"] == "safetensors"
    assert written(cli, "consolidate", source, tmp_path / "o") == read_safetensors(source)
    half = written(cli, "consolidate", source, tmp_path / "h", "--dtype", "bf16")
    assert half["a.weight"] == value(made["a.weight"].to(torch.bfloat16))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_one_scale_is_lost(dtype: str, cli: Cli, tmp_path: Path) -> None:
    made = {
        "a.weight": codes(30, 20, dtype),
        "a.weight_scale": scales(30, 1),
        "b.weight": codes(9, 9, dtype),
        "lm_head.weight": codes(8, 8, dtype),
    }
    source = folder(tmp_path / "s", made, config=compressed("channel"))
    assert findings(cli, source) == {"b.weight": "unfit-quantization"}


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_one_weight_is_lost(suffix: str, cli: Cli, tmp_path: Path) -> None:
    shape = (1, 1) if suffix == "weight_scale_inv" else (30, 1)
    made = {"a.weight": codes(30, 20), f"a.{suffix}": scales(*shape), f"b.{suffix}": scales(*shape)}
    source = folder(tmp_path / "s", made | {"a.input_scale": scales()})
    assert findings(cli, source) == {f"b.{suffix}": "unfit-quantization"}
    found = written(cli, "consolidate", source, tmp_path / "o", "--exclude", f"b.{suffix}")
    assert sorted(found) == ["a.input_scale", "a.weight"]


def test_a_part_that_is_packed(cli: Cli, tmp_path: Path) -> None:
    """Values beside codes that nothing decodes would have no config that describes both."""
    import torch

    made = {
        "a.weight": codes(30, 20),
        "a.weight_scale": scales(),
        "b.weight": torch.zeros(30, 10, dtype=torch.uint8),
        "b.weight_scale": scales(30, 2).to(torch.float8_e4m3fn),
        "b.weight_scale_2": scales(),
        "c.weight_packed": torch.zeros(30, 4, dtype=torch.int32),
        "c.weight_scale": scales(30, 1),
    }
    source = folder(tmp_path / "s", made)
    assert findings(cli, source) == dict.fromkeys(("b.weight", "c.weight_packed"), "unfit-quantization")


# --- what is read, and not ---------------------------------------------------------------------


def test_a_scale_beside_plain_weights_is_no_evidence(cli: Cli, tmp_path: Path) -> None:
    import torch

    plain = {"a.weight": torch.ones(3, 3), "a.weight_scale": torch.ones(3, 1), "b_scale": torch.ones(1)}
    source = folder(tmp_path / "s", plain)
    assert cli("inspect", source, "--output", "json").json["format"] == "safetensors"
    assert written(cli, "consolidate", source, tmp_path / "o") == read_safetensors(source)


def ordinary() -> dict[str, dict[str, Any]]:
    """Tensors of models without quantisation, whose names end like those of weights and scales."""
    import torch

    def eight(*shape: int) -> Any:
        return torch.ones(shape).to(torch.float8_e4m3fn)

    def int8(*shape: int) -> Any:
        return torch.ones(shape, dtype=torch.int8)

    return {
        "a mask": {"mask": int8(7), "mask_scale": torch.ones(7)},
        "a counter": {"step": int8(), "step_scale": torch.ones(())},
        "a counter of 32 bits": {"step": int8().to(torch.int32), "step_scale": torch.ones(())},
        "indices": {"ids": int8(7).to(torch.int32), "ids_scale": torch.ones(7)},
        "three dims": {"ids": int8(2, 3, 4), "ids_scale": torch.ones(2)},
        "no scale per row": {"ids": int8(3, 4), "ids_scale": torch.ones(2, 2)},
        "no weight by its name": {"ids": int8(3, 4), "ids_scale": torch.ones(3, 1)},
        "integers": {"ids": int8(3, 4), "ids_scale": int8(3, 1)},
        "all cast to float8": {"n.weight": eight(4, 4), "n.scale": eight(4), "b": eight(4, 4)}
        | {"b_scale": eight(4), "norm.weight": eight(4)},
    }


@pytest.mark.parametrize("name", ordinary())
def test_ordinary_tensors_are_no_evidence(name: str, cli: Cli, tmp_path: Path) -> None:
    source = folder(tmp_path / "s", ordinary()[name])
    assert cli("inspect", source, "--output", "json").json["format"] == "safetensors"
    assert findings(cli, source) == {}
    assert written(cli, "consolidate", source, tmp_path / "o") == read_safetensors(source)


@pytest.mark.parametrize("name", ["a counter", "a counter of 32 bits", "indices", "all cast to float8"])
def test_ordinary_tensors_are_cast(name: str, cli: Cli, tmp_path: Path) -> None:
    import torch

    made = ordinary()[name]
    found = written(cli, "export", folder(tmp_path / "s", made), tmp_path / "o", "--dtype", "bf16")
    cast = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in made.items()}
    assert found == {n: value(t) for n, t in cast.items()}


def test_int8_pairs_of_a_config_are_evidence(cli: Cli, tmp_path: Path) -> None:
    made = {"l.weight": codes(30, 20, "int8"), "l.weight_scale": scales(2, 2)}
    source = folder(tmp_path / "s", made, config=compressed("channel"))
    assert findings(cli, source) == {"l.weight": "unfit-quantization"}


def test_parameters_of_models_are_not_left_out(cli: Cli, tmp_path: Path) -> None:
    """A learned scale of queries has an element for each channel; that of a cache has one."""
    made = {"m.q.weight": codes(30, 20), "m.q.weight_scale": scales(), "m.q_scale": scales(30)}
    source = folder(tmp_path / "s", made)
    assert sorted(written(cli, "export", source, tmp_path / "o", "--config", "none")) == [
        "m.q.weight",
        "m.q_scale",
    ]


def test_names_of_many_dots(tmp_path: Path) -> None:
    """Are compared with a config's names of modules in a time that does not grow with their square."""
    made = {f"{'a.' * 30_000}weight": codes(3, 2)}
    manifest = ckptcore.open(str(folder(tmp_path / "s", made, config=SAYS["fp8"])))
    assert [f.code for f in manifest.findings] == ["unfit-quantization"]


def test_an_export_has_no_scales_of_activations(cli: Cli, tmp_path: Path) -> None:
    """A model of values has no place for them; other outputs have all that is stored."""
    made = {"m.k.weight": codes(30, 20), "m.k.weight_scale": scales(), "m.norm.weight": scales(3)}
    beside = {f"m.k.{n}": scales() for n in ("input_scale", "k_scale", "logit_scale")} | {
        "m.v_scale": scales()
    }
    source = folder(tmp_path / "s", made | beside)
    flags = ["--config", "none", "--output", "json"]
    done = cli("export", source, tmp_path / "o", *flags)
    found = read_safetensors(tmp_path / "o")
    assert (done.code, sorted(found)) == (0, ["m.k.logit_scale", "m.k.weight", "m.norm.weight"])
    gone = sorted(name for name, rule in done.json["dropped"] if "activations" in rule)
    assert gone == ["m.k.input_scale", "m.k.k_scale", "m.v_scale"]
    assert cli("verify-export", tmp_path / "o", "--against", source).code in (0, 26)  # without a model
    assert len(written(cli, "consolidate", source, tmp_path / "c")) == 6
    kept = written(cli, "export", source, tmp_path / "k", *flags[:2], "--keep-quantized")
    assert kept == read_safetensors(source)


def test_transformers_opens_an_export_of_values(cli: Cli, tmp_path: Path) -> None:
    """Of a model as compressed-tensors stores it, with scales of activations, and its config beside it."""
    pytest.importorskip("transformers")
    import torch
    from tiny_llama import tiny_llama
    from transformers import AutoModelForCausalLM

    model = tiny_llama(tie_word_embeddings=False).to(torch.bfloat16)
    stored, truth = dict[str, Any](), dict[str, Any]()
    for name, tensor in model.state_dict().items():
        stored[name] = truth[name] = tensor.clone()
        if name.endswith("proj.weight"):
            factors = (tensor.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
            stored[name] = (tensor / factors).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = factors
            stored[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1, dtype=torch.bfloat16)
            truth[name] = values(stored[name], factors).to(torch.bfloat16)
    config = model.config.to_dict() | compressed("channel")
    names = sorted(stored)
    halves = [{n: stored[n] for n in names[k::2]} for k in range(2)]  # scales in another file
    source = folder(tmp_path / "s", *halves, config=config)
    done = cli("export", source, tmp_path / "o", "--dtype", "bf16", "--output", "json")
    assert done.code == 0, done
    assert not any("quant" in key for key in json.loads((tmp_path / "o" / "config.json").read_text()))
    opened = AutoModelForCausalLM.from_pretrained(str(tmp_path / "o"), dtype=torch.bfloat16)
    for name, tensor in opened.state_dict().items():
        assert value(tensor) == value(truth[name]), name


def test_configs_are_read_for_float8_alone(tmp_path: Path) -> None:
    """One that cannot be read stops nothing else."""
    import torch

    plain = {"a.weight": torch.ones(3, 3), "b.weight": torch.ones(3, 3, dtype=torch.int8)}
    assert ckptcore.open(str(folder(tmp_path / "s", plain, config="{"))).findings == ()
