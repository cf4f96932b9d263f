"""Open a checkpoint, read its manifest, and check it.

This is a module of its own because its import time is the start time of `inspect` and `validate` (decision 80
in DESIGN.md). They do not import the stages of `ckptcore.conversion.pipeline`, which use this module, too.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace

from ckptcore.checking.check import Report, check
from ckptcore.core.file_sums import FileSums
from ckptcore.core.manifest import Manifest
from ckptcore.errors import LEVELS, DamagedCheckpoint, UnknownFormat, UnsafeContent, UnsupportedFormat
from ckptcore.formats import open_source, read_manifest
from ckptcore.redaction import bare_url
from ckptcore.store import forget_small_reads, is_s3, join_url, open_source_store
from ckptcore.utils.memory import reusing_memory
from ckptcore.utils.workers import Progress

_log = logging.getLogger("ckptcore")


def inspect(
    source: str,
    recover: bool = False,
    keep_quantized: bool = False,
    weights: str = "auto",
    *,
    observe: bool = False,
) -> Manifest:
    """Read the manifest of the checkpoint at a path or URL; no tensor byte is read.

    Args:
        source: Path or URL.
        recover: Accept a save that did not finish, or that nothing proves complete.
        keep_quantized: Keep quantised weights as they are stored, instead of their values.
        weights: Which of two stored copies of trained weights is the model: ``master``, ``module``, ``auto``.
        observe: Begin `Manifest.sums`: later reads of the source may complete the digests of its files.

    Returns:
        The manifest.

    Raises:
        SourceUnreadable: The source does not exist or cannot be read.
        UnknownFormat: No format recognises the source.
        UnsupportedFormat: The format is recognised but not supported.
        NotComplete: The save did not finish.
    """

    def read() -> Manifest:
        opened = open_source(source, recover=recover, keep_quantized=keep_quantized, weights=weights)
        sums = FileSums() if observe else None
        opened.store.observer = sums
        with closing(opened.store):
            manifest = read_manifest(opened)
        if sums is None:
            return manifest
        inside, above = join_url(manifest.root, ""), join_url(opened.store.url, "")
        return (
            replace(manifest, sums=sums.below(inside.removeprefix(above)))
            if inside.startswith(above)
            else manifest
        )

    if not is_s3(source):
        return read()
    try:
        manifest = read()
    except (DamagedCheckpoint, UnknownFormat, UnsupportedFormat, UnsafeContent) as error:
        _log.info("%s is read once more: %s", bare_url(source), error.message)
    else:
        if all(f.severity != "error" for f in manifest.findings):
            return manifest
    # A bit may have flipped on the way, and what was received is kept: all of it is asked for again.
    forget_small_reads()
    return read()


def validate(
    manifest: Manifest, level: str = "coverage", *, workers: int = 2, progress: Progress | None = None
) -> Report:
    """Check a manifest (`check`); levels ``bytes`` and ``values`` read its files."""
    if not _is_deep(level):
        return check(manifest, None, level)
    with closing(open_source_store(manifest.root, manifest.versions)) as store:
        store.observer = manifest.sums
        return check(manifest, store, level, workers=workers, progress=progress)


def examine(
    source: str,
    level: str,
    *,
    recover: bool = False,
    keep_quantized: bool = False,
    weights: str = "auto",
    workers: int = 2,
    progress: Progress | None = None,
    observe: bool = False,
) -> tuple[Manifest, Report]:
    """Read the manifest of a checkpoint and check it: `inspect`, then `validate`.

    Args:
        source: Path or URL.
        level: Level of the check.
        recover: See `inspect`.
        keep_quantized: See `inspect`.
        weights: See `inspect`.
        workers: Threads that read files at levels ``bytes`` and ``values``.
        progress: What these levels report to.
        observe: See `inspect`; at the other levels nothing is observed.
    """
    with reusing_memory():  # a check makes columns as large as those that reading has freed
        observe = observe and _is_deep(level)
        manifest = inspect(source, recover, keep_quantized, weights, observe=observe)
        if not _is_deep(level):
            return manifest, validate(manifest, level)
    return manifest, validate(manifest, level, workers=workers, progress=progress)


def _is_deep(level: str) -> bool:
    """Report whether a level reads the files of tensors."""
    return level in LEVELS and LEVELS.index(level) >= LEVELS.index("bytes")
