"""Folders of Accelerate and the Trainer are written for any mesh: `test_accelerate_resume` loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptcore
from ckptcore.errors import UnsupportedFormat

MODEL, OPTIMIZER = "pytorch_model_fsdp", "optimizer"


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest) -> Path:
    """What two ranks under Accelerate's FSDP2 saved."""
    (found,) = [
        s for s in request.config.stash[samples.SAMPLES] if s.name == "accelerate_fsdp2_2r" and not s.corpus
    ]
    return found.root / "ckpt"


def write(source: Path, target: Path, mesh: str, **options: Any) -> Path:
    ckptcore.convert(
        str(source), str(target), verb="reshard", to="accelerate", mesh=mesh, catalog=False, **options
    )
    return target


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    manifest = ckptcore.open(str(folder))
    return {t.fqn: ckptcore.read(manifest, t.fqn) for t in manifest.tensors if "random" not in t.fqn}


def require_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [n for n in want if not torch.equal(got[n], want[n])] == []


def values(folder: Path) -> dict[str, Any]:
    return {b.key: b.tree for b in ckptcore.open(str(folder)).blobs if "random" not in b.key}


def test_every_part_comes_back(saved: Path, tmp_path: Path) -> None:
    out = write(saved, tmp_path / "out", "fsdp=3")
    assert {p.name for p in out.iterdir()} == {f"{MODEL}_0", f"{OPTIMIZER}_0", "scheduler.bin"}
    assert {p.name for p in (out / f"{MODEL}_0").iterdir()} == {
        ".metadata",
        *(f"__{n}_0.distcp" for n in range(3)),
    }
    require_equal(tensors(out), tensors(saved))
    assert values(out) == values(saved)
    scheduler = torch.load(out / "scheduler.bin", weights_only=True)
    assert scheduler == torch.load(saved / "scheduler.bin", weights_only=True)


def test_torch_loads_a_part(saved: Path, tmp_path: Path) -> None:
    out = write(saved, tmp_path / "out", "fsdp=2")
    want = {n: t for n, t in tensors(saved).items() if n.startswith("model.")}
    state = {"model": {n.removeprefix("model."): torch.empty_like(t) for n, t in want.items()}}
    dcp.load(state, checkpoint_id=out / f"{MODEL}_0", no_dist=True)
    require_equal({f"model.{n}": t for n, t in state["model"].items()}, want)


def test_random_states_are_those_of_their_rank(saved: Path, tmp_path: Path) -> None:
    out = write(saved, tmp_path / "out", "fsdp=3", keep_object=["random_states*"])
    for rank in range(2):
        name = f"random_states_{rank}.pkl"
        got, want = (torch.load(folder / name, weights_only=False) for folder in (out, saved))
        assert got.keys() == want.keys()
        assert got["random_state"] == want["random_state"]
        assert got["step"] == want["step"]
        assert torch.equal(got["torch_manual_seed"], want["torch_manual_seed"])
        assert (got["numpy_random_seed"][1] == want["numpy_random_seed"][1]).all()
    assert torch.load(out / "random_states_2.pkl", weights_only=True) == {"step": want["step"]}


def test_a_second_model(saved: Path, tmp_path: Path) -> None:
    """Names in every folder begin with ``model``, whatever its number."""
    source = Path(shutil.copytree(saved, tmp_path / "source"))
    for part in (MODEL, OPTIMIZER):
        shutil.copytree(source / f"{part}_0", source / f"{part}_1")
    shutil.copy(source / "scheduler.bin", source / "scheduler_1.bin")
    out = write(source, tmp_path / "out", "fsdp=2")
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir() if "random" not in p.name}
    require_equal(tensors(out), tensors(source))
    assert {name.split(".")[0] for name in tensors(out)} == {"model", "model_1", "optimizer", "optimizer_1"}
    reader = dcp.FileSystemReader(out / f"{MODEL}_1")
    assert all(name.startswith("model.") for name in reader.read_metadata().state_dict_metadata)


def test_what_the_trainer_calls_its_files(saved: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(saved, tmp_path / "source"))
    (source / "scheduler.bin").rename(source / "scheduler.pt")
    for rank in range(2):
        (source / f"random_states_{rank}.pkl").unlink()
        torch.save({"cpu": torch.full((16,), rank, dtype=torch.uint8)}, source / f"rng_state_{rank}.pth")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": 4, "log_history": [{"loss": 0.5}]}))
    out = write(source, tmp_path / "out", "fsdp=2", keep_object=["rng_state*"])
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()}
    state = json.loads((out / "trainer_state.json").read_text())
    assert state == {"global_step": 4, "log_history": [{"loss": 0.5}]}
    for rank in range(2):
        got = torch.load(out / f"rng_state_{rank}.pth", weights_only=True)
        assert torch.equal(got["cpu"], torch.full((16,), rank, dtype=torch.uint8))


def test_other_sources_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"model.w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedFormat, match="must be a folder of Accelerate") as caught:
        write(tmp_path / "model.safetensors", tmp_path / "out", "fsdp=2")
    assert "dcp writes rank files" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_what_no_file_has_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=r"cannot write ema\.gate"):
        write(saved, tmp_path / "out", "fsdp=2", rename=[("model.gate", "ema.gate")])
    assert not (tmp_path / "out").exists()
