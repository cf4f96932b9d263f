"""A worker that is stopped, or dies, releases its own runs and no others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stack import ROOT, TENSORS, Stack, eventually

from deployments import worker as worker_process
from deployments.processes import having
from deployments.worker import MARK

pytestmark = [pytest.mark.xdist_group("stack")]
ONE_FILE_EACH = {"max_file_size": "16KiB", "batch": "1KiB", "workers": 1}


@contextmanager
def worker(stack: Stack, log: Path, name: str = "other") -> Iterator[subprocess.Popen[bytes]]:
    """A worker beside that of the stack, as systemd and Kubernetes start it."""
    keep = {"PREFECT_HOME": str(stack.folder / "prefect"), "PREFECT_SERVER_EPHEMERAL_ENABLED": "false"}
    env = os.environ | stack.env | keep | {"PREFECT_WORKER_QUERY_SECONDS": "1"}
    command = [
        sys.executable,
        "-m",
        "deployments.worker",
        "--pool",
        "ckptcore",
        "--name",
        name,
        "--limit",
        "1",
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(300)


def runs_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes of a worker that run flows."""
    (below,) = (
        int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    )
    marks = [
        line
        for line in Path(f"/proc/{below}/environ").read_bytes().decode().split("\0")
        if line.startswith(f"{MARK}=")
    ]
    return [pid for pid in having(marks[0]) if b"prefect.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def run_of_another(stack: Stack) -> str:
    """The id of a run with the label of another worker."""
    deployment = stack.get("/deployments/name/scrub/scrub")["id"]
    run = stack.post(
        "/flow_runs/",
        {
            "flow_id": stack.get(f"/deployments/{deployment}")["flow_id"],
            "work_pool_name": "ckptcore",
            "state": {"type": "RUNNING"},
            "labels": {"prefect.worker.name": "third"},
        },
    )
    return str(run["id"])


@pytest.mark.soak
def test_a_dying_worker_releases_its_runs_and_reports_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    dies = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    real, asked, released = subprocess.Popen, [], []

    def start(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        asked.append(command)
        return real(dies, **how)

    monkeypatch.setattr(worker_process.subprocess, "Popen", start)
    monkeypatch.setattr(worker_process, "_release_runs", lambda *of: released.append(of))
    before = {how: signal.getsignal(how) for how in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    try:
        code = worker_process.main(["--pool", "p", "--name", "n"])
    finally:
        for how, handler in before.items():
            signal.signal(how, handler)
    assert code == -signal.SIGKILL
    assert released == [("p", "n")]
    assert asked[0][-3:] == ["deployments.release_runs", "p", "n"]  # of a predecessor that was killed
    assert asked[1][-4:] == ["--pool", "p", "--name", "n"]


@pytest.mark.soak  # test_resume_deployment stops a worker in every run
@pytest.mark.parametrize("end", ["is stopped", "dies"])
def test_a_worker_releases_its_own_runs_only(
    stack: Stack, checkpoint: Path, tmp_path: Path, end: str
) -> None:
    stack.stop("worker")  # it is idle, and would take the run
    target = stack.exports / f"release-{end.split()[0]}"
    receipts = target.parent / f".{target.name}.ckptcore" / "receipts"
    log = tmp_path / "worker.log"
    with worker(stack, log) as process:
        id = stack.start(
            "convert/convert", {"source": str(checkpoint), "destination": str(target), **ONE_FILE_EACH}
        )
        assert eventually(lambda: len(list(receipts.glob("file-*.json"))) >= 3, step=0.01), log.read_text()
        others = run_of_another(stack)
        running = runs_of(process)
        for pid in running:
            os.kill(pid, signal.SIGSTOP)  # or it might end before its worker
        assert running, log.read_text()
        if end == "dies":
            (below,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(below), signal.SIGKILL)
        else:
            process.terminate()
        code = process.wait(300)
    assert (code == 0) is (end != "dies")
    assert stack.run(others)["state_type"] == "RUNNING"
    stack.post(f"/flow_runs/{others}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
    assert stack.run(id)["state"]["name"] == "AwaitingRetry", stack.report(id)
    assert "its worker was stopped" in stack.run(id)["state"]["message"]
    assert f"({id})" in log.read_text()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running))
    before = {json.loads(path.read_text())["path"] for path in receipts.glob("file-*.json")}
    assert 3 <= len(before) < len(TENSORS)
    stack.up()  # with its worker
    assert stack.ended(id)["state_type"] == "COMPLETED", stack.report(id)
    assert stack.run(id)["run_count"] == 2
