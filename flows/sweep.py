"""Sweep: what is complete below the watched roots and not yet converted, converted. For a schedule.

1. list every watched root, and say of each checkpoint how it stands;
2. convert what is ready, the oldest step first, each under a claim;
3. tell what came of it: a table of each root, and words in the catalog;
4. forget events and messages that ended long ago.

Most trainers announce nothing; what no webhook told, this finds. ``ckptcore sweep`` does the same.
"""

from __future__ import annotations

from typing import Any

from prefect import State, flow, runtime
from prefect.states import Completed, Failed

from ckptcore.catalog import open_catalog
from ckptcore.errors import CkptError
from ckptcore.operations.sweep import Item, Standing, Swept, forget_events, watched, work
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.units import parse_duration, parse_size
from flows._engine import engine as parse_engine
from flows._naming import closed, explain
from flows.convert import steps
from tasks.sweep import look, note

NAMED = 5  # checkpoints that a failed run's message names


@flow(name="sweep", flow_run_name="sweep")
def sweep(
    roots: list[str] | None = None,
    dry_run: bool = False,
    settle: str = "2m",
    again: bool = False,
    memory: str = "1GiB",
    workers: int | None = None,
    device: str = "cpu",
    fingerprint: bool = False,
    catalog: str | None = None,
    batch: str = "1GiB",
    engine: str | None = None,
) -> State[Any]:
    """Convert what is complete and not yet converted below the watched roots.

    roots: their names; by default all that are not paused.
    dry_run: say what would be converted, and convert nothing.
    settle: leave alone what changed within this time.
    again: also what failed a short time ago, or was broken.
    memory: budget for tensor buffers.
    workers: threads; by default as the machine has.
    device: torch device for casts.
    fingerprint: one digest of the numbers of every conversion.
    catalog: URL of the catalog; by default CKPTCORE_CATALOG_URL, else the user's own.
    batch: bytes of output in one task.
    engine: where tasks run: threads, dask, ray; by default CKPTCORE_ENGINE, else threads.
    """
    try:
        settings = Settings(parse_size(memory), workers, device, fingerprint=fingerprint or None)
        on, batch_bytes, settle_s = parse_engine(engine), parse_size(batch), parse_duration(settle)

        def convert(request: Request) -> None:
            steps(request, settings, catalog=catalog, batch_bytes=batch_bytes, on=on)

        found: list[Item] = []
        with open_catalog(catalog) as known:
            for root in watched(known, roots or ()):
                items = look(root.name, closed(root), catalog, dry_run, settle_s, again)
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
        return Failed(message=explain(error), data=error)
    return _outcome(Swept(tuple(found), dry_run))


def _outcome(swept: Swept) -> State[Any]:
    told = ", ".join(f"{n} {name}" for name, n in sorted(swept.counts.items())) or "no checkpoint was found"
    wrong = [i for i in swept.items if i.standing in (Standing.FAILED, Standing.UNREAD, Standing.REFUSED)]
    if not wrong:
        return Completed(message=told, data=swept)
    lines = [f"- {i.source}: {i.why}" for i in wrong[:NAMED]]
    return Failed(message="\n".join([told, *lines]), data=swept)
