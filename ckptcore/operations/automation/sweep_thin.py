"""Thin the steps below a watched root, where its retention has ``keep_optimizer_last``.

A sweep does it behind its conversions. A step of which an output is not made yet, or is outdated, stays as it
is: the output may hold the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptcore.catalog.watched_roots import RootRow
from ckptcore.errors import UsageError
from ckptcore.operations.automation.sweep_items import SweepItem, SweepState
from ckptcore.operations.retention.root_retention import optimizers_kept
from ckptcore.operations.retention.thin import ThinDecision, ThinOutcome, ThinRules, thin
from ckptcore.planning.request import Settings
from ckptcore.store import local_path

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_DONE = {SweepState.MADE, SweepState.CONVERTED}
_STATES = {
    ThinOutcome.THINNED: SweepState.THINNED,
    ThinOutcome.READY: SweepState.THINNABLE,
    ThinOutcome.UNSAFE: SweepState.FAILED,
}


def thin_swept(
    catalog: Catalog,
    root: RootRow,
    items: Sequence[SweepItem],
    settings: Settings,
    *,
    settle_s: float,
    dry_run: bool = False,
    on_item: Callable[[SweepItem], None] | None = None,
) -> Iterator[SweepItem]:
    """Thin the steps of a root that are converted, but the newest ones; yield those that change, or cannot.

    Args:
        catalog: The catalog.
        root: The root.
        items: Its checkpoints behind the conversions.
        settings: Memory and threads for reading.
        settle_s: Seconds without a change before a step is thinned.
        dry_run: Change nothing.
        on_item: Called for each of them.

    Raises:
        UsageError: The root's retention is invalid, or nothing can be set aside below it.
    """
    optimizers = None if root.trouble else optimizers_kept(root)  # an odd root was not swept
    if optimizers is None:
        return
    if local_path(root.uri) is None:
        raise UsageError(
            f"cannot thin below {root.uri}: objects cannot be set aside",
            hint="remove keep_optimizer_last from the retention of the root",
        )
    waiting = {item.source for item in items if item.standing not in _DONE}
    sources = dict.fromkeys(item.source for item in items if item.source not in waiting)
    rules = ThinRules(keep_last=optimizers, min_age_s=settle_s)
    changed: list[SweepItem] = []

    def take(step: ThinDecision) -> None:
        if step.outcome in _STATES:
            changed.append(_item(root, step))
            if on_item is not None:
                on_item(changed[-1])

    thin(catalog, [*sources], rules, settings, yes=not dry_run, on_item=take)
    yield from changed


def _item(root: RootRow, step: ThinDecision) -> SweepItem:
    state = _STATES[step.outcome]
    why = "; ".join(step.why) if state is SweepState.FAILED else ""
    return SweepItem(root.name, step.uri, step.step, state, why, step.home)
