"""Run the command line, and record what one call prints, returns, uses and leaves behind.

A server process imports the product and torch once; every call is a fork of it, so that a
thousand calls cost a thousand forks and not a thousand imports of torch. Each call has its own
session, its own limits on memory, time and file size, and may run as another user.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import confined
import warm

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE = REPOSITORY / "tests/fixtures/torch/dcp_nested_2r/ckpt"
# A fork copies the tables of all pages, and its end takes them apart: with pages of 2 MiB that takes 2 ms and
# not 8, and 10 ms less in the child. Only memory of `malloc` can have them.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}
THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
ENVIRONMENT = {"NO_COLOR": "1", "COLUMNS": "200", **THREADS, **LARGE_PAGES}
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished call.

    code: exit code; negative: the signal that ended it. seconds: wall time.
    peak: highest resident set of the process, bytes. killed: ended by the driver.
    """

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float
    peak: int
    killed: bool

    @property
    def json(self) -> Any:
        """What was printed under ``--output json``; fails the test when that is not JSON."""
        try:
            return json.loads(self.stdout)
        except ValueError as error:
            raise AssertionError(f"stdout is not JSON ({error})\n{self}") from error

    def __str__(self) -> str:
        return (
            f"$ ckptcore {' '.join(self.argv)}\nexit {self.code} after {self.seconds:.2f} s\n"
            f"stdout: {self.stdout[-3000:]}\nstderr: {self.stderr[-3000:]}"
        )


class Cli:
    """A running server; use as a context manager. Calls are one at a time."""

    def __init__(self, *, environment: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ckptcore-cli-")
        os.chmod(self._folder.name, 0o755)  # a call may run as another user
        catalog = f"sqlite:///{self._folder.name}/catalog.db"
        self._env = os.environ | ENVIRONMENT | {"CKPTCORE_CATALOG_URL": catalog} | (environment or {})
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*warm.python(warm.COMMANDS), str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._env,
            cwd=REPOSITORY,
        )

    def __enter__(self) -> Cli:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end(10)
        self._folder.cleanup()

    def _end(self, seconds: float) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __call__(
        self,
        *argv: object,
        catalog: bool = False,
        seconds: float = 60.0,
        kill_after: float | None = None,
        memory: int = 6 * GIB,
        user: int | None = None,
        file_size: int | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        within: Path | None = None,
    ) -> Outcome:
        """Runs ``ckptcore argv``.

        catalog: let it register itself. seconds: the call is killed, and the test fails, after.
        kill_after: kill it with SIGKILL then, if it still runs. memory: RLIMIT_AS, bytes.
        user: run as this uid. file_size: RLIMIT_FSIZE, bytes. env: more environment. cwd: where it runs.
        within: `confined.confine` it to this folder.
        """
        arguments = [str(a) for a in argv]
        if not catalog and arguments and arguments[0] in REGISTERING:
            arguments.append("--no-catalog")
        request = {
            "argv": arguments,
            "seconds": seconds,
            "kill_after": kill_after,
            "memory": memory,
            "user": user,
            "file_size": file_size,
            "folder": self._folder.name,
            "env": env or {},
            "cwd": None if cwd is None else str(cwd),
            "within": None if within is None else str(within),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        try:
            line = self._process.stdout.readline()
        except BaseException:  # a time limit: the answer to this call must not be taken for the next one's
            self._end(0)
            self._process = self._start()
            raise
        if not line:
            raise RuntimeError(f"the driver's server ended while it ran {arguments}")
        reply = json.loads(line)
        out, err = (Path(self._folder.name, n).read_bytes() for n in ("stdout", "stderr"))
        done = Outcome(
            tuple(arguments),
            reply["code"],
            out.decode(errors="replace"),
            err.decode(errors="replace"),
            reply["seconds"],
            reply["peak"],
            reply["killed"],
        )
        if done.killed and kill_after is None:
            raise AssertionError(f"not finished within {seconds} s\n{done}")
        return done


REGISTERING = frozenset({"consolidate", "export", "reshard", "apply", "validate"})


def run_process(*argv: object, seconds: float = 120.0, **env: str) -> Outcome:
    """The same call as a process of its own, as a user starts it."""
    arguments = [str(a) for a in argv]
    if arguments[0] in REGISTERING:
        arguments.append("--no-catalog")
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ckptcore", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=REPOSITORY,
        env=dict(os.environ) | env,
    )
    spent = time.monotonic() - start
    return Outcome(tuple(arguments), done.returncode, done.stdout, done.stderr, spent, 0, False)


def load() -> None:
    """Import what the command line imports, and what it loads when it first runs."""
    import importlib

    sys.path.insert(0, str(REPOSITORY))
    # numpy imports its masked arrays at the first `unique`: 30 ms of each call that reads tensors.
    for name in ("numpy.ma", "torch", "zstandard", "fsspec", "ckptcore.__main__", *_own_modules()):
        importlib.import_module(name)
    importlib.import_module("quick_disks").install()
    # Importing transformers takes seconds. Tests of `transformers_process` start it as users do.
    asking = importlib.import_module("ckptcore.planning.transformers_process")
    asking.COMMAND = (*warm.python(), *asking.COMMAND[1:])
    _build_commands()
    _warm_up(importlib.import_module("ckptcore.__main__").main)


def _build_commands() -> None:
    """Build every command once, with what checks its values: a third of a short call."""
    import importlib

    import typer

    def check_values(command: Any) -> None:
        for parameter in command.params:
            parameter.get_runtime_param()
        for below in getattr(command, "commands", {}).values():
            check_values(below)

    program = importlib.import_module("ckptcore.cli.main")
    build = program.program
    built = {name: typer.main.get_command(build(name)) for name in program.COMMANDS}
    for command in built.values():
        check_values(command)
    program.program = lambda *names: built.get(names[0] if names else "") or build(*names)


def _warm_up(main: Any) -> None:
    """Run some commands for nothing: the first run of any loads more modules, and compiles the SQL of a
    conversion, which takes as long as the rest of it, and the patterns that pickles are read by."""
    import numpy as np
    import pytest
    import quick_catalogs
    from safetensors.numpy import save_file

    from ckptcore.catalog.heartbeats import RUNNING

    quick_catalogs.share_statements(pytest.MonkeyPatch())
    nowhere = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as name,
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        patch.setattr(RUNNING, "add", lambda *_: None)  # what has its thread cannot be forked
        source, catalog = f"{name}/source.safetensors", f"sqlite:///{name}/catalog.db"
        save_file({"weight": np.zeros(1)}, source)
        conversion = ["consolidate", source, f"{name}/out.safetensors", "--catalog", catalog]
        check = ["validate", str(SAMPLE), "--level", "bytes", "--no-catalog"]
        for arguments in (["formats"], conversion, check):
            sys.argv = ["ckptcore", *arguments]
            if _exit_code(main) != 0:
                raise RuntimeError(f"the warm-up failed: {nowhere.getvalue()}")


def _serve() -> None:
    """The server: one JSON request a line on stdin, one JSON reply a line on stdout."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in LARGE_PAGES:  # not for what the calls start
        os.environ.pop(name, None)
    if "driver" not in sys.modules:  # else this is a fork of a server that has called it
        load()
    gc.collect()
    gc.freeze()  # forks share these objects: a collection in a child would copy them all
    for line in sys.stdin:
        replies.write(json.dumps(_call(json.loads(line))) + "\n")
        replies.flush()


def _own_modules() -> list[str]:
    """Every module of the library below its top: imported once here instead of once a call."""
    root = REPOSITORY / "ckptcore"
    found = [p.relative_to(REPOSITORY).with_suffix("") for p in sorted(root.rglob("*.py"))]
    names = [".".join(p.parts).removesuffix(".__init__") for p in found]
    return [n for n in names if not n.endswith("__main__")]


def _call(request: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_child(request)
    limit = request["kill_after"] if request["kill_after"] is not None else request["seconds"]
    killed = not _ends_within(child, limit)
    if killed:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    spent = time.monotonic() - started
    with suppress(ProcessLookupError):  # what the call left running in its session
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "seconds": spent, "peak": usage.ru_maxrss * 1024, "killed": killed}


def _ends_within(child: int, seconds: float) -> bool:
    """Whether a child ends in time."""
    descriptor = os.pidfd_open(child)
    try:
        ended = select.poll()  # `select.select` refuses descriptors above 1023
        ended.register(descriptor, select.POLLIN)
        return bool(ended.poll(1000 * seconds))
    finally:
        os.close(descriptor)


def _run_child(request: dict[str, Any]) -> None:
    """Never returns."""
    code = 99
    try:
        os.setsid()
        for number, name in ((1, "stdout"), (2, "stderr")):
            to = os.open(Path(request["folder"], name), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            os.dup2(to, number)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"],) * 2)
        if request["file_size"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"],) * 2)
        os.environ.update(request["env"])
        if request["user"] is not None:
            os.setgroups([])
            os.setgid(request["user"])
            os.setuid(request["user"])
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        sys.argv = ["ckptcore", *request["argv"]]
        if request["cwd"] is not None:
            os.chdir(request["cwd"])
        if request["within"] is not None:
            confined.confine(request["within"])
        import torch

        from ckptcore.__main__ import main

        # torch renews its pool of threads at the first use after a fork, which no two threads may be at once.
        torch.set_num_threads(torch.get_num_threads())
        code = _exit_code(main)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # the fork must end here, whatever happened
        import traceback

        traceback.print_exc()
        with suppress(OSError, ValueError):
            sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_code(main: Any) -> int:
    try:
        result = main()
    except SystemExit as stop:
        result = stop.code
    if result is None:
        return 0
    if isinstance(result, int):
        return result
    print(result, file=sys.stderr)
    return 1


if __name__ == "__main__":
    _serve()
