"""Export the model part of a checkpoint as a Hugging Face folder.

The conversion is that of `flows.convert`. ``python -m flows.export SRC DST --config DIR`` runs it.
"""

from __future__ import annotations

from typing import Any

from prefect import State, flow

from ckptcore.conversion.publish import Result
from ckptcore.planning.options import OF_VERB, Destination, Sources, read_options
from flows._command import entry
from flows._naming import run_name
from flows._options import EXPORT, RUN, FlowOptions, declared, takes
from flows.convert import converted


@flow(name="export", flow_run_name=run_name)
@takes(declared(*OF_VERB["export"], *EXPORT, *RUN, verb="export"))
def export(source: Sources, destination: Destination, **parameters: Any) -> Result | State[Any]:
    """Export the model in a sharded checkpoint to a folder that transformers opens."""
    return converted("export", source, destination, read_options(FlowOptions, parameters))


if __name__ == "__main__":
    entry(export)
