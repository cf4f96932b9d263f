"""Compute which box of a row-major tensor a view of it is."""

from __future__ import annotations

from math import prod


def dims_of(
    shape: tuple[int, ...], start: int, strides: tuple[int, ...], extent: tuple[int, ...]
) -> list[int | None] | None:
    """Return the dim of a tensor that each dim of a view runs along; None where the view is no box of it.

    >>> dims_of((4, 6, 5), 30, (1, 5), (5, 3)), dims_of((4, 6, 5), 0, (5, 1), (24, 5))
    ([2, 1], None)

    Args:
        shape: Of the tensor.
        start: Number of its element that is the view's first.
        strides: Of the view, elements.
        extent: Shape of the view.
    """
    corner, full = corner_of(shape, start), row_major(shape)
    dims: list[int | None] = []
    for stride, length in zip(strides, extent, strict=True):
        if length == 1:
            dims.append(None)
            continue
        along = [
            dim
            for dim, full_stride in enumerate(full)
            if full_stride == stride
            and shape[dim] > 1
            and dim not in dims
            and corner[dim] + length <= shape[dim]
        ]
        if not along:
            return None
        dims.append(along[0])
    return dims


def corner_of(shape: tuple[int, ...], start: int) -> tuple[int, ...]:
    """Return the index of a row-major tensor's element.

    >>> corner_of((4, 6, 5), 37)
    (1, 1, 2)
    """
    return tuple(start // stride % size for stride, size in zip(row_major(shape), shape, strict=True))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor whose last dim is the fastest."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
