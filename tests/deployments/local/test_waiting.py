"""Waiting: what is announced too early, or by a wrong name, keeps no other checkpoint waiting."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stack import Stack, eventually

pytestmark = [pytest.mark.xdist_group("stack")]


def test_wrong_names_hold_up_nobody(stack: Stack, checkpoint: Path) -> None:
    stack.up()
    worker = stack.process("worker")
    late = checkpoint.with_name("step-9")
    wrong = [checkpoint.with_name(f"setp-{n}") for n in range(3)]  # more than the worker has places
    ids = {
        place: stack.start("arrived/arrived", {
            "source": str(place), "destination": str(stack.exports / "waiting" / place.name),
            "root": str(stack.root), "verb": "consolidate",
        })
        for place in (*wrong, late, checkpoint)
    }  # fmt: skip
    assert stack.ended(ids[checkpoint])["state_type"] == "COMPLETED", stack.told(ids[checkpoint])
    for place in (*wrong, late):
        run = stack.run(ids[place])
        assert run["labels"]["ckptcore.looks"] >= 1, stack.told(ids[place])
        assert eventually(lambda place=place: stack.run(ids[place])["state"]["name"] in  # type: ignore[misc]
                          ("AwaitingRetry", "Scheduled", "Late")), stack.told(ids[place])  # fmt: skip
        assert "source-unreadable" in stack.run(ids[place])["state"]["message"]
    shutil.copytree(checkpoint, late)
    assert stack.ended(ids[late], 180)["state_type"] == "COMPLETED", stack.told(ids[late])
    assert stack.process("worker") == worker
    assert stack.running()["worker"]
    for place in wrong:
        stack.post(f"/flow_runs/{ids[place]}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
