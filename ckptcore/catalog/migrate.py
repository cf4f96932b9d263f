"""Migrate older catalogs to the schema of this version.

`upgrade` runs the scripts of `alembic/` through the engine of `database.py`. Development commands
(`alembic check`, `alembic revision --autogenerate`) find the same scripts through pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from sqlalchemy import inspect

from ckptcore.catalog.database import (
    HEAD,
    REVISIONS,
    UNRENAMED,
    engine_for,
    make_folder,
    parse,
    require_known,
    revision,
    sqlite_path,
    translated,
)
from ckptcore.catalog.models import Base
from ckptcore.catalog.views import drop_views, make_views, put_comments
from ckptcore.errors import CatalogError

if TYPE_CHECKING:
    from sqlalchemy import Connection


def upgrade(url: str) -> tuple[str | None, str]:
    """Run the missing migrations, all or none, and return the revisions before and after.

    Raises `CatalogError` if the database cannot be used, is not a catalog, or has a newer schema.
    """
    return migrate(url, HEAD)


def migrate(url: str, target: str) -> tuple[str | None, str]:
    """Migrate up to the revision `target`; see `upgrade`, which is the case of `HEAD`."""
    with migrating(url) as connection:
        before = revision(connection)
        if before != target:
            if before is not None:
                require_known(before, parse(url).render_as_string(hide_password=True))
            config = configuration()
            config.attributes["connection"] = connection
            if before == UNRENAMED:
                command.stamp(config, REVISIONS[0], purge=True)
            command.upgrade(config, target)
            if before == UNRENAMED:
                _require_columns(connection)
    return before, target


def _require_columns(connection: Connection) -> None:
    """Raise `CatalogError` for a database that lacks columns of this version, whatever its revision says."""
    tables = inspect(connection)
    columns = {
        (table, column["name"]) for table in tables.get_table_names() for column in tables.get_columns(table)
    }
    missing = [
        f"{table.name}.{column.name}"
        for table in Base.metadata.sorted_tables
        for column in table.columns
        if (table.name, column.name) not in columns
    ]
    if missing:
        raise CatalogError(
            f"cannot migrate: the catalog lacks {len(missing)} columns of its schema, first {missing[0]}. "
            "Nothing was changed",
            hint="record its checkpoints in a new catalog with `ckptcore catalog rebuild ROOT...`",
        )


@contextmanager
def migrating(url: str) -> Iterator[Connection]:
    """Open a transaction for migrations: other writers wait, foreign keys are off, views are dropped.

    Views would keep tables from being changed. On exit, the views are recreated if the schema is `HEAD`,
    and the foreign keys are checked before the commit.
    """
    parsed = parse(url)
    path = sqlite_path(parsed)
    if path is not None:
        make_folder(path.parent)
    engine = engine_for(parsed, foreign_keys=False)
    try:
        with translated(parsed.render_as_string(hide_password=True)), engine.begin() as connection:
            drop_views(connection)
            yield connection
            if revision(connection) == HEAD:
                make_views(connection)
                put_comments(connection)
            if connection.dialect.name == "sqlite":
                broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
                if broken:
                    raise CatalogError(
                        f"cannot migrate: the number of rows without their parent would be {len(broken)}, "
                        f"first in table {broken[0][0]}. Nothing was changed",
                        hint="report this with the revision the catalog was at",
                    )
    finally:
        engine.dispose()


def configuration() -> Config:
    """Return Alembic's configuration with the folder of the migration scripts."""
    config = Config()
    config.set_main_option("script_location", str(scripts_folder()).replace("%", "%%"))
    return config


def scripts_folder() -> Path:
    """Return `alembic/` of a checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_migrations", package.parent / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise CatalogError(
        f"cannot find the migration scripts in {package / '_migrations'} or {package.parent / 'alembic'}",
        hint="reinstall ckptcore",
    )
