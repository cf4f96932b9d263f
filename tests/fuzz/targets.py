"""Find the folders to fuzz, and read a changed one within bounds.

A reader may return a manifest, which is then checked, or raise one of the documented errors. Anything
else is a defect: another exception, more than 5 s of a processor, more than 512 MiB for less than 1 MB of
input, or any audit event of a pickle, a process or code that would run.
"""

from __future__ import annotations

import io
import resource
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import zstandard
from folder import Folder, load

from ckptcore.checking.check import check
from ckptcore.errors import CkptError
from ckptcore.formats import read_manifest
from ckptcore.formats.base import Source

SECONDS = 5.0  # of a processor: on a busy machine an input may wait as long for its turn
GROWTH = 512 << 20
# Events that no reader may cause (https://docs.python.org/3/library/audit_events.html).
FORBIDDEN = frozenset(
    {
        "pickle.find_class",
        "os.system",
        "subprocess.Popen",
        "os.exec",
        "os.posix_spawn",
        "socket.connect",
        "ctypes.dlopen",
        "shutil.rmtree",
        "os.remove",
    }
)


class Defect(Exception):
    """Forbidden behaviour of a reader."""


@dataclass(frozen=True, slots=True)
class Target:
    """One checkpoint to change. name: of the sample. file: the file to open, or None for the folder."""

    name: str
    files: Mapping[str, bytes]
    file: str | None


def targets(root: Path, limit: int = 1_000_000) -> Iterator[Target]:
    """Yield every small enough checkpoint below a folder of samples and archives of samples."""
    yield from _folders(root, limit)
    for archive in sorted(root.glob("*.tar.zst")):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / archive.name.removesuffix(".tar.zst")
            plain = zstandard.ZstdDecompressor().stream_reader(archive.read_bytes()).read()
            with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
                # Python before 3.11.4 has no filters: https://peps.python.org/pep-0706/
                tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
                tar.extractall(folder)
            yield from _folders(folder, limit)


def _folders(root: Path, limit: int) -> Iterator[Target]:
    # root/family/sample, or root/sample in an archive of one family.
    found = [p for p in root.iterdir() if p.is_dir()]
    families = [p for p in found if not any(q.name.startswith("expected") for q in p.iterdir())]
    samples = [p for p in found if p not in families]
    samples += [p for family in families for p in family.iterdir() if p.is_dir()]
    for sample in sorted(samples):
        for inner in sorted(sample.iterdir()):
            if inner.name.startswith(
                ("expected", "fixture", "hf_export", "flat_meta", "logits", "ds_config", "config.json")
            ):
                continue
            files = load(inner, limit)
            if files:
                name = f"{sample.parent.name}/{sample.name}/{inner.name}"
                target = Target(name, files, inner.name if inner.is_file() else None)
                run(target, files, deep=True)  # unchanged: imports what it needs
                yield target


def run(target: Target, files: Mapping[str, bytes], *, deep: bool) -> str:
    """Read a changed checkpoint.

    Args:
        target: The checkpoint.
        files: Its changed files.
        deep: Whether to check its bytes, too, as `validate --level bytes` does.

    Returns:
        "sound", "findings", "gone", or an error's code.

    Raises:
        Defect: The reader did something forbidden.
    """
    folder = Folder(files)
    if target.file is not None and target.file not in files:
        return "gone"
    name = target.file
    listing = {name: len(files[name])} if name is not None else folder.list()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with bounded():
        try:
            manifest = read_manifest(Source(folder, name, listing))
            report = check(manifest, folder if deep else None, "bytes" if deep else "coverage", workers=1)
            outcome = "sound" if report.ok else "findings"
        except CkptError as error:
            outcome = error.code
            if outcome == "internal":
                raise Defect(f"{error}") from error
        except Defect:
            raise
        except BaseException as error:
            raise Defect(f"{type(error).__name__}: {error}") from error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    if grown > GROWTH:
        raise Defect(f"memory grew by {grown >> 20} MiB")
    return outcome


_watching = False
_installed = False


@contextmanager
def bounded() -> Iterator[None]:
    global _watching, _installed
    if not _installed:
        sys.addaudithook(_audit)
        _installed = True
    old = signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    _watching = True
    try:
        yield
    finally:
        _watching = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in FORBIDDEN:
        raise Defect(f"{event} {args!r:.200}")


def _late(number: int, frame: FrameType | None) -> None:
    raise Defect(f"took more than {SECONDS:g} s of a processor")
