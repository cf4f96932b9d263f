"""Convert an announced checkpoint once, as soon as it is complete.

Webhooks start this flow. An announcement is a hint: the flow checks, on the machine with the files, whether
the location is allowed, whether the save is complete and whether it has been converted already. Below a
watched root, the root's own target applies, so that a sweep does not convert the same checkpoint again. The
conversion is that of `flows.convert`.

A run that waits in its process would occupy one of the worker's few slots: two folders that never become
checkpoints would block every other conversion for an hour. So a run that a worker started ends its process,
and Prefect starts it again after the pause, with the same id, name and parameters.

After transient errors the work of a run is repeated, as if the run had been killed and resumed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar
from uuid import UUID

from prefect import State, flow, runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import Abort
from prefect.states import AwaitingRetry, Completed
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_chain, wait_fixed

from ckptcore.catalog import open_catalog
from ckptcore.catalog.training import ANNOUNCED
from ckptcore.conversion.pipeline import inspect
from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import Announcement, record_announced
from ckptcore.errors import Busy, CkptError, DestinationExists, UnsafeContent, UsageError
from ckptcore.operations import claims
from ckptcore.operations.automation.convert_once import claim_or_skip, is_made
from ckptcore.operations.automation.wait import delays
from ckptcore.operations.export_target import announced_request
from ckptcore.planning.options import MEANS, MODEL, Option, Source, Verb
from ckptcore.planning.request import Request
from ckptcore.redaction import beginning
from ckptcore.store import local_path
from ckptcore.utils.merged_url import roots_of
from flows._naming import failed, run_name
from flows._options import FlowOptions, declared, takes
from flows._prefect import end_with
from flows.convert import steps
from tasks.logs import log
from tasks.retry import LOOKS, is_transient, looks_of
from tasks.wait_until_complete import may_complete, wait_until_complete

T = TypeVar("T")

# Seconds between tries; a database or a server is back by then, or its operators know.
PAUSES: Sequence[float] = (5, 15, 30, 60, 120)
# Seconds. A worker polls for runs 10 s before they are due. It fails if it gets a run whose process still
# exists (Prefect 3.8, workers/base.py: a borrower holds one token of its limiter).
AT_LEAST = 30.0


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
    **parameters: Any,
) -> Result | State[Any]:
    """Convert an announced checkpoint once, as soon as it is complete."""
    try:
        if root:
            require_inside(source, root)
        # All pauses of the run; `pauses` are those that this process waits itself.
        looks = delays(wait_minutes)
        pauses = own_pauses(looks)
        # False is the parameter's default, so it must not override the fingerprint of a root's target.
        options = FlowOptions(**parameters | {"fingerprint": parameters["fingerprint"] or None})
        asked = options.request(verb, source, destination)
        job = replace(options.job(), announcement=Announcement(run, step, meta or {}, ANNOUNCED))

        def work() -> Result | State[Any]:
            request = effective_request(asked, step, options.catalog)
            try:
                tried = wait_until_complete.with_options(retries=len(pauses), retry_delay_seconds=[*pauses])
                digest = tried(request.source, request.recover)
            except Exception as error:
                if may_complete(error):
                    reschedule_run(looks, reason(error))
                raise
            # Two senders, or a webhook and a sweep, can announce it twice: one run converts it.
            run_id = str(runtime.flow_run.id)  # a resumed run gets its own claim back at once
            with (
                open_catalog(options.catalog) as catalog_db,
                claim_or_skip(catalog_db, request, digest, run_id, pauses) as mine,
            ):
                if not mine:
                    record_announced(job.announcement, request.source, options.catalog)
                    return already(request.destination)
                try:
                    return steps(request, job)
                except (Busy, DestinationExists) as error:
                    # A process without a claim, for example at a terminal, was faster.
                    for pause in (0.0, *pauses) if isinstance(error, Busy) else (0.0,):
                        time.sleep(pause)
                        if made_from(request, digest, options.catalog):
                            record_announced(job.announcement, request.source, options.catalog)
                            return already(request.destination)
                    raise

        # The sender has its reply: nobody else notices that the catalog was down for a moment.
        try:
            return retry_transient(work)
        except Busy as error:
            reschedule_run(looks, reason(error))
            raise
    except CkptError as error:
        return failed(error)


def reason(error: Exception) -> str:
    """Return an error in one line."""
    return f"{error.code}: {error.message}" if isinstance(error, CkptError) else f"{error!r}"


def already(destination: str) -> State[Any]:
    """Return the state of a run whose checkpoint was converted before."""
    return Completed(name="Already", message=f"{destination} was made from this checkpoint before")


def require_inside(source: str, root: str) -> None:
    """Raise `UnsafeContent` unless a source is below a root, with links resolved.

    The receiver of the event could only compare texts.
    """
    if roots := roots_of(source):
        for folder in roots:
            require_inside(folder, root)
        return
    path, top = local_path(source), local_path(root)
    if path is not None and top is not None:
        source_path, root_path = os.path.realpath(path), os.path.realpath(top)
    else:
        source_path, root_path = source, root
    if not source_path.startswith(root_path.rstrip("/") + "/"):
        raise UnsafeContent(f"{source} resolves to {source_path}, which is not below {root_path}")


def effective_request(request: Request, step: int | None, catalog: str | None) -> Request:
    """Return the request to run: below a watched root, the one that a sweep would run.

    Args:
        request: the conversion that the announcement asks for.
        step: the announced step, if any.
        catalog: the URL of the catalog.

    Raises:
        UsageError: the root's target cannot be used for this source.
    """
    with open_catalog(catalog) as catalog_db:
        root_and_request = announced_request(catalog_db, request.source, step)
    if root_and_request is None:
        return request
    root, instead = root_and_request
    log.info(
        "%s is below the watched root %s: converting to %s", request.source, root.name, instead.destination
    )
    return instead


def made_from(request: Request, digest: str, catalog: str | None) -> bool:
    """Return whether a request's destination was made from its source as it is now.

    digest: of the source's manifest.
    """
    with open_catalog(catalog) as catalog_db:
        manifest = inspect(request.source, request.recover)
        key = claims.key_of(request, claims.source_digest(manifest))
        return is_made(catalog_db, key, request, digest)


def own_pauses(pauses: Sequence[float]) -> Sequence[float]:
    """Return the pauses to wait in this process: all if no worker would start the run again, else none."""
    return () if runtime.deployment.id else pauses


def reschedule_run(pauses: Sequence[float], why: str) -> None:
    """End this process, and let Prefect start the run again after the next of its pauses.

    Returns normally if no pause is left or no worker would start the run again.

    Args:
        pauses: seconds between all starts of the run.
        why: the reason, for the message of the run's state.

    Raises:
        httpx.HTTPError: Prefect's server does not answer.
        Abort: otherwise; it ends the process of the run.
    """
    if not runtime.deployment.id:
        return
    id = UUID(str(runtime.flow_run.id))
    with get_client(sync_client=True) as client:
        looks = looks_of(client.read_flow_run(id).labels)
        if looks >= len(pauses):
            return
        client.update_flow_run_labels(id, {LOOKS: looks + 1})
        due = datetime.now(UTC) + timedelta(seconds=max(pauses[looks], AT_LEAST))
        message = f"next try at {due:%H:%M:%S} UTC: {why}"
        # Without force: a run that is being cancelled stays so.
        client.set_flow_run_state(id, AwaitingRetry(scheduled_time=due, message=beginning(message, 2000)))
    log.info("%s", message)
    raise Abort(message)  # the engine ends without another call to the server


def retry_transient(work: Callable[[], T]) -> T:
    """Return the result of `work`; repeat it from its beginning after transient errors.

    The work must recognise what it has done before. Raises the error of the last try, and `Busy` at once,
    because that has waited for the other process already.
    """
    retrying = Retrying(
        wait=wait_chain(*map(wait_fixed, PAUSES)),
        stop=stop_after_attempt(len(PAUSES) + 1),
        retry=retry_if_exception(lambda error: is_transient(error) and not isinstance(error, Busy)),
        before_sleep=_log_retry,
        reraise=True,
    )
    return retrying(work)


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.warning("next try in %d s, after %s: %s", state.upcoming_sleep, type(error).__name__, error)


if __name__ == "__main__":
    end_with(
        UsageError(
            "flows.arrived must be started by the webhook receiver or a deployment",
            hint="convert one checkpoint with python -m flows.convert SRC DST, all with flows.sweep",
        )
    )
