"""Blocks of expected reads: every byte right, each block once where memory allows, no deadlock."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from ckptcore.errors import StorageTrouble
from ckptcore.store.ahead import ExpectedReads, joined
from ckptcore.store.objects.blocks import BlockReader, cut_into_blocks, plan_blocks

MIB = 1 << 20


class Origin:
    """Files in memory that answer requests on threads, and count them."""

    def __init__(self, sizes: dict[str, int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.data = {p: rng.integers(0, 256, n, np.uint8).tobytes() for p, n in sizes.items()}
        self.asked: list[tuple[str, int, int]] = []
        self.fails: set[int] = set()
        self.pool = ThreadPoolExecutor(4)

    def fetch(self, path: str, start: int, into: memoryview) -> Future[None]:
        self.asked.append((path, start, len(into)))
        number = len(self.asked)

        def work() -> None:
            if number in self.fails:
                raise StorageTrouble("away")
            into[:] = self.data[path][start : start + len(into)]

        return self.pool.submit(work)

    def direct(self, path: str):
        def read(start: int, into: memoryview) -> None:
            self.asked.append((path, start, -len(into)))
            into[:] = self.data[path][start : start + len(into)]

        return read


def expected(rows: list[tuple[str, int, int]]) -> ExpectedReads:
    paths = tuple(dict.fromkeys(p for p, _, _ in rows))
    when = np.arange(len(rows), dtype=float)
    return ExpectedReads(
        paths,
        np.array([paths.index(p) for p, _, _ in rows], np.int64),
        np.array([a for _, a, _ in rows], np.int64),
        np.array([b for _, _, b in rows], np.int64),
        when,
        when + 1,
    )


def reader(origin: Origin, table, memory: int) -> BlockReader:
    return BlockReader(table, origin.fetch, lambda *_: None, lambda: 0.001, memory)


def read_all(origin: Origin, blocks: BlockReader, rows, threads: int) -> None:
    def one(row: tuple[str, int, int]) -> None:
        path, a, b = row
        into = bytearray(b - a)
        blocks.read_into(path, a, memoryview(into), origin.direct(path))
        assert into == origin.data[path][a:b], row

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, rows, timeout=60))


def test_neighbours_are_one_request_and_gaps_are_not() -> None:
    rows = [("a", 0, 10), ("a", 10, 30), ("a", 100, 200), ("a", 5000, 5010), ("b", 7, 9)]
    table = cut_into_blocks(expected(rows), 128, gap=80)
    found = [
        (table.paths[f], int(s), int(e)) for f, s, e in zip(table.file, table.start, table.end, strict=True)
    ]
    assert found == [("a", 0, 128), ("a", 128, 200), ("a", 5000, 5010), ("b", 7, 9)]
    assert table.over_read == 70  # the gap of 30 to 100


def test_blocks_are_as_large_as_files_read_in_their_own_order_allow() -> None:
    """Eight files read side by side need a block of each; read in another order, the memory decides."""
    rows = [(f"f{f}", n * MIB, (n + 1) * MIB) for n in range(64) for f in range(8)]
    assert int((plan_blocks(expected(rows), 512 * MIB).end).max()) == 64 * MIB
    assert len(plan_blocks(expected(rows), 512 * MIB)) == 8 * 4
    tight = plan_blocks(expected(rows), 32 * MIB)
    assert tight.most_alive <= 32 * MIB
    assert len(tight) == 8 * 64 // 2


def test_memory_that_is_not_needed_is_not_used() -> None:
    """Reading ahead stops when enough blocks wait, and a block that was read is replaced by a later one."""
    rows = [("a", n * 1000, (n + 1) * 1000) for n in range(200)]
    origin = Origin({"a": 200_000})
    buffers: dict[int, bytearray] = {}
    fetch = origin.fetch

    def counted(path: str, start: int, into: memoryview) -> Future[None]:
        buffers[id(into.obj)] = into.obj  # kept, so that no other gets its id
        return fetch(path, start, into)

    origin.fetch = counted
    blocks = reader(origin, cut_into_blocks(expected(rows), 1000, gap=0), 200_000)
    read_all(origin, blocks, rows, 1)
    blocks.close()
    assert len(origin.asked) == 200
    assert len(buffers) <= 2 * 32 + 2


@pytest.mark.parametrize("seed", range(6))
def test_random_reads_in_random_order_with_any_memory(seed: int) -> None:
    draw = random.Random(seed)
    origin = Origin({f"f{n}": draw.randrange(1000, 60_000) for n in range(draw.randrange(1, 6))}, seed)
    rows = []
    for path, data in origin.data.items():
        at = 0
        while at < len(data):
            end = min(len(data), at + draw.randrange(1, 3000))
            rows.append((path, at, end))
            at = end + draw.choice((0, 0, 0, 50, 4000))
    declared = rows[:]
    draw.shuffle(rows)
    size = draw.choice((512, 4096, 20_000))
    table = cut_into_blocks(expected(declared), size, gap=draw.choice((0, 100)))
    blocks = reader(origin, table, draw.choice((1, 3 * size, 10**9)))
    read_all(origin, blocks, [*rows, *draw.sample(rows, len(rows) // 2)], draw.choice((1, 2, 8)))
    blocks.close()


def test_each_block_is_fetched_once_where_memory_allows() -> None:
    origin = Origin({"a": 300_000, "b": 300_000})
    rows = [(p, n * 1000, (n + 1) * 1000) for n in range(300) for p in "ab"]
    table = cut_into_blocks(expected(rows), 50_000)
    blocks = reader(origin, table, table.most_alive + 200_000)
    read_all(origin, blocks, rows, 1)
    assert sorted(origin.asked) == sorted((p, n * 50_000, 50_000) for p in "ab" for n in range(6))


def test_headers_that_are_read_with_what_follows_do_not_end_a_block() -> None:
    """Each chunk's header is looked at with some bytes behind it, which come again with the elements."""
    origin = Origin({"a": 300_000, "b": 300_000})
    rows = [(p, n * 1000, (n + 1) * 1000) for n in range(300) for p in "ab"]
    table = cut_into_blocks(expected(rows), 50_000)
    blocks = reader(origin, table, table.most_alive + 50_000)
    peeks = [(path, start, start + 200) for path, start, _ in rows]
    read_all(origin, blocks, [row for pair in zip(peeks, rows, strict=True) for row in pair], 1)
    assert len(origin.asked) == len(table)


def test_what_is_needed_of_a_block_leaves_out_its_holes() -> None:
    rows = [("a", 0, 100), ("a", 50, 120), ("a", 150, 400), ("a", 0, 100), ("a", 420, 700), ("b", 10, 20)]
    table = cut_into_blocks(expected(rows), 256, gap=60)
    assert table.needed.tolist() == [226, 236, 188, 10]
    assert table.read_bytes.sum() == 100 + 70 + 250 + 100 + 280 + 10
    holes = cut_into_blocks(expected([("a", 0, 10), ("a", 900, 1000)]), 100, gap=1000)
    assert holes.needed.tolist() == [10, *[0] * 8, 100]


def test_unexpected_reads_are_answered_too() -> None:
    origin = Origin({"a": 10_000, "z": 100})
    table = cut_into_blocks(expected([("a", 1000, 2000), ("a", 5000, 6000)]), 4096, gap=0)
    blocks = reader(origin, table, 10**6)
    read_all(origin, blocks, [("a", 0, 10_000), ("z", 3, 50)], 1)


def test_a_request_that_failed_is_repeated_for_the_next_reader() -> None:
    origin = Origin({"a": 1000})
    origin.fails.add(1)
    blocks = reader(origin, cut_into_blocks(expected([("a", 0, 1000)]), 4096), 10**6)
    into = bytearray(1000)
    with pytest.raises(StorageTrouble):
        blocks.read_into("a", 0, memoryview(into), origin.direct("a"))
    blocks.read_into("a", 0, memoryview(into), origin.direct("a"))
    assert into == origin.data["a"]


def test_readers_of_a_full_memory_wait_for_each_other() -> None:
    """One block of memory, eight readers of eight blocks: nobody waits for ever."""
    origin = Origin({"a": 8000})
    rows = [("a", n * 1000, (n + 1) * 1000) for n in range(8)]
    blocks = reader(origin, cut_into_blocks(expected(rows), 1000), 1000)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (read_all(origin, blocks, rows * 20, 8), done.set()))
    thread.start()
    thread.join(30)
    assert done.is_set()


def test_steps_follow_each_other() -> None:
    one, two = expected([("a", 0, 10), ("b", 0, 10)]), expected([("b", 10, 20), ("c", 0, 5)])
    both = joined([one, two])
    assert both.paths == ("a", "b", "c")
    assert [both.paths[n] for n in both.file] == ["a", "b", "b", "c"]
    assert (np.diff(both.begins) > 0).all()
    assert len(joined([])) == 0


def test_a_forgotten_block_is_fetched_while_another_reads_it() -> None:
    """It came altered, so whoever reads next must not get what the other one still copies."""
    origin = Origin({"a": MIB})
    table = plan_blocks(expected([("a", 0, MIB)] * 3), 4 * MIB)
    arrived, forgotten = threading.Event(), threading.Event()

    def first(*_: object) -> None:
        if not arrived.is_set():
            arrived.set()
            forgotten.wait(60)

    blocks = BlockReader(table, origin.fetch, first, lambda: 0.001, 4 * MIB)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(blocks.read_into, "a", 0, memoryview(bytearray(MIB)), origin.direct("a"))
        assert arrived.wait(60)
        blocks.forget("a", 0, MIB)
        before = len(origin.asked)
        try:
            blocks.read_into("a", 0, memoryview(bytearray(MIB)), origin.direct("a"))
        finally:
            forgotten.set()
        slow.result(60)
    assert len(origin.asked) > before
