"""Waiting: what is announced too early, or by a wrong name, keeps no other checkpoint waiting."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from stack import Stack, eventually

from tasks.retry import LOOKS

pytestmark = [pytest.mark.xdist_group("stack")]


@pytest.mark.soak
def test_wrong_uris_do_not_block_others(stack: Stack, checkpoint: Path) -> None:
    stack.mend()
    worker = stack.process("worker")
    wrong = [checkpoint.with_name(f"setp-{n}") for n in range(2)]  # as many as the worker has slots
    ids = {
        place: stack.start(
            "arrived/arrived",
            {
                "source": str(place),
                "destination": str(stack.exports / "waiting" / place.name),
                "root": str(stack.root),
                "verb": "consolidate",
            },
        )
        for place in (*wrong, checkpoint)
    }
    assert stack.ended(ids[checkpoint])["state_type"] == "COMPLETED", stack.report(ids[checkpoint])
    for place in wrong:
        run = stack.run(ids[place])
        assert run["labels"]["ckptcore.looks"] >= 1, stack.report(ids[place])
        assert eventually(
            lambda place=place: (
                stack.run(ids[place])["state"]["name"]  # type: ignore[misc]
                in ("AwaitingRetry", "Scheduled", "Late")
            )
        ), stack.report(ids[place])
        assert "source-unreadable" in stack.run(ids[place])["state"]["message"]
    assert stack.process("worker") == worker
    assert stack.running()["worker"]
    for place in wrong:
        stack.post(f"/flow_runs/{ids[place]}/set_state", {"state": {"type": "CANCELLED"}, "force": True})


@pytest.mark.soak
def test_a_long_pause_is_not_a_crash(stack: Stack, checkpoint: Path) -> None:
    """Runs without a heartbeat for 90 s are set to Crashed, but not a run that is rescheduled for longer."""
    stack.mend()
    late = checkpoint.with_name("step-9")
    id = stack.start(
        "arrived/arrived",
        {
            "source": str(late),
            "destination": str(stack.exports / "long" / late.name),
            "root": str(stack.root),
            "verb": "consolidate",
        },
    )
    assert eventually(lambda: stack.run(id)["state"]["name"] == "AwaitingRetry"), stack.report(id)
    stack.api.patch(f"/flow_runs/{id}/labels", json={LOOKS: 4}).raise_for_status()  # 120 s come next
    assert eventually(lambda: stack.run(id)["labels"][LOOKS] == 5), stack.report(id)
    shutil.copytree(checkpoint, late)
    assert stack.ended(id, 240)["state_type"] == "COMPLETED", stack.report(id)
    states = stack.get(f"/flow_run_states/?flow_run_id={id}")
    names = sorted({state["name"] for state in states})
    assert "Crashed" not in names, names
    begun = sorted(
        datetime.fromisoformat(state["timestamp"]) for state in states if state["name"] == "Running"
    )
    assert begun[-1] - begun[-2] > timedelta(seconds=100), begun
