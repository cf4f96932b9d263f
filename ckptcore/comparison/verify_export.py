"""Verify that an export equals its source, and is a model that transformers opens.

1. `ELEMENTS`: names and shapes through the map, and the stored elements behind them (`element_use`).
2. `NAMES`: the model class of config.json, on the meta device, in a separate process.
3. `CONFIG`: its fields, with every other config of the model.
4. `VALUES` and `FINITE`: both sides are read once, side by side (`export_values`).
5. `NEAR`, `REFERENCE` and `LOGITS`, on request.

`ckptcore.planning.compose.map_export` alone decides how names map, for conversions and for this proof. A
check that cannot be done states the reason, and does not stop the others.

Peak memory: the interpreter, torch where tensors are cast, and ``Settings.memory``; logits take a model's.

A config.json is compared with what else says how its model computes: the configs in the source (of its
trainer, a config.json), the config.json that the export was made with or that is beside the source, and the
reference's. Tensors show none of it.

A reference folder is known to be right; every tensor is compared with its namesake there. Logits cannot do
that: a few inputs use a few rows of an embedding, and some of the experts. The reference is read once, beside
the export, and its elements are cast to the export's dtype.

Where the source is gone, an export is compared with what a catalog recorded when it was written. That proves
that nothing changed since. It does not prove the export right: the record says whether a verification did,
and when.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from ckptcore.checking.check import check
from ckptcore.checking.examine import inspect
from ckptcore.checking.export_proof import (
    CONFIG,
    ELEMENTS,
    FAILED,
    FINITE,
    LOGITS,
    NAMES,
    NEAR,
    NOT_DONE,
    OK,
    REFERENCE,
    VALUES,
    Check,
    ExportProof,
    Problem,
    failed,
    named,
    not_done,
    passed,
)
from ckptcore.comparison.element_use import element_use
from ckptcore.comparison.export_logits import LogitsWanted, check_logits, require_folder, require_memory
from ckptcore.comparison.export_near import near
from ckptcore.comparison.export_sides import MappedSource, OpenExport, UnmappedSource, map_source
from ckptcore.comparison.export_values import EXPORT, SOURCE, PairResult, TensorPair, finish, read_pairs
from ckptcore.comparison.opened import OpenSide, closing_sides
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import placed
from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    NameMismatch,
    NotComplete,
    SourceUnreadable,
    UsageError,
)
from ckptcore.fingerprints.sums import Fingerprinted, checkpoint_fingerprint
from ckptcore.naming.maps.hyperparameters import Config
from ckptcore.naming.peft import adapter_config, find_adapter
from ckptcore.naming.rename import Mapped
from ckptcore.naming.worlds import HUB
from ckptcore.planning.compose import digest_of_map, model_names
from ckptcore.planning.config_agreement import agreement_of, config_beside, source_configs, unconfirmed_text
from ckptcore.planning.config_folder import check_names
from ckptcore.planning.export_source import ExportRecord, ExportSource
from ckptcore.planning.hub_files import ADAPTER, INDEX, read_named
from ckptcore.planning.hub_files import CONFIG as CONFIG_FILE
from ckptcore.planning.request import Settings
from ckptcore.planning.several_models import expected_of
from ckptcore.planning.zero_tensors import not_zero
from ckptcore.reading.file_digests import digests_like
from ckptcore.reading.rereading import rereading
from ckptcore.store import forget_small_reads, open_store
from ckptcore.store.listing import folder_at
from ckptcore.utils.foreign_text import InvalidText, load_json_object
from ckptcore.utils.text import count, listed
from ckptcore.utils.workers import Progress, ProgressMeter

_MOST_COSINES = 20
_WIDE = ("float32", "float64")
Ties = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The checks on request. near: a related folder. threshold: the least cosine. logits: how to compare."""

    near: str | None = None
    threshold: float = 0.8
    logits: LogitsWanted | None = None

    def __post_init__(self) -> None:
        if not -1 <= self.threshold <= 1:  # false for NaN
            raise UsageError(f"the least cosine must be from -1 to 1 (got {self.threshold})", hint="try 0.8")


def verify_export(
    url: str,
    source: ExportSource | None,
    optional_checks: Wanted,
    settings: Settings,
    progress: Progress | None = None,
    *,
    missing: str = "no source is known",
    record: ExportRecord | None = None,
) -> ExportProof:
    """Verify an export; see `ckptcore.api.verify_export`.

    Args:
        url: Path or URL of the export.
        source: What it was exported from, or None if that is unknown.
        optional_checks: The checks on request.
        settings: Memory, threads and device.
        progress: Called with the number of bytes read.
        missing: Why there is no source.
        record: What a catalog records of the export, for where there is no source.

    Returns:
        The proof. Damage of the export is a failed check, not an error.

    """
    # A process that verifies twice must see what is stored now, not what it read before.
    forget_small_reads()
    found_by = source.by if source is not None else ""
    place = source.request.source if source is not None else None
    try:
        export = OpenExport.open(url)
    # Not yet complete is an answer for the caller, who may wait; damage is a verdict on the export.
    except NotComplete:
        raise
    except DamagedCheckpoint as error:
        return ExportProof(url, "", place, found_by, tuple(_of_unread(url, error, optional_checks)))
    # Before any bytes are read: a wrong path for --near must not end an hour of comparing.
    base = inspect(optional_checks.near) if optional_checks.near is not None else None
    if optional_checks.logits is not None:
        folders = {url: export.values}
        if optional_checks.logits.reference is not None:
            folders[optional_checks.logits.reference] = inspect(optional_checks.logits.reference)
        # The same for logits: folders and memory that are missing are known before the reads.
        for folder in folders:
            require_folder(folder)
        require_memory(optional_checks.logits, folders)
    reference = None if optional_checks.logits is None else optional_checks.logits.reference
    config = check_config(export, source, reference)
    try:
        # Without a source the other checks are still done, and each says what it lacks.
        mapped = map_source(source, export) if source is not None else UnmappedSource(missing)
    except (CkptError, OSError) as error:
        # A config.json that contradicts the source explains why names do not fit: the failed check
        # reports it, where an error would hide it.
        contradicted = config is not None and config.verdict == FAILED and isinstance(error, NameMismatch)
        if source is None or (_is_callers(error, source) and not contradicted):
            raise
        gone = isinstance(error, SourceUnreadable)
        mapped = UnmappedSource(f"{error}; {source.by} names it: try --against" if gone else str(error))
    config_checks = [config] if config is not None else []
    if isinstance(mapped, UnmappedSource):
        checks = [_unmapped_elements(export, mapped.reason), _check_names(export, source)[0], *config_checks]
        checks.append(
            not_done(VALUES, mapped.reason)
            # A catalog's record proves less than a source: only that nothing changed since.
            if record is None
            else against_record(record, export.stored, mapped.reason, progress)
        )
        checks.append(not_done(FINITE, mapped.reason))
        pair_results: tuple[PairResult, ...] = ()
    else:
        elements = _elements(export, mapped)
        names, ties, float32 = _check_names(export, source)
        # Ties and float32 names come from the model class, so the check of names precedes that of values.
        values, finite, pair_results = _values(export, mapped, ties, float32, settings, progress)
        checks = [elements, names, *config_checks, values, finite]
    if base is not None:
        checks.append(_near(export, base, optional_checks, settings, progress))
    if optional_checks.logits is not None:
        if reference is not None:
            tolerance = optional_checks.logits.tolerance
            checks.append(check_reference(export, folders[reference], tolerance, settings, progress))
        checks.append(check_logits(url, optional_checks.logits))
    return ExportProof(
        url, export.stored.format, place, found_by, tuple(checks), _fingerprint(export, pair_results)
    )


@dataclass(frozen=True)
class PartProof:
    """A comparison of an export with the part of its source that it holds.

    Attributes:
        problems: Why it proves nothing; empty if it holds that part.
        source: Manifest of the source.
        mapped: The source's tensors under the export's names, and what was dropped.
        map_digest: Digest of that map, as conversions record it.
        cast: (name in the export, dtype in the source, dtype in the export) where they differ.
        tensors: The export's tensors with fingerprints; empty if no values were compared.
    """

    problems: tuple[str, ...]
    source: Manifest
    mapped: Mapped
    map_digest: str
    cast: tuple[tuple[str, str, str], ...]
    tensors: tuple[Fingerprinted, ...] = ()


def compare_part(url: str, source: ExportSource, settings: Settings | None) -> PartProof:
    """Compare an export with the part of its source that it holds, whatever model it is.

    Names, shapes and the stored elements behind them are compared. With ``settings``, both sides are read
    once, and casts are computed again: every bit must be equal.

    Args:
        url: Path or URL of the export.
        source: What it was exported from.
        settings: Memory and threads for reading the values; None compares no values.

    Raises:
        CkptError: A side cannot be read, or the source cannot be mapped as it was.
    """
    export = OpenExport.open(url)
    mapped = map_source(source, export)
    if isinstance(mapped, UnmappedSource):
        raise UsageError(mapped.reason)
    mapped_tensors, export_rows = mapped.export.mapped, export.stored.index
    # The same checks as of an export, but no model class: a part need not be a model.
    checks = [_elements(export, mapped)]
    pair_results: tuple[PairResult, ...] = ()
    if settings is not None:
        values, _, pair_results = _values(export, mapped, (), {}, settings, None)
        checks.append(values)
    cast = tuple(
        (spec.fqn, spec.dtype, export.stored.tensors[export_rows[spec.fqn]].dtype)
        for spec in mapped_tensors.manifest.tensors
        if spec.fqn in export_rows and export.stored.tensors[export_rows[spec.fqn]].dtype != spec.dtype
    )
    problems = [str(p) for c in checks for p in c.problems]
    problems += [c.summary for c in checks if c.verdict != OK and not c.problems]
    # An empty list of problems would claim more than was compared.
    if settings is not None and _fingerprint(export, pair_results) is None and not problems:
        problems.append("not every tensor of it was compared")
    return PartProof(
        tuple(problems),
        mapped.manifest,
        mapped_tensors,
        digest_of_map(mapped.manifest, mapped_tensors),
        cast,
        tuple(s.fingerprinted for s in pair_results),
    )


def _is_callers(error: Exception, source: ExportSource) -> bool:
    """Return whether to raise an error of reading the source: the user named it, or a retry may succeed."""
    # A transient error says nothing about the export.
    if not isinstance(error, CkptError) or error.transient:
        return True
    # A source that the user named must be readable; one that a record names may be gone.
    return source.asked and not isinstance(error, DamagedCheckpoint)


def _of_unread(url: str, error: DamagedCheckpoint, optional_checks: Wanted) -> Iterator[Check]:
    """Yield the checks of an export that cannot be opened at all."""
    problems = [Problem(f.fqn or f.file or "", f.message) for f in error.findings]
    yield failed(ELEMENTS, problems or [Problem("", error.message)])
    names = [NAMES, CONFIG, VALUES, FINITE]
    names += [NEAR] if optional_checks.near is not None else []
    if optional_checks.logits is not None:
        names += [REFERENCE, LOGITS] if optional_checks.logits.reference is not None else [LOGITS]
    for name in names:
        yield not_done(name, f"cannot read {url}")


def _defects(export: OpenExport) -> list[Problem]:
    """Return the problems of an export by itself: missing or truncated files, holes."""
    report = check(export.stored, None, "coverage")
    problems = [Problem(f.fqn or f.file or "", f.message) for f in report.findings if f.severity == "error"]
    # A single file was named: what else is in its folder is not part of it.
    if export.stored.origin.get("file"):
        return problems
    used = {file.path for file in export.stored.files}
    folder_files = folder_at(export.stored.root).files
    several_files = not _of_several(export) and sum(name.endswith(".safetensors") for name in used) > 1
    # transformers opens one file without an index, and several only with it.
    if INDEX not in folder_files and several_files:
        problems.append(Problem(INDEX, "is missing, and loaders open no model of several files without it"))
    beside = [n for n in folder_files if n.endswith(".safetensors") and n not in used]
    return problems + [
        Problem(n, "is not part of the export, and loaders may read it instead") for n in beside
    ]


def _unmapped_elements(export: OpenExport, reason: str) -> Check:
    problems = _defects(export)
    return failed(ELEMENTS, problems) if problems else not_done(ELEMENTS, reason)


def _elements(export: OpenExport, mapped: MappedSource) -> Check:
    mapped_tensors = mapped.export.mapped
    # Messages have the source's own name beside the export's, as nobody looks for a renamed tensor.
    stored = {new: old for old, new in mapped_tensors.renamed}
    source_specs = {t.fqn: t for t in mapped_tensors.manifest.tensors}
    export_specs = {t.fqn: t for t in export.stored.tensors}
    problems = _defects(export)
    holed = {p.name for p in problems}
    for name, spec in source_specs.items():
        if name not in export_specs:
            # A tensor in a missing or truncated file is a problem already.
            if name not in holed:
                of = f" (of {stored[name]})" if name in stored else ""
                problems.append(Problem(name, f"is not in the export{of}"))
        elif export_specs[name].shape != spec.shape:
            text = f"has the shape {list(export_specs[name].shape)}, the source gives {list(spec.shape)}"
            problems.append(Problem(name, text))
    problems += [
        Problem(name, "is in the export, but comes from no tensor of the source")
        for name in export_specs
        if name not in source_specs
    ]
    problems += element_problems(mapped.manifest, mapped_tensors)
    # Rules that drop only zeros are held to it: the bytes are read, as no metadata shows them.
    nonzero, unread = zero_problems(mapped.manifest, mapped_tensors)
    problems += nonzero
    rules = Counter(d.rule for d in mapped_tensors.dropped)
    numel = sum(t.numel for t in export.stored.tensors)
    values = {"tensors": len(export_specs), "elements": numel, "left_out": dict(rules)}
    if problems:
        return failed(ELEMENTS, problems, **values)
    if unread:
        return not_done(ELEMENTS, f"the source cannot be read: {unread}")
    left = "".join(f"; left out: {n}, {rule}" for rule, n in rules.items())
    return passed(ELEMENTS, f"{count(len(export_specs), 'tensor')}, {numel:,} elements{left}", **values)


def _adapter_names(export: OpenExport, content: bytes) -> Check:
    """Check an adapter's names, shapes and ranks against its own config; its base model is not available."""
    try:
        form = load_json_object(content)
        # Only shapes: the names of an adapter depend on its own config and on no model class.
        shapes = export.shapes()
        adapter = find_adapter(shapes, form)
        if adapter is None:
            return failed(NAMES, [Problem(ADAPTER, "there is no LoRA beside it")])
        adapter_config(adapter, shapes, form)
    except InvalidText as error:
        return failed(NAMES, [Problem(ADAPTER, f"cannot be read: {error}")])
    except (NameMismatch, UsageError) as error:
        return failed(NAMES, [Problem("", error.message)])
    return passed(NAMES, f"they fit {ADAPTER}")


def _check_names(
    export: OpenExport, source: ExportSource | None
) -> tuple[Check, Ties, Mapping[str, Sequence[str]]]:
    """Return the check of names, the model class's ties between stored tensors, and `Expected.float32`.

    Names are exact, unless others were requested, or quantised weights were copied as they are stored.
    """
    # Without a config.json the model class is unknown; folders of several models have one in each.
    if export.config is None:
        if export.adapter is not None:
            return _adapter_names(export, export.adapter), (), {}
        if not _of_several(export):
            return not_done(NAMES, "there is no config.json"), (), {}
    else:
        try:
            _ = export.config.form
        except InvalidText as error:
            return failed(NAMES, [Problem("config.json", f"cannot be read: {error}")]), (), {}
    try:
        if export.config is None:
            expected = expected_of(export.stored)
        else:
            expected = check_names(export.config, export.shapes())
        # What the user renamed is expected to differ from the names that transformers writes.
        if not export.values.derived and (source is None or source.request.names == HUB):
            expected.require_exact(renaming=False)
    except NameMismatch as error:
        problems = [
            Problem(str(name), text) for kind, text in _MISFITS.items() for name in error.values.get(kind, ())
        ]
        return failed(NAMES, problems or [Problem("", error.message)], message=error.message), (), {}
    except UsageError as error:
        return failed(NAMES, [Problem("config.json", error.message)]), (), {}
    # A class that could not be asked leaves the names unproven, which is neither passed nor failed.
    unasked = [f for f in expected.warnings if f.code == "names-unchecked"]
    if unasked:
        return not_done(NAMES, f"{unasked[0].message}; {unasked[0].hint}"), (), {}
    notes = "; ".join(f.message for f in (*expected.warnings, *expected.kept_names()))
    export_rows = export.stored.index
    # A tie of which one name is stored has nothing to compare.
    ties = tuple((a, b) for a, b in expected.ties if a in export_rows and b in export_rows)
    return passed(NAMES, f"they fit{f': {notes}' if notes else ''}"), ties, expected.float32 or {}


def _of_several(export: OpenExport) -> bool:
    """Return whether an export has a folder for each of several models."""
    return "components" in export.stored.origin


_MISFITS = {
    "missing": "is missing",
    "unexpected": "is not a name of the model",
    "shapes": "has another shape than the model",
    "broken": "cannot be assembled",
    "inexact": "is not what save_pretrained of the model writes",
}


@rereading
def _values(
    export: OpenExport,
    mapped: MappedSource,
    tied: Ties,
    float32: Mapping[str, Sequence[str]],
    settings: Settings,
    progress: Progress | None,
) -> tuple[Check, Check, tuple[PairResult, ...]]:
    """Return the checks of values and of NaN and Inf, and the results of the export's tensors.

    tied: pairs that the model class ties: if both are stored, transformers loads one of them. float32: 16-bit
    dtype -> names of what models of that dtype have in float32.
    """
    # The source is mapped and cast as the conversion did it, and nothing is written.
    mapped_tensors = mapped.export.mapped
    source_side = OpenSide(f"source ({mapped.manifest.root})", mapped_tensors.manifest)
    export_side = OpenSide(export.url, export.stored)
    # Tensors that the export left out because they are tied must have been equal in the source, too.
    twins = mapped_tensors.twins
    sides = [source_side, export_side, *([OpenSide(source_side.label, twins)] if twins is not None else [])]
    with closing_sides(sides):
        problems, pairs = _comparable(export, mapped, float32)
        ties = []
        if twins is not None:
            source_rows = mapped_tensors.manifest.index
            ties = [
                TensorPair(f"{a}, which is tied to {b}", (row, source_rows[b]), (2, 0), is_summed=False)
                for row, (a, b) in enumerate(mapped_tensors.ties)
            ]
        stored = export.stored
        for a, b in tied:
            first, second = (stored.tensors[stored.index[n]] for n in (a, b))
            # Named as a problem here, since the comparison below needs equal shapes.
            if (first.shape, first.dtype) != (second.shape, second.dtype):
                problems.append(
                    Problem(a, f"has another shape or dtype than {b}, to which config.json ties it")
                )
                continue
            name = f"{a}, which config.json ties to {b}"
            ties.append(TensorPair(name, (stored.index[b], stored.index[a]), (1, 1), is_summed=False))
        pair_results = read_pairs(sides, [*pairs, *ties], settings, progress)
        ends = [finish(side, SOURCE if side is not export_side else EXPORT) for side in sides]
    # A problem has the name of its tensor already.
    damage = [(s.name, side, why.removeprefix(f"{s.name}: ")) for s in pair_results for side, why in s.damage]
    # The end of a side repeats, behind the side's label, damage that a box has reported.
    damage += [
        ("", *end) for end in ends if end is not None and not any(end[1].endswith(d[2]) for d in damage)
    ]
    # Damage of the source is no fault of the export, and is kept apart.
    of_source = [Problem(name, why) for name, side, why in damage if side == SOURCE]
    problems += [Problem(name, why) for name, side, why in damage if side == EXPORT]
    problems += [Problem(s.name, _differing(s)) for s in pair_results if s.differing]
    # Twins are compared, but are no tensors of the export, and so are no part of its fingerprint.
    export_results = tuple(s for s, p in zip(pair_results, [*pairs, *ties], strict=True) if p.is_summed)
    cast = Counter(
        f"{s.specs[0].dtype} to {s.specs[1].dtype}"
        for s in export_results
        if s.specs[0].dtype != s.specs[1].dtype
    )
    values = {"compared": len(export_results), "cast": dict(cast), "unverified": source_side.unverified}
    if problems:
        result = failed(VALUES, problems, **values)
    elif of_source:  # the export has no fault of its own, and what cannot be read proves nothing
        result = not_done(VALUES, f"the source cannot be read: {named(of_source)}", of_source)
    else:
        casts = "".join(f", {n} cast from {dtypes}" for dtypes, n in cast.items())
        result = passed(VALUES, f"{count(len(export_results), 'tensor')} equal bit for bit{casts}", **values)
    return result, _finite(export_results, of_source), export_results


def _comparable(
    export: OpenExport, mapped: MappedSource, float32: Mapping[str, Sequence[str]]
) -> tuple[list[Problem], list[TensorPair]]:
    """Return (dtypes that the cast does not explain, tensors to read side by side)."""
    dtypes, exact = mapped.export.dtypes, mapped.source.exact
    export_rows, problems, pairs = export.stored.index, [], []
    in_float32 = {dtype: {*names} for dtype, names in float32.items()}
    for row, spec in enumerate(mapped.export.mapped.manifest.tensors):
        export_row = export_rows.get(spec.fqn)
        # What has no counterpart, or another shape, cannot be read side by side.
        if export_row is None or export.stored.tensors[export_row].shape != spec.shape:
            continue  # the check of elements reports it
        got, right = export.stored.tensors[export_row].dtype, dtypes.get(spec.fqn, spec.dtype)
        both_float = BY_NAME[got].is_float and BY_NAME[spec.dtype].is_float
        # A cast between float dtypes is what an export may do; any other change of dtype is a fault.
        if got != right and (exact or not both_float):
            problems.append(Problem(spec.fqn, f"is {got}, the source gives {right}"))
            continue
        # Rounding is allowed, except of what the model class keeps in float32 while it loads a 16-bit model.
        if not exact and spec.dtype in _WIDE and spec.fqn in in_float32.get(got, ()):
            text = f"is rounded from {spec.dtype} to {got}; the model class keeps it in float32"
            problems.append(Problem(spec.fqn, text))
            continue
        pairs.append(TensorPair(spec.fqn, (row, export_row)))
    return problems, pairs


def _differing(pair: PairResult) -> str:
    spec, where = pair.specs[1], list(pair.first or ())
    cast = f", after the cast from {pair.specs[0].dtype}" if pair.specs[0].dtype != spec.dtype else ""
    return f"{pair.differing:,} of {spec.numel:,} elements differ from the source{cast}, first at {where}"


def _finite(pair_results: Sequence[PairResult], of_source: Sequence[Problem]) -> Check:
    problems = [
        Problem(s.name, f"{s.nan[1]} NaN and {s.inf[1]} Inf, the source has {s.nan[0]} and {s.inf[0]}")
        for s in pair_results
        # More than the source has: a NaN that was trained in is the source's, and is reported as such.
        if not s.damage and (s.nan[1] > s.nan[0] or s.inf[1] > s.inf[0])
    ]
    not_finite = [(s.name, s.nan[1], s.inf[1]) for s in pair_results if s.nan[1] or s.inf[1]]
    values: Mapping[str, object] = {
        "tensors": [{"name": name, "nan": nan, "inf": inf} for name, nan, inf in not_finite]
    }
    if problems:
        return failed(FINITE, problems, **values)
    # A tensor that could not be read may hold any number of them.
    if of_source or any(s.damage for s in pair_results):
        return not_done(FINITE, "not every tensor could be read")
    if not not_finite:
        return passed(FINITE, "no NaN, no Inf", **values)
    total = sum(nan for _, nan, _ in not_finite), sum(inf for _, _, inf in not_finite)
    tensors = count(len(not_finite), "tensor")
    text = f"{total[0]} NaN and {total[1]} Inf in {tensors}, as in the source"
    return passed(FINITE, text, **values)


@rereading
def _near(
    export: OpenExport, base: Manifest, optional_checks: Wanted, settings: Settings, progress: Progress | None
) -> Check:
    # Quantized weights are compared as the values that they mean: the related folder has another form, or
    # none.
    export_side, base_side = OpenSide(export.url, export.values), OpenSide(str(optional_checks.near), base)
    with closing_sides([export_side, base_side]):
        try:
            nearness = near(export_side, base_side, settings, progress)
        except DamagedCheckpoint as error:
            return not_done(NEAR, error.message)
    # NaN sorts nowhere: cosines that are not finite are problems of their own.
    low = sorted((c, n) for n, c in nearness.cosines if math.isfinite(c))
    far = [Problem(n, "an element is NaN or Inf") for n, c in nearness.cosines if not math.isfinite(c)]
    far += [
        Problem(n, f"cosine {c:.4f} is less than {optional_checks.threshold}")
        for c, n in low
        if c < optional_checks.threshold
    ]
    far += [
        Problem(n, f"has the shape {list(a)}, {optional_checks.near} has {list(b)}")
        for n, a, b in nearness.shapes
    ]
    values = {
        "compared": len(nearness.cosines),
        "threshold": optional_checks.threshold,
        "lowest": [{"name": n, "cosine": c} for c, n in low[:_MOST_COSINES]],
        "only_in_export": list(nearness.only_export),
        "only_in_base": list(nearness.only_base),
        "no_direction": list(nearness.zero),
    }
    if far:
        return failed(NEAR, far, **values)
    if not nearness.cosines:
        return not_done(NEAR, f"{optional_checks.near} has no tensor with a name and shape of the export")
    lacking = f"; {optional_checks.near} lacks {len(nearness.only_export)}" if nearness.only_export else ""
    least = f"{low[0][0]:.4f} ({low[0][1]})"
    tensors = count(len(nearness.cosines), "tensor")
    return passed(NEAR, f"{tensors}, the lowest cosine is {least}{lacking}", **values)


def _fingerprint(export: OpenExport, pair_results: Sequence[PairResult]) -> str | None:
    """Return the fingerprint of the export, or None unless each of its tensors was read."""
    # A fingerprint of some of the tensors would look like that of another checkpoint.
    if len(pair_results) != len(export.stored.tensors) or any(s.damage for s in pair_results):
        return None
    return checkpoint_fingerprint(s.fingerprinted for s in pair_results)


def element_problems(source: Manifest, mapped_tensors: Mapped) -> list[Problem]:
    """Account for every stored element of a source.

    Args:
        source: The checkpoint.
        mapped_tensors: What an export makes of it.

    Returns:
        A problem for each tensor of which elements are lost, more or fewer are dropped than its rule says, or
        elements are in the export twice.
    """
    # A name that is dropped as such needs no count of elements; others lose exactly what their rule states.
    gone = {d.fqn for d in mapped_tensors.dropped if d.part is None}
    parts = Counter[str]()
    for dropped in mapped_tensors.dropped:
        if dropped.part is not None and dropped.fqn not in gone:
            parts[dropped.fqn] += dropped.part
    use = element_use(source, mapped_tensors.manifest, {t.fqn for t in source.tensors if t.fqn not in gone})
    problems = [
        Problem(name, f"{count:,} of its elements are in no tensor of the export, and no rule says why")
        for name, count in use.unused.items()
        if name not in parts
    ]
    for name, expected in parts.items():
        lost = use.once.get(name, 0)
        if lost != expected:
            text = f"{lost:,} of its elements are in no tensor of the export, and its rule drops {expected:,}"
            problems.append(Problem(name, text))
    return problems + [
        Problem(name, f"{count:,} of its elements are in another tensor of the export, too")
        for name, count in use.repeated.items()
    ]


def zero_problems(source: Manifest, mapped_tensors: Mapped) -> tuple[list[Problem], str]:
    """Read the tensors that a rule drops where they are all zero.

    Returns:
        A problem for each that is not, and why the source cannot be read, or "".
    """
    try:
        return [
            Problem(d.fqn, f"{count:,} of its {numel:,} elements are not zero, and {d.only_zero}")
            for d, count, numel in not_zero(source, mapped_tensors.dropped)
        ], ""
    except DamagedCheckpoint as error:
        return [], error.message


def check_config(export: OpenExport, source: ExportSource | None, reference: str | None) -> Check | None:
    """Compare the config.json of an export with itself and with every other config of its model.

    Args:
        export: The export.
        source: What it was exported from, or None.
        reference: A folder whose config.json is right, or None.

    Returns:
        The check; None where there is no config.json that can be read, as the check of names says.
    """
    if export.config is None:
        return None
    try:
        export_config = Config("the export's config.json", HUB, export.config.form)
    except InvalidText:
        return None
    # Every other config that is known: each may contradict a field that the others do not have.
    model_configs = [*_of_source(source), *_of_reference(reference)]
    try:
        agreement = agreement_of(export_config, model_configs)
    except NameMismatch as error:
        return failed(CONFIG, [Problem("", error.message)])
    values = {"compared_with": [c.name for c in model_configs], "unconfirmed": list(agreement.unconfirmed)}
    if agreement.contradictions:
        return failed(CONFIG, [Problem(c.field, c.text) for c in agreement.contradictions], **values)
    of = (
        f"no contradiction with {listed([c.name for c in model_configs])}"
        if model_configs
        else "no other config is known"
    )
    open_fields = f"; {unconfirmed_text(agreement.unconfirmed)}" if agreement.unconfirmed else ""
    return passed(CONFIG, f"{of}{open_fields}", **values)


def _of_source(source: ExportSource | None) -> Iterable[Config]:
    """Yield the configs of the source and beside it; none of one that cannot be read, as other checks say."""
    if source is None:
        return
    request = source.request
    try:
        manifest = inspect(request.source, request.recover, request.keep_quantized, request.weights)
        names = model_names(request, manifest).values()
    except (CkptError, OSError):
        # Other checks report a source that cannot be read; here it only means fewer configs to compare with.
        return
    if source.digest is not None and manifest.digest != source.digest and not source.asked:
        return  # another checkpoint
    yield from source_configs(manifest, names)
    beside = config_beside(request, manifest)
    if beside is not None:
        yield beside


def _of_reference(reference: str | None) -> Iterable[Config]:
    form = None if reference is None else read_named("--reference", reference).json(CONFIG_FILE)
    if form is not None:
        yield Config("the reference's config.json", HUB, form)


def against_record(
    record: ExportRecord, export: Manifest, reason: str, progress: Progress | None = None
) -> Check:
    """Compare every file of tensors with its recorded digest.

    Args:
        record: Of the catalog.
        export: The export as it is stored.
        reason: Why there is no source to compare it with.
        progress: Called while files are read.

    Returns:
        The check of values: failed where a file is another one; else not done, with what is proven.
    """
    # Only files of tensors decide; a card or a tokenizer may be edited after the export.
    data = [name for name in placed(export) if name in record.files]
    lacking = sum(name not in record.files for name in placed(export))
    meter = ProgressMeter(progress, "compare", sum(nbytes for nbytes, _ in record.files.values()))
    changed, beside = list[Problem](), list[str]()
    with closing(open_store(export.root)) as store:
        # Sizes are asked first: a file of another size is another file, and is not read.
        right_size = {name: file for name, file in record.files.items() if store.size(name) == file[0]}
        digests = digests_like(store, right_size, meter.add)
    for name, (_, digest) in sorted(record.files.items()):
        if digests.get(name) == digest:
            continue
        if name in data:
            changed.append(Problem(name, "is not the file that was written: its BLAKE3 is another one"))
        else:
            beside.append(name)
    verified = "nobody verified it then"
    if record.verdict is not None:
        when = f" on {record.verified:%Y-%m-%d}" if record.verified is not None else ""
        verified = f"its last verification{when} gave {record.verdict}"
    values = (
        ("files_unchanged", len(data) - len(changed)),
        ("files_without_digest", lacking),
        ("changed_beside", beside),
        ("recorded_fingerprint", record.fingerprint),
        ("recorded_verdict", record.verdict),
        ("recorded_at", record.verified.isoformat() if record.verified is not None else None),
    )
    if changed:
        return failed(VALUES, changed, **dict(values))
    # No digest proves nothing, even if no file is known to have changed.
    if lacking or not data:
        return Check(VALUES, NOT_DONE, f"{reason}; the catalog has no digest of its files", (), values)
    of = "1 file of tensors is" if len(data) == 1 else f"{len(data)} files of tensors are"
    when = f" on {record.written:%Y-%m-%d}" if record.written is not None else ""
    changed_text = f"; changed since: {', '.join(beside)}" if beside else ""
    summary = (
        f"{reason}. Proven by the catalog: {of} what was written{when}{changed_text}. "
        f"Not proven again: that it is what the source held ({verified})"
    )
    # Never passed: it is compared with what was written, and not with the source.
    return Check(VALUES, NOT_DONE, summary, (), values)


@rereading
def check_reference(
    export: OpenExport, reference: Manifest, tolerance: float, settings: Settings, progress: Progress | None
) -> Check:
    """Compare the tensors of an export with those of a reference.

    Args:
        export: The export.
        reference: The folder that is known to be right.
        tolerance: Of logits. With one, tensors may differ: they are named, and logits decide.
        settings: Memory and threads.
        progress: Called with the number of bytes read.
    """
    mine, theirs = OpenSide(export.url, export.values), OpenSide(f"reference ({reference.root})", reference)
    with closing_sides([mine, theirs]):
        problems, pairs = _pairs(export, reference)
        pair_results = read_pairs([theirs, mine], pairs, settings, progress)
        ends = [end for end in (finish(theirs, SOURCE), finish(mine, "export")) if end is not None]
    damage = [(side, why) for s in pair_results for side, why in s.damage] + ends
    # An unreadable reference proves nothing about the export.
    if unread := [why for side, why in damage if side == SOURCE]:
        return not_done(REFERENCE, f"the reference cannot be read: {unread[0]}")
    problems += [Problem("", why) for _, why in damage]
    differing = [
        Problem(
            s.name,
            f"{s.differing:,} of {s.specs[1].numel:,} elements differ from the reference{_cast(s.specs)}",
        )
        for s in pair_results
        if s.differing
    ]
    values = {"compared": len(pair_results), "differing": [p.name for p in differing]}
    # Without a tolerance every difference counts; with one the logits decide how much a difference matters.
    if problems or (differing and not tolerance):
        return failed(REFERENCE, [*problems, *differing], **values)
    if differing:
        tensors = f"{count(len(differing), 'tensor')} of {len(pair_results)}"
        text = f"{tensors} differ, which a tolerance of logits allows"
        return passed(REFERENCE, f"{text}: {named(differing)}", **values)
    cast = [s for s in pair_results if s.specs[0].dtype != s.specs[1].dtype]
    after = f", {len(cast)} after a cast of the reference's" if cast else ""
    return passed(REFERENCE, f"{count(len(pair_results), 'tensor')} equal bit for bit{after}", **values)


def _cast(specs: Sequence[object]) -> str:
    source_dtype, export_dtype = (getattr(spec, "dtype", "") for spec in specs)
    return "" if source_dtype == export_dtype else f", after the cast from {source_dtype}"


def _pairs(export: OpenExport, reference: Manifest) -> tuple[list[Problem], list[TensorPair]]:
    """Return (names and shapes that differ, tensors to read side by side)."""
    export_rows, reference_rows = export.values.index, reference.index
    problems, pairs = [], []
    # Names of one side alone may be ties, and the class is asked for those only where there are any.
    only = {*export_rows} ^ {*reference_rows}
    ties = dict(_ties(export, reference)) if only else {}
    for name in [*export_rows, *(n for n in reference_rows if n not in export_rows)]:
        side = "is not in the reference" if name in export_rows else "is only in the reference"
        twin = name if name not in only else ties.get(name, "")
        # Under the name of its twin where a side stores only one of two tied names.
        export_row, reference_row = (of.get(name, of.get(twin)) for of in (export_rows, reference_rows))
        if export_row is None or reference_row is None:
            problems.append(Problem(name, side))
            continue
        export_spec = export.values.tensors[export_row]
        reference_spec = reference.tensors[reference_row]
        if export_spec.shape != reference_spec.shape:
            problems.append(
                Problem(
                    name,
                    f"has the shape {list(export_spec.shape)}, the reference {list(reference_spec.shape)}",
                )
            )
        elif export_spec.dtype != reference_spec.dtype and not (
            BY_NAME[export_spec.dtype].is_float and BY_NAME[reference_spec.dtype].is_float
        ):
            problems.append(
                Problem(name, f"is {export_spec.dtype}, the reference has {reference_spec.dtype}")
            )
        else:
            pairs.append(TensorPair(name, (reference_row, export_row), is_summed=False))
    return problems, pairs


def _ties(export: OpenExport, reference: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (name, the one that shares its values) by the export's config, both ways."""
    shapes: Mapping[str, tuple[int, ...]] = {t.fqn: t.shape for t in reference.tensors} | export.shapes()
    if export.config is None:
        return
    try:
        expected = check_names(export.config, shapes)
    except (NameMismatch, UsageError):  # the check of names reports it
        return
    for tied_name, owner_name in expected.ties:
        yield tied_name, owner_name
        yield owner_name, tied_name
