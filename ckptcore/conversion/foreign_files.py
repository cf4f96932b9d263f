"""Check that every file of a destination that is to be replaced may be removed.

A file may be removed if the format's own reader uses it, if a row of the catalog records its digest, if the
same bytes are about to take its place, or if an interrupted publication wrote it. Any other file is foreign:
it is listed, and replaced only with ``--overwrite-foreign``. Special files, mounts, files of the source, and
what this process runs from are never replaced.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from ckptcore.conversion.destination import require_unprotected
from ckptcore.conversion.staging.staging import Publication, Replaced
from ckptcore.core.used_files import placed, used
from ckptcore.custody.judged import is_of_custody
from ckptcore.errors import CatalogError, CkptError, DestinationExists, UsageError
from ckptcore.formats import open_source, read_manifest
from ckptcore.planning.hub_files import NONE
from ckptcore.planning.model_card import is_untouched
from ckptcore.planning.request import Request
from ckptcore.reading.file_digests import has_digest
from ckptcore.store import Readable, local_path, open_store, split_url
from ckptcore.store.file_status import FileStatus, NameKind
from ckptcore.store.listing import Inventory, list_destination, list_settled_destination
from ckptcore.utils.merged_url import roots_of
from ckptcore.utils.text import some

_CARD = "README.md"
_MAX_CARD = 1 << 20
_SQLITE = b"SQLite format 3\0"
_Proofs = Mapping[str, set[tuple[int, str]]]  # path -> (bytes, BLAKE3) that it may have


def require_accounted(
    request: Request,
    extra: Mapping[str, bytes],
    catalog: str | bool | None = False,
    unfinished: Publication | None = None,
) -> Replaced:
    """List what a request replaces at its destination, and account for every file of it.

    Args:
        request: The request.
        extra: Path -> bytes of the small files that are about to be written.
        catalog: URL of the catalog whose rows count, None for the default one, False for none.
        unfinished: The publication that a killed run left unfinished.

    Returns:
        What may be replaced; empty if the destination is free.

    Raises:
        DestinationExists: There are foreign files, and the request does not replace them.
        UsageError: Something there is never replaced.
    """
    inventory = list_settled_destination(request.destination)
    if not inventory:
        return Replaced()
    # Before files are compared: no proof makes a home folder replaceable.
    require_unprotected(request.destination, _catalog_files(catalog))
    _require_ours_to_replace(request, inventory)
    # One file is replaced as what the user named; there is nothing beside it that could be foreign.
    if list(inventory) == [""] and inventory[""].kind is not NameKind.FOLDER:
        return Replaced(inventory)
    use = _used(request.destination)
    # Folders are accounted for by their files; links and special files are names like any other.
    names = [n for n, e in inventory.items() if e.kind is not NameKind.FOLDER and n not in use.read]
    if unfinished is not None:
        # What the killed run was to replace was accounted for when its record was written.
        names = [n for n in names if unfinished.replaces.inventory.get(n) != inventory[n]]
    if names and not request.overwrite_foreign:
        # From the cheapest to the most expensive: names that the reader uses are known without reading
        # a byte, the others only by their digests.
        proofs = _proofs(request.destination, extra, catalog, unfinished)
        with closing(open_store(request.destination)) as store:
            names = [n for n in names if not _is_known(store, n, inventory[n], proofs, request)]
        if names:
            raise DestinationExists(
                f"cannot replace {request.destination}: nothing accounts for {len(names)} of its files: "
                f"{some([n or 'the object of its own name' for n in names], 5)}{use.why}",
                hint="try another destination, move these files away, or replace them, too, with "
                "--overwrite-foreign",
                strangers=names[:100],
                count=len(names),
            )
    files = (name for name, status in inventory.items() if status.kind is not NameKind.FOLDER)
    # Those without tensors first, so that a reader finds no checkpoint rather than a part of one.
    return Replaced(inventory, tuple(name for name in files if name not in use.data))


@dataclass(frozen=True, slots=True)
class _Use:
    """The files that a reader uses. read: all; data: those with tensors. why: why no reader opens it."""

    read: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    why: str = ""


def _used(destination: str) -> _Use:
    """Return the files that the format's own reader uses, relative to the destination."""
    try:
        source = open_source(destination)
        with closing(source.store):
            manifest = read_manifest(source)
    # What no reader opens can still be replaced, file by file, if each is accounted for.
    except CkptError as error:
        return _Use(why=f" ({error.code}: {error.message})")
    root = _prefix_below(manifest.root, destination)
    data = {root + path for path in placed(manifest)}
    # An empty file is no part of what the reader uses, but an earlier, interrupted writer leaves such.
    empty = {root + f.file for f in manifest.findings if f.code == "empty-file" and f.file is not None}
    read = {root + path for path in used(manifest).all} | empty | {root + f.path for f in manifest.files}
    return _Use(frozenset(read), frozenset(data))


def _prefix_below(url: str, destination: str) -> str:
    # Local paths may be spelled in several ways: the manifest's root is compared in the same spelling.
    top = os.fspath(local_path(destination) or destination)
    inner = url.rstrip("/").removeprefix(top.rstrip("/")).strip("/")
    return f"{inner}/" if inner else ""


def _proofs(
    destination: str, extra: Mapping[str, bytes], catalog: str | bool | None, unfinished: Publication | None
) -> _Proofs:
    """Return name -> (bytes, BLAKE3) of contents that this conversion may replace: ours, or recorded ones."""
    proofs: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for name, data in extra.items():
        proofs[name].add((len(data), blake3(data).hexdigest()))
    # Files of a publication that was interrupted were written by this conversion, whichever run it was.
    if unfinished is not None:
        for name, (nbytes, digest) in unfinished.puts.items():
            if digest is not None:
                proofs[name].add((nbytes, digest))
    if catalog is not False:
        for name, nbytes, digest in _recorded(destination, catalog):
            proofs[name].add((nbytes, digest))
    return proofs


def _recorded(destination: str, catalog: str | bool | None) -> list[tuple[str, int, str]]:
    """Return (path, bytes, digest) of the files that the catalog records at a place."""
    from ckptcore.catalog import open_catalog
    from ckptcore.catalog.query import files_at

    try:
        opened = open_catalog(catalog if isinstance(catalog, str) else None, create=False)
    # No catalog exists yet: then it records nothing here. Any other
    # error must stop, else files would seem foreign.
    except CatalogError as error:
        if error.values.get("missing"):
            return []
        raise
    with opened as reader, reader.reading() as conn:
        rows = files_at(conn, destination)
    return [(row.path, row.nbytes, row.digest) for row in rows if row.digest]


def _is_known(store: Readable, name: str, entry: FileStatus, proofs: _Proofs, request: Request) -> bool:
    # "" is the destination itself, and a folder or link has no content to compare.
    if entry.kind is not NameKind.FILE or not name:
        return False
    digests = {digest for nbytes, digest in proofs.get(name, ()) if nbytes == entry.nbytes}
    if digests and has_digest(store, name, entry.nbytes, digests):
        return True
    # A card gets a line when it is published, so no planned digest fits; it is known by its own form.
    if name != _CARD or entry.nbytes > _MAX_CARD:
        return False
    return is_untouched(store.read(name, 0, entry.nbytes), split_url(request.destination)[1])


def _require_ours_to_replace(request: Request, inventory: Inventory) -> None:
    """Raise `UsageError` for what no option replaces."""
    special = [
        f"{name or request.destination} (a {status.kind.value})"
        for name, status in inventory.items()
        if status.kind not in (NameKind.FILE, NameKind.FOLDER, NameKind.LINK)
    ]
    if special:
        raise UsageError(
            f"cannot replace {request.destination}: {len(special)} of its files are special or mounts, which "
            f"are never replaced: {some(special)}",
            hint="choose another destination",
        )
    custody_names = [name for name in inventory if any(map(is_of_custody, name.split("/")))]
    if custody_names:
        raise UsageError(
            f"cannot replace {request.destination}: something in it is set aside, or has obligations: "
            f"{some(custody_names)}",
            hint="see ckptcore retire, and ckptcore catalog obligation list; or choose another destination",
        )
    if local_path(request.destination) is None:
        return
    named = [url for url in (request.config, request.tokenizer) if url is not None and url != NONE]
    # By device and inode: a hard link of a source file would be lost under whatever name it has.
    # Of the source and of what else is read; a link's target counts, since the file is what would be lost.
    read = inodes_of(request.source).union(*map(inodes_of, named))
    shared = [name or request.destination for name, e in inventory.items() if e.identity in read]
    if shared:
        raise UsageError(
            f"cannot replace {request.destination}: {len(shared)} of its files are those of the source, "
            f"--config or --tokenizer under another name: {some(shared)}",
            hint="choose another destination",
        )
    top = inventory[""]
    # A database is known by its first bytes, under whatever name; its rows may be nowhere else.
    if top.kind is NameKind.FILE and top.nbytes >= len(_SQLITE):
        parent, name = split_url(request.destination)
        with closing(open_store(parent)) as store:
            if store.read(name, 0, len(_SQLITE)) == _SQLITE:
                raise UsageError(
                    f"cannot replace {request.destination}: it is a SQLite database",
                    hint="choose another destination, or remove it yourself",
                )


def inodes_of(url: str) -> set[tuple[int, int] | None]:
    """Return (device, inode) of every file and folder of a place, and of its links' targets."""
    if roots := roots_of(url):
        return set().union(*map(inodes_of, roots))
    path = local_path(url)
    # Objects have no other names.
    if path is None:
        return set()
    inodes: set[tuple[int, int] | None] = set()
    for name, entry in list_destination(os.path.realpath(path)).items():
        if entry.kind in (NameKind.FILE, NameKind.FOLDER, NameKind.MOUNT):
            inodes.add(entry.identity)
        elif entry.kind is NameKind.LINK:
            try:
                target_stat = os.stat(os.path.join(path, name))
            except OSError:  # a broken link: nothing can be lost through it
                continue
            if stat.S_ISREG(target_stat.st_mode) or stat.S_ISDIR(target_stat.st_mode):
                inodes.add((target_stat.st_dev, target_stat.st_ino))
    return inodes


def _catalog_files(catalog: str | bool | None) -> dict[str, Path]:
    """Return description -> path of the SQLite files that are, or may be, catalogs of this user."""
    from ckptcore.catalog import default_url
    from ckptcore.catalog.database import parse, sqlite_path

    files = {}
    for label, url in {"the catalog": catalog, "the default catalog": default_url()}.items():
        path = sqlite_path(parse(url)) if isinstance(url, str) else None
        if path is not None:
            files[label] = path
    return files
