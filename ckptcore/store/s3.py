"""Read and write folders of S3 buckets.

Every request goes through `ckptcore.store.objects`, whose one layer repeats requests. Files with tensors are
uploaded by handles (`ckptcore.store.objects.uploads`); what is written here is small, in one request each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckptcore.errors import CkptError, DestinationUnwritable, SourceUnreadable, UsageError
from ckptcore.store import Buffer, FileWriter, Store
from ckptcore.store.file_status import FileStatus
from ckptcore.store.objects import MAX_REQUEST_BYTES, of_object
from ckptcore.store.objects.client import S3Client, require_small
from ckptcore.store.objects.reader import FolderReader
from ckptcore.store.objects.retry import Kind, kind_of
from ckptcore.store.objects.session import share_service_models
from ckptcore.store.objects.shared_clients import client_of, key_of
from ckptcore.store.remote import FsspecStore, FsspecWriter

_KEPT = 8 << 20  # bytes of records


class S3Store(FolderReader, FsspecStore):
    """A folder of a bucket; see `ckptcore.store.Store` and `ckptcore.store.ahead.ReadsAhead`.

    Attributes:
        records: What is known of the objects, while this process alone writes here; None to ask each time.
    """

    pins = True
    records: KeptRecords | None = None

    def __init__(
        self, url: str, *, pinned: bool = False, versions: Mapping[str, str | None] | None = None
    ) -> None:
        """Prepare reads and writes; nothing is sent yet.

        Args:
            url: The folder.
            pinned: Read every object in one version, that of the first look. Nothing is written here.
            versions: Path -> stamp of objects that were seen before, and must still be the same.
        """
        FsspecStore.__init__(self, url)
        key = key_of(self.url)
        # With its slash, so that "run1" does not include "run10".
        prefix = f"{key}/" if key else ""
        FolderReader.__init__(self, client_of(self.url), prefix, self.url, pinned=pinned, versions=versions)

    def _opened(self) -> tuple[Any, str]:
        """Return no file system: only `writer` needs it, and s3fs takes long to import."""
        return None, ""

    def stamped(self) -> dict[str, FileStatus]:
        """List the objects with size and version, as they are now."""
        statuses = self.below()
        if not statuses:
            raise SourceUnreadable(f"{self.url} does not exist or is empty", absent=True)
        return statuses

    def everything(self) -> dict[str, FileStatus]:
        """Return what `below` does, and the object of the folder's own name under the empty name."""
        # "run1" itself may be an object, beside objects below "run1/".
        key = self.prefix.rstrip("/")

        def itself() -> dict[str, FileStatus]:
            exact = self.client.head(key) if key else None
            return {} if exact is None else {"": of_object(exact)}

        # Both at once: neither depends on the other's answer.
        exact, below = self.client.each(lambda look: look(), (itself, self.below))
        return exact | below

    def level(self) -> tuple[dict[str, FileStatus], tuple[str, ...]]:
        """Return the objects directly in the folder by name, and the names of its folders, all sorted."""
        keys = self.client.below(self.prefix)
        statuses = {s3_object.key[len(self.prefix) :]: of_object(s3_object) for s3_object in keys.objects}
        statuses.pop("", None)  # the folder's own marker
        folders = {prefix[len(self.prefix) :].rstrip("/") for prefix in keys.prefixes}
        return dict(sorted(statuses.items())), tuple(sorted(folders))

    def list(self) -> dict[str, int]:
        """List the objects: relative path -> size in bytes. A pinned folder is listed once."""
        sizes = self.listed()
        return sizes if sizes is not None else super().list()

    def stamp(self, path: str) -> str | None:
        """Return the size and version as they are now, as a text, or None when there is no such object."""
        status = self.now(path)
        return None if status is None else status.stamp

    def fetch(self, path: str, most: int = MAX_REQUEST_BYTES) -> bytes | None:
        """Return all bytes of an object of at most ``most``, or None when there is no such object."""
        if not self._pinned:
            key = self.prefix + path
            if self.records is not None:
                # Under a lease nobody else writes here, so what was written or read once is still true.
                return self.records.fetch(key, lambda: self.client.fetch(key, most))
            return self.client.fetch(key, most)
        size = self.size(path)
        if size is None:
            return None
        # Before it is read: the object may be of any size, and of anybody.
        require_small(f"{self.url}/{path}", size, most)
        return self.read(path, 0, size)

    def fetch_each(self, paths: Sequence[str]) -> Sequence[bytes | None]:
        """Return what `fetch` does for each path, with several requests at once."""
        return self.client.each(self.fetch, paths)

    def writer(self, path: str, nbytes: int) -> FileWriter:
        """Collect an object, which is written in one request when it is committed."""
        if nbytes > MAX_REQUEST_BYTES:
            fs, root = super()._opened()
            share_service_models(fs)
            return FsspecWriter(fs, f"{root}/{path}", f"{self.url}/{path}")
        return ObjectWriter(self.client, self.prefix + path)

    def put(self, path: str, data: bytes) -> None:
        """Write a small object in one request."""
        key = self.prefix + path
        if self.records is not None:
            # Before the request: one that fails may have replaced the object nevertheless.
            self.records.forget(key)
        self.client.put(key, data)
        if self.records is not None:
            self.records.put(key, data)

    def put_over(self, path: str, data: bytes, draft: str) -> None:
        """Replace a small object whose bytes must stay if the new ones arrive altered.

        They are proven below the name ``draft``, which stays, and then copied by the store. A store that
        does not copy (some say so with 400 or 405) gets them directly.

        Raises:
            AlteredInTransit: The store did not get these bytes. The object is as it was, if the store copies.
        """
        key = self.prefix + path
        etag = self.client.put(self.prefix + draft, data)
        if self.records is not None:
            self.records.forget(key)
        try:
            # With the ETag of the draft: nothing else is copied, whoever writes below this name.
            self.client.copy(self.prefix + draft, key, match=etag or None)
        except CkptError as error:
            if kind_of(error) not in (Kind.UNSUPPORTED, Kind.DENIED, Kind.INVALID):
                raise
            self.client.put(key, data)
        if self.records is not None:
            self.records.put(key, data)

    def put_each(self, items: Iterable[tuple[str, bytes]]) -> None:
        """Write small objects, with several requests at once."""
        self.client.each(lambda item: self.put(*item), items)

    def remove(self, path: str) -> None:
        """Remove an object; a missing object is no error."""
        if self.records is not None:
            self.records.forget(self.prefix + path)
        self.client.delete(self.prefix + path)

    def remove_all(self) -> None:
        """Remove every object below the folder."""
        try:
            keys = [s3_object.key for s3_object in self.client.list(self.prefix)]
        except SourceUnreadable as error:
            raise DestinationUnwritable(error.message, hint=error.hint, **error.values) from error
        if self.records is not None:
            for key in keys:
                self.records.forget(key)
        self.client.each(self.client.delete, keys)

    def copy_to(self, path: str, target: Store, name: str) -> None:
        """Copy an object into another folder, server-side."""
        if not isinstance(target, S3Store):
            raise UsageError(f"cannot copy from {self.url} to {target.url} server-side")
        target.client.copy(self.prefix + path, target.prefix + name, bucket=self.client.bucket)


class ObjectWriter(FileWriter):
    """Collects the bytes of a small object."""

    def __init__(self, client: S3Client, key: str) -> None:
        self._client, self._key, self._data = client, key, bytearray()

    def write(self, offset: int, data: Buffer | bytes) -> None:
        """Append ``data``; ``offset`` is the current end."""
        self._data += data

    def commit(self) -> None:
        """Write the object."""
        self._client.put(self._key, bytes(self._data))

    def abort(self) -> None:
        """Forget the bytes: the store has none of them."""
        self._data.clear()


class KeptRecords:
    """Bytes of small objects by key, which the holder of a lease asks for once. Safe for threads.

    Under the lease of a destination this process alone writes the records of its staging prefix. What it has
    put there, which the store has confirmed, and what it has read since it took the lease, is not asked for
    again.

    Args:
        memory: The most bytes that are kept; further objects are asked for each time.
    """

    def __init__(self, memory: int = _KEPT) -> None:
        self._left = memory
        self._lock = threading.Lock()
        self._contents: dict[str, bytes | None] = {}
        self._written: set[str] = set()
        self._emptied: tuple[str, ...] = ()

    def fetch(self, key: str, ask: Callable[[], bytes | None]) -> bytes | None:
        """Return the bytes of an object, or None if there is none; ``ask`` the store if that is unknown."""
        with self._lock:
            if key in self._contents:
                return self._contents[key]
            if key.startswith(self._emptied) and key not in self._written:
                return None
        content = ask()
        with self._lock:
            if key not in self._contents:  # else it was written meanwhile
                self._keep(key, content)
        return content

    def put(self, key: str, data: bytes) -> None:
        """Keep the bytes of an object that the store has now."""
        with self._lock:
            self._drop(key)
            self._written.add(key)
            self._keep(key, data)

    def forget(self, key: str) -> None:
        """Ask the store for an object from now on: it is about to change."""
        with self._lock:
            self._drop(key)
            self._written.add(key)

    def clear(self) -> None:
        """Ask the store for everything from now on."""
        with self._lock:
            for key in list(self._contents):
                self._drop(key)

    def emptied(self, *prefixes: str) -> None:
        """Take note that all objects below these prefixes were removed."""
        with self._lock:
            for key in [key for key in self._contents if key.startswith(prefixes)]:
                self._drop(key)
            self._written = {key for key in self._written if not key.startswith(prefixes)}
            self._emptied = (*self._emptied, *prefixes)

    def _keep(self, key: str, data: bytes | None) -> None:
        nbytes = len(data or b"")
        if nbytes <= self._left:
            self._left -= nbytes
            self._contents[key] = data

    def _drop(self, key: str) -> None:
        self._left += len(self._contents.pop(key, None) or b"")
