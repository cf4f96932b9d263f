"""Recognise two names of one file: a link to a sibling is the sibling.

Composer and others keep ``latest-rank0.pt`` as a link to the newest save beside it, and a folder may have a
link with the name that a loader expects. Read as two files, one save would be two.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptcore.formats.base import Source, natural


def without_links(source: Source, paths: Iterable[str]) -> list[str]:
    """Return the paths without further names of one file: a name with a number stays, which tells the step.

    An object store has no links: equal stamps mean equal content there, and both files are kept.
    """
    ordered = sorted(paths, key=lambda path: (not any(map(str.isdigit, _stem(path))), natural(path)))
    if source.store.local is None or len(ordered) < 2:
        return ordered
    files: dict[str, str] = {}
    for path in ordered:
        seen = source.seen.get(path)
        stamp = source.store.stamp(path) if seen is None else seen.stamp  # with the inode
        files.setdefault(path if stamp is None else stamp, path)
    return sorted(files.values(), key=natural)


def _stem(path: str) -> str:
    """Return a name up to the number of its rank."""
    return path.rsplit("/", 1)[-1].partition("rank")[0]
