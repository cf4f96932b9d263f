"""Convert a checkpoint in one of several processes that are asked to convert it.

Flows that webhooks start, sweeps, and commands with ``--wait`` coordinate through the claims of the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptcore.catalog.claims import DONE, Key
from ckptcore.conversion.destination import refuse_existing
from ckptcore.conversion.pipeline import convert, inspect, remove_leftover_staging
from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import UNANNOUNCED, Announcement, record_announced
from ckptcore.errors import Busy, DestinationExists
from ckptcore.operations import claims
from ckptcore.operations.automation.wait import OnWait, delays, wait_until_complete
from ckptcore.planning.request import Request, Settings
from ckptcore.utils import host
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
    announcement: Announcement = UNANNOUNCED,
) -> Result | None:
    """Wait until the source is complete, then convert it unless another process already has.

    Args:
        request: What to convert, and how.
        settings: Memory, threads and device.
        progress: Called with the stage, the bytes done and the bytes in total.
        catalog: Its URL; None for the default one. False for none: other processes are not considered then.
        wait_s: Seconds to wait for an incomplete source, or for another process that converts it.
        on_wait: See `wait_until_complete`.
        announcement: What a user reports about the source, for the catalog.

    Returns:
        The published output; None if it was made before.

    Raises:
        Busy: Another process is still converting it.
        CkptError: An error of `convert`.
    """
    looks = delays(wait_s / 60)
    manifest = wait_until_complete(request.source, request.recover, looks, on_wait)
    if catalog is False:
        return convert(request, settings, progress, catalog, announcement=announcement)
    from ckptcore.catalog import open_catalog

    with (
        open_catalog(catalog if isinstance(catalog, str) else None) as opened,
        claim_or_skip(opened, request, manifest.digest, claims.owner(), looks) as mine,
    ):
        if mine:
            return convert(request, settings, progress, catalog, announcement=announcement)
    record_announced(announcement, request.source, catalog)
    return None


@contextmanager
def claim_or_skip(
    catalog: Catalog, request: Request, digest: str, who: str, looks: Sequence[float]
) -> Iterator[bool]:
    """Claim a conversion while the block runs, so that no other process does it.

    Args:
        catalog: The catalog.
        request: What to convert, and how.
        digest: Of the source's manifest.
        who: The worker; it takes its own claim again at once when it is resumed.
        looks: Seconds to wait between checks while another process has the claim.

    Yields:
        Whether to convert here; False if the output exists.

    Raises:
        Busy: Another process still has the claim.
    """
    key = claims.key_of(request, claims.source_digest(inspect(request.source, request.recover)))
    for pause in (0.0, *looks):
        host.sleep(pause)
        for redo in (False, True):  # an output that was made and removed since is made again
            with claims.claimed(catalog, key, request.source, who, redo=redo) as claim:
                if claim.mine:
                    exists = is_made(catalog, key, request, digest)
                    if exists:
                        remove_leftover_staging(request.destination, catalog)
                    yield not exists
                    return
            if claim.state != DONE:
                break
            # The output may have been removed since, or replaced by that of another source or other options.
            if is_there(request) and claims.made_by(catalog, request, digest):
                yield False
                return
    raise Busy(f"{claim.owner} is converting {request.source}")


def is_there(request: Request) -> bool:
    """Return whether a request's destination exists."""
    try:
        refuse_existing(replace(request, overwrite=False, overwrite_foreign=False))
    except DestinationExists:
        return True
    return False


def is_made(catalog: Catalog, key: Key, request: Request, digest: str) -> bool:
    """Return whether the destination is what the request makes of the source as it is, by the catalog."""
    return (
        is_there(request)
        and not claims.rewritten(catalog, key, request.source)
        and claims.made_by(catalog, request, digest)
    )
