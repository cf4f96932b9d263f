"""Read and write FSDP1's optimizers: each parameter keeps its state, and unnamed state is kept, too."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from paths import JOBS

import ckptcore
from ckptcore.errors import UnprovenCheckpoint, UnreadablePart

JOB = JOBS / "fsdp1_job.py"
CASES = ["orig", "flat"]


def job(verb: str, folder: Path) -> None:
    done = subprocess.run(
        [*warm.python(), str(JOB), verb, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp1")
    job("save", folder)
    return folder


@pytest.mark.xdist_group("fsdp1")
def test_resharded_files_load_in_fsdp2_and_fsdp1(saved: Path) -> None:
    """The optimizer's loader uses positions alone: each must be that of the model's parameter."""
    for case in CASES:
        reshard(str(saved / case / "ckpt"), saved / case / "new")
    job("load", saved)


@pytest.mark.xdist_group("fsdp1")
def test_the_job_listed_its_parameters_in_another_order(saved: Path) -> None:
    """Otherwise the test above proves nothing."""
    (names,) = torch.load(saved / "flat" / "groups.pt")
    assert names[:3] == ["embed.weight", "norm.weight", "lm_head.weight"]
    (names,) = torch.load(saved / "orig" / "groups.pt")
    assert names[-2:] == ["norm.weight", "lm_head.weight"]


@pytest.mark.xdist_group("fsdp1")
@pytest.mark.parametrize("case", CASES)
def test_names_without_the_models_order_are_not_numbered(saved: Path, tmp_path: Path, case: str) -> None:
    """A file written from sorted names no longer records an order."""
    full, out = tmp_path / "whole", tmp_path / "out"
    ckptcore.convert(str(saved / case / "ckpt"), str(full))
    with pytest.raises(UnprovenCheckpoint, match="nothing proves the order"):
        ckptcore.convert(str(full), str(out), verb="reshard", to="torch_ranks", mesh="fsdp=2")
    assert not out.exists()


@pytest.mark.xdist_group("fsdp1")
@pytest.mark.parametrize("case", CASES)
def test_a_flat_optimizer_is_kept_rank_by_rank(saved: Path, tmp_path: Path, case: str) -> None:
    """As saved by verl: ``optimizer.state_dict()`` of each rank, flat, beside a sharded model."""
    source, out = str(saved / case / "verl"), tmp_path / "out"
    manifest = ckptcore.open(source)
    severities = {f.code: f.severity for f in ckptcore.check(manifest).findings}
    assert severities == {"unnamed-states": "info", "flat-buffers": "warning"}
    ckptcore.convert(source, str(out))
    found = ckptcore.open(str(out))
    files = [saved / case / f"verl/optim_world_size_2_rank_{rank}.pt" for rank in range(2)]
    expected = {
        f"optim.state.{k}.rank{rank}": value
        for rank, file in enumerate(files)
        for k, value in states(file).items()
    }
    assert {t.fqn for t in found.tensors if ".rank" in t.fqn} == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ckptcore.read(found, name), value), name
    for number, row in torch.load(files[0])["state"].items():  # counts of steps, which all ranks share
        for key, value in row.items():
            if not value.dim():
                assert torch.equal(ckptcore.read(found, f"optim.state.{number}.{key}"), value), key
    groups = {b.key: b.tree for b in manifest.blobs if b.key.startswith("optim.")}
    assert groups
    assert {b.key: b.tree for b in found.blobs if b.key in groups} == groups
    model = tmp_path / "model"
    ckptcore.convert(source, str(model), verb="export")
    truth = torch.load(saved / case / "truth.pt")
    exported = ckptcore.open(str(model))
    assert {t.fqn for t in exported.tensors} == {n for n in truth if "/" not in n}
    for spec in exported.tensors:
        assert torch.equal(ckptcore.read(exported, spec.fqn), truth[spec.fqn]), spec.fqn
    with pytest.raises(UnreadablePart, match="flat run of the optimizer") as caught:
        reshard(source, tmp_path / "ranks")
    assert "exclude=" in caught.value.hint
    reshard(source, tmp_path / "ranks", exclude=["optim*"])
    assert not list((tmp_path / "ranks").glob("optim*"))


def reshard(source: str, out: Path, **options: Any) -> None:
    ckptcore.convert(source, str(out), verb="reshard", to="torch_ranks", mesh="fsdp=2", **options)


def states(path: Path) -> dict[str, torch.Tensor]:
    state = torch.load(path)["state"]
    return {f"{n}.{k}": v for n, row in state.items() for k, v in row.items() if v.dim()}
