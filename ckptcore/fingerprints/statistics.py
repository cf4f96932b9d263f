"""Compute statistics of tensors whose bits depend on neither tiles nor workers.

A run of elements, a tensor or the box of one that a file holds, is cut in row-major order into *segments* of
`SEGMENT` elements. Whoever passes elements on gives any part of the run, in any order: complete segments are
summed at once, and what is left at the ends of a part waits until the segment is complete. Within a segment
the order is fixed. The sums of segments are added without rounding (`ExactSum`), so their order does not
matter.

Elements of float32 and bfloat16 are multiplied in float32, at most 2048 of them, as `ckptcore diff` does;
where squares could overflow or vanish, and for other dtypes, in float64, after a division by a power of two
where those of float64 could. All else is float64. NaN and Inf are counted, and part of no sum. An element of
a complex dtype counts as two numbers.

The same tensor in other boxes (another topology of the files that are written) may differ by the rounding of
float32.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptcore.core.dtype import BY_NAME
from ckptcore.utils.memory import untouched

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float64]
SEGMENT = 1 << 17  # elements: their float32 stay in a core's cache, and calls cost less than what they do
_ROW = (
    1 << 11
)  # elements of a dot product in float32; of larger ones bits are lost, and OpenBLAS starts threads
# Below and above, squares of float32 lose bits or overflow; between them what vanishes is below any rounding.
_SMALLEST, _LARGEST = 1e-12, 1e15
_UNIT = 256  # exponents of the powers of two that float64 is divided by, where squares could not be held
COLUMNS = ("total", "norm", "absmax", "nan", "inf", "zeros")
_NORM, _MAXIMUM = COLUMNS.index("norm"), COLUMNS.index("absmax")
_MEMORY = threading.local()
_ONES = np.frombuffer(untouched(4 * _ROW), np.float32).reshape(_ROW, 1)
_ONES[...] = 1


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the elements of a tensor.

    Attributes:
        numel: Number of numbers: an element of a complex dtype has two.
        total: Sum of those that are finite.
        norm: Their Euclidean norm.
        absmax: The largest absolute value of them.
        nan: Number of NaN.
        inf: Number of Inf, of both signs.
        zeros: Number of zeros, of both signs.
    """

    numel: int
    total: float = 0.0
    norm: float = 0.0
    absmax: float = 0.0
    nan: int = 0
    inf: int = 0
    zeros: int = 0

    @classmethod
    def of_row(cls, dtype: str, numel: int, row: Sequence[float]) -> Statistics:
        """Return the statistics of a row of `Accumulator.row`. numel: elements of the tensor."""
        total, norm, absmax, nan, inf, zeros = row[: len(COLUMNS)]
        return cls(
            numel * (2 if _is_complex(dtype) else 1), total, norm, absmax, int(nan), int(inf), int(zeros)
        )

    @property
    def mean(self) -> float:
        """The mean of the finite elements; 0 without one."""
        return self.total / max(self.numel - self.nan - self.inf, 1)

    @property
    def rms(self) -> float:
        """The root of the mean square of the finite elements."""
        return self.norm / math.sqrt(max(self.numel - self.nan - self.inf, 1))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; null for what is infinite."""
        numbers = {name: getattr(self, name) for name in ("norm", "mean", "absmax")}
        finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        return finite | {"nan": self.nan, "inf": self.inf, "zeros": self.zeros, "numel": self.numel}


class MeasuredTensor(NamedTuple):
    """A tensor and its statistics."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    statistics: Statistics

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        spec = {"fqn": self.fqn, "dtype": self.dtype, "shape": list(self.shape)}
        return spec | self.statistics.as_dict()


class ExactSum:
    """A sum of floats without rounding: its value is the same in any order.

    The partial sums do not overlap (Shewchuk, Adaptive Precision Floating-Point Arithmetic, 1997); what is
    not finite is added apart.
    """

    __slots__ = ("_partials", "_special")

    def __init__(self) -> None:
        self._partials: list[float] = []
        self._special = 0.0

    def add(self, number: float) -> None:
        """Add a number."""
        if not math.isfinite(number):
            self._special += number
            return
        partials = []
        for partial in self._partials:
            if abs(number) < abs(partial):
                number, partial = partial, number
            high = number + partial
            low = partial - (high - number)
            if low:
                partials.append(low)
            number = high
        if math.isfinite(number):
            self._partials = [*partials, number]
        else:  # the sum exceeds float64
            self._partials, self._special = [], number

    @property
    def value(self) -> float:
        """The sum, rounded once."""
        return (
            math.fsum(self._partials) if math.isfinite(self._special) and not self._special else self._special
        )


class SegmentSums(NamedTuple):
    """The numbers of a segment.

    Attributes:
        numbers: By column. A norm is here the sum of squares.
        units: Column of products -> exponent of the power of two that both factors were divided by.
    """

    numbers: Sequence[float]
    units: Mapping[int, int] = MappingProxyType({})


Measure = Callable[[Sequence[Bytes]], SegmentSums]
"""Returns the numbers of a segment, from its elements in each of the tensors that are read side by side."""


class Accumulator:
    """The statistics of one run of elements while it is read. Safe for threads.

    Args:
        numel: Elements of the run.
        widths: Bytes of an element, in each of the tensors that are read side by side.
        measure: Of a segment.
        maxima: Columns that are maxima; the others are sums.
        roots: Columns of sums of products, which are roots in the end: float64 holds these.
    """

    def __init__(
        self,
        numel: int,
        widths: Sequence[int],
        measure: Measure,
        columns: int = len(COLUMNS),
        maxima: Sequence[int] = (_MAXIMUM,),
        roots: Sequence[int] = (_NORM,),
    ) -> None:
        self._numel, self._widths, self._measure = numel, tuple(widths), measure
        self._sums = {n: {0: ExactSum()} for n in range(columns) if n not in maxima}  # by unit
        self._maxima, self._roots = dict.fromkeys(maxima, 0.0), roots
        self._open: dict[int, list[tuple[int, list[Bytes]]]] = {}  # segment -> (first element, copies)
        self._missing = numel
        self._lock = threading.Lock()

    def add(self, first: int, *elements: Bytes) -> bool:
        """Add a part of the run.

        Args:
            first: Its first element, counted from the begin of the run.
            elements: Its bytes in each tensor.

        Returns:
            Whether the run is complete now.
        """
        stop = first + len(elements[0]) // self._widths[0]
        begin = first
        while begin < stop:
            segment = begin // SEGMENT
            low, high = segment * SEGMENT, min((segment + 1) * SEGMENT, self._numel)
            end = min(high, stop)
            pieces = [
                raw[(begin - first) * width : (end - first) * width]
                for raw, width in zip(elements, self._widths, strict=True)
            ]
            complete: Sequence[Bytes] | None = pieces
            if (begin, end) != (low, high):
                complete = self._wait(segment, begin, pieces, high - low)
            if complete is not None:
                self._note(self._measure(complete))
            begin = end
        with self._lock:
            self._missing -= stop - first
            return not self._missing

    def row(self) -> tuple[float, ...]:
        """Return the numbers of all columns.

        Segments of which another worker has a part (of a file that several machines write) count as what of
        them was here.
        """
        for pieces in self._open.values():
            for _, raws in sorted(pieces, key=lambda piece: piece[0]):
                self._note(self._measure(raws))
        self._open.clear()
        values = dict(self._maxima)
        for n, sums in self._sums.items():
            by_unit = {unit: exact.value for unit, exact in sums.items()}
            values[n] = _root(by_unit) if n in self._roots else by_unit[0]
        return tuple(values[n] for n in sorted(values))

    def _wait(self, segment: int, begin: int, pieces: Sequence[Bytes], numel: int) -> list[Bytes] | None:
        """Keep a part of a segment, or return the segment if that completes it."""
        with self._lock:
            waiting = self._open.setdefault(segment, [])
            waiting.append((begin, [raw.copy() for raw in pieces]))
            if sum(len(raws[0]) for _, raws in waiting) < numel * self._widths[0]:
                return None
            del self._open[segment]
        waiting.sort(key=lambda piece: piece[0])
        return [np.concatenate(raws) for raws in zip(*(raws for _, raws in waiting), strict=True)]

    def _note(self, measured: SegmentSums) -> None:
        with self._lock:
            for n, number in enumerate(measured.numbers):
                if n in self._maxima:
                    self._maxima[n] = max(self._maxima[n], number)
                elif number:
                    self._sums[n].setdefault(measured.units.get(n, 0), ExactSum()).add(number)


class FileStatistics:
    """The statistics of the tensors of a file while it is written. Safe for threads.

    Args:
        count: Number of tensors.
        spec: Number of a tensor -> its dtype and the elements of it in the file.
    """

    def __init__(self, count: int, spec: Callable[[int], tuple[str, int]]) -> None:
        self._spec, self._open = spec, dict[int, Accumulator]()
        self._rows = np.full((count, len(COLUMNS)), math.nan)
        self._lock = threading.Lock()

    def add(self, number: int, first: int, elements: Bytes) -> None:
        """Add a part of a tensor; see `Accumulator.add`."""
        with self._lock:
            tensor = self._open.get(number)
            if tensor is None:
                tensor = accumulator(*self._spec(number))
                if tensor is None:
                    return
                self._open[number] = tensor
        if tensor.add(first, elements):
            with self._lock:  # few tensors are open at a time
                self._rows[number] = self._open.pop(number).row()

    def pack(self) -> bytes:
        """Return the rows of all tensors, packed; what was not measured is NaN."""
        for number, tensor in self._open.items():
            self._rows[number] = tensor.row()
        self._open.clear()
        return self._rows.astype("<f8").tobytes()


def is_measured(dtype: str) -> bool:
    """Report whether elements of a dtype are numbers: packed ones are not."""
    return BY_NAME[dtype].kind != "p"


def _is_complex(dtype: str) -> bool:
    return BY_NAME[dtype].kind == "c"


def accumulator(dtype: str, numel: int) -> Accumulator | None:
    """Return the accumulator of one tensor; None for a dtype without numbers."""
    if not is_measured(dtype):
        return None
    return Accumulator(numel, (BY_NAME[dtype].itemsize,), lambda raws: segment(dtype, raws[0]))


_CHANGE, _PRODUCT = 2 * len(COLUMNS), 2 * len(COLUMNS) + 1  # behind the columns of both


def is_comparable(dtypes: tuple[str, str]) -> bool:
    """Report whether the numbers of two dtypes can be compared: a complex element has two of them."""
    return all(map(is_measured, dtypes)) and _is_complex(dtypes[0]) == _is_complex(dtypes[1])


def pair_accumulator(dtypes: tuple[str, str], numel: int) -> Accumulator | None:
    """Return the accumulator of two tensors of equal shape; None if they are not comparable."""
    if not is_comparable(dtypes):
        return None
    return Accumulator(
        numel,
        [BY_NAME[dtype].itemsize for dtype in dtypes],
        lambda raws: _pair_segment(dtypes, raws),
        _PRODUCT + 1,
        (_MAXIMUM, len(COLUMNS) + _MAXIMUM),
        (_NORM, len(COLUMNS) + _NORM, _CHANGE, _PRODUCT),
    )


def unpack(packed: bytes) -> Numbers:
    """Return the rows of `FileStatistics.pack`."""
    return np.frombuffer(packed, "<f8").reshape(-1, len(COLUMNS))


def joined(rows: Numbers) -> tuple[float, ...] | None:
    """Return the row of a tensor from those of its boxes, in any order; None where nothing was measured."""
    rows = rows[~np.isnan(rows).all(axis=1)]
    if not len(rows):
        return None
    if len(rows) == 1:
        return tuple(rows[0].tolist())
    columns = [_exact(column) for column in rows.T]
    columns[_MAXIMUM] = float(rows[:, _MAXIMUM].max())
    columns[_NORM] = _norm_of_norms(rows[:, _NORM])
    return tuple(columns)


def joined_parts(parts: Sequence[bytes | None]) -> bytes | None:
    """Return the packed statistics of a file from those of its parts; None if one has none."""
    packed = [part for part in parts if part is not None]
    if len(packed) < len(parts):
        return None
    if len(packed) == 1:
        return packed[0]
    grids = np.stack([unpack(part) for part in packed], axis=1)  # tensors, parts, columns
    unmeasured = (math.nan,) * len(COLUMNS)
    return np.array([joined(rows) or unmeasured for rows in grids], "<f8").tobytes()


def segment(dtype: str, raw: Bytes) -> SegmentSums:
    """Return the numbers of a segment, by `COLUMNS`."""
    fast = _FAST.get(dtype)
    measured = fast(raw) if fast is not None else None
    return measured if measured is not None else _of_wide(_wide(dtype, raw))


def _of_float32(raw: Bytes) -> SegmentSums | None:
    bits, zeros = _magnitudes(raw.view(np.uint32))
    return _of_finite(raw.view(np.float32), float(np.uint32(bits).view(np.float32)), zeros)


def _of_bfloat16(raw: Bytes) -> SegmentSums | None:
    bits, zeros = _magnitudes(raw.view(np.uint16))
    return _of_finite(
        _high_halves(raw).view(np.float32), float(np.uint32(bits << 16).view(np.float32)), zeros
    )


def _of_float16(raw: Bytes) -> SegmentSums | None:
    bits, zeros = _magnitudes(raw.view(np.uint16))
    # Behind the sign, three more bits of exponent: those of float32, whose bias is larger by 112.
    integers = _high_halves(raw).view(np.int32)
    np.right_shift(integers, np.int32(3), out=integers)
    np.bitwise_and(integers, np.int32(-0x70000001), out=integers)
    values = integers.view(np.float32)
    np.multiply(values, np.float32(2.0**112), out=values)
    return _of_finite(values, float(np.uint16(bits).view(np.float16)), zeros)


_FAST: dict[str, Callable[[Bytes], SegmentSums | None]] = {
    "float32": _of_float32,
    "bfloat16": _of_bfloat16,
    "float16": _of_float16,
}


def _magnitudes(bits: npt.NDArray[Any]) -> tuple[int, int]:
    """Return the largest bits of floats without their signs, and the number of zeros."""
    sign = 1 << 8 * bits.itemsize - 1
    # Of numbers without a sign the largest and smallest by one view, of those with it by the other.
    signed = bits.view(f"i{bits.itemsize}")
    largest = max(int(np.maximum.reduce(bits)) & sign - 1, int(np.maximum.reduce(signed)))
    if np.minimum.reduce(bits) and np.minimum.reduce(signed) != -sign:
        return largest, 0
    zeros = np.count_nonzero(bits == 0) + np.count_nonzero(bits == sign)
    return largest, int(zeros)


def _high_halves(raw: Bytes) -> npt.NDArray[np.uint32]:
    """Return integers whose high halves are the elements of two bytes, in an order of their count alone."""
    if len(raw) % 4:  # an even number of elements: two are read at once
        raw = np.concatenate([raw, np.zeros(2, np.uint8)])
    pairs = raw.view(np.uint32)
    integers = _thread_integers()[: 2 * len(pairs)].reshape(2, -1)
    np.left_shift(pairs, np.uint32(16), out=integers[0])
    np.bitwise_and(pairs, np.uint32(0xFFFF0000), out=integers[1])
    return integers.reshape(-1)


def _thread_integers() -> npt.NDArray[np.uint32]:
    """Return this thread's memory for a segment.

    New memory costs more than what is computed in it; numpy's begins in the middle of a line of the cache.
    """
    integers: npt.NDArray[np.uint32] | None = getattr(_MEMORY, "integers", None)
    if integers is None:
        _MEMORY.integers = integers = np.frombuffer(untouched(4 * SEGMENT), np.uint32)
    return integers


def _of_finite(values: npt.NDArray[np.float32], absmax: float, zeros: int) -> SegmentSums | None:
    """Return the numbers of float32; None where they need float64, or are not finite."""
    if not (absmax == 0 or _SMALLEST < absmax < _LARGEST):  # also NaN
        return None
    total = squares = 0.0
    rows = len(values) // _ROW
    if rows:
        grid = values[: rows * _ROW].reshape(rows, 1, _ROW)
        # One dot product of BLAS for each row.
        squares = math.fsum(np.matmul(grid, grid.transpose(0, 2, 1)).reshape(-1).tolist())
        total = math.fsum(np.matmul(grid, _ONES).reshape(-1).tolist())
    rest = values[rows * _ROW :]
    if len(rest):
        squares += float(np.dot(rest, rest))
        total += float(np.dot(rest, _ONES[: len(rest), 0]))
    return SegmentSums((total, squares, absmax, 0, 0, zeros))


def _of_wide(values: Numbers) -> SegmentSums:
    """Return the numbers of float64."""
    finite = np.isfinite(values)
    nan = inf = 0
    zeros = len(values) - int(np.count_nonzero(values))
    if not finite.all():
        nan = int(np.isnan(values).sum())
        inf = len(values) - int(finite.sum()) - nan
        values = np.where(finite, values, 0.0)
    absmax = float(np.abs(values).max(initial=0.0))
    with np.errstate(over="ignore", invalid="ignore"):  # sums of the largest are infinite, of either sign
        total = float(np.sum(values))
    unit = _unit(absmax)
    scaled = np.ldexp(values, -unit) if unit else values
    return SegmentSums((total, float(np.sum(scaled * scaled)), absmax, nan, inf, zeros), {_NORM: unit})


def _unit(absmax: float) -> int:
    """Return the exponent of the power of two that values are divided by, so that float64 holds products."""
    return round(math.frexp(absmax)[1] / _UNIT) * _UNIT


def _pair_segment(dtypes: tuple[str, str], raws: Sequence[Bytes]) -> SegmentSums:
    """Return the numbers of a segment of two tensors: `COLUMNS` of each, squares of B - A, products."""
    (a_numbers, a_units), (b_numbers, b_units) = (
        segment(dtype, raw) for dtype, raw in zip(dtypes, raws, strict=True)
    )
    a, b = (_wide(dtype, raw) for dtype, raw in zip(dtypes, raws, strict=True))
    unit = _unit(max(a_numbers[_MAXIMUM], b_numbers[_MAXIMUM]))
    if unit:
        a, b = np.ldexp(a, -unit), np.ldexp(b, -unit)
    with np.errstate(invalid="ignore"):
        difference = b - a
    finite = np.isfinite(difference)
    if not finite.all():
        a, b, difference = (np.where(finite, side, 0.0) for side in (a, b, difference))
    together = (float(np.sum(difference * difference)), float(np.sum(a * b)))
    units = dict(a_units) | {len(COLUMNS) + n: exponent for n, exponent in b_units.items()}
    return SegmentSums((*a_numbers, *b_numbers, *together), units | {_CHANGE: unit, _PRODUCT: unit})


def _root(products: Mapping[int, float]) -> float:
    """Return the root of sums of products, each in its unit; infinite if it exceeds float64.

    A negative sum has a negative root.
    """
    top = max((unit for unit, total in products.items() if total), default=0)
    total = math.fsum(math.ldexp(total, 2 * (unit - top)) for unit, total in products.items() if total)
    root = math.copysign(math.sqrt(abs(total)), total)
    try:
        return math.ldexp(root, top)
    except OverflowError:
        return math.copysign(math.inf, root)


def _norm_of_norms(norms: Numbers) -> float:
    """Return the norm of a tensor from those of its boxes."""
    largest = float(norms.max())
    if not largest or math.isinf(largest):
        return largest
    shares = norms / largest
    return largest * math.sqrt(math.fsum((shares * shares).tolist()))


def _wide(dtype: str, raw: Bytes) -> Numbers:
    """Return elements in float64."""
    spec = BY_NAME[dtype]
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if spec.kind == "f" and spec.itemsize == 1:
        return _values_of_octets(dtype)[raw]
    if dtype == "complex32":
        return raw.view(np.float16).astype(np.float64)
    if spec.kind == "c":
        return raw.view(f"<f{spec.itemsize // 2}").astype(np.float64)
    kind = "u" if spec.kind == "b" else spec.kind
    return raw.view(f"<{kind}{spec.itemsize}").astype(np.float64)


def _values_of_octets(dtype: str) -> Numbers:
    """Return the values of all elements of one byte, by their bits."""
    import torch  # the only dtypes that numpy does not know

    octets = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(getattr(torch, dtype))
    values: Numbers = octets.float().double().numpy()
    return values


def _exact(numbers: npt.NDArray[Any]) -> float:
    total = ExactSum()
    for number in numbers.tolist():
        total.add(number)
    return total.value
