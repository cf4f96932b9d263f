"""Read and write folders on any fsspec file system (S3, GCS, memory, ...).

Reads are ranged requests whose length is checked. Transient failures are retried here with
back-off, because clients do not retry body reads. Writes go through one sequential upload that
becomes visible when it completes, and is discarded when it does not.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from ckptcore.errors import (
    CkptError,
    DestinationUnwritable,
    MissingDependency,
    SourceUnreadable,
    StorageTrouble,
    UsageError,
)
from ckptcore.redaction import redacted_of
from ckptcore.store import Buffer, FileWriter, Joint, ReadObserver, Store
from ckptcore.store.file_status import FileStatus, of_info
from ckptcore.utils.extras import OF_SCHEME, install

_PART = 16 << 20  # bytes per upload part; also the write granularity asked of fsspec
_ANSWER = "ClientResponseError"  # of aiohttp
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)

# Errors by the names of their classes, from clients that need not be installed.
_REFUSED = frozenset({"ParamValidationError", "InvalidURL", "InvalidUrlClientError", "NonHttpUrlClientError"})


class FsspecStore:
    """A folder behind an fsspec URL."""

    observer: ReadObserver | None = None

    def __init__(self, url: str) -> None:
        # A bare scheme is the root of a file system, whose slashes are part of its name.
        self.url = url if url.endswith("://") else url.rstrip("/")
        self.local: Path | None = None
        self._fs, self._root = self._opened()

    def _opened(self) -> tuple[Any, str]:
        """Return the file system and the folder in it."""
        import fsspec

        url = self.url
        if "::" in url and url.lower().startswith(("s3://", "s3a://")):
            raise UsageError(
                # The URL may have credentials, and so may the library's message.
                redacted_of(f"cannot open {url!r}: S3 cannot come first in a chain of file systems", url),
                hint="a key with two colons in it has no URL: copy the object to another key",
            )
        try:
            # Listings are cached by default; then another writer's file would stay invisible.
            fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            text = redacted_of(f"cannot open {url!r}: {error}", url)
            extra = OF_SCHEME.get(url.partition("://")[0])
            if extra is None:
                raise UsageError(text) from error
            raise MissingDependency(text, hint=install(extra)) from error
        except ValueError as error:
            raise UsageError(redacted_of(f"cannot open {url!r}: {error}", url)) from error
        except Exception as error:
            raise _trouble(url, error) from error
        return fs, root.rstrip("/")

    def stamped(self) -> dict[str, FileStatus]:
        """List the objects with size and version."""
        statuses = self.below()
        if not statuses:
            self._info("")  # it says if the server cannot be reached, or refuses
            raise SourceUnreadable(f"{self.url} does not exist or is empty", absent=True)
        return statuses

    def below(self) -> dict[str, FileStatus]:
        """Return every object below the folder by its relative name, sorted; none where nothing is."""
        statuses = self.everything()
        statuses.pop("", None)
        return statuses

    def everything(self) -> dict[str, FileStatus]:
        """Return what `below` does, and the object of the folder's own name under the empty name."""

        def call() -> dict[str, FileStatus]:
            # Some file systems cache listings whatever they were asked for.
            self._fs.invalidate_cache()
            try:
                infos = self._fs.find(self._root, detail=True)
            except FileNotFoundError as error:
                _require_answer(error)
                return {}
            # The exact name: "out//x" and "out/x" are different objects. An empty object whose name ends with
            # a slash is one that some tools create as a folder marker.
            return {
                name[len(self._root) + 1 :]: of_info(self._sized(name, info))
                for name, info in sorted(infos.items())
                if info.get("type", "file") == "file" and not name.endswith("/")
            }

        statuses: dict[str, FileStatus] = retrying(self.url, call)
        return statuses

    def level(self) -> tuple[dict[str, FileStatus], tuple[str, ...]]:
        """Return the objects directly in the folder by name, and the names of its folders, all sorted."""

        def call() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            try:
                infos: list[dict[str, Any]] = self._fs.ls(self._root, detail=True)
            except (FileNotFoundError, NotADirectoryError) as error:
                _require_answer(error)
                return []
            return infos

        statuses, folders = dict[str, FileStatus](), set[str]()
        for info in retrying(self.url, call):
            path = str(info["name"]).rstrip("/")
            if path == self._root:
                continue  # the folder's own marker, or the named file itself
            name = path.rpartition("/")[2]
            if info.get("type") == "directory":
                folders.add(name)
            else:
                statuses[name] = of_info(info)
        return dict(sorted(statuses.items())), tuple(sorted(folders))

    def _sized(self, name: str, info: dict[str, Any]) -> dict[str, Any]:
        """Return what is known of a file, with its size: listings of web servers have none."""
        # One more request for each: only where the listing had no size.
        if info.get("size") is None:
            info = {**info, **self._fs.info(name)}
        if info.get("size") is None:
            raise SourceUnreadable(
                f"cannot read {name}: its server does not report its size",
                hint="copy the folder to a disk or a bucket, and name that",
            )
        return info

    def list(self) -> dict[str, int]:
        """List the objects: relative path -> size in bytes."""
        return {path: status.nbytes for path, status in self.stamped().items()}

    def size(self, path: str) -> int | None:
        """Return the size in bytes, or None when there is no such object."""
        status = self.look(path)
        return None if status is None else status.nbytes

    def look(self, path: str) -> FileStatus | None:
        """Return size and version of one object, or None when there is no such object."""
        info = self._info(path)
        return of_info(info) if info is not None and info.get("type", "file") == "file" else None

    def stamp(self, path: str) -> str | None:
        """Return the size and version as a text, or None when there is no such object."""
        info = self._info(path)
        return None if info is None else of_info(info).stamp

    def _info(self, path: str) -> dict[str, Any] | None:
        def call() -> dict[str, Any] | None:
            try:
                info: dict[str, Any] = self._fs.info(self._full(path))
            except FileNotFoundError as error:
                _require_answer(error)
                return None
            return info

        description: dict[str, Any] | None = retrying(f"{self.url}/{path}".rstrip("/"), call)
        return description

    def ctime(self, path: str) -> int | None:
        """Return None: an object is replaced, never written in place, and its version shows that."""
        return None

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes, in one request."""
        if not length:
            # A range of no bytes is no valid request.
            return b""

        def call() -> bytes:
            data: bytes = self._fs.cat_file(self._full(path), start=start, end=start + length)
            return data

        data: bytes = retrying(f"{self.url}/{path}", call)
        if len(data) != length:
            raise SourceUnreadable(
                f"{self.url}/{path} ends early: {length} bytes needed at offset {start} (got {len(data)})",
                file=path,
            )
        if self.observer is not None:
            self.observer.observe(path, start, data)
        return data

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly, in requests of 16 MiB."""
        for offset in range(0, len(into), _PART):
            part = into[offset : offset + _PART]
            part[:] = self.read(path, start + offset, len(part))

    def writer(self, path: str, nbytes: int) -> FileWriter:
        """Start an upload."""
        return FsspecWriter(self._fs, self._full(path), f"{self.url}/{path}")

    def joint(self, path: str, nbytes: int, *, alone: bool = False) -> Joint | None:
        """Return None: one writer uploads an object from its first byte to its last."""
        return None

    def put(self, path: str, data: bytes) -> None:
        """Write a small object in one request."""
        retrying(f"{self.url}/{path}", lambda: self._fs.pipe_file(self._full(path), data), writing=True)

    def remove(self, path: str) -> None:
        """Remove an object; a missing object is no error."""

        def call() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._full(path))

        retrying(f"{self.url}/{path}", call, writing=True)

    def remove_all(self) -> None:
        """Remove every object below the folder."""

        def call() -> None:
            # One by one: `rm` would interpret a name with brackets as a pattern.
            for name in self._fs.find(self._root):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(name)

        retrying(self.url, call, writing=True)

    def free_bytes(self) -> int | None:
        """Return None: object stores have no limit to report."""
        return None

    def close(self) -> None:
        """Do nothing: no connection stays open between calls."""

    def copy_to(self, path: str, target: Store, name: str) -> None:
        """Copy an object into another folder, server-side."""
        # Server-side copies are within one file system.
        if not isinstance(target, FsspecStore):
            raise UsageError(f"cannot copy from {self.url} to {target.url} server-side")
        full = target._full(name)
        retrying(target.url, lambda: self._fs.cp_file(self._full(path), full), writing=True)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


class FsspecWriter(FileWriter):
    """One upload."""

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._url = url
        try:
            self._file = fs.open(path, "wb", block_size=_PART)
        except Exception as error:
            raise _trouble(url, error, writing=True) from error

    def write(self, offset: int, data: Buffer | bytes) -> None:
        """Append ``data``; ``offset`` is the current end."""
        try:
            self._file.write(data)
        except Exception as error:
            raise _trouble(self._url, error, writing=True) from error

    def commit(self) -> None:
        """Complete the upload, which publishes the object."""
        try:
            self._file.close()
        except Exception as error:
            raise _trouble(self._url, error, writing=True) from error

    def abort(self) -> None:
        """Discard the upload."""
        # A close would publish the upload (fsspec/s3fs#154): discard it first, then mark it closed.
        if hasattr(self._file, "discard"):
            with contextlib.suppress(Exception):  # nothing more can be done for a failed upload
                self._file.discard()
        self._file.closed = True


def _require_answer(error: OSError) -> None:
    """Raise the cause of "not found", unless that is what a store has answered.

    fsspec's web servers are "not found" whatever happened: nothing listens, or the answer is a refusal.
    """
    cause = error.__cause__
    if isinstance(cause, OSError):
        is_answer = isinstance(cause, FileNotFoundError)
    else:
        is_answer = getattr(cause, "status", 404) == 404
    if cause is not None and not is_answer:
        raise cause from None


def retrying(url: str, call: Any, *, writing: bool = False) -> Any:
    """Call a function, up to four times while its errors are transient; raise them as `CkptError`."""
    policy = Retrying(
        stop=stop_after_attempt(4),
        # Random, so that workers that failed together do not repeat together.
        wait=wait_random_exponential(multiplier=0.2, max=5),
        retry=retry_if_exception_type(StorageTrouble),
        reraise=True,
    )

    def once() -> Any:
        try:
            return call()
        except Exception as error:
            raise _trouble(url, error, writing=writing) from error

    return policy(once)


def _trouble(url: str, error: Exception, *, writing: bool = False) -> CkptError:
    # Errors of this package have been explained where they were raised.
    if isinstance(error, CkptError):
        return error
    verb = "write" if writing else "read"
    message = redacted_of(f"cannot {verb} {url}: {error or type(error).__name__}", url)
    # A client error is an answer about the request: repeating it changes nothing.
    refused = 400 <= getattr(error, "status", 0) < 500 if type(error).__name__ == _ANSWER else False
    if refused or isinstance(error, _FINAL) or type(error).__name__ in _REFUSED:
        return DestinationUnwritable(message) if writing else SourceUnreadable(message)
    credentials = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
    if type(error).__name__ in credentials:
        return SourceUnreadable(message, hint="set the credentials of this store")
    return StorageTrouble(message)
