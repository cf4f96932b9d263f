"""Return the digests of files that other work has read, after reading the small holes that it left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.store import Readable
from ckptcore.store.ahead import ReadsAhead


def file_digests(manifest: Manifest, store: Readable) -> dict[str, str]:
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
        if holes is None:
            continue
        try:
            for start, end in holes:
                store.read(path, start, end - start)
            same = _is_as_listed(manifest.stamps, path, store)
        except CkptError:  # it is not there any more, or came altered
            continue
        digest = sums.digest(path, nbytes) if same else None
        if digest is not None:
            found[path] = digest
    return found


def _sized(manifest: Manifest) -> Iterable[tuple[str, int]]:
    files = {f.path: f.size for f in (*manifest.files, *manifest.described)}
    return ((path, size) for path, size in files.items() if size is not None)


def _is_as_listed(stamps: Mapping[str, tuple[str, int | None]], path: str, store: Readable) -> bool:
    """Report whether a file has the stamp of the listing that is older than each read of it."""
    if path not in stamps:
        return False
    if isinstance(store, ReadsAhead) and store.pins:  # each read was for the version that was listed
        return True
    return store.stamp(path) == stamps[path][0]
