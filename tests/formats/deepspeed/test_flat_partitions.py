"""Parameters are found in flat buffers as DeepSpeed cuts them: against a plain re-enactment of the cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.formats.deepspeed.optimizer_states import FlatParameter, UnfitPartition, cut_each, cut_together

SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=6)


def values(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Tensors whose elements all differ."""
    start, made = 1, []
    for shape in shapes:
        n = int(np.prod(shape, dtype=int))
        made.append(np.arange(start, start + n).reshape(shape))
        start += n
    return made


def assembled(fragments, parameters, buffers) -> list[np.ndarray]:
    out = {p.name: np.zeros(p.numel, int) for p in parameters}
    for f in fragments:
        assert not out[f.parameter.name][f.start : f.stop].any(), "elements are given twice"
        out[f.parameter.name][f.start : f.stop] = buffers[f.rank][
            f.buffer_start : f.buffer_start + f.stop - f.start
        ]
    return [out[p.name].reshape(p.shape) for p in parameters]


@given(SHAPES, st.integers(1, 5), st.booleans(), st.data())
def test_groups_that_are_cut_as_one_buffer(shapes, ranks, stripped, data) -> None:
    paddings = data.draw(st.lists(st.integers(0, 7), min_size=len(shapes), max_size=len(shapes)))
    tensors = values(shapes)
    flat = np.concatenate(
        [np.concatenate([t.reshape(-1), np.full(p, -1)]) for t, p in zip(tensors, paddings, strict=True)]
    )
    total = len(flat)
    size = -(-total // (2 * ranks)) * 2
    flat = np.concatenate([flat, np.full(ranks * size - total, -7)])
    buffers = {r: flat[r * size : (r + 1) * size] for r in range(ranks)}
    if stripped:  # as `single_partition_of_fp32_groups` is saved
        buffers = {r: b[: max(min(total - r * size, size), 0)] for r, b in buffers.items()}
    parameters = [
        FlatParameter(f"p{n}", t.shape, p) for n, (t, p) in enumerate(zip(tensors, paddings, strict=True))
    ]
    found = cut_together(parameters, ranks, {r: len(b) for r, b in buffers.items()})
    for one, other in zip(assembled(found, parameters, buffers), tensors, strict=True):
        assert np.array_equal(one, other)


@given(SHAPES, st.integers(1, 5))
def test_groups_whose_parameters_are_cut_one_by_one(shapes, ranks) -> None:
    tensors = values(shapes)
    parts: dict[int, list[np.ndarray]] = {r: [] for r in range(ranks)}
    for t in tensors:
        size = -(-t.size // ranks)
        padded = np.concatenate([t.reshape(-1), np.full(ranks * size - t.size, -7)])
        for r in range(ranks):
            parts[r].append(padded[r * size : (r + 1) * size])
    buffers = {r: np.concatenate(p) for r, p in parts.items()}
    parameters = [FlatParameter(f"p{n}", t.shape) for n, t in enumerate(tensors)]
    found = cut_each(parameters, ranks, {r: len(b) for r, b in buffers.items()})
    for one, other in zip(assembled(found, parameters, buffers), tensors, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [({0: 10, 1: 4}, 2), ({0: 8, 1: 30}, 2), ({0: 8}, 1), ({0: 64, 1: 64}, 2)],
    ids=["a partition is short", "a partition is long", "one rank of two", "far too much"],
)
def test_sizes_that_do_not_fit_are_refused(lengths, ranks) -> None:
    with pytest.raises(UnfitPartition):
        list(cut_together([FlatParameter("a", (4, 5))], ranks, lengths))
    with pytest.raises(UnfitPartition):
        list(cut_each([FlatParameter("a", (4, 5))], ranks, lengths))


def test_a_missing_rank_leaves_a_gap_and_moves_nothing() -> None:
    parameters = [FlatParameter("a", (10,)), FlatParameter("b", (10,))]
    found = [
        (f.parameter.name, f.rank, f.start, f.stop, f.buffer_start)
        for f in cut_together(parameters, 2, {0: 10})
    ]
    assert found == [("a", 0, 0, 10, 0)]
    found = [
        (f.parameter.name, f.rank, f.start, f.stop, f.buffer_start)
        for f in cut_together(parameters, 2, {1: 10})
    ]
    assert found == [("b", 1, 0, 10, 0)]
