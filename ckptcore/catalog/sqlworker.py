"""SQL in a process of its own: one statement, and what it may cost is the operating system's to bound.

A library that asks a database holds what it is sent, however much that is: one value of PostgreSQL, one
message of an error, is up to 1 GB. A look at the clock comes between two steps of SQLite's machine, and one
step can be a call that takes hours: a LIKE with many wildcards, say. So the statement runs where it can be
killed and where memory ends. This file is run by its path, with the standard library alone (and psycopg for
PostgreSQL), which takes a few hundredths of a second:

    standard input    JSON: an `Asked`
    standard output   JSON: {"columns", "rows"}, or {"error", "kind"}

That nothing is changed is the database's doing. SQLite opens the file for reading, `query_only` is set, and
the authoriser allows nothing but to select, read a column, call a function and recurse. PostgreSQL runs a
READ ONLY transaction that is never committed, as a cursor, which is a query and nothing else.
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

# What a statement may do. Not: attach another file, change a setting, begin or end a transaction, write.
ALLOWED = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
STEPS = 10_000  # of SQLite's machine between two looks at the clock
LONGEST = 64 << 20  # bytes of one value
PATTERN = (
    1000  # bytes of a LIKE or GLOB pattern: the time it takes grows with the length to the wildcards' power
)
ANSWER = 64 << 20  # bytes of all values together, about
MESSAGE = 2000  # characters of what a database says is wrong
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: LONGEST,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: PATTERN,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 20,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 500,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 200,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# The interpreter's share, and that of an answer: as the database sends it, as values, and as JSON.
OWN = 8 * ANSWER + (256 << 20)
GRACE = 0.5  # seconds between the clock's word and the end of a process that does not hear it

# Kinds of errors: what a caller can act on.
REFUSED = "refused"  # the database says no
STOPPED = "stopped"  # the time is over
AWAY = "away"  # the server does not answer
ADMINISTRATOR = "administrator"  # nothing would hold this role back
TOO_LARGE = f"the answer has more than {ANSWER >> 20} MiB"

# Roles of PostgreSQL to whom a function that looks like reading can do more.
ADMINISTRATORS = (
    "pg_execute_server_program",
    "pg_write_server_files",
    "pg_read_server_files",
    "pg_signal_backend",
    "pg_checkpoint",
    "pg_maintain",
)


class Asked(TypedDict):
    """One question. place: a URI of SQLite, or what psycopg connects with. rows: how many are wanted.

    patience: seconds that connecting may take, beside those of the statement. heap: bytes that the database
    itself may use in this process. path: where packages are imported from.
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
    """What is answered instead of rows: a text, and its kind."""


def main() -> None:
    """Answers one question."""
    asked: Asked = json.load(sys.stdin)
    _bound(asked["seconds"] + asked["patience"] + GRACE, asked["heap"] + OWN)
    ask = _sqlite if isinstance(asked["place"], str) else _postgresql
    try:
        answer = json.dumps(ask(asked))
    except _Failed as error:
        answer = json.dumps(_error(*error.args))
    except MemoryError:
        answer = json.dumps(_error(f"out of memory: one question may take {asked['heap'] + OWN >> 20} MiB"))
    sys.stdout.write(answer)


def _error(said: str, kind: str = REFUSED) -> dict[str, str]:
    return {"error": said if len(said) <= MESSAGE else said[:MESSAGE] + " ...", "kind": kind}


def _sqlite(asked: Asked) -> dict[str, Any]:
    """The names of the columns, and rows of values as `_packed` has them. Raises `_Failed`, `MemoryError`."""
    end = time.monotonic() + asked["seconds"]
    statement = f"EXPLAIN QUERY PLAN {asked['statement']}" if asked["explain"] else asked["statement"]
    connection = sqlite3.connect(str(asked["place"]), uri=True, isolation_level=None)
    try:
        connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
        # Sorting and grouping spill into no file, and are bounded as all else is.
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute(f"PRAGMA hard_heap_limit={asked['heap']}")
        connection.execute("PRAGMA query_only=ON")
        for limit, most in LIMITS.items():
            connection.setlimit(limit, most)
        connection.set_authorizer(_authorise)
        connection.set_progress_handler(lambda: time.monotonic() > end, STEPS)
        cursor = connection.execute(statement)
        if cursor.description is None:
            return {"columns": None, "rows": []}
        rows = _packed_rows(cursor, asked["rows"])
        return {"columns": [column[0] for column in cursor.description], "rows": rows}
    # Python 3.11 has a Warning for two statements in one; a NUL in a statement is a ValueError.
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        said = str(error)
        raise _Failed(said, STOPPED if said == "interrupted" else REFUSED) from error
    finally:
        connection.close()


def _authorise(action: int, *_names: str | None) -> int:
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def _postgresql(asked: Asked) -> dict[str, Any]:
    """As `_sqlite`."""
    sys.path[:] = asked["path"]
    import psycopg

    assert isinstance(asked["place"], dict)
    try:
        connection = psycopg.connect(**asked["place"])
    except psycopg.Error as error:
        raise _Failed(str(error), AWAY) from error
    signal.setitimer(signal.ITIMER_REAL, asked["seconds"] + GRACE)  # the statement's time begins now
    try:
        return _in_transaction(connection, asked)
    except psycopg.errors.QueryCanceled as error:
        raise _Failed(str(error), STOPPED) from error
    except psycopg.Error as error:
        # What has no state comes from here, not from the server: it is gone, or its answer had no room.
        if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
            if any(words in str(error) for words in ("memory", "buffer")):
                raise MemoryError from error
            raise _Failed(str(error), AWAY) from error
        raise _Failed(str(error)) from error


def _in_transaction(connection: Any, asked: Asked) -> dict[str, Any]:
    with connection.cursor() as cursor:
        _require_plain_role(cursor)
        connection.rollback()
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        milliseconds = str(int(asked["seconds"] * 1000))
        cursor.execute("SELECT set_config('statement_timeout', %s, true)", (milliseconds,))
        # A cursor can be declared for a query only. Prepared, because that takes one statement at a time.
        query = asked["statement"].strip().rstrip(";")
        if asked["explain"]:
            cursor.execute(f"EXPLAIN {query}".encode(), prepare=True)
            found: Iterable[Any] = cursor if cursor.description else ()
        else:
            cursor.execute(f"DECLARE asked NO SCROLL CURSOR FOR {query}".encode(), prepare=True)
            # One row after the other: what is not fetched yet waits at the server.
            found = cursor.stream(f"FETCH {asked['rows']} FROM asked")
        rows = _packed_rows(found, asked["rows"])
        # A stream of no rows describes nothing: without rows the names are asked for by themselves.
        if cursor.description is None and not asked["explain"]:
            cursor.execute("FETCH 0 FROM asked")
        if cursor.description is None:
            return {"columns": None, "rows": []}
        return {"columns": [column[0] for column in cursor.description], "rows": rows}


def _require_plain_role(cursor: Any) -> None:
    """Raises `_Failed` where the database itself would not hold a function back."""
    # The one who logged in counts, and not who he is now: a statement could go back to that.
    cursor.execute(
        "SELECT session_user, rolsuper, rolreplication, ARRAY(SELECT m.rolname::text FROM pg_roles m"
        " WHERE m.rolname = ANY(%s) AND pg_has_role(session_user, m.oid, 'MEMBER'))"
        " FROM pg_roles WHERE rolname = session_user",
        (list(ADMINISTRATORS),),
    )
    name, superuser, replication, member = cursor.fetchone()
    found = [
        *(["a superuser"] if superuser else []),
        *(["a replication role"] if replication else []),
        *(() if superuser else member),
    ]
    if found:
        raise _Failed(
            f"cannot ask as {name}: no transaction keeps {', '.join(found)} from changing anything",
            ADMINISTRATOR,
        )


def _packed_rows(given: Iterable[Any], rows: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    size = 0
    for row in given:
        packed = [_packed(value) for value in row]
        size += sum(map(_packed_size, row, packed))
        if size > ANSWER:
            raise _Failed(TOO_LARGE)
        found.append(packed)
        if len(found) == rows:
            break
    return found


def _packed_size(value: Any, packed: Any) -> int:
    sized = value if isinstance(value, bytes) else packed
    return len(sized) if isinstance(sized, bytes | str) else 16


# What is not JSON: under its kind, as a text that `UNPACK` reads.
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


def _packed(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    for types, kind, text in PACK:
        if isinstance(value, types):
            return {kind: text(value)}
    return str(value)


def unpacked(value: Any) -> Any:
    """A value of a row, as the database's library had it; what no JSON and no `PACK` has, as a text."""
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    return UNPACK[kind](text)


def _bound(seconds: float, nbytes: int) -> None:
    """Bounds this process, whether or not its parent is still there: its time and its memory."""
    # Nothing handles this signal: it ends the process in the middle of a call.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    most = {resource.RLIMIT_AS: nbytes, resource.RLIMIT_CORE: 0}
    for kind, value in most.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
            resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main()
