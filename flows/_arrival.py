"""Arrival: may this place be converted, and has it been already?"""

from __future__ import annotations

import os

from ckptcore.catalog import open_catalog
from ckptcore.errors import DestinationExists, UnsafeContent, UsageError
from ckptcore.staging import refuse_existing
from ckptcore.store import local_path


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


def is_there(destination: str, source: str) -> bool:
    """Whether something stands at a destination."""
    try:
        refuse_existing(destination, source, overwrite=False, single=False)
    except DestinationExists:
        return True
    return False


def made_from(destination: str, source: str, digest: str, catalog: str | None) -> bool:
    """Whether the catalog knows a destination as made from exactly this content of a source.

    digest: of the source's manifest.
    """
    with open_catalog(catalog) as known:
        try:
            origins = known.which(destination)
        except UsageError:  # the catalog does not know it
            return False
    return any(
        row.uri == source and row.manifest_digest == digest for origin in origins for row in origin.sources
    )
