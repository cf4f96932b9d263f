"""Consolidate: every tensor of a checkpoint, model and optimizer, under its stored name.

A face of `flows.convert`. ``python -m flows.consolidate SRC [DST]`` runs it.
"""

from __future__ import annotations

from typing import Any

from prefect import State, flow

from ckptcore.conversion.publish import Result
from flows._command import main
from flows._naming import run_name
from flows.convert import convert


@flow(name="consolidate", flow_run_name=run_name)
def consolidate(
    source: str,
    destination: str = "",
    to: str = "",
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    dtype: str | None = None,
    max_file_size: str = "5GB",
    recover: bool = False,
    overwrite: bool = False,
    overwrite_foreign: bool = False,
    memory: str = "1GiB",
    workers: int | None = None,
    device: str = "cpu",
    engine: str | None = None,
) -> Result | State[Any]:
    """Make one file or folder of a sharded checkpoint, with every tensor under its stored name.

    source: the checkpoint, a path or URL.
    destination: a folder, or one file by its suffix; by default SOURCE.consolidated.
    to: the output format; by default what the destination's suffix says, else safetensors.
    include: only tensors whose stored name matches this glob; may be repeated.
    exclude: no tensor whose stored name matches this glob; may be repeated.
    dtype: cast floating-point tensors to this.
    max_file_size: tensor bytes in one output file.
    recover: take a save that was aborted in its last step.
    overwrite: replace the destination as a whole, if every file there is accounted for.
    overwrite_foreign: replace it together with files of others.
    memory: budget for tensor buffers.
    workers: threads; by default as the machine has.
    device: torch device for casts.
    engine: where tasks run: threads, dask, dask=tcp://HOST:8786, ray, ray=HOST:6379; by default
        CKPTCORE_ENGINE, else threads.
    """
    return convert.fn(
        source,
        destination or f"{source.rstrip('/')}.consolidated",
        "consolidate",
        to=to,
        include=include,
        exclude=exclude,
        dtype=dtype,
        max_file_size=max_file_size,
        recover=recover,
        overwrite=overwrite,
        overwrite_foreign=overwrite_foreign,
        memory=memory,
        workers=workers,
        device=device,
        engine=engine,
    )


if __name__ == "__main__":
    main(consolidate)
