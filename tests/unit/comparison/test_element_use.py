"""Test that element accounting detects maps that lose or repeat stored elements, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptcore.comparison import element_use as module
from ckptcore.comparison.element_use import Use, element_use
from ckptcore.core.manifest import Envelope, Item, Manifest, TensorSpec, View
from ckptcore.core.manifest_builder import Builder

Chunk = tuple[tuple[int, ...], tuple[int, ...], int, View | None]  # offset, shape, item, view


def lay(*tensors: tuple[str, tuple[int, ...], list[Chunk]], items: int = 2, numel: int = 24) -> Manifest:
    """A manifest of float32 tensors over ``items`` items of ``numel`` elements."""
    builder = Builder()
    file = builder.file("data", items * numel * 4)
    for n in range(items):
        builder.item(Item(file, n * numel * 4, numel * 4, Envelope.RAW))
    for name, shape, chunks in tensors:
        row = builder.tensor(TensorSpec(name, "float32", shape))
        for offset, extent, item, view in chunks:
            builder.chunk(row, offset, extent, item, view)
    return builder.build("test", "/nowhere", {})


FUSED = ("qkv", (6, 4), [((0, 0), (6, 4), 0, None)])
OTHER = ("other", (24,), [((0,), (24,), 1, None)])
SOURCE = lay(FUSED, OTHER)
KEPT = {"qkv", "other"}


def rows(name: str, first: int, count: int) -> tuple[str, tuple[int, ...], list[Chunk]]:
    """Rows of the fused tensor."""
    return name, (count, 4), [((0, 0), (count, 4), 0, View(first * 16, (4, 1)))]


def test_the_same_chunks_are_the_same_elements() -> None:
    renamed = lay(("a", *FUSED[1:]), ("b", *OTHER[1:]))
    assert element_use(SOURCE, renamed, KEPT) == Use({}, {})


def test_a_split_uses_every_element_once() -> None:
    split = lay(rows("q", 0, 2), rows("k", 2, 1), rows("v", 3, 3), OTHER)
    assert element_use(SOURCE, split, KEPT) == Use({}, {})


def test_a_split_that_loses_a_row_and_one_that_takes_it_twice() -> None:
    lost = lay(rows("q", 0, 2), rows("v", 3, 3), OTHER)
    assert element_use(SOURCE, lost, KEPT) == Use({"qkv": 4}, {})
    twice = lay(rows("q", 0, 3), rows("k", 2, 1), rows("v", 3, 3), OTHER)
    assert element_use(SOURCE, twice, KEPT) == Use({}, {"q": 4, "k": 4})
    both = lay(rows("q", 0, 2), rows("k", 1, 1), rows("v", 3, 3), OTHER)  # one row too early
    assert element_use(SOURCE, both, KEPT) == Use({"qkv": 4}, {"q": 4, "k": 4})


def test_a_transpose_and_a_permutation_of_rows_are_the_same_elements() -> None:
    turned = ("t", (4, 6), [((0, 0), (4, 6), 0, View(0, (1, 4)))])
    assert element_use(SOURCE, lay(turned, OTHER), KEPT) == Use({}, {})
    halves = ("p", (2, 3, 4), [((0, 0, 0), (2, 3, 4), 0, View(0, (4, 8, 1)))])  # even rows, then odd ones
    assert element_use(SOURCE, lay(halves, OTHER), KEPT) == Use({}, {})
    wrong = ("p", (2, 3, 4), [((0, 0, 0), (2, 3, 4), 0, View(0, (4, 4, 1)))])  # rows 0 1 2, then 1 2 3
    assert element_use(SOURCE, lay(wrong, OTHER), KEPT) == Use({"qkv": 8}, {"p": 16})


def test_an_element_of_another_item_is_missing() -> None:
    moved = lay(("a", *FUSED[1:]), ("b", (24,), [((0,), (24,), 0, None)]))
    assert element_use(SOURCE, moved, KEPT) == Use({"other": 24}, {"a": 24, "b": 24})


def test_tensors_that_are_dropped_are_not_required() -> None:
    only = lay(("a", *FUSED[1:]))
    assert element_use(SOURCE, only, {"qkv"}) == Use({}, {})
    assert element_use(SOURCE, only, KEPT) == Use({"other": 24}, {})
    assert element_use(SOURCE, lay(("a", *FUSED[1:]), OTHER), {"qkv"}) == Use({}, {"other": 24})


@pytest.mark.parametrize("seed", range(20))
def test_equals_a_count_of_every_address(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random views, in windows and tiles of few elements, against a count of each address."""
    monkeypatch.setattr(module, "_WINDOW", 7)
    monkeypatch.setattr(module, "_TILE", 5)
    rng = np.random.default_rng(seed)
    tensors, used, places = [], np.zeros(24, np.int64), dict[str, list[int]]()
    for n in range(4):
        shape = tuple(int(k) for k in rng.integers(1, 4, size=int(rng.integers(1, 4))))
        stride = tuple(int(k) for k in rng.integers(0, 5, size=len(shape)))
        reach = sum((k - 1) * s for k, s in zip(shape, stride, strict=True))
        start = int(rng.integers(0, 24 - reach))
        tensors.append((f"t{n}", shape, [((0,) * len(shape), shape, 0, View(start * 4, stride))]))
        at = [start + sum(i * s for i, s in zip(index, stride, strict=True)) for index in np.ndindex(*shape)]
        places[f"t{n}"] = at
        np.add.at(used, at, 1)
    found = element_use(SOURCE, lay(*tensors, OTHER), KEPT)
    assert found.unused.get("qkv", 0) == int((used == 0).sum())
    repeated = {name: int((used[at] > 1).sum()) for name, at in places.items()}
    assert found.repeated == {name: count for name, count in repeated.items() if count}


@pytest.mark.parametrize("where", ["first window", "both windows", "last window"])
def test_a_row_of_a_tensor_larger_than_a_window(where: str) -> None:
    """A tensor of 9 million elements: split, transposed, and with a row that is lost or taken twice."""
    side = 3000
    assert module._TILE < module._WINDOW < side * side
    edge = module._WINDOW // side  # the row that the windows share
    row = {"first window": 0, "both windows": edge, "last window": side - 10}[where]

    def rows(name: str, begin: int, count: int, down: bool = False) -> tuple[str, Any, list[Chunk]]:
        shape, stride = ((side, count), (1, side)) if down else ((count, side), (side, 1))
        return name, shape, [((0, 0), shape, 0, View(begin * side * 4, stride))]

    source = lay(("m", (side, side), [((0, 0), (side, side), 0, None)]), items=1, numel=side * side)

    def use(*parts: tuple[str, Any, list[Chunk]]) -> Use:
        return element_use(source, lay(*parts, items=1, numel=side * side), {"m"})

    turned = rows("upper", 0, edge + 1, down=True), rows("lower", edge + 1, side - edge - 1)
    assert use(*turned) == Use({}, {})
    twice = {"upper" if row <= edge else "lower": side, "twice": side}
    assert use(*turned, rows("twice", row, 1)) == Use({}, twice)
    lost = rows("upper", 0, row), rows("lower", row + 1, side - row - 1, down=True)
    assert use(*(part for part in lost if part[1][0])) == Use({"m": side}, {})


@pytest.mark.parametrize("count", [32_767, 32_768, 40_000, 65_536, 70_000])
def test_an_element_is_in_very_many_places(count: int) -> None:
    """An expanded view is one element many times: it is lost, or taken as often, however many times."""
    expanded = ("expanded", (count,), [((0,), (count,), 1, View(0, (0,)))])
    source = lay(FUSED, expanded)
    kept = {"qkv", "expanded"}
    assert element_use(source, lay(FUSED), kept) == Use({"expanded": count}, {}, {"expanded": count})
    assert element_use(source, source, kept) == Use({}, {})
    assert element_use(lay(FUSED), source, {"qkv"}) == Use({}, {"expanded": count})
    alone = ("one", (1,), [((0,), (1,), 1, None)])
    assert element_use(lay(FUSED, alone), source, {"qkv", "one"}) == Use({}, {"expanded": count})
