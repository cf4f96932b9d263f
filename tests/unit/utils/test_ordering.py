"""Orders are those of numpy's stable sort, on both sides of what 16 bits hold."""

from __future__ import annotations

import numpy as np
import pytest

from ckptcore.utils.ordering import order_in_groups, stable_order


@pytest.mark.parametrize("top", [0, 65_535, 65_536, 65_537, 1 << 31, 1 << 62])
@pytest.mark.parametrize("low", [0, -1])
def test_orders_are_stable(top: int, low: int) -> None:
    rng = np.random.default_rng(top % 97)
    numbers = rng.permutation(np.concatenate([rng.integers(0, 5, 60), [top, top, low, max(top - 1, 0), top]]))
    wanted = np.argsort(numbers, kind="stable").tolist()
    assert stable_order(numbers).tolist() == wanted
    for groups in (rng.integers(0, 3, len(numbers)), numbers, np.zeros_like(numbers)):
        assert order_in_groups(numbers, groups).tolist() == wanted
