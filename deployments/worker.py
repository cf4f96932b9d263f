"""Run Prefect's worker and, when it ends, release its runs to other workers.

``python -m deployments.worker --pool ckptcore --limit 2 --with-healthcheck``

``--metrics-port`` serves Prometheus metrics. Other arguments are passed to ``prefect worker start --type
process``. On SIGTERM or SIGINT, or when the worker ends by itself, its remaining runs are ended and
rescheduled: another worker resumes them at once, after their last complete file. So are those of a
killed predecessor of the same name, at the start. Nothing of Prefect is imported while the worker runs.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckptcore.catalog import unset_warning
from ckptcore.errors import UsageError
from ckptcore.utils import terminal
from ckptcore.utils.log_format import log_format
from deployments import metrics_options, with_project
from deployments.processes import end_having, having
from flows._prefect import await_server, end_with

_log = logging.getLogger("deployments.worker")
MARK = "CKPTCORE_WORKER"
PATIENCE = 10  # seconds for the worker to end, then for each signal to its runs
SERVER_SECONDS = 15.0  # for the server to answer
START_SECONDS = 30.0  # for the server to listen, before the worker begins


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal or the worker's end; return 0 after a signal, else the worker's exit status."""
    parser = terminal.parser(prog="python -m deployments.worker", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pool", required=True, help="the work pool")
    parser.add_argument(
        "--name",
        default=socket.gethostname(),
        help="a name that no other worker has (runs are released by name); default: the host name",
    )
    metrics_options(parser, 9465)
    options, worker_arguments = parser.parse_known_args(arguments)
    terminal.log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per call to Prefect
    warning = unset_warning()
    if warning is not None:
        _log.warning("%s", warning)
    try:
        await_server(START_SECONDS)
    except UsageError as error:
        end_with(error)
    worker = _Worker(options.pool, options.name)
    # First the processes, then their runs: another worker takes a released run at once.
    worker.end_processes()
    # What a killed predecessor had taken. Another process imports Prefect: this one stays small.
    subprocess.run(
        [sys.executable, "-m", "deployments.release_runs", options.pool, options.name], check=False
    )
    with worker.metrics(options.metrics_host, options.metrics_port):
        code = worker.run(["--pool", options.pool, "--name", options.name, *worker_arguments])
    _release_runs(options.pool, options.name)
    return 0 if worker.ending else code


class _Worker:
    """One worker process. ending: whether a signal asked it to end."""

    def __init__(self, pool: str, name: str) -> None:
        self.ending = False
        self._process: subprocess.Popen[bytes] | None = None
        # A predecessor of the same name that was killed had the same.
        server, folder = os.environ.get("PREFECT_API_URL", ""), os.environ.get("PREFECT_HOME", "")
        self._mark = f"{MARK}={name}:{pool}:{server}:{folder}"

    def run(self, arguments: Sequence[str]) -> int:
        """Run the worker until it and all its processes have ended; return its exit status."""
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, self._end)
        signal.signal(signal.SIGALRM, self._kill)
        command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", *arguments]
        name, _, value = self._mark.partition("=")
        # A session of its own: Ctrl-C reaches only this process, which forwards it as SIGTERM.
        env = with_project(os.environ) | {name: value}
        if log_format() == "json":  # lines of the worker and of its runs; a setting of the user's own wins
            env.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER", "json")
        self._process = subprocess.Popen(command, env=env, start_new_session=True)
        if self.ending:  # the signal came before the process existed
            self._end()
        code = self._process.wait()
        signal.alarm(0)
        self.end_processes()
        return code

    def end_processes(self) -> None:
        """End what a worker has left. Runs have sessions of their own; their processes inherit the mark."""
        end_having(self._mark, PATIENCE)

    @contextmanager
    def metrics(self, host: str, port: int | None) -> Iterator[None]:
        """Serve metrics of the catalog and of this worker, if a port is given."""
        if port is None:
            yield
            return
        from deployments.metrics import WorkerMetrics, registry_of, serving

        registry = registry_of(None)
        WorkerMetrics(registry, lambda: having(self._mark))
        with serving(registry, host, port) as number:
            terminal.line(f"metrics at http://{host}:{number}/metrics")
            yield

    def _end(self, *_: Any) -> None:
        self.ending = True
        if self._process is not None:
            self._process.terminate()
            signal.alarm(PATIENCE)

    def _kill(self, *_: Any) -> None:
        if self._process is not None:
            self._process.kill()


def _release_runs(pool: str, name: str) -> None:
    os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", str(PATIENCE))  # read when Prefect is imported
    from tenacity import Retrying, stop_after_delay, wait_fixed

    from deployments.release_runs import release

    try:
        runs = Retrying(stop=stop_after_delay(SERVER_SECONDS), wait=wait_fixed(1.0), reraise=True)(
            release, pool, name
        )
    except Exception as error:  # this process must end, whatever the server's error
        terminal.line(
            f"cannot release the runs: {error}. They are resumed once their heartbeat is missed", err=True
        )
        return
    for run in runs:
        terminal.line(f"released run {run.name} ({run.id})")


if __name__ == "__main__":
    terminal.guard()
    sys.exit(main())
