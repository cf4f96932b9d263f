"""Write the places of a tensor's chunks as opcodes, by filling those of another tensor with other numbers.

Tensors that are cut alike differ in their name and in where their items begin. A number's opcodes are as long
as those of other numbers of its class (`classes`): then nothing else in the rows moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckptcore.utils.dataclass import dataclass

Ints = npt.NDArray[np.int64]
Likeness = tuple[int, bytes, bytes]
_ENDS = np.array([1 << 8, 1 << 16, *(1 << bits for bits in range(31, 63, 8))], np.int64)
_WIDTHS = (1, 2, 4, 5, 6, 7, 8)  # bytes of a number of each class
_LONG = 2  # classes behind this one have their width behind the opcode


def classes(numbers: Ints) -> npt.NDArray[np.int8]:
    """Return how each number is written; those of one class take as many bytes.

    >>> classes(np.array([255, 256, 70000, 1 << 31, 1 << 39])).tolist()
    [0, 1, 2, 3, 4]
    """
    return np.searchsorted(_ENDS, numbers, side="right").astype(np.int8)


@dataclass(frozen=True)
class PlaceRows:
    """The rows of one tensor.

    Attributes:
        opcodes: All of them, uint8.
        likeness: Length of the name's reference, classes of the first bytes, lengths of the items. Rows of a
            tensor with the same may be written by filling these.
        names: Where the reference to the name begins in each row, int64 [n].
        starts: Of each class of first bytes: bytes of a number, rows, and where their numbers begin.
    """

    opcodes: npt.NDArray[np.uint8]
    likeness: Likeness
    names: Ints
    starts: tuple[tuple[int, Ints, Ints], ...]

    @classmethod
    def of(
        cls,
        begin: bytes,
        name: bytes,
        heads: Sequence[bytes],
        ends: Sequence[bytes],
        offset: int,
        like: Likeness,
    ) -> PlaceRows:
        """Return rows, each ``begin + name + head + end``.

        Args:
            begin: What every row begins with.
            name: Reference to the tensor's name.
            heads: What follows the name in each row.
            ends: What follows that: the place.
            offset: Bytes of a place before its first number.
            like: The likeness.
        """
        data = b"".join(
            [part for head, end in zip(heads, ends, strict=True) for part in (begin, name, head, end)]
        )
        before = len(begin) + len(name) + np.fromiter(map(len, heads), np.int64, len(heads))
        nbytes = before + np.fromiter(map(len, ends), np.int64, len(ends))
        row = np.cumsum(nbytes) - nbytes
        kinds = np.frombuffer(like[1], np.int8)
        starts = []
        for kind in np.unique(kinds).tolist():
            rows = np.flatnonzero(kinds == kind)
            opcode = 2 if kind > _LONG else 1
            starts.append((_WIDTHS[kind], rows, row[rows] + before[rows] + offset + opcode))
        return cls(np.frombuffer(data, np.uint8), like, row + len(begin), tuple(starts))

    def filled(self, name: bytes, starts: Ints) -> memoryview:
        """Return the rows of another tensor of this likeness.

        Args:
            name: Reference to its name.
            starts: First byte of each item, int64 [n].
        """
        data = self.opcodes.copy()
        for n, byte in enumerate(name):
            data[self.names + n] = byte
        start_bytes = starts.astype("<i8").view(np.uint8).reshape(-1, 8)
        for width, rows, positions in self.starts:
            for n in range(width):
                data[positions + n] = start_bytes[rows, n]
        return data.data


def likeness(name: bytes, places: Ints) -> Likeness:
    """Return what rows of one likeness have in common, beside their chunks and files."""
    return len(name), classes(places[:, 0]).tobytes(), places[:, 1].tobytes()
