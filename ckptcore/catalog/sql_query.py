"""SQL that only reads: what does the catalog answer to a statement of the user's own?

That nothing is changed is the database's doing, not a look at the words of the statement. SQLite opens the
file for reading and is asked, action by action, to allow nothing but reading, in a process that is killed
when the time is over (`sqliteworker`). PostgreSQL runs one statement in a READ ONLY transaction that is never
committed, as a cursor, which is a query and nothing else. A superuser, and whoever may run programs or write
files there, is refused: to such a role a function can do anything, whatever the transaction is.
How a statement would be answered is asked with `explain`: a cursor takes no EXPLAIN, so it is put before the
statement here, and the transaction is what keeps anything from being changed (EXPLAIN ANALYZE runs it).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ckptcore.catalog import sqlite_worker as sqliteworker
from ckptcore.catalog.database import connect, engine_for, parse, sqlite_path, translated
from ckptcore.errors import CatalogError, UsageError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

_START = 30.0  # seconds for a process to start and to hand its answer over, on a busy machine
MEMORY = 256 << 20  # bytes that SQLite may use for one statement
_LARGEST = 64 << 20  # bytes of an answer, about
_BATCH = 100  # rows that are fetched at a time
_MOST_ROWS = 1 << 31
_LONGEST_S = 24 * 3600.0
# Roles of PostgreSQL to whom a function that looks like reading can do more.
_ADMINISTRATORS = (
    "pg_execute_server_program",
    "pg_write_server_files",
    "pg_read_server_files",
    "pg_signal_backend",
    "pg_checkpoint",
    "pg_maintain",
)


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


def ask(
    url: str, statement: str, *, limit: int = 1000, seconds: float = 30.0, explain: bool = False
) -> Answer:
    """The first `limit` rows of one statement that reads. explain: of the database's plan for it.

    Raises `UsageError` for what is no such statement or takes longer, and `CatalogError` as `open_catalog`.
    """
    if not 0 < seconds <= _LONGEST_S:
        raise UsageError(f"cannot wait for {seconds:g} s", hint=f"--timeout takes up to {_LONGEST_S:g} s")
    try:
        statement.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the statement is no text: {error.reason}", hint="write it in UTF-8") from error
    if "\0" in statement:
        raise UsageError("the statement has a NUL character", hint="leave it out")
    limit = min(limit, _MOST_ROWS)
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
    asked = {"uri": uri, "statement": statement, "rows": limit + 1, "seconds": seconds, "bytes": MEMORY}
    # -I: nothing of the user's environment; -S: no site-packages, which take longer than the rest.
    command = [sys.executable, "-I", "-S", sqliteworker.__file__]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + sqliteworker.GRACE + _START,
        )
    except subprocess.TimeoutExpired as error:
        raise _refused("", True, seconds) from error
    if done.returncode == -signal.SIGALRM:
        raise _refused("", True, seconds)
    try:
        found = json.loads(done.stdout)
    except ValueError as error:  # it ran out of memory where Python has none left to say so
        raise _refused(f"it ended with status {done.returncode}, out of memory", False, seconds) from error
    if "error" in found:
        raise _refused(found["error"], found["error"] == sqliteworker.STOPPED, seconds)
    if found["columns"] is None:
        raise _no_query()
    rows = tuple(
        tuple(bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in r) for r in found["rows"]
    )
    return Answer(tuple(found["columns"]), rows[:limit], len(rows) > limit)


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
        _require_plain_role(cursor)
        connection.rollback()
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


def _require_plain_role(cursor: Any) -> None:
    """Raises `UsageError` where the database itself would not hold a function back."""
    # The one who logged in counts, and not who he is now: a statement could go back to that.
    cursor.execute(
        "SELECT session_user, rolsuper, rolreplication, ARRAY(SELECT m.rolname::text FROM pg_roles m"
        " WHERE m.rolname = ANY(%s) AND pg_has_role(session_user, m.oid, 'MEMBER'))"
        " FROM pg_roles WHERE rolname = session_user",
        (list(_ADMINISTRATORS),),
    )
    name, superuser, replication, member = cursor.fetchone()
    found = [
        *(["a superuser"] if superuser else []),
        *(["a replication role"] if replication else []),
        *(() if superuser else member),
    ]
    if found:
        raise UsageError(
            f"cannot ask as {name}: no transaction keeps {', '.join(found)} from changing anything",
            hint="connect as a role that only reads; ckptcore/catalog/README.md makes one",
        )


def _answer(cursor: Any, limit: int) -> Answer:
    if cursor.description is None:
        raise _no_query()
    rows: list[tuple[Any, ...]] = []
    size = 0
    while len(rows) <= limit and (some := cursor.fetchmany(min(_BATCH, limit + 1 - len(rows)))):
        rows += [tuple(row) for row in some]
        size += sum(len(v) if isinstance(v, str | bytes) else 16 for row in some for v in row)
        if size > _LARGEST:
            raise _refused(sqliteworker.TOO_LARGE, False, 0)
    return Answer(tuple(column[0] for column in cursor.description), tuple(rows[:limit]), len(rows) > limit)


def _no_query() -> UsageError:
    return UsageError("the database did not answer: this is no query", hint="for example SELECT 1")


def _refused(said: str, timed_out: bool, seconds: float) -> UsageError:
    if timed_out:
        return UsageError(
            f"the statement took more than {seconds:g} s and was stopped",
            hint="ask for less, or raise --timeout",
        )
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
