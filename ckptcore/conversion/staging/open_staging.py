"""Choose how the output of a destination is staged: the one place that asks what kind of store it is on.

Where a store ignores create-only requests, two runs that start at once would both have the lease
(`ckptcore.store.objects.lease`). All runs that write there must use one catalog: a row of its claims is the
lease then, one for each destination, whatever is converted.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptcore.conversion.staging.local_staging import LocalStaging
from ckptcore.conversion.staging.staging import Staging
from ckptcore.errors import Busy, CkptError, UsageError
from ckptcore.store import is_s3, join_url, local_path, split_url

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog
    from ckptcore.catalog.claims import ClaimRow

_log = logging.getLogger("ckptcore")
_OPTIONS = "the destination itself"  # instead of a digest of options


def open_staging(destination: str, catalog: Catalog | str | bool | None = False) -> Staging:
    """Return the staging folder of a destination; nothing is read yet.

    Args:
        destination: Path or URL of the output.
        catalog: An open catalog, or the URL of one, whose claim decides who may write on object stores that
            ignore create-only requests; None for the default, False for none.

    Raises:
        UsageError: The destination has no name.
    """
    if local_path(destination) is not None:
        return LocalStaging(destination)
    # Late imports: local conversions need no object store.
    if is_s3(destination):
        from ckptcore.conversion.staging.s3_staging import S3Staging

        # An explicit True or False names no catalog.
        claim = None if isinstance(catalog, bool) else DestinationClaim(catalog, destination)
        return S3Staging(destination, claim)
    from ckptcore.conversion.staging.remote_publication import ObjectStaging

    return ObjectStaging(destination)


@contextmanager
def at_rest(place: str) -> Iterator[None]:
    """Keep writers away from a place that is about to be counted on; raise `Busy` if one is at work there."""
    path = local_path(place)
    # A conversion to a link replaces the link, and not what it leads to.
    # Shared: several readers may count on one place, and a writer needs it alone.
    with open_staging(place if path is None else os.path.realpath(path)).lock(shared=True):
        yield


def staging_of_plan(plan_uri: str, catalog: Catalog | str | bool | None = False) -> Staging:
    """Return the staging folder that a plan is in; raise `UsageError` for other paths."""
    above, part = split_url(plan_uri)
    parent, name = split_url(above)
    if part != "plan" or not (name.startswith(".") and name.endswith(".ckptcore")):
        raise UsageError(f"{plan_uri!r} is not the plan of a conversion")
    return open_staging(join_url(parent, name[1 : -len(".ckptcore")]), catalog)


class DestinationClaim:
    """The claim of one destination; an `ckptcore.store.objects.lease.Arbiter`.

    Args:
        catalog: An open catalog, or the URL of one; None for the default.
        destination: URL of the destination.
    """

    def __init__(self, catalog: Catalog | str | None, destination: str) -> None:
        self._catalog, self._destination = catalog, destination
        self._taken: tuple[Catalog, ClaimRow] | None = None

    def take(self) -> None:
        """Take the claim; raise `Busy` if another process has it, `CatalogError` without a catalog."""
        from ckptcore.catalog import claims, open_catalog
        from ckptcore.catalog.database import clock

        url_or_catalog = self._catalog
        catalog = (
            open_catalog(url_or_catalog)
            if url_or_catalog is None or isinstance(url_or_catalog, str)
            else url_or_catalog
        )
        # No digest of options: every conversion to this destination excludes every other one.
        key = claims.Key("", self._destination, _OPTIONS)
        # With a random part: threads of one process may try to claim one destination.
        name = f"process {os.getpid()} on {socket.gethostname()} {uuid.uuid4().hex[:8]}"
        claim = None
        try:
            with catalog.writing() as conn:
                claim = claims.take(conn, clock(conn), key, self._destination, name, retry=True)
        finally:
            # A catalog that the caller passed stays open: it is the caller's.
            if catalog is not url_or_catalog and (claim is None or not claim.mine):
                catalog.close()
        if not claim.mine:
            holder = claim.owner.rpartition(" ")[0]
            raise Busy(
                f"{holder} is writing {self._destination} (its claim ends at {claim.due_at:%H:%M:%S} UTC, "
                "unless renewed)",
                holder=holder,
            )
        self._taken = catalog, claim

    def renew(self) -> None:
        """Extend the claim; raise `Busy` if another process has it."""
        from ckptcore.catalog import claims
        from ckptcore.catalog.database import clock

        if self._taken is not None:
            catalog, claim = self._taken
            with catalog.writing() as conn:
                if claims.renew(conn, clock(conn), claim):
                    return
        raise Busy(
            f"this run was stopped for longer than its claim of {self._destination}",
            hint="run the same command again when no other run writes there",
        )

    def release(self) -> None:
        """End the claim; one that another process has taken meanwhile stays."""
        from ckptcore.catalog import claims

        if self._taken is None:
            return
        (catalog, claim), self._taken = self._taken, None
        try:
            with catalog.writing() as conn:
                claims.drop(conn, claim)
        except CkptError as error:  # it ends by itself; what was done under it is done
            _log.warning("cannot end the claim of %s: %s", self._destination, error.message)
