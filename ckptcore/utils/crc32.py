"""CRC-32: of bytes, and of a whole from those of its parts, in any order of arrival.

ISA-L's, by vectors (https://github.com/intel/isa-l, crc/crc32_gzip_refl_by16_10.asm): zlib's takes six times
as long and more, which was half of what moving the bytes takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from isal.isal_zlib import crc32
from isal.isal_zlib import crc32_combine as combine

__all__ = ["CrcPieces", "Runs", "combine", "crc32"]

_MAX_PIECES = 8192


class CrcPieces:
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
