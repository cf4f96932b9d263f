"""Write `.metadata`, the pickle that `torch.distributed.checkpoint` expects.

Protocol 4 as CPython's own pickler encodes it, with only the globals and fields of torch 2.4
(torch/distributed/checkpoint/metadata.py, filesystem.py): no transform descriptors, no version, no storage
meta. Equal input gives equal bytes.

Tensors that are cut alike differ in their name and in where their items begin. A number's opcodes are as long
as those of other numbers of its class (`classes`): then nothing else in the rows of their places moves, and
the rows of one tensor are those of another filled with other numbers (`PlaceRows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptcore.utils.row_wise import any_rows

META = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"
Path = tuple[str | int, ...]
# Keys that are in the memo once the first chunk, and the first place, of a tensor are written.
_CHUNK = ((META, "ChunkStorageMetadata"), ("torch", "Size"), "offsets", "sizes")
_PLACE = (
    (META, "MetadataIndex"),
    (FILES, "_StorageInfo"),
    ("torch", "Size"),
    "fqn",
    "offset",
    "index",
    "relative_path",
    "length",
)
_START = b"\x80\x04\x95" + bytes(8)  # protocol, and the length of the frame
_LARGE = 1 << 12  # bytes of a part that is kept as it is
_BEGIN = b")\x81\x94}\x94("  # an instance, followed by its fields
Ints = npt.NDArray[np.int64]
Likeness = tuple[int, bytes, bytes]
_ENDS = np.array([1 << 8, 1 << 16, *(1 << bits for bits in range(31, 63, 8))], np.int64)
_WIDTHS = (1, 2, 4, 5, 6, 7, 8)  # bytes of a number of each class
_LONG = 2  # classes behind this one have their width behind the opcode


Stored = tuple[tuple[int, ...], tuple[int, ...]]  # offset and sizes of a chunk, in elements


class ItemPlace(NamedTuple):
    """The place of an item: file relative to the folder, first byte, number of bytes."""

    path: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, and its chunks in columns, which tensors that are cut alike share.

    Attributes:
        fqn: Its name.
        dtype: Its dtype.
        shape: Global shape.
        chunks: Offset and sizes of each chunk.
        paths: File of each chunk.
        places: First byte of each chunk in its file, and its bytes, int64 [n, 2].
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Stored, ...]
    paths: tuple[str, ...]
    places: npt.NDArray[np.int64]

    def place(self, n: int) -> ItemPlace:
        """Return the place of a chunk."""
        return ItemPlace(self.paths[n], *self.places[n].tolist())


def metadata_pickle(
    tensors: Sequence[StoredTensor],
    objects: Mapping[str, ItemPlace],
    paths: Mapping[str, Path] | None,
    mcore_data: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None,
) -> bytes:
    """Return the bytes of `.metadata`.

    Args:
        tensors: Tensors with their chunks.
        objects: Name -> place of its byte item.
        paths: Name -> path in the saved tree (``planner_data``); a name without one is at the top. None for
            a planner that records none (Megatron-Core saves without flattening).
        mcore_data: Megatron-Core's own attribute: name of a flattened tensor -> its original shape, under
            the key that Megatron-Core looks for. None leaves the attribute out.
    """
    p = _Pickle()
    p.begin(META, "Metadata")
    p.text("state_dict_metadata")
    # The order of the fields is that of torch's dataclass; readers take them by name.
    _state_dict(p, tensors, objects)
    p.text("planner_data")
    # From this `_EmptyStateDictLoadPlanner` builds the nested state dict: without it names stay flat.
    p.none() if paths is None else _planner(p, tensors, objects, paths)
    p.text("storage_data")
    _write_storage(p, tensors, objects)
    p.text("storage_meta")
    p.none()
    if mcore_data is not None:
        p.text("mcore_data")
        _write_shapes(p, mcore_data)
    p.end()
    return p.finish()


def _write_shapes(p: _Pickle, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    p.open_dict()
    for name, entry in shapes.items():
        p.text(name)
        p.open_dict()
        for key, shape in entry.items():
            p.text(key)
            p.mark()
            for n in shape:
                p.integer(n)
            p.close_tuple()
        p.close_dict()
    p.close_dict()


def _state_dict(p: _Pickle, tensors: Sequence[StoredTensor], objects: Mapping[str, ItemPlace]) -> None:
    p.open_dict()
    # Objects before tensors, in all three tables: an order of our own, the same in each.
    for name in objects:
        p.text(name)
        p.instance(META, "BytesStorageMetadata")
    for t in tensors:
        p.text(t.fqn)
        p.begin(META, "TensorStorageMetadata")
        p.text("properties")
        _properties(p, t.dtype)
        p.text("size")
        p.size(t.shape)
        p.text("chunks")
        _write_chunks(p, t)
        p.end()
    p.close_dict()


def _properties(p: _Pickle, dtype: str) -> None:
    # TensorProperties.__getstate__: (dtype, layout, requires_grad, memory format, pin_memory).
    p.instance(META, "TensorProperties")
    p.mark()
    p.glob("torch", dtype)
    p.call("torch.serialization", "_get_layout", "torch.strided")
    p.false()
    p.call(META, "_MEM_FORMAT_ENCODING", 0)
    p.false()
    p.close_tuple()
    p.build()


def _write_chunks(p: _Pickle, tensor: StoredTensor) -> None:
    p.open_list()
    for n, (offset, sizes) in enumerate(tensor.chunks):
        # The first chunk is written in full: it puts texts and globals into the
        # memo, to which the rest refer by number.
        if p.has_written(_CHUNK):
            key = id(tensor.chunks), n
            if key not in p.chunks:
                # The value holds the tuple itself, since another tuple might get the id of one that is freed.
                p.chunks[key] = tensor.chunks, *_chunks_alike(p, tensor.chunks[n:])
            p.add(*p.chunks[key][1:])
            break
        p.begin(META, "ChunkStorageMetadata")
        p.text("offsets")
        p.size(offset)
        p.text("sizes")
        p.size(sizes)
        p.end()
    p.close_list()


def _chunks_alike(p: _Pickle, chunks: Sequence[Stored]) -> tuple[bytes, int]:
    """Return what `_write_chunks` writes, with references for everything but the numbers.

    The second is how many values it memoizes.
    """
    head = p.reference(META, "ChunkStorageMetadata") + _BEGIN + p.reference("offsets")
    between = p.reference("sizes")
    out: list[bytes] = []
    memoized, sizes_of = 2 * len(chunks), p.sizes.get
    for offset, sizes in chunks:
        first, a = sizes_of(offset) or p.sized(offset)
        second, b = sizes_of(sizes) or p.sized(sizes)
        out += (head, first, between, second, b"ub")
        memoized += a + b
    return b"".join(out), memoized


def _planner(
    p: _Pickle, tensors: Sequence[StoredTensor], objects: Mapping[str, ItemPlace], paths: Mapping[str, Path]
) -> None:
    p.open_dict()
    for name in (*objects, *(t.fqn for t in tensors)):
        p.text(name)
        p.mark()
        for part in paths.get(name, (name,)):
            p.plain(part)
        p.close_tuple()
    p.close_dict()


def _write_storage(p: _Pickle, tensors: Sequence[StoredTensor], objects: Mapping[str, ItemPlace]) -> None:
    p.open_dict()
    # An object has neither offset nor index, and so no row in common with others.
    for name, place in objects.items():
        _write_index(p, name, None, None, place)
    for t in tensors:
        for n, (offset, _) in enumerate(t.chunks):
            if p.has_written(_PLACE):
                _stored_alike(p, t, n)
                break
            _write_index(p, t.fqn, offset, n, t.place(n))
    p.close_dict()


def _stored_alike(p: _Pickle, tensor: StoredTensor, first: int) -> None:
    """Write the same as `_write_index` for the chunks from ``first`` on, by references as `_chunks_alike`."""
    key = id(tensor.chunks), id(tensor.paths), first
    if key not in p.places:
        if not p.paths.keys() >= set(tensor.paths[first:]):
            _stored_new(p, tensor, first)
            return
        rows = [_place_head(p, tensor, n) for n in range(first, len(tensor.chunks))]
        heads, memoized = [head for head, _ in rows], sum(count for _, count in rows)
        p.places[key] = tensor.chunks, tensor.paths, heads, memoized
    _, _, heads, memoized = p.places[key]
    name, places = p.reference(tensor.fqn), tensor.places[first:]
    like, last = likeness(name, places), p.rows.get(key)
    # Equal likeness: every number has the width that it had in the last tensor's rows, so that nothing moves.
    if last is not None and last.likeness == like:
        p.add(last.filled(name, places[:, 0]), memoized)
        return
    begin = p.reference(META, "MetadataIndex") + _BEGIN + p.reference("fqn")
    # Tensors begin at the same byte in the files of most ranks, one after the other.
    begins = [0, *(np.flatnonzero(any_rows(places[1:] != places[:-1])) + 1).tolist()]
    ends: list[bytes] = []
    end_of = _place_ends(p)
    for start, stop, place in zip(begins, [*begins[1:], len(heads)], places[begins].tolist(), strict=True):
        ends += [end_of(*place)] * (stop - start)
    place_rows = p.rows[key] = PlaceRows.of(begin, name, heads, ends, len(p.reference("offset")), like)
    p.add(place_rows.opcodes.data, memoized)


def _stored_new(p: _Pickle, tensor: StoredTensor, first: int) -> None:
    """Do as `_stored_alike` where some files have no reference yet."""
    begin = p.reference(META, "MetadataIndex") + _BEGIN + p.reference("fqn") + p.reference(tensor.fqn)
    end_of = _place_ends(p)
    for n in range(first, len(tensor.chunks)):
        # A text's reference exists once it was written, at a position that
        # the memo decides: row by row until then.
        path = tensor.paths[n]
        if path in p.paths:
            head, memoized = _place_head(p, tensor, n)
            p.add(begin + head, memoized)
        else:  # the text itself, unless it was written before
            head, memoized = _index(p, tensor, n)
            p.add(begin + head, memoized)
            p.text(path)
            p.paths[path] = p.reference(path)
        p.add(end_of(*tensor.places[n].tolist()), 0)


def _place_head(p: _Pickle, tensor: StoredTensor, n: int) -> tuple[bytes, int]:
    """Return what follows a tensor's name up to the file of a chunk, and how many values that memoizes."""
    head, memoized = _index(p, tensor, n)
    return head + p.paths[tensor.paths[n]], memoized


def _index(p: _Pickle, tensor: StoredTensor, n: int) -> tuple[bytes, int]:
    where, memoized = p.sized(tensor.chunks[n][0])
    index = p.reference("offset") + where + p.reference("index") + number(n)
    place_begin = p.reference(FILES, "_StorageInfo") + _BEGIN + p.reference("relative_path")
    return index + b"ub" + place_begin, memoized + 4


def _place_ends(p: _Pickle) -> Callable[[int, int], bytes]:
    """Return what writes the end of a place: first byte, bytes."""
    offset, between, lengths = p.reference("offset"), p.reference("length"), p.lengths

    def end_of(start: int, length: int) -> bytes:
        last = lengths.get(length)
        if last is None:
            last = lengths[length] = between + number(length) + b"ub"
        return offset + number(start) + last

    return end_of


def _write_index(
    p: _Pickle, name: str, offset: tuple[int, ...] | None, index: int | None, place: ItemPlace
) -> None:
    p.begin(META, "MetadataIndex")
    p.text("fqn")
    p.text(name)
    p.text("offset")
    p.none() if offset is None else p.size(offset)
    p.text("index")
    p.none() if index is None else p.integer(index)
    p.end()
    p.begin(FILES, "_StorageInfo")
    p.text("relative_path")
    p.text(place.path)
    p.text("offset")
    p.integer(place.start)
    p.text("length")
    p.integer(place.length)
    p.end()


class _Pickle:
    """Emit protocol 4 opcodes, memoised as by CPython's pickler."""

    def __init__(self) -> None:
        self._out = bytearray(_START)
        # What precedes, in large parts that are copied once.
        self._parts: list[bytes | bytearray | memoryview] = []
        self._memo: dict[Any, int] = {}
        self._count = 0
        self.sizes: dict[tuple[int, ...], tuple[bytes, int]] = {}
        self.paths: dict[str, bytes] = {}  # references to the names of files
        self.lengths: dict[int, bytes] = {}  # ends of places of so many bytes
        # Of tensors that are cut alike: their columns, opcodes, and how many values these memoize.
        self.chunks: dict[tuple[int, int], tuple[Any, bytes, int]] = {}
        self.places: dict[tuple[int, int, int], tuple[Any, Any, list[bytes], int]] = {}
        self.rows: dict[tuple[int, int, int], PlaceRows] = {}  # the last of them

    def finish(self) -> bytes:
        """Return the complete pickle, in one frame."""
        # The length is known only now, and the frame's header has 8 bytes for it from the start.
        self._out += b"."
        parts, self._parts = [*self._parts, self._out], []
        length = sum(map(len, parts)) - len(_START)
        first = bytes(parts[0])
        parts[0] = first[: len(_START) - 8] + length.to_bytes(8, "little") + first[len(_START) :]
        return b"".join(parts)

    def none(self) -> None:
        self._out += b"N"

    def false(self) -> None:
        self._out += b"\x89"

    def mark(self) -> None:
        self._out += b"("

    def close_tuple(self) -> None:
        self._out += b"t"
        self._memoize(None)

    def build(self) -> None:
        self._out += b"b"

    def add(self, data: bytes | memoryview, memoized: int) -> None:
        """Add finished opcodes, which memoize this many values."""
        # Small pieces are joined as they come; copying a large one into
        # the growing buffer would double its memory.
        if len(data) < _LARGE:
            self._out += data
        else:
            self._parts += (self._out, data)
            self._out = bytearray()
        self._count += memoized

    def has_written(self, keys: Sequence[str | tuple[str, str]]) -> bool:
        """Return whether all of these texts and globals have been written."""
        return all(key in self._memo for key in keys)

    def reference(self, *key: str) -> bytes:
        """Return the reference to a text, or to a global by module and name."""
        return _reference(self._memo[key if len(key) > 1 else key[0]])

    def sized(self, dims: tuple[int, ...]) -> tuple[bytes, int]:
        """Return what `size` writes once torch.Size is known, and how many values that memoizes."""
        opcodes = self.sizes.get(dims)
        if opcodes is None:
            opcodes = self.sizes[dims] = self.reference("torch", "Size") + _size_tuple(dims), 3 if dims else 2
        return opcodes

    def integer(self, value: int) -> None:
        self._out += number(value)

    def plain(self, value: str | int) -> None:
        """Write a text or a number."""
        if isinstance(value, int):
            self.integer(value)
        else:
            self.text(value)

    def text(self, value: str) -> None:
        if self._wrote_reference(value):
            return
        # A name may hold a lone surrogate, from a file system's name that is no
        # UTF-8; CPython's pickler passes it, too.
        raw = value.encode("utf-8", "surrogatepass")
        short = len(raw) < 256
        self._out += (b"\x8c" + bytes([len(raw)]) if short else b"X" + len(raw).to_bytes(4, "little")) + raw
        self._memoize(value)

    def glob(self, module: str, name: str) -> None:
        """Write a class or function by name."""
        if self._wrote_reference((module, name)):
            return
        self.text(module)
        self.text(name)
        self._out += b"\x93"
        self._memoize((module, name))

    def call(self, module: str, name: str, argument: str | int) -> None:
        """Write a call with one argument; equal calls share their result."""
        key = module, name, argument
        if self._wrote_reference(key):
            return
        # CPython memoizes the argument, the tuple and the result, in
        # this order; a reader's numbers depend on it.
        self.glob(module, name)
        self.plain(argument)
        self._out += b"\x85"
        self._memoize(None)
        self._out += b"R"
        self._memoize(key)

    def size(self, dims: tuple[int, ...]) -> None:
        """Write a torch.Size."""
        self.glob("torch", "Size")
        self.add(_size_tuple(dims), 3 if dims else 2)

    def instance(self, module: str, name: str) -> None:
        """Write an object without its state."""
        self.glob(module, name)
        self._out += b")\x81"
        self._memoize(None)

    def begin(self, module: str, name: str) -> None:
        """Write an object; its fields follow, until `end`."""
        self.instance(module, name)
        self._out += b"}"
        self._memoize(None)
        self._out += b"("

    def end(self) -> None:
        self._out += b"ub"

    def open_dict(self) -> None:
        self._out += b"}"
        self._memoize(None)
        self._out += b"("

    def close_dict(self) -> None:
        self._out += b"u"

    def open_list(self) -> None:
        self._out += b"]"
        self._memoize(None)
        self._out += b"("

    def close_list(self) -> None:
        self._out += b"e"

    def _wrote_reference(self, key: Any) -> bool:
        position = self._memo.get(key)
        if position is None:
            return False
        self._out += _reference(position)
        return True

    def _memoize(self, key: Any) -> None:
        self._out += b"\x94"
        if key is not None:
            self._memo[key] = self._count
        self._count += 1


def number(value: int) -> bytes:
    r"""Return the opcodes of a number, as CPython's pickler writes them.

    >>> number(5), number(70000)
    (b'K\x05', b'Jp\x11\x01\x00')
    """
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    # Two's complement, little-endian, with room for the sign, as pickle's `encode_long`.
    n = value.bit_length() // 8 + 1
    return b"\x8a" + bytes((n,)) + value.to_bytes(n, "little", signed=True)


def _size_tuple(dims: tuple[int, ...]) -> bytes:
    """Return the opcodes of the tuple that follows torch.Size."""
    # Up to three elements have opcodes of their own without a mark; the empty tuple is never memoized.
    end = {0: b")", 1: b"\x85\x94", 2: b"\x86\x94", 3: b"\x87\x94"}.get(len(dims), b"t\x94")
    return b"".join((b"(" if len(dims) > 3 else b"", *map(number, dims), end, b"\x85\x94R\x94"))


def _reference(position: int) -> bytes:
    return b"h" + bytes((position,)) if position < 256 else b"j" + position.to_bytes(4, "little")


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
        # Numbers of one class have one width, so that a numpy write per byte fills all rows of it at once.
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
        # The name's reference has one length in all rows of a likeness, and a few bytes at most.
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
