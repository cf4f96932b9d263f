"""Steps in the names of files are steps: several saves in one folder never become one checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.errors import AmbiguousModel, CkptError


def composer(folder: Path, steps: tuple[int, ...] = (10, 20, 30)) -> Path:
    folder.mkdir()
    for step in steps:
        state = {"model": {"model.w": torch.full((2, 2), float(step))}, "timestamp": {"batch": step}}
        torch.save({"state": state, "rng": []}, folder / f"ep0-ba{step}-rank0.pt")
    (folder / "latest-rank0.pt").symlink_to(f"ep0-ba{steps[-1]}-rank0.pt")
    return folder


def values(url: Path) -> dict[str, Any]:
    manifest = ckptcore.open(str(url))
    return {t.fqn: ckptcore.read(manifest, t.fqn).tolist() for t in manifest.tensors}


def test_several_saves_are_a_question(tmp_path: Path) -> None:
    folder = composer(tmp_path / "run")
    with pytest.raises(AmbiguousModel, match="3 saves") as caught:
        ckptcore.open(str(folder))
    assert caught.value.values["candidates"] == [f"ep0-ba{step}-rank0.pt" for step in (10, 20, 30)]
    for name, step in (("ep0-ba20-rank0.pt", 20.0), ("latest-rank0.pt", 30.0)):
        assert values(folder / name) == {"state.model.model.w": [[step] * 2] * 2}


def test_a_link_to_the_only_save(tmp_path: Path) -> None:
    assert list(values(composer(tmp_path / "run", (10,))).values()) == [[[10.0] * 2] * 2]


def test_a_copy_of_the_newest_save(tmp_path: Path) -> None:
    folder = composer(tmp_path / "run", (10,))
    (folder / "latest-rank0.pt").unlink()
    shutil.copy(folder / "ep0-ba10-rank0.pt", folder / "latest-rank0.pt")
    with pytest.raises(AmbiguousModel):
        ckptcore.open(str(folder))


@pytest.mark.parametrize(
    "name", ["step_{step}_rank{rank}.pt", "model-{step}-rank_{rank}.pt", "{step}.rank{rank}.pt"]
)
def test_other_names_of_steps(name: str, tmp_path: Path) -> None:
    for step in (100, 200):
        for rank in range(2):
            torch.save({"w": torch.full((2,), step + rank)}, tmp_path / name.format(step=step, rank=rank))
    with pytest.raises(AmbiguousModel):
        ckptcore.open(str(tmp_path))


def test_kinds_of_one_save(tmp_path: Path) -> None:
    """Models that are numbered, and kinds of content, are no steps."""
    for kind in ("model", "model_1", "optim", "ema"):
        torch.save({kind: torch.ones(2)}, tmp_path / f"{kind}_world_size_1_rank_0.pt")
    assert len(ckptcore.open(str(tmp_path)).tensors) == 4


@pytest.mark.parametrize("keys", [("3", "4"), ("ema1", "ema2"), ("latest", "other")])
def test_keys_that_differ_in_a_number_share_a_file(keys: tuple[str, str], tmp_path: Path) -> None:
    """A reader would take files with such stems for several saves."""
    state = {key: {"w": torch.full((2,), float(n))} for n, key in enumerate((*keys, "model", "optim"))}
    torch.save(state, tmp_path / "in.pt")
    ckptcore.convert(str(tmp_path / "in.pt"), str(tmp_path / "out"), to="torch_ranks", catalog=False)
    assert values(tmp_path / "out") == values(tmp_path / "in.pt")


def test_a_sweep_takes_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path}/catalog.db")
    composer(tmp_path / "runs")
    target = ["--destination", str(tmp_path / "out" / "{step}"), "--verb", "consolidate"]
    assert run(["catalog", "root", "add", "runs", str(tmp_path / "runs"), *target]) == 0
    capsys.readouterr()
    assert run(["sweep", "--min-age", "0s", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"made": 3}
    for step in (10, 20, 30):
        (tensor,) = load_file(tmp_path / "out" / str(step) / "model.safetensors").values()
        assert tensor.tolist() == [[float(step)] * 2] * 2


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_link_to_a_sibling(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"step-10{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)({"w": torch.ones(2)}, path)
    (tmp_path / f"latest{suffix}").symlink_to(path.name)
    manifest = ckptcore.open(str(tmp_path))
    assert [file.path for file in manifest.files] == [path.name]
    (tmp_path / f"latest{suffix}").unlink()
    shutil.copy(path, tmp_path / f"latest{suffix}")
    with pytest.raises(CkptError):
        ckptcore.open(str(tmp_path))
