"""Read an output that is partly published: completed objects by ETag, other files where they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptcore.errors import SourceUnreadable
from ckptcore.store import Buffer, Readable, ReadObserver
from ckptcore.store.objects import ObjectSeen
from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.small_reads import PAGE, SHARED

MOST_PAGES = 256  # files whose first page is kept


class PinnedFiles:
    """A folder of objects of certain ETags, and of the files of another store.

    Args:
        client: The store of the objects.
        objects: Path -> object.
        staged_files: The other files.
        paths: Path -> size of each of them.
    """

    def __init__(
        self,
        client: S3Client,
        objects: Mapping[str, ObjectSeen],
        staged_files: Readable,
        paths: Mapping[str, int],
    ) -> None:
        self._client, self._objects, self._staged_files = client, objects, staged_files
        sizes = {path: s3_object.nbytes for path, s3_object in objects.items()}
        self._sizes = dict(sorted({**paths, **sizes}.items()))
        # Headers are at the beginning: they are read at once, not file by file.
        first = [path for path, s3_object in objects.items() if s3_object.nbytes][:MOST_PAGES]
        self._pages = dict(zip(first, client.each(self._first_page, first), strict=True))
        self.url = staged_files.url
        self.local: Path | None = None
        self.observer: ReadObserver | None = None

    def list(self) -> dict[str, int]:
        """Return every file: path -> size in bytes."""
        return dict(self._sizes)

    def size(self, path: str) -> int | None:
        """Return the size in bytes, or None when there is no such file."""
        return self._sizes.get(path)

    def stamp(self, path: str) -> str | None:
        """Return a text that names the version of a file, or None when there is no such file."""
        s3_object = self._objects.get(path)
        if s3_object is not None:
            return f"{s3_object.nbytes} bytes, version {s3_object.etag}"
        return self._staged_files.stamp(path) if path in self._sizes else None

    def ctime(self, path: str) -> int | None:
        """Return None: objects have no ctime."""
        return None

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes; raise `SourceChanged` if the object was replaced."""
        if path not in self._objects:
            return self._staged_files.read(path, start, length)
        data = bytearray(length)
        self.read_into(path, start, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly; raise `SourceChanged` if the object was replaced."""
        s3_object = self._objects.get(path)
        if s3_object is None:
            self._staged_files.read_into(path, start, into)
            return
        if start + len(into) > s3_object.nbytes:
            raise SourceUnreadable(
                f"{path} ends early: {len(into)} bytes needed at offset {start} (it has {s3_object.nbytes})",
                file=path,
            )
        page = self._pages.get(path, b"")
        if start + len(into) <= len(page):
            into[:] = page[start : start + len(into)]
        elif len(into):
            self._client.get(s3_object.key, start, s3_object.etag, into)

    def _first_page(self, path: str) -> bytes:
        s3_object = self._objects[path]
        return first_page(self._client, s3_object.key, s3_object.etag, s3_object.nbytes)

    def close(self) -> None:
        """Do nothing: the stores belong to the caller."""


def first_page(client: S3Client, key: str, etag: str, nbytes: int) -> bytes:
    """Return the first bytes of an object of one version, which are kept from then on."""
    version, length = (client.url, key, etag), min(PAGE, nbytes)
    page_bytes = SHARED.find(version, 0, length) if etag else None
    if page_bytes is None:
        page = bytearray(length)
        client.get(key, 0, etag, memoryview(page))
        page_bytes = bytes(page)
        if etag:
            SHARED.keep(version, 0, page_bytes)
    return page_bytes
