"""Run a program of a seed in a fresh world, and make a failing one shorter."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from custody_model import BucketDisk, LocalDisk
from sqlalchemy import Engine
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

from ckptcore.catalog import heartbeats, open_catalog
from ckptcore.operations.readiness import readers_digest
from ckptcore.store import listing, local_listing, place
from tests.simulation.invariants import Broken
from tests.simulation.mutants import MUTANTS, mutate
from tests.simulation.once_failed import ONCE_FAILED, ONCE_FAILED_IN_A_BUCKET
from tests.simulation.programs import PRODUCT, Run
from tests.simulation.scheduler import World
from tests.simulation.seam import Shared, on_simulated_time
from tests.simulation.themes import program

LENGTH = 0  # of a program: its own
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
OWN_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(\[heap\])?$")
LARGE_PAGE, MADV_COLLAPSE = 2 << 20, 25
EPOCH_NS = 2_208_988_800 * 10**9  # 2040: behind the times of all files, so that no decision depends on today

Steps = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        digest: Of its trace and of every call.
        trace: Its steps.
        calls: Every call of every process.
        broken: What was wrong; "" if nothing.
    """

    digest: str
    trace: list[str]
    calls: list[str]
    broken: str


@functools.cache
def _empty_catalog() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "catalog.sqlite"
        open_catalog(str(path)).close()
        return path.read_bytes()


def _is_named(fd: int, name: str) -> bool:
    return os.path.exists(name) and os.path.samestat(os.fstat(fd), os.stat(name))


@contextlib.contextmanager
def _folder(program: str) -> Iterator[Path]:
    """Make a folder whose name comes from the program: names of records come from it in turn."""
    name = hashlib.blake2b(program.encode(), digest_size=8).hexdigest()
    top = Path(MEMORY or tempfile.gettempdir()) / f"simulation-{os.getuid()}-{name}"
    while True:
        with open(f"{top}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the same program may run in another process, which removes it
            if not _is_named(lock.fileno(), lock.name):
                continue
            shutil.rmtree(top, ignore_errors=True)  # of one that was killed
            top.mkdir()
            try:
                yield top
            finally:
                shutil.rmtree(top, ignore_errors=True)
                os.unlink(lock.name)
            return


@contextlib.contextmanager
def _disk(kind: str, folder: Path, shared: Shared) -> Iterator[LocalDisk | BucketDisk]:
    if kind == "local":
        yield LocalDisk(folder)
        return
    import fault_s3

    with fault_s3.serving(clock=lambda: shared.world_ns() / 1e9) as server:
        yield BucketDisk(server)


def _share_statements() -> None:
    """Let all engines of this process and its forks compile a statement once: it takes most of their time."""
    shared, begin = LRUCache[Any, Any](2000), Engine.__init__

    def begun(engine: Engine, *given: Any, **options: Any) -> None:
        begin(engine, *given, **options)
        engine._compiled_cache = shared

    Engine.__init__ = begun  # type: ignore[method-assign]
    SQLiteDialect_pysqlite.__eq__ = lambda one, other: type(one) is type(other)  # type: ignore[method-assign]
    SQLiteDialect_pysqlite.__hash__ = lambda one: hash(type(one))  # type: ignore[method-assign]


def _mount_nothing() -> None:
    """Let this process and its forks ask once what is mounted: a conversion asks a hundred times."""
    mounts = functools.cache(place.mounts)
    for module in (place, listing, local_listing):
        module.mounts = mounts  # type: ignore[attr-defined]


@functools.cache
def warm_up() -> None:
    """Import, and compute, what processes of a simulation use, so that none of them does again."""
    _share_statements()
    _mount_nothing()
    readers_digest()
    verbs = ("save", "save", "save", "make", "make", "make", *PRODUCT, "lose", "scrub")
    run_steps([(verb, number) for number, verb in enumerate(verbs)], inline=True)
    make_forks_cheap()


def make_forks_cheap() -> None:
    """Keep the collector from touching the memory of this process in each of its forks, and map little of it.

    A fork costs as much as its pages are many, and a large one counts as one. A kernel without large pages
    (before Linux 6.1) refuses, and forks only cost more.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    madvise = ctypes.CDLL(None).madvise
    for matched in filter(None, map(OWN_MEMORY.match, Path("/proc/self/maps").read_text().splitlines())):
        first, end = int(matched[1], 16), int(matched[2], 16)
        for start in range(-(-first // LARGE_PAGE) * LARGE_PAGE, end - LARGE_PAGE + 1, LARGE_PAGE):
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(LARGE_PAGE), MADV_COLLAPSE)


def run_steps(steps: Steps, *, disk: str = "local", url: str = "", inline: bool = False) -> Outcome:
    """Run a program in a fresh world.

    Args:
        inline: See `World`.
        steps: The program.
        disk: ``local`` or ``bucket``.
        url: Of an empty catalog on another database than SQLite.
    """
    with _folder(f"{disk} {steps}") as top:
        for name in ("disk/runs/llama", "disk/out", "disk/disk", "made", "grave"):
            (top / name).mkdir(parents=True)
        catalog = top / "catalog.sqlite"
        catalog.write_bytes(_empty_catalog())
        shared, calls = Shared(EPOCH_NS), list[str]()
        with _disk(disk, top / "disk", shared) as storage, on_simulated_time(shared):
            root = top / "disk" if disk == "local" else None
            world = World(shared, root, None if url else catalog, top / "grave", calls, inline)
            run = Run(storage, url or str(catalog), top / "made", world)
            broken = ""
            try:
                run.run(steps)
                run.finish()
            except Broken as error:
                broken = str(error.args[0])
            finally:
                run.close()
                gc.collect()  # it does not run by itself: see `make_forks_cheap`
        calls = [line.replace(str(top), "") for line in calls]
        trace = [line.replace(str(top), "") for line in run.trace]
        digest = hashlib.blake2b(
            "\n".join([*trace, *calls]).encode("utf-8", "surrogateescape"), digest_size=8
        )
        return Outcome(digest.hexdigest(), trace, calls, broken.replace(str(top), ""))


def shortest(steps: Steps, *, disk: str = "local") -> tuple[Steps, Outcome]:
    """Leave out steps of a failing program while it fails."""
    outcome = run_steps(steps, disk=disk)
    at = len(steps) - 1
    while at >= 0 and outcome.broken:
        fewer = [*steps[:at], *steps[at + 1 :]]
        tried = run_steps(fewer, disk=disk)
        if tried.broken and _kind(tried) == _kind(outcome):
            steps, outcome = fewer, tried
        at = min(at, len(steps)) - 1
    return steps, outcome


def _kind(outcome: Outcome) -> str:
    """Return what was wrong, without the particulars: it must stay when steps are left out."""
    return re.sub(r"[^a-z ].*", "", outcome.broken.splitlines()[-1])


def _seed(length: int, disk: str, theme: str, seed: int) -> tuple[int, Outcome]:
    return seed, run_steps(program(seed, length, theme), disk=disk)


def hunt(
    seeds: Sequence[int],
    *,
    length: int = LENGTH,
    disk: str = "local",
    mutant: str = "",
    jobs: int = 1,
    theme: str = "",
) -> Iterator[tuple[int, Outcome]]:
    """Run the programs of some seeds, with a known fault in the product if one is named."""
    warm_up()
    mutate(mutant)
    one = functools.partial(_seed, length, disk, theme)
    if jobs == 1:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs, make_forks_cheap) as pool:
        yield from pool.imap_unordered(one, seeds)


def main(asked: argparse.Namespace) -> int:
    """Do what the command line asks, and return its exit status."""
    if asked.mutants:
        return _run_mutants(asked.mutants)
    if asked.suite:
        return _run_suite(asked.suite, asked.jobs)
    seeds, failed, began = range(asked.seed, asked.seed + asked.count), [], time.monotonic()
    for seed, outcome in hunt(
        seeds, length=asked.steps, disk=asked.disk, mutant=asked.mutant, jobs=asked.jobs, theme=asked.theme
    ):
        if asked.log:
            print(*outcome.calls, sep="\n")
        if asked.count == 1:
            print(*outcome.trace, sep="\n")
        if outcome.broken:
            failed.append(seed)
            steps, least = shortest(program(seed, asked.steps, asked.theme), disk=asked.disk)
            title = f"seed {seed} fails, in {len(steps)} steps:"
            print(title, *least.trace, least.broken.splitlines()[-1], sep="\n", flush=True)
        print(_line(seed, outcome), flush=True)
        if failed and asked.first:
            break
    if asked.count > 1:
        seconds, used = time.monotonic() - began, sum(os.times()[:4])
        print(f"{len(failed)} of {asked.count} failed: {failed} ({seconds:.0f} s, {used:.0f} s of CPU)")
    return bool(failed)


def _line(seed: int, outcome: Outcome) -> str:
    word = "failed" if outcome.broken else "held"
    return f"seed {seed}: {word}, {len(outcome.calls)} calls, digest {outcome.digest}"


def _run_suite(count: int, jobs: int) -> int:
    """Run what `make test` runs: programs on each disk, those that once failed, and some known faults."""
    warm_up()
    bucket = [*((seed, "") for seed in (1, 2)), (0, "thin"), (0, "store"), (1, "store")]
    local = [("local", program(seed)) for seed in range(count - len(bucket))]
    programs = [
        *(("bucket", program(seed, theme=theme)) for seed, theme in bucket),
        *(("bucket", steps) for steps in ONCE_FAILED_IN_A_BUCKET.values()),
        *local,
        *(("local", steps) for steps in ONCE_FAILED.values()),
    ]
    with multiprocessing.get_context("fork").Pool(jobs, make_forks_cheap) as pool:
        outcomes = pool.starmap(_of_disk, programs, chunksize=1)
        repeated = pool.starmap(_of_disk, [(*one, 0.001) for one in local[:2]], chunksize=1)
    first = [outcome for outcome, steps in zip(outcomes, programs, strict=True) if steps in local[:2]]
    differ = [one.digest for one in repeated] != [one.digest for one in first]
    failed = [outcome for outcome in outcomes if outcome.broken]
    for outcome in failed:
        print(*outcome.trace, outcome.broken, sep="\n")
    print(f"{len(failed)} of {len(outcomes)} failed{'; a program ended in two ways' * differ}")
    return _run_mutants(32) or bool(failed) or differ


def _of_disk(disk: str, steps: Steps, beat_s: float = heartbeats.PERIOD_S) -> Outcome:
    """Run a program. beat_s: between two turns of what a real clock wakes, which must make no difference."""
    with mock.patch.object(heartbeats, "PERIOD_S", beat_s):
        return run_steps(steps, disk=disk)


def _run_mutants(nth: int) -> int:
    """Run the program that finds each n-th mutant, in a process of its own; fail if one finds nothing."""
    warm_up()
    missed = []
    found = [name for name, mutant in MUTANTS.items() if mutant.seed is not None]
    for name in found[::nth]:
        child = os.fork()
        if not child:
            mutant = MUTANTS[name]
            mutate(name)
            broken = run_steps(program(mutant.seed or 0), disk=mutant.disk).broken
            os._exit(0 if broken and mutant.only in broken.splitlines()[-1] else 1)
        if os.waitpid(child, 0)[1]:
            missed.append(name)
    print(f"missed: {missed}")
    return bool(missed)
