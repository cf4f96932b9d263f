"""Fuzz: whatever is asked of the JSON API, the answer is one that its schema lists, and never a 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bigcatalog import fill, uuid_of
from paths import ROOT

from ckptcore.catalog import open_catalog

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = int(os.environ.get("CKPTCORE_EXAMPLES", "200"))
TOKEN = "x" * 24
# Ids that exist, for half of the runs: made-up ones end before most of the code.
REAL = f"""
[[operations]]
include-path-regex = "^/api/v1/checkpoints/"
parameters = {{ "path.ref" = {[uuid_of("c", n) for n in (1, 2, 100, 101)]} }}

[[operations]]
include-path-regex = "^/api/v1/conversions/"
parameters = {{ "path.ref" = {[uuid_of("v", n) for n in (1, 2, 50)]} }}

[[operations]]
include-path = "/api/v1/compare"
parameters = {{ "query.left" = "{uuid_of("c", 2)}", "query.right" = "{uuid_of("c", 4)}" }}

[[operations]]
include-path = "/api/v1/steps"
parameters = {{ "query.run" = ["run-1", "run-7"] }}

[[operations]]
include-path = "/api/v1/best"
parameters = {{ "query.metric" = ["loss", "mmlu"] }}
"""


@pytest.mark.soak
@pytest.mark.timeout(8 * EXAMPLES + 600)
@pytest.mark.parametrize("who", ["a stranger", "a user with ids that exist"])
def test_schemathesis_finds_nothing_in_the_page(who: str, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    catalog = str(tmp_path / "catalog.sqlite")
    open_catalog(catalog).close()
    fill(catalog, 20, 5, 480)
    with open_catalog(catalog) as opened, opened.writing() as conn:
        for name in ("loss", "mmlu"):
            conn.exec_driver_sql(
                "INSERT INTO metric (checkpoint_id, name, value, nonfinite, step, source, updated_at)"
                f" SELECT id, '{name}', id / 10.0, NULL, step, 'announced', created_at FROM checkpoint"
            )
    (tmp_path / "schemathesis.toml").write_text("" if who == "a stranger" else REAL)
    login = [] if who == "a stranger" else ["--header", f"Authorization: Bearer {TOKEN}"]
    command = [sys.executable, "-m", "ckptcore.page", "--catalog", catalog, "--port", "0"]
    log = tmp_path / "log"
    with (
        log.open("w") as lines,
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=lines,  # not a pipe, which would be full long before the end
            text=True,
            env={**os.environ, "CKPTCORE_PAGE_TOKEN": TOKEN},
        ) as server,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        fuzz = [sys.executable, "-m", "schemathesis.cli", "run", f"{address}openapi.json", *login]
        fuzz += ["--checks", CHECKS, "--max-examples", str(EXAMPLES), "--seed", "1", "--no-color"]
        fuzz += ["--generation-database", "none"]
        try:
            done = subprocess.run(fuzz, cwd=tmp_path, capture_output=True, text=True, check=False)
        finally:
            server.terminate()
            server.communicate(timeout=30)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "Traceback" not in log.read_text()
