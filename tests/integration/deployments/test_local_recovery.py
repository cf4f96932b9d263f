"""`make up` after PostgreSQL crashed: it waits until connections are accepted, or starts the server again."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from ckptcore.errors import UsageError
from deployments.local import lifecycle, postgres, process
from deployments.local.services import SERVICES, Service, user_env
from deployments.local.state import Choices, LocalState, settle

# `up` leaves what it starts running.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")


class Crashed:
    """A service of `sleep`, as it looks while it recovers: ``looks`` times not ready."""

    def __init__(self, looks: int, *, recovering: bool = True) -> None:
        self.looks, self.recovering = looks, recovering
        self.lines: list[str] = []
        self.service = Service(
            "sleeper",
            command=lambda state: ["sleep", "60"],
            env=lambda state: {"PATH": "/usr/bin:/bin"},
            is_ready=lambda state: not self.looks and process.known("sleeper", state.folder) is not None,
            is_recovering=self.look,
            patience=1.0,
        )

    def look(self, state: LocalState) -> bool:
        self.looks = max(0, self.looks - 1)
        return self.recovering and self.looks > 0


@pytest.fixture
def state(tmp_path: Path) -> Iterator[LocalState]:
    for name in ("log", "run"):
        (tmp_path / name).mkdir()
    yield LocalState(tmp_path, Choices(), {})
    process.end("sleeper", tmp_path, 1.0, signal.SIGKILL)


def test_a_service_that_recovers_is_not_restarted(state: LocalState) -> None:
    crashed = Crashed(0)
    lifecycle._bring_up(crashed.service, state, crashed.lines.append)
    before = process.known("sleeper", state.folder)
    assert before is not None
    crashed.looks = 4
    lifecycle._bring_up(crashed.service, state, crashed.lines.append)
    assert process.known("sleeper", state.folder) == before
    assert crashed.lines[-1] == f"sleeper: recovered (process {before.pid})"
    assert crashed.looks == 0


def test_a_predecessor_that_still_ends_is_waited_for(
    state: LocalState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LOOK", 0.01)
    tries = state.folder / "tries"
    script = f"echo x >> {tries}; [ $(wc -l < {tries}) -ge 3 ] && sleep 60; echo 'is still in use'; exit 1"
    service = Service(
        "sleeper",
        command=lambda state: ["sh", "-c", script],
        env=lambda state: {"PATH": "/usr/bin:/bin"},
        is_ready=lambda state: tries.exists() and len(tries.read_text().split()) >= 3,
        must_wait=postgres.is_still_ending,
    )
    lines: list[str] = []
    lifecycle._bring_up(service, state, lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("sleeper: started")


def test_any_other_end_is_an_error_at_once(state: LocalState) -> None:
    service = Service(
        "sleeper",
        command=lambda state: ["sh", "-c", "echo no such folder; exit 1"],
        env=lambda state: {"PATH": "/usr/bin:/bin"},
        is_ready=lambda state: False,
        must_wait=postgres.is_still_ending,
    )
    with pytest.raises(UsageError, match="no such folder"):
        lifecycle._bring_up(service, state, print)


def test_a_failed_start_leaves_nothing_that_it_started(
    state: LocalState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleeper(name: str, *command: str) -> Service:
        return Service(
            name,
            command=lambda state: list(command),
            env=lambda state: {"PATH": "/usr/bin:/bin"},
            is_ready=lambda state: process.known(name, state.folder) is not None and "sleep" in command,
            patience=5.0,
        )

    services = (sleeper("old", "sleep", "60"), sleeper("new", "sleep", "60"), sleeper("bad", "false"))
    monkeypatch.setattr(lifecycle, "SERVICES", services)
    monkeypatch.setattr(lifecycle, "settle", lambda folder, wanted: state)
    monkeypatch.setattr(lifecycle, "receiver_config", lambda state: "")
    monkeypatch.setattr(lifecycle, "user_env", lambda state: "")
    lines: list[str] = []
    try:
        lifecycle._bring_up(services[0], state, lines.append)
        old = process.known("old", state.folder)
        with pytest.raises(UsageError, match="bad ended"):
            lifecycle.up(state.folder, None, lines.append)
        assert process.known("old", state.folder) == old
        assert old is not None
        assert process.known("new", state.folder) is None
        assert lines[-1] == "new: stopped"
    finally:
        for service in services:
            process.end(service.name, state.folder, 1.0, signal.SIGKILL)


def test_env_sh_has_what_the_senders_need() -> None:
    state = LocalState(
        Path("/state"),
        Choices(),
        {
            "CKPTCORE_HOOK_SECRET": "whsec_x",
            "PREFECT_PASSWORD": "p",
            "POSTGRES_PASSWORD": "q",
            "POSTGRES_CKPTCORE_PASSWORD": "r",
        },
    )
    lines = user_env(state)
    assert f"export CKPTCORE_HOOK_URL={state.receiver}/hooks/trainer\n" in lines
    assert "export CKPTCORE_HOOK_SECRET=whsec_x\n" in lines


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["server", "backend"])
def test_postgresql_is_killed_and_recovers(victim: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ckptcore-recovery-"))
    service = SERVICES[0]
    lines: list[str] = []
    try:
        state = settle(folder, Choices())
        lifecycle._bring_up(service, state, lines.append)
        url = state.database("postgresql", "ckptcore")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE t (a int)")
            connection.execute("INSERT INTO t VALUES (7)")
            known = process.known("postgres", folder)
            assert known is not None
            os.kill(known.pid if victim == "server" else connection.info.backend_pid, signal.SIGKILL)
        time.sleep(0.05)
        lifecycle._bring_up(service, state, lines.append)
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT a FROM t").fetchall() == [(7,)]
        if victim == "backend":
            assert process.known("postgres", folder) == known
    finally:
        process.end("postgres", folder, 30.0, signal.SIGINT)
        shutil.rmtree(folder, ignore_errors=True)
