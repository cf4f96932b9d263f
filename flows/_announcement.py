"""Check an announced checkpoint: its location, its target, and whether it has been converted already."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckptcore.catalog import open_catalog
from ckptcore.conversion.pipeline import inspect
from ckptcore.errors import UnsafeContent
from ckptcore.operations import claims as claiming
from ckptcore.operations import convert_once as once
from ckptcore.operations.export_target import announced_request
from ckptcore.planning.request import Request
from ckptcore.store import local_path
from ckptcore.utils.merged_url import roots_of
from tasks.logs import log


def require_inside(source: str, root: str) -> None:
    """Raise `UnsafeContent` unless a source is below a root, with links resolved.

    The receiver of the event could only compare texts.
    """
    if roots := roots_of(source):
        for each in roots:
            require_inside(each, root)
        return
    path, top = local_path(source), local_path(root)
    if path is not None and top is not None:
        here, above = os.path.realpath(path), os.path.realpath(top)
    else:
        here, above = source, root
    if not here.startswith(above.rstrip("/") + "/"):
        raise UnsafeContent(f"{source} resolves to {here}, which is not below {above}")


def effective_request(request: Request, step: int | None, catalog: str | None) -> Request:
    """Return the request to run: below a watched root, the one that a sweep would run.

    Args:
        request: the conversion that the announcement asks for.
        step: the announced step, if any.
        catalog: the URL of the catalog.

    Raises:
        UsageError: the root's target cannot be used for this source.
    """
    with open_catalog(catalog) as known:
        found = announced_request(known, request.source, step)
    if found is None:
        return request
    root, instead = found
    log.info(
        "%s is below the watched root %s: converting to %s", request.source, root.name, instead.destination
    )
    return instead


def made_from(request: Request, digest: str, catalog: str | None) -> bool:
    """Return whether a request's destination was made from its source as it is now.

    digest: of the source's manifest.
    """
    with open_catalog(catalog) as known:
        manifest = inspect(request.source, request.recover)
        key = claiming.key_of(request, claiming.source_digest(manifest))
        return once.is_made(known, key, request, digest)


@contextmanager
def alone(
    request: Request, digest: str, run: str, looks: Sequence[float], catalog: str | None
) -> Iterator[bool]:
    """Claim a conversion; yield False if it is done already.

    No other process converts it inside the block.

    Args:
        request: the conversion.
        digest: of the source's manifest.
        run: the id of the flow run. A resumed run gets its own claim back at once.
        looks: seconds to wait between tries while another process has the claim.
        catalog: the URL of the catalog.

    Raises:
        Busy: another process still has the claim after the last try.
    """
    with open_catalog(catalog) as known, once.alone(known, request, digest, run, looks) as mine:
        yield mine
