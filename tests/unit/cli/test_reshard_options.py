"""Check that reshard refuses wrong arguments before work, and reports what stays behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.errors import UsageError

MESH = ("--mesh", "fsdp=2")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({"w": torch.ones(4, 2), "rng.cpu": torch.get_rng_state()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reshard", "none", "out", "--mesh", "tp=0"), "the axis tp must have 1 rank"),
        (("reshard", "none", "out", "--mesh", "zz=2"), "unknown axis 'zz'"),
        (("reshard", "none", "out.pt", *MESH), "do not write one file"),
        (("reshard", "none", "out.ckpt", "--to", "dcp", *MESH), "do not write one file"),
        (("plan", "none", "out", "--sharding", "rules"), "--sharding needs --mesh"),
        (("plan", "none", "out", "--sharding", "large", *MESH), "has more than 1048576 bytes"),
        (("reshard", "none", "memory://out", *MESH), "would end with this command"),
        (("export", "none", "MEMORY://out"), "would end with this command"),
    ],
)
def test_wrong_arguments_are_refused_before_a_source_is_read(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules").write_text('family = "hf"')
    (tmp_path / "large").write_bytes(b"\xff" * 1_048_577)
    assert run([*arguments, "--output", "json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert message in error["message"]


@pytest.mark.parametrize("to", ["torch_ranks", "olmo_core", "olmo_v01", "torch_dist"])
def test_items_that_loaders_do_not_read(to: str, source: Path, tmp_path: Path) -> None:
    options = {"verb": "reshard", "to": to, "mesh": "fsdp=2"}
    with pytest.raises(UsageError, match=f"safetensors is not for {to}, .* read torch_save") as error:
        ckptcore.plan(str(source), str(tmp_path / "out"), serialization="safetensors", **options)
    assert error.value.hint == "leave it out, or write dcp"
    assert ckptcore.plan(str(source), str(tmp_path / "out"), **options)


def test_what_stays_behind_is_reported(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["reshard", str(source), str(tmp_path / "a"), *MESH, "--no-catalog"]
    assert run(arguments) == 0
    assert "left out: 1, random state of a rank that saved it" in capsys.readouterr().out
    arguments[2] = str(tmp_path / "b")
    assert run([*arguments, "--output", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["dropped"] == [["rng.cpu", "random state of a rank that saved it"]]


def test_a_usage_error_leaves_no_record(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a failed conversion nor a running one; what fails for another reason is recorded."""
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path / "catalog.sqlite"))
    wrong = ["--to", "torch_ranks", "--serialization", "safetensors"]
    assert run(["reshard", str(source), str(tmp_path / "out"), *MESH, *wrong]) == 2
    with pytest.raises(UsageError):
        ckptcore.convert(str(source), str(tmp_path / "out.pt"), verb="reshard", mesh="fsdp=2")
    assert run(["consolidate", str(tmp_path / "nothing"), str(tmp_path / "out")]) > 2
    capsys.readouterr()
    assert run(["catalog", "list", "--conversions", "--output", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["state"], row["source_uri"]) for row in rows] == [("failed", str(tmp_path / "nothing"))]
