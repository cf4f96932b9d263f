"""SQL that only reads: what does the catalog answer to a statement of the user's own?

That nothing is changed is the database's doing, not a look at the words of the statement. SQLite opens the
file for reading and is asked, action by action, to allow nothing but reading; PostgreSQL runs one statement
in a READ ONLY transaction, as a cursor, which is a query and nothing else. Both stop when the time is over.
How a statement would be answered is asked with `explain`: a cursor takes no EXPLAIN, so it is put before the
statement here, and the transaction is what keeps anything from being changed (EXPLAIN ANALYZE runs it).
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ckptcore.catalog.database import connect, engine_for, parse, sqlite_path, translated
from ckptcore.errors import CatalogError, UsageError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

# What a statement may do on SQLite: select, read a column, call a function, recurse. Not: attach another
# file, change a setting, begin or end a transaction, write.
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION,
                      sqlite3.SQLITE_RECURSIVE})  # fmt: skip
_STEPS = 10_000  # of SQLite's machine between two looks at the clock
_LONGEST = 64 << 20  # bytes of one value


@dataclass(frozen=True, slots=True)
class Answer:
    """The rows of a statement. columns: their names. more: whether there were more rows than asked for."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    more: bool

    def as_dict(self) -> dict[str, Any]:
        """The JSON face: a list of objects where the names of the columns differ, else of lists."""
        rows = [[_plain(value) for value in row] for row in self.rows]
        named = len(set(self.columns)) == len(self.columns)
        told: list[Any] = [dict(zip(self.columns, row, strict=True)) for row in rows] if named else rows
        return {"columns": list(self.columns), "rows": told, "more": self.more}


def ask(url: str, statement: str, *, limit: int = 1000, seconds: float = 30.0,
        explain: bool = False) -> Answer:  # fmt: skip
    """The first `limit` rows of one statement that reads. explain: of the database's plan for it.

    Raises `UsageError` for what is no such statement or takes longer, and `CatalogError` as `open_catalog`.
    """
    connect(url, create=False).dispose()  # there, a catalog, and of this version
    parsed = parse(url)
    if parsed.get_backend_name() != "sqlite":
        return _postgresql(parsed, statement, limit, seconds, explain)
    path = sqlite_path(parsed)
    name = parsed.database or ""
    if path is None and not name.startswith("file:"):
        raise UsageError("a catalog in memory cannot be asked", hint="name the file of a catalog")
    place = name.partition("?")[0] if path is None else f"file:{quote(str(path.absolute()))}"
    asked = f"EXPLAIN QUERY PLAN {statement}" if explain else statement
    return _sqlite(f"{place}?mode=ro", asked, limit, seconds)


def _sqlite(uri: str, statement: str, limit: int, seconds: float) -> Answer:
    end = time.monotonic() + seconds
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
            connection.execute("PRAGMA query_only=ON")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            connection.set_authorizer(_authorise)
            connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS)
            return _answer(connection.execute(statement), limit)
    except sqlite3.Error as error:
        raise _refused(str(error), "interrupted" in str(error), seconds) from error
    except sqlite3.Warning as error:  # Python 3.11 has it for two statements in one
        raise _refused(str(error), False, seconds) from error


def _authorise(action: int, *_names: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _postgresql(url: URL, statement: str, limit: int, seconds: float, explain: bool) -> Answer:
    import psycopg

    engine = engine_for(url)
    shown = url.render_as_string(hide_password=True)
    try:
        with translated(shown), closing(engine.raw_connection()) as pooled:
            connection: psycopg.Connection[Any] = pooled.driver_connection  # type: ignore[assignment]
            try:
                return _in_transaction(connection, statement, limit, seconds, explain)
            except psycopg.OperationalError as error:
                # What the server ended for its length is an answer; a server that is gone is not.
                if not isinstance(error, psycopg.errors.QueryCanceled):
                    raise CatalogError(f"the catalog cannot be used: {error}", url=shown) from error
                raise _refused(str(error), True, seconds) from error
            except psycopg.Error as error:
                raise _refused(str(error), False, seconds) from error
            finally:
                connection.rollback()
    finally:
        engine.dispose()


def _in_transaction(connection: Any, statement: str, limit: int, seconds: float, explain: bool) -> Answer:
    with connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        cursor.execute("SELECT set_config('statement_timeout', %s, true)", (str(int(seconds * 1000)),))
        # A cursor can be declared for a query only. Prepared, because that takes one statement at a time.
        query = statement.strip().rstrip(";")
        if explain:
            cursor.execute(f"EXPLAIN {query}".encode(), prepare=True)
            return _answer(cursor, limit)
        cursor.execute(f"DECLARE asked NO SCROLL CURSOR FOR {query}".encode(), prepare=True)
        cursor.execute(f"FETCH {limit + 1} FROM asked")
        return _answer(cursor, limit)


def _answer(cursor: Any, limit: int) -> Answer:
    if cursor.description is None:
        raise UsageError("the database did not answer: this is no query", hint="for example SELECT 1")
    rows = [tuple(row) for row in cursor.fetchmany(limit + 1)]
    return Answer(tuple(column[0] for column in cursor.description), tuple(rows[:limit]), len(rows) > limit)


def _refused(said: str, timed_out: bool, seconds: float) -> UsageError:
    if timed_out:
        return UsageError(f"the statement took more than {seconds:g} s and was stopped",
                          hint="ask for less, or raise --timeout")  # fmt: skip
    return UsageError(
        f"the database did not answer: {said.strip()}",
        hint="one SELECT at a time; nothing can be changed here. --explain shows its plan",
    )


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
