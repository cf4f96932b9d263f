"""`make up` restarts what ended, reports what does not start, and leaves no process behind."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psycopg
import pytest
from local_system import state as new_state
from stack import eventually

from ckptcore.errors import UsageError
from deployments.local import system
from deployments.local.system import State
from deployments.processes import having
from deployments.receiver.settings import load

FREE = dict.fromkeys(("prefect_port", "receiver_port", "postgres_port", "worker_port"), 0)
Programs = Callable[[Mapping[str, str]], None]
STAYS = "touch {name}.ready && exec sleep 60"
OPTIONS = "autostart=false\nautorestart=true\nstartsecs=5\nstartretries=10\nredirect_stderr=true\n"


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not below pytest's own folder: the path of a socket is short.
    place = Path(tempfile.mkdtemp(prefix="ckptcore-local-"))
    yield place
    system.down(place, 0)
    assert having(f"CKPTCORE_UP={place}") == []
    shutil.rmtree(place)


@pytest.fixture
def programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Take shell scripts instead of the services; one is ready when it has made a file NAME.ready."""
    template = system.filled

    def use(scripts: Mapping[str, str]) -> None:
        def filled(name: str, state: State) -> str:
            if not name.endswith(".conf"):
                return ""
            text = template(name, state).partition("[program:")[0]
            for program, script in scripts.items():
                command = shlex.quote(script.format(name=program))
                text += f"[program:{program}]\ncommand=/bin/sh -c {command}\ndirectory={folder}\n{OPTIONS}"
                text += f"stdout_logfile={folder}/log/{program}.log\n"
            return text

        monkeypatch.setattr(system, "filled", filled)
        monkeypatch.setattr(system, "ORDER", tuple(scripts))
        monkeypatch.setattr(system, "READY", dict.fromkeys(scripts, ""))

    def is_ready(name: str, state: State) -> bool:
        return (folder / f"{name}.ready").exists() and name in system.pids(folder)

    # PostgreSQL need not be installed.
    monkeypatch.setattr(system.database_server, "programs", lambda: Path("/usr/bin"))
    monkeypatch.setattr(system, "is_ready", is_ready)
    return use


def test_what_ends_is_restarted_and_what_runs_stays(
    folder: Path, programs: Programs, capfd: pytest.CaptureFixture[str]
) -> None:
    programs({"first": STAYS, "second": STAYS})
    system.up(folder, FREE)
    before = system.pids(folder)
    os.kill(before["first"], signal.SIGKILL)
    assert eventually(lambda: system.pids(folder).get("first", 0) not in (0, before["first"]), 30)
    assert system.pids(folder)["second"] == before["second"]
    after = system.pids(folder)
    system.up(folder, {})
    assert system.pids(folder) == after
    assert f"second: already running (process {before['second']})" in capfd.readouterr().out


def test_what_is_chosen_differently_is_restarted(folder: Path, programs: Programs) -> None:
    programs({"first": STAYS, "second": STAYS})
    system.up(folder, FREE)
    before = system.pids(folder)
    programs({"first": STAYS, "second": ": changed; " + STAYS})
    system.up(folder, {})
    assert system.pids(folder)["first"] == before["first"]
    assert system.pids(folder)["second"] not in (0, before["second"])


def test_a_predecessor_that_still_ends_is_waited_for(folder: Path, programs: Programs) -> None:
    ended = "echo x >> tries; [ $(wc -l < tries) -ge 2 ] && touch {name}.ready && exec sleep 60; exit 1"
    programs({"postgres": ended})
    system.up(folder, FREE)
    assert len((folder / "tries").read_text().split()) == 2


def test_a_failed_start_is_an_error_at_once_and_leaves_nothing_that_it_started(
    folder: Path, programs: Programs
) -> None:
    programs({"old": STAYS})
    system.up(folder, FREE)
    old = system.pids(folder)
    programs({"old": STAYS, "new": STAYS, "bad": "echo no such folder; exit 1"})
    with pytest.raises(UsageError, match="bad ended:\nno such folder"):
        system.up(folder, {})
    assert system.pids(folder) == old


def test_what_a_killed_supervisor_leaves_is_ended(folder: Path, programs: Programs) -> None:
    programs({"first": STAYS})
    system.up(folder, FREE)
    (before,) = system.pids(folder).values()
    supervisor = int((folder / "run" / "supervisord.pid").read_text())
    os.kill(supervisor, signal.SIGKILL)
    assert eventually(lambda: system.pids(folder) == {}, 10)
    system.up(folder, {})
    assert before not in having(f"CKPTCORE_UP={folder}")
    assert [*system.pids(folder)] == ["first"]


def test_env_sh_has_what_the_senders_need() -> None:
    state = new_state(CKPTCORE_HOOK_SECRET="whsec_x")
    lines = system.filled("env.sh", state)
    assert f"export CKPTCORE_HOOK_URL='{state['receiver']}/hooks/trainer'\n" in lines
    assert "export CKPTCORE_HOOK_SECRET='whsec_x'\n" in lines


def test_the_page_is_served_and_its_address_is_printed_with_the_others(folder: Path) -> None:
    """`status` in another shell finds the folder by what `env.sh` says."""
    state = new_state(folder=folder)
    assert f"export CKPTCORE_STATE='{folder}'\n" in system.filled("env.sh", state)
    addresses = system.filled("next_steps.txt", state).split("Announce")[0]
    for address in (f"{state['receiver']}/catalog", state["prefect"], f"{state['receiver']}/hooks/trainer"):
        assert address in addresses
    file = folder / "receiver.toml"
    file.write_text(system.filled("receiver.toml", state))
    settings, _ = load(file, state)
    assert settings.page is not None
    assert settings.page.path == "/catalog"


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["server", "backend"])
def test_postgresql_is_killed_and_recovers(
    folder: Path, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "ORDER", ("initdb", "postgres", "databases"))
    state = system.up(folder, FREE)
    url = state["catalog"].replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (a int)")
        connection.execute("INSERT INTO t VALUES (7)")
        server = system.pids(folder)["postgres"]
        os.kill(server if victim == "server" else connection.info.backend_pid, signal.SIGKILL)
    system.up(folder, {})
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT a FROM t").fetchall() == [(7,)]
    if victim == "backend":
        assert system.pids(folder)["postgres"] == server
