"""Migrations: how does an older catalog become one of this version?

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

from ckptcore.catalog.database import (
    HEAD,
    REVISIONS,
    engine_for,
    make_folder,
    parse,
    revision,
    sqlite_path,
    translated,
)
from ckptcore.catalog.views import drop_views, make_views
from ckptcore.errors import CatalogError

if TYPE_CHECKING:
    from sqlalchemy import Connection


def upgrade(url: str) -> tuple[str | None, str]:
    """Run what is missing, all or nothing; the revisions before and after.

    Raises `CatalogError` when the database cannot be used, is not a catalog, or is newer.
    """
    return migrate(url, HEAD)


def migrate(url: str, target: str) -> tuple[str | None, str]:
    """Go up to the revision `target`; `upgrade` is the case of `HEAD`."""
    with migrating(url) as connection:
        before = revision(connection)
        if before != target:
            if before is not None and before not in REVISIONS:
                raise CatalogError(
                    f"the catalog's schema {before} is newer than this version, which knows {HEAD}",
                    hint="upgrade ckptcore",
                )
            config = configuration()
            config.attributes["connection"] = connection
            command.upgrade(config, target)
    return before, target


@contextmanager
def migrating(url: str) -> Iterator[Connection]:
    """A connection in one transaction, fit for migrations: others wait, foreign keys are off, views away.

    Views would keep tables from being changed. Leaving it makes them again where the schema is `HEAD`,
    checks the foreign keys, and only then commits.
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
            if connection.dialect.name == "sqlite":
                broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
                if broken:
                    raise CatalogError(
                        f"a migration would leave {len(broken)} rows without their parent, "
                        f"first in table {broken[0][0]}; nothing was changed",
                        hint="report this with the revision the catalog was at",
                    )
    finally:
        engine.dispose()


def configuration() -> Config:
    """Alembic's configuration: the scripts, wherever this installation keeps them."""
    config = Config()
    config.set_main_option("script_location", str(scripts_folder()).replace("%", "%%"))
    return config


def scripts_folder() -> Path:
    """`alembic/` of a checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_migrations", package.parent / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise CatalogError(
        f"the migration scripts are in neither {package / '_migrations'} nor {package.parent / 'alembic'}",
        hint="install ckptcore again",
    )
