"""Choose how the output of a destination is staged: the one place that asks what kind of store it is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptcore.conversion.destination_claim import DestinationClaim
from ckptcore.conversion.local_staging import LocalStaging
from ckptcore.conversion.staging import Staging
from ckptcore.errors import UsageError
from ckptcore.store import is_s3, join_url, local_path, split_url

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog


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
        from ckptcore.conversion.s3_staging import S3Staging

        claim = None if isinstance(catalog, bool) else DestinationClaim(catalog, destination)
        return S3Staging(destination, claim)
    from ckptcore.conversion.object_staging import ObjectStaging

    return ObjectStaging(destination)


def staging_of_plan(plan_uri: str, catalog: Catalog | str | bool | None = False) -> Staging:
    """Return the staging folder that a plan is in; raise `UsageError` for other paths."""
    above, part = split_url(plan_uri)
    parent, name = split_url(above)
    if part != "plan" or not (name.startswith(".") and name.endswith(".ckptcore")):
        raise UsageError(f"{plan_uri!r} is not the plan of a conversion")
    return open_staging(join_url(parent, name[1 : -len(".ckptcore")]), catalog)
