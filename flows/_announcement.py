"""Arrival: may this place be converted, and has it been already?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckptcore.catalog import open_catalog
from ckptcore.errors import UnsafeContent
from ckptcore.operations import claims as claiming
from ckptcore.operations import convert_once as once
from ckptcore.operations.export_target import announced_request
from ckptcore.planning.request import Request
from ckptcore.store import local_path
from tasks.logs import log


def require_inside(source: str, root: str) -> None:
    """Raise `UnsafeContent` unless a place lies below a root, links resolved.

    Where the event was taken in, only its text could be compared.
    """
    path, top = local_path(source), local_path(root)
    if path is not None and top is not None:
        here, above = os.path.realpath(path), os.path.realpath(top)
    else:
        here, above = source, root
    if not here.startswith(above.rstrip("/") + "/"):
        raise UnsafeContent(f"{source} leads to {here}, which is not below {above}")


def meant(request: Request, step: int | None, catalog: str | None) -> Request:
    """What is to be made: below a watched root what its target says, as a sweep would make it.

    request: what the announcement asks for. Raises `UsageError` when the target cannot be used for it.
    """
    with open_catalog(catalog) as known:
        found = announced_request(known, request.source, step)
    if found is None:
        return request
    root, instead = found
    log.info("%s is watched as %s: it goes to %s", request.source, root.name, instead.destination)
    return instead


def made_from(destination: str, source: str, digest: str, catalog: str | None) -> bool:
    """Whether the catalog knows a destination as made from this source.

    digest: of the source's manifest.
    """
    with open_catalog(catalog) as known:
        return claiming.made_from(known, destination, source, digest)


@contextmanager
def alone(
    request: Request, digest: str, run: str, looks: Sequence[float], catalog: str | None
) -> Iterator[bool]:
    """Whether the conversion is to be made here; while the block runs nobody else makes it.

    digest: of the source's manifest. run: id of the flow run, which takes up its own work at once when it is
    resumed. looks: seconds to wait between looks while somebody else is at work; then raises `Busy`.
    """
    with open_catalog(catalog) as known, once.alone(known, request, digest, run, looks) as mine:
        yield mine
