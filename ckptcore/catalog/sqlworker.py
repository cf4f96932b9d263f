"""Run one SQL statement in a process of its own, with limits that the operating system enforces.

A database library holds whatever it is sent: one value of PostgreSQL, or one error message, can be 1 GB. The
clock is checked between two steps of SQLite's virtual machine. One step can be a call that takes hours, such
as a LIKE with many wildcards. So the statement runs in a process that can be killed and whose memory is
limited. This file is run by its path and imports only the standard library (and psycopg for PostgreSQL). A
start takes a few hundredths of a second:

    standard input    JSON: an `Asked`
    standard output   JSON: {"columns", "rows"}, or {"error", "kind"}

The database prevents changes. SQLite opens the file read-only, `query_only` is set, and the authorizer allows
only select, column reads, function calls and recursion. PostgreSQL runs a READ ONLY transaction that is never
committed, as a cursor, which only accepts queries.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any, TypedDict

# Permitted actions. Excluded: attach a file, change a setting, begin or end a transaction, write.
ALLOWED = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
STEPS = 10_000  # steps of SQLite's virtual machine between two looks at the clock
LONGEST = 64 << 20  # bytes of one value
PATTERN = (
    1000  # bytes of a LIKE or GLOB pattern: its time grows with the length to the power of the wildcards
)
ANSWER = 64 << 20  # approximate bytes of all values together
MESSAGE = 2000  # characters of a database's error message
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: LONGEST,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: PATTERN,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 20,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 500,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 200,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# Memory of the interpreter and of an answer: as sent by the database, as values, and as JSON.
OWN = 8 * ANSWER + (256 << 20)
GRACE = 0.5  # seconds from the timeout to the kill of a process that does not react

# Kinds of errors that a caller can act on.
REFUSED = "refused"  # the database rejected the statement
STOPPED = "stopped"  # out of time
AWAY = "away"  # the server does not answer
ADMINISTRATOR = "administrator"  # a READ ONLY transaction would not stop this role
TOO_LARGE = f"the answer has more than {ANSWER >> 20} MiB"

# Roles of PostgreSQL for which a function that seems to read can do more.
ADMINISTRATORS = (
    "pg_execute_server_program",
    "pg_write_server_files",
    "pg_read_server_files",
    "pg_signal_backend",
    "pg_checkpoint",
    "pg_maintain",
)


class Asked(TypedDict):
    """One query. place: a SQLite URI, or connection arguments of psycopg. rows: the number wanted.

    patience: seconds for connecting, beside those of the statement. heap: bytes that the database library may
    use in this process. path: where packages are imported from.
    """

    place: str | dict[str, Any]
    statement: str
    explain: bool
    rows: int
    seconds: float
    patience: float
    heap: int
    path: list[str]


class _Failed(Exception):
    """An error to return instead of rows: (text, kind)."""


def main() -> None:
    """Read one query from standard input and write its answer."""
    asked: Asked = json.load(sys.stdin)
    # Before anything is read from the database: also for a process whose parent was killed.
    _bound(asked["seconds"] + asked["patience"] + GRACE, asked["heap"] + OWN)
    ask = _sqlite if isinstance(asked["place"], str) else _postgresql
    try:
        answer = json.dumps(ask(asked))
    except _Failed as error:
        answer = json.dumps(_error(*error.args))
    except MemoryError:
        answer = json.dumps(_error(f"out of memory: a query may use {asked['heap'] + OWN >> 20} MiB"))
    sys.stdout.write(answer)


def _error(text: str, kind: str = REFUSED) -> dict[str, str]:
    return {"error": text if len(text) <= MESSAGE else text[:MESSAGE] + " ...", "kind": kind}


def _sqlite(asked: Asked) -> dict[str, Any]:
    """Return column names and rows of `_packed` values. Raises `_Failed`, `MemoryError`."""
    # The clock of the statement, beside the alarm of the process: an interrupted statement has a message.
    end = time.monotonic() + asked["seconds"]
    statement = f"EXPLAIN QUERY PLAN {asked['statement']}" if asked["explain"] else asked["statement"]
    connection = sqlite3.connect(str(asked["place"]), uri=True, isolation_level=None)
    try:
        # Bytes that are no UTF-8 must not hide the other rows.
        connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
        # Sorting and grouping use memory, not files, within the same limits.
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute(f"PRAGMA hard_heap_limit={asked['heap']}")
        connection.execute("PRAGMA query_only=ON")
        for limit, most in LIMITS.items():
            connection.setlimit(limit, most)
        # Last: the settings above are statements themselves.
        connection.set_authorizer(_authorise)
        connection.set_progress_handler(lambda: time.monotonic() > end, STEPS)
        cursor = connection.execute(statement)
        if cursor.description is None:
            return {"columns": None, "rows": []}
        rows = _packed_rows(cursor, asked["rows"])
        return {"columns": [column[0] for column in cursor.description], "rows": rows}
    # Python 3.11 has a Warning for two statements in one; a NUL in a statement is a ValueError.
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        message = str(error)
        raise _Failed(message, STOPPED if message == "interrupted" else REFUSED) from error
    finally:
        connection.close()


def _authorise(action: int, *_names: str | None) -> int:
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def _postgresql(asked: Asked) -> dict[str, Any]:
    """Return the same as `_sqlite`, from PostgreSQL."""
    sys.path[:] = asked["path"]
    import psycopg

    assert isinstance(asked["place"], dict)
    try:
        connection = psycopg.connect(**asked["place"])
    except psycopg.Error as error:
        raise _Failed(str(error), AWAY) from error
    # Set anew: the time for connecting was given beside that of the statement.
    signal.setitimer(signal.ITIMER_REAL, asked["seconds"] + GRACE)  # connecting does not count
    leave_odd_times(connection, ("date", "time", "timetz", "timestamp", "timestamptz", "interval"))
    try:
        return _in_transaction(connection, asked)
    except psycopg.errors.QueryCanceled as error:
        raise _Failed(str(error), STOPPED) from error
    except psycopg.Error as error:
        # An error without a state is libpq's own: the server is gone, or its answer had no room.
        if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
            if any(cause in str(error) for cause in ("memory", "buffer")):
                raise MemoryError from error
            raise _Failed(str(error), AWAY) from error
        raise _Failed(str(error)) from error


def leave_odd_times(connection: Any, types: Iterable[str]) -> None:
    """Let times that Python has no value for (infinity, BC, 24:00) arrive as PostgreSQL writes them."""
    from psycopg import DataError
    from psycopg.adapt import Loader
    from psycopg.pq import Format

    def also_text(loader: type[Any]) -> type[Any]:
        class AlsoText(Loader):
            def __init__(self, oid: int, context: Any = None) -> None:
                super().__init__(oid, context)
                self._loader = loader(oid, context)

            def load(self, data: Any) -> Any:
                try:
                    return self._loader.load(data)
                except DataError:
                    return bytes(data).decode()

        return AlsoText

    for name in types:
        oid = connection.adapters.types[name].oid
        stock_loader = connection.adapters.get_loader(oid, Format.TEXT)
        connection.adapters.register_loader(oid, also_text(stock_loader))


def _in_transaction(connection: Any, asked: Asked) -> dict[str, Any]:
    with connection.cursor() as cursor:
        _require_plain_role(cursor)
        # The look at the role has begun a transaction, whose isolation can no longer be set.
        connection.rollback()
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        milliseconds = str(int(asked["seconds"] * 1000))
        cursor.execute("SELECT set_config('statement_timeout', %s, true)", (milliseconds,))
        # Only queries can be declared as a cursor. Prepared, because that accepts one statement only.
        # A semicolon at the end is common, and DECLARE takes none.
        query = asked["statement"].strip().rstrip(";")
        if asked["explain"]:
            cursor.execute(f"EXPLAIN {query}".encode(), prepare=True)
            fetched: Iterable[Any] = cursor if cursor.description else ()
        else:
            cursor.execute(f"DECLARE asked NO SCROLL CURSOR FOR {query}".encode(), prepare=True)
            # Row by row: rows that are not fetched yet stay at the server.
            fetched = cursor.stream(f"FETCH {asked['rows']} FROM asked")
        rows = _packed_rows(fetched, asked["rows"])
        # A stream of no rows has no description: fetch the column names separately.
        if cursor.description is None and not asked["explain"]:
            cursor.execute("FETCH 0 FROM asked")
        if cursor.description is None:
            return {"columns": None, "rows": []}
        return {"columns": [column[0] for column in cursor.description], "rows": rows}


def _require_plain_role(cursor: Any) -> None:
    """Raise `_Failed` if the READ ONLY transaction would not stop this role."""
    # The login role counts, not the current one: a statement could switch back to it.
    cursor.execute(
        "SELECT session_user, rolsuper, rolreplication, ARRAY(SELECT m.rolname::text FROM pg_roles m"
        " WHERE m.rolname = ANY(%s) AND pg_has_role(session_user, m.oid, 'MEMBER'))"
        " FROM pg_roles WHERE rolname = session_user",
        (list(ADMINISTRATORS),),
    )
    name, superuser, replication, member = cursor.fetchone()
    roles = [
        *(["a superuser"] if superuser else []),
        *(["a replication role"] if replication else []),
        *(() if superuser else member),
    ]
    if roles:
        raise _Failed(
            f"cannot query as {name} ({', '.join(roles)}): a read-only transaction would not prevent changes",
            ADMINISTRATOR,
        )


def _packed_rows(fetched: Iterable[Any], rows: int) -> list[list[Any]]:
    packed_rows: list[list[Any]] = []
    size = 0
    for row in fetched:
        packed = [_pack_value(value) for value in row]
        size += sum(map(_packed_size, row, packed))
        # Counted row by row, so that too large an answer is never held completely.
        if size > ANSWER:
            raise _Failed(TOO_LARGE)
        packed_rows.append(packed)
        if len(packed_rows) == rows:
            break
    return packed_rows


def _packed_size(value: Any, packed: Any) -> int:
    sized = value if isinstance(value, bytes) else packed
    return len(sized) if isinstance(sized, bytes | str) else 16


# Values without a JSON form: {kind: text}, where `UNPACK` parses the text.
PACK: tuple[tuple[type | tuple[type, ...], str, Callable[[Any], str]], ...] = (
    ((bytes, memoryview), "hex", lambda value: value.hex()),
    (datetime, "datetime", lambda value: value.isoformat()),
    (date, "date", lambda value: value.isoformat()),
    (Decimal, "decimal", str),
)
UNPACK: Mapping[str, Callable[[str], Any]] = {
    "hex": bytes.fromhex,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "decimal": Decimal,
}


def _pack_value(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    for types, kind, text in PACK:
        if isinstance(value, types):
            return {kind: text(value)}
    return str(value)


def unpacked(value: Any) -> Any:
    """Return a packed value as the database library returned it. Unknown types arrive as text."""
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    return UNPACK[kind](text)


def _bound(seconds: float, nbytes: int) -> None:
    """Limit this process's time and memory, whether or not its parent still exists."""
    # The default action of this signal ends the process even in the middle of a call.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # No core file: it would have the database's values in it.
    most = {resource.RLIMIT_AS: nbytes, resource.RLIMIT_CORE: 0}
    for kind, value in most.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main()
