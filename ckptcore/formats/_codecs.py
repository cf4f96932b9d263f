"""Codecs: what were an item's bytes before they were compressed?

A codec makes an item sequential. Small items are decoded in memory, large ones into an unlinked
temporary file, so that memory stays what the caller planned for.
"""

from __future__ import annotations

import tempfile
from typing import BinaryIO

import zstandard

from ckptcore.errors import MalformedCheckpoint
from ckptcore.store import Store

_STEP = 1 << 20


def decode_small(codec: str, data: bytes, max_bytes: int, what: str) -> bytes:
    """The plain bytes of a whole compressed item; raises when they are more than ``max_bytes``."""
    return b"".join(_decoded(codec, iter([data]), max_bytes, what))


def decode_to_file(codec: str, store: Store, path: str, start: int, length: int, max_bytes: int,
                   folder: str | None) -> tuple[BinaryIO, int]:  # fmt: skip
    """The plain bytes in an unlinked temporary file below ``folder``, and their number."""
    parts = (store.read(path, start + at, min(_STEP, length - at)) for at in range(0, length, _STEP))
    out = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  the caller closes it
    total = 0
    for part in _decoded(codec, parts, max_bytes, path):
        out.write(part)
        total += len(part)
    out.flush()
    return out, total


def _decoded(codec: str, parts, max_bytes: int, what: str):  # type: ignore[no-untyped-def]
    if codec != "zstd":
        raise MalformedCheckpoint(f"{what}: unknown codec {codec!r}")
    decoder = zstandard.ZstdDecompressor().decompressobj(write_size=_STEP)
    total = 0
    try:
        for part in parts:
            for at in range(0, len(part), 64 << 10):
                plain = decoder.decompress(part[at : at + (64 << 10)])
                total += len(plain)
                if total > max_bytes:
                    raise MalformedCheckpoint(f"{what} unpacks to more than {max_bytes} bytes")
                if plain:
                    yield plain
    except zstandard.ZstdError as error:
        raise MalformedCheckpoint(f"{what}: zstd stream is damaged: {error}") from error
    if not decoder.eof:
        raise MalformedCheckpoint(f"{what}: zstd stream ends early")
