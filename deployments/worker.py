"""Worker: Prefect's worker, below a process that lets go of its runs when it ends.

``python -m deployments.worker --pool ckptcore --limit 2 --with-healthcheck``

Words that are not known here go to ``prefect worker start --type process``. Told to end (SIGTERM, SIGINT), or
when the worker ends by itself, it ends what is left of its runs, and makes them due again: another worker
takes them up at once, behind their last whole file. Nothing of Prefect is imported before that.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ckptcore.utils import terminal
from deployments.local.process import having

MARK = "CKPTCORE_WORKER"
PATIENCE = 10  # seconds for the worker to end, then for each way of ending its runs
TELL = 15.0  # seconds for the server to answer
STEP = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until a signal ends it; the exit status: 0 after one, else the worker's."""
    parser = terminal.parser(prog="python -m deployments.worker", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pool", required=True, help="the work pool")
    parser.add_argument(
        "--name",
        default=socket.gethostname(),
        help="no other worker may have it, or its runs would be let go of, too; default: the machine's",
    )
    given, more = parser.parse_known_args(arguments)
    worker = _Worker()
    code = worker.run(["--pool", given.pool, "--name", given.name, *more])
    _let_go(given.pool, given.name)
    return 0 if worker.ending else code


class _Worker:
    """One worker process. ending: whether a signal asked it to end."""

    def __init__(self) -> None:
        self.ending = False
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = f"{MARK}={uuid.uuid4()}"

    def run(self, arguments: Sequence[str]) -> int:
        """Runs it with these arguments, and leaves none of its processes; its exit status."""
        for how in (signal.SIGTERM, signal.SIGINT):
            signal.signal(how, self._end)
        signal.signal(signal.SIGALRM, self._kill)
        command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", *arguments]
        name, _, value = self._mark.partition("=")
        # A session of its own: Ctrl-C is for this process, which passes it on in its way.
        self._process = subprocess.Popen(command, env=os.environ | {name: value}, start_new_session=True)
        if self.ending:  # before there was a process to tell
            self._end()
        code = self._process.wait()
        signal.alarm(0)
        # Runs have sessions of their own, and what they start inherits the mark.
        for how in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + PATIENCE
            for pid in having(self._mark):
                _tell(pid, how)
            while having(self._mark) and time.monotonic() < until:
                time.sleep(STEP)
        return code

    def _end(self, *_: Any) -> None:
        self.ending = True
        if self._process is not None:
            self._process.terminate()
            signal.alarm(PATIENCE)

    def _kill(self, *_: Any) -> None:
        if self._process is not None:
            self._process.kill()


def _let_go(pool: str, name: str) -> None:
    os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", str(PATIENCE))  # read when Prefect is imported
    from deployments.release_runs import let_go

    until = time.monotonic() + TELL
    while True:
        try:
            runs = let_go(pool, name)
        except Exception as error:  # whatever ails the server, this process is to end
            if time.monotonic() < until:
                time.sleep(1.0)
                continue
            terminal.line(
                f"the server could not be told; runs go on when it misses their heartbeat: {error}", err=True
            )
            return
        for run in runs:
            terminal.line(f"let go of {run.name} ({run.id})")
        return


def _tell(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    terminal.guard()
    sys.exit(main())
