"""Measure a conversion from a bucket to a bucket, compared with copies that convert nothing.

    python objects.py SRC WORK --latency SECONDS [--runs 3] [--contenders NAMES] [--peers PYTHON] [--json]

A server in a process of its own (s3_server.py) has the source; its cost is nobody's. In each round, in turn:

- ``ckptcore``: consolidate, s3 to s3;
- ``stream``: obstore copies the objects, s3 to s3, the least that moving these bytes costs;
- ``s3fs``: download with s3fs, consolidate on the disk, upload with s3fs;
- ``aws``: ``aws s3 cp`` down and up, converting nothing.

Without added latency CPU seconds are judged, too, which a loaded machine changes little; wall times need a
machine that is quiet. ``--contenders ckptcore,stream`` runs these alone, for CPU seconds within a minute, and
judges only their bounds. ``--peers`` is a Python with obstore and awscli (default: CKPTCORE_PEER_OBJECTS).
Requests are those of ckptcore's first round; memory is that of one more run, within 256 MiB. Exit status 1
where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memory
import services

HERE = Path(__file__).parent
BUDGET = 256 << 20
BASE = 450 << 20  # interpreter and libraries
BLOCK = 16 << 20
CPU_FACTOR = 2.5  # of the stream's CPU seconds
FASTER = 2.0  # than s3fs
SLOWER = 1.1  # than aws, at most
GETS_FACTOR, GETS_EACH = 1.3, 2  # of the source's blocks, and for each of its files
DISK = 16 << 20  # bytes on the disk: catalog and logs, no tensors
BUCKET = "bench"
NAMES = ("ckptcore", "stream", "s3fs", "aws")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one contender used in one round, with all processes that it started."""

    wall: float
    cpu: float
    disk: int


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start the server; yield the environment of its clients."""
    with subprocess.Popen([sys.executable, str(HERE / "s3_server.py")], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": "bench",
                "AWS_SECRET_ACCESS_KEY": "bench-secret",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        finally:
            process.kill()


def ask(env: Mapping[str, str], method: str, path: str, data: bytes | None = None) -> bytes:
    """Send one request to the server."""
    url = f"{env['AWS_ENDPOINT_URL']}/{path}"
    with urllib.request.urlopen(urllib.request.Request(url, data=data, method=method)) as answer:
        found: bytes = answer.read()
    return found


def run(commands: Sequence[Sequence[str]], env: Mapping[str, str]) -> Cost:
    """Run commands one after another, and return what they used."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for command in commands:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-600:]}")
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, cpu, 512 * (after.ru_oublock - before.ru_oublock))


def contenders(ckptcore: str, peers: str, work: Path) -> dict[str, list[list[str]]]:
    """Return the commands of each contender."""
    down, made = str(work / "down"), str(work / "made")
    own, peer = [sys.executable, str(HERE / "object_peers.py")], [peers, str(HERE / "object_peers.py")]
    convert, aws = [ckptcore, "consolidate"], [peers, "-m", "awscli", "s3", "cp", "--recursive", "--quiet"]
    return {
        "ckptcore": [[*convert, f"s3://{BUCKET}/src", f"s3://{BUCKET}/out"]],
        "stream": [[*peer, "stream", BUCKET, "src", "out"]],
        "s3fs": [
            [*own, "get", BUCKET, "src", down],
            [*convert, down, made],
            [*own, "put", BUCKET, made, "out"],
        ],
        "aws": [[*aws, f"s3://{BUCKET}/src", down], [*aws, down, f"s3://{BUCKET}/out"]],
    }


def clear(env: Mapping[str, str], work: Path) -> None:
    """Remove what a contender has written."""
    ask(env, "DELETE", "-/out")
    for name in ("down", "made"):
        shutil.rmtree(work / name, ignore_errors=True)


def measure(given: argparse.Namespace, env: dict[str, str]) -> dict[str, Any]:
    """Run all rounds; return the figures."""
    ask(env, "PUT", f"-/load/{BUCKET}/src", str(given.source.resolve()).encode())
    given.work.mkdir(parents=True, exist_ok=True)
    env = {
        **os.environ,
        **env,
        "TMPDIR": str(given.work),
        "CKPTCORE_CATALOG_URL": f"sqlite:///{given.work}/catalog.db",
    }
    subprocess.run([str(given.ckptcore), "catalog", "upgrade"], env=env, check=True, capture_output=True)
    ask(env, "PUT", "-/latency", str(given.latency).encode())
    every = contenders(str(given.ckptcore), given.peers, given.work)
    commands = {name: every[name] for name in given.contenders}
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    requests: dict[str, int] = {}
    for turn in range(given.runs):
        for name in sorted(commands, reverse=bool(turn % 2)):
            before = json.loads(ask(env, "GET", "-/count"))
            cost = run(commands[name], env)
            print(f"{name}: {cost.wall:.1f} s, CPU {cost.cpu:.1f} s", file=sys.stderr, flush=True)
            costs[name].append(cost)
            if name == "ckptcore" and not requests:
                after = json.loads(ask(env, "GET", "-/count"))
                requests = {n: after[n] - before.get(n, 0) for n in after}
            clear(env, given.work)
    usage = memory.measure([*commands["ckptcore"][0], "--memory", str(BUDGET)], env)
    clear(env, given.work)
    if usage.returncode:
        raise RuntimeError(usage.stderr[-600:])
    return {
        "costs": {n: [(c.wall, c.cpu, c.disk) for c in rows] for n, rows in costs.items()},
        "wall": {n: statistics.median(c.wall for c in rows) for n, rows in costs.items()},
        "cpu": {n: statistics.median(c.cpu for c in rows) for n, rows in costs.items()},
        "disk": max(c.disk for c in costs["ckptcore"]),
        "peak": usage.peak_bytes,
        "requests": requests,
    }


def verdict(found: dict[str, Any], source: Path, latency: float) -> dict[str, Any]:
    """Judge the figures; return them with the texts for the table."""
    wall, cpu = found["wall"], found["cpu"]
    sizes = [file.stat().st_size for file in source.rglob("*") if file.is_file()]
    nbytes = sum(sizes)
    gets = found["requests"].get("GET source", 0)
    most = int(GETS_FACTOR * -(-nbytes // BLOCK)) + GETS_EACH * len(sizes)
    checks = {
        f"{gets} GETs of the source (≤ {most})": gets <= most,
        f"peak {found['peak'] >> 20} MiB (≤ {BASE + BUDGET >> 20})": found["peak"] <= BASE + BUDGET,
        f"{found['disk'] >> 20} MiB on the disk (≤ {DISK >> 20})": found["disk"] <= DISK,
    }
    if "s3fs" in wall:
        figure = wall["s3fs"] / wall["ckptcore"]
        checks[f"{figure:.2f} x as fast as s3fs (≥ {FASTER:g})"] = figure >= FASTER
    if "aws" in wall:
        figure = wall["ckptcore"] / wall["aws"]
        checks[f"{figure:.2f} x the time of aws (≤ {SLOWER:g})"] = figure <= SLOWER
    if not latency and "stream" in wall:
        figure = cpu["ckptcore"] / cpu["stream"]
        text = f"{cpu['ckptcore'] * 1e9 / nbytes:.1f} CPU s/GB, {figure:.2f} x the stream (≤ {CPU_FACTOR:g})"
        checks[text] = figure <= CPU_FACTOR
    times = ", ".join(f"{n} {wall[n]:.1f} s (CPU {cpu[n]:.1f})" for n in wall)
    missed = [text for text, good in checks.items() if not good]
    return found | {
        "measured": f"{times}; {'; '.join(checks)}",
        "bound": "all in brackets" if not missed else f"missed: {'; '.join(missed)}",
        "ok": not missed,
        "load": os.getloadavg()[0],
    }


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ckptcore", type=Path, default=Path(sys.executable).with_name("ckptcore"))
    parser.add_argument("--peers", default=os.environ.get("CKPTCORE_PEER_OBJECTS", ""))
    parser.add_argument("--contenders", default=",".join(NAMES))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.contenders = given.contenders.split(",")
    if "ckptcore" not in given.contenders or not set(given.contenders) <= set(NAMES):
        parser.error(f"--contenders must be ckptcore and others of {', '.join(NAMES)}")
    if not given.peers:
        missing = {"measured": "not run: CKPTCORE_PEER_OBJECTS is not set", "bound": "runs", "ok": None}
        print(json.dumps(missing) if given.json else missing["measured"])
        return 0
    services.end_in_order()
    with s3_server() as env:
        found = measure(given, env)
    result = verdict(found, given.source, given.latency)
    shutil.rmtree(given.work, ignore_errors=True)
    if given.json:
        print(json.dumps(result))
    else:
        print(f"{result['measured']}; load {result['load']:.1f}: {'ok' if result['ok'] else result['bound']}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
