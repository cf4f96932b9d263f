"""Worker: one that is told to end, or dies, lets go of its runs, and of nobody else's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stack import ROOT, TENSORS, Stack, eventually

from deployments.local.process import having
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
    """The processes below a worker that run flows."""
    (below,) = (
        int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    )
    marks = [
        line
        for line in Path(f"/proc/{below}/environ").read_bytes().decode().split("\0")
        if line.startswith(f"{MARK}=")
    ]
    return [pid for pid in having(marks[0]) if b"prefect.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("end", ["is told to end", "dies"])
def test_a_worker_lets_go_of_its_run(stack: Stack, checkpoint: Path, tmp_path: Path, end: str) -> None:
    os.kill(stack.process("worker"), signal.SIGTERM)  # it has nothing to do, and would take the run
    target = stack.exports / f"let-go-{end.split()[0]}"
    receipts = target.parent / f".{target.name}.ckptcore" / "receipts"
    log = tmp_path / "worker.log"
    with worker(stack, log) as process:
        id = stack.start(
            "convert/convert", {"source": str(checkpoint), "destination": str(target), **ONE_FILE_EACH}
        )
        assert eventually(lambda: len(list(receipts.glob("file-*.json"))) >= 3, step=0.01), log.read_text()
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
    assert stack.run(id)["state"]["name"] == "AwaitingRetry", stack.told(id)
    assert "its worker was stopped" in stack.run(id)["state"]["message"]
    assert f"({id})" in log.read_text()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running))
    before = {json.loads(path.read_text())["path"] for path in receipts.glob("file-*.json")}
    assert 3 <= len(before) < len(TENSORS)
    stack.up()  # with its worker
    assert stack.ended(id)["state_type"] == "COMPLETED", stack.told(id)
    assert stack.run(id)["run_count"] == 2


def test_others_keep_their_runs(stack: Stack, tmp_path: Path) -> None:
    stack.up()
    # A name that no test before has made known to the server: it tells that this one has begun.
    with worker(stack, tmp_path / "log", "neighbour") as process:
        assert eventually(
            lambda: any(
                w["name"] == "neighbour" for w in stack.post("/work_pools/ckptcore/workers/filter", {})
            )
        ), (tmp_path / "log").read_text()
        # Taken by another worker, as its label says; this one's end is no business of it.
        deployment = stack.get("/deployments/name/scrub/scrub")["id"]
        id = stack.post(
            "/flow_runs/",
            {
                "flow_id": stack.get(f"/deployments/{deployment}")["flow_id"],
                "work_pool_name": "ckptcore",
                "state": {"type": "RUNNING"},
                "labels": {"prefect.worker.name": "third"},
            },
        )["id"]
        process.terminate()
        assert process.wait(300) == 0
    assert stack.run(id)["state_type"] == "RUNNING"
    stack.post(f"/flow_runs/{id}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
