"""Let nothing wait for a disk: a test's files need not outlive the machine.

A killed process loses nothing that it has written, synced or not: only a power cut would, and
`tests/simulation` has a disk that loses what was not synced.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from ckptcore.catalog import database
from ckptcore.utils import host

_SYNCHRONOUS = "PRAGMA synchronous="


class _Cursor(sqlite3.Cursor):
    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        return super().execute(_unsynced(sql), *arguments)


class _Connection(sqlite3.Connection):
    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        return super().execute(_unsynced(sql), *arguments)

    def cursor(self, *_factory: Any) -> sqlite3.Cursor:  # type: ignore[override]
        return super().cursor(_Cursor)


def _unsynced(sql: str) -> str:
    return f"{_SYNCHRONOUS}OFF" if sql.startswith(_SYNCHRONOUS) else sql


def _no_sync(fd: int) -> None:
    """Do nothing."""


def install() -> None:
    """Sync no file, folder or SQLite catalog of this process and its forks any more."""
    if host.fsync is _no_sync:
        return
    create_engine = database.create_engine

    def unsynced_engine(url: Any, **options: Any) -> Any:
        if url.get_backend_name() == "sqlite":
            options["connect_args"] = {**options.get("connect_args", {}), "factory": _Connection}
        return create_engine(url, **options)

    host.fsync = _no_sync
    database.create_engine = unsynced_engine
