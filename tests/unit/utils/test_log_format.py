"""JSON logs: one object a record, with what the work is about, and without credentials."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
from paths import ROOT

from ckptcore.errors import DiskFull, UsageError
from ckptcore.utils.log_format import JsonFormatter, log_fields, log_format
from ckptcore.utils.workers import run_jobs


def formatted(
    message: str, *args: object, error: BaseException | None = None, **extra: object
) -> dict[str, object]:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("ckptcore", logging.WARNING, __file__, 1, message, args, info)
    record.__dict__ |= extra
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert "\n" not in line
    found: dict[str, object] = json.loads(line)
    assert str(found.pop("time")).endswith("+00:00")
    return found


def test_a_record_has_the_fields_of_its_work() -> None:
    with (
        log_fields(source="s3://me:secret@b/run", flow_run="f"),
        log_fields(destination="/d", conversion=None),
    ):
        assert formatted("wrote %s\n\x1b[2J", "a") == {
            "level": "warning",
            "logger": "ckptcore",
            "message": "wrote a\n\x1b[2J",
            "source": "s3://b/run",
            "flow_run": "f",
            "destination": "/d",
        }
    assert set(formatted("after")) == {"level", "logger", "message"}
    assert formatted("of one record", ckptcore={"event": "e"})["event"] == "e"


def test_threads_have_the_fields_of_their_caller() -> None:
    seen: list[object] = []
    with log_fields(source="/runs/a"):
        run_jobs(iter(range(3)), lambda: lambda job: seen.append(formatted("x")["source"]), threads=3)
    assert seen == ["/runs/a"] * 3


def test_errors_and_prefects_records() -> None:
    assert formatted("x", error=DiskFull("7 bytes"))["code"] == "disk-full"
    with pytest.raises(ValueError, match="token") as caught:
        int("token=abc s3://u:p@b/x")
    text = str(formatted("x", error=caught.value)["traceback"])
    assert "ValueError" in text
    assert "u:p@" not in text
    assert formatted("x", flow_run_id="1", flow_name="export", task_run_id="2") == {
        "level": "warning",
        "logger": "ckptcore",
        "message": "x",
        "flow_run": "1",
        "flow": "export",
        "task_run": "2",
    }


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_LOG_FORMAT", "")
    assert log_format() == "text"
    monkeypatch.setenv("CKPTCORE_LOG_FORMAT", "xml")
    with pytest.raises(UsageError, match="text or json"):
        log_format()


@pytest.mark.parametrize(("chosen", "code"), [("json", 0), ("yaml", 2)])
def test_a_service_logs_as_the_variable_asks(chosen: str, code: int) -> None:
    program = (
        "import logging; from ckptcore.utils import terminal; terminal.log_to_stderr();"
        "logging.getLogger('deployments').info('a %s', 'b')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CKPTCORE_LOG_FORMAT": chosen},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    if chosen == "json":
        assert json.loads(done.stderr)["message"] == "a b"
    else:
        assert "must be text or json (got 'yaml')" in done.stderr
