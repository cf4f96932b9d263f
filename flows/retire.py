"""Retire: sources that a verified child proves to hold, deleted as the policy says. For a schedule.

Without ``yes`` nothing is deleted: the table tells what would be, and why the rest stays.
``ckptcore retire`` does the same.
"""

from __future__ import annotations

from typing import Any

from prefect import State, flow
from prefect.states import Completed, Failed

from ckptcore.errors import CkptError
from ckptcore.operations.replacement import Allowed
from ckptcore.operations.retention import Policy
from ckptcore.planning.request import Settings
from ckptcore.utils.units import parse_size, show_size
from flows._naming import explain
from tasks.maintenance import retire as let_go


@flow(name="retire", flow_run_name="retire")
def retire(
    scope: str | None = None,
    keep_last: int = 3,
    keep_every: int | None = None,
    yes: bool = False,
    fingerprint: bool = False,
    accept_cast: bool = False,
    accept_loss: list[str] | None = None,
    memory: str = "1GiB",
    workers: int | None = None,
    device: str = "cpu",
    catalog: str | None = None,
) -> State[Any]:
    """Delete sources that something verified proves to hold, but for those that are kept.

    scope: a watched root or a training run by name; by default all watched roots.
    keep_last: the newest steps of every run.
    keep_every: and every step that this divides.
    yes: delete; without it nothing is changed.
    fingerprint: read sources and children to take their fingerprints.
    accept_cast: the same as the name cast in accept_loss.
    accept_loss: globs on objects and files that may go unproven; the name cast gives up what a cast took.
    memory: budget for tensor buffers.
    workers: threads; by default as the machine has.
    device: torch device for sums.
    catalog: URL of the catalog; by default CKPTCORE_CATALOG_URL, else the user's own.
    """
    try:
        means = Settings(parse_size(memory), workers, device)
        policy, allowed = Policy(keep_last, keep_every), Allowed.of(accept_loss, cast=accept_cast)
        found = let_go(scope, policy, yes, allowed, means if fingerprint else None, catalog, means)
    except CkptError as error:
        return Failed(message=explain(error), data=error)
    counts = ", ".join(f"{n} {name}" for name, n in sorted(found.counts.items())) or "no source"
    return Completed(message=f"{counts}, {show_size(found.nbytes)}", data=found)
