"""Arrived: a checkpoint that was announced, converted once, as soon as it is whole.

What webhooks and sweeps start. An announcement is a hint: whether the place is allowed, whether the save has
finished and whether the work has been done is looked up here, where the files are. A face of
`flows.convert`, for deployments.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from prefect import State, flow, runtime
from prefect.states import Completed, Failed

from ckptcore.errors import Busy, CkptError, DestinationExists
from ckptcore.finishing import Result
from ckptcore.request import Request
from ckptcore.sizes import parse_size
from flows._arrival import alone, made_from, require_inside
from flows._later import inside, put_off
from flows._patience import patiently
from flows._words import explain, run_name
from flows.convert import convert
from tasks.settle import delays, may_become_whole, settle


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
    destination: the new folder.
    root: refuse sources that do not lie below this place, links resolved.
    run: what the announcement calls the training run.
    step: what the announcement calls the step.
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
        request = Request(
            source,
            destination,
            verb,
            to,
            dtype=dtype,
            config=config,
            model_prefix=model_prefix,
            max_file_size=parse_size(max_file_size),
        )

        def work() -> Result | State[Any]:
            try:
                digest = settle.with_options(retries=len(here), retry_delay_seconds=[*here])(source)
            except Exception as early:
                if may_become_whole(early):
                    put_off(looks, told(early))
                raise
            # Announced twice, by two senders or by a webhook and a sweep: one run does the work.
            with alone(request, digest, str(runtime.flow_run.id), here, catalog) as mine:
                if not mine:
                    return already(destination)
                done = convert.fn(
                    source,
                    destination,
                    verb,
                    to,
                    dtype=dtype,
                    config=config,
                    model_prefix=model_prefix,
                    max_file_size=max_file_size,
                    memory=memory,
                    workers=workers,
                    device=device,
                    fingerprint=fingerprint,
                    catalog=catalog,
                )
                error = done.result(raise_on_failure=False) if isinstance(done, State) else None
                # Somebody without a claim, at a terminal say, was faster.
                for pause in (0.0, *here) if isinstance(error, Busy | DestinationExists) else ():
                    time.sleep(pause)
                    if made_from(destination, source, digest, catalog):
                        return already(destination)
                    if isinstance(error, DestinationExists):
                        break
                if isinstance(error, CkptError):
                    raise error
                return done

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
