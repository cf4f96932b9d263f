"""Read the inputs of a weighted average as one source.

The last input's files have the names that they have in it; those of the first are below ``@1/``, of the
second below ``@2/``, and so on. So whatever searches a checkpoint for a config or a tokenizer finds those of
the last one. Nothing is ever written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptcore.store import Buffer, ReadObserver, Store, open_source_store, reads_s3
from ckptcore.store.ahead import ExpectedReads, ReadsAhead, StoreProof
from ckptcore.store.file_status import FileStatus
from ckptcore.store.merged import MergedAhead, MergedStore
from ckptcore.store.subfolder import RenamedFiles
from ckptcore.utils.average_url import folder_of_input, split_average


def open_average(url: str, versions: Mapping[str, str | None] | None = None) -> AverageStore:
    """Return the store of an average whose inputs are folders; nothing is read yet.

    Args:
        url: ``average://[WEIGHT*ROOT,WEIGHT*ROOT]``.
        versions: File -> stamp of what was seen of it before, and must still be the same.

    Raises:
        UsageError: The URL is wrong.
    """
    return (AverageAhead if reads_s3(url) else AverageStore)(url, versions)


class AverageStore(MergedStore):
    """The inputs of an average, to read from.

    Attributes:
        url: The URL it was opened with.
        local: None: its files are in several places.
        roots: The inputs' URLs, in the order of the sum.
    """

    def __init__(self, url: str, versions: Mapping[str, str | None] | None = None) -> None:
        self.url = url.rstrip("/")
        self.local: Path | None = None
        self.roots, _ = split_average(self.url)
        folders = [folder_of_input(place, len(self.roots)) for place in range(len(self.roots))]
        self.stores: tuple[Store, ...] = tuple(
            _input(open_source_store(root, _below(versions, folder)), folder)
            for root, folder in zip(self.roots, folders, strict=True)
        )

    def stamped(self) -> dict[str, FileStatus]:
        """List the files of all inputs, as they are now."""
        return {path: status for store in self.stores for path, status in store.stamped().items()}

    def list(self) -> dict[str, int]:
        """List the files: relative path -> size in bytes."""
        return {path: status.nbytes for path, status in self.stamped().items()}

    def _holder(self, path: str) -> int | None:
        """Return the number of the input that a file's name is of."""
        place, slash, _ = path.removeprefix("@").partition("/")
        if not path.startswith("@") or not slash or not place.isdecimal() or int(place) >= len(self.roots):
            return len(self.roots) - 1
        return int(place) - 1


class AverageAhead(AverageStore, MergedAhead):
    """The inputs of an average, of which some are on S3 and read ahead."""


class _Input(RenamedFiles):
    """One input, with its files below a folder; see `ckptcore.store.Store`."""

    _store: Store

    def __init__(self, store: Store, folder: str) -> None:
        super().__init__(store)
        self.url, self.local, self._folder = store.url, store.local, folder
        self._observer: ReadObserver | None = None

    @property
    def observer(self) -> ReadObserver | None:
        """Return what receives the reads."""
        return self._observer

    @observer.setter
    def observer(self, observer: ReadObserver | None) -> None:
        self._observer = observer
        self._store.observer = None if observer is None else ObservedInput(observer, self._folder)

    def list(self) -> dict[str, int]:
        """Return every file."""
        return {self._folder + path: nbytes for path, nbytes in self._store.list().items()}

    def stamped(self) -> dict[str, FileStatus]:
        """Return every file with its status."""
        return {self._folder + path: status for path, status in self._store.stamped().items()}

    def _stored_name(self, path: str) -> str:
        return path.removeprefix(self._folder)

    def look(self, path: str) -> FileStatus | None:
        """Return the status of one file, or None when there is no such file."""
        return self._store.look(self._stored_name(path))

    def close(self) -> None:
        """Close the input's store."""
        self._store.close()


class _InputAhead(_Input):
    """An input on S3, which is read ahead; see `ckptcore.store.ahead.ReadsAhead`."""

    def __init__(self, store: Store, ahead: ReadsAhead, folder: str) -> None:
        super().__init__(store, folder)
        self._ahead = ahead

    @property
    def pins(self) -> bool:
        """Whether each file is read in one version."""
        return self._ahead.pins

    def expect(self, reads: ExpectedReads, memory: int) -> None:
        """Read ahead what is expected, with at most ``memory`` bytes of blocks."""
        paths, bare = map(self._stored_name, reads.paths), map(self._stored_name, reads.bare)
        self._ahead.expect(replace(reads, paths=tuple(paths), bare=frozenset(bare)), memory)

    def forget(self, path: str, start: int, length: int) -> bool:
        """Drop what is kept of a range; return whether that can make a difference."""
        return self._ahead.forget(self._stored_name(path), start, length)

    def prove(self) -> StoreProof:
        """Compare what was read of the expected bare files with the checksums of the store."""
        proof = self._ahead.prove()
        return StoreProof(
            *(frozenset(self._folder + p for p in paths) for paths in (proof.proven, proof.unproven))
        )


class ObservedInput:
    """Receives the reads of an input's store, and passes them on under the names of the average."""

    def __init__(self, observer: ReadObserver, folder: str) -> None:
        self._observer, self._folder = observer, folder

    def observe(self, path: str, start: int, data: Buffer | bytes) -> None:
        """Receive a range of a file that was read."""
        self._observer.observe(self._folder + path, start, data)

    def forget(self, path: str | None) -> None:
        """Learn that bytes of a file, or of any, came altered."""
        self._observer.forget(None if path is None else self._folder + path)


def _input(store: Store, folder: str) -> Store:
    wrapped: Any = (
        _InputAhead(store, store, folder) if isinstance(store, ReadsAhead) else _Input(store, folder)
    )
    return wrapped  # type: ignore[no-any-return]


def _below(versions: Mapping[str, str | None] | None, folder: str) -> dict[str, str | None] | None:
    """Return the versions of one input's files, under its own names."""
    if versions is None:
        return None
    return {path.removeprefix(folder): stamp for path, stamp in versions.items() if path.startswith(folder)}
