"""Local store: a name always refers to the current file."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest

from ckptcore.errors import SourceUnreadable
from ckptcore.store.local import LocalStore


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"old")
    assert store.read("a", 0, 3) == b"old"  # keeps it open
    store.put("a", b"newer")
    assert store.size("a") == 5
    assert store.read("a", 0, 5) == b"newer"
    writer = store.writer("a", 7)
    writer.write(0, b"written")
    assert store.read("a", 0, 5) == b"newer"  # until it is committed
    writer.commit()
    assert store.read("a", 0, 7) == b"written"
    store.remove("a")
    with pytest.raises(SourceUnreadable):
        store.read("a", 0, 1)


def test_a_store_that_is_dropped_keeps_no_file_open(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"read")
    assert store.read("a", 0, 4) == b"read"
    fd, kept = store.descriptor("a")
    assert kept
    assert os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "a")
    del store
    gc.collect()
    assert str(tmp_path / "a") not in [_target(fd) for fd in os.listdir("/proc/self/fd")]


def _target(fd: str) -> str | None:
    with contextlib.suppress(FileNotFoundError):  # the listing's own
        return os.readlink(f"/proc/self/fd/{fd}")
    return None
