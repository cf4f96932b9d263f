"""Convert complete checkpoints below the watched roots that are not converted yet.

1. list every watched root, and classify its checkpoints;
2. convert those that are ready, the oldest step first, each under a claim; small ones in batches;
3. thin what is converted, where a root's retention has ``keep_optimizer_last``;
4. record the results: a table for each root, and a note in the catalog;
5. delete events and messages that ended long ago.

This flow is for a schedule. Most trainers announce nothing; it finds the checkpoints without a webhook.
``ckptcore sweep`` does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from prefect import State, flow, runtime
from prefect.states import Completed, Failed

from ckptcore.catalog import open_catalog
from ckptcore.catalog.training import facts_of_every
from ckptcore.catalog.watched_roots import RootRow
from ckptcore.conversion.publish import Result
from ckptcore.errors import CkptError
from ckptcore.operations.automation.sweep import (
    ConvertEach,
    SweepSettings,
    convert_ready,
    end_interrupted,
    forget_events,
    of_root,
    watched,
)
from ckptcore.operations.automation.sweep_items import SweepItem, SweepState, Swept
from ckptcore.operations.options import SweepOptions
from ckptcore.planning.options import MEANS, Option, options_of, read_options
from ckptcore.planning.request import Request
from ckptcore.utils.isolation import attempt, error_of
from flows._command import entry
from flows._naming import closed, failed
from flows._options import RUN, FlowJob, FlowOptions, declared, takes
from flows.convert import steps
from tasks.assets import asset_keys
from tasks.logs import log
from tasks.sweep import announce, convert_small, look, note, thin

NAMED = 5  # checkpoints in the message of a failed run


@flow(name="sweep", flow_run_name="sweep")
@takes(declared(*options_of(SweepOptions), of=SweepOptions), declared(*MEANS, "device", *RUN))
def sweep(
    roots: Annotated[list[str] | None, Option("Names of watched roots; default: all enabled ones.")] = None,
    **parameters: Any,
) -> State[Any]:
    """Convert complete checkpoints below the watched roots that are not converted yet."""
    try:
        options = read_options(SweepOptions, parameters)
        facts_of_every(options.meta or (), "meta")
        # False is the parameter's default, so it must not override the fingerprint of a root's target.
        job = FlowOptions.of(
            parameters | {"fingerprint": options.fingerprint or None, "meta": options.meta}
        ).job()
        catalog, settings = options.catalog, SweepSettings.of(options)

        def convert(request: Request) -> None:
            steps(request, job)

        sweep_items: list[SweepItem] = []
        with open_catalog(catalog) as catalog_db:

            def pass_over(root: RootRow) -> Iterator[SweepItem]:
                items = look(root.name, closed(root), catalog, settings)
                who = str(runtime.flow_run.id)
                convert_batches = _batches_of(job, who)
                outcomes = (
                    items
                    if settings.dry_run
                    else convert_ready(catalog_db, items, convert, who, convert_each=convert_batches)
                )
                yield from outcomes
                if "keep_optimizer_last" in root.retention:
                    thinned = thin(
                        root.name, closed(root), closed(outcomes), catalog, settings, closed(job.settings)
                    )
                    yield from thinned
                    outcomes = [*outcomes, *thinned]
                note(root.name, closed(root), closed(outcomes), catalog, settings.dry_run)

            for root in watched(catalog_db, roots or ()):
                sweep_items += of_root(root, pass_over(root))
            if not settings.dry_run:
                end_interrupted(catalog_db)
                forget_events(catalog_db)
    except CkptError as error:
        return failed(error)
    return _outcome(Swept(tuple(sweep_items), settings.dry_run, settings.strict))


def _batches_of(job: FlowJob, who: str) -> ConvertEach | None:
    """Return how a batch of small checkpoints is converted; None where tasks run on other machines.

    One task converts a batch. What it could not do for a transient reason, and exports that are verified,
    take the steps of a single conversion, which have their own retries.
    """
    if not job.engine.here or job.catalog is False:
        return None
    catalog = job.catalog

    def convert_each(requests: Sequence[Request]) -> list[Result | CkptError]:
        outcomes: list[Result | CkptError | None] = [None] * len(requests)
        small = [n for n, r in enumerate(requests) if r.verb != "export" or not job.verify_export]
        if small:
            together = [requests[n] for n in small]
            name = f"{together[0].source} .. {together[-1].source}"
            small_outcomes = convert_small(
                name, closed(together), job.settings, catalog, job.announcement, who
            )
            for n, result in zip(small, small_outcomes, strict=True):
                outcomes[n] = result
                if not isinstance(result, CkptError):
                    announced = attempt(_announced, result, requests[n].source)
                    if announced is not None:  # it is converted and recorded all the same
                        log.warning("%s is not announced: %s", result.destination, announced.message)
        return [_single(requests[n], result, job) for n, result in enumerate(outcomes)]

    return convert_each


def _announced(result: Result, source: str) -> None:
    keys, sources = asset_keys(result.destination), asset_keys(source)
    announce.with_options(assets=keys, asset_deps=sources)(closed(result))


def _single(request: Request, result: Result | CkptError | None, job: FlowJob) -> Result | CkptError:
    """Return a result; where there is none yet, that of the steps of a single conversion."""
    if result is not None and not (isinstance(result, CkptError) and result.transient):
        return result
    try:
        return steps(request, job)
    except Exception as error:
        return error_of(error)


def _outcome(swept: Swept) -> State[Any]:
    summary = (
        ", ".join(f"{n} {name}" for name, n in sorted(swept.counts.items())) or "no checkpoint was found"
    )
    counted = {SweepState.FAILED, SweepState.UNREAD, SweepState.REFUSED}
    counted |= {SweepState.BROKEN} if swept.strict else set()
    wrong = [i for i in swept.items if i.standing in counted]
    if not wrong:
        return Completed(message=summary, data=swept)
    lines = [f"- {i.source}: {i.why}" for i in wrong[:NAMED]]
    return Failed(message="\n".join([summary, *lines]), data=swept)


if __name__ == "__main__":
    entry(sweep)
