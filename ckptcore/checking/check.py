"""Check a manifest at one of four levels, each of which includes the levels below it.

``files``: present, sizes, stray files. ``coverage``: every element in exactly one place, from metadata alone.
``bytes``: stored checksums, layouts, equal replicas; reads everything once. ``values``: NaN and Inf.
Rules are rows of a table. Checks return all findings; they do not stop at the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptcore.checking.unused import ending, unused_rule
from ckptcore.checking.verdicts import PART_CODES, error_class, verdict
from ckptcore.core.coverage import coverage
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Envelope, Manifest
from ckptcore.errors import LEVELS, Finding, UnreadablePart, UsageError, finding
from ckptcore.store import Store
from ckptcore.utils.globs import leave_out
from ckptcore.utils.row_wise import prod_rows
from ckptcore.utils.text import count
from ckptcore.utils.workers import Progress

_NAMED = 5  # files listed in the message of a finding; the report has all of them


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check.

    Attributes:
        level: The level of the check, one of `LEVELS`.
        format: The name of the checkpoint's format.
        tensors: Number of tensors.
        nbytes: Bytes of tensor data.
        findings: In the order of levels.
        unverified: Number of items without a stored checksum.
        unproven: Files whose bytes no checksum covers. Empty below level ``bytes``.
    """

    level: str
    format: str
    tensors: int
    nbytes: int
    findings: tuple[Finding, ...]
    unverified: int = 0
    unproven: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(f.severity == "error" for f in self.findings)

    @property
    def status(self) -> str:
        """The verdict on the findings (`ckptcore.checking.verdicts.verdict`).

        Without errors, it is ``unproven`` if no checksum covers some of the bytes, else ``ok``.
        """
        if not self.ok:
            return verdict(self.findings)
        return "unproven" if self.unproven else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `ckptcore validate --output json`."""
        return {
            "ok": self.ok,
            "status": self.status,
            "level": self.level,
            "format": self.format,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "findings": [f.as_dict() for f in self.findings],
            "unproven": list(self.unproven),
        }


def check(
    manifest: Manifest,
    store: Store | None = None,
    level: str = "coverage",
    *,
    workers: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Check a manifest up to a level.

    Peak memory: a few MiB a worker.

    Args:
        manifest: The manifest to check.
        store: Where the files are read; needed for the levels ``bytes`` and ``values``.
        level: One of `LEVELS`.
        workers: Number of threads that read.
        progress: Called with the number of bytes read.

    Returns:
        A report with the findings of this level and of all levels below it.

    Raises:
        UsageError: For an unknown level, or if the level needs a store and none is given.
    """
    if level not in LEVELS:
        raise UsageError(
            f"level must be one of {', '.join(LEVELS)} (got {level!r})", hint="choose one of them"
        )
    # Findings of the reader are filtered by their level, too: a check of files does not report coverage.
    depth = LEVELS.index(level)
    findings = [f for f in manifest.findings if LEVELS.index(f.level) <= depth]
    for rule_level, rule in RULES:
        if LEVELS.index(rule_level) <= depth:
            findings += rule(manifest)
    unverified, unproven = 0, tuple[str, ...]()
    if depth >= LEVELS.index("bytes"):
        if store is None:
            raise UsageError(f"level {level!r} reads files and needs a store")
        # Only these levels read bytes: the others start without the code that does.
        from ckptcore.checking.scan import SHA256, mismatches, scan

        # Files that cannot be read to their end have a finding already;
        # a second one for each item says no more.
        broken = {f.file for f in findings if f.severity == "error" and f.code in _UNREADABLE}
        scan_findings, unverified, bare = scan(
            manifest, store, skip_files=broken, values=level == "values", workers=workers, progress=progress
        )
        findings += [*scan_findings, *mismatches(manifest, store)]
        summed = manifest.origin.get(SHA256) or {}
        unproven = tuple(sorted((bare | {f.path for f in manifest.beside}) - set(summed)))
        findings += unproven_finding(unproven)
    order = {name: i for i, name in enumerate(LEVELS)}
    # The same damage may be found by the reader and by a rule; the first of equal findings stays.
    unique = tuple(dict.fromkeys(sorted(findings, key=lambda f: order[f.level])))
    return Report(level, manifest.format, manifest.num_tensors, manifest.nbytes, unique, unverified, unproven)


def unproven_finding(paths: Sequence[str]) -> list[Finding]:
    """Return one finding for all files whose bytes no checksum covers; an empty list if there are none."""
    if not paths:
        return []
    rest = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    message = f"no checksum covers the bytes of {', '.join(paths[:_NAMED])}{rest}"
    return [finding("unproven", "bytes", message, file=paths[0] if len(paths) == 1 else None)]


def require_complete(
    manifest: Manifest, selected: Callable[[str], bool], *, later: Set[str] = frozenset()
) -> Report:
    """Check a manifest at level ``coverage``, and raise if a selected part has errors.

    Errors of other parts, and of files that no selected part is stored in, are ignored.

    Args:
        manifest: The manifest to check.
        selected: Whether the tensor or object of this name is selected.
        later: Codes of findings that the caller handles itself.

    Returns:
        The report on the whole manifest.

    Raises:
        DamagedCheckpoint: Or `NotComplete`, `UnprovenCheckpoint`, `UnreadablePart`: the class that
            `ckptcore.checking.verdicts.error_class` chooses.
    """
    report = check(manifest, None, "coverage")
    errors = [f for f in report.findings if f.severity == "error" and f.code not in later]
    if errors:
        # Files are only looked at if an error names no tensor: it needs the chunks of all.
        unused = _unused_files(manifest, selected) if any(f.fqn is None for f in errors) else frozenset()
        used = _used_by(manifest)
        errors = [f for f in errors if not _of_others(f, lambda name: any(map(selected, used(name))), unused)]
    if errors:
        rest = f" (and {count(len(errors) - 1, 'more finding')})" if len(errors) > 1 else ""
        cls = error_class(errors)
        hint = _leave_out(manifest, errors) if cls is UnreadablePart else errors[0].hint
        raise cls(f"{errors[0].message}{rest}", hint=hint, findings=tuple(errors))
    return report


def _used_by(manifest: Manifest) -> Callable[[str], Sequence[str]]:
    """Return a function from the name of a tensor or object to itself, and to what is computed from it."""
    owners: dict[str, list[str]] = {}
    inputs = manifest.inputs.tensors if manifest.inputs is not None else ()
    for tensor, node in manifest.derived.items():
        for number in node.inputs:
            owners.setdefault(inputs[number].fqn, []).append(manifest.tensors[tensor].fqn)
    return lambda name: (name, *owners.get(name, ()))


def _of_others(error: Finding, selected: Callable[[str], bool], unused: frozenset[str]) -> bool:
    """Return whether a finding is only about parts that are not selected."""
    if error.fqn is not None:
        # A code that is not about a part is about all of it, and cannot be left out.
        return error.code in PART_CODES and not selected(error.fqn)
    return error.code in _OF_FILES and error.file in unused


def _unused_files(manifest: Manifest, selected: Callable[[str], bool]) -> frozenset[str]:
    """Return the files with stored items of which none belongs to a selected part."""
    items, chunks = manifest.items, manifest.chunks
    # By columns, since a checkpoint of hundreds of ranks has millions of chunks.
    mask = np.array([selected(t.fqn) for t in manifest.tensors], np.bool_)
    needed = chunks.item[mask[chunks.tensor] & (chunks.item >= 0)]
    used = set(items.file[needed].tolist())
    used |= {manifest.items[b.item].file for b in manifest.blobs if b.item >= 0 and selected(b.key)}
    if manifest.inputs is not None:  # which inputs are needed is known only when tensors are computed
        used |= set(items.file[manifest.inputs.chunks.item].tolist())
    return frozenset(manifest.files[n].path for n in set(items.file.tolist()) - used)


def _leave_out(manifest: Manifest, errors: Sequence[Finding]) -> str:
    """Return the hint: globs that exclude exactly the unreadable parts."""
    names = list(dict.fromkeys(f.fqn for f in errors if f.fqn is not None))
    # A glob must not match what can be read, or the hint would leave out too much.
    tensors = {t.fqn for t in manifest.tensors} - set(names)
    readable_names = tensors | {b.key for b in manifest.blobs} - set(names)
    return leave_out(names, readable_names, left=bool(tensors)) if names else errors[0].hint


_UNREADABLE = {"missing-file", "truncated-file"}
_GATHER = (
    "name the folder of all ranks' own save; or save again from gathered weights: of FSDP a full state "
    "dict, of ZeRO-3 with stage3_gather_16bit_weights_on_model_save"
)
_OF_FILES = _UNREADABLE | {"oversized-file", "item-overlap"}


def _unread(manifest: Manifest) -> Iterable[Finding]:
    """Report tensors of an unsupported kind; readers report tensors that need refused globals."""
    # A tensor that needs a refused global has the reader's finding, which names the global.
    needs = {b.key for b in manifest.blobs if b.refused}
    for name, why in manifest.unread.items():
        if name in needs:
            continue
        message = f"{name} cannot be read ({why.describe()})"
        hint = leave_out([name], left=bool(manifest.tensors))
        yield finding("unreadable-part", "files", message, fqn=name, file=why.file, hint=hint)


def _files(manifest: Manifest) -> Iterable[Finding]:
    """Report files that are missing, too short or too long for what the metadata places in them."""
    items = manifest.items
    need = np.zeros(len(manifest.files), np.int64)
    # The last byte that the metadata places in each file.
    if len(items):
        np.maximum.at(need, items.file, items.start + items.length)
    used = np.zeros(len(manifest.files), np.bool_)
    used[items.file] = True
    exact = ending(manifest)
    for i, file in enumerate(manifest.files):
        # A file that nothing is placed in is a reader's matter: it may be a log, or stray.
        if not used[i]:
            continue
        if file.size is None:
            yield finding(
                "missing-file", "files", f"{file.path} is missing{_rank(file.path)}", file=file.path
            )
        elif file.size < need[i]:
            yield finding(
                "truncated-file",
                "files",
                f"{file.path} has {file.size} bytes, the metadata places data up to {need[i]}",
                file=file.path,
            )
        # Only formats whose files end with their last item: others append an index or padding.
        elif file.size > need[i] and exact[i]:
            yield finding(
                "oversized-file",
                "files",
                f"{file.path} has {file.size} bytes, the metadata places data only up to {need[i]}",
                file=file.path,
            )


def _something(manifest: Manifest) -> Iterable[Finding]:
    """Report a checkpoint with no tensor and no object."""
    if not manifest.tensors and not manifest.blobs:
        yield finding("no-tensors", "coverage", "the metadata names no tensor and no object")


def _emptied(manifest: Manifest) -> Iterable[Finding]:
    """Report weights of which a writer stored an empty placeholder alone.

    ZeRO-3 leaves a tensor of shape [0] in the place of each parameter that is cut over the ranks, and FSDP
    with ``use_orig_params`` on each rank that has no element of it. A state dict that one rank saved without
    gathering them has nothing else.
    """
    # A weight of shape [0] is no layer's; a buffer may be.
    empty = [t for t in manifest.tensors if t.shape == (0,) and BY_NAME[t.dtype].is_float]
    if any(t.fqn.rpartition(".")[2] == "weight" for t in empty):
        for spec in empty:
            message = f"{spec.fqn} is empty: other ranks have its elements, and one saved its own"
            yield finding("lost-at-save", "coverage", message, fqn=spec.fqn, hint=_GATHER)


def _lengths(manifest: Manifest) -> Iterable[Finding]:
    """Report items that are shorter than their chunk's bytes."""
    if manifest.inputs is not None:
        yield from _lengths(manifest.inputs)
    chunks, items = manifest.chunks, manifest.items
    if not len(chunks) or not len(items):
        return
    # float64: sizes that a damaged file claims must not overflow to a small number.
    width = np.array([BY_NAME[t.dtype].itemsize for t in manifest.tensors], np.float64)
    nbytes = width[chunks.tensor] * prod_rows(chunks.shape.astype(np.float64))
    placed = chunks.item >= 0
    item = np.where(placed, chunks.item, 0)
    zips = placed & (items.envelope[item] == int(Envelope.TORCHZIP))
    # A zstd block of 128 KiB takes at least 4 bytes.
    room = np.where(items.codec[item] == 0, 1.0, 32768.0) * items.length[item]
    short = zips & (room < nbytes)
    # Bounded, as a metadata file of another save makes all items too short.
    for row in np.flatnonzero(short)[:100].tolist():
        stored_item = items[int(chunks.item[row])]
        fqn = manifest.tensors[int(chunks.tensor[row])].fqn
        path = manifest.files[stored_item.file].path
        yield finding(
            "length-mismatch",
            "coverage",
            f"{fqn}: a chunk of {int(nbytes[row])} bytes is placed in {stored_item.length} bytes of {path}",
            fqn=fqn,
            file=path,
        )


def _item_overlaps(manifest: Manifest) -> Iterable[Finding]:
    """Report items that share bytes of a file (members of one safetensors blob share its range)."""
    items = manifest.items
    zips = (items.envelope == int(Envelope.TORCHZIP)) & (items.length > 0)
    file, start, length = items.file, items.start, items.length
    if not zips.all():
        file, start, length = file[zips], start[zips], length[zips]
    if len(file) < 2:
        return
    order = _by_place(file, start, length)
    file, start, length = file[order], start[order], length[order]
    shared = (file[1:] == file[:-1]) & (start[1:] < start[:-1] + length[:-1])
    if not shared.any():
        return
    rows = np.flatnonzero(zips)[order]
    a, b = rows[:-1], rows[1:]
    equal = (start[1:] == start[:-1]) & (length[1:] == length[:-1])
    # One chunk listed twice in the metadata is the same item twice; two chunks in one range are a clash.
    clash = shared & ~equal
    if (shared & equal).any():
        owner = _owners(manifest)
        clash |= shared & (owner[a] != owner[b])
    for row in np.flatnonzero(clash)[:100].tolist():
        first, second = items[int(a[row])], items[int(b[row])]
        path = manifest.files[first.file].path
        yield finding(
            "item-overlap",
            "coverage",
            f"{path}: items at {first.start} ({first.length} bytes) and {second.start} "
            f"({second.length} bytes) overlap",
            file=path,
        )


def _by_place(file: Any, start: Any, length: Any) -> Any:
    """Return the order of items by file, first byte and length."""
    room = int(start.max()) + 1
    if (int(file.max()) + 1) * room >= 1 << 62:
        return np.lexsort((length, start, file))
    key = file * room + start  # one sort instead of three
    order = np.argsort(key, kind="stable")
    key = key[order]
    if (key[1:] == key[:-1]).any():
        return np.lexsort((length, start, file))
    return order


def _owners(manifest: Manifest) -> Any:
    """Return int64 [items]: a number that is equal for items of equal chunks (tensor and box)."""
    chunks = manifest.chunks
    owner = np.arange(len(manifest.items), dtype=np.int64) + len(chunks)
    placed = np.flatnonzero(chunks.item >= 0)
    if len(placed):
        keys = np.concatenate([chunks.tensor[placed, None], chunks.lo[placed], chunks.shape[placed]], axis=1)
        _, group = np.unique(keys, axis=0, return_inverse=True)
        owner[chunks.item[placed]] = group.reshape(-1)
    return owner


def _rank(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    digits = name.removeprefix("__").split("_")[0]
    return f" (written by rank {digits})" if name.startswith("__") and digits.isdigit() else ""


# level, rule; a rule sees the whole manifest and yields findings.
RULES: tuple[tuple[str, Callable[[Manifest], Iterable[Finding]]], ...] = (
    ("files", _files),
    ("files", _unread),
    ("coverage", _something),
    ("coverage", _emptied),
    ("coverage", coverage),
    ("coverage", _lengths),
    ("coverage", _item_overlaps),
    ("coverage", unused_rule),
)
