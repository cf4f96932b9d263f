"""Read Accelerate's folders: all parts become one manifest, and missing parts are findings."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from samples import SAMPLES, Sample, differences, expected_tensors, read_safetensors

from ckptcore.api import read as read_tensor
from ckptcore.core.manifest import Manifest
from ckptcore.core.object_tree import decode
from ckptcore.errors import AmbiguousModel, NotComplete, UnsupportedFormat
from ckptcore.formats import open_source, read_manifest
from ckptcore.naming.model_part import find_model
from ckptcore.operations.discover import discover

if TYPE_CHECKING:
    from driver import Cli


@pytest.fixture
def saved(request: pytest.FixtureRequest) -> Sample:
    found: dict[str, Sample] = {s.name: s for s in request.config.stash[SAMPLES]}
    return found["accelerate_fsdp2_2r"]


def test_a_real_folder_is_one_checkpoint(saved: Sample, cli: Cli, tmp_path: Path) -> None:
    done = cli("consolidate", saved.root / "ckpt", tmp_path / "all", "--output", "json")
    assert done.code == 0, done
    found = read_safetensors(tmp_path / "all")
    truth = expected_tensors(saved.root / "expected.safetensors")
    assert not differences(truth, found, "model.")
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        done = cli("consolidate", saved.root / "ckpt" / part, tmp_path / part, "--output", "json")
        assert done.code == 0, done
        assert not differences(read_safetensors(tmp_path / part), found)
    done = cli("export", saved.root / "ckpt", tmp_path / "model", "--output", "json")
    assert done.code == 0, done
    assert sorted(read_safetensors(tmp_path / "model")) == sorted(truth)


def test_objects(saved: Sample) -> None:
    manifest = read(saved.root / "ckpt")
    assert manifest.format == "accelerate"
    names = {t.fqn for t in manifest.tensors} | {b.key for b in manifest.blobs}
    assert {"random_states.torch_manual_seed.rank0", "random_states.torch_manual_seed.rank1"} <= names
    assert any(n.startswith("scheduler.") for n in names)
    assert find_model(manifest).prefix == "model."


@pytest.mark.parametrize("lost", ["optimizer_0", "scheduler.bin", "random_states_0.pkl"])
def test_a_missing_part(lost: str, saved: Sample, cli: Cli, tmp_path: Path) -> None:
    """The model is complete; other missing parts are findings, not errors."""
    path = copied(saved, tmp_path) / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = cli("validate", tmp_path / "ckpt", "--output", "json")
    assert done.code == 0, done
    codes = [f["code"] for f in done.json["findings"]]
    assert codes == ([] if lost == "scheduler.bin" else ["missing-part"])


def test_an_unfinished_part(saved: Sample, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    (folder / "optimizer_0" / ".metadata").unlink()
    with pytest.raises(NotComplete):
        read(folder)


def test_a_missing_model_is_refused(saved: Sample, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    shutil.rmtree(folder / "pytorch_model_fsdp_0")
    with pytest.raises(UnsupportedFormat, match="optimizer_0"):
        read(folder)
    (tmp_path / "runs").mkdir()
    folder.rename(tmp_path / "runs" / "step-10")
    places = discover(str(tmp_path / "runs"))
    assert [(place.path, place.format) for place in places] == [("step-10", "accelerate-optimizer")]


def test_a_second_model(saved: Sample, tmp_path: Path) -> None:
    """Accelerate gives both the same keys; the manifest adds a number to those of the second."""
    folder = copied(saved, tmp_path)
    for part in ("pytorch_model_fsdp", "optimizer"):
        shutil.copytree(folder / f"{part}_0", folder / f"{part}_1")
    tops = Counter(t.fqn.split(".")[0] for t in read(folder).tensors)
    assert tops["model"] == tops["model_1"] > 0
    assert tops["optimizer"] == tops["optimizer_1"] > 0


def test_full_files(cli: Cli, tmp_path: Path) -> None:
    """``FULL_STATE_DICT``: one file for the model, one for the optimizer; the Trainer's names."""
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    weights = {"up.weight": torch.arange(6.0).reshape(2, 3), "up.bias": torch.ones(2)}
    state = {n: {"step": torch.tensor(3.0), "exp_avg": t * 2} for n, t in weights.items()}
    torch.save(weights, folder / "pytorch_model_fsdp.bin")
    torch.save(
        {"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]}, folder / "optimizer.bin"
    )
    torch.save({"last_epoch": 1}, folder / "scheduler.pt")
    for rank in range(2):
        own = {"cpu": torch.full((8,), rank, dtype=torch.uint8), "python": (3, (rank,), None)}
        torch.save(own, folder / f"rng_state_{rank}.pth")
    torch.save(json.JSONDecoder, folder / "sampler.bin")  # a class of the trainer's own
    (folder / "trainer_state.json").write_text('{"global_step": 10, "best_metric": null}')
    manifest = read(folder)
    assert manifest.origin["step"] == 10
    assert {t.fqn for t in manifest.tensors} == {
        *(f"model.{n}" for n in weights),
        *(f"optimizer.state.{n}.{k}" for n in weights for k in ("step", "exp_avg")),
        "rng_state.cpu.rank0",
        "rng_state.cpu.rank1",
    }
    assert [f.code for f in manifest.findings] == ["refused-global"]
    found: dict[str, Any] = {b.key: decode(b.tree) for b in manifest.blobs if b.known}
    assert found["scheduler.last_epoch"] == 1
    assert found["trainer_state"]["global_step"] == 10
    assert found["rng_state.python.rank1"] == (3, (1,), None)
    done = cli("export", folder, tmp_path / "out", "--output", "json")
    assert done.code == 0, done
    assert sorted(read_safetensors(tmp_path / "out")) == sorted(weights)


def test_two_saves_in_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    torch.save({"w": torch.zeros(3)}, folder / "pytorch_model_fsdp.bin")
    with pytest.raises(AmbiguousModel, match="are both the model"):
        read(folder)


def copied(saved: Sample, under: Path) -> Path:
    shutil.copytree(saved.root / "ckpt", under / "ckpt")
    return under / "ckpt"


def read(folder: Path) -> Manifest:
    return read_manifest(open_source(str(folder)))


def full(folder: Path, **more: Any) -> Path:
    """A small save in full files."""
    folder.mkdir(exist_ok=True)
    weights = {"up.weight": torch.arange(6.0).reshape(2, 3)}
    state = {"up.weight": {"exp_avg": torch.ones(2, 3)}}
    torch.save(weights, folder / "pytorch_model_fsdp.bin")
    torch.save({"state": state, "param_groups": [{"params": ["up.weight"]}]}, folder / "optimizer.bin")
    for name, value in more.items():
        torch.save(value, folder / name.replace("__", "."))
    return folder


def test_loaders_prefer_safetensors_beside_the_model(tmp_path: Path) -> None:
    """The Trainer writes it at the end of a run: the full model, next to FSDP's own file."""
    folder = full(tmp_path / "ckpt")
    assert read(folder).format == "accelerate"
    save_file({"up.weight": torch.ones(2, 3)}, folder / "model.safetensors")
    assert read(folder).format == "safetensors"


def test_a_model_without_its_optimizer(tmp_path: Path) -> None:
    folder = full(tmp_path / "ckpt")
    (folder / "optimizer.bin").unlink()
    assert [(f.code, f.file) for f in read(folder).findings] == [("missing-part", "optimizer_0")]


def test_states_that_are_cut_or_of_many_ranks(tmp_path: Path) -> None:
    folder = full(tmp_path / "ckpt", scheduler__pt={"last_epoch": 1})
    (folder / "scheduler.pt").write_bytes((folder / "scheduler.pt").read_bytes()[:40])
    for rank in (0, 2):
        torch.save({"cpu": torch.full((8,), rank, dtype=torch.uint8)}, folder / f"rng_state_{rank}.pth")
    found = {(f.code, f.file) for f in read(folder).findings}
    assert ("malformed-item", "scheduler.pt") in found
    assert ("missing-part", "rng_state_1.pth") in found


@pytest.mark.parametrize("text", ["{", '{"global_step": 1', "\xff"])
def test_a_trainer_state_that_is_not_json(text: str, tmp_path: Path) -> None:
    folder = full(tmp_path / "ckpt")
    (folder / "trainer_state.json").write_bytes(text.encode("latin-1"))
    manifest = read(folder)
    assert [(f.code, f.file) for f in manifest.findings] == [("malformed-metadata", "trainer_state.json")]
    assert "step" not in manifest.origin


def test_a_trainer_state_without_a_step(tmp_path: Path) -> None:
    folder = full(tmp_path / "ckpt")
    (folder / "trainer_state.json").write_text("[1, 2]")
    manifest = read(folder)
    assert manifest.findings == ()
    assert "step" not in manifest.origin
    assert {b.key: decode(b.tree) for b in manifest.blobs}["trainer_state"] == [1, 2]


def test_rank_files_without_dcp(tmp_path: Path) -> None:
    """``use_dcp=False``: a missing file of a rank is named, for the model and for the optimizer."""
    folder = tmp_path / "ckpt"
    folder.mkdir()
    for rank in range(3):
        torch.save({"w": torch.ones(4)}, folder / f"pytorch_model_fsdp_0_rank{rank}.bin")
        torch.save({"state": {}, "param_groups": []}, folder / f"optimizer_0_rank{rank}.bin")
    manifest = read(folder)
    assert manifest.format == "accelerate"
    assert torch.equal(read_tensor(manifest, "model.w"), torch.ones(4))
    torch.save({"step": 3}, folder / "random_states_5.pkl")
    found_alone = [(f.code, f.file) for f in read(folder).findings if "only file of its rank" in f.message]
    assert found_alone == [("missing-part", "random_states_5.pkl")]
    (folder / "optimizer_0_rank1.bin").unlink()
    found = [(f.code, f.file) for f in read(folder).findings if f.severity == "error"]
    assert found == [("missing-rank", "optimizer_0_rank1.bin")]
