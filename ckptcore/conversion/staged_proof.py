"""Prove that the staged output equals the source, although the status of the source's files changed.

A file that is rewritten in place can get its size and modification time back. Its ctime changes, but a chmod
or a backup changes that, too. If only a ctime differs from the one recorded with the plan, or the plan has
none, every output file is computed a second time and compared with the staged bytes, while
stamps and ctimes stay constant. That reads the source and the staged files once, and is conclusive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial

from ckptcore.checking.source_stamps import (
    load,
    load_ctimes,
    require_same,
    save,
    settled_ctimes,
    take_ctimes,
    untouched,
)
from ckptcore.conversion.staged_plan import plan_run, staged_request
from ckptcore.conversion.staging import Staging
from ckptcore.errors import OutputMismatch, SourceChanged
from ckptcore.execution.execute import recompute_files
from ckptcore.formats import open_source, read_manifest
from ckptcore.planning.plan import Plan
from ckptcore.planning.request import Settings
from ckptcore.store import open_source_store
from ckptcore.utils.workers import Progress

_TRIES = 3  # a backup that runs meanwhile changes the ctime of every file once
_HINT = "run the command again when nothing writes to the source"
_log = logging.getLogger("ckptcore")


def require_source(staging: Staging, plan: Plan, settings: Settings, progress: Progress | None) -> None:
    """Check right before publishing that the source is unchanged, by stamps and ctimes, or by its bytes.

    Raises `SourceChanged`. Files that were staged from other bytes are removed first: no run may use them.
    """
    noted, before = load(staging.plan), load_ctimes(staging.plan)
    if noted is None:  # without stamps nothing can be proven
        raise SourceChanged(
            f"the plan in {staging.plan.url} has no stamps of its source", hint="prepare the conversion again"
        )
    with closing(open_source_store(plan.source, noted)) as source:
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
                save(staging.plan, noted, now)  # the proof is valid for these times
                return
    raise SourceChanged(
        f"cannot prove that {plan.source} is unchanged: the ctimes of its files keep changing "
        f"(last that of {_differing(before, now)})",
        hint=_HINT,
    )


def _compare_files(staging: Staging, plan: Plan, recompute: Callable[[], None]) -> None:
    """Read the manifest again, the source of the plans' literals, and compute every file a second time."""
    request = staged_request(staging)
    opened = open_source(
        request.source,
        recover=request.recover,
        keep_quantized=request.keep_quantized,
        weights=request.weights,
    )
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
        return "the plan has no ctimes"
    return f"the ctime of {_differing(before, now)} changed, its size and modification time did not"


def _differing(before: Mapping[str, int | None] | None, now: Mapping[str, int | None]) -> str:
    return next((path for path in now if (before or {}).get(path) != now[path]), "no file")
