"""Run the benchmarks of lines.py on this machine, and judge their bounds.

1. Lines are grouped by source, so that each checkpoint is made once and removed after its lines.
2. A race runs its contenders in turn, a different one first in each round, each in its own process,
   outputs removed in between; in the first round every output is verified bit by bit.
3. Other measurements are separate programs, which can also run alone: overhead.py (a flow compared with
   the command line), workers.py (two worker processes compared with one), receiver.py (senders' waits),
   gpu.py (an export on a device compared with PCIe).
4. One table, one verdict per bound; exit status 1 where a bound or a command failed.

    python run.py [--only REGEX] [--runs 5] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import memory
from harness import (
    HERE,
    INTERPRETERS,
    Bench,
    CommandError,
    NoRoom,
    call,
    checkpoint,
    folders,
    forget,
    remove,
    say,
    verify,
)
from lines import (
    BASE_BYTES,
    BUDGET,
    BUDGET_BYTES,
    CONTENDERS,
    LINES,
    SPREAD,
    Contender,
    Cover,
    Line,
    Peak,
    Program,
    Race,
    Start,
)
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
QUICK_SCALE = 16
PATIENCE = 60.0  # seconds for a program to end after SIGTERM


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table.

    Attributes:
        line: Name of the line.
        measured: The figures, as text.
        bound: The bound, as text.
        ok: None where the bound is not judged: in quick mode, or on a machine that is too small.
        data: The raw figures, for --json.
    """

    line: str
    measured: str
    bound: str
    ok: bool | None
    data: dict[str, Any] = field(default_factory=dict)


def race(bench: Bench, line: Race, source: Path) -> Iterator[Outcome]:
    """Run all contenders `runs` times, in turn; one outcome per bound."""
    cores = len(os.sched_getaffinity(0))
    if cores < line.cores and bench.judged:
        yield Outcome(line.name, f"not run: it needs {line.cores} CPU cores (got {cores})", "runs", None)
        return
    for name in line.contenders:
        variable = INTERPRETERS.get(CONTENDERS[name].argv[0])
        if variable is not None and variable not in os.environ:
            yield Outcome(f"{line.name}: {name}", f"not run: {variable} is not set", "runs", None)
            return
    times: dict[str, list[float]] = {name: [] for name in line.contenders}
    for turn in range(bench.runs):
        first = turn % len(times)
        for name in (*line.contenders[first:], *line.contenders[:first]):
            contender = CONTENDERS[name]
            out = source.parent / f"out{contender.suffix}"
            try:
                if line.place == "disk":  # no contender pays for unwritten data of another
                    call(["sync", "-f", str(source)])
                if line.cold:
                    forget(source)
                seconds, _ = call(bench.argv(contender, source, out), bench.env)
                if turn == 0 and contender.verified:
                    verify(bench, line.source, out, contender)
            finally:
                remove(out)
            times[name].append(seconds)
            say(f"{line.name}: {name} {seconds:.2f} s")
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for bound in line.bounds:
        yield Outcome(
            f"{line.name}: {bound.subject}",
            f"{bound.figure(medians):.2f} x: {_times(times[bound.subject])}"
            f" against {_times(times[bound.base])}",
            bound.text(),
            bound.holds(medians) if bench.judged else None,
            {"seconds": times, "figure": bound.figure(medians)},
        )


def _times(seconds: Sequence[float]) -> str:
    """Return median and spread as text."""
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"


def peak(bench: Bench, line: Peak, source: Path) -> Iterator[Outcome]:
    """Run one conversion under the memory sampler."""
    out = source.parent / f"out{line.contender.suffix}"
    try:
        usage = memory.measure(bench.argv(line.contender, source, out), bench.env)
        if usage.returncode:
            raise CommandError(f"exit {usage.returncode}: {usage.stderr[-600:]}")
        verify(bench, line.source, out, line.contender)
    finally:
        remove(out)
    say(f"{line.name}: {usage.peak_bytes / MIB:.0f} MiB, {usage.seconds:.2f} s")
    limit = BASE_BYTES + BUDGET_BYTES
    yield Outcome(
        line.name,
        f"{usage.peak_bytes / MIB:.0f} MiB ({usage.samples} samples, {usage.seconds:.1f} s)",
        f"≤ {limit / MIB:.0f} MiB (budget {BUDGET})",
        usage.peak_bytes <= limit if bench.judged else None,
        {"group": line.group, **asdict(usage)},
    )


def spreads(bench: Bench, outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """Compare the peaks of one writer, over checkpoints and numbers of workers."""
    groups: dict[str, list[int]] = {}
    for outcome in outcomes:
        if group := outcome.data.get("group"):
            groups.setdefault(group, []).append(outcome.data["peak_bytes"])
    for group, peaks in groups.items():
        low, high = min(peaks), max(peaks)
        figure = (high - low) / (high + low)
        yield Outcome(
            f"memory: same peak, {group}",
            f"±{figure:.1%} ({low / MIB:.0f}-{high / MIB:.0f} MiB, {len(peaks)} lines)",
            f"±{SPREAD:.0%}",
            figure <= SPREAD if bench.judged else None,
            {"figure": figure},
        )


def start(bench: Bench, line: Start, source: Path) -> Iterator[Outcome]:
    """Time the command, then list what the interpreter imported, and verify its output if it has one."""
    contender, out = Contender(line.argv), source.with_name("out")
    argv = bench.argv(contender, source, out)
    seconds = []
    try:
        for _ in range(bench.runs):
            seconds.append(call(argv, bench.env)[0])
            remove(out)
        _, imports = call(argv, bench.env | {"PYTHONPROFILEIMPORTTIME": "1"})
        if out.exists():
            verify(bench, line.source, out, contender)
    finally:
        remove(out)
    modules = {row.rpartition("|")[2].strip() for row in imports.splitlines()}
    if "ckptcore" not in modules:
        raise CommandError(f"no list of imports from {' '.join(argv)}")
    median = statistics.median(seconds)
    yield Outcome(
        line.name,
        _times(seconds),
        f"< {line.seconds:g} s",
        median < line.seconds if bench.judged else None,
        {"seconds": seconds},
    )
    torch = sorted(name for name in modules if name.partition(".")[0] == "torch")
    yield Outcome(f"{line.name}: imports", f"{len(torch)} modules of torch", "none", not torch, {})


def cover(bench: Bench, line: Cover, source: Path) -> Iterator[Outcome]:
    """Run the command under the memory sampler; the median run counts."""
    argv = bench.argv(Contender(line.argv), source, source.with_name("planned"))
    runs = [memory.measure(argv, bench.env) for _ in range(bench.runs)]
    failed = next((r for r in runs if r.returncode), None)
    if failed is not None:
        raise CommandError(f"exit {failed.returncode}: {failed.stderr[-600:]}")
    seconds, peaks = [r.seconds for r in runs], [r.peak_bytes for r in runs]
    fits = statistics.median(seconds) < line.seconds and max(peaks) < line.peak
    yield Outcome(
        line.name,
        f"{_times(seconds)}, {max(peaks) / MIB:.0f} MiB",
        f"< {line.seconds:g} s, < {line.peak / MIB:.0f} MiB",
        fits if bench.judged else None,
        {"seconds": seconds, "peak_bytes": max(peaks)},
    )


def program(bench: Bench, line: Program, source: Path) -> Iterator[Outcome]:
    """Run a program that judges itself, and verify its output."""
    name, *arguments = bench.argv(Contender(line.argv), source, source.parent / "out")
    argv = [sys.executable, str(HERE / name), *arguments, *(() if bench.judged else line.quick), "--json"]
    out = source.parent / "out"
    env = bench.env | {"TMPDIR": str(bench.places["disk"])}
    try:
        with memory.started(argv, env, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                stdout, stderr = process.communicate()
            except BaseException:
                process.terminate()  # it has its own processes to stop
                process.wait(PATIENCE)
                raise
        try:
            result = json.loads(stdout)
        except ValueError:
            raise CommandError(f"{name}: exit {process.returncode}: {stderr[-600:]}") from None
        if line.source is not None and out.exists():
            verify(bench, line.source, out, Contender((), dtype=result.get("dtype")))
    finally:
        remove(out)
    say(f"{line.name}: {result['measured']}")
    ok = result["ok"] if bench.judged else None
    yield Outcome(line.name, result["measured"], result["bound"], ok, result)


def outcomes(bench: Bench, lines: Sequence[Line]) -> Iterator[Outcome]:
    """Run all lines, source by source; a command that fails fails only its own lines."""
    groups: dict[tuple[str, str | None], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.place, line.source), []).append(line)
    for (place, source), group in groups.items():
        done: set[str] = set()
        try:
            nothing = nullcontext(bench.places[place] / "none")
            with checkpoint(bench, place, source) if source is not None else nothing as folder:
                for line in group:
                    try:
                        yield from _outcomes(bench, line, folder)
                    except CommandError as error:
                        yield Outcome(line.name, str(error), "runs", ok=False)
                    done.add(line.name)
        except (CommandError, NoRoom) as error:
            for line in group:
                if line.name not in done:
                    yield Outcome(line.name, str(error), "runs", None if isinstance(error, NoRoom) else False)


def _outcomes(bench: Bench, line: Line, source: Path) -> Iterator[Outcome]:
    match line:
        case Race():
            return race(bench, line, source)
        case Peak():
            return peak(bench, line, source)
        case Start():
            return start(bench, line, source)
        case Cover():
            return cover(bench, line, source)
        case Program():
            return program(bench, line, source)


def show(rows: Sequence[Outcome]) -> None:
    """Print the table, 160 columns wide where stdout is a file."""
    table = Table("line", "measured", "bound", "verdict", title="ckptcore benchmarks")
    verdicts = {True: "ok", False: "[red]FAIL[/red]", None: "not judged"}
    for row in rows:
        table.add_row(row.line, row.measured, row.bound, verdicts[row.ok])
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def report(rows: Sequence[Outcome], runs: int, load: tuple[float, ...], path: Path | None) -> None:
    """Print the table and what the machine is; write all figures to ``path``, if given."""
    show(rows)
    machine = {
        "cpus": os.cpu_count(),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "load_before": load,
        "load_after": os.getloadavg(),
        "runs": runs,
    }
    say(", ".join(f"{key} {value}" for key, value in machine.items()))
    if path is not None:
        figures = {"machine": machine, "lines": [asdict(row) for row in rows]}
        path.write_text(json.dumps(figures, indent=1))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="lines whose name it matches")
    parser.add_argument("--list", action="store_true", help="print the names of the lines")
    parser.add_argument("--runs", type=int, help="rounds of a race (default 5; quick: 1)")
    parser.add_argument(
        "--quick", action="store_true", help="sources 256 times smaller; bounds are not judged"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", action="store_true", help="keep the sources, and use kept ones")
    parser.add_argument("--ckptcore", type=Path, default=Path(sys.executable).with_name("ckptcore"))
    return parser.parse_args()


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the commands: a catalog and a cache of their own, and modules compiled once.

    Installed packages are compiled; a checkout is not, where this variable is set.
    """
    env = os.environ | {
        "CKPTCORE_CATALOG_URL": f"sqlite:///{folder}/catalog.db",
        "CKPTCORE_CACHE": str(folder / "cache"),  # after the first round, as after the first export of a run
    }
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def main() -> int:
    """Run the chosen lines; return 1 where one of them fails."""
    args = arguments()
    lines = [line for line in LINES if re.search(args.only, line.name)]
    if args.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a word
        print("\n".join(line.name for line in lines))
        return 0
    if not lines:
        say(f"no line matches {args.only!r}")
        return 2
    # A terminated run must clean up like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scale = QUICK_SCALE if args.quick else 1
    with folders({"disk": args.disk, "ram": args.ram}, scale, args.keep) as places:
        bench = Bench(
            ckptcore=args.ckptcore,
            places=places,
            runs=args.runs or (1 if args.quick else 5),
            scale=scale,
            judged=not args.quick,
            keep=args.keep,
            env=environment(places["disk"]),
        )
        # Create the catalog's tables once, not inside the first timed run.
        try:
            call([str(bench.ckptcore), "catalog", "upgrade"], bench.env)
        except CommandError as error:
            say(str(error))
            return 1
        load, rows = os.getloadavg(), list[Outcome]()
        try:
            for row in outcomes(bench, lines):
                rows.append(row)
            rows += spreads(bench, rows)
        finally:  # an interrupted run tells what it measured
            report(rows, bench.runs, load, args.json)
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
