"""Run the benchmarks with small sources, once; times are not judged here.

`make test` runs the programs once, for one line, and the parts that need no run; the other lines, peers and
servers are a soak.
"""

from __future__ import annotations

import enum
import filecmp
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCE, SCALE = "col-2gb", "64"


def program(name: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run one of the programs in this folder."""
    argv = [sys.executable, str(HERE / name), *map(str, args)]
    # The table wraps at the width of the terminal.
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300, env=wide)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that 8 gloo processes saved."""
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    made = program("make_ckpt.py", SOURCE, folder, "--scale", SCALE)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.soak
def test_one_process_in_turn_writes_the_bytes_of_a_real_job(saved: Path, tmp_path: Path) -> None:
    made = program("make_ckpt.py", SOURCE, tmp_path / "turn", "--scale", SCALE, "--in-turn")
    assert made.returncode == 0, made.stderr
    names = sorted(path.name for path in saved.iterdir())
    assert names == [".metadata", *(f"__{rank}_0.distcp" for rank in range(8))]
    # .metadata holds the folder's path and a random id. torch's loader needs the rest of it to find
    # these bytes, which the peers of the next tests do.
    _, different, missing = filecmp.cmpfiles(saved, tmp_path / "turn", names[1:], shallow=False)
    assert (different, missing) == ([], [])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("peer", "suffix"), [("dcp_to_torch_save", ".pt"), ("load_and_save_file", ".safetensors")]
)
def test_peers_convert_and_verify_sees_one_flipped_bit(
    saved: Path, tmp_path: Path, peer: str, suffix: str
) -> None:
    out = tmp_path / f"out{suffix}"
    converted = program("peers.py", peer, saved, out)
    assert converted.returncode == 0, converted.stderr
    good = program("verify.py", SOURCE, out, "--scale", SCALE)
    assert good.returncode == 0, good.stderr

    content = bytearray(out.read_bytes())
    content[len(content) // 2] ^= 1
    out.write_bytes(content)
    bad = program("verify.py", SOURCE, out, "--scale", SCALE)
    assert bad.returncode == 1
    assert "bits differ" in bad.stderr


def test_a_reader_that_ends_early_ends_the_list_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, str(HERE / "run.py"), "--list"]
    with open(write, "wb") as gone:
        listed = subprocess.run(argv, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60)
    assert listed.stderr == ""
    assert listed.returncode == -signal.SIGPIPE


def test_memory_counts_a_grandchild() -> None:
    allocate = "import time; data = b'x' * (200 << 20); time.sleep(0.5)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {allocate!r}])"
    measured = program("memory.py", "--", sys.executable, "-c", child)
    peak_mib = json.loads(measured.stdout)["peak_bytes"] / (1 << 20)
    assert 200 < peak_mib < 260


def test_a_job_on_paper_writes_the_metadata_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases include uneven shards, empty chunks, batches and frames."""
    monkeypatch.syspath_prepend(HERE)
    # As Python pickles members of enums, but for 3.11.0 to 3.11.3.
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _protocol: (type(self), (self._value_,)))
    import paper

    def job(ranks: int, layers: int) -> paper.Job:
        shapes = {"w": (300, 64), "kv": (8, 64), "norm": (64,), "b": (1001,)}
        names = {f"layers.{n}.{k}": shape for n in range(layers) for k, shape in shapes.items()}
        model = [paper.Tensor(("model", k), "bfloat16", shape) for k, shape in names.items()]
        state = [
            paper.Tensor(("optim", "state", k, kind), "float32", shape if kind == "exp_avg" else ())
            for k, shape in names.items()
            for kind in ("step", "exp_avg")
        ]
        return paper.Job((*model, *state), ranks)

    for ranks, layers in ((1, 1), (3, 2), (40, 10), (5, 100)):
        out = io.BytesIO()
        paper.emit(job(ranks, layers), out)
        assert out.getvalue() == paper.as_torch(job(ranks, layers)), (ranks, layers)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    from lines import LINES, AtMost, Faster
    from make_ckpt import SOURCES

    assert Faster("ours", "peer", 2.0).holds({"ours": 1.0, "peer": 2.0})
    assert not Faster("ours", "peer", 2.0).holds({"ours": 1.0, "peer": 1.99})
    assert AtMost("ours", "cp", 1.5, plus=1.0).holds({"ours": 4.0, "cp": 2.0})
    assert not AtMost("ours", "cp", 1.5, plus=1.0).holds({"ours": 4.1, "cp": 2.0})

    assert len({line.name for line in LINES}) == len(LINES)
    assert {line.source for line in LINES} - {None} == set(SOURCES)


def test_a_race_that_needs_more_cores_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    import lines
    import run
    from harness import Bench

    many = lines.Race("many", "ram", "row-2gb", (lines.Faster("ckptcore", "cp", 1.0),), cores=10_000)
    bench = Bench(Path("none"), {}, runs=1, scale=1, judged=True, keep=False, env={})
    (row,) = run.race(bench, many, Path("none"))
    assert row.ok is None
    assert row.measured.startswith("not run: it needs 10000 CPU cores (got ")


def test_a_source_without_room_is_not_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(HERE)
    import harness
    import lines
    import run

    def small(path: Any) -> Any:
        return SimpleNamespace(free=1 << 20)

    monkeypatch.setattr(harness.shutil, "disk_usage", small)
    places = {"ram": tmp_path, "disk": tmp_path}
    bench = harness.Bench(Path("none"), places, runs=1, scale=1, judged=True, keep=False, env={})
    rows = list(run.outcomes(bench, [line for line in lines.LINES if line.source == "row-2gb"]))
    assert len(rows) > 3
    assert {row.ok for row in rows} == {None}
    assert all(row.measured.startswith("not run: row-2gb needs ") for row in rows)


@pytest.mark.soak
def test_an_interrupted_run_tells_what_it_measured(tmp_path: Path) -> None:
    argv = [sys.executable, str(HERE / "run.py"), "--quick", "--json", str(tmp_path / "figures.json")]
    argv += ["--ram", str(tmp_path / "ram"), "--disk", str(tmp_path / "disk")]
    argv += ["--only", "^memory/row-2gb/(safetensors/workers-1|torch_save)"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        measured = (line for line in running.stderr if line.startswith("memory/"))
        assert next(measured)
        assert next(measured)  # the first is a row of the table by now
        running.send_signal(signal.SIGTERM)
        table, _ = running.communicate(timeout=60)
    assert running.returncode == 143
    assert "memory/row-2gb/safetensors" in table
    rows = json.loads((tmp_path / "figures.json").read_text())["lines"]
    assert rows[0]["line"] == "memory/row-2gb/safetensors/workers-1"
    assert not any((tmp_path / "ram").iterdir())


def quick_run(folder: Path, only: str) -> list[dict[str, Any]]:
    """Return the lines of a quick run, which left nothing in its folders."""
    ran = program(
        "run.py",
        *("--quick", "--ram", folder / "ram", "--disk", folder / "disk"),
        *("--json", folder / "figures.json", "--only", only),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not any((folder / "ram").iterdir())
    assert not any((folder / "disk").iterdir())
    rows: list[dict[str, Any]] = json.loads((folder / "figures.json").read_text())["lines"]
    return rows


@pytest.mark.soak
def test_a_line_is_measured_and_verified_and_leaves_nothing(tmp_path: Path) -> None:
    row, same = quick_run(tmp_path, "^memory/row-2gb/safetensors/workers-1")
    assert row["line"] == "memory/row-2gb/safetensors/workers-1"
    assert same["line"] == "memory: same peak, safetensors"
    assert row["data"]["peak_bytes"] > 50 << 20


def test_one_folder_may_be_the_root_of_two_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(HERE)
    import harness

    with harness.folders({"disk": tmp_path, "ram": tmp_path}, 1, keep=False) as places:
        assert places["disk"] == places["ram"]
        assert places["disk"].is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_a_quick_run_measures_verifies_and_leaves_nothing(tmp_path: Path) -> None:
    rows = quick_run(
        tmp_path,
        "^(inspect|ram)/row-2gb|^ram/hf-shards|^export/row-10mb|^cover/chunks-1m|^memory/row-2gb/safetensors/workers-1",
    )
    assert [row["line"] for row in rows] == [
        "inspect/row-2gb",
        "inspect/row-2gb: imports",
        "export/row-10mb",
        "export/row-10mb: imports",
        "ram/row-2gb: ckptcore",
        "ram/row-2gb: ckptcore",
        "memory/row-2gb/safetensors/workers-1",
        "cover/chunks-1m",
        "ram/hf-shards-2gb: ckptcore of shards",
        "memory: same peak, safetensors",
    ]
    assert rows[2]["data"]["figure"] > 0
    assert rows[4]["data"]["peak_bytes"] > 50 << 20


def test_programs_judge_by_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    import gpu
    import many
    import overhead
    import receiver
    import workers

    # The median counts: 2 s with a running server, 10 s without.
    for server, most in (("running", 2.0), ("none", 10.0)):
        for more, ok in ((most, True), (most + 0.1, False)):
            times = {"cli": [9.0, 1.0, 0.5], "flow": [0.1, 1.0 + more, 99.0]}
            assert overhead.verdict(times, server)["ok"] is ok

    # 8 GB in 3 s beside the fixed one are 0.8 of 3.33 GB/s.
    for seconds, peak, ok in ((4.0, 1 << 28, True), (4.1, 1 << 28, False), (4.0, (1 << 28) + 1, False)):
        speeds = {"PCIe": 20e9, "cp": 8e9 / 3 / 0.8 - 1}
        assert gpu.verdict(8_000_000_000, [seconds], speeds, peak)["ok"] is ok
    for seconds, ok in ((500.0, True), (501.0, False)):  # the median; two in a second
        runs = [{"seconds": s, "cpu": 0.1, "peak": 1.0} for s in (1.0, seconds, 9000.0)]
        assert many.verdict(runs, 1000)["ok"] is ok

    one, two = {"wall": 90.0, "cpu": [61.0]}, {"wall": 60.0, "cpu": [31.0, 31.0]}
    assert workers.verdict(one, two, 60)["ok"]
    assert not workers.verdict(one, two | {"wall": 60.1}, 60)["ok"]
    assert not workers.verdict(one | {"cpu": [59.0]}, two, 60)["ok"]

    waits = [1.0] * 980 + [50.0] * 15 + [400.0] * 5
    assert receiver.verdict(waits, {202: 1000}, 200, 1.0)["ok"]
    assert not receiver.verdict(waits + [400.0] * 10, {202: 1010}, 200, 1.0)["ok"]
    assert not receiver.verdict(waits, {202: 999, 503: 1}, 200, 1.0)["ok"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "name",
    [
        "flow/server-running",
        "flow/server-none",
        "flow/two-workers",
        "receiver/200-a-second",
        "sweep/1000-small",
    ],
)
def test_programs_measure_verify_and_leave_nothing(tmp_path: Path, name: str) -> None:
    (row,) = quick_run(tmp_path, f"^{name}$")
    assert (row["line"], row["ok"]) == (name, None), row["measured"]
    assert row["data"]["figure"] > 0
    if name == "flow/two-workers":
        assert [len(run["cpu"]) for run in row["data"]["runs"]] == [1, 2]


@pytest.mark.soak
def test_a_command_that_fails_fails_its_line_and_the_run(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = catalog ] || { echo "no such verb" >&2; exit 2; }\n')
    broken.chmod(0o755)
    ran = program(
        "run.py",
        *("--quick", "--ram", tmp_path / "ram", "--disk", tmp_path / "disk"),
        *("--ckptcore", broken, "--only", "^inspect/"),
    )
    assert ran.returncode == 1
    # The table may wrap anywhere, so compare without its borders and white space.
    assert "nosuchverb" in "".join(c for c in ran.stdout if c.isalnum()), ran.stdout
    assert not any((tmp_path / "ram").iterdir())
