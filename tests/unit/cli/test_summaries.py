"""Check that answers are short and complete: `print()` of results, evidence, `formats`, help."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptcore
from ckptcore.checking.summary import PieceOwners, summarize
from ckptcore.cli.main import run
from ckptcore.cli.render import owners_text
from ckptcore.core.manifest import Blob
from ckptcore.core.manifest_builder import Builder
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


def test_inspect_says_what_is_in_it_and_which_rank_holds_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model and its optimizer, cut over four ranks."""
    state = {"model": {"w": torch.ones(8, 4), "b": torch.ones(8)}}
    state["optim"] = {
        f"state.{name}.exp_avg": torch.zeros_like(value) for name, value in state["model"].items()
    }
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    request = ["--mesh", "fsdp=4", "--no-catalog"]
    assert run(["reshard", str(tmp_path / "source"), str(tmp_path / "out"), *request]) == 0
    capsys.readouterr()
    assert run(["inspect", str(tmp_path / "out"), "--output", "json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert {part["name"]: (part["tensors"], part["elements"]) for part in summary["parts"]} == {
        "model": (2, 40),
        "optimizer": (2, 40),
    }
    assert summary["ranks"] == ["0", "1", "2", "3"]
    assert sum(placement["tensors"] for placement in summary["placements"]) == 4
    assert run(["inspect", str(tmp_path / "out")]) == 0
    answer = capsys.readouterr().out
    assert "model         2 tensors, 40 parameters, 160 B float32" in answer
    assert "optimizer     2 tensors, 40 elements, 160 B float32" in answer
    assert any(line.startswith("cut ") for line in answer.splitlines())


def test_the_grid_of_ranks() -> None:
    """Of a tensor that is cut along two dims: a row of ranks for each piece of the first one."""
    placement = PieceOwners(((0, 2), (1, 2)), ("0", "1", "2", "3"), 1, "w")
    assert owners_text(placement, ["0", "1", "2", "3"]) == "0 1 / 2 3"
    everywhere = PieceOwners((), ("0+1",), 1, "b")
    assert owners_text(everywhere, ["0", "1"]) == "every rank"
    assert owners_text(everywhere, ["0", "1", "2"]) == "0+1"
    many = PieceOwners(((0, 64),), tuple(map(str, range(64))), 1, "w")
    assert owners_text(many, [*map(str, range(64))]) == "0 to 63"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A model of 60 tensors and its optimizer, of step 30."""
    model = {f"layers.{n}.weight": torch.ones(4, 2) for n in range(60)}
    optim = {f"state.{name}.exp_avg": torch.zeros(4, 2) for name in model}
    dcp.save({"model": model, "optim": optim, "step": 30}, checkpoint_id=tmp_path / "trained", no_dist=True)
    return tmp_path / "trained"


@pytest.mark.parametrize("verb", ["inspect", "validate", "plan"])
def test_a_summary_comes_first_and_no_table_scrolls_it_away(
    verb: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [verb, str(trained)]
    if verb == "plan":
        command += [str(tmp_path / "out"), "--verb", "export", "--config", "none", "--no-catalog"]
    if verb == "validate":
        command += ["--no-catalog"]
    monkeypatch.setenv("COLUMNS", "200")  # a terminal of this width
    assert run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = [
        f"{trained}: dcp (found .metadata; 1 *.distcp file)",
        "120 tensors, 3.8 KiB (3.8 KiB float32); 120 chunks in 1 file; 1 object; 1 rank; step 30",
        "model         60 tensors, 480 parameters, 1.9 KiB float32",
        "optimizer     60 tensors, 480 elements, 1.9 KiB float32",
    ]
    start = 1 if verb == "validate" else 0  # its verdict is first
    assert [line.rstrip() for line in lines[start : start + 4]] == summary
    assert len(lines) <= 24
    assert run([*command, "--all"]) == 0
    every = capsys.readouterr().out
    monkeypatch.delenv("COLUMNS")
    assert run(command) == 0
    piped = capsys.readouterr().out
    for text in (every, piped):
        listed = [n for n in range(60) if f"layers.{n}.weight" in text]
        assert len(listed) == (0 if verb == "validate" else 60)
    assert ("--all lists all" in "\n".join(lines)) is (verb != "validate")


def test_a_summary_says_that_there_is_no_optimizer(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", str(source), "--no-catalog"]) == 0
    assert "optimizer     none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("origin", "values", "folder", "step"),
    [
        ({"iteration": 7}, {}, "iter_0000009", 7),
        ({"lightning": {"global_step": 8}}, {}, "last", 8),
        ({}, {"train_state.step": 6}, "x", 6),
        ({}, {"step": True}, "step-5", 5),
        ({}, {"step": "many"}, "model", None),
    ],
)
def test_the_step_is_stated_by_metadata_then_values_then_the_name(
    origin: dict[str, object], values: dict[str, object], folder: str, step: int | None
) -> None:
    blobs = tuple(Blob(key, -1, tree) for key, tree in values.items())
    manifest = replace(Builder().build("dcp", f"/runs/{folder}", origin), blobs=blobs)
    assert summarize(manifest).step == step
