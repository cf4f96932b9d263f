"""Statistics are those of torch in float64, and their bits depend on no cut and no order."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.core.dtype import DTYPES
from ckptcore.fingerprints.statistics import (
    SEGMENT,
    ExactSum,
    FileStatistics,
    Statistics,
    accumulator,
    is_measured,
    joined_parts,
    pair_accumulator,
    unpack,
)

NUMEL = 2 * SEGMENT + 4321
MEASURED = [dtype.name for dtype in DTYPES if is_measured(dtype.name) and dtype.name != "float8_e8m0fnu"]


def tensor(dtype, numel=NUMEL):
    """Random elements; floats have zeros of both signs, and those of the first segment NaN and Inf."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    kind = getattr(torch, dtype)
    if kind.is_complex:
        return torch.complex(values, 1 - values).to(kind)
    if not kind.is_floating_point:
        return (values.abs() * 9).to(kind)
    made = (values * 0.02).to(kind)
    if dtype in ("float64", "float32", "float16", "bfloat16"):
        made[[5, 70_000]], made[[9, 70_002]] = math.nan, -math.inf
        made[[11, 12, numel - 2, numel - 1]] = torch.tensor([0.0, -0.0] * 2).to(kind)
    return made


def octets(values):
    return values.view(torch.uint8).numpy()


def parts(numel, cuts, seed):
    """Cut [0, numel) at random places, in random order."""
    drawn = random.Random(seed)
    bounds = sorted({0, numel, *(drawn.randrange(1, numel) for _ in range(cuts))})
    pairs = list(itertools.pairwise(bounds))
    drawn.shuffle(pairs)
    return pairs


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", MEASURED)
def test_numbers_are_those_of_torch_however_elements_come(dtype):
    values = tensor(dtype)
    raw, width = octets(values), values.element_size()
    rows = set()
    for seed, cuts in enumerate((0, 1, 5, 60)):
        measured = accumulator(dtype, NUMEL)
        for begin, end in parts(NUMEL, cuts, seed):
            measured.add(begin, raw[begin * width : end * width])
        rows.add(measured.row())
    [row] = rows
    own = Statistics.of_row(dtype, NUMEL, row)
    wide = (
        torch.view_as_real(values.to(torch.complex64 if width < 16 else torch.complex128))
        if values.is_complex()
        else values
    )
    wide = (
        (wide.float() if wide.element_size() == 1 and wide.is_floating_point() else wide).double().reshape(-1)
    )
    finite = wide[torch.isfinite(wide)]
    assert own.norm == pytest.approx(finite.norm().item(), rel=1e-7)
    assert own.total == pytest.approx(finite.sum().item(), abs=1e-7 * finite.abs().sum().item())
    assert own.absmax == finite.abs().max().item()
    assert (own.nan, own.inf) == (int(wide.isnan().sum()), int(wide.isinf().sum()))
    assert own.zeros == int((wide == 0).sum())


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e18, 3e38])
def test_squares_that_float32_cannot_hold(scale):
    values = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * scale
    measured = accumulator("float32", 1000)
    measured.add(0, octets(values))
    assert Statistics.of_row("float32", 1000, measured.row()).norm == pytest.approx(
        values.double().norm().item(), rel=1e-7
    )


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=50), st.randoms())
def test_an_exact_sum_has_no_order(numbers, drawn):
    totals = set()
    for _ in range(3):
        drawn.shuffle(numbers)
        total = ExactSum()
        for number in numbers:
            total.add(number)
        totals.add(total.value)
    assert totals == {math.fsum(numbers)}


def test_what_is_not_finite_or_too_large_stays_so():
    for numbers, expected in (((math.inf, 1.0), math.inf), ((1e308, 1e308), math.inf), ((), 0.0)):
        total = ExactSum()
        for number in numbers:
            total.add(number)
        assert total.value == expected


def test_parts_of_a_file_join():
    values = tensor("float32")
    raw, middle = octets(values), SEGMENT
    complete = FileStatistics(2, lambda _: ("float32", NUMEL))
    first, second = (FileStatistics(2, lambda _: ("float32", NUMEL)) for _ in range(2))
    complete.add(1, 0, raw)
    first.add(1, 0, raw[: 4 * middle])
    second.add(1, middle, raw[4 * middle :])
    joined = joined_parts([first.pack(), second.pack()])
    # What a part adds is rounded once, so the last bit may differ.
    assert unpack(joined)[1].tolist() == pytest.approx(unpack(complete.pack())[1].tolist(), rel=1e-14)
    assert np.isnan(unpack(joined)[0]).all()  # nothing of it was seen
    assert joined_parts([first.pack(), None]) is None


def test_a_pair_has_the_norm_of_its_difference():
    a, b = tensor("bfloat16", 100_000), tensor("float32", 100_000) * 1.25
    measured = pair_accumulator(("bfloat16", "float32"), 100_000)
    for begin, end in parts(100_000, 9, 3):
        measured.add(begin, octets(a)[2 * begin : 2 * end], octets(b)[4 * begin : 4 * end])
    *_, change, root = measured.row()
    left, right = a.double(), b.double()
    both = torch.isfinite(right - left)
    assert change == pytest.approx((right - left)[both].norm().item(), rel=1e-9)
    assert root**2 == pytest.approx(float((left * right)[both].sum()), rel=1e-9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_a_norm_whose_squares_float64_cannot_hold(scale):
    values = torch.rand(NUMEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pair = pair_accumulator(("float64", "float64"), NUMEL)
    pair.add(0, octets(values * scale), octets(values * (1.5 * scale)))
    *_, change, root = pair.row()
    norm = values.norm().item()
    measured = [Statistics.of_row("float64", NUMEL, pair.row()[first:]) for first in (0, 6)]
    assert [side.norm / scale for side in measured] == pytest.approx([norm, 1.5 * norm], rel=1e-7)
    assert change / scale == pytest.approx(norm / 2, rel=1e-7)
    assert (root / scale) ** 2 == pytest.approx(1.5 * norm**2, rel=1e-7)


@pytest.mark.filterwarnings("error")
def test_parts_of_different_sizes_have_one_norm():
    """Elements of which one part is small have the norm of those of the other."""
    values = torch.full((NUMEL,), 1e-200, dtype=torch.float64)
    values[:4] = 1e200
    raw = octets(values)
    measured = FileStatistics(1, lambda _: ("float64", NUMEL))
    measured.add(0, 0, raw)
    boxes = [FileStatistics(1, lambda _, numel=numel: ("float64", numel)) for numel in (NUMEL - 100, 100)]
    for box, part in zip(boxes, (raw[:-800], raw[-800:]), strict=True):
        box.add(0, 0, part)
    assert {unpack(p)[0, 1] for p in (measured.pack(), joined_parts([b.pack() for b in boxes]))} == {2e200}


@pytest.mark.filterwarnings("error")
def test_sums_above_the_largest_float64_are_infinite_without_a_warning():
    values = torch.full((5,), 1.7e308, dtype=torch.float64)
    measured = accumulator("float64", 5)
    measured.add(0, octets(values))
    own = Statistics.of_row("float64", 5, measured.row())
    assert (own.norm, own.mean, own.absmax, own.nan, own.inf) == (math.inf, math.inf, 1.7e308, 0, 0)
    pair = pair_accumulator(("float64", "float64"), 5)
    pair.add(0, octets(values), octets(-values))
    assert pair.row()[3] == 0


def test_a_complex_element_counts_as_two_numbers():
    values = torch.tensor([complex(1, math.nan), complex(2, 5)], dtype=torch.complex64)
    measured = accumulator("complex64", 2)
    measured.add(0, octets(values))
    own = Statistics.of_row("complex64", 2, measured.row())
    assert (own.numel, own.nan, own.mean) == (4, 1, pytest.approx(8 / 3))
    assert own.rms == pytest.approx(math.sqrt(30 / 3))
