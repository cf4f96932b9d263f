"""Account for every byte of the files that a reader has read.

A byte of a checkpoint's file is stored in an item (the payload of a tensor or an object), or it is structure:
an encoding has read or checked it, or its page says what it is. What is neither belongs to nothing, and
`unused_bytes` lists it. Nothing is read for the account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ckptcore.core.byte_ledger import ByteLedger, UnusedBytes
from ckptcore.core.manifest import Ints, Manifest


def unused_bytes(manifest: Manifest) -> tuple[UnusedBytes, ...] | None:
    """List the bytes of a checkpoint's files that belong to no tensor, object or structure.

    The files are those of which the reader has taken something. Nothing was taken of the others of the place:
    those of `Manifest.beside`, and those that were only read for a comparison. What only reading shows is not
    among them (`ckptcore.reading.unused_in_items`).

    Args:
        manifest: A manifest from `ckptcore.formats.read_manifest`.

    Returns:
        Ranges in the order of files and bytes. None where it is not known what the files hold beside items:
        the manifest was loaded, or its reader gives no account.
    """
    # Without any structure the reader gives no account at all:
    # everything beside its items would be called unused.
    ledger = manifest.ledger
    if ledger is None or not ledger.structure:
        return None
    files = _accounted_files(manifest, ledger)
    number = {path: n for n, (path, _) in enumerate(files)}
    sizes = np.array([size for _, size in files], np.int64)
    table = _Table(sizes)
    # Files of items that are not accounted for (missing ones) get -1, which the table skips.
    items, file_numbers = manifest.items, np.array([number.get(f.path, -1) for f in manifest.files], np.int64)
    if len(items):
        table.add(file_numbers[items.file], items.start, items.start + items.length)
    for path, parts in ledger.structure.items():
        if path in number:
            for part in parts:
                table.add(np.full(len(part), number[path], np.int64), part[:, 0], part[:, 1])
    # Padding is not among them until it was read whether it is zero (`unread_padding`).
    left = sorted({u for u in ledger.unused if u.file in number and not u.padding}, key=_place(number))
    rows = np.array([(number[span.file], span.start, span.end) for span in left], np.int64).reshape(-1, 3)
    table.add(*rows.T)
    gaps = [UnusedBytes(files[f][0], a, b) for f, a, b in table.gaps()]
    return tuple(sorted([*gaps, *left], key=_place(number)) if left else gaps)


def unread_padding(manifest: Manifest) -> tuple[UnusedBytes, ...]:
    """Return ranges that are padding if all of their bytes are zero, which the reading has not looked at."""
    ledger = manifest.ledger
    return () if ledger is None else tuple(span for span in ledger.unused if span.padding)


def accounted_files(manifest: Manifest) -> frozenset[str]:
    """Return the files of which the reader took something; each byte is explained, or in `unused_bytes`.

    What is not among them is another program's: nothing in it is known to be elsewhere.
    """
    ledger = manifest.ledger
    if ledger is None or not ledger.structure:
        return frozenset()
    return frozenset(path for path, _ in _accounted_files(manifest, ledger))


def _place(number: Mapping[str, int]) -> Callable[[UnusedBytes], tuple[int, int, int]]:
    return lambda span: (number[span.file], span.start, span.end)


def _accounted_files(manifest: Manifest, ledger: ByteLedger) -> list[tuple[str, int]]:
    """Return (path, size) of the files of which something was taken."""
    stores = np.zeros(len(manifest.files), np.bool_)
    stores[manifest.items.file] = True
    # Files that the checkpoint stores something in, also where no structure is reported; those without
    # an item count if their structure was read.
    files = [
        f
        for f, some in zip(manifest.files, stores.tolist(), strict=True)
        if some or f.path in ledger.structure
    ]
    files += [f for f in manifest.described if f.path in ledger.structure]
    return [(f.path, f.size) for f in files if f.size]


class _Table:
    """Ranges of several files, and what is between them."""

    # The empty ranges at both ends make gaps at the beginning and end of a file into gaps between two ranges.
    def __init__(self, sizes: Ints) -> None:
        count = np.arange(len(sizes), dtype=np.int64)
        self._sizes, self._room = sizes, int(sizes.max(initial=0)) + 1
        # Each file begins with an empty range, and one ends it.
        self._file, self._start, self._end = [count, count], [0 * sizes, sizes], [0 * sizes, sizes]

    def add(self, file: Ints, start: Ints, end: Ints) -> None:
        """Add ranges; those of file -1 are skipped, and what is behind a file's end is cut off."""
        has_file = file >= 0
        if not has_file.all():
            file, start, end = file[has_file], start[has_file], end[has_file]
        last = self._sizes[file]
        self._file.append(file)
        self._start.append(np.clip(start, 0, last))
        self._end.append(np.clip(end, 0, last))

    def gaps(self) -> Iterator[tuple[int, int, int]]:
        """Yield (file, start, end) of what no range covers."""
        file, start, end = map(np.concatenate, (self._file, self._start, self._end))
        if not len(file):
            return
        # One number for file and byte sorts faster than two columns, unless it overflows.
        if len(self._sizes) * self._room < 1 << 62:
            key = file * self._room + start
            order = slice(None) if bool((key[1:] >= key[:-1]).all()) else np.argsort(key, kind="stable")
        else:
            # A range may be inside of an earlier, longer one, so what counts is
            # the highest end so far, not the last one.
            order = np.lexsort((start, file))
        file, start, end = file[order], start[order], end[order]
        reach = _running_max(file, end, self._room)
        behind = np.flatnonzero((file[1:] == file[:-1]) & (start[1:] > reach[:-1]))
        for row in behind.tolist():
            yield int(file[row]), int(reach[row]), int(start[row + 1])


def _running_max(file: Ints, end: Ints, room: int) -> Ints:
    """Return the highest end of each file's rows so far; rows of a file are together."""
    if (int(file[-1]) + 1) * room < 1 << 62:
        # Each file's numbers are above those of the files before it,
        # so one running maximum serves all of them.
        return np.maximum.accumulate(file * room + end) - file * room
    bounds = np.flatnonzero(np.diff(file)) + 1
    return np.concatenate([np.maximum.accumulate(part) for part in np.split(end, bounds)])
