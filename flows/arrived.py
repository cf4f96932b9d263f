"""Arrived: a checkpoint that was announced, converted once, as soon as it is whole.

What webhooks start. An announcement is a hint: whether the place is allowed, whether the save has finished
and whether the work has been done is looked up here, where the files are. So is what to make of it: below a
watched root the root's own target counts, and a sweep does not make the same checkpoint a second time. A face
of `flows.convert`, for deployments.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from prefect import State, flow, runtime
from prefect.states import Completed, Failed

from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import Told
from ckptcore.errors import Busy, CkptError, DestinationExists
from ckptcore.operations.wait import delays
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.units import parse_size
from flows._announcement import alone, made_from, meant, require_inside
from flows._engine import engine as parse_engine
from flows._naming import explain, run_name
from flows._reschedule import inside, put_off
from flows._retry import patiently
from flows.convert import steps
from tasks.settle import may_become_whole, settle

BATCH = 1 << 30  # bytes of output in one task


@flow(name="arrived", flow_run_name=run_name)
def arrived(
    source: str,
    destination: str,
    root: str = "",
    run: str = "",
    step: int | None = None,
    wait_minutes: float = 60.0,
    verb: Literal["consolidate", "export"] = "export",
    to: str = "",
    dtype: str | None = None,
    config: str | None = None,
    model_prefix: str | None = None,
    max_file_size: str = "5GB",
    memory: str = "1GiB",
    workers: int | None = None,
    device: str = "cpu",
    fingerprint: bool = False,
    catalog: str | None = None,
) -> Result | State[Any]:
    """Convert a checkpoint that was announced, as soon as it is whole, and only once.

    source: the checkpoint, a path or URL.
    destination: the new folder. It counts, as the options of the output do, below no watched root: there the
        root's own target says what is made.
    root: refuse sources that do not lie below this place, links resolved.
    run: what the announcement calls the training run; for the catalog, where no name tells a step.
    step: what the announcement calls the step; for the catalog, where no name tells it.
    wait_minutes: how long to look again at a checkpoint that is not whole yet; a worker's place is given
        back between the looks.
    verb: consolidate keeps every tensor, export takes the model part.
    to: the output format; by default safetensors.
    dtype: cast floating-point tensors to this.
    config: folder with config.json, tokenizer and so on, for export.
    model_prefix: where the model is, for export; by default it is found.
    max_file_size: tensor bytes in one output file.
    memory: budget for tensor buffers.
    workers: threads; by default as the machine has.
    device: torch device for casts.
    fingerprint: one digest of the numbers, whatever their layout.
    catalog: URL of the catalog; by default CKPTCORE_CATALOG_URL, else the user's own.
    """
    try:
        if root:
            require_inside(source, root)
        looks = delays(wait_minutes)
        here = inside(looks)
        asked = Request(
            source,
            destination,
            verb,
            to,
            dtype=dtype,
            config=config,
            model_prefix=model_prefix,
            max_file_size=parse_size(max_file_size),
        )
        settings = Settings(parse_size(memory), workers, device, fingerprint=fingerprint or None)
        on = parse_engine(None)

        def work() -> Result | State[Any]:
            request = meant(asked, step, catalog)
            try:
                tried = settle.with_options(retries=len(here), retry_delay_seconds=[*here])
                digest = tried(request.source, request.recover)
            except Exception as error:
                if may_become_whole(error):
                    put_off(looks, told(error))
                raise
            # Announced twice, by two senders or by a webhook and a sweep: one run does the work.
            with alone(request, digest, str(runtime.flow_run.id), here, catalog) as mine:
                if not mine:
                    return already(request.destination)
                try:
                    return steps(
                        request, settings, catalog=catalog, batch_bytes=BATCH, on=on, told=Told(run, step)
                    )
                except (Busy, DestinationExists) as error:
                    # Somebody without a claim, at a terminal say, was faster.
                    for pause in (0.0, *here) if isinstance(error, Busy) else (0.0,):
                        time.sleep(pause)
                        if made_from(request.destination, request.source, digest, catalog):
                            return already(request.destination)
                    raise

        # The sender has been told that it is accepted: nobody else sees a catalog that was away for a moment.
        try:
            return patiently(work)
        except Busy as error:
            put_off(looks, told(error))
            raise
    except CkptError as error:
        # The message is what a person reads first: the finding, not "encountered an exception".
        return Failed(message=explain(error), data=error)


def told(error: Exception) -> str:
    """An error in one line."""
    return f"{error.code}: {error.message}" if isinstance(error, CkptError) else f"{error!r}"


def already(destination: str) -> State[Any]:
    """The state of a run that found its work done."""
    return Completed(name="Already", message=f"{destination} was made from this checkpoint before")
