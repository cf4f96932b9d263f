"""Convert an announced checkpoint once, as soon as it is complete.

Webhooks start this flow. An announcement is a hint: the flow checks, on the machine with the files, whether
the location is allowed, whether the save is complete and whether it has been converted already. Below a
watched root, the root's own target applies, so that a sweep does not convert the same checkpoint again. The
conversion is that of `flows.convert`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

from prefect import State, flow, runtime
from prefect.states import Completed

from ckptcore.catalog.training import ANNOUNCED
from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import Announcement, record_announced
from ckptcore.errors import Busy, CkptError, DestinationExists, UsageError
from ckptcore.operations.wait import delays
from ckptcore.planning.options import MEANS, MODEL, Option, Source, Verb
from flows._address import end_with
from flows._announcement import alone, effective_request, made_from, require_inside
from flows._naming import failed, run_name
from flows._options import FlowOptions, declared, takes
from flows._reschedule import own_pauses, put_off
from flows._retry import patiently
from flows.convert import steps
from tasks.settle import may_complete, settle


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
            "The new folder. Below a watched root, the root's own target applies instead of this and the "
            "output options.",
            "DST",
        ),
    ],
    root: Annotated[
        str, Option("Refuse sources that are not below this path or URL, with links resolved.", "URL")
    ] = "",
    run: Annotated[
        str, Option("The announced training run, for the catalog. Default: the name in the path.")
    ] = "",
    step: Annotated[
        int | None, Option("The announced step, for the catalog if the path does not name one.")
    ] = None,
    meta: Annotated[
        dict[str, Any] | None,
        Option("Facts about the training, for the catalog: metrics, git_commit, user, dataset, config."),
    ] = None,
    wait_minutes: Annotated[
        float,
        Option(
            "How long to wait for an incomplete checkpoint, in minutes. The run does not occupy its worker "
            "between tries."
        ),
    ] = 60.0,
    verb: Verb = "export",
    **given: Any,
) -> Result | State[Any]:
    """Convert an announced checkpoint once, as soon as it is complete."""
    try:
        if root:
            require_inside(source, root)
        looks = delays(wait_minutes)
        here = own_pauses(looks)
        # False is the parameter's default, so it must not override the fingerprint of a root's target.
        options = FlowOptions(**given | {"fingerprint": given["fingerprint"] or None})
        asked = options.request(verb, source, destination)
        job = replace(options.job(), announcement=Announcement(run, step, meta or {}, ANNOUNCED))

        def work() -> Result | State[Any]:
            request = effective_request(asked, step, options.catalog)
            try:
                tried = settle.with_options(retries=len(here), retry_delay_seconds=[*here])
                digest = tried(request.source, request.recover)
            except Exception as error:
                if may_complete(error):
                    put_off(looks, reason(error))
                raise
            # Two senders, or a webhook and a sweep, can announce it twice: one run converts it.
            with alone(request, digest, str(runtime.flow_run.id), here, options.catalog) as mine:
                if not mine:
                    record_announced(job.announcement, request.source, options.catalog)
                    return already(request.destination)
                try:
                    return steps(request, job)
                except (Busy, DestinationExists) as error:
                    # A process without a claim, for example at a terminal, was faster.
                    for pause in (0.0, *here) if isinstance(error, Busy) else (0.0,):
                        time.sleep(pause)
                        if made_from(request, digest, options.catalog):
                            record_announced(job.announcement, request.source, options.catalog)
                            return already(request.destination)
                    raise

        # The sender has its reply: nobody else notices that the catalog was down for a moment.
        try:
            return patiently(work)
        except Busy as error:
            put_off(looks, reason(error))
            raise
    except CkptError as error:
        return failed(error)


def reason(error: Exception) -> str:
    """Return an error in one line."""
    return f"{error.code}: {error.message}" if isinstance(error, CkptError) else f"{error!r}"


def already(destination: str) -> State[Any]:
    """Return the state of a run whose checkpoint was converted before."""
    return Completed(name="Already", message=f"{destination} was made from this checkpoint before")


if __name__ == "__main__":
    end_with(
        UsageError(
            "flows.arrived must be started by the webhook receiver or a deployment",
            hint="convert one checkpoint with python -m flows.convert SRC DST, all with flows.sweep",
        )
    )
