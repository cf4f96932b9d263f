"""Find the files and objects of a source that its child does not prove.

The fingerprints prove tensors. So a file is proven if the source's own reader found tensors or objects in it,
or read it as the description of their layout, or if the catalog has its digest among the child's files.
Everything else is not proven, whatever its name: other files, links, FIFOs, sockets, devices, empty folders,
and objects that the child lacks or has with another value.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from fnmatch import fnmatchcase

from ckptcore.catalog.types import FileRow
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import used
from ckptcore.execution.receipts import has_digest
from ckptcore.store import Store, open_store, split_url
from ckptcore.store.contents import NameKind, Thing

# Files that only describe where tensors and objects are stored; they count if their reader read them.
_DESCRIBE = (".metadata", "__*.metadata", "metadata.json", "*.index.json", ".zarray")
# Findings that do not mean that the manifest, and so the child, lacks something; files that they name are
# listed by themselves. Any other warning or error does.
_HARMLESS = frozenset(
    {
        "consolidated-differs",
        "flat-buffers",
        "missing-part",
        "names-unchecked",
        "not-finite",
        "shape-lost",
        "stale-file",
        "stray-file",
        "total-mismatch",
        "unlisted-tensor",
        "unusual-layout",
    }
)


def not_proven(
    source: Manifest, uri: str, things: Mapping[str, Thing], child: Manifest, files: Iterable[FileRow]
) -> tuple[tuple[str, str], ...]:
    """List everything that would be lost with the source.

    Files of the source that are as long as one of the child's are read.

    Args:
        source: The source's manifest.
        uri: Path or URL of the source.
        things: All files of the source.
        child: The child's manifest.
        files: The child's files in the catalog, which the caller verified.

    Returns:
        (name, kind) in order; the names of folders end with a slash.
    """
    lost = dict.fromkeys(_lost_objects(source, child), "object")
    for found in source.findings:
        if found.severity != "info" and found.code not in _HARMLESS:
            lost[found.fqn or found.file or found.code] = found.code
    if "" in things:
        return tuple(lost.items())  # it is one file, and the files beside it stay
    above = _inner(source, uri)
    files_of = used(source)
    proven = {above + name for name in files_of.data}
    proven |= {above + name for name in files_of.described if _describes(name)}
    known: dict[int, set[str]] = {}
    for row in files:
        if row.digest is not None:
            known.setdefault(row.nbytes, set()).add(row.digest)
    filled = {os.path.dirname(name.rstrip("/")) + "/" for name in things}
    with closing(open_store(uri)) as store:
        for name, thing in things.items():
            if thing.kind is NameKind.FOLDER:
                if name not in filled:
                    lost[name] = "empty folder"
            elif thing.kind is not NameKind.FILE:
                lost[name] = thing.kind.value
            elif name not in proven and not _is_known(store, name, thing, known):
                lost[name] = "file"
    return tuple(lost.items())


def accepted(name: str, globs: Iterable[str]) -> bool:
    """Return whether the user accepts the loss of a name; a glob may match a folder without its slash."""
    return any(fnmatchcase(name, glob) or fnmatchcase(name.rstrip("/"), glob) for glob in globs)


def descriptions_last(manifest: Manifest, uri: str, things: Mapping[str, Thing]) -> list[str]:
    """Return the names of things, files with tensors last: a reader finds nothing rather than a half."""
    _, name = split_url(uri)
    data = used(manifest).data
    return sorted(things, key=lambda thing: (thing or name).removeprefix(_inner(manifest, uri)) in data)


def _inner(manifest: Manifest, uri: str) -> str:
    inner = manifest.root.rstrip("/").removeprefix(uri.rstrip("/")).strip("/")
    return f"{inner}/" if inner else ""


def _describes(path: str) -> bool:
    name = os.path.basename(path)
    return any(fnmatchcase(name, glob) for glob in _DESCRIBE)


def _lost_objects(source: Manifest, child: Manifest) -> list[str]:
    there = {blob.key: blob for blob in child.blobs}
    lost = []
    for blob in source.blobs:
        copy = there.get(blob.key)
        readable = blob.known and not blob.refused and copy is not None and copy.known and not copy.refused
        if not readable or copy is None or copy.tree != blob.tree:
            lost.append(blob.key)
    return lost


def _is_known(store: Store, name: str, thing: Thing, known: Mapping[int, Collection[str]]) -> bool:
    """Report whether a file has one of the known digests for its size."""
    return thing.nbytes in known and has_digest(store, name, thing.nbytes, known[thing.nbytes])
