"""Give a staged plan what carries it out: its source, its stores, and a check that the source is unchanged.

A module of its own, for processes that do nothing else: who composes plans imports every map and rule, which
takes as long again as all that moving bytes needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ckptcore.checking.source_stamps import require_same
from ckptcore.conversion.staging.staging import Staging
from ckptcore.execution.plan_run import PlanRun
from ckptcore.planning.plan import Plan, load_file_plan
from ckptcore.planning.request import Settings
from ckptcore.store import Store
from ckptcore.store.ahead import ReadsAhead


def plan_run(
    staging: Staging,
    plan: Plan,
    source: Store,
    stamps: Mapping[str, str | None],
    settings: Settings | None = None,
) -> PlanRun:
    """Return the inputs for carrying out a staged plan.

    Args:
        staging: The staging folder.
        plan: The plan.
        source: The checkpoint's folder.
        stamps: The stamps of the source's files.
        settings: Memory of a run that writes.
    """
    return PlanRun(
        digest=plan.digest,
        load=partial(load_file_plan, staging.plan),
        total=plan.bytes_out,
        source=source,
        items=plan.items,
        # Where every request is for the version of its stamp, each read proves it.
        unchanged=_ignore
        if isinstance(source, ReadsAhead) and source.pins
        else partial(_require_same, stamps, source),
        files=staging.files,
        receipts=staging.receipts,
        scratch=staging.scratch,
        uploads=staging.uploads_of(plan, settings),
    )


def _require_same(stamps: Mapping[str, str | None], source: Store, paths: Sequence[str]) -> None:
    require_same(stamps, source, paths)


def _ignore(paths: Sequence[str]) -> None:
    """Do nothing."""
