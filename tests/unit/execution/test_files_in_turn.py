"""Files in turn: two workers share a file, and every file has the same bytes however many are open."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest
from paths import FIXTURES
from pieces import numbered, write_dcp

from ckptcore import Box, convert
from ckptcore.errors import BudgetTooSmall, DamagedCheckpoint
from ckptcore.execution.file_writer import FileWork
from ckptcore.planning.request import Settings

executing = import_module("ckptcore.execution.execute")  # the package has a function of that name
FILES = 6
SIZES = {"max_file_size": 600 << 10, "to": "safetensors"}


@pytest.fixture
def source(tmp_path: Path) -> str:
    """One tensor for each output file, of several jobs; the last has a scalar, too."""
    tensors = {f"layer.{n}": numbered((1024, 128), start=n) for n in range(FILES)}
    tensors["scale"] = numbered((), start=3)
    write_dcp(tmp_path / "source", {k: (t, [Box.full(tuple(t.shape))]) for k, t in tensors.items()})
    return str(tmp_path / "source")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many files had jobs left, each time a file was opened."""
    under_way, seen = set[int](), list[int]()
    opened, last_is = executing.open_writer, FileWork.last_is

    def open_writer(run: Any, plan: Any, part: Any = None) -> Any:
        under_way.add(plan.index)
        seen.append(len(under_way))
        return opened(run, plan, part)

    def last(work: FileWork, sequence: int) -> None:
        under_way.discard(work.plan.index)
        last_is(work, sequence)

    monkeypatch.setattr(executing, "open_writer", open_writer)
    monkeypatch.setattr(FileWork, "last_is", last)
    return seen


def settings(workers: int) -> Settings:
    return Settings(memory=workers << 20, workers=workers)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


@pytest.mark.alike(3)
@pytest.mark.parametrize(("workers", "most"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (16, 7)])
def test_every_two_workers_have_a_file(
    source: str, tmp_path: Path, turns: list[int], workers: int, most: int
) -> None:
    convert(source, str(tmp_path / "one"), settings=settings(1), **SIZES)
    del turns[:]
    convert(source, str(tmp_path / "out"), settings=settings(workers), **SIZES)
    assert max(turns) == most
    assert content(tmp_path / "out") == content(tmp_path / "one")
    assert (len(content(tmp_path / "out")), len(turns)) == (FILES, FILES + 1)  # and the index


def test_plans_of_many_rows_are_open_one_after_another(
    source: str, tmp_path: Path, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executing, "_MOST_ROWS", 1)
    convert(source, str(tmp_path / "out"), settings=settings(8), **SIZES)
    assert turns == [1] * (FILES + 1)


def test_files_of_compressed_items_are_alone(tmp_path: Path, turns: list[int]) -> None:
    """A decoded item is in memory, or in a file, until all of it was read."""
    source = str(FIXTURES / "torch/dcp_zstd_2r/ckpt")
    convert(source, str(tmp_path / "out"), settings=settings(8), to="safetensors", max_file_size=2000)
    assert max(turns[:-1]) == 1
    assert len(turns) > 3


def test_a_file_that_is_sent_as_a_stream_is_alone(source: str, turns: list[int]) -> None:
    url = "memory://in-turn/out"
    try:
        convert(source, url, settings=settings(8), **SIZES)
        assert turns == [1] * len(turns)
    finally:
        fsspec.filesystem("memory").rm("/in-turn", recursive=True)


def test_an_error_in_one_file_removes_all_that_are_open(source: str, tmp_path: Path) -> None:
    """What was complete stays for the next run; nothing is left under a temporary name."""
    damaged = next(Path(source).glob("*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[data.find(numbered((1024, 128), start=0).numpy().tobytes()[:64]) + 100_000] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(DamagedCheckpoint):
        convert(source, str(tmp_path / "out"), settings=settings(8), **SIZES)
    assert not list(tmp_path.rglob("*.part"))
    assert not (tmp_path / "out").exists()


def test_a_writer_is_discarded_where_its_file_cannot_begin(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third file's own state needs memory that is not there."""
    opened, discarded, made = executing.open_writer, list[str](), list[str]()

    def open_writer(run: Any, plan: Any, part: Any = None) -> Any:
        writer = opened(run, plan, part)
        abort = writer.abort
        monkeypatch.setattr(writer, "abort", lambda: (discarded.append(plan.path), abort())[1])
        return writer

    def begun(plan: Any, *given: Any) -> FileWork:
        made.append(plan.path)
        if len(made) == 3:
            raise MemoryError
        return FileWork(plan, *given)

    monkeypatch.setattr(executing, "open_writer", open_writer)
    monkeypatch.setattr(executing, "FileWork", begun)
    with pytest.raises(BudgetTooSmall):
        convert(source, str(tmp_path / "out"), settings=settings(16), **SIZES)
    assert made[2] in discarded
    assert not list(tmp_path.rglob("*.part"))
