"""SQL that only reads: what does the catalog answer to a statement of the user's own?

That nothing is changed is the database's doing, not a look at the words of the statement, and what it may
cost is the operating system's: it is asked in a process of its own, which is killed when the time is over
and whose memory ends (`sqlworker`). To a superuser of PostgreSQL, and to whoever may run programs or write
files there, nothing is answered: to such a role a function can do anything, whatever the transaction is.
How a statement would be answered is asked with `explain`: a cursor takes no EXPLAIN, so it is put before the
statement, and the transaction is what keeps anything from being changed (EXPLAIN ANALYZE runs it).
"""

from __future__ import annotations

import json
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
from ckptcore.errors import CatalogAway, CkptError, UsageError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

_START = 30.0  # seconds for a process to start and to hand its answer over, on a busy machine
_PATIENCE = 4.0 * CONNECT_S  # for a server that has just answered; a URL may name several
MEMORY = 256 << 20  # bytes that SQLite may use for one statement, beside the answer
_MOST_ROWS = 1 << 31
_LONGEST_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The rows of a statement. columns: their names. more: whether there were more rows than asked for."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    more: bool

    def as_dict(self) -> dict[str, Any]:
        """The JSON face: a list of objects where the names of the columns differ, else of lists."""
        rows = [[_as_json(value) for value in row] for row in self.rows]
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
    return _ask_worker(f"{place}?mode=ro", statement, limit, seconds, explain, 0, MEMORY, place)


def _ask_worker(
    place: str | dict[str, Any],
    statement: str,
    limit: int,
    seconds: float,
    explain: bool,
    patience: float,
    heap: int,
    label: str,
) -> Answer:
    asked = sqlworker.Asked(
        place=place,
        statement=statement,
        explain=explain,
        rows=limit + 1,
        seconds=seconds,
        patience=patience,
        heap=heap,
        path=sys.path,
    )
    # -I: nothing of the user's environment; -S: no look for site-packages, which takes longer than the rest.
    command = [sys.executable, "-I", "-S", sqlworker.__file__]
    most = seconds + patience + sqlworker.GRACE
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=False,
            timeout=most + _START,
        )
    except subprocess.TimeoutExpired as error:
        raise _stopped(seconds) from error
    if done.returncode == -signal.SIGALRM:
        raise _stopped(seconds)
    try:
        found = json.loads(done.stdout)
    except ValueError as error:  # it ran out of memory where Python has none left to say so
        raise _refusal(f"it ended with status {done.returncode}, out of memory") from error
    if "error" in found:
        raise _error_of(found["kind"], found["error"], seconds, label)
    if found["columns"] is None:
        raise UsageError("the database did not answer: this is no query", hint="for example SELECT 1")
    rows = tuple(tuple(sqlworker.unpacked(value) for value in row) for row in found["rows"])
    return Answer(tuple(found["columns"]), rows[:limit], len(rows) > limit)


def _postgresql(url: URL, statement: str, limit: int, seconds: float, explain: bool) -> Answer:
    engine = engine_for(url)
    try:
        # As SQLAlchemy would connect: it knows how a URL's query becomes arguments.
        _, place = engine.dialect.create_connect_args(url)
    finally:
        engine.dispose()
    place = connect_arguments(url) | {k: v for k, v in place.items() if k != "context"}
    label = url.render_as_string(hide_password=True)
    return _ask_worker(place, statement, limit, seconds, explain, _PATIENCE, 0, label)


def _error_of(kind: str, said: str, seconds: float, label: str) -> CkptError:
    if kind == sqlworker.STOPPED:
        return _stopped(seconds)
    if kind == sqlworker.AWAY:  # it answered a moment ago
        return CatalogAway(f"the catalog does not answer: {said.strip()}", url=label)
    if kind == sqlworker.ADMINISTRATOR:
        return UsageError(
            said, hint="connect as a role that only reads; ckptcore/catalog/README.md makes one"
        )
    return _refusal(said)


def _stopped(seconds: float) -> UsageError:
    return UsageError(
        f"the statement took more than {seconds:g} s and was stopped", hint="ask for less, or raise --timeout"
    )


def _refusal(said: str) -> UsageError:
    return UsageError(
        f"the database did not answer: {said.strip()}",
        hint="one SELECT at a time; nothing can be changed here. --explain shows its plan",
    )


def _as_json(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, date):  # datetimes are some
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
