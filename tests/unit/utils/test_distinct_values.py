"""Distinct values and rows are those of `numpy.unique`, and those among others those of `numpy.isin`."""

import subprocess
import sys

import numpy as np
import pytest

from ckptcore.utils.distinct_values import isin, unique


@pytest.mark.parametrize("shape", [(0,), (1,), (50,), (0, 3), (1, 3), (60, 1), (60, 2), (60, 4)])
def test_as_numpy_finds_them(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(len(shape)).integers(-2, 3, shape)
    before = values.copy()
    found = unique(values)
    assert found.tolist() == np.unique(values, axis=0).tolist()
    assert found.dtype == values.dtype
    assert (values == before).all()


def test_rows_without_columns() -> None:
    assert unique(np.zeros((3, 0), np.int64)).shape == (1, 0)
    assert unique(np.zeros((0, 0), np.int64)).shape == (0, 0)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_as_numpy_finds_what_another_has(dtype: type[np.generic], count: int) -> None:
    values, known = (np.random.default_rng(n).integers(0, 60, n).astype(dtype) for n in (50, count))
    assert isin(values, known).tolist() == np.isin(values, known).tolist()
    assert (
        isin(values.reshape(5, 10), known.tolist()).tolist() == np.isin(values.reshape(5, 10), known).tolist()
    )
    assert isin(values[:0], known).tolist() == []


def test_masked_arrays_are_not_imported() -> None:
    code = (
        "import sys, numpy as np; from ckptcore.utils.distinct_values import isin, unique; "
        "unique(np.arange(3)); unique(np.zeros((3, 2))); isin(np.arange(3), range(20)); "
        "print('numpy.ma' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
