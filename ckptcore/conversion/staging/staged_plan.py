"""Save a plan in its staging folder, or in a folder that a user names, and load it to carry it out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from ckptcore.checking import source_stamps as stamps
from ckptcore.checking.source_stamps import packed as packed_stamps
from ckptcore.conversion.destination import require_apart, require_place
from ckptcore.conversion.source_digests import inspected
from ckptcore.conversion.staging.staging import Publication, Staging
from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.manifest import Manifest
from ckptcore.errors import (
    DestinationExists,
    DestinationUnwritable,
    MalformedCheckpoint,
    SourceChanged,
    StagingForeign,
    UsageError,
)
from ckptcore.execution.receipts import read_receipt, write_receipt
from ckptcore.planning.compose import Composed, compose
from ckptcore.planning.plan import PlannedFile, file_name, load_head, save_files, save_head, save_plan
from ckptcore.planning.request import Request
from ckptcore.reading.file_digests import digest_of
from ckptcore.store import fetch, open_source_store, put_each
from ckptcore.store.sealed import SealedFolder, SealedStore
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parsing

REQUEST = "request.json"


def save(
    staging: Staging,
    composed: Composed,
    stamps: dict[str, str | None],
    ctimes: dict[str, int | None] | None = None,
    records: Sequence[tuple[str, bytes]] = (),
) -> None:
    """Save a plan, the stamps of its source, and the small files of its output in the staging folder.

    The head of the plan comes last, so that what has one is complete.

    Args:
        staging: The staging folder.
        composed: The plan.
        stamps: Of the source.
        ctimes: Of the source; None keeps those that were recorded when the first staged file was begun.
        records: (name, bytes) of records beside the plan.
    """
    # Small files first: a plan with a head counts as complete, and they are part of it.
    put_extra(staging, composed.plan.extra, composed.extra)
    files = partial(save_files, staging.plan, composed.files, packed_stamps(stamps, ctimes))
    # Files of the plan and records do not depend on each other.
    staging.together([partial(put_each, staging.root, records), files])
    save_head(staging.plan, composed.plan)


def staged_request(staging: Staging) -> Request:
    """Load the request of a staged plan; raise `UsageError`, `MalformedCheckpoint`."""
    store = staging.root
    data = fetch(store, REQUEST)
    if data is None:
        raise UsageError(f"{store.url} lacks {REQUEST}", hint="prepare the conversion again")
    try:
        with parsing("a request"):
            return Request.from_dict(load_json_object(data))
    except InvalidText as error:
        raise MalformedCheckpoint(
            f"cannot read {store.url}/{REQUEST}: {error}", hint="prepare the conversion again"
        ) from error


def planned_paths(files: Sequence[PlannedFile], extra: Sequence[tuple[str, str]]) -> set[str]:
    """Return the paths of all files that are published: those of a plan, and its small ones."""
    return {file.path for file in files} | {path for path, _ in extra}


def restore(
    staging: Staging,
    composed: Composed,
    stamps: dict[str, str | None],
    publication: Publication,
    *,
    same: bool,
) -> None:
    """Restore the plan and the receipts of a finished publication, to verify the published files.

    A run was killed while it removed them. same: the staged plan is complete.
    """
    if not same:
        save_plan(staging.plan, composed.plan, composed.files, packed_stamps(stamps))
    for receipt in publication.receipts:
        if read_receipt(staging.receipts, publication.plan, receipt.index) is None:
            write_receipt(staging.receipts, publication.plan, receipt)


def saved_digest(staging: Staging) -> str | None:
    """Return the digest of the staged plan, or None if there is none or it is incomplete."""
    if fetch(staging.plan, "head.json") is None:
        return None
    try:
        head = load_head(staging.plan)
    except MalformedCheckpoint:  # truncated by a crash: planned again
        return None
    names = staging.plan.list()  # a run that was killed while it cleaned up may leave only the head
    return head.digest if all(file_name(f.index) in names for f in head.files) else None


def put_extra(staging: Staging, planned: Sequence[tuple[str, str]], contents: Mapping[str, bytes]) -> None:
    """Write the small files to the staging folder, unless they are there already.

    planned: (path, BLAKE3) of each. contents: path -> bytes.
    """
    for path, digest in planned:
        data = contents[path]
        if staging.files.size(path) != len(data) or digest_of(staging.files, path, len(data)) != digest:
            staging.files.put(path, data)


def plan_into(folder: Path, request: Request, manifest: Manifest) -> Composed:
    """Plan a request, and save the plan in a folder, file by file as they are planned.

    After an error nothing is left.

    Args:
        folder: A new or empty folder.
        request: What to convert, and how.
        manifest: The source's manifest.

    Returns:
        The composed plan.

    Raises:
        DestinationExists: The folder is not empty.
        StagingForeign: It belongs to another user.
        CkptError: An error of `compose`.
    """
    # The plan's folder must not be inside of what the plan reads or writes.
    require_apart(str(folder), request)
    home, store = _sealed(folder)
    try:
        fd = home.open()
        existed = fd is not None
        # A plan that was saved before stays as it is: it may be waiting to be carried out.
        if fd is not None and os.listdir(fd):
            raise DestinationExists(f"{folder} exists", hint="name a new folder for the plan")
        home.open(make=True)
    except OSError as error:
        raise DestinationUnwritable(f"cannot write {folder}: {error.strerror or error}") from error
    _require_own(home, folder)
    try:
        composed = compose(request, manifest, lambda p: store.put(file_name(p.index), p.dumped))
        store.put(REQUEST, canonical_json(request.as_dict()))
        with closing(open_source_store(composed.plan.source)) as source:
            # Stamps, so that carrying out the plan later can prove that
            # the source is the one that was planned.
            stamps.save(store, stamps.stamp_files(manifest, source))
        save_head(store, composed.plan)
    except BaseException:
        _take_back(home, store, existed=existed)
        raise
    return composed


def load_request(folder: Path) -> Request:
    """Load the request of a plan folder, and check that the source still gives the same plan.

    Raises:
        SourceChanged: The source or a config file changed, or another version planned.
        StagingForeign: The folder belongs to another user, or every user can write to it: a request decides
            what is replaced, and by what.
        UsageError: The folder has no plan.
    """
    home, store = _sealed(folder)
    # A file here is the user's own: no staging folder of another user, which should be removed.
    size = None if os.path.isfile(folder) else store.size(REQUEST)
    if size is None:
        raise UsageError(f"no plan in {folder}", hint="make one with `ckptcore plan SRC DST --save DIR`")
    # Before the request is read, which decides what is replaced.
    _require_own(home, folder)
    head = load_head(store)
    try:
        data = store.read(REQUEST, 0, size)
        with parsing("a request"):
            request = Request.from_dict(load_json_object(data))
    except InvalidText as error:
        raise MalformedCheckpoint(f"{folder}/{REQUEST} is damaged: {error}", hint="plan again") from error
    require_place(
        request.destination, request.source, config=request.config, tokenizer=request.tokenizer, plan=folder
    )
    manifest = inspected(request)
    if manifest.digest != head.manifest_digest:
        raise SourceChanged(
            f"{request.source} changed since the plan was made: its manifest digest is "
            f"{manifest.digest[:16]}, the plan was made from {head.manifest_digest[:16]}"
        )
    with closing(open_source_store(manifest.root)) as source:
        stamps.require_same(stamps.load(store) or {}, source)
    # The plan's digest covers every option, config file and version that changes the outcome.
    if compose(request, manifest).plan.digest != head.digest:
        raise SourceChanged(
            f"cannot carry out {folder}: another version planned it, or the config files changed "
            f"(got plan {head.digest[:16]})",
            hint="make a new plan with `ckptcore plan SRC DST --save DIR`; nothing was written",
        )
    return request


def _sealed(folder: Path) -> tuple[SealedFolder, SealedStore]:
    """Open a plan's folder. Links in its path are followed: the user named them."""
    home = SealedFolder(Path(os.path.realpath(folder)), mode=0o777)
    return home, SealedStore(home)


def _require_own(home: SealedFolder, folder: Path) -> None:
    if home.anybody_may_write():
        raise StagingForeign(
            f"cannot use {folder}: every user may write to it",
            hint=f"check that the plan is still yours, then run `chmod o-w {folder}`",
            path=str(folder),
        )


def _take_back(home: SealedFolder, store: SealedStore, *, existed: bool) -> None:
    """Remove the saved part of a plan, and the folder unless it existed before."""
    for path in store.list():
        store.remove(path)
    if not existed:
        home.parent.joinpath(home.name).rmdir()
