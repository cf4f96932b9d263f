"""What a run by hand costs beside its conversion: modules, requests, certificates and console."""

from __future__ import annotations

import inspect
import io
import logging
import os
import re
import ssl
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from observe import ONE_FILE_EACH
from paths import ROOT
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import (
    PREFECT_DEFAULT_RESULT_STORAGE_BLOCK,
    PREFECT_LOGGING_MARKUP,
    PREFECT_RESULTS_PERSIST_BY_DEFAULT,
    get_current_settings,
    temporary_settings,
)

from flows import _flow, _start
from flows._command import write_plainly
from flows._heartbeats import _OwnRun
from flows._prefect import read_no_authorities
from flows.convert import convert

pytestmark = pytest.mark.xdist_group("prefect")

# What Prefect 3.8 imports for a run, and what ckptcore does; a few more of either are no news.
MODULES = 1860
# Of Prefect's server and of forms, which a run by hand needs none of.
FORBIDDEN = ("fastapi", "uvicorn", "alembic", "prefect.server.api", "prefect.runner", "prefect.deployments")


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
    ("url", "trusts"),
    [
        ("http://127.0.0.1:4200/api", False),
        ("http://localhost:4200/api", False),
        ("http://[::1]:4200/api", False),
        ("https://127.0.0.1:4200/api", True),
        ("http://127.0.0.1.prefect.example/api", True),
        ("http://prefect.example/api", True),
        ("", True),
    ],
)
def test_a_server_on_this_machine_needs_no_authorities(url: str, trusts: bool) -> None:
    env = {"PREFECT_API_URL": url, "SSL_CERT_FILE": "mine"}
    read_no_authorities(env)
    assert ("PREFECT_API_SSL_CERT_FILE" not in env) is trusts
    assert env["SSL_CERT_FILE"] == "mine"  # that of all other clients
    if not trusts:
        context = ssl.create_default_context(cafile=env["PREFECT_API_SSL_CERT_FILE"])
        (only,) = context.get_ca_certs()
        assert only["subject"] == only["issuer"]
        assert context.verify_mode is ssl.CERT_REQUIRED
    env = {"PREFECT_API_URL": url, "PREFECT_API_SSL_CERT_FILE": "mine"}
    read_no_authorities(env)
    assert env["PREFECT_API_SSL_CERT_FILE"] == "mine"


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


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (None, None),
        (PREFECT_RESULTS_PERSIST_BY_DEFAULT, True),
        (PREFECT_DEFAULT_RESULT_STORAGE_BLOCK, "s3-bucket/a"),
    ],
)
def test_the_result_of_a_run_by_hand_is_stored_only_where_the_user_says_so(
    setting: object, value: object
) -> None:
    with temporary_settings({setting: value} if setting else {}):
        own = _OwnRun.of(convert, lambda flow, run, state: None)
        here = get_current_settings().results.local_storage_path
    expected = (None, None) if setting else (False, here)
    assert (own.persist_result, own.result_storage) == expected
    assert (convert.persist_result, convert.result_storage) == (None, None)


def test_the_flow_of_a_command_has_its_parameters_and_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def declared(source: str, *, workers: int = 2) -> None:
        """Do nothing."""

    monkeypatch.setattr(_start, "_command", True)
    made = _flow.flow(name="declared")(declared)
    assert made.parameters.properties == {}
    assert inspect.signature(made.fn) == inspect.signature(made) == inspect.signature(declared)
    assert list(inspect.signature(made).parameters) == ["source", "workers"]
    assert made.validate_parameters({"source": "a", "workers": "3"}) == {"source": "a", "workers": 3}
    monkeypatch.setattr(_start, "_command", False)
    assert set(_flow.flow(name="declared")(declared).parameters.properties) == {"source", "workers"}
    assert {"source", "workers"} <= set(convert.parameters.properties)
