"""Deployments on a real server: every flow, with its limit, schedule, triggers and parameters."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from stack import ROOT, Stack, eventually

pytestmark = [pytest.mark.xdist_group("stack")]


def flows() -> set[str]:
    """The modules with a flow."""
    found = set()
    for path in (ROOT / "flows").glob("[!_]*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(d, ast.Call) and isinstance(d.func, ast.Name) and d.func.id == "flow"
                for d in node.decorator_list
            ):
                found.add(path.stem)
    return found


@pytest.fixture(scope="module")
def deployments(stack: Stack) -> dict[str, Any]:
    """By name."""
    return {found["name"]: found for found in stack.post("/deployments/filter", {})}


def test_every_flow_is_deployed(deployments: dict[str, Any]) -> None:
    assert deployments.keys() == flows()
    for name, found in deployments.items():
        assert found["entrypoint"] == f"flows.{name}.{name}"
        assert found["pull_steps"] in ([], None)
        assert found["work_pool_name"] == "ckptcore"
        assert not found["paused"]
        # The next sweep or scrub finds what the last one left; all other flows are resumed.
        assert ("resumable" in found["tags"]) == (not found["schedules"]), name


def test_runs_are_limited(deployments: dict[str, Any]) -> None:
    for name, found in deployments.items():
        strategy = found["concurrency_options"]["collision_strategy"]
        alone = bool(found["schedules"])
        assert strategy == ("CANCEL_NEW" if alone else "ENQUEUE"), name
        limit = found["global_concurrency_limit"]["limit"]
        assert limit == 1 if alone else limit > 1, name


def test_the_form_describes_every_parameter(deployments: dict[str, Any]) -> None:
    for name, found in deployments.items():
        assert found["description"]
        assert "\n" not in found["description"]
        schema = found["parameter_openapi_schema"]
        assert schema["properties"]
        for parameter, of_one in schema["properties"].items():
            assert all(of_one[word] for word in ("title", "description")), (name, parameter)
    arrived = deployments["arrived"]["parameter_openapi_schema"]
    assert set(arrived["required"]) == {"source", "destination"}
    assert arrived["properties"]["verb"]["enum"] == ["consolidate", "export"]
    assert arrived["properties"]["source"]["description"] == "Path or fsspec URL of the checkpoint."


def test_events_and_schedules_start_them(stack: Stack, deployments: dict[str, Any]) -> None:
    for name, found in deployments.items():
        related = stack.get(f"/automations/related-to/prefect.deployment.{found['id']}")
        schedules = [s["schedule"]["cron"] for s in found["schedules"] if s["active"]]
        assert related or schedules, name
        for automation in related:
            assert automation["enabled"]
            (expected,) = automation["trigger"]["expect"]
            assert expected in (
                "prefect.flow-run.Crashed",
                "ckptcore.checkpoint.saved",
                f"ckptcore.{name}.requested",
            )


def test_the_scheduler_plans_their_runs(stack: Stack, deployments: dict[str, Any]) -> None:
    """A stored schedule also has to fire."""
    scheduled = {name: found["id"] for name, found in deployments.items() if found["schedules"]}
    assert {"sweep", "scrub", "retire"} <= scheduled.keys()

    def planned() -> set[str]:
        which = {"state": {"type": {"any_": ["SCHEDULED"]}}, "deployment_id": {"any_": [*scheduled.values()]}}
        runs = stack.post("/flow_runs/filter", {"flow_runs": which, "limit": 200})
        return {run["deployment_id"] for run in runs if run["auto_scheduled"]}

    assert eventually(lambda: planned() == set(scheduled.values())), planned()


@pytest.mark.soak
def test_a_second_up_restarts_what_died_and_duplicates_nothing(stack: Stack) -> None:
    before = len(stack.post("/automations/filter", {}))
    killed = stack.process("receiver")
    os.kill(killed, signal.SIGKILL)
    output = stack.up()
    # By `up`, or by the supervisor before it looked.
    assert "receiver: started" in output or "receiver: already running" in output, output
    assert stack.process("receiver") != killed
    assert all(f"{name}: already running" in output for name in ("postgres", "prefect", "worker")), output
    assert stack.receiver.get("/readyz").status_code == 200
    after = stack.post("/automations/filter", {})
    assert len(after) == before
    (zombies,) = [one for one in after if one["name"] == "ckptcore-crash-zombies"]
    assert zombies["trigger"]["within"] == 90
    assert zombies["trigger"]["posture"] == "Proactive"
    # Also a run that a worker took and never started: it has sent no heartbeat yet.
    named = ("Pending", "Submitting", "heartbeat")
    assert set(zombies["trigger"]["after"]) == {f"prefect.flow-run.{name}" for name in named}


@pytest.mark.soak  # the journey begins with one
def test_an_event_starts_a_run(stack: Stack, checkpoint: Path) -> None:
    target = stack.exports / "by-event"
    event = {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": "ckptcore.consolidate.requested",
        "resource": {"prefect.resource.id": "ckptcore.checkpoint.by-event"},
        "payload": {"source": str(checkpoint), "destination": str(target)},
    }
    stack.post("/events", [event])
    assert eventually(lambda: bool(stack.runs("consolidate"))), "no run"
    (run,) = stack.runs("consolidate")
    assert stack.ended(run["id"])["state_type"] == "COMPLETED", stack.report(run["id"])
    with safe_open(target / "model.safetensors", "pt") as file:
        assert len(list(file.keys())) == 60


@pytest.mark.soak
def test_watching_a_run_shows_why_it_failed(stack: Stack, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prefect", "deployment", "run", "export/export", "--watch"]
    command += ["-p", f"source={tmp_path / 'nothing'}", "-p", f"destination={stack.exports / 'nothing'}"]
    env = os.environ | stack.env | {"COLUMNS": "400"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert re.search(r"source-unreadable: \S+/nothing does not exist", done.stdout), done.stdout
    assert "next: check the URL" in done.stdout


def test_the_server_requires_a_password(stack: Stack) -> None:
    import httpx

    assert httpx.post(f"{stack.env['PREFECT_API_URL']}/deployments/filter", json={}).status_code == 401
    assert httpx.get(f"{stack.env['PREFECT_API_URL']}/health").status_code == 200
