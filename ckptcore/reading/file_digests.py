"""Compute digests of files: of one that is read here, and of those that other work has read.

Of these only the small holes are read that it left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from blake3 import blake3

from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.store import Readable, Store
from ckptcore.store.ahead import ReadsAhead
from ckptcore.utils.part_digest import Hasher, hasher_like

BLOCK = 4 << 20  # bytes of a file in memory


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
