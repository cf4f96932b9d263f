"""Engines: the same files, wherever tasks run; a worker that goes away costs nothing but time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import observe
import pytest
from observe import TENSORS
from paths import HELPERS, ROOT
from prefect import flow, task
from prefect.settings import PREFECT_API_URL, temporary_settings
from safetensors.torch import save_file

from ckptcore.errors import MissingDependency, UsageError, WorkerLost
from ckptcore.planning.request import Settings
from flows import _engine
from flows import _write as _writing
from flows._engine import RunningEngine, engine, running_engine
from flows.convert import convert

pytestmark = [pytest.mark.xdist_group("prefect"), pytest.mark.timeout(300)]


class KilledWorker(Exception):
    """Named as Dask's own."""


@pytest.mark.parametrize("spelled", ["", "processes", "threads=4", "dask:8786"])
def test_unknown_engines_are_refused(spelled: str) -> None:
    if not spelled:
        assert engine(None).here
        return
    with pytest.raises(UsageError, match="unknown engine"):
        engine(spelled)


def test_the_environment_names_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_ENGINE", "dask=tcp://10.0.0.1:8786")
    assert engine(None) == _engine.Engine("dask", "tcp://10.0.0.1:8786")
    assert engine("threads").here


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_an_engine_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, {"dask": "prefect_dask", "ray": "ray"}[name], None)
    with pytest.raises(MissingDependency, match=name) as caught, running_engine(engine(name), 1, "cpu"):
        pass
    assert f"ckptcore[{name}]" in caught.value.hint


def test_an_unreachable_cluster_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prefect_dask")
    monkeypatch.setattr(_engine, "CONNECT_SECONDS", 1.0)
    found = _engine.Engine("dask", "tcp://127.0.0.1:9")
    no_cluster = pytest.raises(UsageError, match=r"cannot reach a dask cluster at tcp://127\.0\.0\.1:9")
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        no_cluster,
        running_engine(found, 1, "cpu"),
    ):
        pass


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_remote_workers_need_a_reachable_server(name: str) -> None:
    pytest.importorskip(f"prefect_{name}", reason=f"the {name} extra is not installed")
    found = _engine.Engine(name, "10.0.0.1:8786")
    refused = pytest.raises(UsageError, match=f"the {name} workers at 10.0.0.1:8786 need a Prefect server")
    with temporary_settings({PREFECT_API_URL: None}), refused as caught, running_engine(found, 1, "cpu"):
        pass
    assert "PREFECT_API_URL" in caught.value.hint


def server_urls() -> tuple[str | None, str | None]:
    """The server of a worker, from the settings of its task and from its environment."""
    return PREFECT_API_URL.value(), os.environ.get("PREFECT_API_URL")


@pytest.mark.parametrize("name", ["dask", "ray"])
@pytest.mark.parametrize("configured", [pytest.param(True, marks=pytest.mark.soak), False])
def test_local_workers_use_the_server_of_this_process(
    name: str, configured: bool, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its URL each would start a server of its own."""
    pytest.importorskip(f"prefect_{name}", reason=f"the {name} extra is not installed")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for folder in (ROOT, HELPERS):  # or they could not read this file
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Use the server of the tests instead of the one that Prefect would start.
    from prefect.server.api.server import SubprocessASGIServer  # seconds: only the worker with this test

    monkeypatch.setattr(SubprocessASGIServer, "start", lambda self: None)
    monkeypatch.setattr(SubprocessASGIServer, "api_url", prefect_api)
    found = []

    @flow
    def ask() -> None:
        with running_engine(engine(name), 1, "cpu") as running:
            found.append(running.submit(task(server_urls)).result())

    if not configured:
        none = SimpleNamespace(api=SimpleNamespace(url=None))
        monkeypatch.setattr(_engine, "get_current_settings", lambda: none)
    ask()
    assert found == [(prefect_api, prefect_api)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a Dask scheduler that gives no task of a lost worker to another, and three processes of
    workers: of these one test kills the first."""
    never = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    with dask_cluster(tmp_path_factory.mktemp("dask"), 3, **never) as running:
        yield running


@contextmanager
def dask_cluster(
    folder: Path, workers_wanted: int, **settings: str
) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A Dask scheduler and its workers, each a process; settings: more of their environment."""
    pytest.importorskip("prefect_dask")
    found = folder / "scheduler.log"
    running = []
    here = str(ROOT)
    environment = (
        os.environ | {"PYTHONPATH": here, "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "info"} | settings
    )

    def start(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "dask", *arguments],
                stdout=out,
                stderr=out,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        running.append(process)
        return process

    try:
        start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", log=found)
        address = until(lambda: re.search(r"tcp://127\.0\.0\.1:\d+", found.read_text()), "a scheduler")[0]
        workers = [
            start(
                "worker",
                address,
                "--nthreads",
                "1",
                "--no-dashboard",
                "--no-nanny",
                "--host",
                "127.0.0.1",
                log=folder / f"worker-{i}.log",
            )
            for i in range(workers_wanted)
        ]
        for i in range(workers_wanted):
            log = folder / f"worker-{i}.log"
            until(lambda log=log: "Registered to" in log.read_text(), log.name)
        yield address, workers
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until(there: Any, what: str, seconds: float = 240.0) -> Any:
    """The first result of `there` that is true."""
    limit = time.monotonic() + seconds
    while not (found := there()):
        assert time.monotonic() < limit, f"waited {seconds} s for {what}"
        time.sleep(0.05)
    return found


# By default test_tasks_of_a_killed_worker_are_submitted_once_more: what Dask itself does is left to it here.
@pytest.mark.soak
def test_dask_writes_the_same_files_also_when_a_worker_is_killed(
    prefect_api: str, source: Path, catalog: str, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"catalog": catalog, **observe.ONE_FILE_EACH}
    convert(str(source), str(tmp_path / "threads"), **common)
    receipts = tmp_path / ".dask.ckptcore" / "receipts"
    with dask_cluster(tmp_path, 3) as (address, workers):
        killer = threading.Thread(
            target=lambda: (
                until(lambda: receipts.is_dir() and any(receipts.iterdir()), "a file"),
                workers[0].kill(),
            )
        )
        killer.start()
        convert(str(source), str(tmp_path / "dask"), engine=f"dask={address}", **common)
        killer.join()
        assert workers[0].wait() == -signal.SIGKILL
    assert observe.contents(tmp_path / "dask") == observe.contents(tmp_path / "threads")
    assert observe.equal(observe.tensors(tmp_path / "dask"), observe.TENSORS)


@pytest.mark.soak
def test_tasks_of_a_killed_worker_are_submitted_once_more(
    prefect_api: str,
    source: Path,
    catalog: str,
    tmp_path: Path,
    cluster: tuple[str, list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dask itself gives the tasks of a lost worker to another, three times, unless that is off."""
    common: dict[str, Any] = {"catalog": catalog, **observe.ONE_FILE_EACH}
    convert(str(source), str(tmp_path / "threads"), **common)
    receipts = tmp_path / ".dask.ckptcore" / "receipts"
    lost: list[str] = []

    def is_lost(error: BaseException) -> bool:
        lost.append(type(error).__name__)
        return _engine.is_lost(error)

    monkeypatch.setattr(_writing, "is_lost", is_lost)
    from distributed import Client

    address, workers = cluster

    def kill() -> None:
        with Client(address, set_as_default=False) as client:  # type: ignore[no-untyped-call]
            pids = client.run(os.getpid)  # type: ignore[no-untyped-call]
            (where,) = (worker for worker, pid in pids.items() if pid == workers[0].pid)
            until(lambda: receipts.is_dir() and any(receipts.iterdir()), "a file")
            workers[0].send_signal(signal.SIGSTOP)  # so that it has a task, and keeps it
            until(lambda: client.processing().get(where), "a task")  # type: ignore[no-untyped-call]
            workers[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    convert(str(source), str(tmp_path / "dask"), engine=f"dask={address}", **common)
    killer.join()
    assert workers[0].wait() == -signal.SIGKILL
    assert lost == ["KilledWorker"]
    assert observe.contents(tmp_path / "dask") == observe.contents(tmp_path / "threads")


def test_a_large_file_is_written_in_parts_by_several_workers(
    prefect_api: str, catalog: str, tmp_path: Path, cluster: tuple[str, list[subprocess.Popen[bytes]]]
) -> None:
    source = tmp_path / "source.safetensors"
    save_file({f"{name}.{part}": tensor.clone() for name, tensor in TENSORS.items() for part in "ab"}, source)
    common: dict[str, Any] = {"catalog": catalog, "memory": "1MiB", "workers": 2, "batch": "40KiB"}
    convert(str(source), str(tmp_path / "threads.pt"), **common)
    state: Any = convert(
        str(source), str(tmp_path / "dask.pt"), engine=f"dask={cluster[0]}", return_state=True, **common
    )
    assert (tmp_path / "dask.pt").read_bytes() == (tmp_path / "threads.pt").read_bytes()
    run = state.state_details.flow_run_id
    assert observe.eventually(lambda: "join dask.pt" in observe.tasks(run))
    assert sum(name.startswith("write dask.pt, part ") for name in observe.tasks(run)) > 1


@pytest.fixture
def ray_here(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requirements of a local Ray cluster."""
    pytest.importorskip("prefect_ray", reason="the ray extra is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


@pytest.mark.usefixtures("ray_here")
def test_ray_writes_the_same_files(source: Path, catalog: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"catalog": catalog, **observe.ONE_FILE_EACH}
    convert(str(source), str(tmp_path / "threads"), **common)
    convert(str(source), str(tmp_path / "ray"), engine="ray", **common)
    assert observe.contents(tmp_path / "ray") == observe.contents(tmp_path / "threads")


def ray_tasks() -> list[int]:
    """The worker processes of Ray that have a task: Ray names them by what they do."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            title = (entry / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if re.match(rb"ray::(?!IDLE|\w*Agent)", title):  # agents run no tasks
            found.append(int(entry.name))
    return found


@pytest.mark.usefixtures("ray_here")
def test_ray_writes_the_same_files_also_when_a_worker_is_killed(
    source: Path, catalog: str, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"catalog": catalog, **observe.ONE_FILE_EACH}
    convert(str(source), str(tmp_path / "threads"), **common)
    receipts = tmp_path / ".ray.ckptcore" / "receipts"
    killed: list[int] = []

    def kill() -> None:
        until(lambda: receipts.is_dir() and any(receipts.iterdir()), "a file")
        killed.append(until(ray_tasks, "a task")[0])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    convert(str(source), str(tmp_path / "ray"), engine="ray", **common)
    killer.join()
    assert killed
    assert observe.contents(tmp_path / "ray") == observe.contents(tmp_path / "threads")


@pytest.mark.parametrize("losses", [1, 2])
def test_a_batch_whose_worker_is_lost_is_tried_once_more(
    prefect_api: str, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    seen: list[str] = []

    @task
    def write(
        name: str, plan_uri: str, indices: list[int], nbytes: int, settings: Settings, observe: bool
    ) -> None:
        seen.append(name)
        if name == "b" and seen.count("b") <= losses:
            raise KilledWorker(name)

    monkeypatch.setattr(_writing, "write", write)

    prepared: Any = SimpleNamespace(
        files=[SimpleNamespace(path=path, index=i, nbytes=10**i) for i, path in enumerate("abc")],
        plan_uri="p",
    )

    @flow
    def run() -> list[int]:
        with running_engine(engine("threads"), 2, "cpu") as running:
            work = _writing._work(prepared, Settings(), 1, large=False, observe=False)
            return sorted(nbytes for nbytes, _ in _writing._finished(prepared, work, running))

    if losses == 1:
        assert run() == [1, 10, 100]
        assert sorted(seen) == ["a", "b", "b", "c"]
    else:
        with pytest.raises(WorkerLost, match="cannot write b: 2 workers"):
            run()


def test_threads_have_as_many_slots_as_workers() -> None:
    with running_engine(engine("threads"), 3, "cpu") as running:
        assert isinstance(running, RunningEngine)
        assert running.slots == 3
