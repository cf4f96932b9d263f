"""A service without ``CKPTCORE_CATALOG_URL`` says so at its start, and which catalog it uses instead."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptcore.errors import UsageError
from deployments import worker
from deployments.receiver import __main__ as receiver
from deployments.receiver import serve

CONFIG = """
roots = ["/checkpoints"]
destination = "/exports/{path}"
[sources.trainer]
kind = "bearer"
secrets = ["TOKEN"]
"""


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No catalog in the environment, and a data folder of the test's own."""
    monkeypatch.delenv("CKPTCORE_CATALOG_URL", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("TOKEN", "t" * 24)
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")  # which the receiver would set for good


@contextmanager
def own_logs() -> Iterator[None]:
    """Let a program send its log to standard error, as in a process of its own: pytest has handlers, too."""
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:] = kept
        root.setLevel(level)


def start_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a worker whose own process ends at once."""
    real = subprocess.Popen
    monkeypatch.setattr(worker.subprocess, "Popen", lambda _, **how: real([sys.executable, "-c", ""], **how))
    monkeypatch.setattr(worker, "_release_runs", lambda *_: None)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    with own_logs():
        # A name of its own: a worker ends the processes that one of its name has left.
        assert worker.main(["--pool", "p", "--name", str(tmp_path)]) == 0


def start_receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a receiver as far as its address, which is taken."""

    def listening(host: str, port: int) -> Any:
        raise UsageError(f"cannot listen on {host}:{port}")

    monkeypatch.setattr(serve.http_server, "listening", listening)
    with pytest.raises(SystemExit):
        run_receiver(tmp_path, monkeypatch)


def check_receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the file of a receiver."""
    run_receiver(tmp_path, monkeypatch, "--check")


def run_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, config: str = CONFIG
) -> None:
    """Run the receiver's command line with a file."""
    file = tmp_path / "receiver.toml"
    file.write_text(config)
    monkeypatch.setattr(sys, "argv", ["receiver", str(file), *arguments])
    with own_logs():
        receiver.main()


STARTS = [start_worker, start_receiver, check_receiver]


@pytest.mark.parametrize("start", STARTS)
def test_an_unset_catalog_is_stated(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path, monkeypatch)
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "CKPTCORE_CATALOG_URL" in each]
    assert "WARNING" in line
    assert "CKPTCORE_CATALOG_URL is not set" in line
    assert str(tmp_path / "data") in line
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path / "catalog.sqlite"))
    start(tmp_path, monkeypatch)
    assert "CKPTCORE_CATALOG_URL" not in capfd.readouterr().err


@pytest.mark.parametrize("start", STARTS)
def test_it_is_one_object_of_a_json_log(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPTCORE_LOG_FORMAT", "json")
    start(tmp_path, monkeypatch)
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "CKPTCORE_CATALOG_URL" in each]
    found = json.loads(line)
    assert found["level"] == "warning"
    assert found["message"].startswith("CKPTCORE_CATALOG_URL is not set")


def test_the_catalog_of_the_receivers_file_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = f'catalog = "{tmp_path}/catalog.sqlite"\n{CONFIG}'
    run_receiver(tmp_path, monkeypatch, "--check", config=config)
    assert "CKPTCORE_CATALOG_URL" not in capfd.readouterr().err
