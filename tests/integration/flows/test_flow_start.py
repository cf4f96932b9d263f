"""What a run by hand costs beside its conversion: modules, requests and console."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from observe import ONE_FILE_EACH
from paths import ROOT
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_LOGGING_MARKUP, temporary_settings

from flows._command import write_plainly

pytestmark = pytest.mark.xdist_group("prefect")

# What Prefect 3.8 imports for a run, and what ckptcore does; a few more of either are no news.
MODULES = 1960
# Of Prefect's server and of deployments, which a run by hand needs none of.
FORBIDDEN = ("uvicorn", "alembic", "prefect.server.api", "prefect.runner", "prefect.deployments")


def test_a_run_makes_few_requests_and_imports_no_server(
    prefect_api: str, source: Path, tmp_path: Path, catalog: str
) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ONE_FILE_EACH.items()]
    command = [sys.executable, "-X", "importtime", "-m", "flows.convert"]
    done = subprocess.run(
        [*command, str(source), str(tmp_path / "out"), *options, "--catalog", catalog],
        cwd=ROOT,
        env=os.environ | {"PREFECT_API_URL": prefect_api, "PREFECT_LOGGING_ROOT_LEVEL": "INFO"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    imported = re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert len(imported) < MODULES
    assert [name for name in imported if name.startswith(FORBIDDEN)] == []
    requests = re.findall(r"HTTP Request: (\w+) \S+?/api(/[a-z_]+)", done.stderr)
    made = Counter(f"{method} {path}" for method, path in requests)
    assert made["POST /artifacts"] == 6
    assert made["PATCH /artifacts"] == 0  # what is written at once has one artifact of its progress
    assert made["POST /flow_runs"] == 3  # it is created, and begins and ends
    assert made["GET /admin"] <= 2  # the version, once for each kind of client: no storage of results
    assert sum(made.values()) <= 20, made
    # Pipes get lines as they are, with all that a terminal shows.
    assert re.search(r"^[\d:.]+ \| INFO    \| ckptcore.tasks - published ", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("terminal", "markup", "plain"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_lines_for_a_pipe_are_written_without_rich(
    terminal: bool, markup: bool, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    stream = io.StringIO()
    root = logging.getLogger()
    seen: list[logging.LogRecord] = []

    def see(record: logging.LogRecord) -> bool:
        seen.append(record)
        return True

    with temporary_settings({PREFECT_LOGGING_MARKUP: markup}):
        handler = PrefectConsoleHandler(stream, level=logging.INFO)
        handler.setFormatter(logging.Formatter("%(levelname)s - %(message)s"))
        handler.addFilter(see)
        other, kept = logging.NullHandler(), root.handlers
        root.handlers = [handler, other]
        try:
            write_plainly()
            (now,) = (one for one in root.handlers if one is not other)
        finally:
            root.handlers = kept
    assert (type(now) is logging.StreamHandler) is plain
    assert (now is handler) is not plain
    now.handle(logging.LogRecord("a", logging.INFO, "", 0, "/a/:warning:/[b]\x1b[2J", None, None))
    assert len(seen) == 1
    assert now.level == logging.INFO
    if plain:
        assert stream.getvalue() == "INFO - /a/:warning:/[b]\\x1b[2J\n"
