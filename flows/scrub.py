"""Scrub: what the catalog says exists, read again and proven, a share at a time. For a schedule.

The longest unproven come first. It stops when its time is over, but the first is read to its end: no
checkpoint is too large to be proven. ``ckptcore scrub`` does the same.
"""

from __future__ import annotations

from typing import Any

from prefect import State, flow
from prefect.states import Completed, Failed

from ckptcore.errors import CkptError
from ckptcore.operations.options import ScrubOptions
from ckptcore.planning.options import options_of
from ckptcore.utils.units import parse_duration
from flows._naming import explain
from flows._options import declared, takes
from tasks.maintenance import scrub as look_again

NAMED = 5  # checkpoints that a failed run's message names


@flow(name="scrub", flow_run_name="scrub")
@takes(declared(*options_of(ScrubOptions), of=ScrubOptions))
def scrub(**given: Any) -> State[Any]:
    """Prove that what the catalog knows is still there, byte for byte."""
    wanted = ScrubOptions(**given)
    try:
        found = look_again(wanted.share, parse_duration(wanted.budget), wanted.catalog)
    except CkptError as error:
        return Failed(message=explain(error), data=error)
    told = ", ".join(f"{n} {name}" for name, n in sorted(found.counts.items())) or "nothing was due"
    if found.exit_code == 0:
        return Completed(message=told, data=found)
    wrong = [each for each in found.looked if each.proven.proof not in ("proven", "unproven", "stopped")]
    lines = [f"- {each.checkpoint.uri}: {each.proven.message}" for each in wrong[:NAMED]]
    return Failed(message="\n".join([told, *lines]), data=found)
