"""Convert: a sharded checkpoint in, a proven and registered one out.

1. read the manifest: what is stored, without touching a tensor's bytes;
2. check that it is whole;
3. plan which bytes go where, and save the plan beside the destination;
4. write the files in batches, a few at a time, inside the memory budget;
5. publish: verified, in one step, the file that makes a folder loadable last;
6. record source, output and run in the catalog, failed runs too.

``python -m flows.convert SRC DST`` runs it, with nothing set up beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from prefect import State, flow, runtime
from prefect.states import Failed

from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import UNTOLD, Registration, Told, fail, start
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.units import parse_size
from flows._command import main
from flows._engine import HERE, Engine
from flows._engine import engine as parse_engine
from flows._naming import closed, explain, pairs, run_name
from flows._write import write_all
from tasks.assets import asset_keys
from tasks.check import check
from tasks.plan import plan
from tasks.publish import publish
from tasks.read import read
from tasks.record import record


@flow(name="convert", flow_run_name=run_name)
def convert(
    source: str,
    destination: str,
    verb: Literal["consolidate", "export"] = "consolidate",
    to: str = "",
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    rename: list[str] | None = None,
    dtype: str | None = None,
    dtype_for: list[str] | None = None,
    model_prefix: str | None = None,
    config: str | None = None,
    max_file_size: str = "5GB",
    tie: list[str] | None = None,
    recover: bool = False,
    keep_quantized: bool = False,
    overwrite: bool = False,
    overwrite_foreign: bool = False,
    resume: bool = True,
    memory: str = "1GiB",
    workers: int | None = None,
    device: str = "cpu",
    verify: bool = True,
    digest: bool = True,
    fingerprint: bool = False,
    catalog: str | None = None,
    no_catalog: bool = False,
    batch: str = "1GiB",
    engine: str | None = None,
) -> Result | State[Any]:
    """Turn a sharded checkpoint into a proven and registered one.

    source: the checkpoint, a path or URL.
    destination: a folder, or one file when it ends in .safetensors, .pt, .pth or .bin.
    verb: consolidate keeps every tensor, export takes the model part.
    to: the output format; by default what the destination's suffix says, else safetensors.
    include: only tensors whose stored name matches this glob; may be repeated.
    exclude: no tensor whose stored name matches this glob; may be repeated.
    rename: OLD=NEW, prefixes or patterns with one asterisk, in order; may be repeated.
    dtype: cast floating-point tensors to this.
    dtype_for: GLOB=DTYPE, an exception to dtype; "keep" leaves as it is; may be repeated.
    model_prefix: where the model is, for export; by default it is found.
    config: folder with config.json, tokenizer and so on, for export.
    max_file_size: tensor bytes in one output file.
    tie: A=B, tensor A is left out because it must equal B; may be repeated.
    recover: take a save that did not finish, or that nothing proves whole.
    keep_quantized: carry quantised weights as they are stored, instead of their values in float32.
    overwrite: replace the destination as a whole, if every file there is accounted for.
    overwrite_foreign: replace it together with files of others.
    resume: keep finished files of an earlier run.
    memory: budget for tensor buffers, for all batches together.
    workers: threads, for all batches together; by default as the machine has.
    device: torch device for casts.
    verify: check stored checksums while moving.
    digest: compute BLAKE3 of every output file.
    fingerprint: one digest of the numbers, whatever their layout, before any cast.
    catalog: URL of the catalog; by default CKPTCORE_CATALOG_URL, else the user's own.
    no_catalog: do not register the conversion.
    batch: bytes of output in one task.
    engine: where tasks run: threads, dask, dask=tcp://HOST:8786, ray, ray=HOST:6379; by default
        CKPTCORE_ENGINE, else threads.
    """
    try:
        request = Request(
            source=source,
            destination=destination,
            verb=verb,
            to=to,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            rename=pairs("rename", rename),
            dtype=dtype,
            dtype_for=pairs("dtype-for", dtype_for),
            model_prefix=model_prefix,
            config=config,
            max_file_size=parse_size(max_file_size),
            tie=pairs("tie", tie),
            recover=recover,
            keep_quantized=keep_quantized,
            overwrite=overwrite,
            overwrite_foreign=overwrite_foreign,
            resume=resume,
        )
        settings = Settings(parse_size(memory), workers, device, verify, digest, fingerprint)
        where: str | Literal[False] | None = False if no_catalog else catalog
        return steps(request, settings, catalog=where, batch_bytes=parse_size(batch), on=parse_engine(engine))
    except CkptError as error:
        # The message is what a person reads first: the finding, not "encountered an exception".
        return Failed(message=explain(error), data=error)


def steps(
    request: Request,
    settings: Settings,
    *,
    catalog: str | Literal[False] | None,
    batch_bytes: int,
    on: Engine = HERE,
    told: Told = UNTOLD,
) -> Result:
    """The job; raises what its tasks raise, after the catalog knows.

    catalog: its URL; None is the default one, False is none. told: what the source was announced as.
    """
    return fan_out([request], settings, catalog=catalog, batch_bytes=batch_bytes, on=on, told=told)[0]


def fan_out(
    requests: Sequence[Request],
    settings: Settings,
    *,
    catalog: str | Literal[False] | None,
    batch_bytes: int,
    on: Engine = HERE,
    told: Told = UNTOLD,
) -> list[Result]:
    """Several outputs of one source, which is read and checked once; in the order of the requests.

    A target that fails does not stop the others; the first failure is raised when all have been tried.
    """
    first, run = requests[0], str(runtime.flow_run.id)
    registrations = [start(request, catalog, run, told) for request in requests]
    manifest: Manifest | None = None
    try:
        began = time.perf_counter()
        manifest = read(first.source, first.recover, first.keep_quantized)
        timings = {"inspect": time.perf_counter() - began}
        check(closed(manifest))
    except BaseException as error:
        for registration in registrations:
            fail(registration, error, manifest)
        raise
    done: list[Result] = []
    failed: list[Exception] = []
    for request, registration in zip(requests, registrations, strict=True):
        try:
            done.append(_one(request, settings, manifest, registration, timings, batch_bytes, on, catalog))
        except BaseException as error:
            fail(registration, error, manifest)
            if not isinstance(error, Exception):  # stopped: the other targets are not begun
                for other in registrations[len(done) + len(failed) + 1 :]:
                    fail(other, error, manifest)
                raise
            failed.append(error)
    if failed:
        raise failed[0]
    return done


def _one(
    request: Request,
    settings: Settings,
    manifest: Manifest,
    registration: Registration | None,
    timings: dict[str, float],
    batch_bytes: int,
    on: Engine,
    catalog: str | Literal[False] | None,
) -> Result:
    """One output of a checked source: planned, written, published, recorded."""
    prepared = plan(request, settings, closed(manifest), catalog)
    timings = timings | prepared.timings
    began = time.perf_counter()
    write_all(prepared, settings, batch_bytes, on)
    timings |= {"write": time.perf_counter() - began}
    result = publish(prepared.plan_uri, settings)
    result = replace(result, timings=result.timings | timings, warnings=prepared.warnings)
    noted = record.with_options(assets=asset_keys(request.destination), asset_deps=asset_keys(request.source))
    return noted(closed(registration), closed(result), closed(manifest), settings)


if __name__ == "__main__":
    main(convert)
