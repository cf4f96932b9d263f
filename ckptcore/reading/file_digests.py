"""Return the digests of files that other work has read, after reading the small holes that it left."""

from __future__ import annotations

from collections.abc import Iterable

from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.store import Store
from ckptcore.store.ahead import ReadsAhead


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
    store.observer = sums
    found: dict[str, str] = {}
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
            found[path] = digest
    return {path: found[path] for path in _as_listed(manifest, store, found)}


def _sized(manifest: Manifest) -> Iterable[tuple[str, int]]:
    files = {f.path: f.size for f in (*manifest.files, *manifest.described)}
    return ((path, size) for path, size in files.items() if size is not None)


def _as_listed(manifest: Manifest, store: Store, paths: Iterable[str]) -> list[str]:
    """Return the files that have the stamp of the listing that is older than each read of them."""
    if isinstance(store, ReadsAhead) and store.pins:  # each read was for the version that was listed
        return list(paths)
    try:
        # Other stores may give a file another stamp in a listing than by itself.
        now = {p: seen.stamp for p, seen in store.stamped().items()} if store.local is None else None
        return [p for p in paths if (store.stamp(p) if now is None else now.get(p)) == manifest.stamps[p][0]]
    except CkptError:
        return []
