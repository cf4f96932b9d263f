"""Reshard: a checkpoint cut anew for the ranks of one mesh, or of several in one run.

The source is read and checked once for all targets; each target is a conversion of its own in the
catalog, whose lineage shows the source and the mesh. ``python -m flows.reshard SRC DST --mesh fsdp=4``
runs it.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from prefect import State, flow
from prefect.states import Failed
from pydantic import BaseModel, ConfigDict

from ckptcore.conversion.publish import Result
from ckptcore.errors import CkptError, UsageError
from ckptcore.planning.request import Request, Settings
from ckptcore.store.place import identify, overlaps
from ckptcore.utils.units import parse_size
from flows._command import main
from flows._engine import engine as parse_engine
from flows._naming import explain, run_name
from flows.convert import fan_out


class Target(BaseModel):
    """One output: where, for which ranks, in which format.

    sharding: TOML text with placement rules; None for the built-in ones.
    """

    model_config = ConfigDict(extra="forbid")

    destination: str
    mesh: str
    to: str = "dcp"
    sharding: str | None = None
    serialization: str = "torch_save"


@flow(name="reshard", flow_run_name=run_name)
def reshard(
    source: str,
    destination: str = "",
    mesh: str = "",
    to: str = "dcp",
    sharding: str | None = None,
    serialization: str = "torch_save",
    also: list[Target] | None = None,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    model_prefix: str | None = None,
    overwrite: bool = False,
    overwrite_foreign: bool = False,
    memory: str = "1GiB",
    workers: int | None = None,
    device: str = "cpu",
    catalog: str | None = None,
    batch: str = "1GiB",
    engine: str | None = None,
) -> list[Result] | State[Any]:
    """Cut a checkpoint anew for the ranks of a mesh, optimizer and trainer state included.

    source: the checkpoint, a path or URL.
    destination: the new folder.
    mesh: the ranks to write for, as in fsdp=4,tp=2.
    to: the output format.
    sharding: TOML text with placement rules; by default the built-in ones.
    serialization: items of a DCP folder, torch_save or safetensors.
    also: further targets of the same source, as JSON with destination, mesh, to; may be repeated.
    include: only tensors whose stored name matches this glob; may be repeated.
    exclude: no tensor whose stored name matches this glob; may be repeated.
    model_prefix: where the model is in the checkpoint; by default it is found.
    overwrite: replace the destinations as a whole, if every file there is accounted for.
    overwrite_foreign: replace them together with files of others.
    memory: budget for tensor buffers.
    workers: threads; by default as the machine has.
    device: torch device.
    catalog: URL of the catalog; by default CKPTCORE_CATALOG_URL, else the user's own.
    batch: bytes of output in one task.
    engine: where tasks run: threads, dask, dask=tcp://HOST:8786, ray, ray=HOST:6379; by default
        CKPTCORE_ENGINE, else threads.
    """
    try:
        targets = list(also or ())
        if destination:
            one = Target(
                destination=destination, mesh=mesh, to=to, sharding=sharding, serialization=serialization
            )
            targets.insert(0, one)
        if not targets:
            raise UsageError("no target is named", hint="a destination and --mesh, or --also")
        for a, b in combinations(targets, 2):
            if overlaps(identify(a.destination), identify(b.destination)):
                raise UsageError(
                    f"two targets would be written to one place: {a.destination}, {b.destination}"
                )
        requests = [
            Request(
                source=source,
                destination=target.destination,
                verb="reshard",
                to=target.to,
                include=tuple(include or ()),
                exclude=tuple(exclude or ()),
                model_prefix=model_prefix,
                mesh=target.mesh,
                sharding=target.sharding,
                serialization=target.serialization,
                overwrite=overwrite,
                overwrite_foreign=overwrite_foreign,
            )
            for target in targets
        ]
        settings = Settings(parse_size(memory), workers, device)
        return fan_out(
            requests, settings, catalog=catalog, batch_bytes=parse_size(batch), on=parse_engine(engine)
        )
    except CkptError as error:
        # The message is what a person reads first: the finding, not "encountered an exception".
        return Failed(message=explain(error), data=error)


if __name__ == "__main__":
    main(reshard)
