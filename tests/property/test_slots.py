"""Hashes are found wherever they are, however they are spread."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.encodings.pickle.columns import Slots

# All over the numbers, and in one slot.
HASHES = st.one_of(
    st.integers(0, (1 << 64) - 1), st.integers(0, 40), st.integers((1 << 64) - 40, (1 << 64) - 1)
)


@given(st.sets(HASHES, min_size=1, max_size=80), st.lists(HASHES, max_size=80))
def test_known_hashes_are_found(known: set[int], others: list[int]) -> None:
    hashes = np.array(sorted(known), np.uint64)
    asked = np.array([*others, *sorted(known)], np.uint64)
    at = Slots(hashes).find(asked)
    assert ((at >= 0) & (at < len(hashes))).all()
    for value, place in zip(asked.tolist(), at.tolist(), strict=True):
        if value in known:
            assert int(hashes[place]) == value


def test_hashes_in_one_slot_take_no_more_time_than_a_search() -> None:
    hashes = np.arange(1 << 16, dtype=np.uint64)  # of all, the highest bits are zeros
    slots = Slots(hashes)
    asked = np.tile(hashes, 32)
    assert np.array_equal(slots.find(asked), asked.astype(np.int64))


def test_no_hashes() -> None:
    assert Slots(np.zeros(0, np.uint64)).find(np.array([7], np.uint64)).tolist() == [0]
