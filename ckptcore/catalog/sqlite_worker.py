"""SQLite in a process of its own: one statement, and what it may cost is the operating system's to bound.

A look at the clock comes between two steps of SQLite's machine, and one step can be a call that takes hours:
a LIKE with many wildcards, say. So the statement runs where it can be killed. This file is run by its path,
with the standard library alone, which takes a few hundredths of a second:

    standard input    JSON: uri, statement, rows (how many are wanted), seconds, bytes (of memory)
    standard output   JSON: {"columns", "rows"}, or {"error"}

That nothing is changed is SQLite's doing: the file is opened for reading, `query_only` is set, and the
authoriser allows nothing but to select, read a column, call a function and recurse.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sqlite3
import sys
import time
from typing import Any

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
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: LONGEST,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: PATTERN,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 20,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 500,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 200,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
GRACE = 0.5  # seconds between the clock's word and the end of a process that does not hear it
STOPPED = "interrupted"  # SQLite's word for what the clock ended
TOO_LARGE = f"the answer has more than {ANSWER >> 20} MiB"


def main() -> None:
    """Answers one question."""
    asked = json.load(sys.stdin)
    _bound(asked["seconds"], asked["bytes"])
    try:
        answer = ask(asked["uri"], asked["statement"], asked["rows"], asked["seconds"], asked["bytes"])
    except MemoryError:
        answer = {"error": "out of memory"}
    # Python 3.11 has a Warning for two statements in one; a NUL in a statement is a ValueError.
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


def ask(uri: str, statement: str, rows: int, seconds: float, nbytes: int) -> dict[str, Any]:
    """The names of the columns, and rows of values as JSON has them; bytes are ``{"hex": ...}``.

    Raises `sqlite3.Error`, `sqlite3.Warning`, `ValueError` and `MemoryError`.
    """
    end = time.monotonic() + seconds
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    try:
        connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
        # Sorting and grouping spill into no file, and are bounded as all else is.
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute(f"PRAGMA hard_heap_limit={nbytes}")
        connection.execute("PRAGMA query_only=ON")
        for limit, most in LIMITS.items():
            connection.setlimit(limit, most)
        connection.set_authorizer(_authorise)
        connection.set_progress_handler(lambda: time.monotonic() > end, STEPS)
        cursor = connection.execute(statement)
        if cursor.description is None:
            return {"columns": None, "rows": []}
        return {"columns": [column[0] for column in cursor.description], "rows": _rows(cursor, rows)}
    finally:
        connection.close()


def _authorise(action: int, *_names: str | None) -> int:
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def _rows(cursor: sqlite3.Cursor, rows: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    size = 0
    for row in cursor:
        found.append([{"hex": value.hex()} if isinstance(value, bytes) else value for value in row])
        size += sum(len(value) if isinstance(value, bytes | str) else 16 for value in row)
        if size > ANSWER:
            raise ValueError(TOO_LARGE)
        if len(found) == rows:
            break
    return found


def _bound(seconds: float, nbytes: int) -> None:
    """Bounds this process, whether or not its parent is still there: its time and its memory."""
    # Nothing handles this signal: it ends the process in the middle of a call.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
    # The interpreter has its share beside SQLite's heap; an answer is held twice, as values and as JSON.
    most = {resource.RLIMIT_AS: nbytes + 8 * ANSWER + (256 << 20), resource.RLIMIT_CORE: 0}
    for kind, value in most.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
            resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main()
