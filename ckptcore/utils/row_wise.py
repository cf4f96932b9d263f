"""Combine the columns of a table of few columns, row by row.

A module of its own because many rooms need it: numpy's own reduction over a short last axis starts a loop for
each row, which takes 25 to 40 times as long as whole columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def prod_rows(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the product of each row, as ``table.prod(axis=1)`` does.

    >>> prod_rows(np.array([[2, 3], [0, 5]])).tolist(), prod_rows(np.zeros((2, 0), np.int64)).tolist()
    ([6, 0], [1, 1])
    """
    row_products = np.ones(len(table), table.dtype)
    for column in table.T:
        row_products *= column
    return row_products


def all_rows(table: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which rows are true in every column, as ``table.all(axis=1)`` does.

    >>> table = np.array([[True, True], [True, False]])
    >>> all_rows(table).tolist(), all_rows(np.zeros((1, 0), np.bool_)).tolist()
    ([True, False], [True])
    """
    all_true = np.ones(len(table), np.bool_)
    for column in table.T:
        all_true &= column
    return all_true


def any_rows(table: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which rows are true in some column, as ``table.any(axis=1)`` does.

    >>> table = np.array([[True, False], [False, False]])
    >>> any_rows(table).tolist(), any_rows(np.zeros((1, 0), np.bool_)).tolist()
    ([True, False], [False])
    """
    return ~all_rows(~table)
