"""Saved plans: a request, and the digests of what it was made from.

A saved plan is a folder: ``request.json`` and the plan itself, so that it can be looked at, kept, and
carried out only if the source is still the same.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

from ckptcore import stamps
from ckptcore.compose import Composed, compose
from ckptcore.convert import inspect
from ckptcore.errors import DestinationExists, MalformedCheckpoint, SourceChanged, UsageError
from ckptcore.finishing import REQUEST
from ckptcore.frame import canonical_json
from ckptcore.manifest import Manifest
from ckptcore.plan import file_name, load_head, save_head
from ckptcore.request import Request
from ckptcore.store import open_store


def plan_into(folder: Path, request: Request, manifest: Manifest) -> Composed:
    """Plans a request and saves the plan in a folder, file by file as they are planned.

    Raises `DestinationExists` when the folder is not empty, and what `compose` raises; nothing is left then.
    """
    there = folder.exists()
    if there and (not folder.is_dir() or any(folder.iterdir())):
        raise DestinationExists(f"{folder} exists", hint="name a new folder for the plan")
    store = open_store(str(folder))
    try:
        composed = compose(request, manifest, lambda p: store.put(file_name(p.index), p.dumped))
        store.put(REQUEST, canonical_json(request.as_dict()))
        with closing(open_store(composed.plan.source)) as source:
            stamps.save(store, stamps.take(manifest, source))
        save_head(store, composed.plan)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if there:
            folder.mkdir()
        raise
    return composed


def load_request(folder: Path) -> Request:
    """The request of a plan folder, when the source still gives the same plan.

    Raises `SourceChanged` otherwise.
    """
    store = open_store(str(folder))
    size = store.size(REQUEST)
    if size is None:
        raise UsageError(f"{folder} holds no plan", hint="make one with `ckptcore plan SRC DST --save DIR`")
    head = load_head(store)
    try:
        request = Request.from_dict(json.loads(store.read(REQUEST, 0, size)))
    except (ValueError, TypeError) as error:
        raise MalformedCheckpoint(f"{folder}/{REQUEST} is damaged: {error}", hint="plan again") from error
    manifest = inspect(request.source, request.recover, request.keep_quantized)
    if manifest.digest != head.manifest_digest:
        raise SourceChanged(
            f"{request.source} has changed since the plan was made: its manifest digest is "
            f"{manifest.digest[:16]}, the plan was made from {head.manifest_digest[:16]}"
        )
    with closing(open_store(manifest.root)) as source:
        stamps.require_same(stamps.load(store) or {}, source)
    if compose(request, manifest).plan.digest != head.digest:
        raise SourceChanged(f"{folder} was planned by another version, or the config files have changed")
    return request
