"""Read several folders as one source, as the nodes of a training job leave them.

Each node has the files of its own ranks. A file belongs to the first folder that has it; a file of one name
in two folders must have equal bytes, which `MergedStore.require_equal` proves when the source is opened. A
folder that is missing or empty is in `MergedStore.absent`, which makes the source incomplete. Nothing is ever
written to a merged source.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Never

import numpy as np

from ckptcore.errors import DamagedCheckpoint, NotComplete, SourceUnreadable, UsageError, finding
from ckptcore.store import Buffer, ReadObserver, Store, is_s3, open_source_store
from ckptcore.store.ahead import ExpectedReads, ReadsAhead, StoreProof
from ckptcore.store.file_status import FileStatus
from ckptcore.store.place import first_overlap
from ckptcore.utils.merged_url import merged_url, named_stages, roots_of, split_merged

_Listings = tuple[dict[str, FileStatus] | None, ...]  # of each folder; None for one that does not exist

_BLOCK = 4 << 20  # bytes that are compared at once
_LISTINGS = 8  # folders that are listed at the same time


def open_merged(url: str, versions: Mapping[str, str | None] | None = None) -> MergedStore:
    """Return the store of a merged source; nothing is read yet.

    Args:
        url: ``merged://[ROOT,ROOT]``, or a folder in it.
        versions: File -> stamp of what was seen of it before, and must still be the same.

    Raises:
        UsageError: The URL is wrong, or two of the folders overlap.
    """
    return (MergedAhead if any(map(is_s3, roots_of(url))) else MergedStore)(url, versions)


def source_url(roots: str | Iterable[str], *, recover: bool = False) -> str:
    """Return one URL for the folders of a source, as `merged_url` does.

    A named pipeline stage is read in the folder that has it, where nothing shows that it was to be there.

    Args:
        roots: Paths or URLs.
        recover: Whether a part may be missing.

    Raises:
        NotComplete: A named stage does not exist, or is empty.
        UsageError: No folder is given, or one of them has no name.
    """
    roots = roots if isinstance(roots, str) else tuple(roots)
    url = merged_url(roots)
    for stage in () if recover else named_stages(roots):
        store = open_source_store(stage)
        try:
            listing = _listing(store)
        finally:
            store.close()
        if not listing:
            raise NotComplete(
                f"a folder of the source does not exist or is empty: {stage}",
                hint="name the folders of the stages that were saved",
                file=stage,
            )
    return url


class MergedStore:
    """Several folders as one, to read from; see `ckptcore.store.Store`.

    Attributes:
        url: The URL it was opened with.
        local: None: its files are in several places.
        roots: The folders' URLs.
    """

    def __init__(self, url: str, versions: Mapping[str, str | None] | None = None) -> None:
        self.url = url.rstrip("/")
        self.local: Path | None = None
        self.roots = roots_of(self.url)
        # Of one node's folders, absent ones are no error: each node saves only its own ranks.
        self._complete = not split_merged(self.url)[1]
        # A file in two overlapping folders would be read twice, under two names.
        if overlap := first_overlap(self.roots):
            raise UsageError(
                f"cannot read {overlap[0]} and {overlap[1]} as one source: they overlap",
                hint="name each folder once",
            )
        self.stores: tuple[Store, ...] = tuple(open_source_store(root, versions) for root in self.roots)
        self._lock = threading.Lock()
        self._folder_listings: _Listings | None = None

    @property
    def observer(self) -> ReadObserver | None:
        """Return what receives the reads of each folder: a file has the same path in all of them."""
        return self.stores[0].observer

    @observer.setter
    def observer(self, observer: ReadObserver | None) -> None:
        for store in self.stores:
            store.observer = observer

    def stamped(self) -> dict[str, FileStatus]:
        """List the files of all folders, as they are now."""
        statuses: dict[str, FileStatus] = {}
        listings = self._listings(anew=True)
        if all(listing is None for listing in listings):
            raise SourceUnreadable(f"{self.url} does not exist or is empty", absent=True)
        # Last to first: a file belongs to the first folder that has it, and later updates win in a dict.
        for listing in reversed(listings):
            statuses.update(listing or {})
        return dict(sorted(statuses.items()))

    @property
    def absent(self) -> tuple[str, ...]:
        """The folders of the source that do not exist or are empty."""
        if not self._complete:  # a node has files of its own ranks, and not every folder
            return ()
        pairs = zip(self.roots, self._listings(), strict=True)
        return tuple(root for root, listing in pairs if not listing)

    def require_equal(self) -> None:
        """Compare the files that several folders have, byte by byte.

        Raises:
            DamagedCheckpoint: One of them differs; the message names both places.
        """
        listings = self._listings()
        first: dict[str, int] = {}
        for number, listing in enumerate(listings):
            for path in listing or ():
                # The first folder that has a name is what readers get; each later one is compared with it.
                holder = first.setdefault(path, number)
                if holder != number and not self._alike(path, holder, number):
                    places = f"{self.roots[holder]}/{path} and {self.roots[number]}/{path}"
                    difference = finding("files-differ", "files", f"{places} differ", file=path)
                    raise DamagedCheckpoint(
                        f"cannot read {self.url}: {places} have one name in the source, and different bytes",
                        hint="name the folders of one save, or remove the file that does not belong to it",
                        findings=(difference,),
                        file=path,
                    )

    def list(self) -> dict[str, int]:
        """List the files: relative path -> size in bytes."""
        if self._folder_listings is None:
            return {path: status.nbytes for path, status in self.stamped().items()}
        sizes: dict[str, int] = {}
        for listing in reversed(self._listings()):
            sizes.update({path: status.nbytes for path, status in (listing or {}).items()})
        return dict(sorted(sizes.items()))

    def size(self, path: str) -> int | None:
        """Return the size in bytes, or None when there is no such file."""
        holder = self._holder(path)
        return None if holder is None else self.stores[holder].size(path)

    def look(self, path: str) -> FileStatus | None:
        """Return size, stamp and ctime of one file, or None when there is no such file."""
        holder = self._holder(path)
        return None if holder is None else self.stores[holder].look(path)

    def stamp(self, path: str) -> str | None:
        """Return a text that changes when the file is rewritten, or None when there is no such file."""
        holder = self._holder(path)
        return None if holder is None else self.stores[holder].stamp(path)

    def ctime(self, path: str) -> int | None:
        """Return when its status last changed, ns, or None."""
        holder = self._holder(path)
        return None if holder is None else self.stores[holder].ctime(path)

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes."""
        return self._store(path).read(path, start, length)

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly."""
        self._store(path).read_into(path, start, into)

    def close(self) -> None:
        """Close every folder."""
        with ExitStack() as ends:
            for store in self.stores:
                ends.callback(store.close)

    def free_bytes(self) -> int | None:
        """Return None: nothing is written here."""
        return None

    def _refuse(self, *_: object, **__: object) -> Never:
        raise UsageError(
            f"cannot write to {self.url}: it is a source of {len(self.roots)} folders", hint="name one folder"
        )

    writer = joint = put = remove = remove_all = copy_to = _refuse

    def _holder(self, path: str) -> int | None:
        """Return the number of the first folder that has a file, or None."""
        pairs = enumerate(self._listings())
        return next((number for number, listing in pairs if listing and path in listing), None)

    def _store(self, path: str) -> Store:
        holder = self._holder(path)
        if holder is None:
            raise SourceUnreadable(
                f"{path} is in none of the folders of {self.url}",
                hint="name the folder that has it",
                file=path,
            )
        return self.stores[holder]

    def _listings(self, *, anew: bool = False) -> _Listings:
        """Return the files of each folder, which are listed once unless ``anew``."""
        with self._lock:
            if self._folder_listings is None or anew:
                with ThreadPoolExecutor(min(_LISTINGS, len(self.stores))) as pool:
                    self._folder_listings = tuple(pool.map(_listing, self.stores))
            return self._folder_listings

    def _alike(self, path: str, first_number: int, second_number: int) -> bool:
        """Report whether a file has the same bytes in two folders."""
        first, second = self.stores[first_number], self.stores[second_number]
        nbytes = first.size(path)
        # Different sizes need no reading.
        if nbytes is None or nbytes != second.size(path):
            return False
        if first.local is not None and second.local is not None:
            mine, its = (os.stat(store.local / path) for store in (first, second) if store.local is not None)
            # One file by two paths, such as hard links, needs no comparison.
            if os.path.samestat(mine, its):
                return True
        for offset in range(0, nbytes, _BLOCK):
            length = min(_BLOCK, nbytes - offset)
            if first.read(path, offset, length) != second.read(path, offset, length):
                return False
        return True


class MergedAhead(MergedStore):
    """A merged source with folders on S3, which are read ahead; see `ckptcore.store.ahead.ReadsAhead`."""

    @property
    def pins(self) -> bool:
        """Whether each file is read in one version, so that a change needs no second look."""
        return all(isinstance(store, ReadsAhead) and store.pins for store in self.stores)

    def expect(self, reads: ExpectedReads, memory: int) -> None:
        """Read ahead what is expected of each folder on S3, with at most ``memory`` bytes of blocks."""
        ahead = [store for _, store in self._ahead()]
        for store, (part, share) in zip(ahead, self.split(reads, memory), strict=True):
            store.expect(part, share)

    def split(self, reads: ExpectedReads, memory: int) -> list[tuple[ExpectedReads, int]]:
        """Return the expected reads of each folder on S3, and its share of the memory."""
        holders = [self._holder(path) for path in reads.paths]
        of = np.array([-1 if holder is None else holder for holder in holders], np.int64)[reads.file]
        numbers = [number for number, _ in self._ahead()]
        # Memory is shared by the folders that are read at all.
        share = memory // max(1, sum(bool((of == number).any()) for number in numbers))
        parts = []
        for number in numbers:
            rows = of == number
            # A bare file has no checksum of its own, and its store may have one.
            bare = frozenset(p for p, holder in zip(reads.paths, holders, strict=True) if holder == number)
            part = ExpectedReads(
                reads.paths,
                reads.file[rows],
                reads.start[rows],
                reads.end[rows],
                reads.begins[rows],
                reads.ends[rows],
                bare & reads.bare,
                None if reads.band is None else reads.band[rows],
            )
            parts.append((part, share))
        return parts

    def forget(self, path: str, start: int, length: int) -> bool:
        """Drop what is kept of a range; return whether that can make a difference."""
        store = self._store(path)
        return isinstance(store, ReadsAhead) and store.forget(path, start, length)

    def prove(self) -> StoreProof:
        """Compare what was read of the expected bare files with the checksums of each store."""
        proofs: Sequence[StoreProof] = [store.prove() for _, store in self._ahead()]
        return StoreProof(
            frozenset().union(*(proof.proven for proof in proofs)),
            frozenset().union(*(proof.unproven for proof in proofs)),
        )

    def _ahead(self) -> Iterator[tuple[int, ReadsAhead]]:
        for number, store in enumerate(self.stores):
            if isinstance(store, ReadsAhead):
                yield number, store


def _listing(store: Store) -> dict[str, FileStatus] | None:
    try:
        return store.stamped()
    except SourceUnreadable as error:
        # Any other error, such as missing rights, does not mean that the folder is missing.
        if error.values.get("absent"):
            return None
        raise
