"""Read and write folders of S3 buckets.

Reading goes through `ckptcore.store.objects`; writing is that of every fsspec file system.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ckptcore.errors import SourceUnreadable
from ckptcore.store import Buffer, Stamped
from ckptcore.store.ahead import ExpectedReads, StoreProof
from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.reader import FolderReader
from ckptcore.store.remote import FsspecStore


class S3Store(FsspecStore):
    """A folder of a bucket; see `ckptcore.store.Store` and `ckptcore.store.ahead.ReadsAhead`."""

    pins = True

    def __init__(
        self, url: str, *, pinned: bool = False, versions: Mapping[str, str | None] | None = None
    ) -> None:
        """Prepare reads and writes; nothing is sent yet.

        Args:
            url: The folder.
            pinned: Read every object in one version, that of the first look. Nothing is written here.
            versions: Path -> stamp of objects that were seen before, and must still be the same.
        """
        super().__init__(url)
        self.client = client_of(self.url)
        _, _, key = self._root.strip("/").partition("/")
        self.prefix = f"{key}/" if key else ""
        self._reader = FolderReader(self.client, self.prefix, self.url, pinned=pinned, versions=versions)

    def stamped(self) -> dict[str, Stamped]:
        """List the objects with size and version, as they are now."""
        found = self._reader.stamped()
        if not found:
            raise SourceUnreadable(f"{self.url} does not exist or is empty", absent=True)
        return found

    def list(self) -> dict[str, int]:
        """List the objects: relative path -> size in bytes. A pinned folder is listed once."""
        known = self._reader.listed()
        return known if known is not None else super().list()

    def look(self, path: str) -> Stamped | None:
        """Return size and version of one object, or None when there is no such object."""
        return self._reader.look(path)

    def stamp(self, path: str) -> str | None:
        """Return the size and version as they are now, as a text, or None when there is no such object."""
        seen = self._reader.now(path)
        return None if seen is None else seen.stamp

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes."""
        return self._reader.read(path, start, length)

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly."""
        self._reader.read_into(path, start, into)

    def expect(self, reads: ExpectedReads, memory: int) -> None:
        """Read ahead what is expected, with at most ``memory`` bytes of blocks."""
        self._reader.expect(reads, memory)

    def forget(self, path: str, start: int, length: int) -> bool:
        """Drop what is kept of a range, so that the next read asks the store again."""
        return self._reader.forget(path, start, length)

    def prove(self) -> StoreProof:
        """Compare what was read of the expected bare files with the store's checksums."""
        return self._reader.prove()

    def close(self) -> None:
        """Give up requests that read ahead."""
        self._reader.close()


_clients: dict[tuple[int, str], S3Client] = {}
_lock = threading.Lock()


def client_of(url: str) -> S3Client:
    """Return the client of a URL's bucket; stores of one file system share it."""
    made = S3Client(url)
    with _lock:
        return _clients.setdefault((id(made.file_system), made.bucket), made)
