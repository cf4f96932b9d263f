"""Write every tensor of a checkpoint, model and optimizer, under its stored name.

The conversion is that of `flows.convert`. ``python -m flows.consolidate SRC [DST]`` runs it.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import State, flow

from ckptcore.conversion.publish import Result
from ckptcore.planning.options import OF_VERB, Option, Sources, read_options
from flows._command import entry
from flows._naming import run_name
from flows._options import RUN, FlowOptions, declared, takes
from flows.convert import converted


@flow(name="consolidate", flow_run_name=run_name)
@takes(declared(*OF_VERB["consolidate"], *RUN, verb="consolidate"))
def consolidate(
    source: Sources,
    destination: Annotated[
        str, Option("A new folder, or one file by its suffix; default: SRC.consolidated.", "DST")
    ] = "",
    **parameters: Any,
) -> Result | State[Any]:
    """Merge a sharded checkpoint into one file or folder, with every tensor under its stored name."""
    return converted("consolidate", source, destination or None, read_options(FlowOptions, parameters))


if __name__ == "__main__":
    entry(consolidate)
