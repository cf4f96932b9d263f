"""The whole system for tests: `make up` in a folder of its own, asked over HTTP as anybody would."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import postgres as postgresql
import pytest
import torch
import warm
from kills import family

from deployments.local.system import pids

TENSORS = {f"model.layers.{i}.weight": torch.arange(4096.0).reshape(64, 64) + i * 4096 for i in range(60)}
ROOT = Path(__file__).parents[2]
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
COMMAND = [sys.executable, "-m", "deployments.local"]
CONTROL = [sys.executable, "-m", "supervisor.supervisorctl", "-c"]
FREE_PORTS = [
    word for name in ("prefect", "receiver", "postgres", "worker") for word in (f"--{name}-port", "0")
]
# Two ends of a pipe: when the tests end, however they end, so does all of it.
WATCHER = 'read _; exec "$0" -m deployments.local down --patience 0'


class Stack:
    """A running system. folder: its state. env: what `env.sh` says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = os.environ | {
            "CKPTCORE_CACHE": str(folder / "answers"),  # as for users: all runs ask transformers the same
            "CKPTCORE_STATE": str(folder),
            "PYTHONPATH": str(ROOT),
        }
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", WATCHER, sys.executable],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
            cwd=ROOT,
        )
        self.up(*FREE_PORTS)
        self.env = {}
        for line in (folder / "env.sh").read_text().splitlines()[1:]:
            name, _, value = shlex.split(line)[1].partition("=")
            self.env[name] = value
        state = json.loads((folder / "state.json").read_text())
        names = ("prefect", "receiver", "postgres", "worker")
        self.ports: Mapping[str, int] = {name: state[f"{name}_port"] for name in names}
        self.root, self.exports = folder / "checkpoints", folder / "exports"
        user, password = self.env["PREFECT_API_AUTH_STRING"].split(":")
        self.api = httpx.Client(base_url=self.env["PREFECT_API_URL"], auth=(user, password), timeout=60)
        self.receiver = httpx.Client(base_url=f"http://127.0.0.1:{self.ports['receiver']}", timeout=60)

    def close(self) -> None:
        """End all of it."""
        self.api.close()
        self.receiver.close()
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait(120)

    def up(self, *arguments: str) -> str:
        """What `make up` says."""
        return self._run("up", *arguments)

    def down(self, *arguments: str) -> str:
        """What `make down` says."""
        return self._run("down", *arguments)

    def mend(self) -> None:
        """Bring up what a test before has ended."""
        if not all(self.running().values()):
            self.up()

    def running(self) -> dict[str, bool]:
        """Which services run."""
        done = subprocess.run(
            [*COMMAND, "status"], env=self._environment, capture_output=True, text=True, check=False
        )
        found: dict[str, bool] = json.loads(done.stdout)
        return found

    def process(self, name: str) -> int:
        """The number of a service's process."""
        return pids(self.folder)[name]

    def stop(self, name: str) -> None:
        """End a service, which stays down until `up`."""
        self._stopping(name).wait(120)

    def lose(self, name: str) -> None:
        """Kill -9 a service and what it has started, as a machine without power; it stays down until `up`."""
        process = self.process(name)
        os.kill(process, signal.SIGSTOP)  # else it would end its runs
        stopping = self._stopping(name)
        time.sleep(1.0)
        for pid in family(process):
            os.kill(pid, signal.SIGKILL)
        stopping.wait(60)

    def _stopping(self, name: str) -> subprocess.Popen[bytes]:
        command = [*CONTROL, self.folder / "supervisord.conf", "stop", name]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def flow_processes(self, id: str = "") -> list[int]:
        """The processes that run flows now. id: of one run; by default of all."""
        ours = f"CKPTCORE_UP={self.folder}".encode()
        run = f"PREFECT__FLOW_RUN_ID={id}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line, env = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
            except OSError:  # it has ended, or is not ours to look at
                continue
            if b"prefect.engine" in line and ours in env and run in env:
                found.append(int(entry.name))
        return found

    def post(self, path: str, body: object) -> Any:
        """The server's answer."""
        answer = self.api.post(path, json=body)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    def get(self, path: str) -> Any:
        """The server's answer."""
        answer = self.api.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def start(self, deployment: str, parameters: Mapping[str, Any]) -> str:
        """The id of a new run."""
        found = self.get(f"/deployments/name/{deployment}")
        return str(self.post(f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})["id"])

    def run(self, id: str) -> dict[str, Any]:
        """A run as the server knows it."""
        found: dict[str, Any] = self.get(f"/flow_runs/{id}")
        return found

    def runs(self, flow: str) -> list[dict[str, Any]]:
        """The runs of a flow, oldest first."""
        wanted = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found: list[dict[str, Any]] = self.post("/flow_runs/filter", wanted)
        return found

    def ended(self, id: str, seconds: float = 120) -> dict[str, Any]:
        """A run once it has ended."""
        assert eventually(lambda: self.run(id)["state_type"] in ENDED, seconds), self.report(id)
        return self.run(id)

    def report(self, id: str) -> str:
        """What there is to know when a test fails."""
        logs = self.post("/logs/filter", {"logs": {"flow_run_id": {"any_": [id]}}})
        messages = "\n".join(line["message"] for line in logs)
        worker = (self.folder / "log" / "worker.log").read_text()[-2000:]
        return f"{self.run(id)['state']}\n{messages}\n{worker}"

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*COMMAND, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def running_stack(prefix: str, *, keep: bool = False) -> Iterator[Stack]:
    """A `Stack` in a new folder, which goes with it unless it is kept; skips where it cannot run."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'ckptcore[postgres]'")
    if postgresql.programs() is None:
        pytest.skip("no PostgreSQL programs on this machine: apt-get install postgresql")
    # Not below pytest's own folder: as root, PostgreSQL runs as a user who may not look into that.
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    running = None
    try:
        running = Stack(folder)
        yield running
    finally:
        if running is not None:
            running.close()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def query(stack: Stack, statement: str) -> list[dict[str, Any]]:
    """What `ckptcore catalog sql` answers."""
    done = subprocess.run(
        [*warm.command(), "catalog", "sql", "--output", "json", statement],
        env=os.environ | stack.env,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows: list[dict[str, Any]] = found if isinstance(found, list) else found["rows"]
    return rows


def eventually(holds: Callable[[], bool], seconds: float = 120, step: float = 0.3) -> bool:
    """Whether a condition comes true in time."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(step)
    return True
