"""Keep the chunks and places of DCP metadata in columns, and match each chunk to the item that holds it.

Both arrive row by row or in runs of many (`ckptcore.encodings.pickle.columns`). A chunk is found by its
tensor's name and its offset, as torch finds it (`MetadataIndex`). Of two places with one index the later
counts, as in a dict.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.encodings.pickle.unpickler import Columns, Names, Record, Sizes
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.dcp.metadata import Metadata, dims, row
from ckptcore.utils.ordering import order_in_groups

Ints = npt.NDArray[np.int64]
Ranks = npt.NDArray[np.int8]
_MOST_KEYS = 1 << 62
_CHUNKS, _PLACES = ("ChunkStorageMetadata",), ("MetadataIndex", "_StorageInfo")


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
        return _concatenated([widened(d, width) for d, _ in self._parts], width), ranks

    def _flush(self) -> None:
        if self._rank:
            rank = np.array(self._rank, np.int64)
            dims = np.zeros((len(rank), max(int(rank.max()), 0)), np.int64)
            # A mask in row order takes the flat sizes in exactly the order in which they were added.
            dims[np.arange(dims.shape[1]) < rank[:, None]] = np.array(self._flat, np.int64)
            self._parts.append((dims, rank.astype(np.int8)))
            self._flat, self._rank = array("q"), array("q")


def widened(table: Ints, width: int) -> Ints:
    """Return the table, with columns of zeros appended up to a width."""
    if table.shape[1] == width:
        return table
    out = np.zeros((len(table), width), np.int64)
    out[:, : table.shape[1]] = table
    return out


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
        """Match chunks with places.

        Args:
            places: Places of items.
            chunks: Chunks of tensors.
            shapes: Shapes of the tensors by number of their name, int64 [names, r].
            ranks: Number of dims by number of the name, int64 [names]; -2 for no tensor.
        """
        width = max(places.offset.shape[1], chunks.offset.shape[1], shapes.shape[1])
        keys = _Keys(widened(shapes, width), ranks)
        # One integer per name and offset: sorting integers is far cheaper than sorting rows.
        stored = keys.of(places.name, widened(places.offset, width), places.rank)
        listed = keys.of(chunks.name, widened(chunks.offset, width), chunks.rank)
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
