"""Workers in processes of their own: answers, errors, ends, and no worker without its parent."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from paths import ROOT

from ckptcore.errors import DiskFull, UsageError, WorkerLost
from ckptcore.utils import command_process, memory, process_pool
from ckptcore.utils.command_process import VARIABLE, process_count
from ckptcore.utils.process_pool import ProcessPool

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests/jobs'}")


def pool(folder: Path, count: int = 2, imports: Sequence[str] = (), **acts: str) -> ProcessPool:
    setup = {"folder": str(folder)} | {name.removeprefix("job"): act for name, act in acts.items()}
    return ProcessPool("pool_job", [setup] * count, imports=imports)


def within(seconds: float, check: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


class Lines(logging.Handler):
    """Collects messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_answers_reports_progress_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, logged, logger = list[int](), Lines(), logging.getLogger("ckptcore")
    monkeypatch.setattr(logger, "handlers", [logged])
    monkeypatch.setattr(logger, "level", logging.INFO)
    with pool(tmp_path, job1="meets", job2="meets") as workers:
        answers = dict(workers.run(range(1, 8), done.append))
        reports = workers.finish()
    assert sorted(answers) == [*range(1, 8)]
    assert len(set(answers.values()) | {os.getpid()}) == 3  # two workers, and this process did nothing
    assert sum(done) == sum(range(1, 8))
    assert sorted(job for jobs in reports for job in jobs) == [*range(1, 8)]
    assert sorted(logged.lines) == [f"job {n}" for n in range(1, 8)]


def test_the_first_error_ends_the_others(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFull, match="no room") as raised,
        pool(tmp_path, job1="waits", job2="full") as workers,
    ):
        list(workers.run([1, 2, 3], lambda nbytes: None))
    assert raised.value.values["free"] == 7
    within(20, (tmp_path / "cleaned").exists)  # it was asked to end, and discarded what it had begun


def test_a_defect_has_its_place(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"KeyError: 'a defect' .*pool_job.py:"),
        pool(tmp_path, job1="defect") as w,
    ):
        list(w.run([1], lambda nbytes: None))


@pytest.mark.parametrize("act", ["killed", "kills-server"])
def test_a_killed_process_is_lost(tmp_path: Path, act: str) -> None:
    with pytest.raises(WorkerLost, match="ended by signal 9"), pool(tmp_path, job2=act) as workers:
        list(workers.run([1, 2, 3], lambda nbytes: None))


@pytest.mark.parametrize("module", ["imported_job", "threaded_job"])
def test_imports_are_paid_for_once_without_forking_threads(tmp_path: Path, module: str) -> None:
    with pool(tmp_path, imports=[module], module=module, job1="meets", job2="meets") as workers:
        pids = {pid for _, pid in workers.run([1, 2], lambda nbytes: None)}
        workers.finish()
    imported, servers = zip(*[path.read_text().split() for path in tmp_path.glob("meets-*")], strict=True)
    assert len(pids) == 2
    assert len(set(servers)) == 1
    assert set(imported) == (set(servers) if module == "imported_job" else set(map(str, pids)))


def test_a_stopped_fork_server_delays_nothing(tmp_path: Path) -> None:
    began = time.monotonic()
    with pool(tmp_path, job1="stops-server") as workers:
        assert len(list(workers.run([1, 2, 3], lambda nbytes: None))) == 3
        workers.finish()
    assert time.monotonic() < began + process_pool._ENDS_WITHIN


def test_a_module_that_cannot_be_imported_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="ModuleNotFoundError"),
        ProcessPool("no_such_job", [{}]) as workers,
    ):
        list(workers.run([1], lambda nbytes: None))


@pytest.mark.parametrize("jobs", [[1], []])
def test_the_error_of_a_worker_that_ended_before_its_next_message(
    jobs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = process_pool._Worker.send

    def send_after_its_end(worker: process_pool._Worker, kind: int, value: object) -> None:
        hang_up = select.poll()
        hang_up.register(worker.waits_on, select.POLLHUP)
        assert hang_up.poll(20_000)
        send(worker, kind, value)

    def reports() -> list[object]:
        with ProcessPool("no_such_job", [{}]) as workers:
            list(workers.run(jobs, lambda nbytes: None))
            return workers.finish()

    monkeypatch.setattr(process_pool._Worker, "send", send_after_its_end)
    with pytest.raises(RuntimeError, match="ModuleNotFoundError"):
        reports()


@pytest.mark.parametrize("stopped", ["", "worker", "fork server", "both"])
def test_all_end_with_a_killed_parent(tmp_path: Path, stopped: str) -> None:
    program = (
        "import sys; from ckptcore.utils.process_pool import ProcessPool\n"
        "with ProcessPool('pool_job', [{'folder': sys.argv[1], '1': 'waits'}]) as workers:\n"
        "    list(workers.run([1], print))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as parent:
        try:
            written = tmp_path / "waits"
            within(60, lambda: written.exists() and written.read_text() != "")
            worker = int(written.read_text())
            server = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
            for pid in {"": [], "worker": [worker], "fork server": [server]}.get(stopped, [server, worker]):
                os.kill(pid, signal.SIGSTOP)
        finally:
            parent.kill()
    assert server != parent.pid
    within(20, lambda: has_ended(worker) and has_ended(server))


def test_a_stopped_worker_ends_when_others_fail(tmp_path: Path) -> None:
    with pool(tmp_path, job1="waits") as workers:
        running = workers.run([1, 2], lambda nbytes: None)
        next(running)
        written = tmp_path / "waits"
        within(60, lambda: written.exists() and written.read_text() != "")
        worker = int(written.read_text())
        os.kill(worker, signal.SIGSTOP)
    assert has_ended(worker)
    assert (tmp_path / "cleaned").exists()


def test_when_processes_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert process_count(16, GIB, 100 * GIB, 100) == 1  # another program
    monkeypatch.setattr(command_process, "is_command", lambda: True)
    monkeypatch.setattr(memory, "available_memory", lambda: 100 * GIB)
    assert process_count(16, GIB, 100 * GIB, 100) == 8
    assert process_count(16, GIB, 100 * GIB, 3) == 3
    assert process_count(16, GIB, 7 * GIB, 100) == 3
    assert process_count(16, GIB, 4 * GIB - 1, 100) == 1
    assert process_count(7, GIB, 100 * GIB, 100) == 1
    monkeypatch.setattr(memory, "available_memory", lambda: 3 * GIB)
    assert process_count(16, GIB, 100 * GIB, 100) == 4
    monkeypatch.setenv(VARIABLE, "3")
    assert process_count(2, GIB, 10, 100) == 3
    assert process_count(2, 2 << 20, 10, 100) == 2
    assert process_count(2, GIB, 10, 1) == 1
    monkeypatch.setenv(VARIABLE, "many")
    with pytest.raises(UsageError, match=r"CKPTCORE_PROCESSES must be at least 1 .*'many'"):
        process_count(2, GIB, 10, 1)
