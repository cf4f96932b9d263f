"""Run the scenarios of PyTorch's tests of `torch.distributed.checkpoint`, with `load_into` as the loader."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import warm
from dcp_scenarios import NOT_REWRITTEN, NOT_RUN, SCENARIOS, TOPICS, TORCH_FAILS, UPSTREAM
from driver import REPOSITORY
from paths import HELPERS, JOBS

JOB = JOBS / "dcp_scenario_job.py"
SHORT = [s.name for s in SCENARIOS if s.short]
LISTED = (
    "import json, dcp_scenario_job as job; print(json.dumps({t.__name__: [*t.RUNS] for t in job.TOPICS}))"
)


def passes(names: list[str], folder: Path) -> None:
    started(str(JOB), str(folder), *names)
    rows = json.loads((folder / "report.json").read_text())
    assert [*rows] == names
    wrong = {name: "\n".join(row["wrong"].values()) for name, row in rows.items() if row["wrong"]}
    assert not wrong, "\n\n".join(f"{name}:\n{text[-3000:]}" for name, text in wrong.items())
    assert all(row["checks"] for row in rows.values())


def started(*arguments: str) -> str:
    path = os.pathsep.join(map(str, (REPOSITORY, HELPERS, JOBS)))
    done = subprocess.run(
        [*warm.python(), *arguments],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        env=dict(os.environ) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_slice(tmp_path: Path) -> None:
    """Scenarios of every topic, and of everything that a program does with a checkpoint."""
    assert {s.topic for s in SCENARIOS if s.short} == {*TOPICS}
    passes(SHORT, tmp_path)


def test_every_upstream_file_has_a_scenario_or_a_reason() -> None:
    listed = [*(s.upstream for s in SCENARIOS), *(names for names, _ in NOT_RUN)]
    named = {name for text in listed for name in re.sub(r"\(.*?\)", "", text).replace(",", " ").split()}
    assert [name for name in UPSTREAM if name not in named] == []


@pytest.mark.soak
@pytest.mark.parametrize("topic", TOPICS)
def test_every_scenario(topic: str, tmp_path: Path) -> None:
    passes([s.name for s in SCENARIOS if s.topic == topic], tmp_path)


@pytest.mark.soak
def test_every_scenario_has_a_row() -> None:
    """And every name in the tables of exceptions is a scenario's."""
    listed = json.loads(started("-c", LISTED))
    rows = {f"dcp_{t}_scenarios": [s.name for s in SCENARIOS if s.topic == t] for t in TOPICS}
    assert listed == rows
    names = {s.name for s in SCENARIOS}
    assert {n for row in (*TORCH_FAILS, *NOT_REWRITTEN) for n in row[0].split(", ")} <= names
