"""Run a user's read-only SQL statement on the catalog, with limits on time and memory.

The database, not a scan of the statement, prevents changes. The statement runs in a process of its own
(`sqlworker`), which the operating system stops when it exceeds its time or memory. Superusers of PostgreSQL,
and roles that may run programs or write files there, are refused: a function can do anything for such a role,
whatever the transaction is. `explain` returns the database's plan. A cursor takes no EXPLAIN, so it is put
before the statement; the transaction prevents changes (EXPLAIN ANALYZE runs the statement).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ckptcore.catalog import sqlworker
from ckptcore.catalog.database import CONNECT_S, connect, connect_arguments, engine_for, parse, sqlite_path
from ckptcore.catalog.models import Base
from ckptcore.catalog.views import VIEWS
from ckptcore.errors import CatalogUnavailable, CkptError, UsageError
from ckptcore.utils.near_names import did_you_mean

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

_START = 30.0  # seconds for a process to start and to return its answer, on a busy machine
_PATIENCE = 4.0 * CONNECT_S  # for a server that has just answered; a URL may name several
MEMORY = 256 << 20  # bytes that SQLite may use for one statement, beside the answer
_MOST_ROWS = 1 << 31
_LONGEST_S = 24 * 3600.0
_NO_COLUMN = re.compile(r'no such column: (?:\w+\.)?(\w+)|column "?(?:\w+\.)?(\w+)"? does not exist')
_NO_TABLE = re.compile(r'no such table: (\S+)|relation "([^"]+)" does not exist')


@dataclass(frozen=True, slots=True)
class Answer:
    """The rows of a statement. columns: their names. more: whether rows beyond the limit exist."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    more: bool

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values. Rows are objects if the column names differ, else lists."""
        rows = [[_as_json(value) for value in row] for row in self.rows]
        named = len(set(self.columns)) == len(self.columns)
        values: list[Any] = [dict(zip(self.columns, row, strict=True)) for row in rows] if named else rows
        return {"columns": list(self.columns), "rows": values, "more": self.more}


def ask(
    url: str, statement: str, *, limit: int = 1000, seconds: float = 30.0, explain: bool = False
) -> Answer:
    """Return the first `limit` rows of one read-only statement.

    Args:
        url: the catalog.
        statement: one SQL query.
        limit: the most rows to return.
        seconds: the time that the statement may take.
        explain: return the database's plan for the statement instead.

    Raises:
        UsageError: it is not one read-only statement, or it exceeds its limits.
        CatalogError: as `open_catalog`.
    """
    if not 0 < seconds <= _LONGEST_S:
        raise UsageError(
            f"--timeout must be above 0 and at most {_LONGEST_S:g} s (got {seconds:g} s)",
            hint="name another time",
        )
    try:
        statement.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the statement is not text: {error.reason}", hint="write it in UTF-8") from error
    if "\0" in statement:
        raise UsageError("the statement contains a NUL character", hint="remove it")
    asked = sqlworker.Asked(
        place="",
        statement=statement,
        explain=explain,
        rows=min(limit, _MOST_ROWS) + 1,  # one more tells whether there are more
        seconds=seconds,
        patience=0,
        heap=MEMORY,
        path=sys.path,
    )
    connect(url, create=False).dispose()  # check that it exists, and is a catalog of this version
    parsed = parse(url)
    if parsed.get_backend_name() != "sqlite":
        return _postgresql(parsed, asked)
    path = sqlite_path(parsed)
    name = parsed.database or ""
    if path is None and not name.startswith("file:"):
        raise UsageError("cannot query an in-memory catalog", hint="name the file of a catalog")
    place = name.partition("?")[0] if path is None else f"file:{quote(str(path.absolute()))}"
    return _ask_worker(asked | {"place": f"{place}?mode=ro"}, place)


def _ask_worker(asked: sqlworker.Asked, label: str) -> Answer:
    """Return the answer of a process. label: the catalog, for messages."""
    seconds, limit = asked["seconds"], asked["rows"] - 1
    # -I: ignore the user's environment; -S: skip site-packages, whose search takes longer than the rest.
    command = [sys.executable, "-I", "-S", sqlworker.__file__]
    most = seconds + asked["patience"] + sqlworker.GRACE
    try:
        process = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=False,
            timeout=most + _START,
        )
    except subprocess.TimeoutExpired as error:
        raise _stopped(seconds) from error
    if process.returncode == -signal.SIGALRM:
        raise _stopped(seconds)
    try:
        answer = json.loads(process.stdout)
    except ValueError as error:  # out of memory, without enough left for Python to report it
        raise _refusal(f"its process ended with status {process.returncode}, out of memory") from error
    if "error" in answer:
        raise _error_of(answer["kind"], answer["error"], seconds, label)
    if answer["columns"] is None:
        raise UsageError("the statement is not a query", hint="for example SELECT 1")
    rows = tuple(tuple(sqlworker.unpacked(value) for value in row) for row in answer["rows"])
    return Answer(tuple(answer["columns"]), rows[:limit], len(rows) > limit)


def _postgresql(url: URL, asked: sqlworker.Asked) -> Answer:
    engine = engine_for(url)
    try:
        # As SQLAlchemy would connect: it translates a URL's query into arguments.
        _, place = engine.dialect.create_connect_args(url)
    finally:
        engine.dispose()
    place = connect_arguments(url) | {k: v for k, v in place.items() if k != "context"}
    label = url.render_as_string(hide_password=True)
    return _ask_worker(asked | {"place": place, "patience": _PATIENCE, "heap": 0}, label)


def _error_of(kind: str, message: str, seconds: float, label: str) -> CkptError:
    if kind == sqlworker.STOPPED:
        return _stopped(seconds)
    if kind == sqlworker.AWAY:  # it answered a moment ago
        return CatalogUnavailable(f"the catalog does not answer: {message.strip()}", url=label)
    if kind == sqlworker.ADMINISTRATOR:
        return UsageError(
            message, hint="connect as a read-only role; ckptcore/catalog/README.md shows how to create one"
        )
    return _refusal(message)


def _stopped(seconds: float) -> UsageError:
    return UsageError(
        f"the statement took more than {seconds:g} s and was stopped",
        hint="query fewer rows, or raise --timeout",
    )


def _refusal(message: str) -> UsageError:
    return UsageError(
        f"the database refused the statement: {message.strip()}",
        hint=_near_names(message)
        or "use a single SELECT; changes are not possible here. --explain shows the plan",
    )


def _near_names(message: str) -> str:
    """Return the hint for a table or column that does not exist: near ones, or how to list them."""
    columns = [column.name for table in Base.metadata.tables.values() for column in table.columns]
    of_view = "`ckptcore catalog sql 'SELECT * FROM VIEW LIMIT 1'` shows the columns of a view"
    for pattern, names, otherwise in (
        (_NO_TABLE, [*VIEWS, *Base.metadata.tables], f"views: {', '.join(VIEWS)}"),
        (_NO_COLUMN, columns, of_view),
    ):
        match = pattern.search(message)
        if match is not None:
            return did_you_mean((match[1] or match[2])[:100], names, otherwise)
    return ""


def _as_json(value: Any) -> Any:
    """Convert a value of a row to a JSON value."""
    if isinstance(value, date):  # datetime is a subclass
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
