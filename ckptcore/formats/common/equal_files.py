"""Find files of ranks that hold the same values: one is a copy in the place of another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ckptcore.encodings.torchzip.reader import Storages
from ckptcore.errors import Finding, finding
from ckptcore.formats.base import Source
from ckptcore.utils.distinct_values import unique

_SAMPLE = 1 << 16  # bytes of a tensor that are read to tell whether it is constant
_DISTINCT = 16  # values of four bytes that a tensor has which is not


def equal_files(source: Source, files: Iterable[tuple[str, Storages]]) -> Iterator[Finding]:
    """Yield findings for files whose storages have the same checksums in the same order.

    Args:
        source: The folder. Where checksums are equal, a part of a tensor is read: a constant proves nothing.
        files: Path and storages that are compared, of which no two may be equal.
    """
    first: dict[tuple[tuple[int, int | None], ...], str] = {}
    for path, stored in files:
        rows = tuple((length, crc) for _, length, crc in stored.values())
        if not rows or any(crc is None for _, crc in rows):
            continue
        first_path = first.setdefault(rows, path)
        if first_path != path and _varies(source, path, max(stored.values(), key=lambda row: row[1])):
            text = f"{path} and {first_path} hold the same values: one is in the place of another file"
            yield mixed(text, path)


def mixed(message: str, path: str) -> Finding:
    """Return the finding that a file is in the place of another."""
    hint = "copy the file again from the rank that wrote it, and keep its name"
    return finding("mixed-saves", "files", message, file=path, hint=hint)


def _varies(source: Source, path: str, storage: tuple[int, int, int | None]) -> bool:
    """Report whether a storage of a file has several values."""
    start, length, _ = storage
    size = min(length, _SAMPLE) // 4 * 4
    values = np.frombuffer(source.store.read(path, start, size), "<u4")
    return len(unique(values)) >= _DISTINCT
