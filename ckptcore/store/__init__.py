"""Read and write bytes by URL: one seam for local folders and for everything that fsspec reaches.

This package depends on `errors` alone: neither formats nor manifests. `open_store` opens a store; `local` and
`remote` are the two kinds of stores. `listing` and `sealed` report what is in a folder and who owns it,
`place` whether two URLs name one place.

A store is a folder behind its URL; paths inside it are relative, with ``/``, and never leave it.
Readers ask for exact ranges and get them or an error; writers are invisible under the final name until
`FileWriter.commit`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckptcore.errors import UnsafeContent, UsageError
from ckptcore.utils.average_url import is_average
from ckptcore.utils.merged_url import is_merged, merged_url, roots_of, split_merged

if TYPE_CHECKING:
    from ckptcore.store.file_status import FileStatus
    from ckptcore.store.objects.uploaded import Uploaded

Buffer = memoryview
BLOCK = 4096  # bytes that memory and files are aligned to, for writes past the page cache
# org/name, as huggingface_hub's `validate_repo_id` has it.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class FileWriter(Protocol):
    """One file being written.

    Attributes:
        sequential: True when `write` must be called with rising, gapless offsets (object stores). False when
            it may be called in any order and from several threads (local files).
    """

    sequential: bool = True

    @property
    def part_size(self) -> int | None:
        """Return the bytes of a part of an upload by handles, whose digest is by parts; else None."""
        return None

    @property
    def uploaded(self) -> Uploaded | None:
        """Return, after `commit`, what an object store holds of an upload by handles; else None."""
        return None

    def write(self, offset: int, data: Buffer | bytes) -> None:
        """Write ``data`` at byte ``offset``."""

    def copy(self, source: Store, path: str, start: int, length: int, offset: int) -> bool:
        """Copy a byte range inside the kernel; return False when these two stores cannot do that."""
        return False

    def commit(self) -> None:
        """Make the bytes durable under the final name."""

    def abort(self) -> None:
        """Discard what was written."""


class Joint(FileWriter, Protocol):
    """A file that several processes write ranges of, at the same time."""

    def name(self, path: str) -> None:
        """Make the file durable, under its final name in the store."""


class ReadObserver(Protocol):
    """Receives each read of a store, such as `ckptcore.core.file_sums.FileSums`."""

    def observe(self, path: str, start: int, data: Buffer | bytes) -> None:
        """Receive a range of a file that was read."""

    def forget(self, path: str | None) -> None:
        """Learn that bytes of a file, or of any, came altered, and are asked for again."""


class Readable(Protocol):
    """A folder of files to read from. Safe to use from several threads.

    Attributes:
        url: The URL it was opened with, without a trailing slash.
        local: Its path on this machine, or None for a remote store.
        observer: Receives each read; None for no observer.
    """

    url: str
    local: Path | None
    observer: ReadObserver | None

    def list(self) -> dict[str, int]:
        """Return every file below the folder: relative path -> size in bytes, sorted."""

    def size(self, path: str) -> int | None:
        """Return the size in bytes, or None when there is no such file."""

    def stamp(self, path: str) -> str | None:
        """Return a text that changes when the file is rewritten, or None when there is no such file."""

    def ctime(self, path: str) -> int | None:
        """Return when the file's status last changed, ns since 1970: by a write, a chmod or a link.

        `ckptcore.store.file_status.YOUNG` when that was just now. None when there is no such file, or the
        store has no such time.
        """

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes; raises `SourceUnreadable`, `StorageTrouble`."""

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly; raises `SourceUnreadable`, `StorageTrouble`."""

    def close(self) -> None:
        """Close open files."""


class Store(Readable, Protocol):
    """A folder of files to read from and to write to."""

    def stamped(self) -> dict[str, FileStatus]:
        """List the files like `list`, with the status of each."""

    def look(self, path: str) -> FileStatus | None:
        """Return the status of one file, or None when there is no such file."""

    def writer(self, path: str, nbytes: int) -> FileWriter:
        """Start a new file of ``nbytes``; raises `DiskFull`, `DestinationUnwritable`."""

    def joint(self, path: str, nbytes: int, *, alone: bool = False) -> Joint | None:
        """Open a file of ``nbytes`` that several processes write ranges of, under this very name.

        The file exists from the first byte that one of them writes. A commit makes durable what this process
        wrote.

        Args:
            path: Name of the file in the store.
            nbytes: Its final size.
            alone: Require that no other process has it open.

        Returns:
            The writer, or None when the store cannot do that.

        Raises:
            Busy: Another process has it open and ``alone`` is set, or the other way round.
        """

    def put(self, path: str, data: bytes) -> None:
        """Write a small file completely or not at all."""

    def remove(self, path: str) -> None:
        """Remove a file; a missing file is no error."""

    def remove_all(self) -> None:
        """Remove the folder with everything in it."""

    def copy_to(self, path: str, target: Store, name: str) -> None:
        """Copy a file into another store of the same kind, server-side where the store can."""

    def free_bytes(self) -> int | None:
        """Return the free space, bytes; None where that has no meaning."""


def open_store(url: str) -> Store:
    """Return the store of a folder's URL; nothing is read yet.

    Raises:
        UsageError: No installed fsspec file system serves this scheme.
    """
    path = local_path(url)
    if path is not None:
        from ckptcore.store.local import LocalStore

        return LocalStore(path)
    if is_average(url):
        from ckptcore.store.average import open_average

        return open_average(url)
    if is_merged(url):
        from ckptcore.store.merged import open_merged

        return open_merged(url)
    if is_s3(url):
        from ckptcore.store.s3 import S3Store

        return S3Store(url)
    from ckptcore.store.remote import FsspecStore

    return FsspecStore(url)


def open_source_store(url: str, versions: Mapping[str, str | None] | None = None) -> Store:
    """Return the store of a folder that is read and not written here; nothing is read yet.

    On an object store every file is read in one version, from the first look at it to its last byte: another
    one is `SourceChanged`.

    Args:
        url: The folder's URL.
        versions: File -> stamp of what was seen of it before, and must still be the same.
    """
    if local_path(url) is None and is_s3(url):
        from ckptcore.store.s3 import S3Store

        return S3Store(url, pinned=True, versions=versions)
    if is_average(url):
        from ckptcore.store.average import open_average

        return open_average(url, versions)
    if is_merged(url):
        from ckptcore.store.merged import open_merged

        return open_merged(url, versions)
    if url.startswith("hf://"):
        from ckptcore.store.hub_repository import HubStore, is_repository

        if is_repository(url):
            hub: Store = HubStore(url)
            return hub
    return open_store(url)


def fetch(store: Readable, path: str) -> bytes | None:
    """Return all bytes of a small file, or None when there is no such file: on S3, in one request."""
    in_one: Callable[[str], bytes | None] | None = getattr(store, "fetch", None)
    if in_one is not None:
        return in_one(path)
    size = store.size(path)
    return None if size is None else store.read(path, 0, size)


def fetch_each(store: Readable, paths: Sequence[str]) -> Sequence[bytes | None]:
    """Return what `fetch` does for each path: on S3, with several requests at once."""
    several: Callable[[Sequence[str]], Sequence[bytes | None]] | None = getattr(store, "fetch_each", None)
    return [fetch(store, path) for path in paths] if several is None else several(paths)


def put_each(store: Store, items: Iterable[tuple[str, bytes]]) -> None:
    """Write small files (name, bytes): on S3, with several requests at once."""
    several: Callable[[Iterable[tuple[str, bytes]]], None] | None = getattr(store, "put_each", None)
    if several is not None:
        several(items)
        return
    for path, data in items:
        store.put(path, data)


def forget_small_reads() -> None:
    """Drop the pieces of objects that this process keeps, before a place is read to prove what it holds.

    Pieces are kept by their ETag, for all commands of a process. An object that rots below its store keeps
    its ETag: a proof that reads kept pieces would be one of the past.
    """
    # Local checkpoints need no object store: where nothing imported it, nothing is kept.
    small_reads = sys.modules.get("ckptcore.store.objects.small_reads")
    if small_reads is not None:
        small_reads.SHARED.clear()


def is_s3(url: str) -> bool:
    """Report whether a URL names a place on an S3 store, and no chain of file systems."""
    return url.startswith(("s3://", "s3a://")) and "::" not in url


def reads_s3(url: str) -> bool:
    """Report whether a source, or one of its folders, is on an S3 store."""
    return any(map(is_s3, roots_of(url) or (url,)))


def local_path(url: str) -> Path | None:
    """Return the path of a local URL, or None for a remote one; raises `UsageError` for an invalid path."""
    if "\0" in url or not url or not _is_text(url):
        raise UsageError(f"cannot open {url!r}: not a path or URL")
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            rest = url.removeprefix(scheme)
            if rest.startswith("localhost/"):  # RFC 8089 allows this name for the local machine
                rest = rest.removeprefix("localhost")
            return Path(rest)
    return None if "://" in url or "::" in url else Path(url)


def _is_text(url: str) -> bool:
    """Report whether the URL has bytes: surrogates of undecodable names (PEP 383) do, others do not."""
    try:
        url.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def split_url(url: str) -> tuple[str, str]:
    """Return a URL's parent and its last name.

    >>> split_url("s3://bucket/run/step-3/"), split_url("step-3")
    (('s3://bucket/run', 'step-3'), ('.', 'step-3'))
    >>> split_url("memory://step-3")
    ('memory://', 'step-3')
    >>> split_url("merged://[/node0/a,/node1/a]/optim"), split_url("merged://[/node0/a,/node1/a]")[1]
    (('merged://[/node0/a,/node1/a]', 'optim'), '')
    """
    if is_average(url):
        return url, ""
    if is_merged(url):
        roots, inner = split_merged(url)
        above, _, name = inner.rpartition("/")
        return join_url(merged_url(roots), above) if above else merged_url(roots), name
    path = local_path(url)
    if path is not None:
        full = Path(os.path.normpath(path))
        return (str(full.parent), full.name) if full.name else (str(full), "")
    head, _, name = url.rstrip("/").rpartition("/")
    return (f"{head}/" if head.endswith(":/") else head), name  # never cut a scheme in two


def join_url(root: str, name: str) -> str:
    """Return a URL below another.

    >>> join_url("s3://bucket", "a"), join_url("memory://", "a"), join_url("/", "a")
    ('s3://bucket/a', 'memory://a', '/a')
    """
    if root.endswith("://"):
        return root + name
    return f"{root.rstrip('/') or '/'}/{name}" if root != "/" else f"/{name}"


def hub_hint(url: str) -> str:
    """Return how to fetch a name that looks like a hub's repository, else an empty text.

    >>> hub_hint("Qwen/Qwen3-0.6B")
    'it looks like a name on the Hugging Face hub: hf download Qwen/Qwen3-0.6B --local-dir DIR, then name DIR'
    >>> hub_hint("/models/qwen"), hub_hint("runs/step-3/model")
    ('', '')
    """
    if not _HUB_ID.fullmatch(url) or os.path.exists(url) or os.path.isdir(url.split("/")[0]):
        return ""
    return f"it looks like a name on the Hugging Face hub: hf download {url} --local-dir DIR, then name DIR"


def near_place(url: str) -> str:
    """Return the hint for a path that does not exist: what its folder has under a near name; else empty."""
    path = local_path(url)
    if path is None:
        return ""
    parent, name = os.path.split(os.path.normpath(path))
    try:
        beside = os.listdir(parent or ".")
    except OSError:  # the folder does not exist, either
        return ""
    from ckptcore.utils.near_names import near_names  # for an error alone

    near = near_names(name, sorted(sibling for sibling in beside if not sibling.startswith(".")))
    return f"did you mean {' or '.join(os.path.join(parent, sibling) for sibling in near)}?" if near else ""


def inner_path(path: str, *, origin: str) -> str:
    """Return ``path`` itself when it is a plain relative path.

    Args:
        path: A path from a checkpoint's metadata.
        origin: Where the path was read, for the message.

    Raises:
        UnsafeContent: The path is absolute, has a scheme, or leaves the folder.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or "\0" in path or "://" in path:
        raise UnsafeContent(f"{origin} names the file {path!r}, which is not a plain relative path")
    if any(p in ("", ".", "..") for p in parts):
        raise UnsafeContent(f"{origin} names the file {path!r}, which leaves the checkpoint's folder")
    return path
