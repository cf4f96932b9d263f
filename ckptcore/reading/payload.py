"""Find a chunk's elements inside its item.

A `StoredChunk` is a chunk's location and the manifest's description of it. An item is a range of a
file; its envelope is the container around the payload. Resolving reads a few KiB (or, behind a codec, decodes
the item once), checks the stored dtype and shape against the manifest, and returns a `Payload`. It happens
lazily, right before the bytes are moved or checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from ckptcore.core.byte_ledger import UnusedBytes
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Envelope, Item, View, is_row_major, row_major
from ckptcore.encodings.safetensors_header import parse_header
from ckptcore.encodings.torchzip.archive import Unused, Window
from ckptcore.encodings.torchzip.templates import read_tensor
from ckptcore.errors import (
    AlteredInTransit,
    ChecksumMismatch,
    DamagedCheckpoint,
    MalformedCheckpoint,
    UnreadablePart,
    UnsupportedFormat,
    finding,
)
from ckptcore.reading.decoded_items import DecodedItem, DecodedItems
from ckptcore.reading.zero_ranges import is_zero
from ckptcore.store import Buffer, Readable
from ckptcore.store.ahead import ReadsAhead
from ckptcore.utils.crc32 import crc32
from ckptcore.utils.globs import leave_out

if TYPE_CHECKING:
    from ckptcore.encodings.torchzip.reader import Resolved

ReadInto = Callable[[int, Buffer], None]  # (first byte, buffer to fill)
RangeVerifier = Callable[[int, int, int], None]  # (first byte, length, CRC-32) of every payload range read
Forget = Callable[[str, int, int], bool]  # (file, first byte, bytes)
_MAX_HEADER = 100_000_000


def late_imports(*, observed: bool) -> list[str]:
    """Return the modules that reads import when they first need them.

    Args:
        observed: Whether the files that are read get a digest.
    """
    return ["ckptcore.encodings.torchzip.reader", *(["awscrt.checksums"] if observed else [])]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Where one chunk is stored, and as what: an entry of DCP's ``storage_data``, with its chunk.

    Attributes:
        index: The item's number in the source's manifest.
        path: The file.
        item: The item.
        dtype: Dtype in the manifest.
        shape: Shape of the chunk.
        view: The chunk's layout in the item's payload, or None where only the item records it.
        fqn: The tensor's name, for messages.
    """

    index: int
    path: str
    item: Item
    dtype: str
    shape: tuple[int, ...]
    view: View | None
    fqn: str

    @property
    def nbytes(self) -> int:
        """Count the bytes of its elements."""
        return prod(self.shape) * BY_NAME[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.fqn} in {self.path}"


@dataclass(frozen=True, slots=True)
class Payload:
    """A chunk's resolved bytes.

    Attributes:
        read_into: Fills a buffer from a byte position.
        path: The file, or None behind a codec.
        start: First byte of the chunk.
        strides: Elements; None when row-major.
        flags: See `View`.
        record_start: First byte of the stored record around it.
        record_length: Bytes of that record.
        crc32: CRC-32 of that record, or None.
        forget: Drops what a remote store keeps of (file, first byte, bytes); None on this machine.
        unused: Bytes of its item that belong to nothing.
    """

    read_into: ReadInto
    path: str | None
    start: int
    strides: tuple[int, ...] | None
    flags: int
    record_start: int
    record_length: int
    crc32: int | None
    forget: Forget | None = None
    unused: tuple[UnusedBytes, ...] = ()

    def fill(self, start: int, into: Buffer, verify_range: RangeVerifier | None) -> None:
        """Fill ``into`` from byte ``start``, and report its CRC-32.

        Where a complete record came over a network and does not match its checksum, it is read once more: a
        bit may have flipped on the way.
        """
        self.read_into(start, into)
        if verify_range is None:
            return
        before = crc32(into)
        try:
            verify_range(start, len(into), before)
        except DamagedCheckpoint:
            # Bytes of this machine do not change on the way; of a part of a record nothing can be said.
            if self.forget is None or self.path is None or len(into) != self.record_length:
                raise
            self.forget(self.path, start, len(into))
            self.read_into(start, into)
            crc = crc32(into)
            # Twice the same wrong bytes: then the file is damaged, which the verifier says.
            if crc not in (before, self.crc32):
                raise AlteredInTransit(
                    f"a record of {self.path} came with CRC-32 {before:08x}, and again with {crc:08x} "
                    f"(must be {self.crc32 or 0:08x})"
                ) from None
            verify_range(start, len(into), crc)

    def close(self) -> None:
        """Release a decoded item."""
        close = getattr(self.read_into, "close", None)
        if close is not None:
            close()


def resolve(
    chunk: StoredChunk, store: Readable, scratch: str | None = None, decoded_items: DecodedItems | None = None
) -> Payload:
    """Find the payload of one chunk.

    Args:
        chunk: The chunk.
        store: The checkpoint's folder.
        scratch: Folder for decoded items, None for the default.
        decoded_items: Decoded items that other chunks view, too.

    Raises:
        DamagedCheckpoint: The stored bytes contradict the metadata; has a finding.
        UnreadablePart: The stored bytes are of a kind that ckptcore does not read.
    """
    try:
        if store.local is None and isinstance(store, ReadsAhead):
            return _resolve_remote(chunk, store, scratch, decoded_items)
        return _resolve(chunk, store, scratch, decoded_items)
    except ChecksumMismatch as error:
        raise _damaged("crc-mismatch", error.message, chunk) from error
    except UnreadablePart as error:
        hint = leave_out([chunk.fqn])
        unreadable = finding(
            "unreadable-part", "bytes", error.message, fqn=chunk.fqn, file=chunk.path, hint=hint
        )
        raise UnreadablePart(error.message, hint=hint, findings=(unreadable,), fqn=chunk.fqn) from error
    except MalformedCheckpoint as error:
        raise _damaged("malformed-item", error.message, chunk) from error


def _resolve_remote(
    chunk: StoredChunk, store: Readable, scratch: str | None, decoded_items: DecodedItems | None
) -> Payload:
    """Resolve a chunk whose bytes come over a network: what looks damaged is asked for once more."""
    assert isinstance(store, ReadsAhead)  # the caller has checked
    try:
        payload = _resolve(chunk, store, scratch, decoded_items)
    # Once: what is damaged in the store looks damaged twice.
    except MalformedCheckpoint:
        store.forget(chunk.path, chunk.item.start, chunk.item.length)
        payload = _resolve(chunk, store, scratch, decoded_items)
    return replace(payload, forget=store.forget) if payload.path is not None else payload


def _resolve(
    chunk: StoredChunk, store: Readable, scratch: str | None, decoded_items: DecodedItems | None
) -> Payload:
    """Find a chunk's elements in its item, by the headers that are in the item."""
    path, item, dtype, shape, view = chunk.path, chunk.item, chunk.dtype, chunk.shape, chunk.view
    read_into, base, length = _open_item(chunk, store, scratch, decoded_items)
    where: str | None = None if item.codec else path

    def read(start: int, count: int) -> bytes:
        if item.codec:
            buffer = bytearray(count)
            read_into(start, memoryview(buffer))
            return bytes(buffer)
        return store.read(path, base + start, count)

    if item.envelope is Envelope.RAW:
        # Row-major needs no strides, and a faster way of reading.
        layout = view or View()
        strides = None if is_row_major(shape, layout.strides) else layout.strides
        end = layout.start + _extent(shape, layout.strides, BY_NAME[dtype].itemsize)
        if end > length:
            raise MalformedCheckpoint(f"{chunk}: its item must have {end} bytes (got {length})")
        return Payload(read_into, where, base + layout.start, strides, layout.flags, base, length, item.crc32)
    if item.envelope is Envelope.TORCHZIP:
        window = Window(read, length)
        tensor = read_tensor(window, str(chunk))
        if view is not None:
            tensor = _view_of_view(tensor, view, chunk)
        else:
            _require_promised(tensor.dtype, tensor.shape, chunk)
        # A small item was read completely to resolve it: its elements are served from that.
        content = window.content
        return Payload(
            read_into if content is None or item.codec else _from_memory(content, base),
            where,
            base + tensor.view.start,
            tensor.view.strides,
            tensor.view.flags,
            base + tensor.record_start,
            tensor.record_length,
            tensor.crc32,
            unused=tuple(
                _in_file(chunk, unused) for unused in tensor.unused if not _is_padding(unused, item, read)
            ),
        )
    if item.envelope is Envelope.SAFETENSORS:
        start, nbytes = _member_range(read, length, chunk)
        if view is None:
            return Payload(read_into, where, base + start, None, 0, base + start, nbytes, None)
        strides = None if is_row_major(shape, view.strides) else view.strides
        tensor_start = base + start
        return Payload(
            read_into, where, tensor_start + view.start, strides, view.flags, tensor_start, nbytes, None
        )
    raise UnsupportedFormat(f"cannot read {chunk}: its envelope is {item.envelope.name.lower()}")


def _is_padding(unused: Unused, item: Item, read: Callable[[int, int], bytes]) -> bool:
    """Return whether bytes of a decoded item are padding; in a file, they are read later."""
    return bool(item.codec) and unused.padding and is_zero(read, unused.start, unused.end)


def _in_file(chunk: StoredChunk, unused: Unused) -> UnusedBytes:
    """Return unused bytes of a chunk's item as bytes of its file."""
    start, end, description, padding = unused
    item = chunk.item
    if not item.codec:
        return UnusedBytes(chunk.path, item.start + start, item.start + end, description, padding)
    description = (
        f"bytes [{start}, {end}) of what {item.codec} decodes{f': {description}' if description else ''}"
    )
    return UnusedBytes(chunk.path, item.start, item.start + item.length, description)


def _view_of_view(tensor: Resolved, view: View, chunk: StoredChunk) -> Resolved:
    """Resolve a chunk that is a view of an item's tensor, in row-major order of its elements."""
    dtype, shape = chunk.dtype, chunk.shape
    _require_inside(tensor.dtype, tensor.shape, view, chunk)
    start, strides = view.start, view.strides or row_major(shape)
    # The stored tensor is itself a view: places are translated to its storage.
    if tensor.view.strides is not None:
        itemsize = BY_NAME[dtype].itemsize
        storage_view = _in_storage(tensor.shape, tensor.view.strides, start // itemsize, shape, strides)
        if storage_view is None:
            raise UnreadablePart(
                f"{chunk}: cannot view {list(shape)} across rows of an item that does not store its "
                f"{list(tensor.shape)} row by row"
            )
        start, strides = storage_view[0] * itemsize, storage_view[1]
    return replace(
        tensor,
        dtype=dtype,
        shape=shape,
        view=View(
            tensor.view.start + start, None if is_row_major(shape, strides) else strides, tensor.view.flags
        ),
    )


def _in_storage(
    stored: tuple[int, ...],
    steps: tuple[int, ...],
    first: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> tuple[int, tuple[int, ...]] | None:
    """Translate a view of a tensor's elements in row-major order to storage.

    Args:
        stored: Shape of the tensor.
        steps: Strides of the tensor in storage.
        first: First element of the view, in row-major order.
        shape: Shape of the view.
        strides: Strides of the view, in row-major order.

    Returns:
        (first element, strides) in storage. None where the view goes from one of the tensor's rows to the
        next within a dim: no stride does that.
    """
    order = row_major(stored)
    ends = _digits(first, order)
    first_element, storage_strides = sum(n * s for n, s in zip(ends, steps, strict=True)), []
    for count, stride in zip(shape, strides, strict=True):
        digits = _digits(stride, order) if count > 1 else [0] * len(stored)
        ends = [e + (count - 1) * d for e, d in zip(ends, digits, strict=True)]
        storage_strides.append(sum(d * s for d, s in zip(digits, steps, strict=True)) if count > 1 else 1)
    # A stride that runs from one row into the next has no single stride in storage.
    if any(e >= n for e, n in zip(ends, stored, strict=True)):
        return None
    return first_element, tuple(storage_strides)


def _digits(element: int, order: tuple[int, ...]) -> list[int]:
    """Return the index of an element of a tensor with these row-major strides."""
    out = []
    for step in order:
        out.append(element // step)
        element %= step
    return out


def _require_inside(dtype: str, shape: tuple[int, ...], view: View, chunk: StoredChunk) -> None:
    """Raise `DamagedCheckpoint` unless the file matches the metadata and contains the view."""
    # Of a shared item the metadata has the shape, so both sides can be compared.
    expected = chunk.item.holds
    if expected is not None and (dtype, shape) != (chunk.dtype, expected):
        raise _damaged(
            "item-mismatch",
            f"{chunk}: metadata has {chunk.dtype} {list(expected)}, the file has {dtype} {list(shape)}",
            chunk,
        )
    itemsize = BY_NAME[chunk.dtype].itemsize
    end = view.start + _extent(chunk.shape, view.strides, itemsize)
    if dtype != chunk.dtype or end > prod(shape) * itemsize:
        raise _damaged(
            "item-mismatch",
            f"{chunk}: metadata has {chunk.dtype} {list(chunk.shape)} at byte {view.start} of an item, "
            f"the file has {dtype} {list(shape)}",
            chunk,
        )


def _require_promised(dtype: str, shape: tuple[int, ...], chunk: StoredChunk) -> None:
    """Raise `DamagedCheckpoint` unless the file matches the metadata."""
    if (dtype, shape) != (chunk.dtype, chunk.shape):
        raise _damaged(
            "item-mismatch",
            f"{chunk}: metadata has {chunk.dtype} {list(chunk.shape)}, the file has {dtype} {list(shape)}",
            chunk,
        )


def _from_memory(content: bytes, base: int) -> ReadInto:
    """Serve a small item from the read that resolved it."""

    def read_into(start: int, into: Buffer) -> None:
        offset = start - base
        into[:] = content[offset : offset + len(into)]

    return read_into


def _open_item(
    chunk: StoredChunk, store: Readable, scratch: str | None, decoded_items: DecodedItems | None
) -> tuple[ReadInto, int, int]:
    """Return (reader, the item's first byte for it, the item's plain length)."""
    path, item = chunk.path, chunk.item
    if not item.codec:
        return partial(store.read_into, path), item.start, item.length
    # A torch zip is its payload and a few KiB; storages may be padded.
    decode = partial(
        DecodedItem,
        store,
        path,
        item,
        2 * _most(chunk) + (1 << 20),
        scratch,
        None if decoded_items is None else decoded_items.room,
    )
    # Only items that several chunks view are worth keeping.
    if decoded_items is None or chunk.view is None:
        decoded = decode()
        return decoded, 0, decoded.length
    decoded = decoded_items.of(chunk.index, decode)
    return decoded.__call__, 0, decoded.length  # a bound method has no `close`: others read it, too


def _most(chunk: StoredChunk) -> int:
    """Count the bytes of the elements in a chunk's item, as far as the metadata records them."""
    stored = chunk.item.holds
    return chunk.nbytes if stored is None else prod(stored) * BY_NAME[chunk.dtype].itemsize


def _member_range(read: Callable[[int, int], bytes], length: int, chunk: StoredChunk) -> tuple[int, int]:
    """Return (first byte, bytes) of a named tensor in a safetensors blob that fills the rest of the file."""
    member = chunk.item.member
    if length < 8:
        raise MalformedCheckpoint(f"{chunk}: no safetensors blob at the item's range (got {length} bytes)")
    header = int.from_bytes(read(0, 8), "little")
    # Compared before it is read: eight bytes may claim any length.
    if header > min(length - 8, _MAX_HEADER):
        raise MalformedCheckpoint(f"{chunk}: safetensors header claims {header} bytes (got {length})")
    tensors, _ = _headers(read(8, header), length - 8 - header, str(chunk))
    if member not in tensors:
        raise _damaged("item-mismatch", f"{chunk}: the file has no tensor {member!r}", chunk)
    dtype, shape, start, end = tensors[member]
    if chunk.view is None:
        _require_promised(dtype, shape, chunk)
    else:
        _require_inside(dtype, shape, chunk.view, chunk)
    return 8 + header + int(start), int(end) - int(start)


_header_cache: dict[bytes, tuple[int, object]] = {}


def _headers(
    raw: bytes, data_length: int, label: str
) -> tuple[dict[str, tuple[str, tuple[int, ...], int, int]], object]:
    """Cache `parse_header`: every tensor of a file needs the same header."""
    cached = _header_cache.get(raw)
    if cached is not None and cached[0] == data_length:
        return cached[1]  # type: ignore[return-value]
    parsed = parse_header(raw, data_length, label)
    # Emptied rather than sorted by age: files come one after another.
    if len(_header_cache) > 64:
        _header_cache.clear()
    _header_cache[raw] = (data_length, parsed)
    return parsed


def _extent(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> int:
    """Count the bytes from a view's first element to the end of its last."""
    if 0 in shape:
        return 0
    if strides is None:
        count = itemsize
        for n in shape:
            count *= n
        return count
    return (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * itemsize


def _damaged(code: str, message: str, chunk: StoredChunk) -> DamagedCheckpoint:
    damage = finding(code, "bytes", message, fqn=chunk.fqn, file=chunk.path)
    return DamagedCheckpoint(message, findings=(damage,), fqn=chunk.fqn, file=chunk.path)
