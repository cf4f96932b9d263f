"""Open a checkpoint whose tensors are read: its store, its records, and the stamps of its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ckptcore.checking.source_stamps import require_same, stamp_files
from ckptcore.core.box import Box
from ckptcore.core.file_sums import FileSums
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.planning.tiles import Tiles
from ckptcore.reading.box_reader import BoxReader
from ckptcore.reading.checksums import RecordProgress, Records
from ckptcore.reading.gather import tile_view
from ckptcore.store import open_source_store

_SMALL = 1 << 20
SideProgress = tuple[RecordProgress, FileSums | None]
"""What a process has read of a checkpoint: its records, and its files if they are observed."""


class OpenSide:
    """One checkpoint that is read. label: its name in errors."""

    def __init__(self, label: str, manifest: Manifest) -> None:
        self.label, self.manifest = label, manifest
        self.store = open_source_store(manifest.root, manifest.versions)
        self.store.observer = manifest.sums
        self.records = Records(self.store, len(manifest.items))
        self._stamps = stamp_files(manifest, self.store)
        self.tiles: Tiles | None = None  # of a process that reads one job after the other

    @property
    def observes(self) -> bool:
        """Whether the reads of its files are observed, for their digests."""
        return self.manifest.sums is not None

    def progress(self) -> SideProgress:
        """Return what this process has read, for `join` in another one."""
        return self.records.progress(), self.manifest.sums

    def join(self, reports: Sequence[SideProgress]) -> None:
        """Add what other processes have read."""
        self.records.join([records for records, _ in reports])
        for _, sums in reports:
            if sums is not None and self.manifest.sums is not None:
                self.manifest.sums.add(sums)

    @property
    def unverified(self) -> int:
        """Number of stored items that were read and have no checksum."""
        return self.records.unverified

    def reader(self, row: int) -> BoxReader:
        """Return a reader of a tensor's boxes."""
        return BoxReader(self.manifest, row, self.records)

    def read(self, row: int) -> bytes:
        """Read the bytes of a small tensor."""
        spec = self.manifest.tensors[row]
        data, box = np.empty(spec.nbytes, np.uint8), Box.full(spec.shape)
        with labelled(self.label):
            reader = self.reader(row)
            try:
                reader.read(box, tile_view(data, spec.shape, spec.dtype), np.empty(_SMALL, np.uint8))
            finally:
                reader.close()
        return data.tobytes()

    def finish(self) -> None:
        """Verify partly read records, and the files' stamps; raise `DamagedCheckpoint` or `SourceChanged`."""
        with labelled(self.label):
            self.records.finish()
            require_same(self._stamps, self.store)


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Prefix the messages of errors inside with the label of a checkpoint."""
    try:
        yield
    except CkptError as error:
        error.message = f"{label}: {error.message}"
        error.args = (error.message,)
        raise


@contextmanager
def closing_sides(sides: Sequence[OpenSide]) -> Iterator[None]:
    """Close the stores of checkpoints at the end."""
    try:
        yield
    finally:
        for side in sides:
            side.store.close()
