"""Start a Prefect server and a Dask cluster for a benchmark; both end with their block."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import memory

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds until a service must work
GRACE = 20.0  # seconds from SIGTERM to SIGKILL
# Keep torch and numpy from starting a thread for each core.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class NotStarted(Exception):
    """A service did not start in time."""


def own(home: Path, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a flow with its own Prefect home; it starts a server where it needs one."""
    kept = {name: value for name, value in env.items() if not name.startswith("PREFECT_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled modules, like those of installed packages
    quiet = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    return kept | quiet | {"PREFECT_HOME": str(home), "PYTHONPATH": str(ROOT)}


@contextmanager
def prefect_server(home: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Start a server on SQLite; yield its API's URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}/api"
    command = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port]
    with _service([sys.executable, *command], env, home.with_name("server.log")) as process:
        _until(process, lambda: _answers(f"{url}/ready"), "Prefect's server")
        yield url


@contextmanager
def dask_workers(count: int, folder: Path, env: Mapping[str, str]) -> Iterator[tuple[str, list[int]]]:
    """Start a scheduler and ``count`` workers of one thread; yield its address and the workers' processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:

        def start(name: str, *arguments: str, ready: str) -> tuple[int, str]:
            log = folder / f"{name}.log"
            command = [sys.executable, "-m", "dask", *arguments, "--host", "127.0.0.1", "--no-dashboard"]
            process = stack.enter_context(_service(command, env, log))
            return process.pid, _until(process, lambda: re.search(ready, log.read_text()), name)[0]

        _, address = start("scheduler", "scheduler", "--port", "0", ready=r"tcp://127\.0\.0\.1:\d+")
        alone = ("--nthreads", "1", "--no-nanny", "--memory-limit", "0", "--local-directory", str(folder))
        pids = [
            start(f"worker-{n}", "worker", address, *alone, ready="Registered to")[0] for n in range(count)
        ]
        yield address, pids


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end_in_order() -> None:
    """Turn SIGTERM into SystemExit, so that blocks stop the services that they started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def _service(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=log.parent
        )
    try:
        yield process
    finally:
        family = list(memory.tree(process.pid))
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in family[1:]:  # children that a killed service left
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _until(process: subprocess.Popen[bytes], look: Callable[[], T | None], what: str) -> T:
    limit = time.monotonic() + PATIENCE
    while not (found := look()):
        if process.poll() is not None or time.monotonic() > limit:
            raise NotStarted(f"{what} did not start: {' '.join(map(str, process.args))}")
        time.sleep(0.1)
    return found


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
