"""Check that answers are short and complete: `print()` of results, evidence, `formats`, help."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.formats import FORMATS


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({f"layers.{n}.weight": torch.ones(1) for n in range(400)}, folder / "model.safetensors")
    return folder


def test_results_print_as_summaries(source: Path, tmp_path: Path) -> None:
    manifest = ckptcore.open(str(source))
    assert repr(manifest) == f"<Manifest safetensors {manifest.root}: 400 tensors, 400 chunks, 1 file>"
    result = ckptcore.convert(str(source), str(tmp_path / "out"))
    assert str(tmp_path / "out") in repr(result)
    assert len(repr(result)) < 1500
    assert "layers.7.weight" not in repr(result)


@pytest.mark.parametrize("ranks", [1, 2])
def test_evidence_has_plural_forms_that_fit(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reshard", str(_one(tmp_path)), str(tmp_path / "dcp"), "--mesh", f"fsdp={ranks}"]) == 0
    capsys.readouterr()
    assert run(["inspect", str(tmp_path / "dcp")]) == 0
    answer = " ".join(capsys.readouterr().out.split())
    assert ("1 *.distcp file)" if ranks == 1 else "2 *.distcp files)") in answer


def test_formats_fit_a_terminal_without_broken_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["formats"]) == 0
    answer = capsys.readouterr().out
    assert max(map(len, answer.splitlines())) <= 80
    tokens = set(answer.replace(":", " ").split())
    for known in FORMATS:
        assert set(known.title.replace(":", " ").split()) <= tokens, known.name


@pytest.mark.parametrize("command", ["consolidate", "export", "reshard", "plan", "sweep", "retire"])
def test_help_has_named_placeholders_and_unbroken_tokens(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run([command, "--help", "--all"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("-")]
    options = [line for line in lines if line.startswith("  --")]
    assert not [line for line in options if "<str>" in line or "<int" in line or "<float" in line]


def _one(folder: Path) -> Path:
    (folder / "one").mkdir()
    save_file({"w": torch.ones(4, 2)}, folder / "one/model.safetensors")
    return folder / "one"
