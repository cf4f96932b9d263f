"""Read the folder of a Trainer with DeepSpeed: masters are the model, and the Trainer's file is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deepspeed_files import Tensors, model_states, partitions, save, shapes_of, tensors
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import validate
from ckptcore.errors import AmbiguousModel

SCORE = "base_model.model.score"
LORA = "base_model.model.layers.0.q_proj.lora_{}.default.weight"


def trainer(folder: Path, values: Tensors, copy: Tensors, name: str = "model.safetensors") -> Path:
    """Write `checkpoint-5` with ZeRO-2 on two ranks."""
    module = {n: v.bfloat16() for n, v in values.items()}
    files = {"mp_rank_00_model_states.pt": model_states(2, module=module, param_shapes=[shapes_of(values)])}
    for r, state in enumerate(partitions([values], 2)):
        files[f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt"] = state
    save(folder / "global_step5", files)
    (folder / "latest").write_text("global_step5")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
    (folder / "config.json").write_text("{}")
    torch.save({}, folder / "training_args.bin")
    save_file({n: v.contiguous() for n, v in copy.items()}, folder / name)
    return folder


def codes(folder: Path) -> dict[str, str | None]:
    found = validate(ckptcore.open(str(folder)), "bytes").findings
    return {f.code: f.fqn for f in found if f.severity != "info"}


@pytest.fixture
def values() -> Tensors:
    return tensors({"layers.0.up.weight": (8, 6), "norm.weight": (6,)})


def halves(values: Tensors) -> Tensors:
    return {n: v.bfloat16() for n, v in values.items()}


def test_masters_are_the_model(values: Tensors, tmp_path: Path) -> None:
    folder = trainer(tmp_path / "checkpoint-5", values, halves(values))
    assert codes(folder) == {}
    manifest = ckptcore.open(str(folder))
    assert manifest.format == "deepspeed"
    assert "model.safetensors" in {f.path for f in manifest.files}
    assert run(["export", str(folder), str(tmp_path / "out"), "--config", "none"]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == values.keys()
    assert all(torch.equal(exported[n], values[n]) for n in values)


def test_a_copy_that_differs(values: Tensors, tmp_path: Path) -> None:
    """Of another step, for example: every element is compared with the 16-bit weights of the save."""
    copy = halves(values)
    copy["norm.weight"] = copy["norm.weight"] + 1
    assert codes(trainer(tmp_path / "a", values, copy)) == {"replica-mismatch": "lp/norm.weight"}
    copy["norm.weight"] = torch.ones(5).bfloat16()
    found = codes(trainer(tmp_path / "b", values, copy))
    assert found == {"consolidated-differs": "lp/norm.weight", "unused-bytes": None}
    more = halves(values) | {"v_head": torch.ones(2).bfloat16()}
    assert codes(trainer(tmp_path / "c", values, more)).keys() == {"consolidated-differs", "unused-bytes"}


def test_a_copy_of_half_of_the_model(values: Tensors, tmp_path: Path) -> None:
    """The masters are the complete model all the same; who loads the copy would miss a tensor."""
    copy = halves(values)
    del copy["norm.weight"]
    folder = trainer(tmp_path / "checkpoint-5", values, copy)
    (finding,) = [f for f in validate(ckptcore.open(str(folder)), "bytes").findings if f.severity != "info"]
    assert (finding.code, finding.severity, finding.file) == (
        "consolidated-differs",
        "warning",
        "model.safetensors",
    )
    assert finding.message == "lp/norm.weight is in the ranks' files, but not in model.safetensors"
    assert run(["export", str(folder), str(tmp_path / "out"), "--config", "none"]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == values.keys()


def test_a_copy_in_two_files_of_which_one_is_missing(tmp_path: Path) -> None:
    values = tensors({f"layers.{n}.up.weight": (4, 4) for n in range(4)})
    names = sorted(values)
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    folder = trainer(tmp_path / "checkpoint-5", values, {n: halves(values)[n] for n in names[:2]}, first)
    weight_map = {n: first if n in names[:2] else second for n in names}
    index = {"metadata": {"total_size": 128}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = [f for f in ckptcore.open(str(folder)).findings if f.code == "consolidated-differs"]
    assert [f.message for f in found] == [
        f"lp/{names[2]} and 1 more are in the ranks' files, but not in {first}"
    ]


def test_a_tied_tensor_is_in_the_copy_once(tmp_path: Path) -> None:
    """Which name is left out is the writer's choice, and frozen tensors are of no adapter."""
    values = tensors({"embed.weight": (8, 6), "norm.weight": (6,)})
    for name in ("embed.weight", "head.weight"):
        copy = halves(values)
        copy[name] = copy.pop("embed.weight")
        folder = trainer(tmp_path / name, values, copy)
        states = folder / "global_step5" / "mp_rank_00_model_states.pt"
        module = {n: v.bfloat16() for n, v in values.items()}
        module["head.weight"] = module["embed.weight"]
        content = model_states(2, module=module, param_shapes=[shapes_of(values)])
        content["shared_params"] = {"head.weight": "embed.weight"}
        save(folder / "global_step5", {states.name: content})
        assert codes(folder) == {}


def test_a_missing_rank_stays_missing(values: Tensors, tmp_path: Path) -> None:
    """The copy has no masters, and takes no rank's place."""
    folder = trainer(tmp_path / "a", values, halves(values))
    (folder / "global_step5" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "missing-rank" in codes(folder)
    assert run(["consolidate", str(folder), str(tmp_path / "out")]) == 1


def test_an_adapter(tmp_path: Path) -> None:
    """PEFT leaves the adapter's name out of the names of its file."""
    values = tensors({LORA.format("A"): (2, 6), LORA.format("B"): (8, 2)})
    copy = {n.replace(".default", ""): v for n, v in halves(values).items()}
    folder = trainer(tmp_path / "a", values, copy, "adapter_model.safetensors")
    assert codes(folder) == {}
    copy[LORA.format("A").replace(".default", "")] += 1
    save_file(copy, folder / "adapter_model.safetensors")
    assert codes(folder) == {"replica-mismatch": f"lp/{LORA.format('A')}"}
    save_file({n: v for n, v in copy.items() if "lora_B" in n}, folder / "adapter_model.safetensors")
    assert codes(folder) == {"consolidated-differs": None}


def test_an_adapter_with_a_module_that_is_trained(tmp_path: Path) -> None:
    """PEFT leaves the wrapper of such a module out of the names of its file."""
    values = tensors({LORA.format("A"): (2, 6), f"{SCORE}.modules_to_save.default.weight": (3, 6)})
    copy = {LORA.format("A").replace(".default", ""): values[LORA.format("A")].bfloat16()}
    copy[f"{SCORE}.weight"] = values[f"{SCORE}.modules_to_save.default.weight"].bfloat16()
    folder = trainer(tmp_path / "a", values, copy, "adapter_model.safetensors")
    assert codes(folder) == {}
    copy[f"{SCORE}.weight"] += 1
    save_file(copy, folder / "adapter_model.safetensors")
    assert codes(folder) == {"replica-mismatch": f"lp/{SCORE}.modules_to_save.default.weight"}


def test_a_tracker_of_another_format_stays_a_question(values: Tensors, tmp_path: Path) -> None:
    folder = trainer(tmp_path / "a", values, halves(values))
    (folder / "__0_0.distcp").write_bytes(b"")
    (folder / ".metadata").write_bytes(b"x")
    with pytest.raises(AmbiguousModel):
        ckptcore.open(str(folder))
