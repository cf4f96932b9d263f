"""Once: a checkpoint that several are asked to convert is converted by one of them.

Flows that webhooks start, sweeps, and commands with ``--wait`` meet at the claims of the catalog.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptcore.catalog.claims import DONE, Key
from ckptcore.conversion.destination import refuse_existing
from ckptcore.conversion.pipeline import convert, inspect, tidy
from ckptcore.conversion.publish import Result
from ckptcore.errors import Busy, DestinationExists
from ckptcore.operations import claims as claiming
from ckptcore.operations.wait import OnWait, delays, wait_until_whole
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.workers import Progress

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog


def convert_once(
    request: Request,
    settings: Settings,
    progress: Progress | None,
    catalog: str | bool | None,
    *,
    wait_s: float,
    on_wait: OnWait,
) -> Result | None:
    """Waits until the source is whole, and converts it unless it has been; None when it has.

    catalog: its URL; None is the default one. False is none: nobody else is known of then. wait_s: how long
    to look again at what is not whole yet, or is being converted by somebody else. on_wait: see
    `wait_until_whole`. Raises what `convert` raises, and `Busy`.
    """
    looks = delays(wait_s / 60)
    manifest = wait_until_whole(request.source, request.recover, looks, on_wait)
    if catalog is False:
        return convert(request, settings, progress, catalog)
    from ckptcore.catalog import open_catalog

    with (
        open_catalog(catalog if isinstance(catalog, str) else None) as known,
        alone(known, request, manifest.digest, claiming.owner(), looks) as mine,
    ):
        return convert(request, settings, progress, catalog) if mine else None


@contextmanager
def alone(known: Catalog, request: Request, digest: str, who: str, looks: Sequence[float]) -> Iterator[bool]:
    """Whether the conversion is to be made here; while the block runs nobody else makes it.

    digest: of the source's manifest. who: takes up its own work at once when it is resumed. looks: seconds
    to wait between looks while somebody else is at work; then raises `Busy`.
    """
    key = claiming.key_of(request, claiming.source_digest(inspect(request.source, request.recover)))
    for pause in (0.0, *looks):
        time.sleep(pause)
        for again in (False, True):  # what was made, and taken away since, is made again
            with claiming.claimed(known, key, request.source, who, again=again) as claim:
                if claim.mine:
                    made = _is_made(known, key, request, digest)
                    if made:
                        tidy(request.destination)
                    yield not made
                    return
            if claim.state != DONE:
                break
            if is_there(request):
                yield False
                return
    raise Busy(f"{claim.owner} converts {request.source}")


def is_there(request: Request) -> bool:
    """Whether something stands at a request's destination."""
    try:
        refuse_existing(replace(request, overwrite=False, overwrite_foreign=False))
    except DestinationExists:
        return True
    return False


def _is_made(known: Catalog, key: Key, request: Request, digest: str) -> bool:
    """Whether it was made before anybody kept claims."""
    return (
        is_there(request)
        and not claiming.rewritten(known, key, request.source)
        and claiming.made_from(known, request.destination, request.source, digest)
    )
