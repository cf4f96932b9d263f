"""Run jobs in several processes, each with an interpreter, and so with a Python lock, of its own.

A worker is a fresh interpreter with a socket to the process that started it: no fork, and nothing imported
but what the module of its work needs. It takes one job after the other, and reports finished bytes and log
records on the way. `ProcessPool` is the side of the process that has the jobs, `serve` that of a worker.

- The first error of a worker ends the others, and is raised. One that was killed is `WorkerLost`.
- A worker ends with its parent, also when that is killed, and also while it is stopped.
- Ctrl-C reaches the parent alone, which asks its workers to end: they discard what they have begun.
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
_WORKER = "from ckptcore.utils.process_pool import serve; serve()"

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


class _Worker:
    """One process, as its parent sees it."""

    def __init__(self, module: str) -> None:
        self.connection: Connection[Any, Any] | None = None  # once it has said that it ends with this process
        self.socket, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        with theirs:
            # -P: nothing is imported from the current folder. A process group of its own: Ctrl-C is for the
            # parent. Numpy starts a thread for each core otherwise.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER, module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )

    @property
    def waits_on(self) -> Any:
        """What becomes readable when the process says something."""
        return self.connection or self.socket

    def begin(self, setup: object, fds: Sequence[int]) -> None:
        """Hand over descriptors and what the work begins with, to a process that is ready.

        Not before: one that is stopped until then does not end with this process, and must keep no lock.

        Raises:
            WorkerLost: The process has ended.
        """
        from multiprocessing.connection import Connection

        try:
            if not self.socket.recv(1):
                raise self._lost()
            socket.send_fds(self.socket, [_READY], fds)
        except OSError as error:
            raise self._lost() from error
        self.connection = Connection(self.socket.detach())
        self.send(_SETUP, setup)

    def send(self, kind: int, value: object) -> None:
        """Send a message; raise `WorkerLost` if the process has ended."""
        assert self.connection is not None  # it has begun
        try:
            self.connection.send((kind, value))
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> tuple[int, Any]:
        """Wait for a message; raise `WorkerLost` if the process has ended."""
        assert self.connection is not None  # it has begun
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        return kind, value

    def _lost(self) -> WorkerLost:
        try:
            status: int | None = self.process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            status = None
        fate = "ended" if status is None or status >= 0 else f"was ended by signal {-status}"
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        return WorkerLost(
            f"process {self.process.pid} of this command {fate}{f': {last[0][:500]}' if last else ''}",
            hint="check the memory of this machine, then run the command again: finished files are kept",
        )

    def stop(self) -> None:
        """Ask the process to discard what it has begun, and to end; also one that is stopped."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
            # A stopped process takes no SIGTERM before it continues.
            self.process.send_signal(signal.SIGCONT)

    def close(self, seconds: float) -> None:
        """Wait for the end of the process, and force it then."""
        try:
            self.process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        (self.connection or self.socket).close()
        self._stderr.close()


class ProcessPool:
    """Some workers; they end with the block, and before the thread that started them.

    Args:
        module: Dotted name of the module of their work: its ``begin`` gets what a worker begins with, and a
            function that reports finished bytes; it returns what does one job, and what reports at the end.
        setups: What each of them begins with.
        fds: Descriptors that they keep open, such as that of a lock.
    """

    def __init__(self, module: str, setups: Sequence[object], *, fds: Sequence[int] = ()) -> None:
        self._module, self._setups, self._fds = module, setups, fds
        self._workers: list[_Worker] = []

    def __enter__(self) -> ProcessPool:
        try:
            for _ in self._setups:
                self._workers.append(_Worker(self._module))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

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

    def _stop(self) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.stop()
        # One deadline for all of them: they end at the same time.
        until = time.monotonic() + _ENDS_WITHIN
        for worker in self._workers:
            worker.close(until - time.monotonic())
        self._workers = []


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


def serve() -> NoReturn:
    """Do the jobs of a parent until it asks for the end, in this process of their own."""
    from multiprocessing.connection import Connection

    module, fd, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _end_with(parent)
    gc.set_threshold(1_000_000, 10, 10)  # see `command_process`
    # SIGTERM ends work as Ctrl-C does elsewhere: what was begun is discarded.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with socket.socket(fileno=fd) as waiting:
        waiting.send(_READY)
        if not socket.recv_fds(waiting, 1, _MOST_FDS)[0]:  # the descriptors stay open until the end
            os._exit(_LOST)
        parent_side: Connection[Any, Any] = Connection(waiting.detach())
    talk = _Talk(parent_side)
    messages: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    # Only the main thread takes SIGTERM: it may be waiting, and no other thread would wake it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_listen, args=(parent_side, messages), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    code = 0
    try:
        work: Begun = import_module(module).begin(messages.get()[1], talk.finished)
        do, end = work
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


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends: also while this one is stopped."""
    with suppress(AttributeError, OSError):  # not Linux: then the socket's end is seen
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have ended before the call, which does not report that.
    if os.getppid() != parent:
        os._exit(_LOST)


def _described(error: Exception) -> Exception:
    """Return an unforeseen error as one that crosses processes, with its place in the code."""
    import traceback

    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({place[0].filename}:{place[0].lineno})" if place else ""
    return RuntimeError(f"{type(error).__name__}: {error}{where}")
