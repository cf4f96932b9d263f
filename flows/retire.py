"""Retire source checkpoints that a verified conversion fully replaces, by a retention policy.

This flow is for a schedule: ``yes`` sets sources aside, ``purge`` deletes those whose grace period is over.
Without either it changes nothing, but lists the sources that it would retire and the reasons to keep the
others. ``ckptcore retire`` does the same.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import State, flow
from prefect.states import Completed

from ckptcore.errors import CkptError
from ckptcore.operations.options import RetireOptions
from ckptcore.planning.options import MEANS, Option, Options, options_of
from ckptcore.utils.units import show_size
from flows._command import entry
from flows._naming import failed
from flows._options import declared, takes
from tasks.maintenance import retire as retire_sources


@flow(name="retire", flow_run_name="retire")
@takes(declared(*options_of(RetireOptions), of=RetireOptions), declared(*MEANS, "device"))
def retire(
    scope: Annotated[
        str | None, Option("The name of a watched root or a training run; default: all watched roots.")
    ] = None,
    **parameters: Any,
) -> State[Any]:
    """Retire source checkpoints that a verified conversion fully replaces. Dry run by default."""
    options = RetireOptions(**{name: parameters[name] for name in options_of(RetireOptions)})
    try:
        settings = Options(
            memory=parameters["memory"], workers=parameters["workers"], device=parameters["device"]
        ).settings()
        report = retire_sources(scope, options, settings)
    except CkptError as error:
        return failed(error)
    counts = ", ".join(f"{n} {name}" for name, n in sorted(report.counts.items())) or "no source"
    freed = f"{show_size(report.freed)} of files {'freed' if report.done else 'would be freed'}"
    return Completed(message=f"{counts}, {freed}", data=report)


if __name__ == "__main__":
    entry(retire)
