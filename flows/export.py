"""Export the model part of a checkpoint as a Hugging Face folder, and push it if that is asked for.

The conversion is that of `flows.convert`. ``python -m flows.export SRC DST --config DIR`` runs it.
"""

from __future__ import annotations

from typing import Any

from prefect import State, flow

from ckptcore.conversion.publish import Result
from ckptcore.errors import CkptError, UsageError
from ckptcore.operations.publication.push import require_hub_url
from ckptcore.planning.options import OF_VERB, Destination, Sources, read_options
from flows._command import entry
from flows._naming import failed, run_name
from flows._options import EXPORT, RUN, FlowOptions, declared, takes
from flows.convert import converted
from tasks.artifacts import sending_artifacts
from tasks.push import push


@flow(name="export", flow_run_name=run_name)
@takes(declared(*OF_VERB["export"], *EXPORT, "push", *RUN, verb="export"))
def export(source: Sources, destination: Destination, **parameters: Any) -> Result | State[Any]:
    """Export the model in a sharded checkpoint to a folder that transformers opens."""
    options = read_options(FlowOptions, parameters)
    try:
        if options.push is not None:  # before hours of work
            require_hub_url(options.push)
            if options.register_in is False or not options.verify_export:
                raise UsageError("--push needs a catalog and --verify-export: only what is proven is sent")
        result = converted("export", source, destination, options)
        if options.push is not None and isinstance(result, Result):
            with sending_artifacts():
                push(result.destination, options.push, options.catalog)
    except CkptError as error:  # what is published and recorded stays
        return failed(error)
    return result


if __name__ == "__main__":
    entry(export)
