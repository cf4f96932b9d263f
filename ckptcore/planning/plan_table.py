"""Columns of a file plan: which tensors stand in the file where, and which bytes are known already?

A file of a large job holds thousands of tensors, and around each the same few bytes. Columns keep that in a
few arrays and texts; the objects are made when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.columnar_file import Array
from ckptcore.core.manifest import Ints, TensorSpec
from ckptcore.formats.base import Literal

_TENSORS, _LITERALS = "tensor.", "literal."


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of an output file, or the box of it that the file holds.

    name, dtype: as written. shape: of what the file holds. start: first byte in the file.
    source_dtype: as stored, or as computed; a cast is needed where it differs. offset: where the box
    begins in the tensor. full: the tensor's shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    source_dtype: str
    offset: tuple[int, ...]
    full: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return TensorSpec(self.name, self.dtype, self.shape).nbytes

    @property
    def box(self) -> Box:
        """What the file holds of the tensor."""
        return Box(self.offset, self.shape)


@dataclass(frozen=True)
class Tensors:
    """Planned tensors, in file order; row n is tensor n.

    names: as written. dtypes: names of dtypes; dtype, source_dtype: int8 [n] into them. start: int64 [n].
    rank: int64 [n]. offset, shape, full: int64 [n, R]; behind a tensor's own rank 0, 1 and 1.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    dtype: npt.NDArray[np.int8]
    source_dtype: npt.NDArray[np.int8]
    start: Ints
    rank: Ints
    offset: Ints
    shape: Ints
    full: Ints

    def __len__(self) -> int:
        return len(self.names)

    def rows(self) -> Iterator[PlannedTensor]:
        """The tensors as objects."""
        columns = (self.dtype, self.source_dtype, self.start, self.rank, self.offset, self.shape, self.full)
        told = zip(self.names, *(c.tolist() for c in columns), strict=True)
        for name, dtype, source, start, rank, offset, shape, full in told:
            yield PlannedTensor(
                name,
                self.dtypes[dtype],
                tuple(shape[:rank]),
                start,
                self.dtypes[source],
                tuple(offset[:rank]),
                tuple(full[:rank]),
            )

    def told(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, whole shape) of each tensor."""
        columns = zip(self.names, self.dtype.tolist(), self.rank.tolist(), self.full.tolist(), strict=True)
        for name, dtype, rank, full in columns:
            yield name, self.dtypes[dtype], tuple(full[:rank])

    def parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Head and arrays of a frame that holds these columns."""
        arrays: dict[str, Array] = {
            "dtype": self.dtype,
            "source": self.source_dtype,
            "start": self.start,
            "rank": self.rank,
            "offset": self.offset,
            "shape": self.shape,
            "full": self.full,
        }
        return {"names": list(self.names), "dtypes": list(self.dtypes)}, _under(_TENSORS, arrays)

    @classmethod
    def load(cls, head: Mapping[str, Any], arrays: Mapping[str, Array]) -> Tensors:
        """The columns of a frame."""
        a = {k: arrays[_TENSORS + k] for k in ("dtype", "source", "start", "rank", "offset", "shape", "full")}
        return cls(tuple(head["names"]), tuple(head["dtypes"]), *a.values())


@dataclass(frozen=True)
class Literals:
    """Known bytes, in file order; row n is literal n.

    texts: distinct byte strings. text: int64 [n] into them. start: int64 [n], first byte in the file.
    patches: int64 [m, 3] of (literal, place in its text, tensor), see `Literal.crc_at`.
    """

    texts: tuple[bytes, ...]
    text: Ints
    start: Ints
    patches: Ints

    @classmethod
    def of(cls, literals: Sequence[Literal]) -> Literals:
        """The columns of literals."""
        known: dict[bytes, int] = {}
        data = [x.data for x in literals]
        one = {id(d): known.setdefault(d, len(known)) for d in {id(d): d for d in data}.values()}
        text = np.array([one[id(d)] for d in data], np.int64)
        start = np.array([x.start for x in literals], np.int64)
        patches = [(n, *crc) for n, x in enumerate(literals) if x.crc_at for crc in x.crc_at]
        return cls(tuple(known), text, start, np.array(patches, np.int64).reshape(-1, 3))

    def rows(self) -> Iterator[Literal]:
        """The literals as objects; equal texts are one."""
        patches: dict[int, list[tuple[int, int]]] = {}
        for n, at, tensor in self.patches.tolist():
            patches.setdefault(n, []).append((at, tensor))
        for n, (text, start) in enumerate(zip(self.text.tolist(), self.start.tolist(), strict=True)):
            yield Literal(start, self.texts[text], tuple(patches.get(n, ())))

    def parts(self) -> dict[str, Array]:
        """Arrays of a frame that holds these columns."""
        data = self.texts[0] if len(self.texts) == 1 else b"".join(self.texts)
        arrays: dict[str, Array] = {
            "data": np.frombuffer(data, np.uint8),
            "start": self.start,
            "text": self.text,
            "length": np.array([len(t) for t in self.texts], np.int64),
            "patches": self.patches,
        }
        return _under(_LITERALS, arrays)

    @classmethod
    def load(cls, arrays: Mapping[str, Array]) -> Literals:
        """The columns of a frame."""
        a = {k: arrays[_LITERALS + k] for k in ("data", "length", "text", "start", "patches")}
        data, ends = a["data"].tobytes(), np.cumsum(a["length"]).tolist()
        texts = tuple(data[end - n : end] for end, n in zip(ends, a["length"].tolist(), strict=True))
        return cls(texts, a["text"], a["start"], a["patches"])


def _under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {prefix + k: a for k, a in arrays.items()}
