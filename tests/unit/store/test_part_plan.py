"""Test that the parts of an upload follow from the file's size, and fit limits of stores and of memory."""

from __future__ import annotations

import random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import BudgetTooSmall, UsageError
from ckptcore.store.objects.part_plan import LARGEST, MOST_PARTS, PART, UploadBudget, plan_parts
from ckptcore.utils.part_digest import PartHasher, hasher_like, join_digests

MIB, GIB = 1 << 20, 1 << 30


@given(st.integers(0, LARGEST))
def test_parts_tile_the_file_within_every_limit(nbytes: int) -> None:
    plan = plan_parts(nbytes)
    assert plan.part >= PART
    assert plan.part % MIB == 0
    assert plan.count <= MOST_PARTS
    assert (plan.count - 1) * plan.part < max(nbytes, 1) <= plan.count * plan.part
    begin, end = plan.bounds(plan.count)
    assert end == nbytes
    assert plan.bounds(1)[0] == 0
    assert end - begin <= plan.part
    if nbytes:
        assert plan.number_at(nbytes - 1) == plan.count
        assert plan.number_at(begin) == plan.count


def test_a_file_of_300_gib() -> None:
    plan = plan_parts(300 * GIB)
    assert (plan.part, plan.count) == (35 * MIB, 8778)
    rows = list(plan)
    assert rows[0] == (1, 0, 35 * MIB)
    assert {end - begin for _, begin, end in rows[:-1]} == {35 * MIB}
    assert rows[-1][2] == 300 * GIB
    assert plan_parts(156 * GIB).count < 10_000
    with pytest.raises(UsageError, match="5 TiB"):
        plan_parts(LARGEST + 1)


def test_part_buffers_fit_the_budget_or_are_refused_with_numbers() -> None:
    assert UploadBudget.of([], GIB, MIB) == UploadBudget(0, 0)
    assert UploadBudget.of([1000, 20], MIB, 0) == UploadBudget(5 * 1000, 4)
    assert UploadBudget.of([40 * GIB], GIB, MIB) == UploadBudget(5 * PART, 4)
    assert UploadBudget.of([40 * GIB], 64 * MIB, MIB) == UploadBudget(2 * PART, 1)
    assert UploadBudget.of([40 * GIB], 20 * MIB, MIB) == UploadBudget(PART, 0)
    with pytest.raises(BudgetTooSmall) as caught:
        UploadBudget.of([40 * GIB, 300 * GIB], 32 * MIB, MIB)
    assert caught.value.values["needed"] == 36 * MIB
    assert str(36 * MIB) in caught.value.message
    with pytest.raises(UsageError, match="5 TiB"):
        UploadBudget.of([LARGEST + 1], GIB, MIB)


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 1 << 30))
def test_a_digest_of_parts_depends_on_the_bytes_alone(nbytes: int, part: int, seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(nbytes)
    total, at = PartHasher(part), 0
    while at < nbytes:
        step = rng.randint(1, 40)
        total.update(data[at : at + step])
        at += step
    own = [blake3(data[b : b + part]).digest() for b in range(0, nbytes, part)]
    assert total.hexdigest() == join_digests(part, own)
    if nbytes <= part:
        assert total.hexdigest() == blake3(data).hexdigest()
    else:
        assert total.hexdigest() == f"blake3-parts-{part}:{blake3(b''.join(own)).hexdigest()}"
    other = hasher_like(total.hexdigest())
    other.update(data)
    assert other.hexdigest() == total.hexdigest()
