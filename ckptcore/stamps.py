"""Stamps: are the source files still those that the plan was made from?

A manifest knows names, sizes and headers, but a file can be rewritten with equal ones. Its stamp
(size, modification time and inode; on object stores the ETag) is noted when a plan is saved, and
compared before a file is written, before an earlier one is reused, and before publishing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ckptcore.errors import SourceChanged
from ckptcore.frame import canonical_json
from ckptcore.manifest import Manifest
from ckptcore.store import Store

NAME = "source.json"


def take(manifest: Manifest, source: Store) -> dict[str, str | None]:
    """The stamp of every file that the manifest's items lie in."""
    used = sorted({int(f) for f in manifest.items.file.tolist()})
    return {manifest.files[f].path: source.stamp(manifest.files[f].path) for f in used}


def save(plan: Store, stamps: dict[str, str | None]) -> None:
    """Notes the stamps in a plan's folder."""
    plan.put(NAME, canonical_json(stamps))


def load(plan: Store) -> dict[str, str | None] | None:
    """The stamps of a plan's folder, or None when they were not noted, or cut off by a crash."""
    size = plan.size(NAME)
    if size is None:
        return None
    try:
        form = json.loads(plan.read(NAME, 0, size))
    except ValueError:
        return None
    return form if isinstance(form, dict) else None


def require_same(noted: dict[str, str | None], source: Store, paths: Sequence[str] | None = None) -> None:
    """Raises `SourceChanged` when a file (one of ``paths``, or any) is not as it was noted."""
    for path in noted if paths is None else paths:
        now = source.stamp(path)
        if now != noted.get(path):
            raise SourceChanged(
                f"{source.url}/{path} was {noted.get(path)} when it was first looked at, it is {now} now",
                hint="the source is being written; run again when it is at rest",
                file=path,
            )
