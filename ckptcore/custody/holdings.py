"""Find what a checkpoint holds, by content ids (`ckptcore.fingerprints.holdings`).

Everything in a folder is accounted for. Of a file that the reader accounts for
(`ckptcore.core.byte_ledger`), each byte is of a tensor or an object, or structure, or unused; any other file
counts by its digest. What nothing identifies (unused bytes, links, FIFOs, empty folders, values that were not
built) is a holding without an id.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from itertools import chain

from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.comparison.object_leaves import exact_leaves
from ckptcore.core.manifest import Manifest
from ckptcore.core.subset import select
from ckptcore.core.unused_bytes import accounted_files, unused_bytes
from ckptcore.core.used_files import used
from ckptcore.errors import CkptError
from ckptcore.fingerprints.holdings import (
    FILE,
    OBJECT,
    Holding,
    Ids,
    file_holding,
    file_spec,
    ids_of_tensors,
    leaf_holding,
    tensor_holdings,
    tensor_spec,
)
from ckptcore.fingerprints.sums import Fingerprinted
from ckptcore.planning.request import Settings
from ckptcore.reading.file_digests import digest_of
from ckptcore.reading.unused_in_items import unused_in_items
from ckptcore.store import open_store, split_url
from ckptcore.store.file_status import FileStatus, NameKind

EMPTY_FOLDER = "empty folder"
_LOCAL, _REMOTE = 2, 16  # threads that read heads of items
UNUSED = "unused bytes"  # of a file: they belong to no tensor, object or structure
# Warnings of readers about what is in the manifest, or about nothing that is there. Any other warning or
# error means that something was read and left out.
_COMPLETE = frozenset(
    {
        "consolidated-differs",  # its files are holdings of their own
        "flat-buffers",
        "missing-part",
        "odd-value",
        "shape-lost",
        "total-mismatch",
        "unlisted-tensor",
        "unread-state",
        "unusual-layout",
    }
)


def tensors_read(manifest: Manifest, settings: Settings) -> list[Holding]:
    """Read all tensors, and return their holdings, not numbered."""
    return tensor_holdings(_sums_read(manifest, settings), {t.fqn: t.nbytes for t in manifest.tensors})


def tensor_ids_read(
    manifest: Manifest, settings: Settings, is_wanted: Callable[[str], bool]
) -> tuple[Ids, bool]:
    """Read tensors, and return the content ids of those that can be read, and whether all of them can.

    Args:
        manifest: The checkpoint.
        settings: Memory and threads.
        is_wanted: Whether to read those of a spec.

    Raises:
        CkptError: Something cannot be read now, and a retry may help.
    """
    forms = {(t.dtype, t.shape) for t in manifest.tensors}
    matching_forms = {form for form in forms if is_wanted(tensor_spec(*form))}
    rows = [row for row, t in enumerate(manifest.tensors) if (t.dtype, t.shape) in matching_forms]
    part = manifest if len(rows) == len(manifest.tensors) else select(manifest, rows)
    sums = _sums_of_readable(part, settings)
    return ids_of_tensors(sums), len(sums) == len(part.tensors)


def _sums_of_readable(manifest: Manifest, settings: Settings) -> tuple[Fingerprinted, ...]:
    """Return the sums of all tensors that can be read: none keeps the others from it."""
    count = len(manifest.tensors)
    try:
        return _sums_read(manifest, settings)
    except CkptError as error:
        if error.transient:
            raise
        if count == 1:
            return ()
    # By halves, for the reader names neither all that are damaged nor the first in order.
    halves = range(count // 2), range(count // 2, count)
    return tuple(chain.from_iterable(_sums_of_readable(select(manifest, half), settings) for half in halves))


def _sums_read(manifest: Manifest, settings: Settings) -> tuple[Fingerprinted, ...]:
    return fingerprint(manifest, settings).tensors if manifest.tensors else ()


def objects_of(manifest: Manifest) -> Iterator[Holding]:
    """Yield the holdings of objects, leaf by leaf; a value that was not built has no id."""
    for blob in manifest.blobs:
        if blob.known and not blob.refused:
            for path, form in exact_leaves(blob):
                yield leaf_holding(blob.key, path, form)
        else:
            yield Holding(OBJECT if blob.unread is None else "unreadable tensor", blob.key)


def rest_of(
    manifest: Manifest, uri: str, things: Mapping[str, FileStatus], sizes: Collection[int] | None = None
) -> Iterator[Holding]:
    """Yield the holdings of everything in a folder that is neither tensor nor object.

    Args:
        manifest: Of the checkpoint there.
        uri: Its path or URL.
        things: All of the folder, links not followed.
        sizes: Files of these sizes are read for their id; None for all.
    """
    above = "" if "" in things else inner_path(manifest, uri)
    accounted = accounted_files(manifest) - used(manifest).compared
    for finding in manifest.findings:
        # A file that the reader does not account for is a holding of its own.
        listed = finding.file is not None and finding.file not in accounted and "" not in things
        if finding.severity != "info" and finding.code not in _COMPLETE and not listed:
            yield Holding(finding.code, finding.fqn or finding.file or finding.code)
    for path, nbytes in _unused(manifest, accounted).items():
        yield Holding(UNUSED, above + path, None, "", nbytes)
    if "" in things:
        return  # it is one file, and the files beside it stay
    with closing(open_store(uri)) as store:
        filled = {os.path.dirname(name.rstrip("/")) + "/" for name in things}
        interpreted = {above + name for name in accounted}
        for name, thing in things.items():
            if thing.kind is NameKind.FOLDER:
                if name not in filled:
                    yield Holding(EMPTY_FOLDER, name)
            elif thing.kind is not NameKind.FILE:
                yield Holding(thing.kind.value, name)
            elif name not in interpreted:
                if sizes is None or thing.nbytes in sizes:
                    yield file_holding(name, thing.nbytes, digest_of(store, name, thing.nbytes))
                else:
                    yield Holding(FILE, name, None, file_spec(thing.nbytes), thing.nbytes)


def file_holdings(
    uri: str, things: Mapping[str, FileStatus], sizes: Collection[int | None]
) -> tuple[Holding, ...]:
    """Return the holdings of all files of these sizes at a place, read now."""
    folder, name = split_url(uri) if "" in things else (uri, "")
    with closing(open_store(folder)) as store:
        return tuple(
            file_holding(path or name, thing.nbytes, digest_of(store, path or name, thing.nbytes))
            for path, thing in things.items()
            if thing.kind is NameKind.FILE and thing.nbytes in sizes
        )


def inner_path(manifest: Manifest, uri: str) -> str:
    """Return where a checkpoint's own folder is below its place: empty, or a path with a slash behind it."""
    inner = manifest.root.rstrip("/").removeprefix(uri.rstrip("/")).strip("/")
    return f"{inner}/" if inner else ""


def descriptions_last(manifest: Manifest, uri: str, things: Mapping[str, FileStatus]) -> list[str]:
    """Return the names of things, files with tensors last: a reader finds nothing rather than a half."""
    _, name = split_url(uri)
    data, inner = used(manifest).data, inner_path(manifest, uri)
    return sorted(things, key=lambda thing: (thing or name).removeprefix(inner) in data)


def _unused(manifest: Manifest, accounted: Collection[str]) -> dict[str, int]:
    """Return how many bytes of each accounted file belong to nothing, between items and inside of them."""
    originals = manifest.without_copies()
    with closing(open_store(manifest.root)) as store:
        inside = unused_in_items(originals, store, _LOCAL if store.local is not None else _REMOTE)
    nbytes: dict[str, int] = {}
    for unused_range in dict.fromkeys((*(unused_bytes(manifest) or ()), *inside)):
        if unused_range.file in accounted:
            nbytes[unused_range.file] = (
                nbytes.get(unused_range.file, 0) + unused_range.end - unused_range.start
            )
    return nbytes
