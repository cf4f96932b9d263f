"""Prove that what was staged is what the source holds, although its files' status has changed.

A file that is rewritten in place can get its size and modification time back. Its ctime tells, but a chmod or
a backup changes that, too. So where a ctime alone differs from the one noted with the plan, or the plan of an
older version has none, every output file is computed a second time and compared with the staged bytes, while
stamps and ctimes stay as they are. That costs reading the source and the staged files once, and decides it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial

from ckptcore.conversion.staged_plan import plan_run, staged_request
from ckptcore.conversion.staging import Staging
from ckptcore.errors import OutputMismatch, SourceChanged
from ckptcore.execution.execute import recompute_files
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
from ckptcore.planning.plan import Plan
from ckptcore.planning.request import Settings
from ckptcore.store import open_store
from ckptcore.utils.workers import Progress

_TRIES = 3  # a backup that goes through the source meanwhile touches every file once
_HINT = "run the command again when nothing writes to the source"
_log = logging.getLogger("ckptcore")


def require_source(staging: Staging, plan: Plan, settings: Settings, progress: Progress | None) -> None:
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
        run = plan_run(staging, plan, source, noted)
        recompute = partial(recompute_files, run, [f.index for f in plan.files], settings, progress)
        for _ in range(_TRIES):
            _log.info("%s: %s; reading the source again", plan.source, _why(before, now))
            before = settled_ctimes(noted, source)
            _compare_files(staging, plan, recompute)
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


def _compare_files(staging: Staging, plan: Plan, recompute: Callable[[], None]) -> None:
    """Reads the manifest again, which the literals of plans come from, and computes every file anew."""
    request = staged_request(staging)
    opened = open_source(request.source, recover=request.recover, keep_quantized=request.keep_quantized)
    with closing(opened.store):
        digest = read_manifest(opened).digest
    if digest != plan.manifest_digest:
        staging.clear()
        raise SourceChanged(f"{request.source} was rewritten while it was converted", hint=_HINT)
    try:
        recompute()
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
