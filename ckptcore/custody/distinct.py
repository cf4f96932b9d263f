"""Prove that two checkpoints are distinct, and that their names do not lead to the same bytes.

Names prove nothing: a link, a mount, a hard link or another spelling of a URL makes a source look like a copy
of itself. Local places are compared by real paths and by the device and inode of every file; object stores by
the service, bucket and key of a URL. A copy counts only if its bytes are at its place: the record of an
obligation is beside that, and protects nothing to which a link leads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.errors import UsageError
from ckptcore.store import join_url, local_path
from ckptcore.store.file_status import FileStatus, NameKind, of_stat
from ckptcore.store.listing import contents
from ckptcore.store.place import Relation, identify, relation


def files_of(uri: str, manifest: Manifest, paths: Iterable[str] = ()) -> dict[str, FileStatus]:
    """List every file of a checkpoint as its readers see it: links are followed, also those on the path.

    Args:
        uri: Path or URL of the checkpoint.
        manifest: Its manifest.
        paths: Files that belong to it by another record, such as the catalog.

    Returns:
        Path below ``uri`` -> file.

    Raises:
        UsageError: One of the files does not exist.
        CkptError: An error of `contents`.
    """
    files = contents(uri, follow=True)
    root = local_path(manifest.root)
    if root is None or local_path(uri) is None:
        return files
    named = [os.path.join(root, file.path) for file in manifest.files if file.size is not None]
    named += [os.path.join(uri, path) for path in paths if os.path.isdir(uri)]
    listed_paths = {os.path.join(uri, name) if name else uri for name in files}
    if manifest.origin.get("file") is not None:
        named = [uri]  # the files beside it are not its own
    for path in named:
        if path not in listed_paths:
            try:
                files[os.path.relpath(path, uri)] = of_stat(os.stat(path))
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return files


def require_own_files(place: str, files: Iterable[str]) -> None:
    """Check that no link leads from a local copy to bytes at another place.

    A copy that is one file may have more beside it, as an index has.

    Args:
        place: Path or URL of the copy; it may be a link itself.
        files: The names of its files.

    Raises:
        UsageError: One is a link to another place.
    """
    path = local_path(place)
    if path is None:
        return
    real_place = os.path.realpath(path)
    folder = real_place if os.path.isdir(real_place) else os.path.dirname(real_place)
    for name in files:
        named_path = os.path.normpath(os.path.join(path, name))
        real_path = os.path.realpath(named_path)
        if os.path.commonpath([folder, real_path]) != folder:
            raise UsageError(
                f"{named_path} is a link to {real_path}: a copy of links does not keep what they lead to",
                hint="copy the file into its place, or convert to another place",
            )


def require_apart(
    source: str, things: Mapping[str, FileStatus], child: str, files: Mapping[str, FileStatus]
) -> None:
    """Check that a child has files of its own, none of its source, and that neither is inside the other.

    A child's hard link to a file of the source would survive the deletion. But then nothing was copied:
    rewriting one rewrites the other, and the proof compares the source with itself.

    Args:
        source: Path or URL of the source.
        things: All of the source, links not followed.
        child: Path or URL of the child.
        files: All of the child, links followed.

    Raises:
        UsageError: They are not distinct, or a link leads out of the child; the message names both files.
    """
    for name in (source, child):
        if "::" in name:  # a cache may return bytes that exist nowhere else any more
            raise UsageError(f"cannot prove anything through {name}: it is a chain of file systems")
    source_place, child_place = identify(source), identify(child)
    nesting = relation(child_place, source_place)
    if nesting is Relation.SAME:
        raise UsageError(f"{child} is {source}: both names lead to one place")
    if nesting is not Relation.APART:
        inner, outer = (child, source) if nesting is Relation.INSIDE else (source, child)
        raise UsageError(f"{inner} is inside {outer}")
    if source_place.family == child_place.family == "file":
        _require_other_files(source, things, child, files)
    elif local_path(source) is None and (source_place.family, source_place.endpoint) != (
        child_place.family,
        child_place.endpoint,
    ):
        # One server may have several names. A local source is set aside when its child is read.
        _require_other_names(source, things, child, files)
    require_own_files(child, files)


def _require_other_files(
    source: str, things: Mapping[str, FileStatus], child: str, files: Mapping[str, FileStatus]
) -> None:
    # Through a network or stacked file system, a file has another device, and often another inode. But its
    # size and both of its times are equal, to the nanosecond.
    mine: dict[Any, str] = {}
    for name, thing in things.items():
        if thing.kind is not NameKind.LINK:
            mine.update(dict.fromkeys(_identities(thing), name))
    for name, thing in files.items():
        twin = next((mine[identity] for identity in _identities(thing) if identity in mine), None)
        if twin is not None:
            raise UsageError(
                f"{_full(child, name)} and {_full(source, twin)} are one {thing.kind.value}",
                hint="a child that shares files with its source proves nothing; convert to another place",
            )


def _identities(thing: FileStatus) -> Iterable[tuple[Any, ...]]:
    yield thing.device, thing.inode
    if thing.kind is NameKind.FILE and thing.nbytes:
        yield "seen elsewhere", thing.nbytes, thing.mtime, thing.ctime


def _require_other_names(
    source: str, things: Mapping[str, FileStatus], child: str, files: Mapping[str, FileStatus]
) -> None:
    """Raise `UsageError` for what may be one place behind two services.

    A bucket that is mounted here, or is served under another scheme, has the same names with the same sizes.
    """
    for name, thing in files.items():
        if name and thing.nbytes and name in things and things[name].nbytes == thing.nbytes:
            raise UsageError(
                f"cannot distinguish {_full(child, name)} from {_full(source, name)}: equal names and sizes",
                hint="convert to another format, or to a place with the same kind of URL",
            )


def _full(url: str, name: str) -> str:
    return join_url(url, name) if name else url
