"""Convert a sharded checkpoint into a verified and registered one.

1. read the manifest: the stored tensors, without their bytes;
2. check that it is complete;
3. plan which bytes go where, and save the plan beside the destination;
4. write the files in batches, a few at a time, within the memory budget, and compare the tensors with what
   the job had in memory, if it sent a fingerprint;
5. publish the verified files in one step; the file that makes a folder loadable comes last;
6. verify an export against its source, element by element, and against its config;
7. record source, output, verdict and run in the catalog, even for failed runs.

``python -m flows.convert SRC DST`` runs it without any setup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prefect import State, flow, runtime

from ckptcore.checking.export_proof import require_match
from ckptcore.conversion.live_source import LiveSource
from ckptcore.conversion.pipeline import compare_live, digests_of_source
from ckptcore.conversion.publish import Result
from ckptcore.conversion.registration import Registration, fail, start
from ckptcore.conversion.source_digests import require_as_recorded
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, OutputMismatch
from ckptcore.planning.options import MODEL, OF_VERB, Destination, Sources, Verb, read_options
from ckptcore.planning.request import Request
from ckptcore.utils.log_format import log_fields
from ckptcore.utils.spans import span
from flows._command import entry
from flows._naming import closed, failed, run_name
from flows._options import EXPORT, RUN, FlowJob, FlowOptions, declared, takes
from flows._write import write_all
from tasks.artifacts import sending_artifacts
from tasks.assets import asset_keys
from tasks.check import check
from tasks.plan import plan
from tasks.publish import publish
from tasks.read import read
from tasks.record import record
from tasks.verify_export import verify_export


@flow(name="convert", flow_run_name=run_name)
@takes(declared(*MODEL, *OF_VERB["consolidate"], *EXPORT, *RUN))
def convert(
    source: Sources, destination: Destination, verb: Verb = "consolidate", **parameters: Any
) -> Result | State[Any]:
    """Convert a sharded checkpoint into a verified and registered one."""
    return converted(verb, source, destination, read_options(FlowOptions, parameters))


def converted(
    verb: str, source: str | Sequence[str], destination: str | None, options: FlowOptions
) -> Result | State[Any]:
    """Return the result of a flow, or the state of a failed one. destination: see `Options.request`."""
    try:
        return steps(options.request(verb, source, destination), options.job())
    except CkptError as error:
        return failed(error)


def steps(request: Request, job: FlowJob) -> Result:
    """Run one conversion. Raises its tasks' errors after the catalog has recorded them."""
    return fan_out([request], job)[0]


def fan_out(requests: Sequence[Request], job: FlowJob) -> list[Result]:
    """Convert one source to several outputs; read and check it once.

    If one output fails, the others are still written. Then the first error is raised.

    Args:
        requests: one for each output, with the same source.
        job: the settings of the conversions.

    Returns:
        The results, in the order of the requests.
    """
    first, run = requests[0], str(runtime.flow_run.id)
    fields = {"flow_run": run, "source": first.source}
    with log_fields(**fields), span("flow", **fields), sending_artifacts():
        return _fan_out(requests, job, run)


def _fan_out(requests: Sequence[Request], job: FlowJob, run: str) -> list[Result]:
    first = requests[0]
    registrations: list[Registration | None] = []
    manifest: Manifest | None = None
    try:
        for request in requests:
            new_registration = start(request, job.catalog, run, job.announcement)
            registrations.append(new_registration)
        began = time.perf_counter()
        with span("inspect", source=first.source):
            # What was not verified, or is not recorded, is no first sight.
            observe = job.catalog is not False and job.settings.verify
            manifest = read(first.source, first.recover, first.keep_quantized, first.weights, observe)
        timings = {"inspect": time.perf_counter() - began}
        with span("validate", source=first.source):
            check(closed(manifest))
    except BaseException as error:
        for registration in registrations:
            fail(registration, error, manifest)
        raise
    results: list[Result] = []
    failed: list[Exception] = []
    for request, registration in zip(requests, registrations, strict=True):
        fields = {"destination": request.destination, "conversion": registration.id if registration else None}
        try:
            with log_fields(**fields), span("conversion", verb=request.verb, **fields):
                result = _one(request, job, manifest, registration, timings)
        except BaseException as error:
            fail(registration, error, manifest)
            if not isinstance(error, Exception):  # stopped: do not start the other outputs
                for unfinished in registrations[len(results) + len(failed) + 1 :]:
                    fail(unfinished, error, manifest)
                raise
            failed.append(error)
            continue
        # It is published and recorded with its verdict: the export failed, not the conversion.
        try:
            if result.proof is not None:
                require_match(result.proof)
        except OutputMismatch as error:
            failed.append(error)
        else:
            results.append(result)
    if failed:
        raise failed[0]
    return results


def _one(
    request: Request,
    job: FlowJob,
    manifest: Manifest,
    registration: Registration | None,
    timings: dict[str, float],
) -> Result:
    """Plan, write, publish and record one output of a checked source."""
    live = LiveSource.of(registration or job.announcement)
    settings = live.settings(job.settings)
    prepared = plan(request, settings, closed(manifest), job.catalog)
    timings = timings | prepared.timings
    began = time.perf_counter()
    observe = manifest.sums is not None
    tasks = write_all(prepared, settings, job.batch_bytes, job.engine, observe=observe)
    digests = digests_of_source(manifest, tasks)
    timings |= {"write": time.perf_counter() - began}
    conversion_id, recorded = (
        (registration.id, registration.source) if registration is not None else (None, None)
    )
    # Before publishing: an output of files that rotted since they were recorded must not appear.
    require_as_recorded(manifest, digests, recorded)
    compared = compare_live(prepared.plan_uri, manifest, live, digests, request.model_prefix)
    warnings = (*prepared.warnings, *compared.findings)
    result = publish(prepared.plan_uri, settings, job.catalog, closed(warnings), conversion_id)
    timings = result.timings | timings
    result = replace(result, timings=timings, source_digests=digests, live=compared.verdict)
    if request.verb == "export" and job.verify_export:
        began = time.perf_counter()
        with span("verify_export", destination=request.destination):
            proof = verify_export(request, manifest.digest, job.settings)
        result = replace(
            result, proof=proof, timings=result.timings | {"verify_export": time.perf_counter() - began}
        )
    noted = record.with_options(assets=asset_keys(request.destination), asset_deps=asset_keys(request.source))
    with span("register", destination=request.destination):
        return noted(closed(registration), closed(result), closed(manifest))


if __name__ == "__main__":
    entry(convert)
