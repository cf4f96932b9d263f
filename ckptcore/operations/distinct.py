"""Apart: are two checkpoints really two, or do their names lead to the same bytes?

Names prove nothing: a link, a mount, a hard link or another spelling of a URL makes a source look like a copy
of itself. On a machine the question goes to real paths and to the device and inode of every file; on object
stores to the service, bucket and key behind a URL.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.errors import UsageError
from ckptcore.store import join_url, local_path
from ckptcore.store.contents import NameKind, Thing, contents, thing_of
from ckptcore.store.place import Relation, identify, relation


def files_of(uri: str, manifest: Manifest, paths: Iterable[str] = ()) -> dict[str, Thing]:
    """Every file of a checkpoint as whoever reads it gets it: links followed, also those on the way.

    paths: files that somebody else knows to belong to it. Raises as `contents`, and `UsageError` where one
    of them is not there.
    """
    found = contents(uri, follow=True)
    root = local_path(manifest.root)
    if root is None or local_path(uri) is None:
        return found
    named = [os.path.join(root, file.path) for file in manifest.files if file.size is not None]
    named += [os.path.join(uri, path) for path in paths if os.path.isdir(uri)]
    known = {os.path.join(uri, name) if name else uri for name in found}
    if manifest.origin.get("file") is not None:
        named = [uri]  # the files beside it are not its own
    for path in named:
        if path not in known:
            try:
                found[os.path.relpath(path, uri)] = thing_of(os.stat(path))
            except OSError as error:
                raise UsageError(f"cannot look at {path}: {error.strerror}") from error
    return found


def require_apart(source: str, things: Mapping[str, Thing], child: str, files: Mapping[str, Thing]) -> None:
    """Raises `UsageError` with both names where a child has a file in common with its source, or one lies in
    the other. things: all of the source, no link followed. files: all of the child, links followed.

    A child's file that is a hard link to the source's would outlive the source's name. But then nothing was
    ever copied: whoever rewrites the one rewrites the other, and a proof of it proves the source by itself.
    """
    for name in (source, child):
        if "::" in name:  # a cache gives bytes back that nobody has any more
            raise UsageError(f"cannot prove anything through {name}: it is a chain of file systems")
    one, two = identify(source), identify(child)
    found = relation(two, one)
    if found is Relation.SAME:
        raise UsageError(f"{child} is {source}: both names lead to one place")
    if found is not Relation.APART:
        inner, outer = (child, source) if found is Relation.INSIDE else (source, child)
        raise UsageError(f"{inner} lies in {outer}")
    if one.family == two.family == "file":
        _require_other_files(source, things, child, files)
    elif local_path(source) is None and (one.family, one.endpoint) != (two.family, two.endpoint):
        # One server may have several names. A local source will be away when its child is read.
        _require_other_names(source, things, child, files)


def _require_other_files(
    source: str, things: Mapping[str, Thing], child: str, files: Mapping[str, Thing]
) -> None:
    # Of a file that is seen through a network or stacked file system the device differs, and often the inode:
    # but not its size and both of its times, to the nanosecond.
    mine: dict[Any, str] = {}
    for name, thing in things.items():
        if thing.kind is not NameKind.LINK:
            mine.update(dict.fromkeys(_identities(thing), name))
    for name, thing in files.items():
        twin = next((mine[each] for each in _identities(thing) if each in mine), None)
        if twin is not None:
            raise UsageError(
                f"{_full(child, name)} and {_full(source, twin)} are one {thing.kind.value}",
                hint="a child that shares files with its source proves nothing; convert to another place",
            )


def _identities(thing: Thing) -> Iterable[tuple[Any, ...]]:
    yield thing.device, thing.inode
    if thing.kind is NameKind.FILE and thing.nbytes:
        yield "seen elsewhere", thing.nbytes, thing.mtime, thing.ctime


def _require_other_names(
    source: str, things: Mapping[str, Thing], child: str, files: Mapping[str, Thing]
) -> None:
    """Raises `UsageError` for what may be one place behind two services: a bucket that is mounted here, or
    is served under another scheme, shows the same names with the same sizes."""
    for name, thing in files.items():
        if name and thing.nbytes and name in things and things[name].nbytes == thing.nbytes:
            raise UsageError(
                f"cannot tell {_full(child, name)} from {_full(source, name)}: they have one name and size",
                hint="convert to another format, or to a place behind the same kind of URL",
            )


def _full(url: str, name: str) -> str:
    return join_url(url, name) if name else url
