"""Compute digests of files: of one that is read here, and of those that other work has read.

Of these only the small holes are read that it left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from blake3 import blake3

from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.store import Readable, Store
from ckptcore.store.ahead import ReadsAhead
from ckptcore.utils.part_digest import Hasher, hasher_like
from ckptcore.utils.workers import run_jobs, usable_cores

BLOCK = 4 << 20  # bytes of a file in memory
_MOST_THREADS = 16


def digest_of(files: Readable, path: str, nbytes: int, start: int = 0, hasher: Hasher | None = None) -> str:
    """Return the digest of ``nbytes`` of a file from ``start`` on. Memory: one block.

    Args:
        files: Where the file is.
        path: Its name.
        nbytes: Bytes to digest.
        start: First byte.
        hasher: A fresh one; None for plain BLAKE3.
    """
    return digests_of(files, path, nbytes, [blake3() if hasher is None else hasher], start)[0]


def has_digest(files: Readable, path: str, nbytes: int, digests: Collection[str]) -> bool:
    """Report whether the first ``nbytes`` of a file have one of these digests; the file is read once."""
    kinds = {digest.rpartition(":")[0]: digest for digest in digests}
    computed = digests_of(files, path, nbytes, [hasher_like(digest) for digest in kinds.values()])
    return not set(digests).isdisjoint(computed)


def digests_of(
    files: Readable, path: str, nbytes: int, totals: Sequence[Hasher], start: int = 0
) -> list[str]:
    """Return several digests of ``nbytes`` of a file from ``start`` on, which is read once.

    totals: Fresh hashers, or such that have received what comes before.
    """
    block = bytearray(min(BLOCK, max(nbytes, 1)))
    for offset in range(0, nbytes, len(block)):
        view = memoryview(block)[: min(len(block), nbytes - offset)]
        files.read_into(path, start + offset, view)
        for total in totals:
            total.update(view)
    return [total.hexdigest() for total in totals]


def digests_like(
    files: Readable, recorded: Mapping[str, tuple[int, str]], step: Callable[[int], None]
) -> dict[str, str]:
    """Return the digests of several files, which are read side by side, each once and by one thread.

    Threads are enough here: a block takes two calls, and both give up Python's lock.

    Args:
        files: Where the files are.
        recorded: Path -> (bytes to digest, a digest of the kind to compute).
        step: Called with the bytes of each block before it is read; an error that it raises stops the work.

    Returns:
        Path -> digest.
    """
    digests: dict[str, str] = {}

    def prepare() -> Callable[[str], None]:
        buffer = memoryview(bytearray(BLOCK))

        def digest(path: str) -> None:
            nbytes, kind = recorded[path]
            hasher = hasher_like(kind)
            for offset in range(0, nbytes, BLOCK):
                block = buffer[: nbytes - offset]
                step(len(block))
                files.read_into(path, offset, block)
                hasher.update(block)
            digests[path] = hasher.hexdigest()

        return digest

    threads = min(usable_cores(), _MOST_THREADS, len(recorded))
    # The largest first: a thread that comes to it last would work alone.
    run_jobs(iter(sorted(recorded, key=lambda path: -recorded[path][0])), prepare, threads=threads)
    return digests


def file_digests(manifest: Manifest, store: Store) -> dict[str, str]:
    """Return the digests of a checkpoint's files that were read completely, after reading small holes.

    Args:
        manifest: The checkpoint; its ``sums`` observed the reads.
        store: Its folder.

    Returns:
        Path -> digest. A file that changed since it was listed has none.
    """
    sums = manifest.sums
    if sums is None:
        return {}
    # The reads of holes are summed, too, which completes the digests.
    store.observer = sums
    digests: dict[str, str] = {}
    for path, nbytes in _sized(manifest):
        holes = sums.holes(path, nbytes)
        if holes is None or path not in manifest.stamps:
            continue
        try:
            for start, end in holes:
                store.read(path, start, end - start)
        except CkptError:  # it is not there any more, or came altered
            continue
        digest = sums.digest(path, nbytes)
        if digest is not None:
            digests[path] = digest
    return {path: digests[path] for path in _as_listed(manifest, store, digests)}


def _sized(manifest: Manifest) -> Iterable[tuple[str, int]]:
    files = {f.path: f.size for f in (*manifest.files, *manifest.described)}
    return ((path, size) for path, size in files.items() if size is not None)


def _as_listed(manifest: Manifest, store: Store, paths: Iterable[str]) -> list[str]:
    """Return the files that have the stamp of the listing that is older than each read of them."""
    if isinstance(store, ReadsAhead) and store.pins:  # each read was for the version that was listed
        return list(paths)
    try:
        # Other stores may give a file another stamp in a listing than by itself.
        now = {p: status.stamp for p, status in store.stamped().items()} if store.local is None else None
        return [p for p in paths if (store.stamp(p) if now is None else now.get(p)) == manifest.stamps[p][0]]
    except CkptError:
        return []
