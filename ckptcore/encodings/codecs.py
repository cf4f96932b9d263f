"""Decompress items.

A codec makes an item sequential. Small items are decoded in memory, large ones into an unlinked
temporary file, so that memory stays within the caller's plan.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol

import zstandard

from ckptcore.errors import MalformedCheckpoint
from ckptcore.store import Buffer, Readable
from ckptcore.utils.memory import untouched

_STEP = 1 << 20
# 4 bytes can encode a block of 128 KiB, so this much input gives at most 16 MiB of output.
_FEED = 512
_MAX_WINDOW = 128 << 20  # the window of zstd's highest ordinary levels


def decode_small(codec: str, data: bytes, max_bytes: int, label: str) -> bytes:
    """Return the plain bytes of a complete compressed item; raises when they exceed ``max_bytes``."""
    return b"".join(_decode_steps(codec, io.BytesIO(data), max_bytes, label))


def decode_into(
    codec: str, store: Readable, path: str, start: int, length: int, max_bytes: int
) -> tuple[Buffer, int]:
    """Return memory with the plain bytes of an item, and their number; both are the kernel's when dropped."""
    stored, plain, total = untouched(length)[:length], untouched(max_bytes), 0
    store.read_into(path, start, stored)
    for part in _decode_steps(codec, _InMemory(stored), max_bytes, path):
        plain[total : total + len(part)] = part
        total += len(part)
    return plain, total


def decode_to_file(
    codec: str, store: Readable, path: str, start: int, length: int, max_bytes: int, folder: str | None
) -> tuple[BinaryIO, int]:
    """Write the plain bytes to an unlinked temporary file below ``folder``; return it and their number."""
    import tempfile  # late: few checkpoints have encoded items, and it imports `random`

    out = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  the caller closes it
    try:
        total = decode_to_place(codec, store, path, start, length, max_bytes, (out.fileno(), 0))
    except BaseException:
        out.close()
        raise
    return out, total


def decode_to_place(
    codec: str, store: Readable, path: str, start: int, length: int, max_bytes: int, place: tuple[int, int]
) -> int:
    """Write the plain bytes to ``place``, a file and its first byte for them; return their number."""
    file, begin = place
    source, total = io.BufferedReader(_Range(store, path, start, length), _STEP), 0
    pending, waiting = list[bytes](), 0

    def flush() -> None:
        data = memoryview(b"".join(pending))
        written = 0
        while written < len(data):
            written += os.pwrite(file, data[written:], begin + total - waiting + written)
        pending.clear()

    for part in _decode_steps(codec, source, max_bytes, path):
        pending.append(part)
        total, waiting = total + len(part), waiting + len(part)
        if waiting >= _STEP:
            flush()
            waiting = 0
    flush()
    return total


class _Reads(Protocol):
    """A stream of bytes."""

    def read(self, count: int, /) -> bytes:
        """Return the next bytes, at most ``count``; none at the end."""


class _InMemory:
    """Memory as a stream. `io.BytesIO` would copy it."""

    def __init__(self, data: Buffer) -> None:
        self._data, self._position = data, 0

    def read(self, count: int, /) -> bytes:
        self._position += count
        return bytes(self._data[self._position - count : self._position])


class _Range(io.RawIOBase):
    """A range of a stored file as a stream."""

    def __init__(self, store: Readable, path: str, start: int, length: int) -> None:
        self._store, self._path, self._position, self._end = store, path, start, start + length

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:  # any writable buffer: collections.abc has no name for it yet
        view = memoryview(into)[: max(self._end - self._position, 0)]
        self._store.read_into(self._path, self._position, view)
        self._position += len(view)
        return len(view)


def _decode_steps(codec: str, source: _Reads, max_bytes: int, label: str) -> Iterator[bytes]:
    """Yield the plain bytes in steps; a small input can expand to any number of them."""
    if codec != "zstd":
        raise MalformedCheckpoint(f"{label}: unknown codec {codec!r}")
    decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
    total = 0
    try:
        while part := source.read(_FEED):
            plain = decoder.decompress(part)
            total += len(plain)
            if total > max_bytes:
                raise MalformedCheckpoint(f"{label} unpacks to more than {max_bytes} bytes")
            if plain:
                yield plain
            if decoder.eof:
                break
    except zstandard.ZstdError as error:
        raise MalformedCheckpoint(f"{label}: cannot decode the zstd stream: {error}") from error
    if not decoder.eof or decoder.unused_data or source.read(1):
        raise MalformedCheckpoint(f"{label}: the zstd stream does not end where its item ends")
