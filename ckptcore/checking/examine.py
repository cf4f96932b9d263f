"""Open a checkpoint and check it: what is at a place, and is it complete?

A file of its own, because its start is the start of `inspect` and `validate` (decision 80 in DESIGN.md).
For verbs that look and write nothing. They start without the stages of `ckptcore.conversion.pipeline`, which
read and check through this module, too.
"""

from __future__ import annotations

from contextlib import closing

from ckptcore.checking.check import Report, check
from ckptcore.core.manifest import Manifest
from ckptcore.errors import LEVELS, current_level
from ckptcore.formats import open_source, read_manifest
from ckptcore.store import open_store
from ckptcore.utils.workers import Progress


def inspect(source: str, recover: bool = False, keep_quantized: bool = False) -> Manifest:
    """The manifest of what is at a path or URL; no tensor byte is read.

    recover: take a save as it is that did not finish, or that nothing proves whole. keep_quantized: give
    quantised weights as they are stored, instead of their values.
    Raises `SourceUnreadable`, `UnknownFormat`, `UnsupportedFormat`, `NotComplete`, ....
    """
    opened = open_source(source, recover=recover, keep_quantized=keep_quantized)
    with closing(opened.store):
        return read_manifest(opened)


def validate(
    manifest: Manifest, level: str = "coverage", *, workers: int = 2, progress: Progress | None = None
) -> Report:
    """Checks a manifest; levels ``bytes`` and ``values`` read its files."""
    level = current_level(level)
    deep = level in LEVELS and LEVELS.index(level) >= LEVELS.index("bytes")
    if not deep:
        return check(manifest, None, level)
    with closing(open_store(manifest.root)) as store:
        return check(manifest, store, level, workers=workers, progress=progress)
