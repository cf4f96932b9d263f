"""Keep the catalog: which checkpoints are there, what was made from what, and how it went.

The only room that knows SQL; it knows errors and utils alone. The data is the truth, and the catalog points
to it. `queues.inbox` and `queues.outbox` hold events and messages, `claims` who makes what.

`open_catalog` is the way in; a `Catalog` writes with `begin`, `succeed`, `fail`, `record_validation`, `tag`
and reads with `list`, `conversions`, `show`, `lineage`, `which`. SQLAlchemy is imported with the first
call, so that commands which need no catalog start without it.
"""

from __future__ import annotations

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
    "upgrade",
]


def open_catalog(url: str | None = None, create: bool = True) -> Catalog:
    """The catalog at `url`, ready to use.

    url: a SQLAlchemy URL or the path of a SQLite file; None means `default_url()`.
    create: make a SQLite database that does not exist yet. Other servers are never set up in
        passing: that is what `upgrade` is for.

    Raises `CatalogError` when there is no catalog, it cannot be opened, or its schema is not the
    one of this version, and `MissingDependency` when the URL needs a driver that is not installed.
    """
    from ckptcore.catalog.catalog import Catalog
    from ckptcore.catalog.database import connect

    return Catalog(connect(default_url() if url is None else url, create=create))


def upgrade(url: str | None = None) -> tuple[str | None, str]:
    """Bring the catalog at `url` to the newest schema; the revisions before and after."""
    from ckptcore.catalog.migrate import upgrade as run

    return run(default_url() if url is None else url)


def default_url() -> str:
    """``CKPTCORE_CATALOG_URL``, or a SQLite file in the user-data folder of the platform."""
    from ckptcore.catalog.database import default_url as found

    return found()
