"""Run the stages of a conversion, for the command line, for flows, and for Python.

    prepare   read, check, plan; claim the destination            -> Prepared
    execute   write some or all files of the plan                 -> Receipts
              (or `execute_part` and `join`, for a file that several machines write)
    finish    verify the written files, and publish them          -> Result
    register  record the result in the catalog; `remove_staging` removes the staging folder

`convert` runs all of them. All state between the stages is in a folder beside the destination, so each can
run in another process, and the next run resumes a killed one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ckptcore.checking.examine import inspect, validate
from ckptcore.checking.source_stamps import load as load_stamps
from ckptcore.checking.source_stamps import require_planned, require_same, take_listed
from ckptcore.conversion.destination import refuse_existing, require_place
from ckptcore.conversion.live_source import NOT_ASKED, LiveSource, require_as_live
from ckptcore.conversion.publish import Result, finish_staged
from ckptcore.conversion.registration import UNANNOUNCED, Announcement, Registration, fail, register, start
from ckptcore.conversion.source_digests import inspected, require_as_recorded, require_inputs_as_recorded
from ckptcore.conversion.staging.open_staging import at_rest, open_staging, staging_of_plan
from ckptcore.conversion.staging.staged_plan import REQUEST, restore, save, saved_digest
from ckptcore.conversion.staging.staging import DONE, Publication, Replaced, Staging, noted, packed_replaced
from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.file_sums import FileSums
from ckptcore.core.manifest import Manifest
from ckptcore.custody.judged import Replacer
from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    DestinationUnwritable,
    DiskFull,
    Finding,
    Interrupted,
    NameMismatch,
    SourceChanged,
    StagingForeign,
    StorageTrouble,
    finding,
)
from ckptcore.execution.execute import execute_files
from ckptcore.execution.parts import FilePart
from ckptcore.execution.receipts import Receipt, every_receipt, read_receipt, read_receipts
from ckptcore.planning.compose import Composed, Layouts, compose
from ckptcore.planning.plan import (
    Plan,
    PlannedFile,
    load_file_plan,
    load_head,
    peak_memory,
    settings_for,
    writing_processes,
)
from ckptcore.planning.request import Request, Settings
from ckptcore.planning.tiles import Budget
from ckptcore.reading.casting import torch_on
from ckptcore.reading.file_digests import file_digests
from ckptcore.store import open_source_store, put_each
from ckptcore.utils.average_url import is_average
from ckptcore.utils.log_format import log_fields
from ckptcore.utils.memory import reusing_memory
from ckptcore.utils.spans import span
from ckptcore.utils.workers import Progress

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog
    from ckptcore.comparison.live_comparison import LiveComparison

__all__ = [
    "FilePart",
    "Prepared",
    "Progress",
    "Receipt",
    "Result",
    "compare_live",
    "convert",
    "execute",
    "execute_part",
    "finish",
    "inspect",
    "join",
    "parts",
    "prepare",
    "publishing",
    "register",
    "remove_leftover_staging",
    "remove_staging",
    "stopped",
    "validate",
]
_log = logging.getLogger("ckptcore")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan that is ready to run.

    Attributes:
        plan_uri: Where the plan is stored.
        files: The files that will be written.
        bytes_in: Bytes that will be read.
        bytes_out: Bytes that will be written.
        peak_memory: The most that a run should take, in bytes: see `ckptcore.planning.plan.peak_memory`.
        renamed: (old name, new name).
        cast: (name, old dtype, new dtype).
        dropped: (name, rule).
        ties: (dropped name, kept name).
        warnings: Findings that do not stop the conversion.
        model: For an export, how the model part was found.
        manifest_digest: Of the source.
        plan_digest: Of the plan.
        timings: Stage -> seconds.
    """

    plan_uri: str
    files: tuple[PlannedFile, ...] = field(repr=False)
    bytes_in: int
    bytes_out: int
    peak_memory: int
    renamed: tuple[tuple[str, str], ...] = field(repr=False)
    cast: tuple[tuple[str, str, str], ...] = field(repr=False)
    dropped: tuple[tuple[str, str], ...] = field(repr=False)
    ties: tuple[tuple[str, str], ...] = field(repr=False)
    warnings: tuple[Finding, ...]
    model: str
    manifest_digest: str
    plan_digest: str
    timings: dict[str, float]


def prepare(
    request: Request,
    settings: Settings | None = None,
    manifest: Manifest | None = None,
    catalog_url: str | bool | None = False,
    topology: Layouts | None = None,
) -> Prepared:
    """Check the source, plan, and save the plan beside the destination.

    The same request over the same source gives the same plan, and keeps the files that an earlier run wrote.

    Args:
        request: What to convert, and how.
        settings: Memory, threads and device.
        manifest: The source's manifest, if it was read before.
        catalog_url: The catalog whose rows account for files of a destination that is replaced; None for the
            default, False for none.
        topology: See `ckptcore.planning.compose.compose`.

    Returns:
        A summary of the plan.

    Raises:
        DestinationExists: The destination is not free.
        DamagedCheckpoint: The source is damaged or incomplete.
        Busy: Another process is writing the destination.
        DiskFull: The output does not fit.
        UsageError: The request cannot be carried out.
    """
    settings = settings or Settings()
    _require_possible(request, settings)
    staging = open_staging(request.destination, catalog_url)
    with span("plan", source=request.source, destination=request.destination), staging.lock(make=True):
        return _prepare(request, settings, manifest, staging, catalog_url, topology)


def execute(
    plan_uri: str,
    indices: Sequence[int] | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
    *,
    sums: FileSums | None = None,
) -> tuple[Receipt, ...]:
    """Write files of a saved plan; finished files that hash to their receipt are kept.

    Args:
        plan_uri: Where the plan is stored.
        indices: Indices of files; None for all.
        settings: Memory, threads and device.
        progress: Called with the number of bytes written.
        sums: Observes the reads of the source, for the digests of its files.

    Returns:
        The receipts of these files.

    Raises:
        DamagedCheckpoint: Bytes of the source do not match their checksum.
        SourceChanged: The source was rewritten since it was planned.
    """
    staging = staging_of_plan(plan_uri)
    files = None if indices is None else len(indices)
    # Shared: workers of one plan write different files of it at the same time; only a new plan excludes them.
    with span("write", destination=staging.destination, files=files), staging.lock(shared=True):
        return _execute(staging, indices, settings or Settings(), progress, sums=sums)


def parts(plan_uri: str, index: int, nbytes: int, settings: Settings) -> tuple[FilePart, ...]:
    """Cut an output file into parts of about ``nbytes``, for `execute_part` with the same settings.

    Returns:
        The parts; empty if the file is finished, or must be written in one go: on object stores without
        upload handles, and on others where it stores checksums behind its data.
    """
    staging = staging_of_plan(plan_uri)
    plan = load_head(staging.plan)
    # Also true if a run was killed before the output was recorded: its files are at the destination, not
    # staged.
    is_published = staging.published_plan(noted(staging)) == plan.digest
    if is_published or read_receipt(staging.receipts, plan.digest, index):
        return ()
    return staging.cut(plan, load_file_plan(staging.plan, index), nbytes, settings_for(plan, settings))


def execute_part(
    plan_uri: str,
    part: FilePart,
    settings: Settings,
    progress: Progress | None = None,
    *,
    sums: FileSums | None = None,
) -> Receipt:
    """Write one part of a file; a part that hashes to its receipt is kept. `join` completes the file.

    sums: See `execute`.

    Raises:
        DamagedCheckpoint: Bytes of the source do not match their checksum.
    """
    staging = staging_of_plan(plan_uri)
    with span("write_part", destination=staging.destination, file=part.index), staging.lock(shared=True):
        return _execute(staging, [part.index], settings, progress, part, sums=sums)[0]


def join(plan_uri: str, index: int) -> Receipt:
    """Join the parts of a file, and verify it byte for byte; a finished file is left as it is.

    Raises:
        OutputMismatch: The bytes in the file are not those that the parts' writers wrote.
        UsageError: A part is missing.
    """
    staging = staging_of_plan(plan_uri)
    with staging.lock(shared=True), closing(staging.files):
        return staging.join(load_head(staging.plan), load_file_plan(staging.plan, index))


def compare_live(
    plan_uri: str, manifest: Manifest, live: LiveSource, digests: Mapping[str, str], prefix: str | None = None
) -> LiveComparison:
    """Require of a plan whose files are written what `require_as_live` requires of its source."""
    # Before the lock: most jobs send no fingerprint, and then nothing has to be read.
    if not live.fingerprints(manifest, digests):
        return NOT_ASKED
    staging = staging_of_plan(plan_uri)
    with staging.lock():
        return require_as_live(staging, manifest, live, digests, prefix)


def finish(
    plan_uri: str,
    settings: Settings | None = None,
    progress: Progress | None = None,
    catalog_url: str | bool | None = False,
    conversion: str | None = None,
) -> Result:
    """Verify that every file exists and that the output reads back as planned, then publish it.

    The staging folder stays, for `register`; `remove_staging` removes it. The catalog is that of `prepare`;
    ``conversion`` is its id there, if this process began it.
    """
    staging = staging_of_plan(plan_uri, catalog_url)
    with span("publish", destination=staging.destination), staging.lock():
        return finish_staged(staging, settings or Settings(), progress, Replacer(catalog_url, conversion))


def remove_staging(plan_uri: str) -> None:
    """Remove the staging folder of a published plan."""
    staging = staging_of_plan(plan_uri)
    # First what a killed publication left: with the folder removed, an old output
    # that is only moved aside would go with it.
    staging.finish_interrupted_publish()
    staging.remove()


def remove_leftover_staging(destination: str, catalog: Catalog | bool = False) -> None:
    """Remove the staging folder that a killed run left beside a published destination.

    The caller has the claim on the destination, and found it in the catalog. Raises `Busy`.
    """
    staging = open_staging(destination, catalog)
    # Before the record is read: a folder that is half removed may still have one.
    staging.sweep_gone()
    try:
        record = noted(staging)
        if staging.published_plan(record) or staging.publishing_plan(record):
            with staging.lock():
                staging.finish_interrupted_publish()
                staging.remove()
    except StagingForeign as error:  # the published output does not need it: it is left to its owner
        _log.warning("%s", error.message)


def convert(
    request: Request,
    settings: Settings | None = None,
    progress: Progress | None = None,
    catalog_url: str | bool | None = None,
    topology: Layouts | None = None,
    announcement: Announcement = UNANNOUNCED,
) -> Result:
    """Run all stages of a conversion in this process.

    Args:
        request: What to convert, and how.
        settings: Memory, threads and device.
        progress: Called with the stage, the bytes done and the bytes in total.
        catalog_url: The catalog that records the conversion; None for the default, False for none.
        topology: See `ckptcore.planning.compose.compose`.
        announcement: What a user reports about the source, for the catalog.

    Returns:
        The published output.

    Raises:
        CkptError: An error of a stage. The catalog records it as a failure, unless it is a `UsageError`.
    """
    # Recorded before anything is read, so that an unusable catalog is
    # an error before the work and not after it.
    registration = start(request, catalog_url, announcement=announcement)
    log_values = {
        "source": request.source,
        "destination": request.destination,
        "conversion": registration.id if registration else None,
    }
    source_record = registration or announcement
    manifests: list[Manifest] = []
    with log_fields(**log_values), span("conversion", verb=request.verb, **log_values):
        try:
            stages = publishing(
                request,
                settings or Settings(),
                progress,
                catalog_url,
                topology,
                manifests=manifests,
                source_record=source_record,
            )
            with stages as result:
                (progress or _silent)("register", result.nbytes, result.nbytes)
                with span("register", destination=request.destination):
                    result = register(registration, result, manifests[0])
        except BaseException as error:
            stop = stopped(error)
            fail(registration, stop, manifests[0] if manifests else None)
            # Ctrl-C is raised as an error with an exit code of its own,
            # after the catalog knows that the run ended.
            if stop is not error:
                raise stop from error
            raise
    return result


@contextmanager
def publishing(
    request: Request,
    settings: Settings,
    progress: Progress | None = None,
    catalog_url: str | bool | None = None,
    topology: Layouts | None = None,
    *,
    manifests: list[Manifest],
    source_record: Registration | Announcement = UNANNOUNCED,
) -> Iterator[Result]:
    """Run the stages of a conversion up to publishing, and keep the destination while the block runs.

    The block records the result; the staging folder is removed after it, and stays after an error.

    Args:
        request: What to convert, and how.
        settings: Memory, threads and device.
        progress: See `convert`.
        catalog_url: The catalog that accounts for files of a destination that is replaced; see `prepare`.
        topology: See `ckptcore.planning.compose.compose`.
        manifests: Receives the source's manifest, as soon as it is read.
        source_record: The conversion in the catalog, which records the digests of the source's files; without
            a catalog, what a user reports about the source.

    Yields:
        The published output, not yet recorded.
    """
    report = progress or _silent
    registration = source_record if isinstance(source_record, Registration) else None
    _require_possible(request, settings)
    began = time.perf_counter()
    observe = registration is not None and settings.verify  # what was not verified is no first sight
    with span("inspect", source=request.source):
        weights, recover, quantized = request.weights, request.recover, request.keep_quantized
        manifest = inspect(request.source, recover, quantized, weights, observe=observe)
    # Given to the caller before anything can fail: a failure is recorded with the source it belongs to.
    manifests.append(manifest)
    live = LiveSource.of(source_record)
    # Sums are computed while tensors are moved: whether they are needed must be known before.
    settings = live.settings(settings)
    inspect_s = time.perf_counter() - began
    report("inspect", manifest.nbytes, manifest.nbytes)
    report("validate", 0, manifest.nbytes)
    staging = open_staging(request.destination, catalog_url)
    with staging.lock(make=True):
        with span("plan", source=request.source, destination=request.destination):
            prepared = _prepare(request, settings, manifest, staging, catalog_url, topology, just_read=True)
        report("validate", manifest.nbytes, manifest.nbytes)
        report("plan", prepared.bytes_out, prepared.bytes_out)
        began = time.perf_counter()
        with span("write", destination=request.destination, bytes=prepared.bytes_out):
            receipts = _execute(staging, None, settings, progress, just_planned=True, sums=manifest.sums)
            digests = digests_of_source(manifest)
        wrote = time.perf_counter() - began
        conversion_id, recorded = (registration.id, registration.source) if registration else (None, None)
        # After all bytes were read and before anything is published: a source that the catalog knows
        # with other bytes must not become an output.
        require_as_recorded(manifest, digests, recorded)
        if registration is not None and is_average(request.source):
            require_inputs_as_recorded(request, digests, registration.catalog)
        compared = require_as_live(staging, manifest, live, digests, request.model_prefix)
        with span("publish", destination=request.destination):
            result = finish_staged(staging, settings, progress, Replacer(catalog_url, conversion_id))
        # Seconds of this run; those of writing come from receipts, some
        # of which an earlier run may have written.
        timings = {"inspect": inspect_s, **prepared.timings, "write": wrote}
        timings |= {k: v for k, v in result.timings.items() if k not in timings}
        warnings = (*prepared.warnings, *result.warnings, *compared.findings)
        yield replace(
            result,
            files=receipts,
            timings=timings,
            warnings=warnings,
            source_digests=digests,
            live=compared.verdict,
        )
        # Only after the block: it records the output, and until that is
        # done the next run must find the staged plan.
        _remove_published(staging)


def stopped(error: BaseException) -> BaseException:
    """Return the error of a conversion; Ctrl-C is `Interrupted`."""
    return Interrupted("stopped by the user") if isinstance(error, KeyboardInterrupt) else error


@dataclass(frozen=True, slots=True)
class _Earlier:
    """What an earlier run left at a destination: its record, and names of staged objects, if listed.

    published, publishing: the digest of the plan whose output it published, or began to copy, or None.
    """

    record: Publication | None
    published: str | None
    publishing: str | None
    names: Collection[str] | None

    @property
    def plan(self) -> str | None:
        """Return the digest of the plan that it published or began to publish, or None."""
        return self.published or self.publishing


@reusing_memory()
def _prepare(
    request: Request,
    settings: Settings,
    manifest: Manifest | None,
    staging: Staging,
    catalog_url: str | bool | None,
    topology: Layouts | None,
    *,
    just_read: bool = False,
) -> Prepared:
    """See `prepare`. just_read: the manifest is of a moment ago, and this process carries out the plan."""
    # The order matters: what is left of a removed folder first, then what a killed publication left, because
    # the plan of an earlier run says nothing before its publication is settled.
    staging.sweep_gone()
    staging.finish_interrupted_publish()
    earlier = _earlier_run(staging, partial(refuse_existing, request))
    manifest = manifest or inspected(request)
    try:
        composed = compose(request, manifest, topology=topology)
        plan = composed.plan
        # A device that does not exist is refused before anything is written.
        if plan.derived and settings.device != "cpu":
            torch_on(settings.device)
        # An earlier run published another plan here: what it left does not make this destination ours.
        if earlier.plan is not None and earlier.plan != plan.digest:
            refuse_existing(request)
        with closing(open_source_store(manifest.root)) as source:
            ctimes, stamps, listed = take_listed(manifest, source, just_read=just_read)
        # Files that were not listed with the manifest might have changed before their stamps were taken.
        if not listed:
            _require_unchanged(request, manifest)
        resumed, anew = _resume(staging, composed, stamps, earlier, keep=request.resume)
        records = []
        if resumed is None:
            asked = (request, composed, settings, catalog_url, earlier.record)
            records.append(packed_replaced(_replaced(*asked) if request.replaces else Replaced()))
        # The request is stored even if the plan goes on: the plan does not depend on all of it.
        records.append((REQUEST, canonical_json(request.as_dict())))  # every time: --overwrite may differ
        staging.beside_uploads(plan.files, settings)  # refused now, and not after hours of uploading
        # Only where this process carries out the plan: begun uploads are state of a process.
        if anew and just_read:
            staging.begin_uploads(plan, settings.of(plan.target.mesh))
        if anew:
            save(staging, composed, stamps, ctimes, records)
        else:
            put_each(staging.root, records)
        # Files that an earlier run finished need no room.
        receipts = read_receipts(staging.receipts, plan.digest, [f.index for f in plan.files])
        staging.require_room(
            sum(f.nbytes for f, receipt in zip(plan.files, receipts, strict=True) if receipt is None)
        )
    # A refused plan leaves no folder behind, unless an earlier run has left something in it.
    except CkptError:
        _remove_if_unused(staging)
        raise
    _log.info("planned %s: %d files, %d bytes", request.destination, len(plan.files), plan.bytes_out)
    used = settings_for(plan, settings)
    return Prepared(
        staging.plan_uri,
        plan.files,
        plan.bytes_in,
        plan.bytes_out,
        peak_memory(plan.source, plan.files, used),
        plan.renamed,
        plan.cast,
        plan.dropped,
        plan.ties,
        (*composed.warnings, *_unused_device(used, settings)),
        composed.model.because if composed.model else "",
        plan.manifest_digest,
        plan.digest,
        composed.timings,
    )


def _earlier_run(staging: Staging, refuse: Callable[[], None]) -> _Earlier:
    """Return what an earlier run left; without one, raise what `refuse` has against the destination."""
    refusals: list[CkptError] = []

    def look() -> None:
        refusals.clear()
        try:
            refuse()
        except CkptError as error:  # unless an earlier run published there
            refusals.append(error)

    # On an object store the look runs while the lease is proven, and is repeated if another run was at work
    # meanwhile; so what it refuses is only the last answer.
    names = staging.look_ahead(look)
    record = noted(staging)
    earlier = _Earlier(record, staging.published_plan(record), staging.publishing_plan(record), names)
    if earlier.plan is None and refusals:
        _remove_if_unused(staging)
        raise refusals[0]
    return earlier


def _resume(
    staging: Staging, composed: Composed, stamps: dict[str, str | None], earlier: _Earlier, *, keep: bool
) -> tuple[Publication | None, bool]:
    """Resume in an earlier run's staging folder if it has this very plan, else empty it.

    Returns:
        The publication, if it is this plan's and goes on; and whether the plan is to be saved.
    """
    plan = composed.plan
    # Stamps as well: the same plan over files that were rewritten since would mix old and new bytes.
    same = saved_digest(staging) == plan.digest and load_stamps(staging.plan) == stamps
    resumed = earlier.record if earlier.plan == plan.digest else None
    staging.sweep_parts()
    # A publication that is done has lost its plan and receipts if it was killed while it cleaned up: they are
    # made once more, to verify what is published.
    if resumed is not None and resumed.step == DONE:
        restore(staging, composed, stamps, resumed, same=same)
    elif not (keep and same):
        # Only the record knows what a killed run began to replace on an object store. It stays until the next
        # publication takes it over.
        staging.clear(publication=earlier.publishing is None, names=earlier.names)
        return None, True
    elif earlier.published != plan.digest:
        staging.check_staged_plan(composed, stamps)
    return resumed, False


def _replaced(
    request: Request,
    composed: Composed,
    settings: Settings,
    catalog_url: str | bool | None,
    record: Publication | None,
) -> Replaced:
    """Return what a request that replaces may replace at its destination."""
    # Late imports: most conversions replace nothing.
    from ckptcore.conversion.foreign_files import require_accounted
    from ckptcore.custody.replacing import may_replace

    replaced = require_accounted(request, composed.extra, catalog_url, record)
    if not replaced.inventory:
        # An empty destination replaces nothing, and nobody has to be asked.
        return replaced
    judged = may_replace(request.destination, Replacer(catalog_url), settings, at_rest)
    return replace(replaced, judged=judged)


def _silent(stage: str, done_bytes: int, total_bytes: int) -> None:
    """Ignore progress."""


def _require_possible(request: Request, settings: Settings) -> None:
    """Check budget, device and destination before anything is written.

    A destination that overlaps the source must not even get a staging folder beside it.
    """
    Budget.of(settings)
    if settings.device != "cpu" and (request.dtype or request.dtype_for):
        torch_on(settings.device)
    require_place(request.destination, request.source, config=request.config, tokenizer=request.tokenizer)


def _unused_device(used: Settings, settings: Settings) -> Iterator[Finding]:
    """Yield a finding if the plan has no use for the device. used: the settings that carry it out."""
    if used.device != settings.device:
        message = f"--device {settings.device} is not used: no tensor is cast or computed, and the CPU copies"
        yield finding("unused-option", "files", message)


def _require_unchanged(request: Request, manifest: Manifest) -> None:
    """Read the manifest a second time; raise `SourceChanged` if it differs."""
    # The first reading may have read some files before and some after they were rewritten.
    if inspected(request).digest != manifest.digest:
        raise SourceChanged(
            f"{request.source} was rewritten while it was read",
            hint="run the command again when nothing writes to the source",
        )


def _execute(
    staging: Staging,
    indices: Sequence[int] | None,
    settings: Settings,
    progress: Progress | None,
    part: FilePart | None = None,
    *,
    just_planned: bool = False,
    sums: FileSums | None = None,
) -> tuple[Receipt, ...]:
    """Write files of a staged plan, or a part of one; return their receipts."""
    plan = load_head(staging.plan)
    file_indices = [f.index for f in plan.files] if indices is None else list(indices)
    # A killed run published this plan: its receipts are what there is to say about the files.
    if staging.published_plan(noted(staging)) == plan.digest:
        return every_receipt(staging.receipts, plan.digest, (plan.files[i] for i in file_indices))
    stamps = load_stamps(staging.plan) or {}
    settings = settings_for(plan, settings)
    with closing(open_source_store(plan.source, stamps)) as source, closing(staging.files):
        source.observer = sums
        (require_planned if just_planned else require_same)(stamps, source)
        run = staging.run(plan, source, stamps, settings)
        beside = staging.beside_uploads(plan.files, settings)
        if part is None:
            sizes = [plan.files[index].nbytes for index in file_indices]
            count = writing_processes(plan.source, settings, sizes)
            if count > 1:
                from ckptcore.conversion.file_process import elsewhere

                # Written in other processes, each file by one of them; a part of a file
                # is written by the caller's own process.
                run = replace(run, elsewhere=elsewhere(staging, plan, file_indices, settings, sums, count))
        try:
            return execute_files(run, file_indices, beside, part=part, progress=progress)
        except DamagedCheckpoint as error:
            untied = _untied(plan, error)
            if untied is None:
                raise
            raise untied from error


def _untied(plan: Plan, error: DamagedCheckpoint) -> NameMismatch | None:
    """Return the error of a tie between tensors that differ: nothing is damaged; None for any other error."""
    # Both sides of a tie are compared like replicas, so their difference arrives as the finding of a replica.
    differing = [f for f in error.findings if f.code == "replica-mismatch"]
    # A tie may be of a computed tensor: the finding names the inputs, as they are what was read.
    computed = {name: formula.partition(" of ")[2].split(", ") for name, formula in plan.derived}
    tied = next(((a, b) for a, b in plan.ties for f in differing if f.fqn in (b, *computed.get(b, ()))), None)
    if tied is None:
        return None
    gone, tied_to = tied
    where = differing[0].message.rpartition(" differ in ")[2]
    return NameMismatch(
        f"{gone} is tied to {tied_to}, by the config (tie_word_embeddings) or --tie, and they differ in "
        f"{where}",
        hint='if it was trained so, set "tie_word_embeddings": false in the config of this model; else leave '
        f"one out: --exclude '*{gone}'",
        missing=[],
    )


def digests_of_source(manifest: Manifest, read: Iterable[FileSums] = ()) -> dict[str, str]:
    """Return the digests of the source's files that were read completely.

    Args:
        manifest: The source; its ``sums`` observed the reads of this process.
        read: What other processes have read of it.
    """
    if manifest.sums is None:
        return {}
    for file_sums in read:
        manifest.sums.add(file_sums)
    # Versions, so that a file that was replaced since has no digest rather than a wrong one.
    with closing(open_source_store(manifest.root, manifest.versions)) as source:
        return file_digests(manifest, source)


def _remove_published(staging: Staging) -> None:
    """Remove the staging folder of a recorded output; one that cannot be removed is left to a later run."""
    try:
        staging.remove()
    # The output is complete and recorded: a staging folder that stays costs space, but a failure
    # here would look like one of the conversion.
    except (DestinationUnwritable, DiskFull, StorageTrouble) as error:
        _log.warning("%s is complete, and its staging folder is left: %s", staging.destination, error.message)


def _remove_if_unused(staging: Staging) -> None:
    """Remove a staging folder without finished files."""
    if staging.is_unused():
        staging.remove()
