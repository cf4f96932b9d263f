"""Test that closed, full and unread standard streams change neither what a command does nor its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

BASH = ("bash", "-o", "pipefail", "-c")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with two checkpoints: `good`, and `torn`, which is damaged."""
    for name in ("good", "torn"):
        (tmp_path / name).mkdir()
        save_file({"a": torch.arange(1000.0)}, tmp_path / name / "model.safetensors")
    with (tmp_path / "torn" / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    return tmp_path


def _shell(folder: Path, arguments: str, redirection: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m ckptcore {arguments} --no-catalog {redirection}"
    return subprocess.run([*BASH, command], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("form", "redirection"),
    [("text", "| true"), ("text", "<&- >&- 2>&-"), ("json", "2>&1 | true")]
    + [
        pytest.param(form, to, marks=pytest.mark.soak)
        for form, to in (("text", ">&-"), ("text", "2>&-"), ("text", "<&-"), ("json", "| true"))
    ],
)
def test_streams_that_nobody_reads_leave_a_command_as_it_is(
    checkpoints: Path, form: str, redirection: str
) -> None:
    for source, code in (("good", 0), ("torn", 1), ("missing", 8)):
        done = _shell(checkpoints, f"validate {source} --output {form}", redirection)
        assert done.returncode == code, (source, done.stderr)
        assert "Traceback" not in done.stderr

    made = _shell(checkpoints, f"consolidate good copy --output {form}", redirection)

    assert made.returncode == 0, made.stderr
    assert torch.equal(load_file(checkpoints / "copy" / "model.safetensors")["a"], torch.arange(1000.0))


@pytest.mark.alike(1)
@pytest.mark.parametrize("form", ["text", "json"])
def test_an_answer_that_does_not_fit_its_disk_is_an_error(checkpoints: Path, form: str) -> None:
    good = _shell(checkpoints, f"validate good --output {form}", "> /dev/full")
    torn = _shell(checkpoints, f"validate torn --output {form}", "> /dev/full")
    made = _shell(checkpoints, f"consolidate good copy --output {form}", "> /dev/full")

    assert (good.returncode, torn.returncode, made.returncode) == (10, 1, 10)
    for done in (good, torn, made):
        assert "disk-full: cannot write to standard output: No space left on device\n" in done.stderr
        assert "Traceback" not in done.stderr
    assert (checkpoints / "copy" / "model.safetensors").exists()
