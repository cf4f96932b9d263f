"""Fuzz: whatever is sent, signed or not, the answer is one that the schema lists, and never a 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import live
import pytest
from paths import JOBS

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.soak
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    with live.receiver(tmp_path) as running:
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{running.url}/openapi.json",
            "--checks",
            CHECKS,
            "--max-examples",
            os.environ.get("CKPTCORE_EXAMPLES", "1000"),
            "--seed",
            "1",
            "--no-color",
            "--generation-database",
            "none",
        ]
        env = os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_job", "PYTHONPATH": str(JOBS)}
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=540, check=False
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        kept = running.rows("source")
    # Some requests reached the inbox, and every kind of refusal occurred.
    log = (tmp_path / "receiver.log").read_text()
    answers = Counter(word for line in log.splitlines() for word in line.split() if word in STATUSES)
    assert len({source for (source,) in kept}) >= 4
    assert set(answers) >= {"401", "403", "404", "422"}, answers
    assert "Traceback" not in log


STATUSES = {"400", "401", "403", "404", "408", "413", "415", "422", "503"}
