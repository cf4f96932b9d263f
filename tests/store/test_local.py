"""Local store: is a name always the file that stands there now?"""

from __future__ import annotations

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
    before = len(os.listdir("/proc/self/fd"))
    assert store.read("a", 0, 4) == b"read"
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del store
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
