"""Held: what of all that lies in a source's folder does a child prove to hold, and what not?

The fingerprints of both speak for tensors. So a file is held when the source's own reader found tensors or
objects in it, or read it as the description of where they lie, or when the catalog knows its very digest
among the child's files. Anything else, whatever its name looks like, is held by nobody: other files, links,
FIFOs, sockets, devices, empty folders, and objects that the child has not, or not with the same value.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from fnmatch import fnmatchcase

from blake3 import blake3

from ckptcore.catalog.types import FileRow
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import used
from ckptcore.store import Store, open_store, split_url
from ckptcore.store.contents import NameKind, Thing

# Files that say where tensors and objects lie, and hold nothing else; they count where their reader read
# them.
_DESCRIBE = (".metadata", "__*.metadata", "metadata.json", "*.index.json", ".zarray")
# What a reader may say of a checkpoint although nothing of it is left out: files that it names are listed by
# themselves. Any other warning or error is about something that its manifest, and so its child, has not.
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
_BLOCK = 8 << 20


def unheld(
    source: Manifest, uri: str, things: Mapping[str, Thing], child: Manifest, files: Iterable[FileRow]
) -> tuple[tuple[str, str], ...]:
    """(name, what it is) of everything that would be lost with the source, in order; folders with a slash.

    things: all that lies in the source. files: what the catalog knows of the child's
    files, proven by somebody else. Reads files of the source that are as long as one of these.
    """
    lost = dict.fromkeys(_lost_objects(source, child), "object")
    for found in source.findings:
        if found.severity != "info" and found.code not in _HARMLESS:
            lost[found.fqn or found.file or found.code] = found.code
    if "" in things:
        return tuple(lost.items())  # it is one file, and its neighbours stay
    above = _inner(source, uri)
    files_of = used(source)
    held = {above + name for name in files_of.data}
    held |= {above + name for name in files_of.described if _describes(name)}
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
            elif name not in held and _digest_of(store, name, thing, known) is None:
                lost[name] = "file"
    return tuple(lost.items())


def accepted(name: str, globs: Iterable[str]) -> bool:
    """Whether somebody said that a name may be lost; a folder may be named with or without its slash."""
    return any(fnmatchcase(name, glob) or fnmatchcase(name.rstrip("/"), glob) for glob in globs)


def descriptions_last(manifest: Manifest, uri: str, things: Mapping[str, Thing]) -> list[str]:
    """The names of things, those that hold tensors last: a reader finds nothing rather than half of it."""
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
        whole = blob.known and not blob.refused and copy is not None and copy.known and not copy.refused
        if not whole or copy is None or copy.tree != blob.tree:
            lost.append(blob.key)
    return lost


def _digest_of(store: Store, name: str, thing: Thing, known: Mapping[int, Collection[str]]) -> str | None:
    """The digest of a file, when it is one of those that are known for its size."""
    if thing.nbytes not in known:
        return None
    whole = blake3()
    for at in range(0, thing.nbytes, _BLOCK):
        whole.update(store.read(name, at, min(_BLOCK, thing.nbytes - at)))
    found: str = whole.hexdigest()
    return found if found in known[thing.nbytes] else None
