"""Stamps: are the source files still those that the plan was made from?

A manifest knows names, sizes and headers, but a file can be rewritten with equal ones. Its stamp
(size, modification time and inode; on object stores the ETag) is noted when a plan is saved, and
compared before a file is written, before an earlier one is reused, and before publishing.

Whoever writes can put a modification time back; the time of the last change of status (ctime) it cannot.
But a chmod or a backup changes that one too, so it is no part of what a source is: it lies in a file of its
own beside the stamps, and where it alone differs the source is read again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blake3 import blake3

from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import placed
from ckptcore.errors import SourceChanged
from ckptcore.store import YOUNG, Store

NAME, CTIMES = "source.json", "source-ctimes.json"


def take(manifest: Manifest, source: Store) -> dict[str, str | None]:
    """The stamp of every file that the manifest's items lie in."""
    return {path: source.stamp(path) for path in placed(manifest)}


def take_ctimes(paths: Iterable[str], source: Store) -> dict[str, int | None]:
    """The ctime of each file (`ckptcore.store.Readable.ctime`). Before the stamps are taken, or a change in
    between would be missed."""
    return {path: source.ctime(path) for path in paths}


def take_listed(
    manifest: Manifest, source: Store
) -> tuple[dict[str, int | None], dict[str, str | None], bool]:
    """(ctimes, stamps, whether the files are those that the manifest was read from).

    The ctimes are older than the first byte that the manifest rests on. Where that is not known, because a
    file was written since it was listed, or listed by a store that spells versions otherwise, the last value
    is false: whoever asks reads the manifest again.
    """
    paths, seen = placed(manifest), manifest.stamps
    ctimes, stamps = take_ctimes(paths, source), take(manifest, source)
    if all(path in seen and seen[path][0] == stamps[path] for path in paths):
        return {path: seen[path][1] for path in paths}, stamps, True
    return ctimes, stamps, False


def settled_ctimes(paths: Iterable[str], source: Store) -> dict[str, int | None]:
    """As `take_ctimes`, once they are old enough to tell a later write, for which it waits a little."""
    for wait in (0.03, 2.2, 0.0):
        found = take_ctimes(paths, source)
        if YOUNG not in found.values():
            break
        time.sleep(wait)
    return found


def untouched(before: Mapping[str, int | None] | None, now: Mapping[str, int | None]) -> bool:
    """Whether no ctime has changed since ``before`` was taken; true on a store that has none."""
    if before is None:  # of a plan that an older version made
        return all(ctime is None for ctime in now.values())
    return all(before.get(path, YOUNG) == ctime != YOUNG for path, ctime in now.items())


def save(
    plan: Store, stamps: Mapping[str, str | None], ctimes: Mapping[str, int | None] | None = None
) -> None:
    """Notes what was taken in a plan's folder."""
    if ctimes is not None:
        plan.put(CTIMES, canonical_json(ctimes))
    plan.put(NAME, canonical_json(stamps))


def load(plan: Store) -> dict[str, str | None] | None:
    """The stamps of a plan's folder, or None when they were not noted, or cut off by a crash."""
    return _load(plan, NAME)


def load_ctimes(plan: Store) -> dict[str, int | None] | None:
    """As `load`, of the times of status: plans of older versions have none."""
    return _load(plan, CTIMES)


def digest(noted: Mapping[str, str | int | None] | None) -> str | None:
    """BLAKE3 over paths and stamps (or times of status) in the order of paths; None where any tells nothing.

    >>> digest({"a": 1, "b": None}), digest({"b": 2, "a": 1}) == digest({"a": 1, "b": 2})
    (None, True)
    """
    if noted is None or any(value is None or value == YOUNG for value in noted.values()):
        return None
    whole = blake3()
    for path in sorted(noted):
        whole.update(f"{path}\0{noted[path]}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _load(plan: Store, name: str) -> dict[str, Any] | None:
    size = plan.size(name)
    if size is None:
        return None
    try:
        form = json.loads(plan.read(name, 0, size))
    except ValueError:
        return None
    return form if isinstance(form, dict) else None


def require_same(noted: Mapping[str, str | None], source: Store, paths: Sequence[str] | None = None) -> None:
    """Raises `SourceChanged` when a file (one of ``paths``, or any) is not as it was noted."""
    for path in noted if paths is None else paths:
        now = source.stamp(path)
        if now != noted.get(path):
            raise SourceChanged(
                f"{source.url}/{path} was {noted.get(path)} when it was first looked at, it is {now} now",
                hint="the source is being written; run again when it is at rest",
                file=path,
            )
