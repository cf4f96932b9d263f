"""Coverage: the check agrees with counting every element, whatever the boxes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.core import coverage as module
from ckptcore.core.coverage import coverage, repeated, replicas
from ckptcore.core.manifest import Envelope, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder

Piece = tuple[tuple[int, ...], tuple[int, ...]]


def manifest_of(tensors: list[tuple[tuple[int, ...], list[Piece]]]) -> Manifest:
    """Each chunk in an item of its own."""
    builder = Builder()
    file = builder.file("data", 1 << 30)
    for n, (shape, pieces) in enumerate(tensors):
        tensor = builder.tensor(TensorSpec(f"t{n}", "uint8", shape))
        for offset, extent in pieces:
            builder.chunk(tensor, offset, extent, builder.plain_item(file, 0, 1, Envelope.RAW))
    return builder.build("test", "nowhere", {})


def tiled_exactly(shape: tuple[int, ...], pieces: list[Piece]) -> bool:
    """The truth: every element counted, equal boxes once."""
    if 0 in shape:  # nothing to count: the chunks must reach as far as the shape says
        ends = [tuple(o + n for o, n in zip(*piece, strict=True)) for piece in pieces]
        return not ends or tuple(max(e) for e in zip(*ends, strict=True)) == shape
    count = np.zeros(shape, np.int64)
    for offset, extent in set(pieces):
        if 0 in extent:
            continue
        if any(o + n > d for o, n, d in zip(offset, extent, shape, strict=True)):
            return False
        count[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] += 1
    return bool((count == 1).all())


@st.composite
def partition(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece]]:
    """A shape cut into boxes by random planes, not always through the whole tensor."""
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 6)) for _ in range(rank))
    boxes: list[Piece] = [((0,) * rank, shape)]
    for _ in range(draw(st.integers(0, 6)) if rank else 0):
        at = draw(st.integers(0, len(boxes) - 1))
        offset, extent = boxes.pop(at)
        dim = draw(st.integers(0, rank - 1))
        cut = draw(st.integers(0, extent[dim]))
        boxes.append((offset, (*extent[:dim], cut, *extent[dim + 1 :])))
        moved = (*offset[:dim], offset[dim] + cut, *offset[dim + 1 :])
        boxes.append((moved, (*extent[:dim], extent[dim] - cut, *extent[dim + 1 :])))
    return shape, draw(st.permutations(boxes))


@given(st.lists(partition(), min_size=1, max_size=4))
def test_partitions_are_complete(tensors: list[tuple[tuple[int, ...], list[Piece]]]) -> None:
    assert coverage(manifest_of(tensors)) == []


@settings(max_examples=300)
@given(partition(), st.data())
def test_every_change_is_seen_as_counting_sees_it(
    drawn: tuple[tuple[int, ...], list[Piece]], data: st.DataObject
) -> None:
    shape, pieces = drawn
    at = data.draw(st.integers(0, len(pieces) - 1))
    kind = data.draw(st.sampled_from(["drop", "copy", "move", "grow"]))
    offset, extent = pieces[at]
    if kind == "drop":
        pieces = pieces[:at] + pieces[at + 1 :]
    elif kind == "copy":
        pieces = [*pieces, pieces[at]]
    elif shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        step = tuple(int(d == dim) for d in range(len(shape)))
        moved = tuple(o + s for o, s in zip(offset, step, strict=True))
        grown = tuple(n + s for n, s in zip(extent, step, strict=True))
        pieces = [*pieces[:at], (moved, extent) if kind == "move" else (offset, grown), *pieces[at + 1 :]]
    found = coverage(manifest_of([(shape, pieces)]))
    assert (found == []) == tiled_exactly(shape, pieces)
    assert all(f.fqn == "t0" and f.severity == "error" for f in found)


def test_replicas_and_repeats_are_distinguished() -> None:
    builder = Builder()
    file = builder.file("data", 100)
    tensor = builder.tensor(TensorSpec("t", "uint8", (4,)))
    first, second = (builder.plain_item(file, n, 4, Envelope.RAW) for n in (0, 4))
    for item in (first, second, first):
        builder.chunk(tensor, (0,), (4,), item)
    manifest = builder.build("test", "nowhere", {})
    assert replicas(manifest) == [(0, 1)]
    assert repeated(manifest) == [2]


def test_a_hole_is_reported_with_its_place() -> None:
    (found,) = coverage(manifest_of([((8, 4), [((0, 0), (3, 4)), ((5, 0), (3, 4))])]))
    assert found.code == "hole"
    assert "8 of 32 elements" in found.message
    assert "[3:5, 0:4]" in found.message


@pytest.mark.parametrize("size", [1 << 30, 1 << 31, 1 << 32, 1 << 49])
def test_volumes_that_int64_does_not_hold(size: int) -> None:
    shape, half = (size, size >> 10, 4), size // 2
    first, second = ((0, 0, 0), (half, size >> 10, 4)), ((half, 0, 0), (half, size >> 10, 2))
    assert coverage(manifest_of([(shape, [first, second, ((half, 0, 2), (half, size >> 10, 2))])])) == []
    for others in ([], [((half, 0, 1), (half, size >> 10, 2))]):  # a hole, and as many elements as there are
        assert coverage(manifest_of([(shape, [first, second, *others])])) != []


@pytest.mark.parametrize("most", [1, 2, 4, 5, 9])
def test_boxes_that_no_plane_separates(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four boxes around one, compared pairwise, as many at a time as there are, or fewer."""
    monkeypatch.setattr(module, "_MAX_PAIRWISE", most)
    around = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    assert coverage(manifest_of([((3, 3), [*around, ((1, 1), (1, 1))])])) == []
    for wrong in (((1, 1), (1, 2)), ((0, 1), (1, 1))):
        assert coverage(manifest_of([((3, 3), [*around, wrong])])) != []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2)), max_size=9))
def test_equal_boxes_of_a_tensor(rows: list[tuple[int, int, int]]) -> None:
    """In any order, with empty boxes; the first of equal ones counts."""
    manifest = manifest_of([((4,), [((o,), (n,)) for t, o, n in rows if t == k]) for k in range(2)])
    first: dict[tuple[int, int, int], int] = {}
    wanted = []
    for row, key in enumerate(sorted(rows, key=lambda r: r[0])):
        if first.setdefault(key, row) != row and key[2]:
            wanted.append((first[key], row))
    assert sorted(module.equal_boxes(manifest)) == sorted(wanted)


@pytest.mark.parametrize("chunks", [4096, 4097, 6000])
def test_a_hole_among_very_many_chunks_is_a_hole(chunks: int) -> None:
    """Also where there are too many to tell its place, and to compare all."""
    rows: list[Piece] = [((n,), (1,)) for n in range(chunks + 1) if n != 77]
    (found,) = coverage(manifest_of([((chunks + 1,), rows)]))
    assert (found.code, found.fqn) == ("hole", "t0")
    assert f"1 of {chunks + 1} elements are in no file" in found.message
    assert ("[77:78]" in found.message) is (chunks <= 4096)


def test_holes_of_very_many_tensors_are_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_EXPLAINED", 2)
    pieces: list[Piece] = [((0, 0), (2, 2)), ((0, 0), (2, 2)), ((2, 0), (0, 2)), ((3, 0), (1, 2))]
    twice: list[Piece] = [((0, 0), (3, 2)), ((1, 0), (3, 2))]
    found = coverage(manifest_of([*[((4, 2), pieces)] * 3, ((4, 2), twice)]))
    assert [f.code for f in found] == ["hole", "hole", "hole", "overlap"]
    assert all("2 of 8 elements are in no file" in f.message for f in found[:3])
