"""Convert complete checkpoints below the watched roots that are not converted yet.

1. list every watched root, and classify its checkpoints;
2. convert those that are ready, the oldest step first, each under a claim;
3. record the results: a table for each root, and a note in the catalog;
4. delete events and messages that ended long ago.

This flow is for a schedule. Most trainers announce nothing; it finds the checkpoints without a webhook.
``ckptcore sweep`` does the same.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import State, flow, runtime
from prefect.states import Completed, Failed

from ckptcore.catalog import open_catalog
from ckptcore.errors import CkptError
from ckptcore.operations.options import SweepOptions
from ckptcore.operations.sweep import Standing, SweepItem, Swept, forget_events, watched, work
from ckptcore.planning.options import MEANS, Option, options_of
from ckptcore.planning.request import Request
from ckptcore.utils.units import parse_duration
from flows._naming import closed, failed
from flows._options import RUN, FlowOptions, declared, flow_options, takes
from flows.convert import steps
from tasks.sweep import look, note

NAMED = 5  # checkpoints in the message of a failed run


@flow(name="sweep", flow_run_name="sweep")
@takes(declared(*options_of(SweepOptions), of=SweepOptions), declared(*MEANS, "device", *RUN))
def sweep(
    roots: Annotated[list[str] | None, Option("Names of watched roots; default: all enabled ones.")] = None,
    **given: Any,
) -> State[Any]:
    """Convert complete checkpoints below the watched roots that are not converted yet."""
    try:
        wanted = flow_options(SweepOptions, given)
        # False is the parameter's default, so it must not override the fingerprint of a root's target.
        job = FlowOptions.of(given | {"fingerprint": wanted.fingerprint or None, "meta": wanted.meta}).job()
        catalog, dry_run, settle_s = wanted.catalog, wanted.dry_run, parse_duration(wanted.min_age)

        def convert(request: Request) -> None:
            steps(request, job)

        found: list[SweepItem] = []
        with open_catalog(catalog) as known:
            for root in watched(known, roots or ()):
                items = look(
                    root.name, closed(root), catalog, dry_run, settle_s, wanted.retry_failed, wanted.relist
                )
                who = str(runtime.flow_run.id)
                done = [
                    i if dry_run or i.standing is not Standing.READY else work(known, i, convert, who)
                    for i in items
                ]
                note(root.name, closed(root), closed(done), catalog, dry_run)
                found += done
            if not dry_run:
                forget_events(known)
    except CkptError as error:
        return failed(error)
    return _outcome(Swept(tuple(found), dry_run, wanted.strict))


def _outcome(swept: Swept) -> State[Any]:
    summary = (
        ", ".join(f"{n} {name}" for name, n in sorted(swept.counts.items())) or "no checkpoint was found"
    )
    counted = {Standing.FAILED, Standing.UNREAD, Standing.REFUSED}
    counted |= {Standing.BROKEN} if swept.strict else set()
    wrong = [i for i in swept.items if i.standing in counted]
    if not wrong:
        return Completed(message=summary, data=swept)
    lines = [f"- {i.source}: {i.why}" for i in wrong[:NAMED]]
    return Failed(message="\n".join([summary, *lines]), data=swept)
