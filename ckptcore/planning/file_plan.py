"""File plans: everything that a worker needs to write one output file, and nothing else.

A `FilePlan` has the tensors of its file, or the boxes of them in one rank's file. It has the chunks that
overlap these (*reads*), in coordinates of the full tensor, with their items and source files. It is one
frame, readable alone on any worker.

Its data are columns (`Tensors`, `Literals`): a file of a large job has thousands of tensors, and the same few
bytes around each. Columns keep that in a few arrays and texts; objects are made on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core import columnar_file as frame
from ckptcore.core.box import Box
from ckptcore.core.columnar_file import Array, Spelled
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.file_layout import Literal
from ckptcore.core.manifest import (
    Chunks,
    Derived,
    Ints,
    Items,
    StoredFile,
    TensorSpec,
    dump_derived,
    load_derived,
)
from ckptcore.utils.row_wise import any_rows, prod_rows

PLACE, COMPARE = 0, 1
ITEM_COLUMNS = ("file", "start", "length", "envelope", "codec", "crc32")  # of `Items`, in its order
_TENSORS, _LITERALS = "tensor.", "literal."
_TENSOR_COLUMNS = ("dtype", "source", "start", "rank", "offset", "shape", "full")


@dataclass(frozen=True)
class FilePlan:
    """Everything a worker needs to write one file.

    Attributes:
        index: Number of the file, see `FileLayout`.
        path: Path in the output, see `FileLayout`.
        nbytes: Bytes, see `FileLayout`.
        commit: Whether it is written last, see `FileLayout`.
        source: Root URL of the source.
        columns: Its tensors.
        literal_columns: Its known bytes.
        reads: Chunk columns grouped by tensor; ``reads.item`` points into ``items``.
        op: int8 per read, PLACE or COMPARE.
        items: Items of the source that it needs.
        number: int64, their numbers in the source's manifest.
        files: Files of the source that it needs.
        derived: Position of a tensor -> how it is computed.
        inputs: Tensors that derived ones are computed from, as stored; their reads are behind those of the
            tensors.
        in_place: int64, numbers of ``items`` ordered by file and first byte, where they were sorted with
            those of other files.
    """

    index: int
    path: str
    nbytes: int
    commit: bool
    source: str
    columns: Tensors
    literal_columns: Literals
    reads: Chunks
    op: npt.NDArray[np.int8]
    items: Items
    number: Ints
    files: tuple[StoredFile, ...]
    derived: Mapping[int, Derived] = field(default_factory=dict)
    inputs: tuple[PlannedTensor, ...] = ()
    in_place: Ints | None = field(default=None, compare=False, repr=False)

    @cached_property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """Its tensors, in file order."""
        return tuple(self.columns.rows())

    @cached_property
    def summed_once(self) -> dict[int, int]:
        """Position of an input -> of the one tensor that it is summed for: each element is read once."""
        users: dict[int, list[int]] = {}
        for tensor, node in self.derived.items():
            for number in node.inputs:
                users.setdefault(number, []).append(tensor)
        return {n: t[0] for n, t in users.items() if len(t) == 1 and self.derived[t[0]].is_sum}

    @cached_property
    def literals(self) -> tuple[Literal, ...]:
        """Its known bytes, in file order."""
        return tuple(self.literal_columns.rows())

    @cached_property
    def bytes_in(self) -> int:
        """Source bytes of the elements it reads."""
        if not len(self.reads):
            return 0
        of = self.reads.tensor
        lo, hi, width = self.boxes
        begin = np.maximum(self.reads.lo, lo.take(of, axis=0))
        end = np.minimum(self.reads.lo + self.reads.shape, hi.take(of, axis=0))
        return int((width[of] * prod_rows(end - begin)).sum())

    @cached_property
    def boxes(self) -> tuple[Ints, Ints, Ints]:
        """First and last corners of its tensors and inputs, and the bytes of an element of each."""
        rank = self.reads.lo.shape[1]
        count = len(self.columns) + len(self.inputs)
        lo, hi = np.zeros((count, rank), np.int64), np.ones((count, rank), np.int64)
        width = np.ones(count, np.int64)
        tensor_count, column_rank = len(self.columns), min(rank, self.columns.offset.shape[1])
        lo[:tensor_count, :column_rank] = self.columns.offset[:, :column_rank]
        hi[:tensor_count, :column_rank] = (
            lo[:tensor_count, :column_rank] + self.columns.shape[:, :column_rank]
        )
        width[:tensor_count] = np.array([BY_NAME[d].itemsize for d in self.columns.dtypes], np.int64)[
            self.columns.source_dtype
        ]
        for n, t in enumerate(self.inputs, tensor_count):
            lo[n, : len(t.shape)], hi[n, : len(t.shape)] = t.offset, t.box.end
            width[n] = BY_NAME[t.source_dtype].itemsize
        return lo, hi, width

    @cached_property
    def requests(self) -> int:
        """Ranges of source files that it reads; items that touch count as one range."""
        items = self.items
        if not len(items):
            return 0
        order = self.in_place
        if order is None:
            keys = place_keys(items)
            # Two keys sort slower than one, but one may overflow.
            order = np.lexsort((items.start, items.file)) if keys is None else np.argsort(keys, kind="stable")
        file, start = items.file[order], items.start[order]
        # A range begins where the file changes, or a gap is before it; items
        # of one file that touch are read at once.
        end = start + items.length[order]
        return 1 + int(((file[1:] != file[:-1]) | (start[1:] > end[:-1])).sum())

    @property
    def weight(self) -> int:
        """Approximate bytes of memory."""
        text = sum(map(len, self.literal_columns.texts))
        return 200 * (len(self.reads) + len(self.columns) + len(self.literal_columns.text)) + text

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of the frame's content before compression."""
        return frame.digest(*self._parts())

    @property
    def dumped(self) -> bytes:
        """The frame of this file's plan, to be saved."""
        return frame.dump(*self._parts())

    def _parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return (head, arrays): the JSON values and the columns of the stored form."""
        r, i = self.reads, self.items
        tensors, arrays = self.columns.parts()
        head = {
            "index": self.index,
            "path": self.path,
            "nbytes": self.nbytes,
            "commit": self.commit,
            "source": self.source,
            "tensors": tensors,
            "files": [[f.path, f.size] for f in self.files],
            "codecs": list(i.codecs),
            "member": [[k, v] for k, v in sorted(i.member.items())],
        }
        if self.derived:
            head["derived"] = dump_derived(self.derived)
            head["inputs"] = [[t.name, t.dtype, list(t.shape)] for t in self.inputs]
        arrays |= self.literal_columns.parts()
        arrays |= {
            "first": r.first,
            "lo": r.lo,
            "shape": r.shape,
            "item": r.item,
            "op": self.op,
            **{f"i.{name}": getattr(i, name) for name in ITEM_COLUMNS},
            "number": self.number,
        }
        if r.view is not None:
            arrays["view"] = r.view
        if i.holds is not None:
            arrays["i.holds"] = i.holds
        return head, arrays

    @classmethod
    def load(cls, data: bytes) -> FilePlan:
        """Read the plan of a frame; raise `MalformedCheckpoint`."""
        h, a = frame.load(data)
        columns: dict[str, Any] = {name: a[f"i.{name}"] for name in ITEM_COLUMNS}
        return cls(
            h["index"],
            h["path"],
            h["nbytes"],
            h["commit"],
            h["source"],
            Tensors.load(h["tensors"], a),
            Literals.load(a),
            Chunks(a["first"], a["lo"], a["shape"], a["item"], a.get("view")),
            a["op"],
            Items(**columns, codecs=tuple(h["codecs"]), member=dict(h["member"]), holds=a.get("i.holds")),
            a["number"],
            tuple(StoredFile(p, s) for p, s in h["files"]),
            load_derived(h.get("derived", [])),
            tuple(stored_tensor(*row) for row in h.get("inputs", [])),
        )


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of an output file, or the box of it in that file.

    Attributes:
        name: As written.
        dtype: As written.
        shape: Shape of the box, elements.
        start: First byte in the file.
        source_dtype: As stored or computed; another one than ``dtype`` needs a cast.
        offset: Offset of the box in the tensor, elements.
        full: Shape of the tensor, elements.
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
        """Bytes of the box, as written."""
        return TensorSpec(self.name, self.dtype, self.shape).nbytes

    @property
    def box(self) -> Box:
        """The box of the tensor in the file."""
        return Box(self.offset, self.shape)


@dataclass(frozen=True)
class Tensors:
    """Planned tensors, in file order; row n is tensor n.

    Attributes:
        names: As written.
        dtypes: Names of dtypes.
        dtype: int8 [n], numbers in ``dtypes``, as written.
        source_dtype: int8 [n], numbers in ``dtypes``, as stored.
        start: int64 [n], first byte in the file.
        rank: int64 [n].
        offset: int64 [n, R], 0 behind a tensor's own rank.
        shape: int64 [n, R], 1 behind a tensor's own rank.
        full: int64 [n, R], 1 behind a tensor's own rank.
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

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of each box, as written."""
        width = np.array([BY_NAME[d].itemsize for d in self.dtypes], np.int64)
        nbytes: Ints = prod_rows(self.shape) * width[self.dtype]
        return nbytes

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The box of each tensor in the file; neighbours with equal boxes share one."""
        columns = np.column_stack((self.rank, self.offset, self.shape))
        differs = np.ones(len(self), np.bool_)
        differs[1:] = any_rows(columns[1:] != columns[:-1])
        distinct_boxes = [
            Box(tuple(offset[:rank]), tuple(shape[:rank]))
            for rank, offset, shape in zip(
                self.rank[differs].tolist(),
                self.offset[differs].tolist(),
                self.shape[differs].tolist(),
                strict=True,
            )
        ]
        return tuple(distinct_boxes[n] for n in (np.cumsum(differs) - 1).tolist())

    def rows(self) -> Iterator[PlannedTensor]:
        """Yield the tensors as objects."""
        rows = zip(self.names, *(c.tolist() for c in self._columns), strict=True)
        for name, dtype, source, start, rank, offset, shape, full in rows:
            yield PlannedTensor(
                name,
                self.dtypes[dtype],
                tuple(shape[:rank]),
                start,
                self.dtypes[source],
                tuple(offset[:rank]),
                tuple(full[:rank]),
            )

    def specs(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield (name, dtype, full shape) of each tensor."""
        columns = zip(self.names, self.dtype.tolist(), self.rank.tolist(), self.full.tolist(), strict=True)
        for name, dtype, rank, full in columns:
            yield name, self.dtypes[dtype], tuple(full[:rank])

    def parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return head and arrays of a frame with these columns."""
        arrays = dict(zip(_TENSOR_COLUMNS, self._columns, strict=True))
        return {"names": Spelled(self.names), "dtypes": list(self.dtypes)}, _with_prefix(_TENSORS, arrays)

    @classmethod
    def load(cls, head: Mapping[str, Any], arrays: Mapping[str, Array]) -> Tensors:
        """Read the columns of a frame."""
        columns = (arrays[_TENSORS + name] for name in _TENSOR_COLUMNS)
        return cls(tuple(head["names"]), tuple(head["dtypes"]), *columns)

    @property
    def _columns(self) -> tuple[Array, ...]:
        return self.dtype, self.source_dtype, self.start, self.rank, self.offset, self.shape, self.full


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
        """Return the columns of literals."""
        data = [x.data for x in literals]
        text_of_id = {id(d): d for d in data}
        # By identity first: writers use one object for bytes that recur. Hashing the metadata of a large job,
        # half a gigabyte, would take as long.
        if len(text_of_id) == 1:
            texts, text = tuple(text_of_id.values()), np.zeros(len(data), np.int64)
        else:
            index_of_text: dict[bytes, int] = {}
            index_of_id = {n: index_of_text.setdefault(d, len(index_of_text)) for n, d in text_of_id.items()}
            texts, text = tuple(index_of_text), np.array([index_of_id[id(d)] for d in data], np.int64)
        start = np.array([x.start for x in literals], np.int64)
        patches = [(n, *crc) for n, x in enumerate(literals) if x.crc_at for crc in x.crc_at]
        return cls(texts, text, start, np.array(patches, np.int64).reshape(-1, 3))

    def rows(self) -> Iterator[Literal]:
        """Yield the literals as objects; equal texts are one object."""
        patches: dict[int, list[tuple[int, int]]] = {}
        for n, offset, tensor in self.patches.tolist():
            patches.setdefault(n, []).append((offset, tensor))
        for n, (text, start) in enumerate(zip(self.text.tolist(), self.start.tolist(), strict=True)):
            yield Literal(start, self.texts[text], tuple(patches.get(n, ())))

    def parts(self) -> dict[str, Array]:
        """Return arrays of a frame with these columns."""
        data = self.texts[0] if len(self.texts) == 1 else b"".join(self.texts)
        arrays: dict[str, Array] = {
            "data": np.frombuffer(data, np.uint8),
            "start": self.start,
            "text": self.text,
            "length": np.array([len(t) for t in self.texts], np.int64),
            "patches": self.patches,
        }
        return _with_prefix(_LITERALS, arrays)

    @classmethod
    def load(cls, arrays: Mapping[str, Array]) -> Literals:
        """Read the columns of a frame."""
        a = {k: arrays[_LITERALS + k] for k in ("data", "length", "text", "start", "patches")}
        data, ends = a["data"].tobytes(), np.cumsum(a["length"]).tolist()
        texts = tuple(data[end - n : end] for end, n in zip(ends, a["length"].tolist(), strict=True))
        return cls(texts, a["text"], a["start"], a["patches"])


def place_keys(items: Items) -> Ints | None:
    """Return numbers that order items by file and first byte, None where these are too large for one."""
    room = int(items.start.max(initial=0)) + 1
    if (int(items.file.max(initial=0)) + 1) * room >= 1 << 62:
        return None
    return items.file * room + items.start


def stored_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> PlannedTensor:
    """Return a tensor that is read as it is stored, to compute another one."""
    return PlannedTensor(name, dtype, tuple(shape), 0, dtype, (0,) * len(shape), tuple(shape))


def _with_prefix(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {prefix + k: a for k, a in arrays.items()}
