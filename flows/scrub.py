"""Verify a share of the recorded checkpoints again, byte for byte.

This flow is for a schedule. It starts with the checkpoints that were not verified for the longest time, and
stops when its time is over. The first checkpoint is always verified to its end, however large it is.
``ckptcore scrub`` does the same.
"""

from __future__ import annotations

from typing import Any

from prefect import State, flow
from prefect.states import Completed, Failed

from ckptcore.errors import CkptError
from ckptcore.operations.options import ScrubOptions
from ckptcore.planning.options import options_of
from ckptcore.utils.units import parse_duration
from flows._command import entry
from flows._naming import failed
from flows._options import declared, takes
from tasks.maintenance import scrub as scrub_share

NAMED = 5  # checkpoints in the message of a failed run


@flow(name="scrub", flow_run_name="scrub")
@takes(declared(*options_of(ScrubOptions), of=ScrubOptions))
def scrub(**parameters: Any) -> State[Any]:
    """Verify that the recorded checkpoints are still present, byte for byte."""
    options = ScrubOptions(**parameters)
    try:
        report = scrub_share(options.share, parse_duration(options.budget), options.catalog)
    except CkptError as error:
        return failed(error)
    summary = ", ".join(f"{n} {name}" for name, n in sorted(report.counts.items())) or "nothing was due"
    if report.exit_code == 0:
        return Completed(message=summary, data=report)
    wrong = [row for row in report.looked if row.proven.proof not in ("proven", "unproven", "stopped")]
    lines = [f"- {row.checkpoint.uri}: {row.proven.message}" for row in wrong[:NAMED]]
    return Failed(message="\n".join([summary, *lines]), data=report)


if __name__ == "__main__":
    entry(scrub)
