"""Export: the model part of a checkpoint as a Hugging Face folder.

A face of `flows.convert`. ``python -m flows.export SRC DST --config DIR`` runs it.
"""

from __future__ import annotations

from typing import Any

from prefect import State, flow

from ckptcore.conversion.publish import Result
from flows._command import main
from flows._naming import run_name
from flows.convert import convert


@flow(name="export", flow_run_name=run_name)
def export(
    source: str,
    destination: str,
    config: str | None = None,
    model_prefix: str | None = None,
    rename: list[str] | None = None,
    dtype: str | None = None,
    dtype_for: list[str] | None = None,
    max_file_size: str = "5GB",
    overwrite: bool = False,
    overwrite_foreign: bool = False,
    memory: str = "1GiB",
    workers: int | None = None,
    device: str = "cpu",
    engine: str | None = None,
) -> Result | State[Any]:
    """Make a folder that transformers opens of the model in a sharded checkpoint.

    source: the checkpoint, a path or URL.
    destination: the new folder.
    config: folder with config.json, tokenizer and so on; names and shapes are checked against it.
    model_prefix: where the model is in the checkpoint; by default it is found.
    rename: OLD=NEW, prefixes or patterns with one asterisk, in order; may be repeated.
    dtype: cast floating-point tensors to this.
    dtype_for: GLOB=DTYPE, an exception to dtype; "keep" leaves as it is; may be repeated.
    max_file_size: tensor bytes in one output file.
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
        destination,
        "export",
        config=config,
        model_prefix=model_prefix,
        rename=rename,
        dtype=dtype,
        dtype_for=dtype_for,
        max_file_size=max_file_size,
        overwrite=overwrite,
        overwrite_foreign=overwrite_foreign,
        memory=memory,
        workers=workers,
        device=device,
        engine=engine,
    )


if __name__ == "__main__":
    main(export)
