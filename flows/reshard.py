"""Reshard a checkpoint for the ranks of one mesh, or of several in one run.

The source is read and checked once for all targets. Each target is a conversion of its own in the catalog,
whose lineage shows the source and the mesh. ``python -m flows.reshard SRC DST --mesh fsdp=4`` runs it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Annotated, Any, Literal

from prefect import State, flow
from pydantic import BaseModel, ConfigDict

from ckptcore.conversion.publish import Result
from ckptcore.errors import CkptError, UsageError
from ckptcore.planning.options import OF_VERB, Mesh, Option, Sources, read_options
from ckptcore.store.place import identify, overlaps
from flows._command import entry
from flows._naming import failed, run_name
from flows._options import RUN, FlowOptions, declared, takes
from flows.convert import fan_out


class Target(BaseModel):
    """One output: destination, mesh and format. Its fields are options of `flows.reshard`."""

    model_config = ConfigDict(extra="forbid")

    destination: str
    mesh: str
    to: str = ""
    sharding: str | None = None
    serialization: Literal["torch_save", "safetensors"] = "torch_save"


@flow(name="reshard", flow_run_name=run_name)
@takes(declared(*OF_VERB["reshard"], *RUN, verb="reshard"))
def reshard(
    source: Sources,
    destination: Annotated[str, Option("The new folder.", "DST")] = "",
    mesh: Mesh = "",
    also: Annotated[
        list[Target] | None,
        Option("A further target, as JSON with destination, mesh, to (repeatable).", "JSON"),
    ] = None,
    **parameters: Any,
) -> list[Result] | State[Any]:
    """Reshard a checkpoint for the ranks of a mesh, including optimizer and trainer state."""
    try:
        options = read_options(FlowOptions, {**parameters, "mesh": mesh})
        requests = [
            replace(options, **target.model_dump(exclude={"destination"})).request(
                "reshard", source, target.destination
            )
            for target in also or ()
        ]
        if destination:
            requests.insert(0, options.request("reshard", source, destination))
        if not requests:
            raise UsageError("a target is required", hint="give a destination and --mesh, or --also")
        for a, b in combinations(requests, 2):
            if overlaps(identify(a.destination), identify(b.destination)):
                raise UsageError(
                    f"two targets have the same or nested destinations: {a.destination}, {b.destination}"
                )
        return fan_out(requests, options.job())
    except CkptError as error:
        return failed(error)


if __name__ == "__main__":
    entry(reshard)
