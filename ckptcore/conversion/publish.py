"""Verify that the written output equals the plan, and publish it.

Every file must have its receipt and size. The output must read back, through its own reader, as the planned
names, dtypes and shapes, complete. Only then is it published. The inode of the output is recorded first (a
rename keeps it), so that the next run knows whether a killed run published it.

A model card gets the fingerprint of the tensors as its last line, after all of them were copied. A card is
planned before any byte is read, and its digest is part of the plan. The published card is the planned card
and this one line. Without the line, the card's digest is the planned one.

A file that is rewritten in place can get its size and modification time back. Its ctime changes, but a chmod
or a backup changes that, too. If only a ctime differs from the one recorded with the plan, or the plan has
none, every output file is computed a second time and compared with the staged bytes, while
stamps and ctimes stay constant. That reads the source and the staged files once, and is conclusive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from blake3 import blake3

from ckptcore.catalog.training import LiveVerdict
from ckptcore.checking.check import check
from ckptcore.checking.export_proof import ExportProof
from ckptcore.checking.source_stamps import digest as stamps_digest
from ckptcore.checking.source_stamps import (
    load,
    load_ctimes,
    require_same,
    save,
    settled_ctimes,
    take_ctimes,
    untouched,
)
from ckptcore.checking.source_stamps import load as load_stamps
from ckptcore.conversion.file_fingerprints import fingerprints, statistics
from ckptcore.conversion.staging.open_staging import at_rest
from ckptcore.conversion.staging.staged_plan import planned_paths, staged_request
from ckptcore.conversion.staging.staging import (
    ITSELF,
    Publication,
    Replaced,
    Staging,
    UploadCompletion,
    noted,
    noted_replaced,
)
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.custody.judged import NOBODY, Replacer
from ckptcore.errors import DestinationExists, Finding, OutputMismatch, SourceChanged, UsageError, finding
from ckptcore.execution.execute import recompute_files
from ckptcore.execution.receipts import Receipt, every_receipt, is_intact, seen_as
from ckptcore.fingerprints.statistics import MeasuredTensor
from ckptcore.fingerprints.sums import Fingerprinted, checkpoint_fingerprint
from ckptcore.formats import Format, Source, by_name, located, open_source, read_as, read_manifest
from ckptcore.naming.rename import MadeTensor
from ckptcore.planning.hub_files import ADAPTER, CARD, CONFIG
from ckptcore.planning.model_card import fingerprint_line
from ckptcore.planning.plan import Plan, PlannedFile, load_file_plan, load_head
from ckptcore.planning.request import Settings
from ckptcore.reading.file_digests import digest_of
from ckptcore.store import Readable, is_s3, open_source_store, open_store, reads_s3
from ckptcore.store.listing import Inventory, list_destination
from ckptcore.utils.workers import Progress

_TRIES = 3  # a backup that runs meanwhile changes the ctime of every file once
_HINT = "run the command again when nothing writes to the source"
_log = logging.getLogger("ckptcore")


@dataclass(frozen=True, slots=True)
class Result:
    """A published output.

    Attributes:
        destination: Its path or URL.
        format: Its format.
        nbytes: Bytes of all files.
        files: Receipts of its files.
        tensors: Its tensors.
        manifest_digest: Of the output.
        plan_digest: Of the plan.
        bytes_in: Source bytes read.
        timings: Stage -> seconds.
        written: The output's manifest, as it was read back.
        plan_uri: Where the plan was stored.
        conversion: Id in the catalog, or None.
        warnings: Findings that did not stop the conversion.
        fingerprint: Of the tensors before any cast; None if not every file was summed.
        fingerprints: Of each tensor.
        measured: Tensors with their statistics, before any cast; empty if not every file was measured.
        renamed: (old name, new name).
        map_digest: Of everything that was done to names.
        made: Tensors that a map computed from others.
        dropped: (name, rule) of tensors that were left out.
        source_stamp: Digest of the source's stamps (`ckptcore.checking.source_stamps.digest`).
        source_ctime: Digest of the source's ctimes.
        source_digests: Path -> digest of the source's files that were read completely.
        published: (path, bytes, BLAKE3 or None) of every published file, including the small ones.
        proof: The proof of an export after it was published, if requested.
        live: Whether the source is what its job had in memory, if that was compared.
    """

    destination: str
    format: str
    nbytes: int
    files: tuple[Receipt, ...] = field(repr=False)
    tensors: tuple[TensorSpec, ...] = field(repr=False)
    manifest_digest: str
    plan_digest: str
    bytes_in: int
    timings: dict[str, float]
    written: Manifest = field(repr=False)
    plan_uri: str = ""
    conversion: str | None = None
    warnings: tuple[Finding, ...] = ()
    fingerprint: str | None = None
    fingerprints: tuple[Fingerprinted, ...] = field(default=(), repr=False)
    measured: tuple[MeasuredTensor, ...] = field(default=(), repr=False)
    renamed: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    map_digest: str = ""
    made: tuple[MadeTensor, ...] = field(default=(), repr=False)
    dropped: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    source_stamp: str | None = field(default=None, repr=False)
    source_ctime: str | None = field(default=None, repr=False)
    source_digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    published: tuple[tuple[str, int, str | None], ...] = field(default=(), repr=False)
    proof: ExportProof | None = None
    live: LiveVerdict | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        plain = (
            "destination",
            "format",
            "nbytes",
            "manifest_digest",
            "plan_digest",
            "bytes_in",
            "timings",
            "conversion",
            "map_digest",
            "fingerprint",
        )
        form: dict[str, Any] = {name: getattr(self, name) for name in plain}
        form["files"] = [r.as_dict() for r in self.files]
        form["unproven"] = sum(r.unverified for r in self.files)
        form["tensors"] = len(self.tensors)
        form["warnings"] = [w.as_dict() for w in self.warnings]
        form["dropped"] = [list(d) for d in self.dropped]
        form["loadable"] = self.loadable
        form["live"] = None if self.live is None else asdict(self.live)
        if self.measured:
            form["stats"] = [tensor.as_dict() for tensor in self.measured]
        if self.proof is not None:
            form["proof"] = self.proof.as_dict()
        return form

    @property
    def loadable(self) -> str | None:
        """``no`` if transformers will not open an export; None if that is unknown."""
        return "no" if any(w.code == "not-loadable" for w in self.warnings) else None


@dataclass(frozen=True, slots=True)
class _Publishing:
    """An output whose files are all written, in its locked staging folder.

    record: the publication that an earlier run began, or None; resumed: it is this one, on an object store,
    so that it was verified, and its files may no longer be staged.
    """

    staging: Staging
    plan: Plan
    receipts: tuple[Receipt, ...]
    record: Publication | None
    resumed: bool
    settings: Settings
    progress: Progress | None
    writer: Replacer

    def require_source(self) -> None:
        """Require that the source is unchanged."""
        require_source(self.staging, self.plan, self.settings, self.progress)

    def publication(self) -> Publication:
        """Return the publication to carry out, and log that."""
        publication = _admitted(_publication(self), self)
        _log.info("verified %s, publishing", self.staging.destination)
        return publication


@dataclass(frozen=True, slots=True)
class _Output:
    """A published output: its manifest, its (path, bytes, digest), when it was verified, and findings."""

    written: Manifest
    published: tuple[tuple[str, int, str | None], ...]
    verified: float
    unproven: tuple[Finding, ...] = ()


def finish_staged(
    staging: Staging, settings: Settings, progress: Progress | None, writer: Replacer = NOBODY
) -> Result:
    """Verify and publish a staged output whose files are all written.

    Args:
        staging: The staging folder, locked.
        settings: Memory, threads and device.
        progress: Called with the number of bytes done.
        writer: The conversion in the catalog, which decides what may be replaced.

    Returns:
        The published output.

    Raises:
        OutputMismatch: A staged file or the output differs from the plan.
        SourceChanged: The source was rewritten since it was planned.
        DestinationExists: Another process wrote to the destination.
        UsageError: A file is not written yet.
    """
    began = time.perf_counter()
    staging.finish_interrupted_publish()
    plan = load_head(staging.plan)
    # Of all files, also those that an earlier run wrote: receipts are what says that a file is complete.
    receipts = every_receipt(staging.receipts, plan.digest, plan.files)
    # Plans are loaded one after the other: those of all files of a large job together take gigabytes.
    tensors = fingerprints((load_file_plan(staging.plan, f.index) for f in plan.files), receipts)
    fingerprint = None if tensors is None else checkpoint_fingerprint(tensors)
    measured = statistics((load_file_plan(staging.plan, f.index) for f in plan.files), receipts)
    _require_proven(receipts)
    if progress is not None:
        progress("verify", plan.bytes_out, plan.bytes_out)
    record = noted(staging)
    is_published = staging.published_plan(record) == plan.digest
    resumed = staging.publishing_plan(record) == plan.digest
    # Before anything is compared with the plan: the card that is
    # published has one line more than the planned one.
    if fingerprint is not None:
        plan = with_fingerprint(staging, plan, fingerprint, published=is_published, is_resumed=resumed)
    publishing = _Publishing(staging, plan, receipts, record, resumed, settings, progress, writer)
    if is_published:
        output = _published_output(publishing)
    else:
        # Joints whose parts were never joined are no files of the plan, and would be refused as such.
        staging.sweep_parts(joints=True)
        completion = staging.completion(plan, receipts)
        output = (
            _publish_staged(publishing) if completion is None else _publish_uploads(publishing, completion)
        )
    timings = {
        "write": sum(r.seconds for r in receipts),
        "verify": output.verified - began,
        "publish": time.perf_counter() - output.verified,
    }
    return Result(
        staging.destination,
        plan.target.format,
        plan.bytes_out,
        receipts,
        output.written.tensors,
        output.written.digest,
        plan.digest,
        plan.bytes_in,
        timings,
        output.written,
        staging.plan_uri,
        warnings=(*_unproven(plan.source, receipts), *output.unproven),
        fingerprint=fingerprint,
        fingerprints=tensors or (),
        measured=measured,
        renamed=plan.renamed,
        map_digest=plan.map_digest,
        made=plan.made,
        dropped=plan.dropped,
        source_stamp=stamps_digest(load_stamps(staging.plan)),
        source_ctime=stamps_digest(load_ctimes(staging.plan)),
        published=output.published,
    )


def _publish_staged(publishing: _Publishing) -> _Output:
    """Publish an output whose files are all in the staging folder: it is read back there."""
    staging, plan, receipts = publishing.staging, publishing.plan, publishing.receipts
    # Anything that is not in the plan would be published with the folder.
    staging.require_planned(planned_paths(plan.files, plan.extra))
    _require_written(staging, plan.files, receipts, iter(()))
    _require_small_files(staging.files, plan.extra)
    specs, commit = _planned(staging, plan)
    written = _read_back(staging, plan, staging.files, specs)
    published = _published_files(staging.files, plan.extra, receipts, written)
    verified = time.perf_counter()
    # A resumed publication has begun to replace the destination,
    # after the source was proven once: it goes on.
    if not publishing.resumed:
        publishing.require_source()
    staging.publish(publishing.publication(), commit, single=plan.target.single is not None)
    return _Output(written, published, verified)


def _publish_uploads(publishing: _Publishing, completion: UploadCompletion) -> _Output:
    """Publish an output by completing its uploads: it is read back at the destination, before its index."""
    staging, plan, receipts = publishing.staging, publishing.plan, publishing.receipts
    uploads, sent = completion.uploads, list(completion.handles.values())
    sizes: dict[str, int] = {}  # of the files that are staged as a whole
    stored: list[bool] = []
    inventories: list[Inventory] = []
    checks: list[Callable[[], object]] = [
        lambda: sizes.update(staging.require_planned(planned_paths(plan.files, plan.extra))),
        lambda: stored.extend(uploads.client.each(uploads.holds, sent)),
    ]
    # Both on S3: the checks are requests that wait, and none needs the answer of another.
    at_once = not publishing.resumed and is_s3(plan.source)
    if at_once:  # what the stores say does not depend on each other
        checks.append(publishing.require_source)
        checks.append(lambda: inventories.append(list_destination(staging.destination)))
    staging.together(checks)
    _require_written(staging, plan.files, receipts, iter(stored))
    _require_small_files(staging.files, plan.extra)
    specs, commit = _planned(staging, plan)
    verified = time.perf_counter()
    # Elsewhere the source is proven as late as possible, right before the first change.
    if not publishing.resumed and not at_once:
        publishing.require_source()
    manifests: list[Manifest] = []
    unproven = completion.publish(
        publishing.publication(),
        commit,
        sizes,
        lambda files: manifests.append(_read_back(staging, plan, files, specs)),
        inventories[0] if inventories else None,
    )
    (written,) = manifests  # it was read before the last files were written
    published = _published_files(staging.files, plan.extra, receipts, written)
    return _Output(written, published, verified, unproven)


def _unproven(source: str, receipts: Sequence[Receipt]) -> tuple[Finding, ...]:
    """Return a note on what came over a network unproven: flipped bits would not be seen."""
    count = sum(r.unverified for r in receipts)
    if not count or not reads_s3(source):
        return ()
    from ckptcore.execution.expected_reads import MOST_ROWS  # a late import: local sources need no blocks

    message = (
        f"{count} source records were not compared with a checksum: their format has none, and the store has "
        f"none of their files, or they were read in small part, or past the {MOST_ROWS} ranges that a run "
        "declares; or checks were off"
    )
    hint = (
        "`ckptcore diff SRC DST`, or `ckptcore verify-export DST` for an export, reads both once more and "
        "compares every bit"
    )
    return (finding("unproven", "bytes", message, hint=hint),)


def _require_proven(receipts: Sequence[Receipt]) -> None:
    """Raise `UsageError` for files of a stopped run whose source records are not verified yet."""
    left = [r for r in receipts if r.pending]
    if left:
        raise UsageError(
            f"{left[0].path} is written, but {len(left[0].pending)} of its source records are not verified",
            hint="run execute for every file again: written files are kept",
        )


def _published_files(
    store: Readable, extra: Sequence[tuple[str, str]], receipts: Sequence[Receipt], written: Manifest
) -> tuple[tuple[str, int, str | None], ...]:
    """Return (path, bytes, digest) of every file of the output; raise `OutputMismatch`.

    Files without tensors are digested even if receipts have no digests: they are small. extra: (path, BLAKE3)
    of the small files (config, tokenizer, card), as planned.
    """
    with_tensors = {f.path for f in written.files}
    published = []
    for r in receipts:
        # Without digests only tensors go without one: small files are digested in any case.
        has_digest = r.digest is not None or r.path in with_tensors
        published.append((r.path, r.nbytes, r.digest if has_digest else digest_of(store, r.path, r.nbytes)))
    for path, planned in extra:
        size = store.size(path)
        # Read where it is staged or published, not taken from the plan: this is the last look at the file.
        if size is None or digest_of(store, path, size) != planned:
            raise OutputMismatch(
                f"{store.url}/{path} is not what was planned (got {size} bytes)",
                hint="run the command again with --no-resume",
            )
        published.append((path, size, planned))
    return tuple(published)


def _published_output(publishing: _Publishing) -> _Output:
    """Return the output at the destination, if it is still the published one."""
    staging, plan, receipts = publishing.staging, publishing.plan, publishing.receipts
    source = open_source(staging.destination, keep_quantized=True)  # the stored form is what was written
    published: tuple[tuple[str, int, str | None], ...] = ()
    with closing(source.store):
        written = read_manifest(source)
        unchanged = staging.is_unchanged(publishing.record, receipts, source.store)
        # Sizes and receipts first, which is cheap; then the small files are digested.
        try:
            if unchanged:
                published = _published_files(source.store, plan.extra, receipts, written)
        except OutputMismatch:
            unchanged = False
    if not unchanged or sorted(_specs(written)) != _planned(staging, plan)[0]:
        # Whatever is there is no longer what this run published, and is therefore not touched.
        raise DestinationExists(f"{staging.destination} exists, and changed since it was published")
    return _Output(written, published, time.perf_counter())


def _specs(manifest: Manifest) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(t.fqn, t.dtype, t.shape) for t in manifest.tensors]


def _planned(staging: Staging, plan: Plan) -> tuple[list[tuple[str, str, tuple[int, ...]]], list[str]]:
    """Return ((name, dtype, shape) of each planned tensor, commit files).

    The files' plans are loaded one at a time: in a large job they take gigabytes together.
    """
    # A set: replicas of a tensor are planned in several files.
    specs: set[tuple[str, str, tuple[int, ...]]] = set()
    commit = []
    for file in plan.files:
        file_plan = load_file_plan(staging.plan, file.index)
        specs.update(file_plan.columns.specs())
        if file_plan.commit:
            commit.append(file_plan.path)
    if plan.target.single is not None:
        return sorted(specs), [ITSELF]
    # These make a folder loadable, too: they are written last, with the index.
    return sorted(specs), [*(path for path, _ in plan.extra if path in (CONFIG, ADAPTER)), *commit]


def _publication(publishing: _Publishing) -> Publication:
    """Return the publication to carry out: on an object store, the one that a killed run recorded."""
    staging, plan, record = publishing.staging, publishing.plan, publishing.record
    # Its record decides: what it was to replace was listed before it began, and may be partly gone.
    if publishing.resumed and record is not None:
        return record
    replaced = noted_replaced(staging)
    if replaced is None:  # a crash truncated it
        replaced, request = Replaced(), staged_request(staging)
        if request.replaces:
            # A late import: most conversions replace nothing.
            from ckptcore.conversion.foreign_files import require_accounted

            replaced = require_accounted(request, {}, unfinished=record)
    single = plan.target.single is not None
    puts: dict[str, tuple[int, str | None]] = {
        ITSELF if single else r.path: (r.nbytes, r.digest) for r in publishing.receipts
    }
    # Small files may be longer than planned by the card's last line, so their size is the staged one.
    puts |= {path: (staging.files.size(path) or 0, digest) for path, digest in plan.extra}
    return Publication(plan.digest, None, "", replaced, puts, receipts=publishing.receipts)


def _admitted(publication: Publication, publishing: _Publishing) -> Publication:
    """Return a publication that may replace what it lists; on an object store also one that was begun."""
    replaces = publication.replaces
    if not replaces.inventory:
        return publication
    # A late import: most conversions replace nothing.
    from ckptcore.custody.replacing import admit, require_row

    # Once a publication has begun, nothing may rest on what was judged before: each content is proven anew.
    judged = None if publication.step else replaces.judged  # what it counts on may have gone since it began
    staging, writer = publishing.staging, publishing.writer
    staging.require_row = partial(require_row, writer)
    home = admit(staging.destination, writer, publishing.settings, judged, at_rest)
    return replace(publication, replaces=replace(replaces, home=home))


def _require_written(
    staging: Staging, files: Sequence[PlannedFile], receipts: Sequence[Receipt], stored: Iterator[bool]
) -> None:
    """Compare every file with tensors with its receipt, and with the plan.

    A staged file whose stamp shows that it is unchanged is not read again. Of an upload, the store has listed
    the parts. stored: whether it has those of each upload, in the order of the receipts.
    """
    for planned, receipt in zip(files, receipts, strict=True):
        if receipt.uploaded is not None:
            # Uploads are in the order of the receipts, so one iterator over the store's answers is enough.
            is_stored = next(stored, None)  # None: this destination has no uploads
            if (receipt.path, receipt.nbytes) != (planned.path, planned.nbytes) or is_stored is None:
                raise OutputMismatch(f"{planned.path} was not uploaded as planned")
            if not is_stored:
                raise OutputMismatch(
                    f"the upload of {planned.path} was ended by another process or a lifecycle rule",
                    hint="run the command again: the file is uploaded again",
                    file=planned.path,
                )
            continue
        size = staging.files.size(receipt.path)
        if (receipt.path, receipt.nbytes, size) != (planned.path, planned.nbytes, planned.nbytes):
            raise OutputMismatch(
                f"{planned.path} was planned with {planned.nbytes} bytes, the staged file has {size}",
                hint="run the command again with --no-resume",
            )
        if receipt.stamp is None and receipt.digest is None:
            continue  # written without digests, by a version that recorded no stamps
        # The stamp is a shortcut: where it differs, the bytes decide.
        if receipt.stamp != seen_as(staging.files, receipt) and not is_intact(staging.files, receipt):
            raise OutputMismatch(
                f"{planned.path} was changed since it was written (got {seen_as(staging.files, receipt)}, "
                f"wrote {receipt.stamp}, BLAKE3 {receipt.digest})",
                hint="run the command again: the file is rewritten",
                file=planned.path,
            )


def _require_small_files(staged: Readable, planned: Sequence[tuple[str, str]]) -> None:
    """Compare the staged small files with the plan's (path, BLAKE3)."""
    for path, digest in planned:
        size = staged.size(path)
        if size is None or digest_of(staged, path, size) != digest:
            raise OutputMismatch(
                f"{path} is not as planned (got {size} bytes, planned BLAKE3 {digest})",
                hint="run the command again: the file is rewritten",
                file=path,
            )


def _read_back(
    staging: Staging, plan: Plan, files: Readable, planned: list[tuple[str, str, tuple[int, ...]]]
) -> Manifest:
    """Read the output with its own reader, and return its manifest if it equals the plan, else raise."""
    # The stored form is what was written.
    source = Source(files, plan.target.single, files.list(), keep_quantized=True)
    form = by_name(plan.target.format)
    # A trainer's loader may want the checkpoint in a folder that a file beside it names.
    is_below = source.name is None and form.detect(source) is None and located(source)[0] is not source
    written = read_manifest(source) if is_below else read_as(form, source)
    report = check(written, None, "coverage")
    specs = sorted(_specs(written))
    unplanned = (
        # Arrays inside objects are read back as tensors, although the plan has them in literals.
        set[str]() if specs == planned else {name for name, *_ in specs} - {name for name, *_ in planned}
    )
    if unplanned:
        in_literals = _in_literals(staging, plan, written, unplanned)
        specs = [spec for spec in specs if spec[0] not in in_literals]
    if not report.ok or specs != planned:
        raise OutputMismatch(
            f"the output does not read back as planned ({len(specs)} of {len(planned)} tensors): "
            f"{report.findings[0].message if report.findings else 'names, dtypes or shapes differ'}"
        )
    return written if is_below else _as_found(written, source, form)


def _as_found(written: Manifest, source: Source, reader: Format) -> Manifest:
    """Return the manifest as a later reader of the destination gets it: one content, one digest."""
    # The origin of a manifest is part of its digest, and says how the format was recognised: marks decide
    # that at the destination, and here the reader was named.
    marks = reader.detect(source)
    if marks is None:  # a file may have no mark of its format: Fabric's one file reads as any torch.save
        return read_manifest(source)
    evidence = {"evidence": list(marks.because), "file": source.name}
    return replace(written, origin={**written.origin, **evidence})


def _in_literals(staging: Staging, plan: Plan, written: Manifest, unplanned: set[str]) -> set[str]:
    """Return the unplanned tensors whose bytes are in the plan itself: arrays inside objects."""
    in_literals = set(unplanned)
    items: dict[str, list[tuple[str, int, int]]] = {}  # path -> (tensor, first byte, end)
    for n, spec in enumerate(written.tensors):
        chunks = written.chunks_of(n) if spec.fqn in unplanned else ()
        for item in (written.items[c.item] for c in chunks if c.item >= 0):
            row = spec.fqn, item.start, item.start + item.length
            items.setdefault(written.files[item.file].path, []).append(row)
    index = {f.path: f.index for f in plan.files}
    # By file: all tensors of one are compared with the literals of its plan, which is loaded once.
    for path, rows in items.items():
        file_plan = load_file_plan(staging.plan, index[path]) if path in index else None
        spans = [
            (x.start, x.start + len(x.data)) for x in (file_plan.literals if file_plan is not None else ())
        ]
        # Completely inside one literal, else the bytes are somewhere else.
        in_literals -= {fqn for fqn, a, b in rows if not any(start <= a and b <= end for start, end in spans)}
    return in_literals


def with_fingerprint(
    staging: Staging, plan: Plan, fingerprint: str, *, published: bool, is_resumed: bool
) -> Plan:
    """Add the last line to the staged card, and return the plan with the digest of the result.

    If the card is neither the planned one nor the planned one with its line, the plan stays as it is; the
    comparison of the card with the plan fails later.

    Args:
        staging: The staging folder.
        plan: The plan of the conversion.
        fingerprint: The fingerprint of all tensors.
        published: The output is already at the destination, and nothing is written.
        is_resumed: A killed run began to copy the output to an object store; the card must be the recorded
            one.
    """
    planned = dict(plan.extra).get(CARD)
    if planned is None:
        return plan
    line = fingerprint_line(fingerprint)
    if published:
        with closing(open_store(staging.destination)) as store:
            data = _card(store)
    else:
        data = _card(staging.files)
    if data is None:
        return plan
    full = data + line
    if data.endswith(line) and _blake3(data.removesuffix(line)) == planned:
        full = data
    elif published or _blake3(data) != planned:
        return plan
    if is_resumed:
        # The record has size and digest of every file: a card that differs
        # from it was not the one whose copy began.
        record = noted(staging)
        if record is None or record.puts.get(CARD) != (len(full), _blake3(full)):
            return plan
    if full != data:
        staging.files.put(CARD, full)
    extra = tuple((path, _blake3(full) if path == CARD else digest) for path, digest in plan.extra)
    return replace(plan, extra=extra)


def _card(store: Readable) -> bytes | None:
    size = store.size(CARD)
    return None if size is None else store.read(CARD, 0, size)


def _blake3(data: bytes) -> str:
    return blake3(data).hexdigest()


def require_source(staging: Staging, plan: Plan, settings: Settings, progress: Progress | None) -> None:
    """Check right before publishing that the source is unchanged, by stamps and ctimes, or by its bytes.

    Raises `SourceChanged`. Files that were staged from other bytes are removed first: no run may use them.
    """
    stamps, before = load(staging.plan), load_ctimes(staging.plan)
    if stamps is None:  # without stamps nothing can be proven
        raise SourceChanged(
            f"the plan in {staging.plan.url} has no stamps of its source", hint="prepare the conversion again"
        )
    with closing(open_source_store(plan.source, stamps)) as source:
        require_same(stamps, source)
        now = take_ctimes(stamps, source)
        if untouched(before, now):
            return
        run = staging.run(plan, source, stamps)
        recompute = partial(recompute_files, run, [f.index for f in plan.files], settings, progress)
        # Stamps and ctimes are taken on both sides of the reading; only if they are
        # the same was one state of the files read.
        for _ in range(_TRIES):
            _log.info("%s: %s; reading the source again", plan.source, _why(before, now))
            before = settled_ctimes(stamps, source)
            _compare_files(staging, plan, recompute)
            require_same(stamps, source)
            now = take_ctimes(stamps, source)
            if untouched(before, now):
                # The next run compares with these times, and does not read the source once more.
                save(staging.plan, stamps, now)  # the proof is valid for these times
                return
    raise SourceChanged(
        f"cannot prove that {plan.source} is unchanged: the ctimes of its files keep changing "
        f"(last that of {_differing(before, now)})",
        hint=_HINT,
    )


def _compare_files(staging: Staging, plan: Plan, recompute: Callable[[], None]) -> None:
    """Read the manifest again, the source of the plans' literals, and compute every file a second time."""
    request = staged_request(staging)
    opened = open_source(
        request.source,
        recover=request.recover,
        keep_quantized=request.keep_quantized,
        weights=request.weights,
    )
    with closing(opened.store):
        digest = read_manifest(opened).digest
    if digest != plan.manifest_digest:
        # What was staged is of bytes that no longer exist: resuming with it would publish a mixture.
        staging.clear()
        raise SourceChanged(f"{request.source} was rewritten while it was converted", hint=_HINT)
    try:
        recompute()
    except OutputMismatch as error:
        staging.clear()
        raise SourceChanged(
            f"{request.source} was rewritten while it was converted: {error.message}", hint=_HINT
        ) from error


def _why(before: Mapping[str, int | None] | None, now: Mapping[str, int | None]) -> str:
    if before is None:
        return "the plan has no ctimes"
    return f"the ctime of {_differing(before, now)} changed, its size and modification time did not"


def _differing(before: Mapping[str, int | None] | None, now: Mapping[str, int | None]) -> str:
    return next((path for path in now if (before or {}).get(path) != now[path]), "no file")
