"""Rows of narrow tables are combined as numpy's own reductions do."""

import numpy as np
import pytest

from ckptcore.utils.row_wise import all_rows, any_rows, prod_rows

SHAPES = [(0, 0), (0, 3), (1, 0), (1, 1), (50, 1), (50, 2), (50, 5)]


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape: tuple[int, int], dtype: type[np.generic]) -> None:
    table = (
        np.random.default_rng(3).integers(-(1 << 40), 1 << 40, shape).astype(dtype)
    )  # integers wrap around
    before = table.copy()
    found = prod_rows(table)
    assert found.tolist() == table.prod(axis=1).tolist()
    assert found.dtype == table.dtype
    assert (table == before).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_and_some(shape: tuple[int, int]) -> None:
    table = np.random.default_rng(4).integers(0, 2, shape).astype(np.bool_)
    before = table.copy()
    assert all_rows(table).tolist() == table.all(axis=1).tolist()
    assert any_rows(table).tolist() == table.any(axis=1).tolist()
    assert (table == before).all()
