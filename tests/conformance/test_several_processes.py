"""One command in several processes writes the bytes of one, and is as safe when any of them ends or stops."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from paths import ROOT
from samples import contents, seed_of

from ckptcore.conversion.pipeline import convert
from ckptcore.errors import DamagedCheckpoint
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.command_process import VARIABLE

if TYPE_CHECKING:
    from driver import Cli

PROCESSES = 2
JOBS = {
    "safetensors": ("consolidate", "--max-file-size", "300KB"),
    "cast": ("export", "--max-file-size", "300KB", "--dtype", "bf16"),
    "mesh": ("reshard", "--to", "dcp", "--mesh", "fsdp=4"),  # its files share records
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(1)
    state: dict[str, Any] = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(257, 256) for n in range(9)}
    state["model.norm.weight"] = torch.randn(256).bfloat16()
    folder = tmp_path_factory.mktemp("several") / "source"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def alone(cli: Cli, source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The JSON answer of each job in one process, with the bytes of its output."""
    answers = {}
    for name, (verb, *options) in JOBS.items():
        out = tmp_path_factory.mktemp(name) / "out"
        done = cli(verb, source, out, *options, "--output", "json", env={VARIABLE: "1"})
        assert done.code == 0, done
        answers[name] = {"json": done.json, "bytes": contents(out)}
    return answers


def files_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The receipts of an answer, without what differs from run to run."""
    return [{k: v for k, v in file.items() if k != "seconds"} for file in answer["files"]]


@contextmanager
def command(
    source: Path, out: Path, name: str = "safetensors", **limits: Any
) -> Iterator[subprocess.Popen[str]]:
    """A command in several processes, as a user starts it."""
    verb, *options = JOBS[name]
    argv = [sys.executable, "-m", "ckptcore", verb, str(source), str(out), *options, "--no-catalog"]
    process = subprocess.Popen(
        [*argv, "--output", "json"],
        cwd=ROOT,
        env=os.environ | {VARIABLE: str(PROCESSES)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **limits,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*"))


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in tasks(pid):
        with suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def processes_of(process: subprocess.Popen[str]) -> list[int]:
    """Wait for the workers of a command, behind their fork server; empty if it ends before they are there."""
    until = time.monotonic() + 300
    while process.poll() is None:
        servers = children(process.pid)
        workers = children(servers[0]) if servers else []
        # The second thread comes when a worker is bound to its parent; before, it has no lock and no work.
        if len(workers) == PROCESSES and all(len(tasks(pid)) > 1 for pid in workers):
            return [*servers, *workers]
        assert time.monotonic() < until
        time.sleep(0.002)
    return []


def wait_for_end(pids: list[int]) -> None:
    until = time.monotonic() + 120
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("name", JOBS)
def test_same_bytes_and_digests(
    name: str, cli: Cli, source: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    verb, *options = JOBS[name]
    out = tmp_path / "out"
    done = cli(verb, source, out, *options, "--output", "json", env={VARIABLE: str(PROCESSES)})
    assert done.code == 0, done
    assert contents(out) == alone[name]["bytes"]
    assert files_of(done.json) == files_of(alone[name]["json"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sum(line.startswith("write") for line in done.stderr.splitlines()) == 1  # one progress for all


@pytest.mark.parametrize("damaged", [False, True])
def test_reading_verbs_answer_as_one_process_does(
    damaged: bool, cli: Cli, source: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(source, copy)
    data = next(copy.glob("*.distcp"))
    raw = bytearray(data.read_bytes())
    if damaged:
        raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    assert cli("consolidate", source, other, "--max-file-size", "300KB").code == 0
    for argv in (
        ("fingerprint", copy),
        ("fingerprint", other),
        ("diff", other, copy),
        ("validate", copy, "--level", "bytes"),
        ("validate", copy, "--level", "values"),
        ("validate", other, "--level", "bytes"),
    ):
        one, several = (
            cli(*argv, "--output", "json", env={VARIABLE: count}) for count in ("1", str(PROCESSES))
        )
        assert (several.code, several.stdout) == (one.code, one.stdout), argv
        assert one.code == int(damaged and copy in argv), one
    for export, against, of_damaged in ((other, copy, "not-done"), (copy, other, "failed")):
        argv = "verify-export", export, "--against", against, "--output", "json"
        one, several = (cli(*argv, env={VARIABLE: count}) for count in ("1", str(PROCESSES)))
        assert (several.code, several.stdout) == (one.code, one.stdout), argv
        verdicts = {check["check"]: check["verdict"] for check in several.json["checks"]}
        assert verdicts["fingerprints"] == (of_damaged if damaged else "ok"), several


def test_files_of_a_source_are_digested_as_by_one_process(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for count in ("1", "2"):
        monkeypatch.setenv(VARIABLE, count)
        catalog = f"sqlite:///{tmp_path}/{count}.db"
        asked = Request(str(source), str(tmp_path / count), to="safetensors", max_file_size=300_000)
        result = convert(asked, catalog_url=catalog)
        found.append(result.source_digests)
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_a_damaged_record_that_files_share_is_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    data = next(copy.glob("*.distcp"))
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    monkeypatch.setenv(VARIABLE, "2")
    with pytest.raises(DamagedCheckpoint, match="CRC-32"):
        convert(Request(str(copy), str(tmp_path / "out"), "reshard", "dcp", mesh="fsdp=2"), catalog_url=False)
    assert not (tmp_path / "out").exists()


def test_shared_records_are_read_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two workers have read of a record adds up; the parent reads nothing."""
    from ckptcore.reading import checksums

    monkeypatch.setenv(VARIABLE, "2")
    monkeypatch.setattr(checksums, "_crc_of", lambda payload: pytest.fail("a record was read again"))
    asked = Request(str(source), str(tmp_path / "out"), "reshard", "dcp", mesh="fsdp=2")
    result = convert(asked, catalog_url=False)
    assert all(not receipt.pending for receipt in result.files)
    assert sum(receipt.verified for receipt in result.files) > 0


@pytest.mark.alike(1)
@pytest.mark.parametrize("killed", [0, -1], ids=["the fork server", "a worker"])
def test_one_is_killed(
    killed: int, cli: Cli, source: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    with command(source, tmp_path / "out") as process:
        processes = processes_of(process)
        os.kill(processes[-1], signal.SIGSTOP)  # so that it has not ended before
        os.kill(processes[killed], signal.SIGKILL)
        answer = json.loads(process.communicate()[0])
    assert process.returncode == 22, answer
    assert "ended by signal 9" in answer["error"]["message"]
    wait_for_end(processes)
    assert not (tmp_path / "out").exists()
    resumed(cli, source, tmp_path, alone)


def test_the_command_is_killed_while_a_worker_is_stopped(
    cli: Cli, source: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    with command(source, tmp_path / "out") as process:
        processes = processes_of(process)
        for pid in processes[:2]:
            os.kill(pid, signal.SIGSTOP)
        process.kill()
    wait_for_end(processes)
    assert not (tmp_path / "out").exists()
    resumed(cli, source, tmp_path, alone)


def test_a_stopped_worker_goes_on(source: Path, alone: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    with command(source, tmp_path / "out") as process:
        stopped = processes_of(process)[-1]
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(1)
        assert process.poll() is None  # without this worker nothing is complete
        assert not (tmp_path / "out").exists()
        os.kill(stopped, signal.SIGCONT)
        process.communicate()
    assert process.returncode == 0
    assert contents(tmp_path / "out") == alone["safetensors"]["bytes"]


def test_ctrl_c_ends_all_and_leaves_nothing_half_written(
    cli: Cli, source: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    with command(source, tmp_path / "out") as process:
        processes = processes_of(process)
        for pid in processes[:2]:
            os.kill(pid, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        answer = json.loads(process.communicate()[0])
    assert answer["error"]["code"] == "interrupted"
    wait_for_end(processes)
    assert not [path for path in tmp_path.rglob("*.part") if path.is_file()]
    resumed(cli, source, tmp_path, alone)


def test_a_full_disk_in_a_worker(
    cli: Cli, source: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    verb, *options = JOBS["safetensors"]
    given = [verb, source, tmp_path / "out", *options, "--output", "json"]
    done = cli(*given, file_size=100_000, env={VARIABLE: str(PROCESSES)})
    assert (done.code, done.json["error"]["code"]) == (10, "disk-full"), done
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.rglob("*.part") if path.is_file()]
    resumed(cli, source, tmp_path, alone)


def resumed(cli: Cli, source: Path, folder: Path, alone: dict[str, dict[str, Any]]) -> None:
    """The same command finishes what was begun."""
    verb, *options = JOBS["safetensors"]
    done = cli(verb, source, folder / "out", *options, env={VARIABLE: str(PROCESSES)})
    assert done.code == 0, done
    assert contents(folder / "out") == alone["safetensors"]["bytes"]
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_memory_is_shared() -> None:
    share = Settings(memory=1 << 30, workers=16).share(8)
    assert (share.memory, share.threads) == (1 << 27, 2)
    assert Settings(workers=2).share(3).threads == 1


@pytest.mark.soak
def test_many_full_disks(
    cli: Cli, source: Path, alone: dict[str, dict[str, Any]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    verb, *options = JOBS["safetensors"]
    rng = random.Random(seed_of(request))
    for number in range(10):
        (folder := tmp_path / str(number)).mkdir()
        given = [verb, source, folder / "out", *options, "--output", "json"]
        done = cli(*given, file_size=rng.randrange(20_000, 260_000), env={VARIABLE: str(PROCESSES)})
        assert (done.code, done.json["error"]["code"]) == (10, "disk-full"), done
        assert not (folder / "out").exists()
        resumed(cli, source, folder, alone)


@pytest.mark.soak
@pytest.mark.parametrize("whom", ["the command", "a worker", "the fork server", "all", "a stopped worker"])
def test_many_ends(
    whom: str,
    cli: Cli,
    source: Path,
    alone: dict[str, dict[str, Any]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    rng = random.Random(seed_of(request))
    for number in range(10):
        (folder := tmp_path / str(number)).mkdir()
        with command(source, folder / "out") as process:
            processes = processes_of(process)
            time.sleep(rng.uniform(0, 0.5))
            pids = {
                "the command": [process.pid],
                "the fork server": processes[:1],
                "all": [*processes, process.pid],
            }.get(whom, processes[-1:])
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if whom == "a stopped worker" else signal.SIGKILL)
            if whom == "a stopped worker":
                time.sleep(0.1)
                process.kill()
            process.communicate()
        wait_for_end(processes)
        if (folder / "out").exists():
            assert contents(folder / "out") == alone["safetensors"]["bytes"], "half a result"
            continue
        resumed(cli, source, folder, alone)
