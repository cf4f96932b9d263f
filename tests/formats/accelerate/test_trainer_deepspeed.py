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


def test_a_tracker_of_another_format_stays_a_question(values: Tensors, tmp_path: Path) -> None:
    folder = trainer(tmp_path / "a", values, halves(values))
    (folder / "__0_0.distcp").write_bytes(b"")
    (folder / ".metadata").write_bytes(b"x")
    with pytest.raises(AmbiguousModel):
        ckptcore.open(str(folder))
