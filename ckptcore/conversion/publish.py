"""Verify that the written output equals the plan, and publish it.

Every file must have its receipt and size. The output must read back, through its own reader, as the planned
names, dtypes and shapes, complete. Only then is it published. The inode of the output is recorded first (a
rename keeps it), so that the next run knows whether a killed run published it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptcore.checking.check import check
from ckptcore.checking.export_proof import ExportProof
from ckptcore.conversion.card_fingerprint import with_fingerprint
from ckptcore.conversion.file_fingerprints import fingerprints
from ckptcore.conversion.local_publication import conclude, is_in_place, publish_local
from ckptcore.conversion.publication_record import DONE, Publication, Replaced, noted, noted_replaced
from ckptcore.conversion.remote_publication import ITSELF, Completing, is_published, publish_remote
from ckptcore.conversion.staged_plan import planned_paths, staged_request
from ckptcore.conversion.staged_proof import require_source
from ckptcore.conversion.staging import Staging
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.custody.judged import NOBODY, Replacer
from ckptcore.errors import DestinationExists, Finding, OutputMismatch, UsageError, finding
from ckptcore.execution.receipts import Receipt, digest_of, every_receipt, is_intact, seen_as
from ckptcore.execution.source_stamps import digest as stamps_digest
from ckptcore.execution.source_stamps import load as load_stamps
from ckptcore.execution.source_stamps import load_ctimes
from ckptcore.fingerprints.sums import Fingerprinted, checkpoint_fingerprint
from ckptcore.formats import Format, Source, by_name, open_source, read_as, read_manifest
from ckptcore.naming.rename import MadeTensor
from ckptcore.planning.hub_files import ADAPTER, CONFIG
from ckptcore.planning.plan import Plan, load_file_plan, load_head
from ckptcore.planning.request import Settings
from ckptcore.store import Readable, is_s3, reads_s3
from ckptcore.store.listing import Inventory, list_destination
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.workers import Progress

if TYPE_CHECKING:
    from ckptcore.store.objects.uploads import Uploads

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
        renamed: (old name, new name).
        map_digest: Of everything that was done to names.
        made: Tensors that a map computed from others.
        dropped: (name, rule) of tensors that were left out.
        source_stamp: Digest of the source's stamps (`ckptcore.execution.source_stamps.digest`).
        source_ctime: Digest of the source's ctimes.
        source_digests: Path -> digest of the source's files that were read completely.
        published: (path, bytes, BLAKE3 or None) of every published file, including the small ones.
        proof: The proof of an export after it was published, if requested.
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
    renamed: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    map_digest: str = ""
    made: tuple[MadeTensor, ...] = field(default=(), repr=False)
    dropped: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    source_stamp: str | None = field(default=None, repr=False)
    source_ctime: str | None = field(default=None, repr=False)
    source_digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    published: tuple[tuple[str, int, str | None], ...] = field(default=(), repr=False)
    proof: ExportProof | None = None

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
        if self.proof is not None:
            form["proof"] = self.proof.as_dict()
        return form

    @property
    def loadable(self) -> str | None:
        """``no`` if transformers will not open an export; None if that is unknown."""
        return "no" if any(w.code == "not-loadable" for w in self.warnings) else None


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
    conclude(staging)
    plan = load_head(staging.plan)
    receipts = every_receipt(staging.receipts, plan.digest, plan.files)
    found = fingerprints((load_file_plan(staging.plan, f.index) for f in plan.files), receipts)
    _require_proven(receipts)
    if progress is not None:
        progress("verify", plan.bytes_out, plan.bytes_out)
    record = noted(staging)
    there = published_plan(staging, record) == plan.digest
    begun = publishing_plan(staging, record) == plan.digest
    if found is not None:
        plan = with_fingerprint(staging, plan, checkpoint_fingerprint(found), published=there, begun=begun)
    unproven: tuple[Finding, ...] = ()
    if there:
        written, published = _published_output(staging, plan, receipts, record)
        verified = time.perf_counter()
    else:
        staging.sweep_parts(joints=True)
        single = plan.target.single is not None
        uploads = _uploads(staging, plan, receipts)
        proven = not begun and uploads is not None and is_s3(plan.source)
        looked: list[Inventory] = []
        staged = _require_written(
            staging,
            plan,
            receipts,
            uploads,
            # What the stores say does not depend on each other.
            [
                partial(require_source, staging, plan, settings, progress),
                lambda: looked.append(list_destination(staging.destination)),
            ]
            if proven
            else [],
        )
        specs, commit = _planned(staging, plan)
        if uploads is None:
            written = _read_back(staging, plan, staging.files, specs)
            published = _published_files(staging.files, plan.extra, receipts, written)
        verified = time.perf_counter()
        if not begun and not proven:  # else it was verified, and may no longer exist
            require_source(staging, plan, settings, progress)
        publication = _admitted(staging, _publication(staging, plan, receipts, record), writer, settings)
        _log.info("verified %s, publishing", staging.destination)
        if staging.root.local is not None:
            with staging.moving(single=single):
                publish_local(staging, publication, single=single)
        elif uploads is None:
            publish_remote(staging, publication, (ITSELF,) if single else commit)
        else:
            handles = {ITSELF if single else r.path: r.uploaded for r in receipts if r.uploaded is not None}
            completing = Completing(uploads, handles, staged)
            publish_remote(
                staging,
                publication,
                (ITSELF,) if single else commit,
                completing,
                lambda files: _read_back(staging, plan, files, specs),
                looked[0] if looked else None,
            )
            assert completing.written is not None  # it was read before the last files were written
            written = completing.written
            unproven = completing.unproven
            published = _published_files(staging.files, plan.extra, receipts, written)
    timings = {
        "write": sum(r.seconds for r in receipts),
        "verify": verified - began,
        "publish": time.perf_counter() - verified,
    }
    return Result(
        staging.destination,
        plan.target.format,
        plan.bytes_out,
        receipts,
        written.tensors,
        written.digest,
        plan.digest,
        plan.bytes_in,
        timings,
        written,
        staging.plan_uri,
        warnings=(*_unproven(plan.source, receipts), *unproven),
        fingerprint=checkpoint_fingerprint(found) if found is not None else None,
        fingerprints=found or (),
        renamed=plan.renamed,
        map_digest=plan.map_digest,
        made=plan.made,
        dropped=plan.dropped,
        source_stamp=stamps_digest(load_stamps(staging.plan)),
        source_ctime=stamps_digest(load_ctimes(staging.plan)),
        published=published,
    )


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


def published_plan(staging: Staging, begun: Publication | None) -> str | None:
    """Return the digest of the plan whose output is at the destination, or None.

    There is one if an earlier run published it and stopped before it removed its staging folder.

    Args:
        staging: The staging folder.
        begun: The publication that is recorded there.
    """
    if begun is None:
        return None
    if staging.root.local is None:
        return begun.plan if begun.step == DONE else None
    return begun.plan if is_in_place(staging, begun) else None


def publishing_plan(staging: Staging, begun: Publication | None) -> str | None:
    """Return the digest of the plan that an earlier run began to publish on a remote destination, or None."""
    if staging.root.local is not None or begun is None or begun.step == DONE:
        return None
    return begun.plan


def _published_files(
    store: Readable, extra: Sequence[tuple[str, str]], receipts: Sequence[Receipt], written: Manifest
) -> tuple[tuple[str, int, str | None], ...]:
    """Return (path, bytes, digest) of every file of the output.

    Files without tensors are digested even if receipts have no digests: they are small.

    Args:
        store: Where the output is.
        extra: (path, BLAKE3) of the small files (config, tokenizer, card), as planned.
        receipts: Of the files of the plan.
        written: The output's manifest.

    Raises:
        OutputMismatch: A small file differs from the plan.
    """
    with_tensors = {f.path for f in written.files}
    found = []
    for r in receipts:
        known = r.digest is not None or r.path in with_tensors
        found.append((r.path, r.nbytes, r.digest if known else digest_of(store, r.path, r.nbytes)))
    for path, planned in extra:
        size = store.size(path)
        if size is None or digest_of(store, path, size) != planned:
            raise OutputMismatch(
                f"{store.url}/{path} is not what was planned (got {size} bytes)",
                hint="run the command again with --no-resume",
            )
        found.append((path, size, planned))
    return tuple(found)


def _published_output(
    staging: Staging, plan: Plan, receipts: Sequence[Receipt], begun: Publication | None
) -> tuple[Manifest, tuple[tuple[str, int, str | None], ...]]:
    """Return the manifest and the files at the destination, if they are still the published ones."""
    source = open_source(staging.destination, keep_quantized=True)  # the stored form is what was written
    with closing(source.store):
        written = read_manifest(source)
        if begun is not None and begun.step == DONE:
            proven = is_published(staging, begun)
        else:
            proven = all(
                source.store.size(r.path) == r.nbytes and (r.digest is None or is_intact(source.store, r))
                for r in receipts
            )
        try:
            published = _published_files(source.store, plan.extra, receipts, written) if proven else ()
        except OutputMismatch:
            proven = False
    if not proven or sorted(_specs(written)) != _planned(staging, plan)[0]:
        raise DestinationExists(f"{staging.destination} exists, and changed since it was published")
    return written, published


def _specs(manifest: Manifest) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(t.fqn, t.dtype, t.shape) for t in manifest.tensors]


def _planned(staging: Staging, plan: Plan) -> tuple[list[tuple[str, str, tuple[int, ...]]], list[str]]:
    """Return ((name, dtype, shape) of each planned tensor, commit files).

    The files' plans are loaded one at a time: in a large job they take gigabytes together.
    """
    specs: set[tuple[str, str, tuple[int, ...]]] = set()
    commit = []
    for file in plan.files:
        one = load_file_plan(staging.plan, file.index)
        specs.update(one.columns.specs())
        if one.commit:
            commit.append(one.path)
    # These make a folder loadable, too: they are written last, with the index.
    return sorted(specs), [*(path for path, _ in plan.extra if path in (CONFIG, ADAPTER)), *commit]


def _publication(
    staging: Staging, plan: Plan, receipts: tuple[Receipt, ...], begun: Publication | None
) -> Publication:
    """Return the publication to carry out: on an object store, the one that a killed run recorded."""
    if staging.root.local is None and begun is not None and begun.plan == plan.digest:
        return begun
    replaces = noted_replaced(staging)
    if replaces is None:  # a crash truncated it
        replaces, request = Replaced(), staged_request(staging)
        if request.replaces:
            # A late import: most conversions replace nothing.
            from ckptcore.conversion.foreign_files import require_accounted

            replaces = require_accounted(request, {}, begun=begun)
    single = plan.target.single is not None
    puts: dict[str, tuple[int, str | None]] = {
        ITSELF if single else r.path: (r.nbytes, r.digest) for r in receipts
    }
    puts |= {path: (staging.files.size(path) or 0, digest) for path, digest in plan.extra}
    return Publication(plan.digest, None, "", replaces or Replaced(), puts, receipts=receipts)


def _admitted(
    staging: Staging, publication: Publication, writer: Replacer, settings: Settings
) -> Publication:
    """Return a publication that may replace what it lists; on an object store also one that was begun."""
    replaces = publication.replaces
    if not replaces.inventory:
        return publication
    # A late import: most conversions replace nothing.
    from ckptcore.custody.replacing import admit

    judged = None if publication.step else replaces.judged  # what it counts on may have gone since it began
    home = admit(staging.destination, writer, settings, judged)
    return replace(publication, replaces=replace(replaces, home=home))


def _uploads(staging: Staging, plan: Plan, receipts: Sequence[Receipt]) -> Uploads | None:
    """Return the uploads of the output; None if it is staged as a whole."""
    if staging.places is None or all(r.uploaded is None for r in receipts):
        return None
    return staging.places.uploads(plan)


def _require_written(
    staging: Staging,
    plan: Plan,
    receipts: Sequence[Receipt],
    uploads: Uploads | None,
    beside: Sequence[Callable[[], object]] = (),
) -> dict[str, int]:
    """Compare every staged file with its receipt, or with the plan.

    A file whose stamp shows that it is unchanged is not read again. Of an upload, the store lists its parts.
    beside: other checks, made meanwhile.

    Returns:
        What `Staging.require_planned` does.
    """
    look = partial(staging.require_planned, planned_paths(plan))
    kept: Iterator[bool] = iter(())
    if uploads is None:
        staged = look()
    else:
        staged, found = {}, list[bool]()
        sent = [r.uploaded for r in receipts if r.uploaded is not None]

        def listed() -> None:
            staged.update(look())

        def parts() -> None:
            found.extend(uploads.client.each(uploads.holds, sent))

        uploads.client.each(lambda check: check(), [listed, parts, *beside])
        kept = iter(found)
    for planned, receipt in zip(plan.files, receipts, strict=True):
        if receipt.uploaded is not None:
            if (receipt.path, receipt.nbytes) != (planned.path, planned.nbytes) or uploads is None:
                raise OutputMismatch(f"{planned.path} was not uploaded as planned")
            if not next(kept):
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
        if receipt.stamp != seen_as(staging.files, receipt) and not is_intact(staging.files, receipt):
            raise OutputMismatch(
                f"{planned.path} was changed since it was written (got {seen_as(staging.files, receipt)}, "
                f"wrote {receipt.stamp}, BLAKE3 {receipt.digest})",
                hint="run the command again: the file is rewritten",
                file=planned.path,
            )
    for path, digest in plan.extra:
        size = staging.files.size(path)
        if size is None or digest_of(staging.files, path, size) != digest:
            raise OutputMismatch(
                f"{path} is not as planned (got {size} bytes, planned BLAKE3 {digest})",
                hint="run the command again: the file is rewritten",
                file=path,
            )
    return staged


def _read_back(
    staging: Staging, plan: Plan, files: Readable, wanted: list[tuple[str, str, tuple[int, ...]]]
) -> Manifest:
    """Read the output with its own reader, and return its manifest if it equals the plan.

    Args:
        staging: The staging folder.
        plan: The plan.
        files: Where the output is.
        wanted: (name, dtype, shape) of each planned tensor.

    Raises:
        OutputMismatch: It differs from the plan.
    """
    # The stored form is what was written.
    source = Source(files, plan.target.single, files.list(), keep_quantized=True)
    form = by_name(plan.target.format)
    written = read_as(form, source)
    report = check(written, None, "coverage")
    found = sorted(_specs(written))
    unplanned = (
        set[str]() if found == wanted else {name for name, *_ in found} - {name for name, *_ in wanted}
    )
    if unplanned:
        known = _in_literals(staging, plan, written, unplanned)
        found = [spec for spec in found if spec[0] not in known]
    if not report.ok or found != wanted:
        raise OutputMismatch(
            f"the output does not read back as planned ({len(found)} of {len(wanted)} tensors): "
            f"{report.findings[0].message if report.findings else 'names, dtypes or shapes differ'}"
        )
    return _as_found(written, source, form)


def _as_found(written: Manifest, source: Source, reader: Format) -> Manifest:
    """Return the manifest as a later reader of the destination gets it: one content, one digest."""
    seen = reader.detect(source)
    if seen is None:  # a file may have no mark of its format: Fabric's one file reads as any torch.save
        return read_manifest(source)
    evidence = {"evidence": list(seen.because), "file": source.name}
    return replace(written, origin={**written.origin, **evidence})


def _in_literals(staging: Staging, plan: Plan, written: Manifest, unplanned: set[str]) -> set[str]:
    """Return the unplanned tensors whose bytes are in the plan itself: arrays inside objects."""
    found = set(unplanned)
    items: dict[str, list[tuple[str, int, int]]] = {}  # path -> (tensor, first byte, end)
    for n, spec in enumerate(written.tensors):
        chunks = written.chunks_of(n) if spec.fqn in found else ()
        for item in (written.items[c.item] for c in chunks if c.item >= 0):
            row = spec.fqn, item.start, item.start + item.length
            items.setdefault(written.files[item.file].path, []).append(row)
    index = {f.path: f.index for f in plan.files}
    for path, rows in items.items():
        one = load_file_plan(staging.plan, index[path]) if path in index else None
        spans = [(x.start, x.start + len(x.data)) for x in (one.literals if one is not None else ())]
        found -= {fqn for fqn, a, b in rows if not any(start <= a and b <= end for start, end in spans)}
    return found
