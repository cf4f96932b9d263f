"""A private PostgreSQL server for tests: one a session, on a loopback port and in a folder of its own.

PostgreSQL refuses to run as root: then it runs as ``postgres`` or ``nobody``. The kernel stops it when the
tests die without a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy

from ckptcore.errors import MissingDependency
from deployments import database_server

PATIENCE = 60  # seconds for a start on a busy machine; a quiet one takes less than one
PR_SET_PDEATHSIG = 1

# What a crash would cost is nothing here; `durable` servers keep their defaults.
QUICK = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_wal_size=64MB")
# A database is 300 files, and many tests have one of their own: a RAM disk makes it in a third of the time.
RAM_DISK = Path("/dev/shm")
ALWAYS = (
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "max_connections=60",
    "shared_buffers=64MB",
)


def programs() -> Path | None:
    """The folder of initdb and postgres; None where there is none."""
    try:
        return database_server.programs()
    except MissingDependency:
        return None


class Server:
    """A running server. `restart` and `kill` are for tests of what happens then."""

    def __init__(self, folder: Path, bin_folder: Path, settings: tuple[str, ...]) -> None:
        self.folder, self._bin, self._settings = folder, bin_folder, settings
        self._as = _unprivileged(folder)
        self._password = secrets.token_hex(8)
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._administrator: psycopg.Connection[Any] | None = None
        self._initialise()
        self.start()

    def url(self, database: str = "postgres") -> str:
        return f"postgresql+psycopg://postgres:{self._password}@127.0.0.1:{self.port}/{database}"

    @contextmanager
    def database(self, template: str = "template0") -> Iterator[str]:
        """The URL of a copy of a database, an empty one by default, which is dropped at the end."""
        name = f"t{secrets.token_hex(6)}"
        self._administer(f"CREATE DATABASE {name} TEMPLATE {template}{self._strategy()}")
        try:
            yield self.url(name)
        finally:
            self._administer(f"DROP DATABASE {name} WITH (FORCE)")

    def as_role(self, url: str, role: str, *statements: str) -> str:
        """The same database for an ordinary role, after statements of the administrator's about it."""
        with contextlib.suppress(psycopg.errors.DuplicateObject):
            self._administer(f"CREATE ROLE {role} LOGIN PASSWORD '{self._password}'")
        engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
        engine.dispose()
        return sqlalchemy.make_url(url).set(username=role).render_as_string(hide_password=False)

    def start(self) -> None:
        """Starts it, on the port it had before."""
        for _ in range(5):
            self.port = self.port or _free_port()
            if self._started():
                return
            self.port = 0  # another process was faster
        raise RuntimeError((self.folder / "log").read_text(errors="replace"))

    def kill(self) -> None:
        """As when the machine loses power."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        self._end(signal.SIGINT)

    def _initialise(self) -> None:
        secret = self.folder / "password"
        secret.write_text(self._password)
        if self._as:
            os.chown(secret, self._as["user"], self._as["group"])
        subprocess.run(
            [
                self._bin / "initdb",
                "-D",
                self.folder / "data",
                "-U",
                "postgres",
                "-A",
                "md5",  # a connection takes a third less than by SCRAM
                "--pwfile",
                secret,
                "-E",
                "UTF8",
                "--locale=C.UTF-8",
                "--no-sync",
            ],
            check=True,
            capture_output=True,
            cwd=self.folder,
            env=_ENVIRONMENT,
            **self._as,
        )

    def _started(self) -> bool:
        settings = (*ALWAYS, f"port={self.port}", *self._settings)
        arguments = [word for setting in settings for word in ("-c", setting)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self.folder / "data", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=_ENVIRONMENT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                **self._as,
            )
        state, end = self.folder / "data" / "postmaster.pid", time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < end:
            if state.exists() and state.read_text().rstrip().endswith("ready"):
                return True
            time.sleep(0.02)
        self.kill()
        return False

    def _end(self, how: signal.Signals) -> None:
        if self._administrator is not None:
            self._administrator.close()
            self._administrator = None
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)
            process.wait(20)

    def _strategy(self) -> str:
        """How a database is copied: by files, in two thirds of the time that its pages take in the log."""
        return " STRATEGY FILE_COPY" if self._connected().info.server_version >= 150_000 else ""

    def _administer(self, statement: str) -> None:
        self._connected().execute(statement)

    def _connected(self) -> psycopg.Connection[Any]:
        """The administrator's connection: a new one takes as long as a quarter of what it is asked."""
        try:
            if self._administrator is not None:
                self._administrator.execute("SELECT 1")
        except psycopg.OperationalError:  # the server was restarted
            self._administrator = None
        if self._administrator is None:
            url = self.url().replace("+psycopg", "")
            self._administrator = psycopg.connect(url, autocommit=True)
        return self._administrator


@contextmanager
def serving(*settings: str, durable: bool = False) -> Iterator[Server]:
    """A server with ``name=value`` settings. Needs `programs`."""
    bin_folder = programs()
    assert bin_folder is not None
    place = RAM_DISK if not durable and os.access(RAM_DISK, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pg-", dir=place, ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder), bin_folder, (*(() if durable else QUICK), *settings))
        try:
            yield server
        finally:
            server.stop()


_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def _unprivileged(folder: Path) -> dict[str, Any]:
    """How `subprocess` runs something as the user that owns `folder` from now on."""
    if os.geteuid() != 0:
        return {}
    user = database_server.account()
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
