"""Proving again: is what was staged what the source holds, although its files' status has changed?

A file that is rewritten in place can get its size and modification time back. Its ctime tells, but a chmod or
a backup changes that, too. So where a ctime alone differs from the one noted with the plan, or the plan of an
older version has none, every output file is computed a second time and compared with the staged bytes, while
stamps and ctimes stay as they are. That costs reading the source and the staged files once, and decides it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import cast

import numpy as np

from ckptcore.conversion.staging import Staging
from ckptcore.errors import OutputMismatch, SourceChanged
from ckptcore.execution.execute import Progress, execute_files
from ckptcore.execution.source_stamps import (
    load,
    load_ctimes,
    require_same,
    save,
    settled_ctimes,
    take_ctimes,
    untouched,
)
from ckptcore.formats import open_source, read_manifest
from ckptcore.planning.plan import Plan, load_file_plan
from ckptcore.planning.request import Request, Settings
from ckptcore.store import Buffer, Store, Writer, open_store

_TRIES = 3  # a backup that goes through the source meanwhile touches every file once
_BLOCK = 4 << 20
_HINT = "run the command again when nothing writes to the source"
_log = logging.getLogger("ckptcore")


def require_source(
    staging: Staging, plan: Plan, request: Request, settings: Settings, progress: Progress | None
) -> None:
    """Last thing before publishing: the source is what was read, by its stamps and ctimes, or by its bytes.

    Raises `SourceChanged`. What was staged from other bytes is removed first: nobody may go on with it.
    """
    noted, before = load(staging.plan), load_ctimes(staging.plan)
    if noted is None:  # nothing says what the source was: no comparing can prove anything
        raise SourceChanged(
            f"the plan in {staging.plan.url} does not say what its source was",
            hint="prepare the conversion again",
        )
    with closing(open_store(plan.source)) as source:
        require_same(noted, source)
        now = take_ctimes(noted, source)
        if untouched(before, now):
            return
        for _ in range(_TRIES):
            _log.info("%s: %s; reading the source again", plan.source, _why(before, now))
            before = settled_ctimes(noted, source)
            _compare(staging, plan, request, settings, source, noted, progress)
            require_same(noted, source)
            now = take_ctimes(noted, source)
            if untouched(before, now):
                save(staging.plan, noted, now)  # what was proven is what these times stand for
                return
    raise SourceChanged(
        f"what was read of {plan.source} cannot be proven: the ctimes of its files change again and again "
        f"(last that of {_differing(before, now)})",
        hint=_HINT,
    )


def _compare(
    staging: Staging,
    plan: Plan,
    request: Request,
    settings: Settings,
    source: Store,
    noted: Mapping[str, str | None],
    progress: Progress | None,
) -> None:
    """Reads the manifest again, which the literals of plans come from, and computes every file anew."""
    opened = open_source(request.source, recover=request.recover, keep_quantized=request.keep_quantized)
    with closing(opened.store):
        digest = read_manifest(opened).digest
    if digest != plan.manifest_digest:
        staging.clear()
        raise SourceChanged(f"{request.source} was rewritten while it was converted", hint=_HINT)
    # Of a store, executing needs a writer, and a place for receipts, here nowhere.
    held, kept = cast("Store", _Held(staging.files)), cast("Store", _Nothing())
    scratch = str(staging.root.local) if staging.root.local is not None else None
    try:
        execute_files(
            lambda i: load_file_plan(staging.plan, i),
            [f.index for f in plan.files],
            plan_digest=plan.digest,
            source=source,
            files=held,
            receipts=kept,
            scratch=scratch,
            items=plan.items,
            settings=replace(settings, digest=False, fingerprint=False),
            total=plan.bytes_out,
            unchanged=lambda paths: require_same(dict(noted), source, paths),
            progress=None if progress is None else lambda _, done, total: progress("verify", done, total),
        )
    except OutputMismatch as error:
        staging.clear()
        raise SourceChanged(
            f"{request.source} was rewritten while it was converted: {error.message}", hint=_HINT
        ) from error


def _why(before: Mapping[str, int | None] | None, now: Mapping[str, int | None]) -> str:
    if before is None:
        return "the plan of an older version has no ctimes"
    return f"the ctime of {_differing(before, now)} changed, its size and modification time did not"


def _differing(before: Mapping[str, int | None] | None, now: Mapping[str, int | None]) -> str:
    return next((path for path in now if (before or {}).get(path) != now[path]), "no file")


class _Held:
    """A store whose writers compare what they are given with the file that is there."""

    def __init__(self, staged: Store) -> None:
        self._staged = staged

    def writer(self, path: str, nbytes: int) -> Writer:
        return _HeldWriter(self._staged, path)

    def stamp(self, path: str) -> str | None:
        return self._staged.stamp(path)

    def free_bytes(self) -> None:
        return None


class _HeldWriter:
    sequential = True  # what is filled in late, checksums behind the data, is there before it is passed on

    def __init__(self, staged: Store, path: str) -> None:
        self._staged, self._path = staged, path
        self._block = memoryview(bytearray(_BLOCK))

    def write(self, at: int, data: Buffer | bytes) -> None:
        given = np.frombuffer(data, np.uint8)
        for begin in range(0, len(given), _BLOCK):
            part = given[begin : begin + _BLOCK]
            there = self._block[: len(part)]
            self._staged.read_into(self._path, at + begin, there)
            same = np.equal(part, np.frombuffer(there, np.uint8))
            if not same.all():
                first = at + begin + int(np.argmin(same))
                raise OutputMismatch(f"{self._path} holds another byte {first} than the source gives now")

    def copy(self, source: Store, path: str, start: int, length: int, at: int) -> bool:
        return False

    def commit(self) -> None:
        """Nothing was written."""

    def abort(self) -> None:
        """Nothing was written."""


class _Nothing:
    """A store for receipts that nobody reads."""

    def size(self, path: str) -> None:
        return None

    def put(self, path: str, data: bytes) -> None:
        """Not kept."""
