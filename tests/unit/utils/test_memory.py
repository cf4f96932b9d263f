"""Freed memory is kept for the next arrays while metadata is read, and returned at the end."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptcore.checking import examine
from ckptcore.checking.check import Report
from ckptcore.utils import memory

PROGRAM = """
import resource
import numpy as np
from ckptcore.utils.memory import reuse_memory, reusing_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        [np.ones(1 << 18, np.int64) for _ in range(48)]  # smaller than arrays of which numpy asks huge pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

begin = resident()
with reusing_memory():
    with reusing_memory():
        reuse_memory(WORK)
        first = faults(1)
    later = faults(2)
print(first * 4096, later * 4096, resident() - begin)
"""


def measured(work: int) -> list[int]:
    """Bytes of pages of the first array and of two more, and what is kept at the end."""
    program = PROGRAM.replace("WORK", str(work))
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return [int(n) for n in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs mallopt of the GNU C library")
def test_freed_arrays_are_reused_and_returned() -> None:
    first, later, kept = measured(1 << 30)
    assert first >= 90 << 20
    assert later < 8 << 20
    assert kept < 48 << 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs mallopt of the GNU C library")
def test_little_work_keeps_nothing() -> None:
    first, later, kept = measured(1 << 20)
    assert first >= 90 << 20
    assert later >= 90 << 20
    assert kept < 48 << 20


@pytest.mark.parametrize(("level", "kept"), [("coverage", True), ("bytes", False)])
def test_memory_is_kept_for_a_check_that_reads_no_tensors(
    level: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    seen: list[bool] = []

    def checked(*_: Any, **__: Any) -> Report:
        seen.append(memory._reuse.depth > 0)
        return Report(level, "safetensors", 1, 16, ())

    monkeypatch.setattr(examine, "check", checked)
    examine.examine(str(tmp_path / "model.safetensors"), level)
    assert seen == [kept]
    assert memory._reuse.depth == 0
