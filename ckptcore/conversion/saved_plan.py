"""Saved plans: a request, and the digests of what it was made from.

A saved plan is a folder: ``request.json`` and the plan itself, so that it can be looked at, kept, and
carried out only if the source is still the same.
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

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
from ckptcore.execution import source_stamps as stamps
from ckptcore.planning.compose import Composed, compose
from ckptcore.planning.plan import file_name, load_head, save_head
from ckptcore.planning.request import Request
from ckptcore.store import open_store
from ckptcore.store.sealed import SealedFolder, SealedStore


def plan_into(folder: Path, request: Request, manifest: Manifest) -> Composed:
    """Plans a request and saves the plan in a folder, file by file as they are planned.

    Raises `DestinationExists` when the folder is not empty, `StagingForeign` when it is another user's, and
    what `compose` raises; nothing is left then.
    """
    require_apart(str(folder), request)
    home, store = _sealed(folder)
    try:
        fd = home.open()
        there = fd is not None
        if fd is not None and os.listdir(fd):
            raise DestinationExists(f"{folder} exists", hint="name a new folder for the plan")
        home.open(make=True)
    except OSError as error:
        raise DestinationUnwritable(f"cannot write {folder}: {error.strerror or error}") from error
    _require_own(home, folder)
    try:
        composed = compose(request, manifest, lambda p: store.put(file_name(p.index), p.dumped))
        store.put(REQUEST, canonical_json(request.as_dict()))
        with closing(open_store(composed.plan.source)) as source:
            stamps.save(store, stamps.take(manifest, source))
        save_head(store, composed.plan)
    except BaseException:
        _take_back(home, store, there=there)
        raise
    return composed


def load_request(folder: Path) -> Request:
    """The request of a plan folder, when the source still gives the same plan.

    Raises `SourceChanged` otherwise, and `StagingForeign` for a folder that another user made, or that
    everybody can write to: a request says what is replaced, and by what.
    """
    home, store = _sealed(folder)
    size = store.size(REQUEST)
    if size is None:
        raise UsageError(f"{folder} holds no plan", hint="make one with `ckptcore plan SRC DST --save DIR`")
    _require_own(home, folder)
    head = load_head(store)
    try:
        request = Request.from_dict(json.loads(store.read(REQUEST, 0, size)))
    except (ValueError, TypeError, AttributeError) as error:
        raise MalformedCheckpoint(f"{folder}/{REQUEST} is damaged: {error}", hint="plan again") from error
    require_place(
        request.destination, request.source, config=request.config, tokenizer=request.tokenizer, plan=folder
    )
    manifest = inspect(request.source, request.recover, request.keep_quantized)
    if manifest.digest != head.manifest_digest:
        raise SourceChanged(
            f"{request.source} has changed since the plan was made: its manifest digest is "
            f"{manifest.digest[:16]}, the plan was made from {head.manifest_digest[:16]}"
        )
    with closing(open_store(manifest.root)) as source:
        stamps.require_same(stamps.load(store) or {}, source)
    if compose(request, manifest).plan.digest != head.digest:
        raise SourceChanged(
            f"cannot carry out {folder}: another version planned it, or the config files have changed "
            f"(got plan {head.digest[:16]})",
            hint="make a new plan with `ckptcore plan SRC DST --save DIR`; nothing was written",
        )
    return request


def _sealed(folder: Path) -> tuple[SealedFolder, SealedStore]:
    """A plan's folder. Links on the way to it are the user's, who named it."""
    home = SealedFolder(Path(os.path.realpath(folder)), mode=0o777)
    return home, SealedStore(home)


def _require_own(home: SealedFolder, folder: Path) -> None:
    if home.anybody_may_write():
        raise StagingForeign(
            f"cannot use {folder}: everybody may write to it",
            hint=f"see that the plan is still yours, then `chmod o-w {folder}`",
            path=str(folder),
        )


def _take_back(home: SealedFolder, store: SealedStore, *, there: bool) -> None:
    """Removes what was saved of a plan; the folder too, unless it was there before."""
    for path in store.list():
        store.remove(path)
    if not there:
        home.parent.joinpath(home.name).rmdir()
