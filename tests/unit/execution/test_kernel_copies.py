"""Where no check needs the bytes, the kernel copies long runs, and the output is the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pieces import numbered, write_dcp
from safetensors.torch import load_file

from ckptcore import Box, convert
from ckptcore.execution import file_writer
from ckptcore.planning.request import Settings
from ckptcore.store.local_writer import LocalWriter

REAL = file_writer._RUN
SIDE = (
    140  # a tensor of int64 with this many rows and columns is longer than a run has to be, half of it is not
)


def rows(n: int, *cuts: int, width: int = SIDE) -> list[Box]:
    ends = [0, *cuts, n]
    return [Box((a, 0), (b - a, width)) for a, b in pairwise(ends)]


def state() -> dict[str, tuple[Any, list[Box]]]:
    square = (SIDE, SIDE)
    boxes = {
        "complete": rows(SIDE),
        "in rows": rows(SIDE, 3, 90),
        "in columns": [Box((0, 0), (SIDE, 60)), Box((0, 60), (SIDE, 80))],
        "mixed": [Box((0, 0), (70, SIDE)), Box((70, 0), (70, 9)), Box((70, 9), (70, SIDE - 9))],
    }
    made = {name: (numbered(square, "int64", 1000 * n), cut) for n, (name, cut) in enumerate(boxes.items())}
    small = numbered((SIDE // 2, SIDE // 2), "int64", 7)
    return made | {
        "small": (small, rows(SIDE // 2, 20, width=SIDE // 2)),
        "one": (numbered((1,)), [Box((0,), (1,))]),
    }


@pytest.mark.parametrize("memory", [1 << 20, 1 << 30])  # tensors in several tiles, and in one
@pytest.mark.parametrize(
    ("run", "copies"),
    [(REAL, {"complete", "in rows"}), (1, {"complete", "in rows", "small", "one"}), (1 << 40, set())],
)
def test_the_output_is_that_of_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: int, copies: set[str], memory: int
) -> None:
    tensors = state()
    write_dcp(tmp_path / "ckpt", tensors, files=3)
    looked_at = convert(str(tmp_path / "ckpt"), str(tmp_path / "read.safetensors"), catalog=False)
    assert looked_at.files[0].digest is not None
    monkeypatch.setattr(file_writer, "_RUN", run)
    copied: list[int] = []
    copy = LocalWriter.copy

    def noted(self: LocalWriter, source: Any, path: str, start: int, length: int, at: int) -> bool:
        copied.append(length)
        return copy(self, source, path, start, length, at)

    monkeypatch.setattr(LocalWriter, "copy", noted)
    settings = Settings(memory=memory, workers=2, verify=False, digest=False)
    convert(str(tmp_path / "ckpt"), str(tmp_path / "out.safetensors"), settings=settings, catalog=False)
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "read.safetensors").read_bytes()
    found = load_file(tmp_path / "out.safetensors")
    assert all(found[name].equal(tensor) for name, (tensor, _) in tensors.items())
    if memory > 1 << 20:  # complete tensors; otherwise also the tiles of others that are runs
        assert sum(copied) == sum(tensors[name][0].nbytes for name in copies)
    else:
        assert bool(copied) == bool(copies)
