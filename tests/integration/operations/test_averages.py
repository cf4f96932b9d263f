"""`ckptcore merge` by the catalog: windows of a run, parents with their weights, digests of every input."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import save

import ckptcore
from ckptcore.catalog import open_catalog
from ckptcore.catalog.types import ConversionDetail
from ckptcore.checking.export_proof import ELEMENTS, FINITE, NAMES, VALUES
from ckptcore.cli.main import run
from ckptcore.errors import DamagedCheckpoint, UsageError
from ckptcore.operations.averages import window

EXPORT = {ELEMENTS: "ok", NAMES: "not-done", VALUES: "ok", FINITE: "ok"}


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", url := f"sqlite:///{tmp_path}/catalog.db")
    return url


@pytest.fixture
def steps(tmp_path: Path, catalog: str) -> list[Path]:
    """Six recorded steps of one run, 500 apart."""
    folders = [save(tmp_path / "llama" / f"step-{500 * n}", n) for n in range(1, 7)]
    for folder in folders:
        assert run(["validate", str(folder), "--level", "bytes"]) == 0
    return folders


def test_a_window_of_a_run(steps: list[Path], catalog: str, tmp_path: Path) -> None:
    assert window(catalog, "llama", last=3) == [str(each) for each in steps[3:]]
    assert window(catalog, "llama", last=2, every=1000) == [str(steps[3]), str(steps[5])]
    for options, message in (
        ({"run": "llama", "last": 7}, "has 6 present steps"),
        ({"run": "llama", "last": 4, "every": 1000}, "has 3 present steps"),
        ({"run": "other", "last": 2}, "no training run"),
    ):
        with pytest.raises(UsageError, match=message):
            window(catalog, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is none"):
        window(False, "llama", last=2)
    out = tmp_path / "average.safetensors"
    assert run(["merge", "--run", "llama", "--last", "3", "--every", "1000", "--decay", "0.5", str(out)]) == 0
    wanted = ckptcore.read(ckptcore.open(out), "scale")
    assert wanted == torch.tensor(2 * 0.25 + 4 * 0.25 + 6 * 0.5)


def test_steps_that_count_alike_have_the_bits_of_megatrons_formula(tmp_path: Path) -> None:
    """Megatron-LM's `weighted_merge` fuses product and sum: bits are equal where products are exact."""
    drawn = [torch.randn(257, 31, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    folders = [save(tmp_path / f"step-{n}", n, drawn=weights) for n, weights in enumerate(drawn)]
    ckptcore.merge(folders, tmp_path / "average", catalog=False)
    accumulator = torch.zeros(257, 31)
    for weights in drawn:
        accumulator.add_(weights, alpha=0.25)
    (average,) = tmp_path.glob("average*")
    assert torch.equal(ckptcore.read(ckptcore.open(average), "drawn"), accumulator)


def test_a_sweep_makes_each_new_window(
    steps: list[Path], catalog: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(steps[0].parent)
    add = ["catalog", "root", "add", "llama", root, "--destination", "{root}/../out/{name}"]
    rule = {"merge_last": 2, "merge_every": 1000, "merge_decay": 0.75, "dtype": "bf16"}
    rule["destination"] = "{root}/../windows/step-{step}"
    for odd in (
        {"merge_last": 1},
        {"merge_every": 2},
        {"merge_last": "2"},
        {"merge_last": 2, "merge_every": 0},
    ):
        assert run([*add, "--also", json.dumps({"destination": "{root}/../w/{step}", **odd})]) == 2
    assert run([*add, "--target", json.dumps({"merge_last": 2})]) == 2
    assert run([*add, "--also", json.dumps(rule)]) == 0
    swept = ["sweep", "llama", "--min-age", "0s", "--output", "json"]

    def counts(*more: str) -> dict[str, int]:
        capsys.readouterr()
        assert run([*swept, *more]) == 0
        return json.loads(capsys.readouterr().out)["counts"]

    assert counts() == {"made": 8}  # six steps, and the windows that end with 2000 and 3000
    windows = tmp_path / "windows"
    assert sorted(path.name for path in windows.iterdir()) == ["step-2000", "step-3000"]
    average = ckptcore.read(ckptcore.open(windows / "step-3000"), "scale")
    assert average == torch.tensor(4 * 0.75 + 6 * 0.25, dtype=torch.bfloat16)
    for step in (3500, 4000):
        save(steps[0].parent / f"step-{step}", step // 500)
    assert counts("--dry-run") == {"converted": 8, "ready": 3}
    assert counts() == {"converted": 8, "made": 3}
    assert counts() == {"converted": 11}
    average = ckptcore.read(ckptcore.open(windows / "step-4000"), "scale")
    assert average == torch.tensor(6 * 0.75 + 8 * 0.25, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "arguments",
    [["--run", "llama", "out"], ["--last", "3", "out"], ["--run", "llama", "--last", "3", "a", "out"]],
)
def test_a_window_needs_both(arguments: list[str], catalog: str, tmp_path: Path) -> None:
    assert run(["merge", *arguments]) == UsageError.exit_code


def test_parents_are_in_lineage(
    steps: list[Path], catalog: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each input is a parent, with its weight; the average itself is no checkpoint at a place."""
    out = tmp_path / "average"
    sources = [str(steps[0]), str(steps[1])]
    assert run(["merge", *sources, str(out), "--weights", "1,3", "--verb", "export"]) == 0
    with open_catalog(catalog) as opened:
        lineage = opened.lineage(str(out), down=False)
        by_depth = {step.depth: step.conversion for step in lineage.ancestors}
        parents = [step.source.uri for step in lineage.ancestors if step.depth == 2]
        assert sorted(parents) == sorted(sources)
        average = opened.show(by_depth[2].id)
        assert isinstance(average, ConversionDetail)
        assert average.conversion.request["inputs"] == [[sources[0], 1.0], [sources[1], 3.0]]
        assert [row.uri for row in opened.list()].count(str(out)) == 1
        present = [row.uri for row in opened.list() if row.state == "present"]
        assert not any(uri.startswith("average://") for uri in present)
        assert (lineage.checkpoint.step, lineage.checkpoint.run) == (1000, "llama")
    capsys.readouterr()
    run(["verify-export", str(out), "--output", "json"])  # names are not proven: there is no config
    answer = json.loads(capsys.readouterr().out)
    assert {c["check"]: c["verdict"] for c in answer["checks"]} == EXPORT
    assert (
        run(["merge", *sources, str(out), "--weights", "1,3", "--verb", "export", "--if-exists", "skip"]) == 0
    )


def test_an_input_that_differs_from_its_record_is_damaged(
    steps: list[Path], catalog: str, tmp_path: Path
) -> None:
    """The digests of every input are those that the catalog recorded, also where its own checksums agree."""
    other = save(tmp_path / "other" / "step-500", 9)
    for file in other.iterdir():
        if file.suffix == ".distcp":
            old = (steps[0] / file.name).stat()
            (steps[0] / file.name).write_bytes(file.read_bytes())
            os.utime(steps[0] / file.name, ns=(old.st_atime_ns, old.st_mtime_ns))
    with pytest.raises(DamagedCheckpoint, match="not what the catalog recorded"):
        ckptcore.merge(steps[:2], tmp_path / "out")
