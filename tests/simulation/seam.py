"""What a simulated process calls in place of the clocks, the commits and `ckptcore.utils.host`.

A simulated process is a fork of the simulation. Before each call that others can see it asks the scheduler
over a socket, and waits for its turn; the answer may be an error, or the end of the process. So one process
runs at a time, and whatever the product caches, locks or holds open is its own, as in real life.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import mmap
import os
import random
import socket
import stat
import struct
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

from botocore.exceptions import ClientError, ConnectionClosedError
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect

from ckptcore.catalog.heartbeats import Heartbeats
from ckptcore.operations import claims
from ckptcore.store import file_status
from ckptcore.store.file_status import FileStatus
from ckptcore.store.local_writer import LocalWriter
from ckptcore.store.objects.client import RequestThreads
from ckptcore.store.objects.lease import Lease
from ckptcore.store.objects.session import S3Session
from ckptcore.utils import host, processes

DIED = 9  # exit status of a process that was killed
HOSTS, PROCESSES = 4, 240
# Answers; others are the name of an error.
GO, DIE, HALF, LOST, FAILED, THROTTLED = "go", "die", "half", "lost", "failed", "throttled"
S3 = "s3"  # a request to an object store; its operation and its key follow
EXCHANGE = 2  # a flag of renameat2
_OF_PROCESSES = ("this_process", "forget", "is_this", "has_ended", "is_running")
_TICK_NS = 1000  # between two looks at a clock
_CLOCK = struct.Struct("q")


class Shared:
    """What hosts and processes know of each other: in memory that all of them map.

    A clock is the time since the epoch in ns; that of the world never goes back, and each host has an offset.
    """

    def __init__(self, epoch_ns: int) -> None:
        self._map = mmap.mmap(-1, 8 * (HOSTS + 1) + PROCESSES + HOSTS)
        self.epoch_ns = epoch_ns

    def _get(self, index: int) -> int:
        number: int = _CLOCK.unpack_from(self._map, 8 * index)[0]
        return number

    def _add(self, index: int, ns: int) -> int:
        value = self._get(index) + ns
        _CLOCK.pack_into(self._map, 8 * index, value)
        return value

    def world_ns(self) -> int:
        """Return the time of the world."""
        return self.epoch_ns + self._add(HOSTS, _TICK_NS)

    def passed_ns(self) -> int:
        """Return the time of the world, of which no process takes notice by that."""
        return self.epoch_ns + self._get(HOSTS)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._add(HOSTS, round(seconds * 1e9))

    def jump(self, number: int, seconds: float) -> None:
        """Set the clock of a host."""
        self._add(number, round(seconds * 1e9))

    def now_ns(self, number: int) -> int:
        """Return what a host takes for the time."""
        return self.world_ns() + self._get(number)

    def clocks_s(self) -> list[float]:
        """Return what each host takes for the time, in seconds."""
        return [(self.passed_ns() + self._get(home)) / 1e9 for home in range(HOSTS)]

    def set_alive(self, process: int, alive: bool) -> None:
        """Note that a process has begun, or ended."""
        self._map[8 * (HOSTS + 1) + process] = alive

    def is_alive(self, process: int) -> bool:
        """Return whether a process runs."""
        return bool(self._map[8 * (HOSTS + 1) + process])

    def boot(self, number: int, *, anew: bool = False) -> int:
        """Return how often a host was started."""
        at = 8 * (HOSTS + 1) + PROCESSES + number
        self._map[at] += anew
        return self._map[at]


class Seam:
    """The calls of one simulated process.

    Args:
        shared: The clocks, and who is alive.
        line: The socket to the scheduler.
        number: The number of the process; it is its pid, too.
        home: The number of its host.
        grave: Where files go whose last name is removed, so that a power cut can undo it; "" for nowhere.
        ctimes: Inode -> its time of change now, and the one before a power cut.
        exchanges: Whether the file system exchanges two names in one step.
    """

    def __init__(
        self,
        shared: Shared,
        line: socket.socket,
        number: int,
        home: int,
        grave: str,
        ctimes: Mapping[int, tuple[int, int]],
        exchanges: bool,
    ) -> None:
        self._ctimes, self._exchanges = ctimes, exchanges
        self.shared, self.line, self.number, self.home, self.grave = shared, line, number, home, grave
        self._turn, self._marks, self._open = threading.Lock(), 0, set[int]()
        self._holders = _holders(len(sys.modules))

    def ask(self, call: str, *paths: str) -> str:
        """Wait for this process's turn; end it, or raise the error that befalls the call."""
        with self._turn:
            holds = "+" if self._open else "-"
            try:
                self.line.send("\0".join((call, holds, *paths)).encode("utf-8", "surrogateescape"))
                answer = self.line.recv(64).decode()
            except OSError:
                answer = ""
        if answer in ("", DIE):
            os._exit(DIED)
        if answer not in (GO, HALF, LOST, FAILED, THROTTLED):
            raise OSError(getattr(errno, answer), os.strerror(getattr(errno, answer)))
        return answer

    def tell(self, *terms: str) -> None:
        """Tell the scheduler how this process ended."""
        self.line.send("\0".join(terms).encode("utf-8", "surrogateescape")[:60000])

    def install(self, seed: str) -> None:
        """Put the calls of the simulation in place of the real ones, in this process."""
        draw = random.Random(seed)
        os.urandom = draw.randbytes
        uuid.uuid4 = lambda: uuid.UUID(int=draw.getrandbits(128), version=4)
        os.getpid = lambda: self.number
        socket.gethostname = lambda: f"host-{self.home}"
        for call in ("rename", "replace", "link", "unlink", "mkdir", "rmdir", "fsync", "flock", "renameat2"):
            setattr(host, call, self._file_call(call, getattr(host, call)))
        for call in ("now", "now_ns", "monotonic", "uptime", "sleep"):
            setattr(host, call, getattr(self, f"_{call}"))
        for call in _OF_PROCESSES:
            self._put(call, getattr(self, f"_{call}"))
        real = file_status.of_stat
        self._put("of_stat", lambda *given, **more: self._as_before(real(*given, **more)))
        self._install_writes()
        self._install_commits()
        self._install_requests()

    def _put(self, name: str, simulated: Any) -> None:
        """Put a function in place of another one, wherever it was imported."""
        for module in self._holders[name]:
            setattr(module, name, simulated)

    # Clocks.

    def _now_ns(self) -> int:
        return self.shared.now_ns(self.home)

    def _now(self) -> float:
        return self._now_ns() / 1e9

    def _monotonic(self) -> float:
        return (self.shared.world_ns() - self.shared.epoch_ns) / 1e9

    _uptime = _monotonic

    def _sleep(self, seconds: float) -> None:
        self.ask("sleep", str(seconds))

    # Processes.

    def _this_process(self) -> processes.Identity:
        self._marks += 1
        boot = self.shared.boot(self.home)
        return str(self.number), "1", f"namespace-{self.home}", f"boot-{self.home}-{boot}:{self._marks}"

    def _forget(self, process: processes.Identity) -> None:
        """Marks are not kept."""

    def _is_here(self, process: Sequence[str]) -> bool:
        boot = f"boot-{self.home}-{self.shared.boot(self.home)}"
        return len(process) == 4 and process[3].partition(":")[0] == boot and process[0].isdigit()

    def _is_this(self, process: Sequence[str]) -> bool:
        return self._is_here(process) and process[0] == str(self.number)

    def _is_running(self, process: Sequence[str]) -> bool:
        return self._is_here(process) and self.shared.is_alive(int(process[0]))

    def _has_ended(self, process: Sequence[str]) -> bool:
        return self._is_here(process) and not self.shared.is_alive(int(process[0]))

    # Files.

    def _file_call(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **folders: Any) -> Any:
            old, new = _paths(name, given, folders)
            if name == "renameat2" and given[4] == EXCHANGE and not self._exchanges:
                return errno.EINVAL
            try:
                self.ask(name, old, new)
            except OSError as error:
                if name == "renameat2":  # it returns its error
                    return error.errno
                raise
            if self.grave and name in ("rename", "replace"):
                self._bury(new, name_of=old)
            if self.grave and name in ("unlink", "rmdir") and self._buried(name, old):
                return None
            return real(*given, **folders)

        return call

    def _buried(self, name: str, path: str) -> bool:
        """Move what would be removed out of the way; return False where the real call has to refuse."""
        folder = name == "rmdir"
        seen = os.lstat(path)
        if folder != stat.S_ISDIR(seen.st_mode) or (folder and os.listdir(path)):
            return False
        self._bury(path)
        return True

    def _bury(self, path: str, name_of: str = "") -> None:
        if os.path.lexists(path) and not (name_of and _is_same(path, name_of)):
            if name_of and os.path.isdir(path) and (not os.path.isdir(name_of) or os.listdir(path)):
                return  # the real call refuses
            os.rename(path, os.path.join(self.grave, str(os.lstat(path).st_ino)))

    def _as_before(self, seen: FileStatus) -> FileStatus:
        """Return a status with the time of change that it had before what a power cut has undone."""
        now, before = self._ctimes.get(seen.inode or 0, (None, None))
        return replace(seen, ctime=before) if now is not None and now == seen.ctime else seen

    def _install_writes(self) -> None:
        from ckptcore.store import local_writer

        local_writer._file_system = lambda _: 0  # a disk, which needs fsync
        local_writer._SERIAL = itertools.count()
        real = LocalWriter.write

        def write(writer: LocalWriter, at: int, data: Any) -> None:
            view = memoryview(data).cast("B")
            path = os.readlink(f"/proc/self/fd/{writer._fd}") if writer._fd >= 0 else ""
            try:
                answer = self.ask("write", path, "")
            except OSError as error:
                raise local_writer.unwritable(str(writer._path), error, writer._nbytes) from error
            if answer == HALF:
                real(writer, at, view[: len(view) // 2])
                os._exit(DIED)
            real(writer, at, data)

        LocalWriter.write = write  # type: ignore[method-assign]

    # Commits.

    def _install_commits(self) -> None:
        real_commit, real_rollback = DefaultDialect.do_commit, DefaultDialect.do_rollback

        def begun(connection: Any) -> None:
            self._open.add(id(connection.connection.dbapi_connection))

        def committed(dialect: Any, connection: Any) -> None:
            real_commit(dialect, connection)
            self._open.discard(_id_of(connection))

        def rolled_back(dialect: Any, connection: Any) -> None:
            real_rollback(dialect, connection)
            self._open.discard(_id_of(connection))

        def committing(dialect: Any, connection: Any) -> None:
            sqlite = dialect.name == "sqlite"
            if sqlite and not connection.total_changes:  # a reader's
                committed(dialect, connection)
                return
            durable = not sqlite or connection.execute("PRAGMA synchronous").fetchone()[0] >= 2
            answer = self.ask("commit", "durable" if durable else "", "")
            (rolled_back if answer == FAILED else committed)(dialect, connection)
            if answer == FAILED and not sqlite:
                raise dialect.dbapi.errors.SerializationFailure("could not serialize access")
            if answer in (LOST, FAILED):
                why = "disk I/O error" if sqlite else "server closed the connection unexpectedly"
                raise dialect.dbapi.OperationalError(why)

        event.listen(Engine, "begin", begun)
        DefaultDialect.do_commit = committing  # type: ignore[method-assign]
        DefaultDialect.do_rollback = rolled_back  # type: ignore[method-assign]

    # Requests to an object store.

    def _install_requests(self) -> None:
        """Send each request when the scheduler says so."""
        real = S3Session.ask

        def ask(session: S3Session, method: str, asked: Mapping[str, Any]) -> dict[str, Any]:
            operation = "".join(map(str.capitalize, method.split("_")))
            answer = self.ask(
                S3, operation, f"{asked.get('Bucket', '')}/{asked.get('Key', asked.get('Prefix', ''))}"
            )
            if answer == THROTTLED:
                refused = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}
                raise ClientError(refused, operation)  # type: ignore[arg-type]
            done = real(session, method, asked)
            if answer == LOST:
                raise ConnectionClosedError(endpoint_url="simulated")
            return done

        S3Session.ask = ask  # type: ignore[method-assign]


@contextlib.contextmanager
def on_simulated_time(shared: Shared) -> Iterator[None]:
    """Let this process and its forks live by the clock of the world alone, and its threads in turn.

    What a real clock wakes looks at that of the world, whose time is in names. So rows, claims and leases are
    renewed only by who asks whether they are held: a renewer that never gets a turn is a process that was
    stopped for too long, the hardest case. And no request overtakes another.
    """

    def passed_s() -> float:
        return (shared.world_ns() - shared.epoch_ns) / 1e9

    simulated: list[tuple[Any, str, Callable[..., Any]]] = [
        (host, "now", lambda: shared.world_ns() / 1e9),
        (host, "now_ns", shared.world_ns),
        (host, "monotonic", passed_s),
        (host, "uptime", passed_s),
        (host, "sleep", shared.advance),
        (Heartbeats, "_run", lambda _: None),
        (claims, "_keep", lambda *_: None),
        (Lease, "_renewing", lambda _: None),
        (RequestThreads, "start", lambda _, call: _ended(call)),
        (RequestThreads, "each", lambda _, call, items: [call(item) for item in items]),
    ]
    with contextlib.ExitStack() as replaced:
        for owner, name, call in simulated:
            replaced.enter_context(mock.patch.object(owner, name, call))
        yield


def _ended(call: Callable[[Callable[[], bool]], Any]) -> Future[Any]:
    """Return the future of a call, which is made now."""
    future: Future[Any] = Future()
    try:
        future.set_result(call(lambda: False))
    except Exception as error:  # whoever waits for it raises it
        future.set_exception(error)
    return future


@functools.lru_cache(maxsize=1)
def _holders(_modules: int) -> dict[str, list[ModuleType]]:
    """Return the modules that have imported each function for which the simulation has its own.

    To look for them costs a process more than its work does: a fork has them from its parent, as long as that
    has imported no other module.
    """
    functions = {call: getattr(processes, call) for call in _OF_PROCESSES} | {"of_stat": file_status.of_stat}
    modules = [module for name, module in sys.modules.items() if name.startswith("ckptcore")]
    return {
        name: [module for module in modules if vars(module).get(name) is real]
        for name, real in functions.items()
    }


def _id_of(connection: Any) -> int:
    """Return the id of the driver's connection, which the pool may have wrapped."""
    return id(getattr(connection, "dbapi_connection", connection))


def _is_same(one: str, two: str) -> bool:
    return os.path.lexists(two) and os.path.samestat(os.lstat(one), os.lstat(two))


def _paths(name: str, given: Sequence[Any], folders: dict[str, Any]) -> tuple[str, str]:
    """Return the whole paths that a call names."""
    if name in ("fsync", "flock"):
        return os.readlink(f"/proc/self/fd/{given[0]}"), ""
    if name == "renameat2":
        return _full(given[1], given[0]), _full(given[3], given[2])
    if name in ("unlink", "rmdir", "mkdir"):
        return _full(given[0], folders.get("dir_fd")), ""
    return _full(given[0], folders.get("src_dir_fd")), _full(given[1], folders.get("dst_dir_fd"))


def _full(name: Any, folder: int | None) -> str:
    top = os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}")
    return os.path.join(top, os.fsdecode(name))
