"""The journey: a job trains and saves, its last line is a webhook, and soon one SQL query finds the export.

Nothing is imitated: the job is two processes; PostgreSQL, Prefect's server, the worker and the receiver are
those of `make up`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import warm
import webhooks
from paths import JOBS
from safetensors import safe_open
from stack import ROOT, TENSORS, Stack, eventually, query

pytestmark = [pytest.mark.xdist_group("stack")]
JOB = JOBS / "training_job.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder of safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def run_of(stack: Stack, source: Path) -> dict[str, Any]:
    """The only run for a checkpoint, after its end."""
    about = [run for run in stack.runs("arrived") if run["parameters"]["source"] == str(source)]
    assert len(about) == 1
    return stack.ended(about[0]["id"])


def test_from_a_training_job_to_an_sql_query(stack: Stack, tmp_path: Path) -> None:
    checkpoint, truth = stack.root / "gloo-run" / "step-3", tmp_path / "truth.pt"
    checkpoint.parent.mkdir(exist_ok=True)
    config = {"model_type": "of-its-own", "architectures": ["OfItsOwn"]}
    (checkpoint.parent / "config.json").write_text(json.dumps(config))  # without one, no engine opens it
    env = os.environ | {
        "CKPTCORE_HOOK_URL": f"{stack.receiver.base_url}/hooks/trainer".replace("//hooks", "/hooks"),
        "CKPTCORE_HOOK_SECRET": stack.env["CKPTCORE_HOOK_SECRET"],
        "OMP_NUM_THREADS": "1",
    }
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [*warm.python(), str(JOB), str(rank), port, str(checkpoint), str(truth)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs

    about = "SELECT uri, run, step FROM latest_exports WHERE run = 'gloo-run'"
    assert eventually(lambda: bool(query(stack, about)), 180, step=2.0), stack.report(
        run_of(stack, checkpoint)["id"]
    )
    (row,) = query(stack, about)
    assert (row["run"], row["step"]) == ("gloo-run", 3)
    found, expected = tensors(Path(row["uri"])), torch.load(truth, weights_only=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert Path(row["uri"]) == stack.exports / "gloo-run" / "step-3"
    run = run_of(stack, checkpoint)
    assert run["state_type"] == "COMPLETED"
    assert {"webhook", "source:trainer"} <= set(run["tags"])
    # Of this export: earlier tests have made others.
    which = {"name": ["prefect.asset.materialization.succeeded"]}
    made = {"filter": {"event": which, "resource": {"id": [f"file://{row['uri']}"]}}}
    assert eventually(lambda: bool(stack.post("/events/filter", made)["events"]))
    event = stack.post("/events/filter", made)["events"][0]
    assert f"file://{checkpoint}" in [related["prefect.resource.id"] for related in event["related"]]


@pytest.mark.soak  # without the services: test_announced_flow
def test_the_same_announcement_is_another_event_for_the_same_work(stack: Stack, checkpoint: Path) -> None:
    """Nothing is converted twice."""
    target = stack.exports / checkpoint.relative_to(stack.root)
    ended: list[dict[str, Any]] = []

    def announced(times: int) -> bool:
        runs = [run for run in stack.runs("arrived") if run["parameters"]["source"] == str(checkpoint)]
        ended[:] = [run for run in runs if run["state_type"] == "COMPLETED"]
        return len(ended) == times

    inodes = []
    for times in (1, 2):
        answer = stack.receiver.post(
            "/hooks/curl",
            json={"uri": str(checkpoint), "run": "announced-twice", "step": 7},
            headers={"authorization": f"Bearer {stack.env['CKPTCORE_HOOK_TOKEN']}"},
        )
        assert answer.status_code == 202
        assert eventually(lambda times=times: announced(times)), ended
        inodes.append(target.stat().st_ino)
    assert inodes[0] == inodes[1]
    assert sorted(run["state_name"] for run in ended) == ["Already", "Completed"]


@pytest.fixture
def every_kind(stack: Stack, tmp_path: Path) -> Iterator[str]:
    """The address of one more receiver, with a source of every kind, on the same inbox and server."""
    config = webhooks.CONFIG.replace('roots = ["/runs", "s3://team/runs"]', f'roots = ["{stack.root}"]')
    config = config.replace("/exports/{path}", f"{stack.exports}/kinds/{{path}}")
    config = config.replace('uri = "/runs/', f'uri = "{stack.root}/')
    (tmp_path / "receiver.toml").write_text(config)
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.receiver", tmp_path / "receiver.toml", "--port", str(port)],
            env=os.environ | stack.env | webhooks.SECRETS,
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return httpx.get(f"{address}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        assert eventually(ready), (tmp_path / "log").read_text()
        yield address
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.soak
def test_every_kind_of_sender(stack: Stack, every_kind: str, checkpoint: Path) -> None:
    places = {kind: stack.root / "kinds" / kind / "step-7" for kind in webhooks.HOOKS}
    # These name an experiment or a job, and no URI.
    places |= {"determined": stack.root / "experiment-41", "eventbridge": stack.root / "job-llama"}
    for kind, place in places.items():
        shutil.copytree(checkpoint, place)
        hook = webhooks.HOOKS[kind].but(at=time.time())
        if kind == "cloudevents-structured":  # the binary form has that id too
            hook = hook.but(event=hook.event | {"id": "A 235"})
        hook = hook.naming(str(place))
        answer = httpx.post(every_kind + hook.path, content=hook.body, headers=hook.headers, timeout=60)
        assert (answer.status_code, answer.json()["status"]) == (202, "accepted"), (kind, answer.text)

    sources = {str(place): kind for kind, place in places.items()}
    found: dict[str, str] = {}

    def started() -> bool:
        runs = [run for run in stack.runs("arrived") if run["parameters"]["source"] in sources]
        found.update({sources[run["parameters"]["source"]]: run["id"] for run in runs})
        return len(runs) == len(places)

    assert eventually(started), found
    exports = {}
    for kind, id in found.items():
        run = stack.ended(id)
        assert run["state_type"] == "COMPLETED", (kind, stack.report(id))
        exports[kind] = run["parameters"]["destination"]
        assert tensors(Path(exports[kind])).keys() == TENSORS.keys()
    rows = query(stack, "SELECT uri FROM checkpoint WHERE state = 'present' AND uri LIKE '%/exports/kinds/%'")
    assert sorted(row["uri"] for row in rows) == sorted(exports.values())
    assert len(set(exports.values())) == len(webhooks.HOOKS)
