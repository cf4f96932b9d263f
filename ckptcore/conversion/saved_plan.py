"""Save a plan in a folder, and load it again.

The folder has ``request.json`` and the plan itself, with the digests of its inputs. A user can inspect and
keep it. It is carried out only if the source is unchanged.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from ckptcore.checking import source_stamps as stamps
from ckptcore.checking.examine import inspect
from ckptcore.conversion.destination import require_apart, require_place
from ckptcore.conversion.staged_plan import REQUEST
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
from ckptcore.planning.compose import Composed, compose
from ckptcore.planning.plan import file_name, load_head, save_head
from ckptcore.planning.request import Request
from ckptcore.store import open_source_store
from ckptcore.store.sealed import SealedFolder, SealedStore
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parsing


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
    require_apart(str(folder), request)
    home, store = _sealed(folder)
    try:
        fd = home.open()
        existed = fd is not None
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
    manifest = inspect(request.source, request.recover, request.keep_quantized, request.weights)
    if manifest.digest != head.manifest_digest:
        raise SourceChanged(
            f"{request.source} changed since the plan was made: its manifest digest is "
            f"{manifest.digest[:16]}, the plan was made from {head.manifest_digest[:16]}"
        )
    with closing(open_source_store(manifest.root)) as source:
        stamps.require_same(stamps.load(store) or {}, source)
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
