"""Messages that point the right way: near names, the missing argument, names of the catalog, whole rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptcore.catalog import open_catalog
from ckptcore.cli.main import run

LONG = "model.layers.0." + "post_attention_layernorm_of_a_long_name." * 4 + "weight"


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path}/catalog.sqlite")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    folder = tmp_path / "runs" / "step-20"
    state = {LONG: torch.ones(2), **{f"w{n}": torch.ones(2) for n in range(60)}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    assert run(["validate", str(folder)]) == 0
    return folder


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.alike(9)
@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["export", "runs/step-20"], 2, "Missing argument 'DST'"),
        (["export", "runs/stpe-20", "x"], 8, "next: did you mean runs/step-20?"),
        (["export", "runs/step-20/__0_0.distcp", "x"], 4, "name the folder: runs/step-20"),
        (["export", "runs/step-20", "x", "--dtype", "bf17"], 14, "did you mean bf16?"),
        (["mount", "runs/step-20"], 2, "Missing argument 'DIR'"),
        (["plan", "runs/step-20", "x", "--to", "safetnsors"], 2, "did you mean safetensors?"),
        (["catalog", "root", "add", "a", "runs", "--verb", "exprt"], 2, "did you mean export?"),
        (["retire", "runss"], 2, "did you mean runs?"),
        (["catalog", "sql", "SELECT * FROM latest_exprots"], 2, "did you mean latest_exports"),
        (["catalog", "sql", "SELECT * FROM x"], 2, "views: latest_outputs, latest_exports"),
        (["catalog", "resolve", "nobody"], 2, "the catalog has no checkpoint nobody"),
        (["inspect", ""], 2, "'SRC...': must not be empty"),
        (["catalog", "list", "--state", "presnt"], 2, "did you mean present?"),
        (["catalog", "list", "--state", "x"], 2, "state must be one of present,"),
        (["catalog", "meta", "runs/step-20", "x"], 2, "a fact must have the form KEY=VALUE (got 'x')"),
        (["catalog", "sql", "SELECT ur FROM latest_exports"], 2, "did you mean uri?"),
        (["catalog", "sql", "SELECT c.zzzz FROM checkpoint c"], 2, "FROM VIEW LIMIT 1'` shows the columns"),
        (["export", "runs/step-20", "x", "--rename", "a"], 2, "next: `ckptcore export --help` lists"),
        (["retire", "runs", "--keep-last", "0"], 2, "next: `ckptcore retire --help` lists"),
        (["catalog", "root", "add", "a", "b", "--verb"], 2, "next: see `ckptcore catalog root add --help`"),
        (["export", "runs/step-20", "x", "--config", "catalog.sqlite"], 2, "the folder that has config.json"),
        (["validate", "runs/step-20", "--output", "yaml"], 2, "'--output': 'yaml' is not one of"),
        (["validate", "runs/step-20", "--workers", "0"], 2, "'--workers': must be greater than"),
    ],
)
def test_the_next_step(
    argv: list[str], code: int, message: str, step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, _, err = printed(capsys, *argv)
    assert message in err
    assert ended == code


@pytest.mark.parametrize("argv", [[], ["catalog"], ["catalog", "root"]])
def test_a_group_without_a_command_shows_its_help(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = printed(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"Usage: {' '.join(['ckptcore', *argv])} ")


def test_names_near_those_of_the_catalog(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["catalog", "alias", "set", "llama/prod", str(step), "--force"]) == 0
    assert run(["catalog", "root", "add", "llama", "runs"]) == 0
    for argv, near in (
        (["catalog", "show", "llama/pord"], "llama/prod"),
        (["catalog", "alias", "remove", "llama/pord"], "llama/prod"),
        (["catalog", "root", "show", "lama"], "llama"),
        (["catalog", "root", "remove", "lama"], "llama"),
    ):
        code, _, err = printed(capsys, *argv)
        assert (code, err.splitlines()[-1].strip()) == (2, f"next: did you mean {near}?"), argv


def test_a_mistyped_option_is_no_conversion(step: Path) -> None:
    run(["export", "runs/step-20", "x", "--dtype", "bf17"])
    with open_catalog(None) as catalog:
        assert catalog.conversions() == ()


def test_names_of_the_catalog(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_catalog(None) as catalog:
        (row,) = catalog.list()
    assert run(["catalog", "alias", "set", "llama/prod", str(step), "--force"]) == 0
    for name in ("llama/prod", row.id[:6], row.id):
        code, out, err = printed(capsys, "inspect", name)
        assert (code, out.startswith(f"{step}: dcp")) == (0, True)
        assert f"{name} is {step} in the catalog" in err
        assert printed(capsys, "catalog", "resolve", name)[:2] == (0, f"{step}\n")
    assert printed(capsys, "diff", "llama/prod", str(step))[0] == 0
    assert printed(capsys, "consolidate", "llama/prod", "out.safetensors")[0] == 0
    (step.parent / "llama").mkdir()
    code, _, err = printed(capsys, "inspect", "llama/other")  # the hub's form stays what it is
    assert "hf download llama/other" in err


def test_a_pipe_gets_every_row_in_full(
    step: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = printed(capsys, "inspect", "runs/step-20")[1]
    rows = [line.split()[0] for line in out.splitlines() if "float32" in line]
    assert {LONG, *(f"w{n}" for n in range(60))} <= set(rows)
    assert str(step) in printed(capsys, "catalog", "list")[1]
    monkeypatch.setenv("COLUMNS", "80")
    assert LONG not in printed(capsys, "inspect", "runs/step-20")[1]


@pytest.mark.parametrize("argv", [["-h"], ["export", "-h"], ["catalog", "list", "-h"]])
def test_short_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = printed(capsys, *argv)
    assert (code, out.lstrip().startswith("Usage: ckptcore")) == (0, True)


def test_what_exists_is_skipped_only_if_it_is_the_same(
    step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = step.with_name("step-30")
    dcp.save({"w0": torch.zeros(2)}, checkpoint_id=other, no_dist=True)
    consolidate = ("consolidate", str(step), "out.safetensors")
    assert printed(capsys, *consolidate)[0] == 0
    assert printed(capsys, *consolidate)[0] == 7
    code, out, _ = printed(capsys, *consolidate, "--if-exists", "skip")
    assert (code, "already holds the result" in out) == (0, True)
    for differing in (
        (*consolidate, "--dtype", "bf16", "--if-exists", "skip"),
        ("consolidate", str(other), "out.safetensors", "--if-exists", "skip"),
        ("consolidate", str(other), "out.safetensors", "--if-exists", "skip", "--wait", "0s"),
    ):
        code, _, error = printed(capsys, *differing)
        assert (code, "this request did not make it of this source" in error) == (7, True), differing
    assert printed(capsys, "consolidate", str(other), "out.safetensors", "--if-exists", "replace")[0] == 0
    assert printed(capsys, *consolidate, "--if-exists", "skip")[0] == 7  # once made, and replaced since
    assert printed(capsys, *consolidate, "--if-exists", "skip", "--no-catalog")[0] == 2
    assert printed(capsys, *consolidate, "--if-exists", "skip", "--overwrite")[0] == 2
