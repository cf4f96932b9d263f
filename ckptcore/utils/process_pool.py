"""Run jobs in several processes, each with an interpreter, and so with a Python lock, of its own.

A fresh interpreter, the fork server, imports what the work needs and nothing else, and forks the workers: so
imports are paid for once, and a process with threads is never forked. A worker has a socket to the process
that has the jobs. It takes one job after the other, and reports finished bytes and log records on the way.
`ProcessPool` is the side of the process that has the jobs, `serve` that of the fork server and its workers.

- The first error of a worker ends the others, and is raised. One that was killed is `WorkerLost`.
- The fork server ends with the process that started it, and a worker with the fork server: also when that is
  killed, and also while it is stopped.
- Ctrl-C reaches the first process alone, which asks the workers to end: they discard what they have begun.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ckptcore.errors import CkptError, Interrupted, WorkerLost

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


_SETUP, _JOB, _END, _PROGRESS, _LOG, _ANSWER, _ERROR = range(7)  # kinds of messages
_TURNS = 8  # jobs for each process: the last ones end at about the same time
_PDEATHSIG = 1  # PR_SET_PDEATHSIG, prctl(2)
_ENDS_WITHIN = 5.0  # seconds for a worker to discard what it has begun
_POLL_S, _REPORT_S = 0.2, 0.05
_LOST = os.EX_SOFTWARE
_READY, _MOST_FDS = b"+", 16

_Item = TypeVar("_Item")
Begun = tuple[Callable[[Any], Any], Callable[[], Any]]
"""What a worker does with a job, and what it reports at its end."""


def batches(items: Sequence[_Item], sizes: Sequence[int], count: int) -> Iterator[tuple[_Item, ...]]:
    """Yield jobs for some processes: a large item, or several small ones, that follow each other.

    >>> list(batches("abcdef", [9, 1, 1, 1, 1, 9], 1))
    [('a',), ('b', 'c'), ('d', 'e'), ('f',)]
    """
    goal, batch, nbytes = sum(sizes) // (_TURNS * count), list[_Item](), 0
    for item, size in zip(items, sizes, strict=True):
        if batch and nbytes + size > goal:
            yield tuple(batch)
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield tuple(batch)


class _ForkServer:
    """The process that forks the workers, as its parent sees it. All of them are one process group."""

    def __init__(self, module: str, imports: Sequence[str], sockets: Sequence[socket.socket]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        report_fd, theirs = os.pipe()
        self._reports = os.fdopen(report_fd)
        fds = [theirs, *(each.fileno() for each in sockets)]
        names = ",".join((module, *imports))
        try:
            # A process group of its own: Ctrl-C is for the parent. Numpy starts a thread for each core
            # otherwise.
            self._process = subprocess.Popen(
                [*_program("serve"), module, str(os.getpid()), names, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=fds,
                process_group=0,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
        finally:
            os.close(theirs)

    def lost(self) -> WorkerLost:
        """Return the error of a worker that has ended, or of the fork server itself."""
        from multiprocessing.connection import wait

        # A killed worker has a line here, a killed fork server none.
        line = self._reports.readline().strip() if wait([self._reports.fileno()], _ENDS_WITHIN) else ""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDS_WITHIN)
            line = _end_of(self._process.pid, self._process.returncode)
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        return WorkerLost(
            f"{line}{f': {last[0][:500]}' if last else ''}",
            hint="check the memory of this machine, then run the command again: finished files are kept",
        )

    def stop(self) -> None:
        """Ask all to discard what they have begun, and to end; force those that take too long."""
        # A stopped process takes no SIGTERM before it continues.
        self._signal(signal.SIGTERM, signal.SIGCONT)
        try:
            self._process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._reports.close()
        self._stderr.close()

    def _signal(self, *signals: signal.Signals) -> None:
        # Before its end was seen, no other group has its number.
        if self._process.poll() is None:
            for each in signals:
                os.killpg(self._process.pid, each)


class _Worker:
    """One process, as the process that has the jobs sees it."""

    def __init__(self, server: _ForkServer, own: socket.socket) -> None:
        # The connection is there once the worker has said that it ends with the fork server.
        self.connection: Connection[Any, Any] | None = None
        self.socket, self._server = own, server

    @property
    def waits_on(self) -> Any:
        """What becomes readable when the process says something."""
        return self.connection or self.socket

    def begin(self, setup: object, fds: Sequence[int]) -> None:
        """Hand over descriptors and what the work begins with, to a process that is ready.

        Not before: one that is stopped until then does not end with its parent, and must keep no lock.

        Raises:
            WorkerLost: The process has ended.
        """
        from multiprocessing.connection import Connection

        try:
            if not self.socket.recv(1):
                raise self._server.lost()
            socket.send_fds(self.socket, [_READY], fds)
        except OSError as error:
            raise self._server.lost() from error
        self.connection = Connection(self.socket.detach())
        self.send(_SETUP, setup)

    def send(self, kind: int, value: object) -> None:
        """Send a message. Whether the process has ended, and why, says the next `receive`."""
        assert self.connection is not None  # it has begun
        # An ended process may have sent its error before, which says more than that it has ended.
        with suppress(OSError):
            self.connection.send((kind, value))

    def receive(self) -> tuple[int, Any]:
        """Wait for a message; raise `WorkerLost` if the process has ended."""
        assert self.connection is not None  # it has begun
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._server.lost() from error
        return kind, value

    def close(self) -> None:
        """Close the connection of a process that ends now."""
        if self.connection is None:
            self.socket.close()  # a process that has not begun ends because of this
            return
        # The kernel ends the worker of a killed fork server, a moment later; the socket says when it did.
        with suppress(EOFError, OSError):
            while self.connection.poll(_ENDS_WITHIN):
                self.connection.recv_bytes()
        self.connection.close()


class ProcessPool:
    """Some workers; they end with the block, and before the thread that started them.

    Args:
        module: Dotted name of the module of their work: its ``begin`` gets what a worker begins with, and a
            function that reports finished bytes; it returns what does one job, and what reports at the end.
        setups: What each of them begins with.
        fds: Descriptors that they keep open, such as that of a lock.
        imports: Modules that its work imports later: they are imported once, for all of them.
    """

    def __init__(
        self, module: str, setups: Sequence[object], *, fds: Sequence[int] = (), imports: Sequence[str] = ()
    ) -> None:
        self._module, self._setups, self._fds, self._imports = module, setups, fds, imports
        self._workers: list[_Worker] = []

    def __enter__(self) -> ProcessPool:
        pairs = [socket.socketpair() for _ in self._setups]
        try:
            self._server = _ForkServer(self._module, self._imports, [theirs for _, theirs in pairs])
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._workers = [_Worker(self._server, own) for own, _ in pairs]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            if worker.connection is None:
                worker.close()
        self._server.stop()
        for worker in self._workers:
            worker.close()

    def run(self, jobs: Iterable[Any], progress: Callable[[int], None]) -> Iterator[Any]:
        """Yield what the workers answer to each job, in any order.

        Args:
            jobs: The jobs; each goes to the next worker that has nothing to do.
            progress: Called with bytes that were finished.

        Raises:
            CkptError: The first error of a worker.
        """
        left, setups = iter(jobs), iter(self._setups)
        idle: list[_Worker] = []
        busy = list(self._workers)
        while True:
            while idle and (job := next(left, None)) is not None:
                idle[0].send(_JOB, job)
                busy.append(idle.pop(0))
            if not busy:
                return
            for worker in _ready(busy):
                if worker.connection is None:
                    worker.begin(next(setups), self._fds)
                elif (answer := _answer(worker, progress)) is not None:
                    yield answer.value
                else:
                    continue
                busy.remove(worker)
                idle.append(worker)

    def finish(self) -> list[Any]:
        """End the workers after a `run`; return what each reports at its end."""
        busy, reports = list(self._workers), list[Any]()
        for worker in busy:
            worker.send(_END, None)
        while busy:
            for worker in _ready(busy):
                answer = _answer(worker, lambda nbytes: None)
                if answer is not None:
                    reports.append(answer.value)
                    busy.remove(worker)
        return reports


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a worker returned."""

    value: Any


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    """Return the workers that have something to say, after a moment of waiting."""
    from multiprocessing.connection import wait

    waiting = {worker.waits_on: worker for worker in workers}
    # With a time-out, so that Ctrl-C is seen.
    return [waiting[connection] for connection in wait(list(waiting), _POLL_S)]


def _answer(worker: _Worker, progress: Callable[[int], None]) -> _Answer | None:
    """Return what a worker answers; pass on what else it says, and raise its error."""
    kind, value = worker.receive()
    if kind == _ANSWER:
        return _Answer(value)
    if kind == _ERROR:
        raise value
    if kind == _PROGRESS:
        progress(value)
    else:
        logging.getLogger(value.name).handle(value)
    return None


def serve(module: str, parent: str, imports: str, report_fd: str, *fds: str) -> NoReturn:
    """Import what some work needs, start its workers, and report lost ones: in a process of its own."""
    _end_with(int(parent))
    for name in imports.split(","):
        with suppress(Exception):  # the worker that needs the module imports it, too, and reports the error
            import_module(name)
    # Blocked for good here, and in a worker until it can discard what it has begun.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    server, left = os.getpid(), [int(report_fd), *map(int, fds)]
    while len(left) > 1:
        fd = left.pop()
        if _thread_count() > 1:
            # A module has started a thread, which may have a lock that nothing would release in a fork.
            argv = [*_program("work"), module, str(server), str(fd)]
            closed = [(os.POSIX_SPAWN_CLOSE, other) for other in left]
            os.posix_spawn(argv[0], argv, os.environ, file_actions=closed)
        elif not os.fork():
            for other in left:
                os.close(other)
            work(module, server, fd)
        os.close(fd)
    with suppress(ChildProcessError):  # all have ended
        while True:
            pid, status = os.wait()
            if code := os.waitstatus_to_exitcode(status):
                os.write(left[0], f"{_end_of(pid, code)}\n".encode())
    os._exit(0)


def work(module: str, server: str | int, fd: str | int) -> NoReturn:
    """Do the jobs that come by a socket until its other side asks for the end: in a process of its own."""
    from multiprocessing.connection import Connection

    _end_with(int(server))
    # SIGTERM ends work as Ctrl-C does elsewhere: what was begun is discarded.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with socket.socket(fileno=int(fd)) as waiting:
        waiting.send(_READY)
        if not socket.recv_fds(waiting, 1, _MOST_FDS)[0]:  # the descriptors stay open until the end
            os._exit(_LOST)
        parent_side: Connection[Any, Any] = Connection(waiting.detach())
    talk = _Talk(parent_side)
    messages: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    # Only the main thread takes SIGTERM: it may be waiting, and no other thread would wake it.
    threading.Thread(target=_listen, args=(parent_side, messages), daemon=True).start()
    code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        begun: Begun = import_module(module).begin(messages.get()[1], talk.finished)
        do, end = begun
        while (message := messages.get())[0] == _JOB:
            talk.send(_ANSWER, do(message[1]))
        talk.send(_ANSWER, end())
    except KeyboardInterrupt:
        code = Interrupted.exit_code
    except Exception as error:
        with suppress(OSError):  # the parent has ended
            talk.send(_ERROR, error if isinstance(error, CkptError) else _described(error))
        code = 1
    os._exit(code)


class _Talk:
    """What a worker sends: progress now and then, log records, answers. Safe for threads."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._bytes, self._sent = 0, 0.0
        logger = logging.getLogger("ckptcore")
        logger.setLevel(logging.INFO)
        logger.addHandler(_Forward(self))
        logger.propagate = False

    def send(self, kind: int, value: object) -> None:
        """Send a message, after the bytes that were finished before it."""
        with self._lock:
            # The parent must not see an answer before the bytes that belong to it.
            self._report()
            self._connection.send((kind, value))

    def finished(self, nbytes: int) -> None:
        """Count finished bytes."""
        with self._lock:
            self._bytes += nbytes
            if time.monotonic() >= self._sent + _REPORT_S:
                self._report()

    def _report(self) -> None:
        if self._bytes:
            nbytes, self._bytes, self._sent = self._bytes, 0, time.monotonic()
            self._connection.send((_PROGRESS, nbytes))


class _Forward(logging.Handler):
    """Sends log records to the parent, whose handlers know where they go."""

    def __init__(self, talk: _Talk) -> None:
        super().__init__()
        self._talk = talk

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self._talk.send(_LOG, record)


def _listen(connection: Connection[Any, Any], messages: queue.SimpleQueue[tuple[int, Any]]) -> None:
    """Pass on what the parent sends; its end is the end of this process."""
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        os._exit(_LOST)


def _program(function: str) -> list[str]:
    """Return the command line of a process that calls a function of this module with its arguments."""
    called = f"import sys; from ckptcore.utils.process_pool import {function} as call; call(*sys.argv[1:])"
    return [sys.executable, "-P", "-c", called]  # -P: nothing is imported from the current folder


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends: also while this one is stopped."""
    gc.set_threshold(1_000_000, 10, 10)  # see `command_process`
    with suppress(AttributeError, OSError):  # not Linux: then the socket's end is seen
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have ended before the call, which does not report that.
    if os.getppid() != parent:
        os._exit(_LOST)


def _thread_count() -> int:
    """Count the threads of this process, also those that Python did not start."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # not Linux
        return threading.active_count()


def _end_of(pid: int, code: int | None) -> str:
    """Describe how a process has ended."""
    fate = f"was ended by signal {-code}" if code is not None and code < 0 else "ended"
    return f"process {pid} of this command {fate}"


def _described(error: Exception) -> Exception:
    """Return an unforeseen error as one that crosses processes, with its place in the code."""
    import traceback

    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({place[0].filename}:{place[0].lineno})" if place else ""
    return RuntimeError(f"{type(error).__name__}: {error}{where}")
