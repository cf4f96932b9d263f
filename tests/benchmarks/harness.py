"""Run benchmarked commands on temporary sources and outputs, and remove these.

Memory: a RAM-disk line needs about three times its source (source, peer, output).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from make_ckpt import SOURCES
from memory import started

from ckptcore.utils.units import show_size

if TYPE_CHECKING:
    from lines import Contender

HERE = Path(__file__).parent
# Peers that need their own environment: placeholder in a command -> the environment variable with the path
# of their Python interpreter. OLMo-core 0.1 has no `unshard_checkpoint`: 3.0.0 has been measured.
INTERPRETERS = {
    "DEEPSPEED": "CKPTCORE_PEER_DEEPSPEED",
    "LIGHTNING": "CKPTCORE_PEER_LIGHTNING",
    "OLMO": "CKPTCORE_PEER_OLMO",
    "VERL": "CKPTCORE_PEER_VERL",
}


class CommandError(Exception):
    """A benchmarked command failed."""


class NoRoom(Exception):
    """This machine has too little memory or disk space for a source."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how to run.

    Attributes:
        ckptcore: Path of the command.
        places: Place -> folder that this run may fill.
        runs: Rounds of a race.
        scale: Divisor of the sources' widths.
        judged: Whether bounds count.
        keep: Whether sources stay after the run.
        env: Environment of the commands.
    """

    ckptcore: Path
    places: dict[str, Path]
    runs: int
    scale: int
    judged: bool
    keep: bool
    env: dict[str, str]

    def argv(self, contender: Contender, source: Path, out: Path) -> list[str]:
        """Return the command with its paths filled in."""
        paths = {
            "SRC": source,
            "OUT": out,
            "PYTHON": sys.executable,
            "PEERS": HERE / "peers.py",
            "CKPTCORE": self.ckptcore,
            "CORE": min(os.sched_getaffinity(0)),
            **{name: os.environ.get(variable, "") for name, variable in INTERPRETERS.items()},
        }
        return [str(paths.get(word, word.replace("SRC/", f"{source}/"))) for word in contender.argv]

    def nbytes(self, source: str) -> int:
        """Return the bytes of a source's tensors."""
        return SOURCES[source](self.scale).nbytes


def say(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def call(argv: Sequence[str], env: dict[str, str] | None = None) -> tuple[float, str]:
    """Run one command; return wall seconds and its stderr. Raise CommandError when it fails."""
    begin = time.perf_counter()
    with started(argv, env, stderr=subprocess.PIPE) as process:
        _, stderr = process.communicate()
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise CommandError(f"{' '.join(argv)}: exit {process.returncode}: {stderr[-600:]}")
    return seconds, stderr


def remove(path: Path) -> None:
    """Remove a file or folder and its staging folder, where they exist."""
    for each in (path, path.with_name(f".{path.name}.ckptcore")):
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache; they must be clean (`sync`)."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


@contextmanager
def checkpoint(bench: Bench, place: str, source: str) -> Iterator[Path]:
    """Yield the source's folder; write it if it is missing, and remove it unless the run keeps sources."""
    folder = bench.places[place] / source
    need, free = 2.2 * bench.nbytes(source), shutil.disk_usage(folder.parent).free
    memory_need = (3 if place == "ram" else 1) * bench.nbytes(source) + 1e9
    memory_free = int(re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[0])
    made = folder.with_name(f"{source}.made")  # a folder without it is incomplete
    if not made.exists() and (free < need or memory_free * 1024 < memory_need):
        raise NoRoom(
            f"not run: {source} needs {show_size(need)} of {place} and {show_size(memory_need)} of "
            f"memory (got {show_size(free)} and {show_size(memory_free * 1024)})"
        )
    try:
        if not made.exists():
            say(f"making {source} ({show_size(bench.nbytes(source))}) on {place}")
            script = str(HERE / "make_ckpt.py")
            call([sys.executable, script, source, str(folder), "--scale", str(bench.scale)])
            made.touch()
        yield folder
    finally:
        if not bench.keep:
            remove(folder)
            made.unlink(missing_ok=True)


def verify(bench: Bench, source: str, out: Path, contender: Contender) -> None:
    """Raise CommandError unless ``out`` has the source's tensors, bit by bit."""
    cast = ["--dtype", contender.dtype] if contender.dtype else []
    script = str(HERE / "verify.py")
    call([sys.executable, script, source, str(out), "--scale", str(bench.scale), *cast])


@contextmanager
def folders(roots: dict[str, Path], scale: int, keep: bool) -> Iterator[dict[str, Path]]:
    """Yield one folder per place, below its root; remove them at the end, also after an error."""
    name = f"ckptcore-bench-{scale}"
    if not keep:  # concurrent runs must not share one
        name += f"-{os.getpid()}"
    places = {place: root / name for place, root in roots.items()}
    try:
        for folder in places.values():
            folder.mkdir(parents=True, exist_ok=True)
        yield places
    finally:
        for folder in set(places.values()):  # one root may be named for both
            if not keep:
                shutil.rmtree(folder)
