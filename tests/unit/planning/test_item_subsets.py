"""The items of a file are selected as `numpy.unique` selects them, file after file."""

from dataclasses import replace

import numpy as np
import pytest

from ckptcore.checking.check import _by_place
from ckptcore.core.manifest import Items, StoredFile, items_table
from ckptcore.planning.file_forms import SortOrder
from ckptcore.planning.file_plan import place_keys
from ckptcore.planning.file_planner import ItemSubsets, subset_files

COUNT = 600
ROWS = [(n % 9, 10 * n, n % 77, n % 4, n % 2, n) for n in range(COUNT)]
VARIED = replace(items_table(ROWS), codecs=("", "zstd"), member={7: "seven", 300: "many"})
ALIKE = items_table([(n % 9, 10 * n, 64, 1, 0, -1) for n in range(COUNT)])


def uses() -> list[np.ndarray]:
    """Numbers of items as files name them: in one order, in others, and some more than once."""
    rng = np.random.default_rng(8)
    blocks = rng.permutation(20)
    ranks = [np.concatenate([30 * blocks + rank, 30 * blocks + rank + 1]) for rank in range(0, 28, 2)]
    return [
        *ranks,
        ranks[3][::-1],  # as many, in another order
        ranks[3],
        np.concatenate([ranks[3][:-1], ranks[3][:1]]),  # as many, one of them twice
        ranks[4],
        *(rng.permutation(COUNT)[:n] for n in range(60)),  # more numbers than are remembered
        rng.integers(0, COUNT, 2 * COUNT),
        np.zeros(0, np.int64),
        np.arange(COUNT),
    ]


@pytest.mark.parametrize("items", [VARIED, ALIKE], ids=["varied", "alike"])
def test_as_numpy_selects_them(items: Items) -> None:
    subsets, orders = ItemSubsets(items), dict[int, SortOrder]()
    for used in uses():
        picked, renumbered, kept = subsets.of(used, orders.setdefault(len(used), SortOrder()))
        numbers, inverse = np.unique(used, return_inverse=True)
        assert kept.tolist() == numbers.tolist()
        assert renumbered.tolist() == inverse.tolist()
        assert {kept.dtype, renumbered.dtype} == {np.dtype(np.int64)}
        assert [picked[n] for n in range(len(kept))] == [items[n] for n in numbers.tolist()]


@pytest.mark.parametrize("used", [[], [5], [5, 5, 9], [9, 0, 5, 0]])
def test_files_of_items(used: list[int]) -> None:
    files = [StoredFile(f"file-{n}", n) for n in range(10)]
    items = items_table([(n, 0, 1, 0, 0, -1) for n in used])
    kept, moved = subset_files(files, items)
    assert list(kept) == [files[n] for n in sorted(set(used))]
    assert [kept[n] for n in moved.file.tolist()] == [files[n] for n in used]
    assert moved.file.dtype == np.int64


@pytest.mark.parametrize("top", [8, 1 << 31, 1 << 60, (1 << 61) - 1, 1 << 61, (1 << 62) - 2])
def test_places_in_order(top: int) -> None:
    """One number has file and first byte, as long as both fit into it."""
    rng = np.random.default_rng(top % 89)
    for _ in range(20):
        starts = np.where(rng.random(30) < 0.3, top - rng.integers(0, 3, 30), rng.integers(0, 9, 30))
        rows = zip(
            rng.integers(0, 3, 30).tolist(), starts.tolist(), rng.integers(1, 4, 30).tolist(), strict=True
        )
        items = items_table([(*row, 0, 0, -1) for row in rows])
        keys = place_keys(items)
        assert (keys is None) == ((int(items.file.max()) + 1) * (int(items.start.max()) + 1) >= 1 << 62)
        if keys is not None:
            wanted = np.lexsort((items.start, items.file))
            assert np.argsort(keys, kind="stable").tolist() == wanted.tolist()
        order = _by_place(items.file, items.start, items.length)
        places = list(zip(items.file, items.start, items.length, strict=True))
        assert [places[n] for n in order] == sorted(places)
