"""Test that the digest of a file does not depend on which ranges were read, how often, and in which order."""

from __future__ import annotations

import pickle
import threading
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptcore.core.file_sums import FileSums
from ckptcore.utils.crc64 import crc64
from ckptcore.utils.part_digest import crc_digest

SIZE = 200
DATA = bytes(n * 37 % 251 for n in range(SIZE))
RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=30)


@given(RANGES)
def test_each_byte_counts_once(ranges: list[list[int]]) -> None:
    sums, seen = FileSums(), set[int]()
    for start, end in ranges:
        sums.observe("a", start, DATA[start:end])
        seen.update(range(start, end))
        holes = sums.holes("a", SIZE)
        missing = set() if holes is None else {n for a, b in holes for n in range(a, b)}
        assert holes is None or missing == {*range(SIZE)} - seen
        expected = crc_digest(crc64(DATA)) if len(seen) == SIZE else None
        assert sums.digest("a", SIZE) == expected
    for start, end in sums.holes("a", SIZE) or [(0, SIZE)]:
        sums.observe("a", start, DATA[start:end])
    assert sums.digest("a", SIZE) == crc_digest(crc64(DATA))
    assert sums.digest("a", SIZE - 1) is None


@given(st.lists(st.tuples(RANGES, st.booleans()), min_size=1, max_size=4))
def test_what_other_processes_have_read(tasks: list[tuple[list[list[int]], bool]]) -> None:
    """Each byte that one of them has read counts once; overlaps with part of a range leave a hole."""
    sums, seen = FileSums(), set[int]()
    for ranges, sent in tasks:
        own = FileSums()
        for start, end in ranges:
            own.observe("a", start, DATA[start:end])
            seen.update(range(start, end))
        sums.add(pickle.loads(pickle.dumps(own)) if sent else own)
    holes = sums.holes("a", SIZE)
    missing = {*range(SIZE)} if holes is None else {n for a, b in holes for n in range(a, b)}
    assert missing >= {*range(SIZE)} - seen
    if sums.digest("a", SIZE) is not None:
        assert len(seen) == SIZE
        assert sums.digest("a", SIZE) == crc_digest(crc64(DATA))
    for start, end in holes or [(0, SIZE)]:
        sums.observe("a", start, DATA[start:end])
    assert sums.digest("a", SIZE) == crc_digest(crc64(DATA))


def test_tasks_that_share_a_file_by_ranges() -> None:
    sums, cuts = FileSums(), [0, 1, 70, 71, 150, SIZE]
    for start, end in reversed([*pairwise(cuts)]):
        own = FileSums()
        own.observe("a", start, DATA[start:end])
        sums.add(own)
        sums.add(own)  # a task that was repeated
    assert sums.digest("a", SIZE) == crc_digest(crc64(DATA))
    altered = FileSums()
    altered.observe("a", 0, DATA[:1])
    altered.forget("a")
    sums.add(altered)
    assert sums.digest("a", SIZE) is None


def test_a_range_replaces_those_that_it_contains() -> None:
    """Head and tail of a file are read for its metadata; another process reads all of it once more."""
    for known in ([(0, 40), (SIZE - 30, SIZE)], [(10, 20)], [(0, SIZE)], []):
        sums, own = FileSums(), FileSums()
        for start, end in known:
            sums.observe("a", start, DATA[start:end])
        own.observe("a", 0, DATA)
        sums.add(own)
        assert sums.digest("a", SIZE) == crc_digest(crc64(DATA))


def test_threads_that_read_the_same_bytes() -> None:
    data = bytes(range(256)) * 4096
    sums = FileSums("below/")
    cuts = [
        [(at, min(at + step, len(data))) for at in range(0, len(data), step)] for step in (4099, 65536, 7919)
    ]

    def read(ranges: list[tuple[int, int]]) -> None:
        for start, end in ranges:
            sums.observe("below/a", start, memoryview(data)[start:end])

    threads = [threading.Thread(target=read, args=(ranges,)) for ranges in (*cuts, cuts[0][::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums.digest("a", len(data)) == crc_digest(crc64(data))


def test_what_is_below_a_folder() -> None:
    sums = FileSums()
    sums.observe("step/a", 0, DATA)
    sums.observe("other", 0, DATA)
    inner = sums.below("step/")
    assert inner.digest("a", SIZE) == crc_digest(crc64(DATA))
    assert inner.digest("other", SIZE) is None
    inner.observe("a", 0, DATA[:5])
    assert inner.digest("a", SIZE) is not None


def test_long_holes_and_altered_files() -> None:
    sums, large = FileSums(), 10 << 20
    sums.observe("a", 0, bytes(large - (1 << 20)))
    assert sums.holes("a", large) is None
    sums.observe("a", large - 100, bytes(100))
    assert sums.holes("a", large) is None
    sums.observe("b", 0, bytes(large - 5000))
    assert sums.holes("b", large) == [(large - 5000, large)]
    sums.forget("b")
    assert sums.holes("b", large) is None
    assert sums.holes("never read", 5) is None
    assert sums.holes("empty", 0) == []
    assert sums.digest("empty", 0) == crc_digest(crc64(b""))
