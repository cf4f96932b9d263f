"""Open the catalog's database and check that its schema is the one of this version.

1. `parse` turns the user's text into a SQLAlchemy URL.
2. `engine_for` sets a database up for a catalog: transactions that lock before the first read, a long wait
   for other writers, foreign keys.
3. `connect` checks the revision of the schema. It sets up a fresh SQLite database and refuses all others.

Alembic is not imported here: the schema is normally at `HEAD` already.

SQLite says "disk I/O error" for a full disk and "unable to open database file" for a folder in which nothing
can be created: `_sqlite_refusal` finds the reason, and names the next step.
"""

from __future__ import annotations

import errno
import functools
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, create_engine, event, exc, inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import NullPool, Pool, StaticPool

from ckptcore.catalog.models import Base
from ckptcore.catalog.sqlworker import leave_odd_times
from ckptcore.catalog.views import make_views
from ckptcore.errors import CatalogError, CatalogUnavailable, MissingDependency, UsageError
from ckptcore.utils import host
from ckptcore.utils.extras import install
from ckptcore.utils.text import short_repr as quoted

# The revisions in alembic/versions, oldest first; a test compares the two.
REVISIONS = ("v1", "v2", "v3", "v4", "v5")
HEAD = REVISIONS[-1]
# Development versions had fifteen revisions. The last has the tables of "v1": `upgrade` renames it.
UNRENAMED = "0015"
UNRELEASED = frozenset(f"{number:04}" for number in range(1, 15))

PSYCOPG = "postgresql+psycopg"
CONNECT_S = 15  # seconds until a server counts as unreachable

WAIT_MS = 30_000  # wait for another writer; measured waits of 8 busy writers stay below one second

# The statement that makes a transaction a writer before its first read. SQLite's default begins as a reader:
# two processes read the same row, both write, and one update is lost.
WRITER_BEGIN = {
    "sqlite": "BEGIN IMMEDIATE",
    # Any constant: one writer at a time, which waits as long as on SQLite.
    "postgresql": f"SELECT set_config('lock_timeout', '{WAIT_MS}', true), pg_advisory_xact_lock(7163384699)",
}
# Several statements read one snapshot.
READER_BEGIN = {"sqlite": "BEGIN", "postgresql": "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"}
# Queues lock single rows: on PostgreSQL they do not wait for a conversion that is being recorded.
QUEUE_BEGIN = {"sqlite": "BEGIN IMMEDIATE", "postgresql": f"SET LOCAL lock_timeout = {WAIT_MS}"}
BEGIN = "ckptcore_begin"  # execution option: one of the three tables; WRITER_BEGIN by default
DURABLE = "ckptcore_durable"  # execution option: whether a commit is flushed

# SQLSTATE prefixes of errors that pass: connections, too many of them, shutdown and start, deadlocks and
# serialization failures, lock timeouts. https://www.postgresql.org/docs/current/errcodes-appendix.html
PASSING_STATES = ("08", "53300", "57P", "40", "55P03")
PASSING_TEXTS = (
    "starting up",
    "shutting down",
    "recovery mode",
    "not yet accepting",
    "too many clients",
    "connection slots",
    "terminating connection",
)

# Write-ahead logging needs memory shared by all users of the file: one machine only.
SHARED_FILE_SYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "9p",
    "afs",
    "fuse",
)

_ACCESS_OF_FILE = "check the path and its disk; conversions also run without a catalog: --no-catalog"
_ACCESS_OF_SERVER = (
    "check the user, password and database of its URL (CKPTCORE_CATALOG_URL), and that user's rights"
)
# What PostgreSQL's errors need, by SQLSTATE.
_OF_STATE = {
    "53100": "free disk space on the database's server, then run the command again",
    "25006": "name a server that takes changes: this one is a standby, or its database is read-only",
}
_PLAIN_TEXT = "use text without NUL characters and lone surrogates, and numbers of at most 63 bits"
_PLAIN_NUMBER = "use a number below 2**63"

_STAMP = "CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32) NOT NULL, \
CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
_LEAST_FREE = 64 << 10  # bytes that SQLite's files beside the catalog need for any change
_NO_CATALOG = "conversions also run without a catalog: --no-catalog"
_ELSEWHERE = f"name another place with CKPTCORE_CATALOG_URL or --catalog; {_NO_CATALOG}"
_FREE_SPACE = f"free space there, then run the command again; {_NO_CATALOG}"


def connect(url: str, *, create: bool) -> Engine:
    """Return an engine for the catalog at `url`, whose schema is `HEAD`; raises as `open_catalog`."""
    parsed = parse(url)
    path = sqlite_path(parsed)
    public_url = parsed.render_as_string(hide_password=True)
    if path is not None:
        # Asked before an engine is made: SQLite would create the file by opening it.
        if not create and not os.path.exists(path):  # also False for a name that no file can have
            raise CatalogError(
                f"there is no catalog at {path}",
                hint="the first conversion creates it; name another with --catalog URL",
                url=public_url,
                missing=True,
            )
        if create:
            make_folder(path.parent)
    # From here on errors may name the URL: it is written without its password.
    engine = engine_for(parsed)
    try:
        with translated(public_url):
            _ensure_head(engine, public_url, create)
    except BaseException:
        engine.dispose()
        raise
    return engine


def clock(connection: Connection) -> datetime:
    """Return the time by which leases are compared: PostgreSQL's, or this machine's for SQLite."""
    if connection.dialect.name != "postgresql":
        return datetime.fromtimestamp(host.now(), UTC)
    now: datetime = connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
    return now.astimezone(UTC)


def parse(url: str) -> URL:
    """Return the URL of the catalog. A bare path means a SQLite file. Raises `CatalogError`."""
    if "://" not in url:
        # Absolute at once: a process may change its folder later.
        return URL.create("sqlite", database=os.path.abspath(os.path.expanduser(url)))
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError) as error:
        raise CatalogError(
            "cannot parse the catalog's URL",  # without the URL: it may contain a password
            hint="use a path, sqlite:////absolute/path or postgresql+psycopg://user@host/database",
        ) from error
    # URLs of other tools name no driver; SQLAlchemy before 2.1 would look for psycopg2.
    return parsed.set(drivername=PSYCOPG) if parsed.drivername in ("postgresql", "postgres") else parsed


def sqlite_path(url: URL) -> Path | None:
    """Return the file of a SQLite URL, or None for other servers and in-memory databases."""
    name = url.database
    if url.get_backend_name() != "sqlite" or not name or name.startswith((":memory:", "file:")):
        return None
    return Path(name)


def make_folder(folder: Path) -> None:
    """Create the folder of a SQLite file. Raises `CatalogError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        place = "name another place with CKPTCORE_CATALOG_URL, or pass --no-catalog"
        raise CatalogError(
            f"cannot create the catalog's folder {folder}: {error.strerror}",
            hint=_FREE_SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else place,
        ) from error


def engine_for(url: URL, *, foreign_keys: bool = True) -> Engine:
    """Return an engine with the settings of this module.

    Engines of one SQLite file are the same one. It keeps no connection, but the SQL of the statements that it
    has compiled: that takes half of the CPU time that a conversion spends on its catalog.

    Args:
        url: the database.
        foreign_keys: False for migrations only. SQLite alters a table by dropping and rebuilding it, and the
            drop would delete or refuse its children.
    """
    if sqlite_path(url) is not None:
        return _file_engine(url, foreign_keys)
    return _new_engine(url, foreign_keys)


@functools.lru_cache(maxsize=8)
def _file_engine(url: URL, foreign_keys: bool) -> Engine:
    return _new_engine(url, foreign_keys)


def _new_engine(url: URL, foreign_keys: bool) -> Engine:
    """Return an engine whose connections are set up for a catalog."""
    sqlite = url.get_backend_name() == "sqlite"
    # A SQLite connection opens in a millisecond and must not survive a fork. An in-memory database exists as
    # long as its one connection.
    pool: type[Pool] | None = None
    options: dict[str, Any] = {"pool_pre_ping": True}
    if sqlite:
        path = sqlite_path(url)
        pool, options = (StaticPool if path is None else NullPool), {}
        options["connect_args"] = {"check_same_thread": False}
    elif url.drivername == PSYCOPG:
        options["connect_args"] = connect_arguments(url)
    try:
        engine = create_engine(url, poolclass=pool, **options)
    except (exc.NoSuchModuleError, ModuleNotFoundError) as error:
        raise MissingDependency(
            f"cannot open the catalog: no driver for {url.drivername} is installed ({error})",
            hint=f"for PostgreSQL: {install('postgres')}",
        ) from error
    except exc.ArgumentError as error:  # for example a SQLite URL with a host
        raise CatalogError(
            f"cannot use the catalog's URL {url.render_as_string(hide_password=True)}",
            hint="use a path, sqlite:////absolute/path or postgresql+psycopg://user@host/database",
        ) from error
    if sqlite:

        @event.listens_for(engine, "connect")
        def _habits(connection: Any, _record: Any) -> None:
            # The folder's device, because the file may not exist yet.
            journal = "WAL" if path is None else _journal_of(path, os.stat(path.parent).st_dev)
            connection.isolation_level = None  # or the driver would begin transactions on its own
            connection.text_factory = _text
            connection.execute(f"PRAGMA busy_timeout={WAIT_MS}")
            _set_journal(connection, journal)
            # A power cut may lose a commit but never tears one: the files beside the checkpoints are the
            # source of truth.
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")

    elif url.drivername == PSYCOPG:

        @event.listens_for(engine, "connect")
        def _times(connection: Any, _record: Any) -> None:
            leave_odd_times(connection, ("timestamptz",))

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        begin = options.get(BEGIN, WRITER_BEGIN)
        statement = begin.get(connection.dialect.name)
        if sqlite and (begin is QUEUE_BEGIN or options.get(DURABLE)):
            # A sender does not repeat an event that was accepted: not even a power cut may lose it, nor the
            # row of an output whose staging folder is removed.
            connection.exec_driver_sql("PRAGMA synchronous=FULL")
        # After the durability is set: it cannot be changed inside of a transaction.
        if statement:
            connection.exec_driver_sql(statement)

    return engine


def _text(stored: bytes) -> str:
    r"""Return a text of SQLite; bytes that are not UTF-8 become escapes, as names are stored.

    The driver would refuse them, and with them all rows of an answer.

    >>> _text(b"step-1"), _text(b"step-\xff")
    ('step-1', 'step-\\xff')
    """
    return stored.decode("utf-8", "backslashreplace")


def connect_arguments(url: URL) -> dict[str, Any]:
    """Return arguments for psycopg beside the URL. The URL's own query takes precedence."""
    defaults = {"connect_timeout": CONNECT_S, "application_name": "ckptcore"}
    return {k: v for k, v in defaults.items() if k not in url.query}


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Translate database errors, without their statement and parameters.

    Raises:
        CatalogUnavailable: the error passes with time.
        UsageError: no column can store the value.
        CatalogError: any other error.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the catalog cannot store this text: {error.reason} (got {quoted(error.object)})",
            hint=_PLAIN_TEXT,
        ) from error
    except ValueError as error:  # an edited time, JSON text or enumeration value
        raise CatalogError(
            f"cannot read a row of the catalog: {type(error).__name__}: {error}",
            hint="restore a backup, or record its checkpoints again with `ckptcore catalog rebuild`",
            url=url,
        ) from error
    except OverflowError as error:  # SQLite's driver, for a number beyond 64 bits
        raise UsageError(f"the catalog cannot store this number: {error}", hint=_PLAIN_NUMBER) from error
    except exc.SQLAlchemyError as error:
        # The driver's own message: SQLAlchemy's has the statement and its parameters, which may be private.
        message = str(getattr(error, "orig", None) or error).strip()
        if _passes(error):
            raise CatalogUnavailable(f"the catalog does not answer: {message}", url=url) from error
        if isinstance(error, exc.DataError):
            raise UsageError(f"the catalog cannot store this value: {message}", hint=_PLAIN_TEXT) from error
        raise _refused(error, message, url) from error


def _refused(error: exc.SQLAlchemyError, message: str, url: str) -> CatalogError:
    """Return the error for what the database refuses, with its next step."""
    origin = getattr(error, "orig", None)
    # Only SQLite has a file to look at.
    if not url.startswith("sqlite"):
        hint = _OF_STATE.get(str(getattr(origin, "sqlstate", "")), _ACCESS_OF_SERVER)
        return CatalogError(f"cannot use the catalog: {message}", hint=hint, url=url)
    path = sqlite_path(parse(url))
    file_refusal = None if path is None else _sqlite_refusal(origin, path)
    if file_refusal is None:
        return CatalogError(f"cannot use the catalog: {message}", hint=_ACCESS_OF_FILE, url=url)
    # With SQLite's own text: people search for it.
    return CatalogError(
        f"{file_refusal.message} ({message})", hint=file_refusal.hint, url=url, **file_refusal.values
    )


def _passes(error: exc.SQLAlchemyError) -> bool:
    """Return whether waiting helps: the server is away, stopping or starting, or others keep the lock."""
    if not isinstance(error, exc.DBAPIError):
        # A full pool is a lock of this process: others of it will give connections back.
        return isinstance(error, exc.TimeoutError)
    message, state = str(error.orig), getattr(error.orig, "sqlstate", None)
    if isinstance(error.orig, sqlite3.OperationalError):
        # "database is locked" and "database table is locked".
        return "locked" in message
    if state is not None:
        return str(state).startswith(PASSING_STATES)
    # Without a state there was no session: a server that refuses one says FATAL and why.
    gone = error.connection_invalidated or isinstance(error, exc.OperationalError)
    return gone and ("FATAL" not in message or any(text in message for text in PASSING_TEXTS))


@functools.lru_cache(maxsize=8)
def _journal_of(path: Path, device: int) -> str:
    """Return `journal_mode`, asked once while the file's folder is on one device: a mount changes that."""
    return journal_mode(path)


def journal_mode(path: Path, mounts: str | None = None) -> str:
    """Return WAL for a local file system and DELETE where several machines may share the file.

    Args:
        path: the SQLite file.
        mounts: the text of /proc/self/mounts; read if None.
    """
    if mounts is None:
        table = Path("/proc/self/mounts")
        mounts = table.read_text(errors="replace") if table.exists() else ""
    folder = os.path.realpath(path.parent)
    best, kind = "", ""
    # Mount points may be nested: the longest that contains the folder is the one it is on; a later
    # one of equal length covers an earlier one.
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return "DELETE" if kind.startswith(SHARED_FILE_SYSTEMS) else "WAL"


def revision(connection: Connection) -> str | None:
    """Return the schema revision, or None for a database without tables.

    Raises `CatalogError` if the tables are not a catalog's.
    """
    tables = inspect(connection).get_table_names()
    foreign = [name for name in tables if name != "alembic_version"]
    if len(foreign) < len(tables):
        version_num = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
        if version_num is not None:
            return str(version_num)
    if foreign:
        raise CatalogError(
            f"the database is not a ckptcore catalog: it has the tables {', '.join(foreign[:5])}",
            hint="name an empty database or another file with --catalog URL",
        )
    return None


def _ensure_head(engine: Engine, public_url: str, create: bool) -> None:
    """Create a fresh SQLite catalog, and refuse schemas other than `HEAD`."""
    with engine.execution_options(**{BEGIN: READER_BEGIN}).begin() as connection:
        schema = revision(connection)
    if schema == HEAD:
        return
    # Only SQLite: on a server, a user decides which database gets tables.
    if schema is None and engine.dialect.name == "sqlite" and create:
        with engine.begin() as connection:
            # Another process may have been faster: check once more under the writer's lock.
            if revision(connection) is None:
                Base.metadata.create_all(connection)
                make_views(connection)
                connection.exec_driver_sql(_STAMP)
                connection.exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{HEAD}')")
        return
    if schema is None:
        raise CatalogError(
            "the catalog's database has no tables yet",
            hint="run `ckptcore catalog upgrade` once",
            url=public_url,
        )
    # A schema of a known revision can be upgraded; any other one has an error of its own.
    require_known(schema, public_url)
    raise CatalogError(
        f"the catalog's schema is {schema}, this version needs {HEAD}",
        hint="run `ckptcore catalog upgrade`",
        url=public_url,
    )


def require_known(schema: str, public_url: str) -> None:
    """Raise `CatalogError` for a schema that `ckptcore catalog upgrade` cannot migrate."""
    if schema in UNRELEASED:
        raise CatalogError(
            f"the catalog's schema is {schema}, of a development version (only {UNRENAMED} can be upgraded)",
            hint="record its checkpoints in a new catalog with `ckptcore catalog rebuild ROOT...`, or first "
            f"run `ckptcore catalog upgrade` of a development version with schema {UNRENAMED}",
            url=public_url,
        )
    if schema not in (*REVISIONS, UNRENAMED):
        raise CatalogError(
            f"the catalog's schema must be {HEAD} (got {schema}, of a newer version of ckptcore)",
            hint="upgrade ckptcore, name another catalog, or pass --no-catalog",
            url=public_url,
        )


def _set_journal(connection: Any, mode: str) -> None:
    """Switch the journal mode once per file. Processes that open a fresh file together take turns."""
    deadline = host.monotonic() + WAIT_MS / 1000
    # Asked each time: another process may have switched it meanwhile.
    while connection.execute("PRAGMA journal_mode").fetchone()[0].upper() not in (mode, "MEMORY"):
        try:
            connection.execute(f"PRAGMA journal_mode={mode}")
        except sqlite3.OperationalError as error:
            if "readonly" in str(error):
                return  # a read-only catalog stays as it is
            # Switching ignores the busy timeout: SQLite will not wait for an exclusive lock here.
            if "locked" not in str(error) or host.monotonic() > deadline:
                raise
            host.sleep(0.01)


class _Refusal(NamedTuple):
    """Why SQLite refuses a file.

    Attributes:
        message: What cannot be done, and why.
        hint: The next step.
        values: More for programs.
    """

    message: str
    hint: str
    values: dict[str, object]


def _sqlite_refusal(error: BaseException | None, path: Path) -> _Refusal | None:
    """Return why SQLite refused the file ``path`` of a catalog; None where only SQLite knows."""
    name = getattr(error, "sqlite_errorname", "") if isinstance(error, sqlite3.Error) else ""
    values: dict[str, object] = {"path": str(path)}
    if name == "SQLITE_NOTADB":
        return _Refusal(
            f"{path} is not a SQLite database", "name the catalog's file with --catalog URL", values
        )
    free = _free_bytes(path.parent)
    if name == "SQLITE_FULL" or (name.startswith("SQLITE_IOERR") and free is not None and free < _LEAST_FREE):
        free_text = "" if free is None else f": {free} bytes are free"
        values |= {"reason": "disk-full", "free": free}
        return _Refusal(f"the disk of the catalog {path} is full{free_text}", _FREE_SPACE, values)
    if not name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
        return None
    folder, file = _read_only(path.parent), _read_only(path)
    if not os.path.exists(path):
        why = folder or _lookup_error(path)
        return _Refusal(f"cannot create the catalog {path}: {why}", _ELSEWHERE, values) if why else None
    if path.is_dir():
        return _Refusal(f"{path} is a folder", "name the catalog's file with --catalog URL", values)
    if not os.access(path, os.R_OK, effective_ids=True):
        hint = f"ask its owner for the right, or {_ELSEWHERE}"
        return _Refusal(f"this user may not read the catalog {path}", hint, values)
    beside = [Path(f"{path}{end}") for end in ("-wal", "-shm")]
    if folder is not None and _logs_ahead(path) and not all(log.exists() for log in beside):
        return _Refusal(
            f"cannot open the catalog {path}: {folder}; it is in SQLite's WAL mode, and even readers need "
            f"{beside[1].name} beside it",
            "copy it, with its -wal file if there is one, to a folder that can be written, and name the copy "
            "with --catalog URL",
            values,
        )
    why = file or folder or next(filter(None, (_read_only(log) for log in beside)), None)
    if why is None:
        return None
    return _Refusal(
        f"cannot write the catalog {path}: {why}",
        f"make the file and its folder writable, or {_ELSEWHERE}",
        values,
    )


def _free_bytes(folder: Path) -> int | None:
    with suppress(OSError):
        filesystem = os.statvfs(folder)
        return filesystem.f_bavail * filesystem.f_frsize
    return None


def _lookup_error(path: Path) -> str | None:
    """Return why the file system cannot look for a file, such as a name that is too long; None if it can."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror
    return None


def _read_only(path: Path) -> str | None:
    """Return why a file or folder cannot be written; None if it can, or is not there."""
    with suppress(OSError):
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return f"the file system of {path} is read-only"
    # `Path.exists` raises for a name that is too long.
    if os.path.exists(path) and not os.access(path, os.W_OK, effective_ids=True):
        return f"this user may not {'create files in' if path.is_dir() else 'write'} {path}"
    return None


def _logs_ahead(path: Path) -> bool:
    """Report whether a database is in WAL mode (https://www.sqlite.org/fileformat.html, bytes 18 and 19)."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(20)[18:] == b"\x02\x02"
    return False
