"""Declare the byte ranges that will be read, so that a remote store fetches them ahead, in few requests.

A store that gains nothing by it, such as a local folder, is not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpectedReads:
    """Ranges of files that will be read. Row i is range i.

    Attributes:
        paths: Files.
        file: Index into ``paths``.
        start: First byte.
        end: Byte behind the last.
        begins: When its first byte is read: any number that grows with time.
        ends: When its last byte is read, in the same unit.
        bare: The files with bytes that no checksum of their format covers.
        band: Ranges of different bands are not fetched together: their times are far apart. None for one.
    """

    paths: tuple[str, ...]
    file: Ints
    start: Ints
    end: Ints
    begins: Floats
    ends: Floats
    bare: frozenset[str] = frozenset()
    band: Ints | None = None

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True)
class StoreProof:
    """What the store's own checksums prove about the bytes that were read.

    Attributes:
        proven: Files all of whose bytes match a checksum that the store keeps.
        unproven: Files that the store keeps no checksum of, or that were read in small part.
    """

    proven: frozenset[str] = frozenset()
    unproven: frozenset[str] = frozenset()


@runtime_checkable
class ReadsAhead(Protocol):
    """A store that reads ahead what is expected, within a memory budget."""

    @property
    def pins(self) -> bool:
        """Whether each file is read in one version, so that a change needs no second look."""

    def expect(self, reads: ExpectedReads, memory: int) -> None:
        """Replace the expectations; ``memory`` is the most that blocks may take, bytes."""

    def forget(self, path: str, start: int, length: int) -> bool:
        """Drop what is kept of a range, so that the next read asks the store again.

        Returns:
            Whether that can make a difference: bytes come over a network.
        """

    def prove(self) -> StoreProof:
        """Compare what was read of the expected bare files with the store's checksums.

        Raises:
            StorageTrouble: Bytes were altered on the way here.
            DamagedCheckpoint: The store's bytes do not match its checksum.
        """


def joined(parts: Sequence[ExpectedReads]) -> ExpectedReads:
    """Return the reads of several steps that follow each other, as one."""
    shifts, offset = [], 0.0
    for part in parts:
        shifts.append(offset)
        # One more, so that the reads of two steps never have the same time.
        offset += (float(part.ends.max()) if len(part) else 0.0) + 1
    return merged(parts, shifts)


def merged(parts: Sequence[ExpectedReads], shifts: Sequence[float] | None = None) -> ExpectedReads:
    """Return reads as one; ``shifts`` are added to their times, and without them all have the same clock."""
    paths: dict[str, int] = {}
    columns: list[list[npt.NDArray[Any]]] = [[], [], [], [], [], []]
    for part, shift in zip(parts, shifts or [0.0] * len(parts), strict=True):
        number = np.array([paths.setdefault(p, len(paths)) for p in part.paths], np.int64)
        band = np.zeros(len(part), np.int64) if part.band is None else part.band
        row = (number[part.file], part.start, part.end, part.begins + shift, part.ends + shift, band)
        for column, values in zip(columns, row, strict=True):
            column.append(values)
    file, start, end, band = (
        np.concatenate([np.zeros(0, np.int64), *column]) for column in (*columns[:3], columns[5])
    )
    begins, ends = (np.concatenate([np.zeros(0), *column]) for column in columns[3:5])
    bare = frozenset[str]().union(*(part.bare for part in parts))
    banded = any(part.band is not None for part in parts)
    return ExpectedReads(tuple(paths), file, start, end, begins, ends, bare, band if banded else None)
