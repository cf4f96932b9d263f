"""Refuse to replace what `retire` made the only copy of a source.

`retire` deletes a source because a child holds its tensors. From then on the child is replaced only while
another recorded checkpoint with the same tensors opens, and shares no file with the destination.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptcore.catalog import CheckpointDetail, open_catalog
from ckptcore.catalog import maintenance as tending
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.types import CheckpointRow
from ckptcore.checking.examine import inspect
from ckptcore.conversion.foreign_files import inodes_of
from ckptcore.errors import CatalogError, CkptError, DestinationExists
from ckptcore.store.inventory import Inventory
from ckptcore.store.place import Relation, Spellings, identify, relation

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_HINT = "choose another destination. Remove it yourself if nobody needs these tensors any more"


def require_other_copies(destination: str, there: Inventory, catalog_url: str | bool | None) -> None:
    """Check that a destination does not hold the only copy of a source that `retire` deleted.

    Args:
        destination: Path or URL that is to be replaced.
        there: What is at the destination.
        catalog_url: The catalog that knows what was deleted; None for the default, False for none.

    Raises:
        DestinationExists: It holds the only copy of one.
        CatalogError: The catalog exists, and cannot be read.
    """
    if catalog_url is False or not there:
        return
    try:
        opened = open_catalog(catalog_url if isinstance(catalog_url, str) else None, create=False)
    except CatalogError as error:
        if error.values.get("missing"):
            return
        raise
    with opened as catalog:
        with catalog.reading() as conn:
            uri = normal_uri(destination)
            # A link, a mount or another scheme leads to it, too.
            children = Spellings(tending.relied_on(conn))
            found = tending.retired_into(conn, uri, {*children.of(uri), *children.inside(uri)})
        for source, child in found:
            if _is_elsewhere(catalog, source, child, destination, there):
                continue
            when = f" on {source.deleted_at:%Y-%m-%d %H:%M} UTC" if source.deleted_at else ""
            raise DestinationExists(
                f"cannot replace {destination}: {child.uri} is the only proven copy of {source.uri}, which "
                f"was deleted{when} because this copy exists",
                hint=_HINT,
                source=source.uri,
                child=child.uri,
            )


def export_failed(detail: CheckpointDetail) -> bool:
    """Return whether a checkpoint failed when it was last verified as an export.

    An equal one that replaced it since has no verdict of its own yet, and does not cancel this one.
    """
    verdicts = (c.export_verdict for c in detail.written_by)
    return next((v for v in verdicts if v in ("ok", "failed")), None) == "failed"


def _is_elsewhere(
    catalog: Catalog, source: CheckpointRow, child: CheckpointRow, destination: str, there: Inventory
) -> bool:
    """Return whether the tensors of a deleted source are also outside a destination, or not even there."""
    if _opens(child) is False:  # other content was put there by hand
        return True
    prints = [p for p in (source.fingerprint, child.fingerprint) if p]
    with catalog.reading() as conn:
        copies = tending.with_fingerprints(conn, prints)
    return any(_is_apart(copy, destination, there) and _is_proof(catalog, copy) for copy in copies)


def _opens(row: CheckpointRow) -> bool | None:
    """Return whether a recorded checkpoint is at its place, or another one; None if nothing opens there."""
    try:
        digest = inspect(row.uri).digest
    except CkptError:
        return None
    return digest.rpartition(":")[2].lower() == row.manifest_digest


def _is_apart(copy: CheckpointRow, destination: str, there: Inventory) -> bool:
    if relation(identify(destination), identify(copy.uri)) is not Relation.APART:
        return False
    shared = {entry.inode for entry in there.values()} - {None}
    return not shared & inodes_of(copy.uri)


def _is_proof(catalog: Catalog, copy: CheckpointRow) -> bool:
    detail = catalog.show(copy.id, tensors=False)
    return isinstance(detail, CheckpointDetail) and not export_failed(detail) and _opens(copy) is True
