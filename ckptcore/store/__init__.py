"""Read and write bytes by URL: one seam for local folders and for everything that fsspec reaches.

Knows errors alone: neither formats nor manifests. `open_store` is the way in; `local` and `remote` are the
two kinds of stores, `sealed`, `inventory` and `contents` say what lies in a folder and whose it is, `place`
whether two URLs lead to one place.

A store is a folder seen through its URL; paths inside it are relative, with ``/``, and never leave it.
Readers ask for exact ranges and get them or an error; writers are invisible under the final name until
`FileWriter.commit`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptcore.errors import UnsafeContent, UsageError

Buffer = memoryview
# org/name, as huggingface_hub's `validate_repo_id` has it.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True, slots=True)
class Stamped:
    """One file, as it was at one moment. nbytes: its size. stamp, ctime: see `Readable`."""

    nbytes: int
    stamp: str
    ctime: int | None


# A ctime that says nothing yet: a write that comes now may still get the same one.
YOUNG = -1


class FileWriter(Protocol):
    """One file being written.

    sequential: whether `write` must be called with rising, gapless offsets (object stores), or
        may be called in any order and from several threads (local files).
    """

    sequential: bool

    def write(self, at: int, data: Buffer | bytes) -> None:
        """Puts ``data`` at byte ``at``."""

    def copy(self, source: Store, path: str, start: int, length: int, at: int) -> bool:
        """Copies a byte range inside the kernel; False when these two ends cannot do that."""

    def commit(self) -> None:
        """Makes the bytes durable under the final name."""

    def abort(self) -> None:
        """Drops what was written."""


class Joint(FileWriter, Protocol):
    """A file that several processes write ranges of, at the same time."""

    def name(self, path: str) -> None:
        """Makes the file durable, under its final name in the store."""


class Readable(Protocol):
    """A folder of files to read from. Safe to use from several threads.

    url: what it was opened with, without a trailing slash. local: its path on this machine, or
    None for a remote store.
    """

    url: str
    local: Path | None

    def list(self) -> dict[str, int]:
        """Every file below the folder: relative path -> size in bytes, sorted."""

    def size(self, path: str) -> int | None:
        """Size in bytes, or None when there is no such file."""

    def stamp(self, path: str) -> str | None:
        """A text that changes when the file is written again, or None when there is no such file."""

    def ctime(self, path: str) -> int | None:
        """When the file's status last changed, ns since 1970: by writing it, but also by chmod or link;
        `YOUNG` when that was just now. None when there is no such file, or the store has no such time."""

    def read(self, path: str, start: int, length: int) -> bytes:
        """Exactly ``length`` bytes; raises `SourceUnreadable`, `StorageTrouble`."""

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fills ``into`` exactly; raises `SourceUnreadable`, `StorageTrouble`."""

    def close(self) -> None:
        """Releases open files."""


class Store(Readable, Protocol):
    """A folder of files to read from and to write to."""

    def stamped(self) -> dict[str, Stamped]:
        """As `list`, with what tells whether a file is still the same, from the same look at it."""

    def look(self, path: str) -> Stamped | None:
        """One file as `stamped` would have it, or None when there is no such file."""

    def writer(self, path: str, nbytes: int) -> FileWriter:
        """A new file of ``nbytes``; raises `DiskFull`, `DestinationUnwritable`."""

    def joint(self, path: str, nbytes: int, *, alone: bool = False) -> Joint | None:
        """A file of ``nbytes`` that several processes write ranges of, under this very name, from the first
        byte that one of them writes; committing makes durable what this one wrote. alone: nobody else has
        it open meanwhile. None when the store cannot do that; raises `Busy`."""

    def put(self, path: str, data: bytes) -> None:
        """A small file, whole or not at all."""

    def remove(self, path: str) -> None:
        """Removes a file; a file that is not there is fine."""

    def remove_all(self) -> None:
        """Removes the folder with everything in it."""

    def copy_to(self, path: str, target: Store, name: str) -> None:
        """Copies a file into another store of the same kind, on the server's side where it has one."""

    def free_bytes(self) -> int | None:
        """Room left, bytes; None where that has no meaning."""


def open_store(url: str) -> Store:
    """The store of a folder's URL; nothing is read yet.

    Raises `UsageError` for a scheme that no installed fsspec file system serves.
    """
    path = local_path(url)
    if path is not None:
        from ckptcore.store.local import LocalStore

        return LocalStore(path)
    from ckptcore.store.remote import FsspecStore

    return FsspecStore(url)


def local_path(url: str) -> Path | None:
    """The path of a local URL, or None for a remote one; raises `UsageError` for what no system can hold."""
    if "\0" in url or not url or not _is_text(url):
        raise UsageError(f"not a path or URL: {url!r}")
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            rest = url.removeprefix(scheme)
            if rest.startswith("localhost/"):  # RFC 8089 spells this machine so, too
                rest = rest.removeprefix("localhost")
            return Path(rest)
    return None if "://" in url or "::" in url else Path(url)


def _is_text(url: str) -> bool:
    """Whether it has bytes: names that are not UTF-8 come as surrogates (PEP 383), others have none."""
    try:
        url.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def split_url(url: str) -> tuple[str, str]:
    """A URL's parent and its last name.

    >>> split_url("s3://bucket/run/step-3/"), split_url("step-3")
    (('s3://bucket/run', 'step-3'), ('.', 'step-3'))
    >>> split_url("memory://step-3")
    ('memory://', 'step-3')
    """
    path = local_path(url)
    if path is not None:
        full = Path(os.path.normpath(path))
        return (str(full.parent), full.name) if full.name else (str(full), "")
    head, _, name = url.rstrip("/").rpartition("/")
    return (f"{head}/" if head.endswith(":/") else head), name  # never a scheme cut in two


def join_url(root: str, name: str) -> str:
    """A URL below another.

    >>> join_url("s3://bucket", "a"), join_url("memory://", "a"), join_url("/", "a")
    ('s3://bucket/a', 'memory://a', '/a')
    """
    if root.endswith("://"):
        return root + name
    return f"{root.rstrip('/') or '/'}/{name}" if root != "/" else f"/{name}"


def hub_hint(url: str) -> str:
    """How to fetch what looks like the name of a hub's repository; empty for what does not, or is there.

    >>> hub_hint("Qwen/Qwen3-0.6B")
    'it looks like a name on the Hugging Face hub: hf download Qwen/Qwen3-0.6B --local-dir DIR, then name DIR'
    >>> hub_hint("/models/qwen"), hub_hint("runs/step-3/model")
    ('', '')
    """
    if not _HUB_ID.fullmatch(url) or os.path.exists(url) or os.path.isdir(url.split("/")[0]):
        return ""
    return f"it looks like a name on the Hugging Face hub: hf download {url} --local-dir DIR, then name DIR"


def inner_path(path: str, *, what: str) -> str:
    """``path`` itself, when it is a plain relative path; raises `UnsafeContent` otherwise.

    what: where the path was read, for the message.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or "\0" in path or "://" in path:
        raise UnsafeContent(f"{what} names the file {path!r}, which is not a plain relative path")
    if any(p in ("", ".", "..") for p in parts):
        raise UnsafeContent(f"{what} names the file {path!r}, which leaves the checkpoint's folder")
    return path
