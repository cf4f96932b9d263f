"""Digests of several files, computed side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from blake3 import blake3

from ckptcore.reading import file_digests
from ckptcore.reading.file_digests import BLOCK, digests_like
from ckptcore.store import Store, open_store
from ckptcore.utils.crc64 import crc64
from ckptcore.utils.part_digest import crc_digest

CONTENTS = {"a": b"1" * (BLOCK + 3), "b": b"2" * 5, "c": b""}
RECORDED = {name: (len(data), blake3(data).hexdigest()) for name, data in CONTENTS.items()}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(file_digests, "usable_cores", lambda: 2)
    for name, data in CONTENTS.items():
        (tmp_path / name).write_bytes(data)
    with closing(open_store(str(tmp_path))) as opened:
        yield opened


def test_every_file_has_the_digest_of_its_kind(store: Store) -> None:
    steps = list[int]()
    recorded = RECORDED | {"b": (5, crc_digest(0))}
    expected = {name: digest for name, (_, digest) in RECORDED.items()}
    assert digests_like(store, recorded, steps.append) == expected | {"b": crc_digest(crc64(CONTENTS["b"]))}
    assert sorted(steps) == [3, 5, BLOCK]


def test_two_files_are_read_at_the_same_time(store: Store) -> None:
    both = threading.Barrier(2)

    def step(nbytes: int) -> None:
        if nbytes != 3:  # the first block of each
            both.wait(120)

    assert len(digests_like(store, RECORDED, step)) == 3


def test_an_error_of_a_step_stops_all(store: Store) -> None:
    steps = list[int]()

    def step(nbytes: int) -> None:
        steps.append(nbytes)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        digests_like(store, RECORDED, step)
    assert 3 not in steps
