"""Parts: what flows are made of, without a server."""

from __future__ import annotations

import doctest
import importlib
import logging
import sys
import threading
from pathlib import Path
from queue import Queue
from uuid import UUID, uuid4

import pytest

from ckptcore.conversion.pipeline import Prepared
from ckptcore.errors import DamagedCheckpoint, DiskFull, StorageTrouble, finding
from ckptcore.planning.request import Settings
from flows import _command, _prefect, _write
from flows._engine import HERE
from flows._naming import explain
from flows._write import MAX_TASKS, batches
from flows.convert import convert
from tasks import logs, retry
from tasks import write as progress
from tasks.artifacts import artifact_later, sending_artifacts

MODULES = ["flows._write", "flows._naming", "tasks.artifacts"]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("sizes", [[], [0], [0] * 999, [1] * 999, [7, 1] * 500, [1] * 998 + [10**12]])
def test_every_file_is_in_one_batch_and_batches_are_limited(sizes: list[int]) -> None:
    found = batches(sizes, nbytes=1)
    assert [index for batch in found for index in batch] == list(range(len(sizes)))
    assert all(found)
    assert len(found) <= MAX_TASKS


@pytest.fixture
def before_prefect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delitem(sys.modules, "prefect")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_without_a_configured_server_prefect_gets_a_separate_home(before_prefect: Path) -> None:
    env: dict[str, str] = {}
    _prefect.set_environment(env)
    assert env == _prefect.QUIET | {"PREFECT_HOME": str(before_prefect / "state" / "ckptcore" / "prefect")}
    assert (before_prefect / "state" / "ckptcore").is_dir()


@pytest.mark.parametrize(
    "given",
    [
        {"PREFECT_API_URL": "http://prefect.example/api"},
        {"PREFECT_PROFILE": "work"},
        {"PREFECT_HOME": "/somewhere/else"},
    ],
)
def test_settings_of_the_user_are_kept(before_prefect: Path, given: dict[str, str]) -> None:
    env = given | {"PREFECT_SERVER_LOGGING_LEVEL": "DEBUG"}
    _prefect.set_environment(env)
    assert env == _prefect.QUIET | given | {"PREFECT_SERVER_LOGGING_LEVEL": "DEBUG"}


def test_a_server_in_the_users_profile_is_used(before_prefect: Path) -> None:
    profiles = before_prefect / ".prefect" / "profiles.toml"
    profiles.parent.mkdir()
    profiles.write_text('active = "work"\n[profiles.work]\nPREFECT_API_URL = "http://prefect.example/api"\n')
    env: dict[str, str] = {}
    _prefect.set_environment(env)
    assert "PREFECT_HOME" not in env

    profiles.write_text('active = "ephemeral"\n[profiles.ephemeral]\n')
    _prefect.set_environment(env)
    assert "PREFECT_HOME" in env


def test_without_a_writable_home_a_temporary_folder_is_used(
    before_prefect: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before_prefect / "state").write_text("a file where the folder should be")
    env: dict[str, str] = {}
    _prefect.set_environment(env)
    home = Path(env["PREFECT_HOME"])
    assert home.is_dir()
    home.rmdir()


def test_the_environment_is_not_changed_after_prefect_is_imported() -> None:
    assert "prefect" in sys.modules
    env: dict[str, str] = {}
    _prefect.set_environment(env)
    assert env == {}


@pytest.mark.parametrize(("error", "traceback"), [(DiskFull("full"), False), (KeyError("a defect"), True)])
def test_only_unknown_errors_come_with_a_traceback(error: Exception, traceback: bool) -> None:
    seen: list[logging.LogRecord] = []
    collector = logging.Handler()
    collector.emit = seen.append  # type: ignore[method-assign]
    logs.listen()
    log = logging.getLogger("prefect.task_runs")
    log.addHandler(collector)
    try:
        log.error("failed", exc_info=error)
    finally:
        log.removeHandler(collector)
    assert [record.exc_info is not None for record in seen] == [traceback]


def test_an_error_has_its_findings_and_the_next_step() -> None:
    found = [finding("hole", "coverage", f"tensor {i} has a hole") for i in range(7)]
    lines = explain(DamagedCheckpoint("7 findings", hint="look", findings=found)).splitlines()
    assert lines[0] == "damaged: 7 findings"
    assert lines[1] == "- hole: tensor 0 has a hole"
    assert lines[-2:] == ["- and 2 more", "next: look"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(StorageTrouble("reset"), True), (DiskFull("full"), False), (OSError(5, "io"), False)],
)
def test_transient_errors_are_retried(error: Exception, expected: bool) -> None:
    from prefect.states import Failed

    assert retry.should_retry(None, None, Failed(data=error)) is expected  # type: ignore[arg-type]


class TestProgress:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, str]]:
        calls: list[tuple[str, float, str]] = []

        def create(percent: float, description: str) -> UUID:
            calls.append(("create", percent, description))
            return uuid4()

        def update(artifact: UUID, percent: float, description: str) -> None:
            calls.append(("update", percent, description))

        monkeypatch.setattr(progress, "create_progress_artifact", create)
        monkeypatch.setattr(progress, "update_progress_artifact", update)
        return calls

    def test_a_short_batch_has_no_artifact(self, calls: list[tuple[str, float, str]]) -> None:
        progress.BatchProgress("a", 100)("write", 50, 200)
        assert calls == []

    def test_a_long_batch_is_updated_from_any_thread(
        self, calls: list[tuple[str, float, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(progress, "SECONDS", 0.0)
        meter = progress.BatchProgress("a", 2048)
        for done in (1024, 2048):
            thread = threading.Thread(target=meter, args=("write", done, 9999))
            thread.start()
            thread.join()
        assert calls == [
            ("create", 50.0, "a: 1.0 KiB of 2.0 KiB"),
            ("update", 100.0, "a: 2.0 KiB of 2.0 KiB"),
        ]

    def test_a_failing_server_does_not_stop_the_batch(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def create(percent: float, description: str) -> UUID:
            raise ConnectionError("no server")

        monkeypatch.setattr(progress, "SECONDS", 0.0)
        monkeypatch.setattr(progress, "create_progress_artifact", create)
        meter = progress.BatchProgress("a", 2048)
        meter("write", 1024, 9999)
        monkeypatch.delattr(progress, "create_progress_artifact")  # and it is not tried again
        meter("write", 2048, 9999)
        assert set(caplog.messages) == {"cannot show the progress of a any more: no server"}


def test_progress_is_updated_at_intervals_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[tuple[float, str]] = []
    updates: list[tuple[float, str]] = []

    def create(percent: float, key: str, text: str) -> UUID:
        created.append((percent, text))
        return uuid4()

    monkeypatch.setattr(_write, "create_progress_artifact", create)
    monkeypatch.setattr(
        _write, "update_progress_artifact", lambda artifact, percent, text: updates.append((percent, text))
    )
    monkeypatch.setattr(_write, "_finished", lambda prepared, work, running: iter([(1024, None)] * 20))
    prepared = Prepared("plan", (), 0, 20 << 10, 0, (), (), (), (), (), "", "", "", {})
    _write.write_all(prepared, Settings(), 1024, HERE)
    assert created == [(100.0, "20.0 KiB of 20.0 KiB")]  # it is written at once: one request
    assert updates == []
    created.clear()
    monkeypatch.setattr(_write, "SECONDS", -1.0)
    _write.write_all(prepared, Settings(), 1024, HERE)
    assert created == [(5.0, "1.0 KiB of 20.0 KiB")]
    assert len(updates) == 19
    assert updates[-1] == (100.0, "20.0 KiB of 20.0 KiB")


def test_artifacts_are_sent_beside_a_run_and_before_its_end() -> None:
    go, sent = threading.Event(), []

    def create(text: str) -> str:
        assert go.wait(60)
        sent.append(text)
        if text == "b":
            raise ConnectionError("no server")
        return text

    with sending_artifacts():
        handles = [artifact_later(create, text) for text in "abc"]
        assert not sent  # the run goes on
        go.set()
    assert sent == ["a", "b", "c"]
    assert [handle.result(0) for handle in handles] == ["a", None, "c"]
    assert artifact_later(create, "d").result(0) == sent[-1] == "d"  # nobody sends later: at once


def test_artifacts_of_a_run_are_sent_until_the_command_ends() -> None:
    go, sent = threading.Event(), []

    def create(text: str) -> None:
        assert go.wait(60)
        sent.append(text)

    with sending_artifacts():
        with sending_artifacts():  # that of the flow
            artifact_later(create, "a")
        assert not sent  # Prefect sets the state of the run meanwhile
        go.set()
    assert sent == ["a"]


def test_a_stopped_run_sends_no_more_artifacts() -> None:
    begun, go, sent = threading.Event(), threading.Event(), []

    def create(text: str) -> None:
        begun.set()
        assert go.wait(60)
        sent.append(text)

    def stop() -> None:
        with sending_artifacts():
            for text in "ab":
                artifact_later(create, text)
            assert begun.wait(60)
            threading.Timer(0.05, go.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert sent == ["a"]


def test_a_run_imports_its_catalog_while_it_waits_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: Queue[str] = Queue()

    def serve() -> None:
        assert begun.get(timeout=60) == "ckptcore.catalog.catalog"
        raise SystemExit(7)

    monkeypatch.setattr(_command, "import_module", begun.put)
    monkeypatch.setattr(_command, "serve_while_alive", serve)
    with pytest.raises(SystemExit, match="7"):
        _command.main(convert, ["a", "b"])
