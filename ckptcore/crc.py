"""CRC-32 of a whole from the CRC-32s of its parts, in any order of arrival.

Joining two CRCs multiplies by a power of x in GF(2)[x] modulo the CRC polynomial, as zlib's
``crc32_combine`` does (crc32.c, `multmodp`, `x2nmodp`); Python's zlib module does not offer it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

_POLY = 0xEDB88320  # reflected, as in zlib
_MAX_PIECES = 8192


def combine(first: int, second: int, second_length: int) -> int:
    """CRC-32 of A + B from those of A and of B, and B's length in bytes.

    >>> import zlib
    >>> combine(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    if not first:
        return second
    moved = _moved(second_length)
    for digit in moved:
        second ^= digit[first & 15]
        first >>= 4
    return second


class Pieces:
    """The CRC-32 of a record whose pieces come in any order.

    length: bytes of the whole. `add` gives the record's CRC-32 when pieces from its first to its last byte
    have come, and None before. Bytes may come several times, in pieces of other lengths. Of very many
    pieces nothing comes: remembering them would cost more than reading the record once more.
    """

    __slots__ = ("_length", "_parts", "_seen")

    def __init__(self, length: int) -> None:
        self._length, self._seen = length, 0
        self._parts: dict[int, tuple[int, int]] = {}  # start -> (length, crc)

    def add(self, start: int, length: int, crc: int) -> int | None:
        """Adds the CRC-32 of bytes ``[start, start + length)``."""
        known = self._parts.get(start)
        if not length or (known is not None and known[0] >= length) or len(self._parts) >= _MAX_PIECES:
            return None
        self._parts[start] = (length, crc)
        self._seen += length
        if self._seen < self._length:
            return None
        whole = at = 0
        while at < self._length:  # every reader's pieces lie end to end, so the longest leads on
            step = self._parts.get(at)
            if step is None:
                return None
            whole, at = combine(whole, step[1], step[0]), at + step[0]
        return whole


class Runs:
    """The CRC-32s of what has come of a record, each byte once, in any order.

    Neighbours are joined at once, so that only gaps cost memory.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: dict[int, tuple[int, int]] = {}  # first byte -> (length, crc)
        self._ends: dict[int, int] = {}  # byte behind the last -> first byte

    def add(self, start: int, length: int, crc: int) -> None:
        """Adds the CRC-32 of bytes ``[start, start + length)``, of which none has come before."""
        end = start + length
        before = self._ends.pop(start, None)
        if before is not None:
            held, known = self._starts.pop(before)
            start, length, crc = before, held + length, combine(known, crc, length)
        behind = self._starts.pop(end, None)
        if behind is not None:
            end, length, crc = end + behind[0], length + behind[0], combine(crc, behind[1], behind[0])
        self._starts[start] = (length, crc)
        self._ends[end] = start

    def whole(self, length: int) -> int | None:
        """The CRC-32 of the record, once all ``length`` bytes have come."""
        found = self._starts.get(0)
        return found[1] if found is not None and found[0] == length else None

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(first byte, length, CRC-32) of every run, in order."""
        return ((start, *self._starts[start]) for start in sorted(self._starts))


def _multiply(a: int, b: int) -> int:
    product, bit = 0, 1 << 31
    while True:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                return product
        bit >>= 1
        if not bit:
            return product
        b = (b >> 1) ^ _POLY if b & 1 else b >> 1


@lru_cache(maxsize=1024)
def _moved(nbytes: int) -> tuple[tuple[int, ...], ...]:
    """By hexadecimal digit of a CRC, lowest first: what each value of it comes to behind so many bytes."""
    bits, value = [0] * 32, _shift(nbytes)
    for n in reversed(range(32)):  # reflected: the highest bit is x ** 0
        bits[n] = value
        value = (value >> 1) ^ _POLY if value & 1 else value >> 1
    found = []
    for n in range(0, 32, 4):
        digit = [0]
        for bit in bits[n : n + 4]:
            digit += [bit ^ other for other in digit]
        found.append(tuple(digit))
    return tuple(found)


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x ** (8 * nbytes) modulo the polynomial."""
    power, result, n = 0x00800000, 1 << 31, nbytes  # x ** 8, one
    while n:
        if n & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        n >>= 1
    return result
