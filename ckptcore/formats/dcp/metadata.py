"""Read DCP's `.metadata`: parse its pickle field by field, with a list of permitted globals.

Chunks and places are kept in columns, and each chunk is matched to the item that holds it. Both arrive row by
row or in runs of many (`ckptcore.encodings.pickle.columns`). A chunk is found by its tensor's name and its
offset, as torch finds it (`MetadataIndex`). Of two places with one index the later counts, as in a dict.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.manifest import with_dims
from ckptcore.core.metadata_budget import meter
from ckptcore.encodings.pickle.library_globals import PATHS
from ckptcore.encodings.pickle.torch_globals import COMMON, DTYPE_GLOBALS
from ckptcore.encodings.pickle.unpickler import (
    MEMBERS,
    Call,
    Columns,
    Names,
    Record,
    Sizes,
    enum_record,
    loads,
    record,
)
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.base import Source
from ckptcore.store.subfolder import FileRange, explain
from ckptcore.utils.memory import reuse_memory
from ckptcore.utils.ordering import order_in_groups
from ckptcore.utils.text import short_repr

_MAX_METADATA = 4 << 30
_MAX_DIM = 1 << 50
_META = "torch.distributed.checkpoint.metadata"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_CHUNK, _INDEX = ("offsets", "sizes"), ("fqn", "offset", "index")
_PLACE = ("relative_path", "offset", "length", "transform_descriptors")
# Records that are stored in columns when there are many: a tensor's chunks, and the places by name.
_RUNS = {"ChunkStorageMetadata": ("ChunkStorageMetadata",), "_StorageInfo": ("MetadataIndex", "_StorageInfo")}
# Permitted globals by module: class -> the fields kept of its state.
_CLASSES: dict[str, dict[str, tuple[str, ...]]] = {
    _META: {  # torch >= 2.3
        "Metadata": (),
        "TensorStorageMetadata": (),
        "BytesStorageMetadata": (),
        "TensorProperties": (),
        "StorageMeta": (),
        "ChunkStorageMetadata": _CHUNK,
        "MetadataIndex": _INDEX,
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": _PLACE},
    # torch 2.1 and 2.2.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties": ()},
    # Megatron-Core >= 0.11 adds each rank's plan of its save to the metadata.
    "torch.distributed.checkpoint.planner": {
        "SavePlan": (),
        "WriteItem": ("index", "type", "bytes_io_data", "tensor_data"),
        "TensorWriteData": ("chunk", "properties", "size"),
    },
    # OLMo-core's own storage layer, same fields (olmo_core/distributed/checkpoint/filesystem.py).
    "olmo_core.distributed.checkpoint.filesystem": {"_StorageInfo": _PLACE},
}
_ENUMS = (
    (_META, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
)
TABLE: dict[str, Any] = {
    **{
        f"{module}.{name}": record(
            name, *fields, run=_RUNS.get(name, ()), opens=name == "TensorStorageMetadata"
        )
        for module, names in _CLASSES.items()
        for name, fields in names.items()
    },
    **{f"{module}.{name}": enum_record(name) for module, name in _ENUMS},
    **MEMBERS,
    # megatron/core/dist_checkpointing/strategies/torch.py: 0.11 to 0.15, and 0.15.
    f"{_MCORE}.MCoreSavePlan": record("SavePlan"),
    f"{_MCORE}.MCoreMetadata": record("Metadata"),
    **COMMON,
    **DTYPE_GLOBALS,
    **PATHS,
    # Sizes are plain tuples here: metadata holds millions of them.
    "torch.Size": Call("torch.Size", lambda values=(): tuple(values), is_size=True),
}


CARRIED = ".metadata"  # the object of other attributes
# torch/distributed/checkpoint/metadata.py: where and by which call it was saved, which `origin` has in part.
_STORAGE_META = frozenset({"checkpoint_id", "save_id", "load_id", "modules"})
_PLANNED = frozenset({"all_local_plans", "mcore_data"})  # of Megatron-Core, which its own readers take
_OWN = frozenset({"state_dict_metadata", "storage_data", "planner_data", "version", "storage_meta"})
Ints = npt.NDArray[np.int64]
Ranks = npt.NDArray[np.int8]
_MOST_KEYS = 1 << 62
_CHUNKS, _PLACES = ("ChunkStorageMetadata",), ("MetadataIndex", "_StorageInfo")


class Metadata:
    """One parsed metadata file.

    Attributes:
        name: Path of the file.
        bound: Size of the file, an upper bound for its counts.
        tensors: ``state_dict_metadata``.
        storage: ``storage_data``, until its places are read.
        paths: ``planner_data``, unchecked.
        version: ``version``, unchecked.
        storage_meta: ``storage_meta``, unchecked.
        extra: Attributes that torch itself does not set.
    """

    def __init__(self, source: Source, name: str) -> None:
        size = source.listing[name]
        if not 0 < size <= _MAX_METADATA:
            raise MalformedCheckpoint(
                f"{name} must have between 1 and {_MAX_METADATA} bytes (got {size})", file=name
            )
        meter().require(size, name)
        reuse_memory(size)  # its memory becomes that of the columns
        data = source.store.read(name, 0, size)
        self.name, self.bound = name, size
        behind: list[int] = []
        top = loads(data, TABLE, label=name, behind=behind)
        if not isinstance(top, Record) or top.kind != "Metadata" or type(top.state) is not dict:
            raise MalformedCheckpoint(f"{name} does not contain torch checkpoint metadata", file=name)
        self.tensors = _mapping(top.state, "state_dict_metadata", name)
        self.storage = _mapping(top.state, "storage_data", name)
        self.paths = top.state.get("planner_data")
        self.version = top.state.get("version")
        self.storage_meta = top.state.get("storage_meta")
        self.extra = {k: v for k, v in top.state.items() if k not in _OWN}
        explain(source.store, name, 0, size - sum(behind))
        self._carry(FileRange(source.store, name, 0, size))

    def _carry(self, content: FileRange) -> None:
        """Record what torch and Megatron-Core do not write here, as values to carry."""
        state = getattr(self.storage_meta, "state", None)
        storage_attributes = (
            {k: v for k, v in state.items() if k not in _STORAGE_META} if type(state) is dict else {}
        )
        content.carry(
            CARRIED, {k: v for k, v in self.extra.items() if k not in _PLANNED} | storage_attributes
        )

    def origin(self) -> dict[str, Any]:
        """Return what the writer recorded about itself."""
        writer: dict[str, Any] = {}
        if isinstance(self.version, str):
            writer["metadata_version"] = self.version
        state = getattr(self.storage_meta, "state", None)
        if type(state) is dict and isinstance(state.get("save_id"), str):
            writer["save_id"] = state["save_id"]
        return writer

    def names(self) -> list[str]:
        """Return every name that a planner saved, if the metadata records them."""
        named = dict.fromkeys(n for n in self.paths if type(n) is str) if type(self.paths) is dict else {}
        plans = self.extra.get("all_local_plans")
        # Each list once: through the pickle's memo, a few bytes can repeat a plan without limit.
        lists = {
            id(items): items
            for plan in (plans if type(plans) is list else ())
            if isinstance(plan, Record)
            and type(plan.state) is dict
            and isinstance(items := plan.state.get("items"), (list, tuple))
        }
        for items in lists.values():
            for item in items:
                index, *_ = row(item, "WriteItem", self.name)
                fqn = row(index, "MetadataIndex", self.name)[0]
                if type(fqn) is str:
                    named[fqn] = None
        return list(named)


def row(value: Any, kind: str, name: str) -> tuple[Any, ...]:
    """Return the declared fields of a record of this class."""
    # A state pickled as a tuple instead of a dict may have any length.
    if (
        type(value) is Record
        and value.kind == kind
        and type(value.state) is tuple
        and len(value.state) == len(value.fields)
    ):
        state: tuple[Any, ...] = value.state
        return state
    raise MalformedCheckpoint(f"{name}: expected a {kind} (got {short_repr(value)})", file=name)


def state_of(value: Any, kind: str, name: str) -> dict[str, Any]:
    """Return the dict state of a record of this class."""
    if isinstance(value, Record) and value.kind == kind and type(value.state) is dict:
        return value.state
    raise MalformedCheckpoint(f"{name}: expected a {kind} (got {short_repr(value)})", file=name)


def _mapping(state: dict[str, Any], key: str, name: str) -> dict[Any, Any]:
    value = state.get(key)
    if type(value) is not dict:
        raise MalformedCheckpoint(f"{name} has no {key}", file=name)
    return value


def dims(value: Any, name: str) -> tuple[int, ...]:
    """Return a size or offset: at most 64 non-negative integers."""
    if type(value) in (tuple, list) and len(value) <= 64:
        for n in value:  # plain loop: metadata holds millions of sizes
            if type(n) is not int or not 0 <= n < _MAX_DIM:
                break
        else:
            return tuple(value)
    raise MalformedCheckpoint(
        f"{name}: a size must be at most 64 non-negative integers (got {short_repr(value)})", file=name
    )


class Table:
    """Rows of ``width`` integers, one at a time or many."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows = array("q")
        self._parts: list[Ints] = []

    def add(self, *values: int) -> None:
        """Add one row."""
        self._rows.extend(values)

    def extend(self, *columns: Ints) -> None:
        """Add a row per element of the columns."""
        # Rows that came one by one precede these; the order decides
        # which of two places with one index counts.
        self._flush()
        self._parts.append(np.stack(columns, axis=1))

    def done(self) -> Ints:
        """Return all rows, int64 [n, width]."""
        self._flush()
        return _concatenated(self._parts, self._width)

    def _flush(self) -> None:
        if self._rows:
            self._parts.append(np.array(self._rows, np.int64).reshape(-1, self._width))
            self._rows = array("q")


class Ragged:
    """Sizes of any rank, one at a time or many."""

    def __init__(self) -> None:
        self._flat, self._rank = array("q"), array("q")
        self._parts: list[tuple[Ints, Ranks]] = []

    def add(self, size: tuple[int, ...] | None) -> None:
        """Add one size; None is stored as rank -1."""
        self._rank.append(-1 if size is None else len(size))
        self._flat.extend(size or ())

    def extend(self, sizes: Sizes) -> None:
        """Add many sizes."""
        self._flush()
        self._parts.append((sizes.dims, sizes.rank))

    def done(self) -> tuple[Ints, Ranks]:
        """Return (dims int64 [n, r], 0 beyond a size's own rank; ranks int8 [n])."""
        self._flush()
        width = max((d.shape[1] for d, _ in self._parts), default=0)
        ranks = np.concatenate([np.zeros(0, np.int8), *(r for _, r in self._parts)])
        return _concatenated([with_dims(d, width, 0) for d, _ in self._parts], width), ranks

    def _flush(self) -> None:
        if self._rank:
            rank = np.array(self._rank, np.int64)
            dims = np.zeros((len(rank), max(int(rank.max()), 0)), np.int64)
            # A mask in row order takes the flat sizes in exactly the order in which they were added.
            dims[np.arange(dims.shape[1]) < rank[:, None]] = np.array(self._flat, np.int64)
            self._parts.append((dims, rank.astype(np.int8)))
            self._flat, self._rank = array("q"), array("q")


def _concatenated(parts: list[Ints], width: int) -> Ints:
    if not parts:
        return np.zeros((0, width), np.int64)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


class StringIds:
    """Numbers for texts, in the order of their first use."""

    def __init__(self, number: Callable[[str], int]) -> None:
        self._number = number
        self._columns: dict[int, tuple[list[str], Ints]] = {}  # by id of a column's list of texts
        self._ids: dict[str, int] = {}

    def of(self, text: str) -> int:
        """Return the number of one text."""
        number = self._ids.get(text)
        if number is None:
            number = self._ids[text] = self._number(text)
        return number

    def column(self, names: Names) -> Ints:
        """Return the number of each text of a column, int64 [n]."""
        _, table = self._columns.get(id(names.values), (names.values, np.zeros(0, np.int64)))
        if len(table) < len(names.values):
            unset = np.full(len(names.values) - len(table), -1, np.int64)
            table = np.concatenate([table, unset])
        rows = np.flatnonzero(table[names.ids] < 0)
        # Only texts that occur in these rows get a number, in the order of
        # their first use, as `of` would give them.
        if len(rows):
            new, first = np.unique(names.ids[rows], return_index=True)
            for n in new[np.argsort(first)].tolist():
                table[n] = self.of(names.values[n])
        # The list is kept beside its numbers: the id of a freed one may be that of another list.
        self._columns[id(names.values)] = names.values, table
        return table[names.ids]


@dataclass(frozen=True)
class MetadataChunks:
    """Chunks of one metadata file.

    Attributes:
        name: Number of the tensor's name, int64 [n].
        offset: Elements, int64 [n, r].
        shape: Elements, int64 [n, r].
        rank: Number of dims, int8 [n].
    """

    name: Ints
    offset: Ints
    shape: Ints
    rank: Ranks


class ChunkRows:
    """Collect the chunks that a metadata file lists."""

    def __init__(self, metadata: Metadata) -> None:
        self._file, self._bound = metadata.name, metadata.bound
        self._names, self._counts = array("q"), array("q")
        self._offsets, self._shapes = Ragged(), Ragged()
        self._count = 0
        self._checked: Any = None  # the state of the last chunk

    def add(self, name: int, chunks: list[Any]) -> None:
        """Add the chunks of a tensor, by the number of its name.

        Raises:
            MalformedCheckpoint: There is something else, or more than the file has room for.
        """
        # One list in the memo that is claimed a million times costs a few megabytes of pickle, and gigabytes
        # here.
        self._require_room(self._count + len(chunks))  # before any is copied; columns are not
        count = 0
        for chunk in chunks:
            if type(chunk) is Columns and chunk.kinds == _CHUNKS:
                offsets, sizes = chunk.fields[0]
                if not isinstance(offsets, Sizes) or not isinstance(sizes, Sizes):
                    raise MalformedCheckpoint(f"{self._file} has chunks without a size", file=self._file)
                self._offsets.extend(offsets)
                self._shapes.extend(sizes)
                count += chunk.count
                continue
            # Tensors of one shape share the state of their chunk.
            state = chunk.state if type(chunk) is Record and chunk.kind == _CHUNKS[0] else None
            # By identity, which is enough: equal states that are not shared are checked again.
            if state is None or state is not self._checked:
                state = row(chunk, _CHUNKS[0], self._file)
                dims(state[0], self._file)
                dims(state[1], self._file)
                self._checked = state
            self._offsets.add(state[0])
            self._shapes.add(state[1])
            count += 1
        self._names.append(name)
        self._counts.append(count)
        self._count += count
        # Again, since a run of columns counts as one element of the list above and holds many.
        self._require_room(self._count)

    def _require_room(self, count: int) -> None:
        # Every chunk takes far more than 8 bytes of pickle; shared lists could claim more chunks.
        if count * 8 > self._bound:
            raise MalformedCheckpoint(
                f"{self._file} claims more chunks than its size allows", file=self._file
            )

    def done(self, names: list[str]) -> MetadataChunks:
        """Return all chunks; ``names`` of the tensors are for messages."""
        offset, rank = self._offsets.done()
        shape, shape_rank = self._shapes.done()
        name = np.repeat(np.array(self._names, np.int64), np.array(self._counts, np.int64))
        # Found here and not per row, where one comparison per chunk would be most of the time.
        if (rank != shape_rank).any():
            fqn = names[int(name[(rank != shape_rank).argmax()])]
            raise MalformedCheckpoint(
                f"{self._file}: offset and size of a chunk of {fqn} differ in their number of dims",
                file=self._file,
            )
        return MetadataChunks(name, offset, shape, rank)


@dataclass(frozen=True)
class Places:
    """The places of items, as one metadata file records them.

    Attributes:
        name: Number of the item's name, int64 [n].
        offset: Elements, int64 [n, r].
        rank: Number of dims, int8 [n]; -1 without an offset.
        where: (file, first byte, bytes, codec), int64 [n, 4]. The file is negative when there is no place.
    """

    name: Ints
    offset: Ints
    rank: Ranks
    where: Ints

    def index(self, n: int) -> tuple[int, tuple[int, ...] | None]:
        """Return (name, offset) of an item."""
        rank = int(self.rank[n])
        return int(self.name[n]), None if rank < 0 else tuple(self.offset[n, :rank].tolist())


def places(
    metadata: Metadata,
    names: StringIds,
    files: StringIds,
    place: Callable[[tuple[Any, ...], str], tuple[int, int, int, int]],
    codec: Callable[[Any, str], int],
) -> Places:
    """Return the places of the items of a metadata file, and take them out of it: both would be gigabytes.

    Args:
        metadata: The metadata file.
        names: Ids of the items' names.
        files: Ids of the files.
        place: Fields of a storage entry and name of the metadata -> checked (file, first byte, bytes, codec).
        codec: Transforms of an item and name of the metadata -> codec.

    Raises:
        MalformedCheckpoint: A storage entry has no name or no place. ``place`` and ``codec`` may raise more.
    """
    name, where, offsets = Table(1), Table(4), Ragged()
    rows = list(metadata.storage.items())
    metadata.storage = {}
    # From the end, as `pop` takes them: each entry is freed once its row is in the columns.
    rows.reverse()
    while rows:
        index, info = rows.pop()
        if type(index) is Columns and index.kinds == _PLACES:
            _add_run(index, metadata, names, files, codec, (name, where, offsets))
            continue
        fqn, offset, _ = row(index, "MetadataIndex", metadata.name)
        fields = row(info, "_StorageInfo", metadata.name)
        offsets.add(None if offset is None else dims(offset, metadata.name))
        if type(fqn) is not str:
            raise MalformedCheckpoint(f"{metadata.name} stores an item without a name", file=metadata.name)
        name.add(names.of(fqn))
        where.add(*place(fields, metadata.name))
    offset, rank = offsets.done()
    return Places(name.done()[:, 0], offset, rank, where.done())


def _add_run(
    run: Columns,
    metadata: Metadata,
    names: StringIds,
    files: StringIds,
    codec: Callable[[Any, str], int],
    into: tuple[Table, Table, Ragged],
) -> None:
    name, where, offsets = into
    (fqn, offset, _), (path, start, length, transforms) = run.fields
    # The pattern of a run fixes which columns are names, sizes and numbers; other types are malformed.
    if (
        not isinstance(fqn, Names)
        or not (offset is None or isinstance(offset, Sizes))
        or not isinstance(path, Names)
        or not isinstance(start, np.ndarray)
        or not isinstance(length, np.ndarray)
        or transforms is not None
    ):
        raise MalformedCheckpoint(f"{metadata.name} has storage entries without a place", file=metadata.name)
    none = Sizes(np.zeros((run.count, 0), np.int64), np.full(run.count, -1, np.int8))
    offsets.extend(offset if isinstance(offset, Sizes) else none)
    name.extend(names.column(fqn))
    where.extend(files.column(path), start, length, np.full(run.count, codec(None, metadata.name), np.int64))


class Join:
    """Chunks matched with the places of one metadata file by name and offset.

    Attributes:
        place: Place of each chunk, int64 [n]; -1 for none.
    """

    def __init__(self, places: Places, chunks: MetadataChunks, shapes: Ints, ranks: Ints) -> None:
        """Match chunks with places; shapes and ranks (-2 for no tensor) are by the number of a name."""
        width = max(places.offset.shape[1], chunks.offset.shape[1], shapes.shape[1])
        keys = _Keys(with_dims(shapes, width, 0), ranks)
        # One integer per name and offset: sorting integers is far cheaper than sorting rows.
        stored = keys.of(places.name, with_dims(places.offset, width, 0), places.rank)
        listed = keys.of(chunks.name, with_dims(chunks.offset, width, 0), chunks.rank)
        order = order_in_groups(stored, places.name)
        ordered = stored[order]
        last = np.ones(len(order), np.bool_)
        last[:-1] = ordered[1:] != ordered[:-1]
        self._counts = np.zeros(len(order), np.bool_)  # places that no later one replaces
        self._counts[order] = last
        self.place = np.full(len(listed), -1, np.int64)
        # Folders that torch wrote list chunks and places in one order: then nothing has to be searched.
        if np.array_equal(ordered, listed) and last.all() and (ordered[:1] >= 0).all():
            self.place = order  # each chunk in order, and its place
        elif len(order):
            # Of equal keys the last: that is the place that counts, as in a dict that is written twice.
            matches = np.maximum(np.searchsorted(ordered, listed, side="right") - 1, 0)
            same = (ordered[matches] == listed) & (listed >= 0)
            self.place[same] = order[matches[same]]
        self._places = places
        odd = np.flatnonzero(stored < 0)  # objects, and offsets outside of the tensor's shape
        self._odd = {places.index(n): n for n in odd.tolist()}
        self._counts[odd] = False
        self._counts[list(self._odd.values())] = True
        for n in np.flatnonzero(listed < 0).tolist():
            rank = int(chunks.rank[n])
            self.place[n] = self._odd.get((int(chunks.name[n]), tuple(chunks.offset[n, :rank].tolist())), -1)
        # Both sides of the match are columns: what no chunk asked for is found without a set of all items.
        self._hit = np.zeros(len(order), np.bool_)
        self._hit[self.place[self.place >= 0]] = True

    def object(self, name: int) -> int:
        """Return the place of an object by the number of its name, -1 for none."""
        place = self._odd.get((name, None), -1)
        if place >= 0:
            self._hit[place] = True
        return place

    def unlisted(self) -> Iterator[tuple[int, tuple[int, ...] | None]]:
        """Yield (name, offset) of every place that belongs to no chunk and no requested object."""
        for n in np.flatnonzero(self._counts & ~self._hit).tolist():
            yield self._places.index(n)


class _Keys:
    """Encode a tensor's name and an offset in it as one integer."""

    def __init__(self, shapes: Ints, ranks: Ints) -> None:
        self._shapes, self._ranks = shapes, ranks
        base, total = [], 0
        for shape, rank in zip(shapes.tolist(), ranks.tolist(), strict=True):
            # A key counts all offsets of the tensors before it, so it must fit in 64 bits.
            base.append(min(total, _MOST_KEYS))
            room = 1 if rank >= 0 else 0
            for n in shape:  # the offset of an empty chunk may be the end
                room *= n + 1
            total += room
        self._base = np.array(base, np.int64)
        self._fit = total < _MOST_KEYS

    def of(self, name: Ints, offset: Ints, rank: Ranks) -> Ints:
        """Return the key of each row, -1 where the tensor cannot have that offset."""
        if not self._fit:  # shapes too large for any storage: row by row
            return np.full(len(name), -1, np.int64)
        flat = np.zeros(len(name), np.int64)
        fits = self._ranks.take(name) == rank
        for d in range(offset.shape[1]):
            extent, begin = np.ascontiguousarray(self._shapes[:, d]).take(name), offset[:, d]
            fits &= begin <= extent
            extent += 1
            flat *= extent
            flat += begin
        flat += self._base.take(name)
        flat[~fits] = -1
        return flat
