"""Start Python as forks of one process that has imported what tests and their jobs import.

Each worker of pytest-xdist would import torch, transformers, Prefect and all test modules by itself, and each
job torch once more. Workers still collect by themselves, and a job still is a process of its own: what is
shared is imported modules. A second server has what the command line imports, for `driver`.

This file is a program, too: ``server`` imports and forks; ``client`` represents one of its forks.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a client lives for milliseconds
    import subprocess
    from collections.abc import Callable

    import pytest

# The servers' sockets, for everything that the tests start.
TESTS, COMMANDS = "CKPTCORE_TEST_FORKS", "CKPTCORE_TEST_COMMANDS"
SERVER, CLIENT = "server", "client"
# What ranks of jobs import when they first make an optimizer or a DTensor.
OF_JOBS = (
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
)


def python(server: str = TESTS) -> list[str]:
    """How a command line begins that runs a script, module or code as a fork, where there is a server.

    Not for a program that handles signals, or reads its environment while it imports Prefect.
    """
    address = os.environ.get(server)
    return [sys.executable, "-S", "-E", __file__, CLIENT, address] if address else [sys.executable]


def programs(folder: Path) -> Path:
    """Make a folder for `PATH` whose `ckptcore`, `python` and `torchrun` are forks, where there is a server.

    Args:
        folder: Where the folder is made.
    """
    starts = {
        "ckptcore": command(),
        "python": python(),
        "torchrun": [*python(), "-m", "torch.distributed.run"],
    }
    made = folder / "programs"
    made.mkdir()
    for name, start in starts.items():
        (made / name).write_text(f'#!/bin/sh\nexec {shlex.join(start)} "$@"\n')
        (made / name).chmod(0o755)
    return made


def command() -> list[str]:
    """How a command line of `ckptcore` begins, in a test that is about its answer and not about its start."""
    return [*python(COMMANDS), "-m", "ckptcore"]


def prepare(config: pytest.Config, specs: list[Any]) -> None:
    """Let all local workers of `specs` be forks of a server, which ends with `config`."""
    import tempfile

    import driver

    local = [spec for spec in specs if spec.popen and not spec.python]
    if not local:
        return
    folder = tempfile.TemporaryDirectory(prefix="ckptcore-forks-")
    own = {name: f"{folder.name}/{name}" for name in (TESTS, COMMANDS)}
    if "PREFECT_HOME" not in os.environ:  # Prefect asks for it when it is imported
        own["PREFECT_HOME"] = f"{folder.name}/prefect"
    os.environ.update(own)
    # Without capture: a handler that an import makes keeps the standard error that it finds.
    options = [f"--rootdir={config.rootpath}", "--collect-only", "-qq", "-s", "-n0", "-p", "no:cacheprovider"]
    servers = [
        started(own[TESTS], dict(os.environ), *options, *config.args),
        started(own[COMMANDS], os.environ | driver.ENVIRONMENT),
    ]

    def end() -> None:
        for name in own:
            del os.environ[name]
        for server in servers:
            assert server.stdin is not None
            server.stdin.close()
            server.wait()
        folder.cleanup()

    config.add_cleanup(end)
    for spec in local:
        spec.python = shlex.join(python())


def started(address: str, environment: dict[str, str], *collected: str) -> subprocess.Popen[bytes]:
    """A server at an address, that ends when its standard input does.

    Args:
        address: A place for its socket.
        environment: Its environment.
        *collected: Arguments of the pytest that imports tests; none for what the command line imports.
    """
    import subprocess

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        return subprocess.Popen(
            [sys.executable, __file__, SERVER, str(listening.fileno()), *collected],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            env=environment,
        )


def stand_for(address: str, arguments: list[str]) -> int:
    """Let the server run Python with these arguments and the streams of this process; return its status."""
    request = json.dumps({"argv": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [f"{len(request):<8}".encode()], [0, 1, 2])
        connection.sendall(request)
        for number in (0, 1):  # whoever reads from the fork, or writes to it, notices its end
            os.close(number)
        answer = connection.recv(8)
    if not answer:
        raise RuntimeError("the server of warm processes has ended")
    return int(answer)


class _NotCollected:
    """A plugin of pytest that notes the files that cannot be collected."""

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def pytest_make_collect_report(self, collector: pytest.Collector) -> None:
        self._path = str(collector.path)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.paths.add(self._path)


def import_tests(arguments: list[str]) -> None:
    """Import what pytest collects, and what its jobs need."""
    import importlib

    import pytest

    # What cannot be collected, each worker finds out and reports. pytest leaves such modules half imported,
    # and a worker would take them for complete: all are removed that collecting has not accepted.
    broken = _NotCollected()
    pytest.main(arguments, plugins=[broken])
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in broken.paths:
            del sys.modules[name]
    for module in OF_JOBS if "torch" in sys.modules else ():
        importlib.import_module(module)


def serve(listening: socket.socket, load: Callable[[], None]) -> None:
    """Import modules, and fork for each connection until standard input ends."""
    import gc

    import torch

    given, threads = dict(os.environ), torch.get_num_threads()
    atexit.register(_leave)  # before those of libraries: what is registered first runs last
    # A fork has none of the threads of OpenMP's team, and waits for them for ever: the server starts no team.
    torch.set_num_threads(1)
    load()
    settled = {name: value for name, value in os.environ.items() if given.get(name) != value}
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    # OpenBLAS, which numpy loads, ends its threads at a fork, and starts them where they are needed.
    if (process := os.fork()) == 0:
        os._exit(0)
    os.waitpid(process, 0)
    started = _threads()
    if started:
        raise RuntimeError(f"a process with threads cannot be forked (importing tests started {started})")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    poll.register(0, select.POLLIN)
    forks: dict[int, tuple[int, int, socket.socket]] = {}  # by both descriptors that show an end
    while True:
        ready, _ = poll.poll()[0]  # one at a time: numbers of descriptors are used again
        if ready == 0:
            for process, _, _ in forks.values():
                os.kill(process, signal.SIGKILL)
            return
        if ready == listening.fileno():
            connection, _ = listening.accept()
            request, streams = _request(connection)
            process = os.fork()
            if process == 0:
                for _, handle, other in set(forks.values()):
                    os.close(handle)
                    other.close()
                listening.close()
                connection.close()
                torch.set_num_threads(int(request["environment"].get("OMP_NUM_THREADS") or threads))
                try:
                    _become(request, settled, streams)
                    _ended.append(0)
                except SystemExit as end:
                    if end.code is None or isinstance(end.code, int):
                        _ended.append(end.code or 0)
                    raise
                return
            for stream in streams:
                os.close(stream)
            fork = process, os.pidfd_open(process), connection
            for descriptor in (fork[1], connection.fileno()):
                forks[descriptor] = fork
                poll.register(descriptor, select.POLLIN)
            continue
        process, handle, connection = forks[ready]
        if ready == connection.fileno():  # the client was killed
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        for descriptor in (handle, connection.fileno()):
            poll.unregister(descriptor)
            del forks[descriptor]
        os.close(handle)
        if ready == handle:
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        connection.close()


_ended: list[int] = []  # the exit status of a fork that has ended in order


def _leave() -> None:
    """End a fork without taking its modules apart: a million objects, each on a page that it would copy.

    That is half a second of processor time. Threads and other exit functions have ended by now. Whoever
    measures coverage has registered an earlier exit function.
    """
    if not _ended or "coverage" in sys.modules:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # Python's own end says what that is
        return
    os._exit(_ended[0] & 0xFF)


def _threads() -> list[str]:
    """Return the other threads of this process, those of libraries, too."""
    import threading

    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    native = len(os.listdir("/proc/self/task")) - 1 - len(names) if sys.platform == "linux" else 0
    return names + [f"{native} of libraries"] * bool(native)


def _request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as reading:
        return json.loads(reading.read(int(size))), list(streams)


def _become(request: dict[str, Any], settled: dict[str, str], streams: list[int]) -> None:
    """Run what `python` was asked for, in this process.

    Args:
        request: Command line, folder and environment of the client.
        settled: The environment that imports have settled, as that of `flows` does.
        streams: The client's standard streams.
    """
    import runpy

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(settled | request["environment"])
    options, path = request["argv"], os.environ.get("PYTHONPATH", "")
    sys.path[1:1] = [folder for folder in path.split(os.pathsep) if folder]
    safe = False
    while options[0] in ("-u", "-P"):
        safe |= options.pop(0) == "-P"
    kind, rest = options[0], options[1:]
    sys.path[0] = {"-": "", "-c": "", "-m": os.getcwd()}.get(kind, str(Path(kind).resolve().parent))
    if safe:
        del sys.path[0]
    if kind in ("-", "-c"):
        code, sys.argv = sys.stdin.read() if kind == "-" else rest.pop(0), [kind, *rest]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        # runpy warns of what is imported already
        package = hasattr(sys.modules.get(rest[0]), "__path__")
        sys.modules.pop(f"{rest[0]}.__main__" if package else rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind.startswith("-"):
        raise ValueError(f"a fork takes no option {kind!r}")
    else:
        sys.argv = options
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    if sys.argv[1] == CLIENT:
        status = stand_for(sys.argv[2], sys.argv[3:])
        if status < 0:
            os.kill(os.getpid(), -status)
        sys.exit(status)
    listening, collected = socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]
    if collected:
        # What a program finds without `pytest`, it finds at the root, and not beside this file.
        sys.path[0] = str(Path(__file__).resolve().parents[2])
        serve(listening, lambda: import_tests(collected))
    else:
        import driver

        serve(listening, driver.load)


if __name__ == "__main__":
    main()
