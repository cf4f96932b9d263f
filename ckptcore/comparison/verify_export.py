"""Verify an export: is it what its source holds, as a model that transformers opens?

1. `ELEMENTS`: names and shapes through the map, and the stored elements behind them (`element_use`).
2. `NAMES`: the model class of config.json, on the meta device, in a process of its own.
3. `VALUES` and `FINITE`: both sides read once, side by side (`export_values`).
4. `NEAR` and `LOGITS`, where they are asked for.

How names map is `ckptcore.planning.compose.map_export`'s to say: what an export is made of is not written
down a second time here. A check that cannot be done says why, and stops none of the others.

Peak memory: the interpreter, torch where tensors are cast, and ``Settings.memory``; logits take a model's.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace

from ckptcore.checking.check import check
from ckptcore.checking.examine import inspect
from ckptcore.checking.export_proof import (
    ELEMENTS,
    FAILED,
    FINITE,
    LOGITS,
    NAMES,
    NEAR,
    VALUES,
    Check,
    ExportProof,
    Problem,
    failed,
    named,
    not_done,
    passed,
)
from ckptcore.comparison.diff import DiffRules, diff
from ckptcore.comparison.element_use import element_use
from ckptcore.comparison.export_logits import LogitsWanted, check_logits, require_folder, require_memory
from ckptcore.comparison.export_near import near
from ckptcore.comparison.export_values import EXPORT, SOURCE, Beside, Seen, finish, read_beside
from ckptcore.comparison.result import DTYPE, ONLY_A, ONLY_B, SHAPE
from ckptcore.comparison.tensor_compare import Opened
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import placed
from ckptcore.errors import CkptError, DamagedCheckpoint, NameMismatch, NotComplete, UsageError
from ckptcore.fingerprints.sums import checkpoint_fingerprint
from ckptcore.naming.peft import adapter_config, find_adapter
from ckptcore.planning.compose import MappedExport, map_export
from ckptcore.planning.config_folder import ConfigFolder, check_names
from ckptcore.planning.export_source import ExportSource
from ckptcore.planning.hub_files import ADAPTER, CARD, CONFIG, NONE
from ckptcore.planning.model_card import tied_by_card
from ckptcore.planning.request import Request, Settings
from ckptcore.store import join_url, local_path, open_store
from ckptcore.store.listing import folder_at
from ckptcore.store.place import identify
from ckptcore.utils.workers import Progress

_MAX_SMALL = 64 << 20  # bytes of a config.json or a model card
_MOST_COSINES = 20
Ties = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked beside the checks that are always made. near: a related folder, and the least cosine."""

    near: str | None = None
    threshold: float = 0.8
    logits: LogitsWanted | None = None

    def __post_init__(self) -> None:
        if not -1 <= self.threshold <= 1:  # never true of NaN
            raise UsageError(f"cannot use {self.threshold} as a cosine", hint="Try one from -1 to 1, as 0.8")


def verify_export(
    url: str,
    source: ExportSource | None,
    wanted: Wanted,
    settings: Settings,
    progress: Progress | None = None,
    *,
    missing: str = "no source is known",
) -> ExportProof:
    """The proof of an export; see `ckptcore.api.verify_export`. missing: why there is no source."""
    found_by = source.by if source is not None else ""
    place = source.request.source if source is not None else None
    try:
        export = _Export.open(url)
    except NotComplete:
        raise
    except DamagedCheckpoint as error:
        return ExportProof(url, "", place, found_by, tuple(_of_unread(url, error, wanted)))
    base = inspect(wanted.near) if wanted.near is not None else None
    if wanted.logits is not None:
        folders = {url: export.values}
        if wanted.logits.reference is not None:
            folders[wanted.logits.reference] = inspect(wanted.logits.reference)
        for folder in folders:
            require_folder(folder)
        require_memory(wanted.logits, folders)
    try:
        mapped = _map(source, export) if source is not None else _Unmapped(missing)
    except (CkptError, OSError) as error:
        if source is None or _is_callers(error, source):
            raise
        mapped = _Unmapped(str(error))
    if isinstance(mapped, _Unmapped):
        checks = [_whole_check(export, mapped.reason), _check_names(export)[0]]
        checks += [not_done(name, mapped.reason) for name in (VALUES, FINITE)]
        seen: tuple[Seen, ...] = ()
    else:
        elements = _elements(export, mapped)
        names, ties = _check_names(export)
        values, finite, seen = _values(export, mapped, ties, settings, progress)
        checks = [elements, names, values, finite]
    if base is not None:
        checks.append(_near(export, base, wanted, settings, progress))
    if wanted.logits is not None:
        logits = check_logits(url, wanted.logits)
        if logits.verdict == FAILED and wanted.logits.reference is not None:
            other = folders[wanted.logits.reference]
            unlike = list(_unlike(export.values, other, settings, progress))
            logits = failed(LOGITS, [*logits.problems, *unlike], **dict(logits.values))
        checks.append(logits)
    return ExportProof(url, export.stored.format, place, found_by, tuple(checks), _fingerprint(export, seen))


@dataclass(frozen=True)
class _Export:
    """The folder that is verified. stored: its tensors as they are stored; values: those of quantised ones.

    config: its config.json, or None. adapter: its adapter_config.json, or None. card: its README, empty where
    there is none.
    """

    url: str
    stored: Manifest
    values: Manifest
    config: ConfigFolder | None
    adapter: bytes | None
    card: str

    @classmethod
    def open(cls, url: str) -> _Export:
        """Reads its metadata and its small files."""
        values = inspect(url)
        stored = inspect(url, keep_quantized=True) if values.derived else values
        if stored.origin.get("file"):
            return cls(url, stored, values, None, None, "")
        with closing(open_store(stored.root)) as store:
            small = {}
            for name in (CONFIG, ADAPTER, CARD):
                size = store.size(name)
                if size is not None and size <= _MAX_SMALL:
                    small[name] = store.read(name, 0, size)
        config = ConfigFolder(url, small) if CONFIG in small else None
        card = small.get(CARD, b"").decode(errors="replace")
        return cls(url, stored, values, config, small.get(ADAPTER), card)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of what is stored."""
        return {t.fqn: t.shape for t in self.stored.tensors}


@dataclass(frozen=True)
class _Mapped:
    """A source, mapped. warnings: what is said beside the checks."""

    source: ExportSource
    manifest: Manifest
    export: MappedExport


@dataclass(frozen=True)
class _Unmapped:
    """Why there is nothing to hold an export against."""

    reason: str


def _is_callers(error: Exception, source: ExportSource) -> bool:
    """Whether an error of reading the source is raised instead of a proof: it was named, or may pass."""
    if not isinstance(error, CkptError) or error.transient:
        return True
    return source.asked and not isinstance(error, DamagedCheckpoint)


def _map(source: ExportSource, export: _Export) -> _Mapped | _Unmapped:
    request = source.request
    if not source.exact and export.values.derived:  # what is quantised there was carried as it is
        request = replace(request, keep_quantized=True)
    if (
        export.config is not None or export.adapter is not None
    ):  # the folders that the request named may be gone
        request = replace(request, config=export.url, tokenizer=NONE)
    manifest = inspect(request.source, request.recover, request.keep_quantized)
    if source.digest is not None and manifest.digest != source.digest and not source.asked:
        return _Unmapped(
            f"{request.source} is another checkpoint now: its manifest digest is {manifest.digest[:16]}, "
            f"{source.by} says {source.digest[:16]}"
        )
    if _shares_files(manifest, export.stored):
        if source.asked:
            raise UsageError(
                f"cannot hold {export.url} against {request.source}: they are the same files",
                hint="name the checkpoint that was exported: --against SRC",
            )
        return _Unmapped(f"{source.by} names the export itself as its source")
    mapped = map_export(request, manifest)
    return _Mapped(source, manifest, _tied(request, manifest, mapped, export))


def _shares_files(one: Manifest, other: Manifest) -> bool:
    """Whether a file with tensors is one of both: what is held against itself is always equal."""
    return not _files(one).isdisjoint(_files(other))


def _files(manifest: Manifest) -> set[object]:
    """What each of its files with tensors is, whatever it is called: links lead to one file."""
    found: set[object] = set()
    for name in placed(manifest):
        url = join_url(manifest.root, name)
        path = local_path(url)
        if path is None:
            place = identify(url)
            found.add((place.family, place.spots))
            continue
        with suppress(OSError):  # it is missing: said by the check of elements
            seen = os.stat(path)
            found.add((seen.st_dev, seen.st_ino))
    return found


def _tied(request: Request, manifest: Manifest, mapped: MappedExport, export: _Export) -> MappedExport:
    """With the ties that the export itself tells, of tensors that it lacks; their equality is checked."""
    there, specs = export.stored.index, {t.fqn: t for t in mapped.mapped.manifest.tensors}
    lacking = {name for name in specs if name not in there}
    if not lacking:
        return mapped

    def useful(ties: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Those of tensors that can be equal."""
        return tuple(
            (a, b)
            for a, b in ties
            if a in lacking
            and b in there
            and b in specs
            and (specs[a].shape, specs[a].dtype) == (specs[b].shape, specs[b].dtype)
        )

    ties = useful(tied_by_card(export.card))
    if {a for a, _ in ties} != lacking and export.config is not None:
        try:
            expected = check_names(export.config, {n: t.shape for n, t in specs.items()}).ties
        except (NameMismatch, UsageError):  # said by the check of names
            expected = ()
        ties = tuple(dict(useful(expected) + ties).items())
    if not ties:
        return mapped
    return map_export(replace(request, tie=(*request.tie, *ties)), manifest)


def _of_unread(url: str, error: DamagedCheckpoint, wanted: Wanted) -> Iterator[Check]:
    """The checks of an export that cannot be opened at all."""
    problems = [Problem(f.fqn or f.file or "", f.message) for f in error.findings]
    yield failed(ELEMENTS, problems or [Problem("", error.message)])
    asked = [NAMES, VALUES, FINITE]
    asked += [NEAR] if wanted.near is not None else []
    asked += [LOGITS] if wanted.logits is not None else []
    for name in asked:
        yield not_done(name, f"cannot read {url}")


def _unlike(
    export: Manifest, reference: Manifest, settings: Settings, progress: Progress | None
) -> Iterator[Problem]:
    """The tensors that are not the reference's: logits alone do not say which is wrong."""
    try:
        found = diff(export, reference, DiffRules(), settings, progress)
    except CkptError as error:
        yield Problem("", f"the tensors were not held against the reference's: {error}")
        return
    texts = {
        ONLY_A: "is not in the reference",
        ONLY_B: "is in the reference alone",
        DTYPE: "has another dtype in the reference",
        SHAPE: "has another shape in the reference",
    }
    for tensor in found.tensors:
        what = [texts[kind] for kind in tensor.what if kind in texts]
        if tensor.differing:
            what.append(f"{tensor.differing:,} elements are not those of the reference")
        yield Problem(tensor.name, "; ".join(what))


def _defects(export: _Export) -> list[Problem]:
    """What is wrong with an export by itself: files that are missing or cut off, holes."""
    report = check(export.stored, None, "coverage")
    problems = [Problem(f.fqn or f.file or "", f.message) for f in report.findings if f.severity == "error"]
    if export.stored.origin.get("file"):
        return problems
    used = {file.path for file in export.stored.files}
    beside = [n for n in folder_at(export.stored.root).files if n.endswith(".safetensors") and n not in used]
    return problems + [
        Problem(n, "is no part of the export, and loaders may read it instead") for n in beside
    ]


def _whole_check(export: _Export, reason: str) -> Check:
    problems = _defects(export)
    return failed(ELEMENTS, problems) if problems else not_done(ELEMENTS, reason)


def _elements(export: _Export, mapped: _Mapped) -> Check:
    known = mapped.export.mapped
    stored = {new: old for old, new in known.renamed}
    wanted = {t.fqn: t for t in known.manifest.tensors}
    there = {t.fqn: t for t in export.stored.tensors}
    problems = _defects(export)
    holed = {p.name for p in problems}
    for name, spec in wanted.items():
        if name not in there:
            if name not in holed:
                of = f" (of {stored[name]})" if name in stored else ""
                problems.append(Problem(name, f"is not in the export{of}"))
        elif there[name].shape != spec.shape:
            what = f"has the shape {list(there[name].shape)}, {list(spec.shape)} comes from the source"
            problems.append(Problem(name, what))
    problems += [
        Problem(name, "is in the export, and comes from no tensor of the source")
        for name in there
        if name not in wanted
    ]
    parts = {d.fqn for d in known.dropped if d.part}
    gone = {d.fqn for d in known.dropped if not d.part}
    use = element_use(
        mapped.manifest, known.manifest, {t.fqn for t in mapped.manifest.tensors if t.fqn not in gone}
    )
    problems += [
        Problem(name, f"{count:,} of its elements are in no tensor of the export, and no rule says why")
        for name, count in use.unused.items()
        if name not in parts
    ]
    problems += [
        Problem(name, f"{count:,} of its elements are in another tensor of the export, too")
        for name, count in use.repeated.items()
    ]
    rules = Counter(d.rule for d in known.dropped)
    count = sum(t.numel for t in export.stored.tensors)
    values = {"tensors": len(there), "elements": count, "left_out": dict(rules)}
    if problems:
        return failed(ELEMENTS, problems, **values)
    left = "".join(f"; left out: {n}, {rule}" for rule, n in rules.items())
    return passed(ELEMENTS, f"{len(there)} tensors, {count:,} elements{left}", **values)


def _adapter_names(export: _Export, content: bytes) -> Check:
    """Of an adapter: names, shapes and ranks against its own config; the model below it is not here."""
    try:
        form = json.loads(content)
        shapes = export.shapes()
        adapter = find_adapter(shapes, form) if isinstance(form, dict) else None
        if adapter is None:
            return failed(NAMES, [Problem(ADAPTER, "is no JSON object, or there is no LoRA beside it")])
        adapter_config(adapter, shapes, form)
    except (ValueError, RecursionError) as error:
        return failed(NAMES, [Problem(ADAPTER, f"is no JSON: {error}")])
    except (NameMismatch, UsageError) as error:
        return failed(NAMES, [Problem("", error.message)])
    return passed(NAMES, f"they fit {ADAPTER}")


def _check_names(export: _Export) -> tuple[Check, Ties]:
    """The check of names, and the ties of the model class between tensors that are both there."""
    if export.config is None:
        if export.adapter is not None:
            return _adapter_names(export, export.adapter), ()
        return not_done(NAMES, "there is no config.json"), ()
    try:
        form = json.loads(export.config.content[CONFIG].decode())
        if not isinstance(form, dict):
            return failed(NAMES, [Problem("config.json", "is no JSON object")]), ()
    except (ValueError, RecursionError) as error:
        return failed(NAMES, [Problem("config.json", f"is not JSON: {error}")]), ()
    try:
        expected = check_names(export.config, export.shapes())
    except NameMismatch as error:
        problems = [
            Problem(str(name), text) for kind, text in _MISFITS.items() for name in error.values.get(kind, ())
        ]
        return failed(NAMES, problems or [Problem("", error.message)], message=error.message), ()
    except UsageError as error:
        return failed(NAMES, [Problem("config.json", error.message)]), ()
    unasked = [f for f in expected.warnings if f.code == "names-unchecked"]
    if unasked:
        return not_done(NAMES, f"{unasked[0].message}; {unasked[0].hint}"), ()
    notes = "; ".join(f.message for f in expected.warnings)
    there = export.stored.index
    ties = tuple((a, b) for a, b in expected.ties if a in there and b in there)
    return passed(NAMES, f"they fit{f': {notes}' if notes else ''}"), ties


_MISFITS = {
    "missing": "is missing",
    "unexpected": "is no name of the model",
    "shapes": "has another shape than the model",
    "broken": "cannot be put together",
}


def _values(
    export: _Export, mapped: _Mapped, tied: Ties, settings: Settings, progress: Progress | None
) -> tuple[Check, Check, tuple[Seen, ...]]:
    """The checks of values and of NaN and Inf, and what was seen of the export's tensors.

    tied: by the model class: of two that are both there, transformers takes one.
    """
    known = mapped.export.mapped
    one, two = Opened(f"source ({mapped.manifest.root})", known.manifest), Opened(export.url, export.stored)
    twins = Opened(one.label, known.twins) if known.twins is not None else None
    every = [one, two, *([twins] if twins is not None else [])]
    with _closing(every):
        problems, pairs = _comparable(export, mapped, one, two)
        ties = []
        if twins is not None:
            kept = known.manifest.index
            ties = [
                Beside(f"{a}, which is tied to {b}", (twins, one), (row, kept[b]), wanted=False)
                for row, (a, b) in enumerate(known.ties)
            ]
        there = export.stored
        for a, b in tied:
            if (
                len(
                    {
                        (there.tensors[there.index[n]].shape, there.tensors[there.index[n]].dtype)
                        for n in (a, b)
                    }
                )
                > 1
            ):
                problems.append(
                    Problem(a, f"has another shape or dtype than {b}, to which config.json ties it")
                )
                continue
            name = f"{a}, which config.json ties to {b}"
            ties.append(Beside(name, (two, two), (there.index[b], there.index[a]), wanted=False))
        seen = read_beside([*pairs, *ties], settings, progress)
        ends = [finish(side, SOURCE if side is not two else EXPORT) for side in every]
    damage = [(s.name, side, why.removeprefix(f"{s.name}: ")) for s in seen for side, why in s.damage]
    damage += [
        ("", *end) for end in ends if end is not None and not any(end[1].endswith(d[2]) for d in damage)
    ]
    of_source = [Problem(name, why) for name, side, why in damage if side == SOURCE]
    problems += [Problem(name, why) for name, side, why in damage if side == EXPORT]
    problems += [Problem(s.name, _differing(s)) for s in seen if s.differing]
    own = tuple(s for s, p in zip(seen, [*pairs, *ties], strict=True) if p.wanted)
    cast = Counter(
        f"{s.specs[0].dtype} to {s.specs[1].dtype}" for s in own if s.specs[0].dtype != s.specs[1].dtype
    )
    values = {"compared": len(own), "cast": dict(cast), "unverified": one.unverified}
    if problems:
        result = failed(VALUES, problems, **values)
    elif of_source:
        result = not_done(VALUES, f"the source cannot be read: {named(of_source)}", of_source)
    else:
        casts = "".join(f", {n} cast from {how}" for how, n in cast.items())
        result = passed(VALUES, f"{len(own)} tensors are equal bit for bit{casts}", **values)
    return result, _finite(own, of_source), own


def _comparable(
    export: _Export, mapped: _Mapped, one: Opened, two: Opened
) -> tuple[list[Problem], list[Beside]]:
    """(dtypes that are not those of the source through the cast, tensors to read side by side)."""
    dtypes, exact = mapped.export.dtypes, mapped.source.exact
    there, problems, pairs = export.stored.index, [], []
    for row, spec in enumerate(one.manifest.tensors):
        other = there.get(spec.fqn)
        if other is None or export.stored.tensors[other].shape != spec.shape:
            continue  # said by the check of elements
        got, right = export.stored.tensors[other].dtype, dtypes.get(spec.fqn, spec.dtype)
        both = BY_NAME[got].is_float and BY_NAME[spec.dtype].is_float
        if got != right and (exact or not both):
            problems.append(Problem(spec.fqn, f"is {got}, {right} comes from the source"))
            continue
        pairs.append(Beside(spec.fqn, (one, two), (row, other)))
    return problems, pairs


@contextmanager
def _closing(sides: Sequence[Opened]) -> Iterator[None]:
    try:
        yield
    finally:
        for side in sides:
            side.store.close()


def _differing(seen: Seen) -> str:
    spec, where = seen.specs[1], list(seen.first or ())
    cast = f", after the cast from {seen.specs[0].dtype}" if seen.specs[0].dtype != spec.dtype else ""
    return f"{seen.differing:,} of {spec.numel:,} elements are not those of the source{cast}, as at {where}"


def _finite(seen: Sequence[Seen], of_source: Sequence[Problem]) -> Check:
    problems = [
        Problem(s.name, f"{s.nan[1]} NaN and {s.inf[1]} Inf, the source has {s.nan[0]} and {s.inf[0]}")
        for s in seen
        if not s.damage and (s.nan[1] > s.nan[0] or s.inf[1] > s.inf[0])
    ]
    held = [(s.name, s.nan[1], s.inf[1]) for s in seen if s.nan[1] or s.inf[1]]
    values: Mapping[str, object] = {
        "tensors": [{"name": name, "nan": nan, "inf": inf} for name, nan, inf in held]
    }
    if problems:
        return failed(FINITE, problems, **values)
    if of_source or any(s.damage for s in seen):
        return not_done(FINITE, "not every tensor could be read")
    if not held:
        return passed(FINITE, "no NaN, no Inf", **values)
    total = sum(nan for _, nan, _ in held), sum(inf for _, _, inf in held)
    return passed(
        FINITE, f"{total[0]} NaN and {total[1]} Inf in {len(held)} tensors, as in the source", **values
    )


def _near(
    export: _Export, base: Manifest, wanted: Wanted, settings: Settings, progress: Progress | None
) -> Check:
    one, two = Opened(export.url, export.values), Opened(str(wanted.near), base)
    with _closing([one, two]):
        try:
            found = near(one, two, settings, progress)
        except DamagedCheckpoint as error:
            return not_done(NEAR, error.message)
    low = sorted((c, n) for n, c in found.cosines if math.isfinite(c))
    far = [Problem(n, "an element is NaN or Inf") for n, c in found.cosines if not math.isfinite(c)]
    far += [
        Problem(n, f"cosine {c:.4f}, at least {wanted.threshold} is asked")
        for c, n in low
        if c < wanted.threshold
    ]
    far += [Problem(n, f"has the shape {list(a)}, {wanted.near} has {list(b)}") for n, a, b in found.shapes]
    values = {
        "compared": len(found.cosines),
        "threshold": wanted.threshold,
        "lowest": [{"name": n, "cosine": c} for c, n in low[:_MOST_COSINES]],
        "only_in_export": list(found.only_export),
        "only_in_base": list(found.only_base),
        "no_direction": list(found.zero),
    }
    if far:
        return failed(NEAR, far, **values)
    if not found.cosines:
        return not_done(NEAR, f"{wanted.near} has no tensor of a name and shape of the export")
    lacking = f"; {wanted.near} lacks {len(found.only_export)}" if found.only_export else ""
    least = f"{low[0][0]:.4f} ({low[0][1]})"
    return passed(NEAR, f"{len(found.cosines)} tensors, the lowest cosine is {least}{lacking}", **values)


def _fingerprint(export: _Export, seen: Sequence[Seen]) -> str | None:
    """Of the whole export, where each of its tensors was read."""
    if len(seen) != len(export.stored.tensors) or any(s.damage for s in seen):
        return None
    return checkpoint_fingerprint(s.fingerprinted for s in seen)
