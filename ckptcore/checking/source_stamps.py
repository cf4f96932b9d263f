"""Detect changes of source files since the plan was made.

A manifest records names, sizes and headers, but a file can be rewritten with equal ones. Its stamp
(size, modification time and inode; on object stores the ETag) is recorded when a plan is saved, and
compared before a file is written, before an earlier one is reused, and before publishing.

A writer can restore a modification time, but not the time of the last change of status (ctime).
But a chmod or a backup changes the ctime too, so it is not part of a source's identity. It is in a separate
file beside the stamps. Where only the ctime differs, the source is read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from blake3 import blake3

from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import placed
from ckptcore.errors import SourceChanged, SourceUnreadable
from ckptcore.store import Store, fetch, open_store, put_each
from ckptcore.store.ahead import ReadsAhead
from ckptcore.store.file_status import YOUNG
from ckptcore.utils import host
from ckptcore.utils.foreign_text import InvalidText, load_json_object

NAME, CTIMES = "source.json", "source-ctimes.json"


def stamp_files(manifest: Manifest, source: Store) -> dict[str, str | None]:
    """Return the stamp of every file that stores the manifest's items."""
    return stamps_now(placed(manifest), source)


def stamps_now(paths: Collection[str], source: Store) -> dict[str, str | None]:
    """Return the stamps of files as they are now: on S3 from one listing, and not one by one."""
    if isinstance(source, ReadsAhead) and len(paths) > 1:
        # Without the right to list, or without any file left, they are looked at one by one.
        with contextlib.suppress(SourceUnreadable):
            statuses = source.stamped()
            return {path: statuses[path].stamp if path in statuses else None for path in paths}
    return {path: source.stamp(path) for path in paths}


def take_ctimes(paths: Iterable[str], source: Store) -> dict[str, int | None]:
    """Return the ctime of each file (`ckptcore.store.Readable.ctime`).

    Call it before taking the stamps, or a change in between would be missed.
    """
    return {path: source.ctime(path) for path in paths}


def take_listed(
    manifest: Manifest, source: Store, *, just_read: bool = False
) -> tuple[dict[str, int | None], dict[str, str | None], bool]:
    """Return (ctimes, stamps, whether the files are those that the manifest was read from).

    The ctimes are older than the first byte that was read for the manifest. The last value is False where
    that is unknown: a file was written after it was listed, or another kind of store listed it. Then the
    caller reads the manifest again.

    just_read: the manifest was read a moment ago. Where every read is for the version that was listed for it,
    there is no second listing.
    """
    paths, listed = placed(manifest), manifest.stamps
    if just_read and _pins(source) and all(path in listed for path in paths):
        return {path: listed[path][1] for path in paths}, {path: listed[path][0] for path in paths}, True
    ctimes, stamps = take_ctimes(paths, source), stamp_files(manifest, source)
    if all(path in listed and listed[path][0] == stamps[path] for path in paths):
        return {path: listed[path][1] for path in paths}, stamps, True
    return ctimes, stamps, False


def require_planned(stamps: Mapping[str, str | None], source: Store) -> None:
    """Call `require_same` for stamps that were taken a moment ago, unless each read proves them."""
    if not _pins(source):
        require_same(stamps, source)


def _pins(source: Store) -> bool:
    return isinstance(source, ReadsAhead) and source.pins


def settled_ctimes(paths: Iterable[str], source: Store) -> dict[str, int | None]:
    """Call `take_ctimes`, and wait a little if needed, until ctimes are old enough to reveal later writes."""
    # Times of most file systems advance in 10 ms, of FAT and some older ones in 2 s: see `YOUNG`.
    for wait in (0.03, 2.2, 0.0):
        ctimes = take_ctimes(paths, source)
        if YOUNG not in ctimes.values():
            break
        host.sleep(wait)
    return ctimes


def untouched(before: Mapping[str, int | None] | None, now: Mapping[str, int | None]) -> bool:
    """Report whether no ctime has changed since ``before``; True on a store without ctimes."""
    if before is None:  # not recorded, or truncated by a crash
        return all(ctime is None for ctime in now.values())
    return all(before.get(path, YOUNG) == ctime != YOUNG for path, ctime in now.items())


def save(
    plan: Store, stamps: Mapping[str, str | None], ctimes: Mapping[str, int | None] | None = None
) -> None:
    """Record stamps and ctimes in a plan's folder."""
    put_each(plan, packed(stamps, ctimes))


def packed(
    stamps: Mapping[str, str | None], ctimes: Mapping[str, int | None] | None = None
) -> list[tuple[str, bytes]]:
    """Return the (name, bytes) of the files that `save` writes."""
    times = [] if ctimes is None else [(CTIMES, canonical_json(ctimes))]
    return [*times, (NAME, canonical_json(stamps))]


def load(plan: Store) -> dict[str, str | None] | None:
    """Return the stamps of a plan's folder, or None when they were not recorded, or truncated by a crash."""
    return _load(plan, NAME)


def load_ctimes(plan: Store) -> dict[str, int | None] | None:
    """Return the ctimes of a plan's folder like `load`."""
    return _load(plan, CTIMES)


def digest(stamps: Mapping[str, str | int | None] | None) -> str | None:
    """Return BLAKE3 over paths and stamps (or ctimes) in the order of paths; None if any is unknown.

    >>> digest({"a": 1, "b": None}), digest({"b": 2, "a": 1}) == digest({"a": 1, "b": 2})
    (None, True)
    """
    if stamps is None or any(value is None or value == YOUNG for value in stamps.values()):
        return None
    hasher = blake3()
    for path in sorted(stamps):
        hasher.update(f"{path}\0{stamps[path]}\n".encode("utf-8", "surrogateescape"))
    return hasher.hexdigest()


def published_stamp(manifest: Manifest) -> str | None:
    """Return a digest over the identity of a checkpoint's files, ctimes included; None if it is unknown."""
    with contextlib.closing(open_store(manifest.root)) as store:
        if store.local is None:
            return None  # one that needs requests, and the store's word for it
        paths = placed(manifest)
        times, stamps = digest(take_ctimes(paths, store)), digest(stamp_files(manifest, store))
    return None if times is None or stamps is None else digest({"status": times, "identity": stamps})


def _load(plan: Store, name: str) -> dict[str, Any] | None:
    data = fetch(plan, name)
    if data is None:
        return None
    try:
        return load_json_object(data)
    except InvalidText:
        return None


def require_same(stamps: Mapping[str, str | None], source: Store, paths: Sequence[str] | None = None) -> None:
    """Raise `SourceChanged` when a file (one of ``paths``, or any) differs from its recorded stamp."""
    checked_paths = list(stamps if paths is None else paths)
    # A folder of this machine stops at the first file that changed; a listing has them all.
    listed_stamps = stamps_now(checked_paths, source) if source.local is None else None
    for path in checked_paths:
        current_stamp = source.stamp(path) if listed_stamps is None else listed_stamps[path]
        if current_stamp != stamps.get(path):
            raise SourceChanged(
                f"{source.url}/{path} changed since it was first read "
                f"(was {stamps.get(path)}, got {current_stamp})",
                hint="the source is being written; run again when writing has ended",
                file=path,
            )
