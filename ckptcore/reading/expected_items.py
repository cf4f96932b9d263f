"""Tell a remote source which items will be read, and in which order.

A module of its own: checks, and plans of files, use it without each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptcore.core.manifest import Envelope, Items, StoredFile
from ckptcore.store import Readable
from ckptcore.store.ahead import ExpectedReads, Ints, ReadsAhead
from ckptcore.utils.distinct_values import unique


def item_reads(items: Items, files: Sequence[StoredFile], rows: Ints) -> ExpectedReads:
    """Return the ranges of complete items that are read one after another; ``rows`` are their numbers."""
    when = np.arange(len(rows), dtype=np.float64)
    start = items.start[rows]
    return ExpectedReads(
        tuple(f.path for f in files),
        items.file[rows],
        start,
        start + items.length[rows],
        when,
        when + 1,
        bare_files(items, files),
    )


def bare_files(items: Items, files: Sequence[StoredFile]) -> frozenset[str]:
    """Return the files with items that no checksum of the format covers."""
    bare = (items.crc32 < 0) & (items.envelope != Envelope.TORCHZIP.value)
    return frozenset(files[n].path for n in unique(items.file[bare]).tolist())


def expect_items(store: Readable, reads: ExpectedReads, memory: int) -> None:
    """Declare reads, if the store reads ahead."""
    if isinstance(store, ReadsAhead):
        store.expect(reads, memory)
