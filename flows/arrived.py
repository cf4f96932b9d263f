"""Arrived: a checkpoint that was announced, converted once, as soon as it is whole.

What webhooks start. An announcement is a hint: whether the place is allowed, whether the save has finished
and whether the work has been done is looked up here, where the files are. So is what to make of it: below a
watched root the root's own target counts, and a sweep does not make the same checkpoint a second time. A face
of `flows.convert`, for deployments.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

from prefect import State, flow, runtime
from prefect.states import Completed, Failed

from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import Announcement
from ckptcore.errors import Busy, CkptError, DestinationExists
from ckptcore.operations.wait import delays
from ckptcore.planning.options import MEANS, MODEL, Option, Source, Verb
from flows._announcement import alone, made_from, meant, require_inside
from flows._naming import explain, run_name
from flows._options import FlowOptions, declared, takes
from flows._reschedule import inside, put_off
from flows._retry import patiently
from flows.convert import steps
from tasks.settle import may_become_complete, settle


@flow(name="arrived", flow_run_name=run_name)
@takes(
    declared(
        "to",
        "dtype",
        *reversed(MODEL),
        "max_file_size",
        *MEANS,
        "device",
        "fingerprint",
        "catalog",
        fingerprint=False,
    )
)
def arrived(
    source: Source,
    destination: Annotated[
        str,
        Option(
            "The new folder. It counts, as the options of the output do, below no watched root: there the "
            "root's own target says what is made.",
            "DST",
        ),
    ],
    root: Annotated[
        str, Option("Refuse sources that do not lie below this place, links resolved.", "URL")
    ] = "",
    run: Annotated[
        str,
        Option("What the announcement calls the training run; for the catalog, where no name tells a step."),
    ] = "",
    step: Annotated[
        int | None, Option("What the announcement calls the step; for the catalog, where no name tells it.")
    ] = None,
    wait_minutes: Annotated[
        float,
        Option(
            "How long to look again at a checkpoint that is not whole yet; a worker's place is given back "
            "between the looks."
        ),
    ] = 60.0,
    verb: Verb = "export",
    **given: Any,
) -> Result | State[Any]:
    """Convert a checkpoint that was announced, as soon as it is whole, and only once."""
    try:
        if root:
            require_inside(source, root)
        looks = delays(wait_minutes)
        here = inside(looks)
        # A switch that is off is no word against a fingerprint that a root's target takes by default.
        options = FlowOptions(**given | {"fingerprint": given["fingerprint"] or None})
        asked = options.request(verb, source, destination)
        job = replace(options.job(), announcement=Announcement(run, step))

        def work() -> Result | State[Any]:
            request = meant(asked, step, options.catalog)
            try:
                tried = settle.with_options(retries=len(here), retry_delay_seconds=[*here])
                digest = tried(request.source, request.recover)
            except Exception as error:
                if may_become_complete(error):
                    put_off(looks, reason(error))
                raise
            # Announced twice, by two senders or by a webhook and a sweep: one run does the work.
            with alone(request, digest, str(runtime.flow_run.id), here, options.catalog) as mine:
                if not mine:
                    return already(request.destination)
                try:
                    return steps(request, job)
                except (Busy, DestinationExists) as error:
                    # Somebody without a claim, at a terminal say, was faster.
                    for pause in (0.0, *here) if isinstance(error, Busy) else (0.0,):
                        time.sleep(pause)
                        if made_from(request.destination, request.source, digest, options.catalog):
                            return already(request.destination)
                    raise

        # The sender has been told that it is accepted: nobody else sees a catalog that was away for a moment.
        try:
            return patiently(work)
        except Busy as error:
            put_off(looks, reason(error))
            raise
    except CkptError as error:
        # The message is what a person reads first: the finding, not "encountered an exception".
        return Failed(message=explain(error), data=error)


def reason(error: Exception) -> str:
    """An error in one line."""
    return f"{error.code}: {error.message}" if isinstance(error, CkptError) else f"{error!r}"


def already(destination: str) -> State[Any]:
    """The state of a run that found its work done."""
    return Completed(name="Already", message=f"{destination} was made from this checkpoint before")
