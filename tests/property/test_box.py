"""Boxes: the algebra agrees with numpy, which marks every element one by one."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.core.box import Box, flat_start, from_flat_range, is_run

SIDE = 7
Shape = tuple[int, ...]


@st.composite
def boxes(draw: st.DrawFn, rank: int, side: int = SIDE) -> Box:
    offset = tuple(draw(st.integers(0, side)) for _ in range(rank))
    return Box(offset, tuple(draw(st.integers(0, side - o)) for o in offset))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    rank = draw(st.integers(0, 3))
    return draw(boxes(rank)), draw(boxes(rank))


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
filled = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def mask(box: Box, shape: Shape | None = None) -> np.ndarray:
    """True at the box's elements."""
    out = np.zeros((SIDE,) * len(box.shape) if shape is None else shape, bool)
    out[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))] = True
    return out


def inside(box: Box, shape: Shape) -> np.ndarray:
    """The flat numbers of a box's elements in a tensor of a shape, in the box's order."""
    numbers = np.arange(prod(shape)).reshape(shape)
    return numbers[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))].reshape(-1)


@given(pairs())
def test_intersect_is_the_common_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    both = mask(a) & mask(b)
    assert a.intersect(b) == b.intersect(a)
    if common is None:
        assert not both.any() or a.numel == 0 or b.numel == 0
        assert not both.any()
    else:
        assert common.numel
        assert (mask(common) == both).all()


@given(pairs())
def test_subtract_leaves_each_other_element_once(pair: tuple[Box, Box]) -> None:
    a, b = pair
    rest = a.subtract(b)
    count = sum((mask(r).astype(int) for r in rest), np.zeros(mask(a).shape, int))
    assert (count == (mask(a) & ~mask(b))).all()
    assert all(r.numel for r in rest)


@given(pairs())
def test_contains_is_no_element_outside(pair: tuple[Box, Box]) -> None:
    a, b = pair
    if b.numel:
        assert a.contains(b) == (not (mask(b) & ~mask(a)).any())


@given(st.integers(0, 4).flatmap(lambda r: st.tuples(boxes(r), st.tuples(*[st.integers(0, 9)] * r))))
def test_translate_there_and_back(case: tuple[Box, Shape]) -> None:
    box, by = case
    moved = box.translate(by)
    assert moved.shape == box.shape
    assert moved.translate(tuple(-b for b in by)) == box
    assert moved.within(Box(by, tuple(e + 1 for e in box.end))) == box


@given(filled, st.integers(1, 130), st.data())
def test_tiles_are_runs_in_order(shape: Shape, limit: int, data: st.DataObject) -> None:
    """Tiles, laid end to end, are the box in row-major order; none is above the limit."""
    at = tuple(data.draw(st.integers(0, 3)) for _ in shape)
    box = Box(at, shape)
    end = tuple(o + n for o, n in zip(at, shape, strict=True))
    tiles = list(box.tiles(limit))
    assert all(1 <= t.numel <= limit for t in tiles)
    joined = np.concatenate([inside(t, end) for t in tiles])
    assert (joined == inside(box, end)).all()
    for tile in tiles:
        # A run of the box's own order: its elements follow one another without a gap.
        own = inside(tile.within(box), shape)
        assert (np.diff(own) == 1).all()


@given(shapes, st.data())
def test_flat_ranges(shape: Shape, data: st.DataObject) -> None:
    """A flat range is few boxes, in order, that hold exactly its elements."""
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = from_flat_range(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    numbers = [inside(b, shape) for b in found]
    joined = np.concatenate(numbers) if numbers else np.zeros(0, int)
    assert (joined == np.arange(start, stop)).all()


@given(filled, st.data())
def test_flat_start_is_numpys(shape: Shape, data: st.DataObject) -> None:
    at = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    assert flat_start(shape, at) == (np.ravel_multi_index(at, shape) if shape else 0)


@given(filled, st.data())
def test_is_run_is_no_gap(shape: Shape, data: st.DataObject) -> None:
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    inner = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    numbers = inside(Box(offset, inner), shape)
    gapless = all(b == a + 1 for a, b in pairwise(numbers.tolist()))
    if is_run(shape, inner):
        assert gapless
    elif gapless:
        # It answers for every offset, so a box that only fits at one place may be said to be none.
        assert numbers.size == 1 or any(n == 1 for n in inner)


@pytest.mark.parametrize(("offset", "shape"), [((0,), (1, 2)), ((-1,), (2,)), ((0, 0), (1, -1)), ((), (1,))])
def test_impossible_boxes(offset: Shape, shape: Shape) -> None:
    with pytest.raises(ValueError, match="box offset"):
        Box(offset, shape)


@pytest.mark.parametrize("span", [(-1, 2), (3, 2), (0, 13)])
def test_impossible_ranges(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="flat range"):
        from_flat_range((3, 4), *span)
