"""Resume: a run whose process is killed between two files goes on, from the deployment, where it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from stack import TENSORS, Stack, eventually, query

pytestmark = [pytest.mark.xdist_group("stack")]
ONE_FILE_EACH = {"max_file_size": "16KiB", "batch": "1KiB", "workers": 1}


def finished(staging: Path) -> dict[str, os.stat_result]:
    """Complete files: those with a receipt."""
    receipts = (json.loads(path.read_text()) for path in (staging / "receipts").glob("file-*.json"))
    return {receipt["path"]: (staging / "files" / receipt["path"]).stat() for receipt in receipts}


def test_a_killed_run_resumes_after_its_last_file(stack: Stack, checkpoint: Path) -> None:
    target = stack.exports / "killed"
    staging = target.parent / ".killed.ckptcore"
    id = stack.start(
        "convert/convert", {"source": str(checkpoint), "destination": str(target), **ONE_FILE_EACH}
    )
    assert eventually(lambda: staging.exists() and len(finished(staging)) >= 3, step=0.01), stack.report(id)
    (process,) = stack.flow_processes()
    os.kill(process, signal.SIGKILL)
    before = finished(staging)
    assert 3 <= len(before) < len(TENSORS), "it was killed in the middle"

    assert eventually(lambda: stack.run(id)["state_type"] == "COMPLETED"), stack.report(id)
    assert stack.run(id)["run_count"] == 2
    kept = {name: (target / name).stat() for name in before}
    assert {n: (s.st_ino, s.st_mtime_ns) for n, s in kept.items()} == {
        n: (s.st_ino, s.st_mtime_ns) for n, s in before.items()
    }
    found = {}
    for path in target.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert not staging.exists()
    states = [state["name"] for state in stack.get(f"/flow_run_states/?flow_run_id={id}")]
    assert states.index("Crashed") < states.index("AwaitingRetry")


@pytest.mark.soak  # the system goes down and up again; a worker that is killed is above
def test_runs_that_down_stops_are_resumed(stack: Stack, checkpoint: Path) -> None:
    target = stack.exports / "stopped"
    staging = target.parent / ".stopped.ckptcore"
    id = stack.start(
        "convert/convert", {"source": str(checkpoint), "destination": str(target), **ONE_FILE_EACH}
    )
    assert eventually(lambda: staging.exists() and len(finished(staging)) >= 3, step=0.01), stack.report(id)
    for process in stack.flow_processes():
        os.kill(process, signal.SIGSTOP)  # or it could end by itself
    assert len(finished(staging)) < len(TENSORS)
    output = stack.down("--patience", "0")
    assert all(f"{name}: stopped" in output for name in ("receiver", "worker", "prefect", "postgres")), output
    assert not any(stack.running().values())
    assert not target.exists()
    before = {name: (s.st_ino, s.st_mtime_ns) for name, s in finished(staging).items()}
    stack.up()
    assert all(stack.running().values())
    assert stack.ended(id)["state_type"] == "COMPLETED", stack.report(id)
    assert {n: ((target / n).stat().st_ino, (target / n).stat().st_mtime_ns) for n in before} == before


@pytest.mark.soak
def test_a_lost_machine_is_detected_by_missing_heartbeats(stack: Stack, checkpoint: Path) -> None:
    target = stack.exports / "silent"
    staging = target.parent / ".silent.ckptcore"
    id = stack.start(
        "convert/convert", {"source": str(checkpoint), "destination": str(target), **ONE_FILE_EACH}
    )
    assert eventually(lambda: staging.exists() and len(finished(staging)) >= 3, step=0.01), stack.report(id)
    stack.lose("worker")  # with its runs
    assert stack.run(id)["state_type"] == "RUNNING"
    run = stack.ended(id, 300)
    assert (run["state_type"], run["state"]["message"]) == ("CRASHED", "no heartbeat for 90 s")
    before = {name: (s.st_ino, s.st_mtime_ns) for name, s in finished(staging).items()}
    stack.up()
    assert eventually(lambda: stack.run(id)["state_type"] == "COMPLETED"), stack.report(id)
    assert {n: ((target / n).stat().st_ino, (target / n).stat().st_mtime_ns) for n in before} == before


@pytest.mark.soak
def test_a_run_that_dies_before_it_begins_is_not_restarted_forever(stack: Stack, checkpoint: Path) -> None:
    stack.mend()
    answer = stack.receiver.post(
        "/hooks/curl",
        json={"uri": str(checkpoint), "run": "doomed", "step": 7},
        headers={"authorization": f"Bearer {stack.env['CKPTCORE_HOOK_TOKEN']}"},
    )
    assert answer.status_code == 202, answer.text
    runs: list[str] = []

    def started() -> bool:
        runs[:] = [r["id"] for r in stack.runs("arrived") if r["parameters"]["source"] == str(checkpoint)]
        return bool(runs)

    assert eventually(started)
    (id,) = runs
    killed: set[int] = set()

    def given_up() -> bool:
        for process in set(stack.flow_processes(id)) - killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            killed.add(process)
        return bool(stack.run(id)["state_type"] == "FAILED")

    assert eventually(given_up, 900, step=0.02), stack.report(id)
    ended = stack.run(id)
    assert ended["run_count"] == 0  # it never began: Prefect's own count says nothing
    assert len(killed) == 5
    assert ended["state"]["message"].startswith("worker-lost: gave up after 5 starts")
    # Neither the deployment `resume` nor the receiver starts it again, and its event has failed.
    about = f"SELECT state, error_message FROM inbox WHERE flow_run_id = '{id}'"

    def recorded() -> bool:
        assert not stack.flow_processes(id)
        return bool(query(stack, about)[0]["state"] == "failed")

    assert eventually(recorded, 120, step=1.0), query(stack, about)
    assert query(stack, about)[0]["error_message"].startswith("worker-lost: gave up")
    assert not eventually(lambda: bool(stack.flow_processes(id)), 30, step=0.1)
    assert stack.run(id)["state_type"] == "FAILED"
    assert not list(stack.exports.rglob("doomed*"))
