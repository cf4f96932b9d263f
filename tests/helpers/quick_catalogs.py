"""Let the catalogs of one test process share what each would compute again: its tables, and its SQL.

Some thousand tests open a catalog of their own. To make its tables takes 30 ms, and to compile what a test
asks as long; no test but those of the tables themselves, and of processes that users start, is about either.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

from ckptcore.catalog import database

STATEMENTS = 2000  # a test asks some hundred


@contextmanager
def quick(folder: Path) -> Iterator[None]:
    """Copy new SQLite catalogs from one in a folder, and share statements."""
    ensure_head = database._ensure_head
    template = folder / "template.sqlite"

    def copied_or_created(engine: Engine, public_url: str, create: bool) -> None:
        path = database.sqlite_path(engine.url)
        with suppress(OSError):  # what is created then has the error that a user sees
            if create and path is not None and path.parent.is_dir() and not os.path.lexists(path):
                if not template.exists():
                    first = database.engine_for(database.parse(str(template)))
                    ensure_head(first, "", True)
                    first.dispose()
                copy_at_once(template, path)
        ensure_head(engine, public_url, create)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "_ensure_head", copied_or_created)
        share_statements(patch)
        yield


def share_statements(patch: pytest.MonkeyPatch) -> None:
    """Compile each statement once for each database."""
    create_engine = database.create_engine
    compiled: LRUCache[Any, Any] = LRUCache(STATEMENTS)

    def of_shared_statements(*arguments: Any, **options: Any) -> Engine:
        engine = create_engine(*arguments, **options)
        engine.update_execution_options(compiled_cache=compiled)
        return engine

    patch.setattr(database, "create_engine", of_shared_statements)
    # A statement is compiled for a dialect, of which each engine has an instance: they are all alike.
    for dialect in (SQLiteDialect_pysqlite, PGDialect_psycopg):
        patch.setattr(dialect, "__eq__", lambda one, other: type(one) is type(other))
        patch.setattr(dialect, "__hash__", lambda one: hash(type(one)))


def copy_at_once(template: Path, path: Path) -> None:
    """Copy a file, unless another thread or process is faster: nobody finds a part of one."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        shutil.copyfile(template, beside)
        os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)
