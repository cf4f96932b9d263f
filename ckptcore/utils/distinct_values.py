"""Find the distinct values of a column, the distinct rows of a table, or the values that another column has.

A module of its own because many rooms need it: the first plain call of `numpy.unique` or `numpy.isin` imports
`numpy.ma`, which takes a third of a small `validate`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.utils.row_wise import any_rows


def unique(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the distinct values of an array of integers, ascending; of a table, its distinct rows.

    Rows are ordered by their first column, then by the second, and so on, as `numpy.unique` orders them.

    >>> unique(np.array([3, 1, 3])).tolist(), unique(np.array([[1, 2], [0, 9], [1, 2]])).tolist()
    ([1, 3], [[0, 9], [1, 2]])
    """
    if values.ndim == 1:
        ordered = np.sort(values)
        return ordered[_first_of_each(ordered[1:] != ordered[:-1])] if len(ordered) else ordered
    if not values.shape[1]:
        return values[:1]  # rows without columns are all the same
    table = values.take(np.lexsort(values.T[::-1]), axis=0)
    return table[_first_of_each(any_rows(table[1:] != table[:-1]))] if len(table) else table


def isin(values: npt.NDArray[Any], members: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return which of the integers in ``values`` are in ``members``, as `numpy.isin` does.

    >>> isin(np.array([3, 1, 2]), [2, 3]).tolist(), isin(np.array([3, 1]), []).tolist()
    ([True, False, True], [False, False])
    """
    ordered = np.sort(np.asarray(members, values.dtype), axis=None)
    if not len(ordered):
        return np.zeros(values.shape, np.bool_)
    # A value above all members is compared with the largest one.
    position = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    is_member: npt.NDArray[np.bool_] = ordered[position] == values
    return is_member


def _first_of_each(differs: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which rows begin a run of equal ones, from which rows differ from the one before."""
    return np.concatenate([np.ones(1, np.bool_), differs])
