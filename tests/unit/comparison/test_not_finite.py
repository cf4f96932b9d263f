"""NaN and Inf are counted as torch counts them, in one block of elements or in several."""

from __future__ import annotations

import numpy as np
import pytest

from ckptcore.comparison.export_values import not_finite

torch = pytest.importorskip("torch")
IEEE = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64", "complex128")
WITHOUT_INF = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


@pytest.mark.grid
@pytest.mark.parametrize("count", [1, 65_535, 65_536, 65_537, 131_073])
@pytest.mark.parametrize("dtype", [*IEEE, *WITHOUT_INF, "int32", "bool"])
def test_any_bits(dtype: str, count: int) -> None:
    kind = getattr(torch, dtype)
    width = torch.empty(0, dtype=kind).element_size()
    data = np.random.default_rng(count).integers(0, 2 if dtype == "bool" else 256, count * width, np.uint8)
    values = torch.from_numpy(data).view(kind)
    values = torch.view_as_real(values) if values.is_complex() else values
    wide = values.to(torch.float64) if values.is_floating_point() else torch.zeros(1)
    assert not_finite(data, dtype) == (int(wide.isnan().sum()), int(wide.isinf().sum()))


@pytest.mark.parametrize("at", [0, 65_535, 65_536, 70_000])
def test_one_element(at: int) -> None:
    values = torch.zeros(70_001, dtype=torch.bfloat16)
    values[at] = -torch.inf
    assert not_finite(values.view(torch.uint8).numpy(), "bfloat16") == (0, 1)
