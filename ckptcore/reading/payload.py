"""Resolving: where exactly are a chunk's elements inside its item?

An item names a range of a file; its envelope says what surrounds the payload. Resolving reads a
few kB (or, behind a codec, decodes the item once), checks that what is stored has the dtype and
shape that the manifest promised, and gives a `Payload`. It happens lazily, right before the
bytes are moved or checked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Envelope, Item, View, is_row_major
from ckptcore.encodings.codecs import decode_small, decode_to_file
from ckptcore.encodings.safetensors_header import parse_header
from ckptcore.encodings.torchzip.reader import Resolved, Window
from ckptcore.encodings.torchzip.templates import read_tensor
from ckptcore.errors import (
    ChecksumMismatch,
    DamagedCheckpoint,
    MalformedCheckpoint,
    UnreadablePart,
    UnsupportedFormat,
    finding,
)
from ckptcore.store import Buffer, Readable
from ckptcore.utils.globs import leave_out

ReadInto = Callable[[int, Buffer], None]  # (first byte, buffer to fill)
_IN_MEMORY = 8 << 20
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Payload:
    """A chunk's bytes, found.

    read_into: fills a buffer from a byte position. path: the file, or None behind a codec.
    start: first byte of the chunk. strides: elements; None when row-major. flags: see `View`.
    record_start, record_length: the stored record around it. crc32: of that record, or None.
    """

    read_into: ReadInto
    path: str | None
    start: int
    strides: tuple[int, ...] | None
    flags: int
    record_start: int
    record_length: int
    crc32: int | None

    def close(self) -> None:
        """Releases a decoded item."""
        close = getattr(self.read_into, "close", None)
        if close is not None:
            close()


def resolve(
    store: Readable,
    path: str,
    item: Item,
    dtype: str,
    shape: tuple[int, ...],
    view: View | None,
    name: str,
    scratch: str | None = None,
) -> Payload:
    """The payload of one chunk.

    name: the tensor's FQN, for messages. scratch: folder for decoded items, None for the default.
    Raises `DamagedCheckpoint` with a finding when what is stored is not what was promised.
    """
    what = f"{name} in {path}"
    try:
        found = _resolve(store, path, item, dtype, shape, view, what, scratch)
    except ChecksumMismatch as error:
        raise _damaged("crc-mismatch", "bytes", error.message, name, path) from error
    except UnreadablePart as error:
        hint = leave_out([name])
        told = finding("unreadable-part", "bytes", error.message, fqn=name, file=path, hint=hint)
        raise UnreadablePart(error.message, hint=hint, findings=(told,), fqn=name) from error
    except MalformedCheckpoint as error:
        raise _damaged("malformed-item", "bytes", error.message, name, path) from error
    return found


def _resolve(
    store: Readable,
    path: str,
    item: Item,
    dtype: str,
    shape: tuple[int, ...],
    view: View | None,
    what: str,
    scratch: str | None,
) -> Payload:
    read_into, base, length = _opened(store, path, item, dtype, shape, scratch)
    where: str | None = None if item.codec else path

    def read(start: int, count: int) -> bytes:
        if item.codec:
            buffer = bytearray(count)
            read_into(start, memoryview(buffer))
            return bytes(buffer)
        return store.read(path, base + start, count)

    nbytes = BY_NAME[dtype].itemsize
    for n in shape:
        nbytes *= n
    if item.envelope is Envelope.RAW:
        seen = view or View()
        strides = None if is_row_major(shape, seen.strides) else seen.strides
        end = seen.start + _extent(shape, seen.strides, BY_NAME[dtype].itemsize)
        if end > length:
            raise MalformedCheckpoint(f"{what}: {end} bytes are needed, the item has {length}")
        return Payload(read_into, where, base + seen.start, strides, seen.flags, base, length, item.crc32)
    if item.envelope is Envelope.TORCHZIP:
        window = Window(read, length)
        tensor = read_tensor(window, what)
        if view is not None:
            tensor = _inside(tensor, view, dtype, shape, what, path)
        elif (tensor.dtype, tensor.shape) != (dtype, shape):
            raise _damaged(
                "item-mismatch",
                "bytes",
                f"{what}: the metadata says {dtype} {list(shape)}, the file holds "
                f"{tensor.dtype} {list(tensor.shape)}",
                what.split(" in ")[0],
                path,
            )
        whole = window.whole
        return Payload(
            read_into if whole is None or item.codec else _from_memory(whole, base),
            where,
            base + tensor.view.start,
            tensor.view.strides,
            tensor.view.flags,
            base + tensor.record_start,
            tensor.record_length,
            tensor.crc32,
        )
    if item.envelope is Envelope.SAFETENSORS:
        start = base + _member(read, item, length, dtype, shape, what)
        return Payload(read_into, where, start, None, 0, start, nbytes, None)
    raise UnsupportedFormat(f"{what}: items in a {item.envelope.name.lower()} envelope are not read")


def _inside(
    tensor: Resolved, view: View, dtype: str, shape: tuple[int, ...], what: str, path: str
) -> Resolved:
    """A chunk that is a view into the elements of an item's tensor, in their row-major order."""
    itemsize = BY_NAME[dtype].itemsize
    held = prod(tensor.shape) * itemsize
    end = view.start + _extent(shape, view.strides, itemsize)
    if tensor.dtype != dtype or tensor.view.strides is not None or end > held:
        raise _damaged(
            "item-mismatch",
            "bytes",
            f"{what}: {dtype} {list(shape)} is to be taken from byte {view.start} of an item, which holds "
            f"{tensor.dtype} {list(tensor.shape)}",
            what.split(" in ")[0],
            path,
        )
    strides = None if is_row_major(shape, view.strides) else view.strides
    return replace(
        tensor,
        dtype=dtype,
        shape=shape,
        view=View(tensor.view.start + view.start, strides, tensor.view.flags),
    )


def _from_memory(whole: bytes, base: int) -> ReadInto:
    """Serves a small item from the read that resolved it."""

    def read_into(start: int, into: Buffer) -> None:
        at = start - base
        into[:] = whole[at : at + len(into)]

    return read_into


class _Decoded:
    """A decoded item: in memory when small, else in an unlinked file."""

    def __init__(self, store: Readable, path: str, item: Item, limit: int, scratch: str | None) -> None:
        self._lock = threading.Lock()
        self._data: bytes | None = None
        if limit <= _IN_MEMORY:
            raw = store.read(path, item.start, item.length)
            self._data = decode_small(item.codec, raw, limit, path)
            self.length = len(self._data)
        else:
            self._file, self.length = decode_to_file(
                item.codec, store, path, item.start, item.length, limit, scratch
            )

    def __call__(self, start: int, into: Buffer) -> None:
        if self._data is not None:
            got = self._data[start : start + len(into)]
            if len(got) != len(into):
                raise MalformedCheckpoint(f"decoded item ends at {self.length}")
            into[:] = got
            return
        done = 0
        while done < len(into):
            count = os.preadv(self._file.fileno(), [into[done:]], start + done)
            if not count:
                raise MalformedCheckpoint(f"decoded item ends at {self.length}")
            done += count

    def close(self) -> None:
        with self._lock:
            if self._data is None and not self._file.closed:
                self._file.close()


def _opened(
    store: Readable, path: str, item: Item, dtype: str, shape: tuple[int, ...], scratch: str | None
) -> tuple[ReadInto, int, int]:
    """(reader, where the item starts for it, the item's plain length)."""
    if not item.codec:
        return (lambda start, into: store.read_into(path, start, into)), item.start, item.length
    nbytes = BY_NAME[dtype].itemsize
    for n in shape:
        nbytes *= n
    # A torch zip is its payload and a few kB; storages may be padded.
    decoded = _Decoded(store, path, item, 2 * nbytes + (1 << 20), scratch)
    return decoded, 0, decoded.length


def _member(
    read: Callable[[int, int], bytes], item: Item, length: int, dtype: str, shape: tuple[int, ...], what: str
) -> int:
    """Where a named tensor starts in a safetensors blob that fills the rest of the file."""
    if length < 8:
        raise MalformedCheckpoint(f"{what}: no safetensors blob where the metadata says")
    header = int.from_bytes(read(0, 8), "little")
    if header > min(length - 8, _MAX_HEADER):
        raise MalformedCheckpoint(f"{what}: safetensors header claims {header} bytes of {length}")
    tensors, _ = _headers(read(8, header), length - 8 - header, what)
    if item.member not in tensors:
        raise _damaged(
            "item-mismatch", "bytes", f"{what}: the file holds no tensor {item.member}", item.member, what
        )
    seen_dtype, seen_shape, start, _ = tensors[item.member]
    if (seen_dtype, seen_shape) != (dtype, shape):
        raise _damaged(
            "item-mismatch",
            "bytes",
            f"{what}: the metadata says {dtype} {list(shape)}, the file holds {seen_dtype} "
            f"{list(seen_shape)}",
            item.member,
            None,
        )
    return 8 + header + int(start)


_header_cache: dict[bytes, tuple[int, object]] = {}


def _headers(
    raw: bytes, data_length: int, what: str
) -> tuple[dict[str, tuple[str, tuple[int, ...], int, int]], object]:
    """`parse_header`, remembered: every tensor of a file asks for the same header."""
    seen = _header_cache.get(raw)
    if seen is not None and seen[0] == data_length:
        return seen[1]  # type: ignore[return-value]
    parsed = parse_header(raw, data_length, what)
    if len(_header_cache) > 64:
        _header_cache.clear()
    _header_cache[raw] = (data_length, parsed)
    return parsed


def _extent(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> int:
    """Bytes from a view's first to behind its last element."""
    if 0 in shape:
        return 0
    if strides is None:
        count = itemsize
        for n in shape:
            count *= n
        return count
    return (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * itemsize


def _damaged(code: str, level: str, message: str, fqn: str, file: str | None) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        message, findings=(finding(code, level, message, fqn=fqn, file=file),), fqn=fqn, file=file
    )


__all__ = ["Payload", "ReadInto", "resolve"]
