"""Large local files go past the page cache: the same bytes, whatever fits no block, and a way back."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from pieces import numbered, write_dcp

from ckptcore import Box, convert, diff
from ckptcore.store import BLOCK, local_writer
from ckptcore.store.local import LocalStore
from ckptcore.store.local_writer import LocalWriter

_SIZE = (6 << 20) + 777


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.setattr(local_writer, "_PAST_CACHE", 1 << 20)
    return LocalStore(tmp_path / "store")


def _placed(data: npt.NDArray[np.uint8], at: int) -> memoryview:
    """Return a copy of ``data`` that has byte ``at`` of a file at the same byte of a block of memory."""
    memory = np.frombuffer(mmap.mmap(-1, len(data) + BLOCK), np.uint8)
    view = memory[at % BLOCK :][: len(data)]
    view[:] = data
    return view.data


def _writer(store: LocalStore) -> LocalWriter:
    writer = store.writer("file", _SIZE)
    assert isinstance(writer, LocalWriter)
    if writer._past < 0:
        writer.abort()
        pytest.skip("the temporary folder is on a file system that is always written through the cache")
    return writer


def _sent_past(monkeypatch: pytest.MonkeyPatch, writer: LocalWriter) -> list[int]:
    """Record the bytes of each write past the cache."""
    sent: list[int] = []
    pwrite = os.pwrite

    def recorded(fd: int, data: memoryview, at: int) -> int:
        put = pwrite(fd, data, at)
        if fd == writer._past:
            assert at % BLOCK == put % BLOCK == 0
            sent.append(put)
        return put

    monkeypatch.setattr(os, "pwrite", recorded)
    return sent


@pytest.mark.parametrize("step", [(1 << 20) + 13, 300_001, 2 << 20])
def test_pieces_that_fit_no_block_are_complete(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    data = np.random.default_rng(7).integers(0, 256, _SIZE, np.uint8)
    writer = _writer(store)
    sent = _sent_past(monkeypatch, writer)
    with ThreadPoolExecutor(4) as pool:
        starts = range(0, _SIZE, step)
        list(pool.map(lambda at: writer.write(at, _placed(data[at : at + step], at)), reversed(starts)))
    writer.commit()
    assert store.read("file", 0, _SIZE) == data.tobytes()
    assert sum(sent) > 0.9 * (_SIZE - step)  # the last piece may be a short one


def test_memory_with_other_borders_goes_through_the_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(8).integers(0, 256, _SIZE, np.uint8)
    writer = _writer(store)
    sent = _sent_past(monkeypatch, writer)
    half = _SIZE // 2
    writer.write(0, data[:half].tobytes())  # bytes cannot be written to, and may be anywhere
    writer.write(half, _placed(data[half:], half + 8))
    writer.commit()
    assert store.read("file", 0, _SIZE) == data.tobytes()
    assert sent == []


def test_what_is_written_once_more_is_the_newer(store: LocalStore) -> None:
    writer = _writer(store)
    writer.write(0, _placed(np.full(_SIZE, 1, np.uint8), 0))
    writer.write(100_000, b"\2\2\2\2")  # through the cache, in the middle of blocks past it
    writer.write(4 << 20, _placed(np.full(1 << 20, 3, np.uint8), 0))
    writer.commit()
    want = np.full(_SIZE, 1, np.uint8)
    want[100_000:100_004] = 2
    want[4 << 20 : 5 << 20] = 3
    assert store.read("file", 0, _SIZE) == want.tobytes()


def test_a_file_system_with_other_blocks_gets_the_rest_through_the_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(9).integers(0, 256, _SIZE, np.uint8)
    writer = _writer(store)
    past, pwrite, calls = writer._past, os.pwrite, 0

    def short_then_invalid(fd: int, part: memoryview, at: int) -> int:
        nonlocal calls
        if fd == past:
            calls += 1
            if calls > 1:
                raise OSError(errno.EINVAL, "Invalid argument")
            return pwrite(fd, part[: 64 * BLOCK], at)
        return pwrite(fd, part, at)

    monkeypatch.setattr(os, "pwrite", short_then_invalid)
    writer.write(0, _placed(data, 0))
    writer.commit()
    assert calls == 2
    assert store.read("file", 0, _SIZE) == data.tobytes()


def test_processes_that_share_a_file_meet_within_a_block(store: LocalStore) -> None:
    data = np.random.default_rng(10).integers(0, 256, _SIZE, np.uint8)
    middle = 3_000_001
    one, other = store.joint("file", _SIZE), store.joint("file", _SIZE)
    assert one is not None
    assert other is not None
    other.write(middle, _placed(data[middle:], middle))
    one.write(0, _placed(data[:middle], 0))
    other.commit()
    one.name("whole")
    assert store.read("whole", 0, _SIZE) == data.tobytes()


def test_a_name_that_belongs_to_another_file_by_now_is_left_alone(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _writer(store).abort()
    opened = os.open

    def replaced(path: str, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            os.replace(f"{store.url}/other", f"{store.url}/{path}")
        return opened(path, flags, *args, **more)

    store.put("other", b"other")
    writer = store.writer("file", _SIZE)
    writer.abort()
    monkeypatch.setattr(os, "open", replaced)
    writer = store.writer("file", _SIZE)
    assert isinstance(writer, LocalWriter)
    assert writer._past == -1
    writer.abort()


@pytest.mark.parametrize("to", ["safetensors", "torch_save", "dcp"])
def test_a_conversion_goes_past_the_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, to: str
) -> None:
    """Buffers have the borders of the file's blocks in every format; checksums behind data are filled in."""
    _writer(store).abort()
    tensor = numbered((1200, 513), "float32", start=3)
    state = {f"model.{n}": (tensor + n, [Box.full(tuple(tensor.shape))]) for n in range(3)}
    write_dcp(tmp_path / "source", state)
    sent: list[int]
    opened, pwrite, opens, sent = os.open, os.pwrite, set[int](), []

    def noted_open(path: str, flags: int, *args: int, **more: int) -> int:
        fd = opened(path, flags, *args, **more)
        (opens.add if flags & os.O_DIRECT else opens.discard)(fd)
        return fd

    def noted_pwrite(fd: int, data: memoryview, at: int) -> int:
        put = pwrite(fd, data, at)
        if fd in opens:
            sent.append(put)
        return put

    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "pwrite", noted_pwrite)
    convert(str(tmp_path / "source"), str(tmp_path / "out"), to=to)
    assert sum(sent) > 0.8 * 3 * tensor.nbytes
    assert diff(str(tmp_path / "source"), str(tmp_path / "out")).equal
