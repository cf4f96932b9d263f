"""Fuzz: whatever is asked of the JSON API, the answer is one that its schema lists, and never a 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bigcatalog import fill
from paths import ROOT

from ckptcore.catalog import open_catalog

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.soak
def test_schemathesis_finds_nothing_in_the_page(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    catalog = str(tmp_path / "catalog.sqlite")
    open_catalog(catalog).close()
    fill(catalog, 20, 5, 480)
    command = [sys.executable, "-m", "deployments.page", "--catalog", catalog, "--port", "0"]
    environment = {**os.environ, "CKPTCORE_PAGE_TOKEN": "x" * 24}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        fuzz = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{address}openapi.json",
            "--checks",
            CHECKS,
            "--max-examples",
            os.environ.get("CKPTCORE_EXAMPLES", "200"),
            "--seed",
            "1",
            "--no-color",
            "--generation-database",
            "none",
        ]
        try:
            done = subprocess.run(
                fuzz, cwd=tmp_path, capture_output=True, text=True, timeout=540, check=False
            )
        finally:
            server.terminate()
            _, log = server.communicate(timeout=30)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "Traceback" not in log, log[-5000:]
