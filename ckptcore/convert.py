"""Converting: the stages of a job, for the command line, for flows, and for Python alike.

    prepare   read, check, plan; claim the destination            -> Prepared
    execute   write some or all files of the plan                 -> Receipts
    finish    verify what was written, and publish it             -> Result
    register  tell the catalog; `settle` removes the staging folder

`convert` is all of them. Everything between the stages lies beside the destination, so each can
run in another process, and a killed run goes on where it stopped.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckptcore.check import LEVELS, Report, check
from ckptcore.compose import Composed, compose
from ckptcore.errors import (
    CkptError,
    DiskFull,
    Finding,
    Interrupted,
    MalformedCheckpoint,
    SourceChanged,
)
from ckptcore.execute import execute_files, tile_bytes
from ckptcore.formats import Source, by_name, open_source, read_manifest
from ckptcore.frame import canonical_json
from ckptcore.manifest import Manifest, TensorSpec
from ckptcore.plan import FilePlan, Plan, PlannedFile, load_file_plan, load_head, save_plan
from ckptcore.receipts import Receipt, read_receipt
from ckptcore.register import Registration, fail, start, succeed
from ckptcore.request import Request, Settings
from ckptcore.staging import PUBLISHING, Staging, publish, refuse_existing
from ckptcore.store import Store, local_path, open_store

Progress = Callable[[str, int, int], None]
REQUEST = "request.json"
_BASE_MEMORY = {
    False: 160 << 20,
    True: 420 << 20,
}  # resident before any buffer: without, with torch


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan that is ready to run.

    plan_uri: where it lies. files: what will be written. bytes_in, bytes_out: in total.
    peak_memory: expected, bytes. renamed: (old, new). cast: (name, from, to). dropped: (name,
    rule). ties: (dropped, kept). warnings: findings that do not stop it. model: for an export, how
    the model part was found. timings: stage -> seconds.
    """

    plan_uri: str
    files: tuple[PlannedFile, ...]
    bytes_in: int
    bytes_out: int
    peak_memory: int
    renamed: tuple[tuple[str, str], ...]
    cast: tuple[tuple[str, str, str], ...]
    dropped: tuple[tuple[str, str], ...]
    ties: tuple[tuple[str, str], ...]
    warnings: tuple[Finding, ...]
    model: str
    manifest_digest: str
    plan_digest: str
    timings: dict[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """A published output.

    destination: where. nbytes: of all files. files: their receipts. tensors: what they hold.
    manifest_digest: of the output. conversion: id in the catalog, or None. timings: stage ->
    seconds. bytes_in: source bytes read. warnings: findings that did not stop it.
    """

    destination: str
    format: str
    nbytes: int
    files: tuple[Receipt, ...]
    tensors: tuple[TensorSpec, ...]
    manifest_digest: str
    plan_digest: str
    bytes_in: int
    timings: dict[str, float]
    plan_uri: str = ""
    conversion: str | None = None
    warnings: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON face."""
        form = asdict(self)
        form["files"] = [r.as_dict() for r in self.files]
        form["tensors"] = len(self.tensors)
        form["warnings"] = [w.as_dict() for w in self.warnings]
        return form


def inspect(source: str, recover: bool = False) -> Manifest:
    """The manifest of what is at a path or URL; no tensor byte is read.

    recover: take a DCP save that was aborted just before its last step as it is.
    Raises `SourceUnreadable`, `UnknownFormat`, `UnsupportedFormat`, `NotComplete`, ....
    """
    return read_manifest(open_source(source, recover=recover))


def validate(manifest: Manifest, level: str = "cover", *, workers: int = 2,
             progress: Progress | None = None) -> Report:  # fmt: skip
    """Checks a manifest; levels ``bytes`` and ``values`` read its files."""
    deep = level in LEVELS and LEVELS.index(level) >= LEVELS.index("bytes")
    store = open_store(manifest.root) if deep else None
    return check(manifest, store, level, workers=workers, progress=progress)


def prepare(request: Request, settings: Settings | None = None, manifest: Manifest | None = None) -> Prepared:
    """Checks the source, plans, and saves the plan beside the destination.

    The same request over the same source gives the same plan, and keeps what an earlier run has
    written. Raises `DestinationExists`, `DamagedCheckpoint`, `Busy`, `DiskFull`, ....
    """
    settings = settings or Settings()
    staging = Staging(request.destination)
    with staging.lock():
        return _prepare(request, settings, manifest, staging)


def execute(plan_uri: str, indices: Sequence[int] | None = None, settings: Settings | None = None,
            progress: Progress | None = None) -> tuple[Receipt, ...]:  # fmt: skip
    """Writes files of a saved plan; those that are finished and hash to their receipt are kept.

    indices: which files; None for all. Raises `DamagedCheckpoint` when bytes fail their checksum.
    """
    staging = Staging.of_plan(plan_uri)
    with staging.lock(shared=True):
        return _execute(staging, indices, settings or Settings(), progress)


def finish(plan_uri: str, settings: Settings | None = None, progress: Progress | None = None) -> Result:
    """Verifies that every file is there and the output reads back as planned, and publishes it.

    The staging folder stays, for `register`; `settle` removes it.
    """
    staging = Staging.of_plan(plan_uri)
    with staging.lock():
        return _finish(staging, progress)


def settle(plan_uri: str) -> None:
    """Removes the staging folder of a published plan."""
    Staging.of_plan(plan_uri).remove()


def convert(request: Request, settings: Settings | None = None, progress: Progress | None = None,
            catalog_url: str | bool | None = None, flow_run_id: str | None = None) -> Result:  # fmt: skip
    """All stages: the whole job in this process.

    catalog_url: where to register; None for the default, False for nowhere.
    Raises what the stages raise; a failure is registered as such.
    """
    settings = settings or Settings()
    registration = start(request, catalog_url, flow_run_id)
    manifest: Manifest | None = None
    try:
        began = time.perf_counter()
        manifest = inspect(request.source, request.recover)
        inspected = time.perf_counter() - began
        staging = Staging(request.destination)
        with staging.lock():
            prepared = _prepare(request, settings, manifest, staging)
            began = time.perf_counter()
            _execute(staging, None, settings, progress)
            wrote = time.perf_counter() - began
            result = _finish(staging, progress)
            timings = {"inspect": inspected, **prepared.timings, "write": wrote}
            timings |= {k: v for k, v in result.timings.items() if k not in timings}
            result = replace(result, timings=timings, warnings=prepared.warnings)
            result = register(registration, result, manifest, settings)
            staging.remove()
    except BaseException as error:
        known = Interrupted("stopped by the user") if isinstance(error, KeyboardInterrupt) else error
        fail(registration, known, manifest)
        if known is not error:
            raise known from error
        raise
    return result


def register(
    registration: Registration | None, result: Result, manifest: Manifest, settings: Settings
) -> Result:
    """Records a published result in the catalog; gives it with the conversion's id."""
    if registration is None:
        return result
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    derived = inspect(result.destination)
    succeed(registration, manifest, derived, result, peak, verified=settings.verify)
    return replace(result, conversion=registration.id)


def _prepare(request: Request, settings: Settings, manifest: Manifest | None, staging: Staging) -> Prepared:
    tile_bytes(settings)
    published = _published(staging)
    if published is None:
        try:
            refuse_existing(request.destination, request.source, overwrite=request.overwrite)
        except CkptError:
            _remove_if_unused(staging)
            raise
    manifest = manifest or inspect(request.source, request.recover)
    try:
        composed = compose(request, manifest)
        plan = composed.plan
        if published is not None and published != plan.digest:
            refuse_existing(request.destination, request.source, overwrite=request.overwrite)
        if not request.resume or _saved_digest(staging) != plan.digest:
            staging.clear()
            _save(staging, request, composed)
        staging.sweep_parts()
        _require_room(staging, plan)
    except CkptError:
        _remove_if_unused(staging)
        raise
    return Prepared(
        staging.plan_uri, plan.files, plan.bytes_in, plan.bytes_out, peak_memory(plan, settings),
        plan.renamed, plan.cast, plan.dropped, plan.ties, composed.warnings,
        composed.model.because if composed.model else "", plan.manifest_digest, plan.digest, composed.timings,
    )  # fmt: skip


def peak_memory(plan: Plan, settings: Settings) -> int:
    """Expected peak, bytes: the process and its buffers, whatever the checkpoint's size."""
    largest = max((f.nbytes for f in plan.files), default=0)
    buffers = min(
        settings.memory,
        4 * settings.threads * tile_bytes(settings),
        4 * settings.threads * max(largest, 1),
    )
    return _BASE_MEMORY[bool(plan.cast)] + buffers


def _save(staging: Staging, request: Request, composed: Composed) -> None:
    for path, data in composed.extra.items():
        staging.files.put(path, data)
    staging.root.put(REQUEST, canonical_json(request.as_dict()))
    save_plan(staging.plan, composed.plan, composed.files)


def _execute(staging: Staging, indices: Sequence[int] | None, settings: Settings,
             progress: Progress | None) -> tuple[Receipt, ...]:  # fmt: skip
    plan = load_head(staging.plan)
    wanted = [f.index for f in plan.files] if indices is None else list(indices)
    if _published(staging) == plan.digest:
        return tuple(_receipt(staging, plan, i) for i in wanted)
    scratch = str(staging.root.local) if staging.root.local is not None else None
    return execute_files(
        lambda i: _file_plan(staging.plan, i), wanted, plan_digest=plan.digest, source=open_store(plan.source),
        files=staging.files, receipts=staging.receipts, settings=settings, scratch=scratch,
        progress=progress, total=plan.bytes_out,
    )  # fmt: skip


def _finish(staging: Staging, progress: Progress | None) -> Result:
    began = time.perf_counter()
    plan = load_head(staging.plan)
    request = Request.from_dict(json.loads(_read(staging.root, REQUEST)))
    receipts = tuple(_receipt(staging, plan, f.index) for f in plan.files)
    single = plan.target.single
    if progress is not None:
        progress("verify", 0, plan.bytes_out)
    if _published(staging) == plan.digest and _is_moved(staging, single):
        written = inspect(staging.destination)
    else:
        staging.sweep_parts()
        written = _read_back(staging, plan, receipts)
        verified = time.perf_counter()
        staging.root.put(PUBLISHING, canonical_json({"plan": plan.digest}))
        commit = [p for p in ("config.json",) if any(p == e for e, _ in plan.extra)]
        commit += [load_file_plan(staging.plan, f.index).path for f in plan.files if _commits(staging, f)]
        publish(staging, commit, single=single is not None, overwrite=request.overwrite)
        began, verified = began, verified
        timings = {"write": sum(r.seconds for r in receipts), "verify": verified - began,
                   "publish": time.perf_counter() - verified}  # fmt: skip
        return _result(staging, plan, receipts, written, timings)
    return _result(staging, plan, receipts, written, {"verify": time.perf_counter() - began})


def _result(staging: Staging, plan: Plan, receipts: tuple[Receipt, ...], written: Manifest,
            timings: dict[str, float]) -> Result:  # fmt: skip
    return Result(
        staging.destination, plan.target.format, plan.bytes_out, receipts, written.tensors, written.digest,
        plan.digest, plan.bytes_in, timings, staging.plan_uri,
    )  # fmt: skip


def _read_back(staging: Staging, plan: Plan, receipts: Sequence[Receipt]) -> Manifest:
    """The staged output's own manifest, when it is complete and holds what was planned."""
    for planned, receipt in zip(plan.files, receipts, strict=True):
        size = staging.files.size(receipt.path)
        if (receipt.path, receipt.nbytes) != (
            planned.path,
            planned.nbytes,
        ) or size != planned.nbytes:
            raise MalformedCheckpoint(
                f"{planned.path} was planned with {planned.nbytes} bytes, the staged file has {size}",
                hint="run the command again with --no-resume",
            )
    name = plan.target.single
    source = Source(staging.files, name, staging.files.list())
    reader = by_name(plan.target.format)
    assert reader.read is not None  # every format that writes reads
    written = reader.read(source)
    report = check(written, None, "cover")
    planned_tensors = sorted(
        (t.name, t.dtype, t.shape) for f in plan.files for t in load_file_plan(staging.plan, f.index).tensors
    )
    found = sorted((t.fqn, t.dtype, t.shape) for t in written.tensors)
    if not report.ok or found != planned_tensors:
        raise MalformedCheckpoint(
            f"the output does not read back as planned ({len(found)} of {len(planned_tensors)} tensors): "
            f"{report.findings[0].message if report.findings else 'names, dtypes or shapes differ'}",
            hint="nothing was published; this is a defect, please report it",
        )
    return written


def _commits(staging: Staging, planned: PlannedFile) -> bool:
    return load_file_plan(staging.plan, planned.index).commit


def _receipt(staging: Staging, plan: Plan, index: int) -> Receipt:
    found = read_receipt(staging.receipts, plan.digest, index)
    if found is None:
        raise SourceChanged(
            f"{plan.files[index].path} has not been written yet",
            hint="run execute for every file first",
        )
    return found


def _file_plan(store: Store, index: int) -> FilePlan:
    return load_file_plan(store, index)


def _read(store: Store, name: str) -> bytes:
    size = store.size(name)
    if size is None:
        raise SourceChanged(f"{store.url} lacks {name}", hint="prepare the conversion again")
    return store.read(name, 0, size)


def _saved_digest(staging: Staging) -> str | None:
    if staging.plan.size("head.json") is None:
        return None
    try:
        return load_head(staging.plan).digest
    except MalformedCheckpoint:  # cut off by a crash: planned again
        return None


def _published(staging: Staging) -> str | None:
    """The plan that an earlier run was publishing, or had published, when it stopped."""
    if staging.root.size(PUBLISHING) is None:
        return None
    if not _is_moved(staging, None):
        return None
    try:
        return str(json.loads(_read(staging.root, PUBLISHING))["plan"])
    except (ValueError, KeyError):
        return None


def _is_moved(staging: Staging, single: str | None) -> bool:
    """Whether the staged files have left for the destination."""
    if staging.files.local is None:
        return False  # copies are repeated: equal bytes over equal bytes
    there = Path(staging.files.local)
    target = local_path(staging.destination)
    assert target is not None
    return target.exists() and not (there.is_dir() and any(there.iterdir()))


def _require_room(staging: Staging, plan: Plan) -> None:
    free = staging.root.free_bytes()
    have = 0
    for f in plan.files:
        if read_receipt(staging.receipts, plan.digest, f.index) is not None:
            have += f.nbytes
    if free is not None and plan.bytes_out - have > free:
        raise DiskFull(
            f"{plan.bytes_out - have} bytes are to be written beside {staging.destination}, {free} are free",
            needed=plan.bytes_out - have, free=free,
        )  # fmt: skip


def _remove_if_unused(staging: Staging) -> None:
    """Takes away a staging folder that holds no work."""
    root = staging.root.local
    if root is not None and root.is_dir() and {p.name for p in root.iterdir()} <= {"lock"}:
        staging.remove()
