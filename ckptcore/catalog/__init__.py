"""The catalog: a database of checkpoints, of the conversions between them, and of their results.

This is the only package that uses SQL. It depends on `errors` and `utils` alone. The catalog points to
checkpoints; the files themselves are the truth. `queues.inbox` and `queues.outbox` store events and messages;
`claims` stores which process converts what.

Open a catalog with `open_catalog`. A `Catalog` writes with `begin`, `succeed`, `fail`, `record_validation`
and `tag`, and reads with `list`, `conversions`, `show`, `lineage` and `which`. SQLAlchemy is imported by the
first call, so commands that need no catalog start without it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptcore.catalog.types import (
    CheckpointDetail,
    CheckpointFacts,
    CheckpointRow,
    ConversionDetail,
    ConversionFacts,
    ConversionRow,
    FileRow,
    Kind,
    Lineage,
    LineageStep,
    Origin,
    Outcome,
    State,
    TensorRow,
    as_dict,
)

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

__all__ = [
    "CheckpointDetail",
    "CheckpointFacts",
    "CheckpointRow",
    "ConversionDetail",
    "ConversionFacts",
    "ConversionRow",
    "FileRow",
    "Kind",
    "Lineage",
    "LineageStep",
    "Origin",
    "Outcome",
    "State",
    "TensorRow",
    "as_dict",
    "default_url",
    "open_catalog",
    "unset_warning",
    "upgrade",
]


def open_catalog(url: str | None = None, create: bool = True) -> Catalog:
    """Open the catalog at `url`.

    Args:
        url: a SQLAlchemy URL or the path of a SQLite file. None means `default_url()`.
        create: create a missing SQLite database. Tables on other servers are created by `upgrade` only.

    Returns:
        The open catalog, with its schema at this version's revision.

    Raises:
        CatalogError: there is no catalog, it cannot be opened, or its schema belongs to another version.
        MissingDependency: the driver for the URL is not installed.
    """
    from ckptcore.catalog.catalog import Catalog
    from ckptcore.catalog.database import connect

    return Catalog(connect(default_url() if url is None else url, create=create))


def upgrade(url: str | None = None) -> tuple[str | None, str]:
    """Upgrade the catalog at `url` to the newest schema.

    Args:
        url: as in `open_catalog`.

    Returns:
        The revisions before and after. The first is None for a database without tables.

    Raises:
        CatalogError: the database cannot be used, is not a catalog, or has a newer schema.
    """
    from ckptcore.catalog.migrate import upgrade as run

    return run(default_url() if url is None else url)


def unset_warning() -> str | None:
    """Return a warning for a service that has no ``CKPTCORE_CATALOG_URL``; None if it is set."""
    if os.environ.get("CKPTCORE_CATALOG_URL"):
        return None
    return (
        f"CKPTCORE_CATALOG_URL is not set: conversions are registered in {default_url()}, which other users "
        "and machines do not see. Set it to one catalog for all workers, receivers and shells"
    )


def default_url() -> str:
    """Return ``CKPTCORE_CATALOG_URL``, or the path of a SQLite file in the platform's user-data folder."""
    import platformdirs

    env_url = os.environ.get("CKPTCORE_CATALOG_URL")
    return env_url or str(platformdirs.user_data_path("ckptcore") / "catalog.sqlite")
