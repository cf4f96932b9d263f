"""Compare two checkpoints, whatever their formats and topologies.

1. Both must be complete (level ``coverage``). Names are aligned: the model part, renames, ties, globs, and
   two forms of one trainer (`ckptcore.naming.trainer_forms`).
2. Names, dtypes, shapes and plain values are compared from metadata.
3. Tensors that both have, with equal shape, and with equal dtype or two float dtypes, are read side by side
   (`ckptcore.comparison.tensor_compare`).
4. What a conversion leaves out is kept apart from what differs: a reshard leaves out state that belongs to
   the ranks that saved it. The record of a conversion, its plan or its JSON answer, lists what was left out
   and why; without one the same rules are applied to the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptcore.checking.check import require_complete
from ckptcore.comparison.export_sides import stated_ties
from ckptcore.comparison.object_leaves import Leaves, as_tensor, compare, leaves
from ckptcore.comparison.opened import OpenSide, labelled
from ckptcore.comparison.result import (
    DTYPE,
    ONLY_A,
    ONLY_B,
    SHAPE,
    Difference,
    DroppedName,
    ObjectDifference,
    Side,
    TensorDifference,
)
from ckptcore.comparison.tensor_compare import Pair, walk
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.subset import select
from ckptcore.errors import CkptError, Finding, UsageError
from ckptcore.formats import by_name
from ckptcore.naming.model_part import find_model, in_model
from ckptcore.naming.rename import ModelPart, apply_renames, matches, remap, strip_wrappers
from ckptcore.naming.trainer_forms import AS_STORED, FormNames, common_names, set_by_reshard
from ckptcore.planning.plan import load_head
from ckptcore.planning.rank_local_state import bound_names
from ckptcore.planning.request import Settings
from ckptcore.reading.rereading import rereading
from ckptcore.store import open_store
from ckptcore.utils.foreign_text import InvalidText, load_json, parsing
from ckptcore.utils.text import count
from ckptcore.utils.workers import Progress

Pairs = Sequence[tuple[str, str]]
_MAX_RECORD = 1 << 30  # bytes


@dataclass(frozen=True)
class DiffRules:
    """Which tensors are compared, and under which names.

    Attributes:
        model: Compare the model parts alone, with wrappers removed from names.
        prefixes: The prefix of the model in A and in B; where one is missing, it is detected.
        rename: (old, new) for A's names.
        tie: (gone, kept): a side that lacks ``gone`` is compared as if ``kept`` were stored there, too.
        include: Globs on the names that are compared.
        exclude: Globs on the names that are not compared.
        recorded: (stored name, rule) of what a conversion of one side to the other left out.
        ignore_dropped: Count what a conversion leaves out as equal without its record.
        by_itself: Why ``model`` is set, where nobody asked for it.
    """

    model: bool = False
    prefixes: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    tie: tuple[tuple[str, str], ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    recorded: tuple[tuple[str, str], ...] = ()
    ignore_dropped: bool = False
    by_itself: str = ""

    def dropped(self, *names: str) -> str:
        """Return the rule that excludes a tensor or value with these names; empty if none does."""
        # A name is as compared or as stored: either may be what the user saw in a listing.
        if self.include and not any(matches(n, self.include) for n in names):
            return "matches no --include"
        hit = next((g for g in self.exclude for n in names if matches(n, [g])), None)
        return f"matches --exclude {hit}" if hit else ""


@rereading
def diff(
    a: Manifest,
    b: Manifest,
    rules: DiffRules,
    settings: Settings,
    progress: Progress | None = None,
    urls: tuple[str, str] | None = None,
) -> Difference:
    """Compare two checkpoints.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        rules: Which tensors are compared, and under which names.
        settings: Memory, threads and device.
        progress: Called with the number of bytes read.
        urls: Their names in the result and in errors; None means their roots.

    Returns:
        The differences; see `ckptcore.diff`.
    """
    urls = urls or (a.root, b.root)
    # Names that the user states must not be changed once more by what the forms of trainers have in common.
    named_by_user = rules.model or rules.rename  # then the user says which names are equal
    forms = (AS_STORED, AS_STORED) if named_by_user else common_names(a, b)
    sides = (_prepare(a, "A", urls[0], rules, 0, forms[0]), _prepare(b, "B", urls[1], rules, 1, forms[1]))
    _tie(sides, rules.tie)
    _pick(sides, rules)
    skipped = _without_objects(sides, rules)
    opened = [OpenSide(side.label, side.named) for side in sides]
    try:
        arrays = _arrays(sides[0], sides[1], opened[1]) + _arrays(sides[1], sides[0], opened[0])
        different, equal_objects, refused = compare(sides[0].objects, sides[1].objects)
        tensors, pairs = _match(*sides)
        compared = walk(opened[0], opened[1], pairs, settings, progress)
    finally:
        # Both are closed even if only one failed, and what was read without a checksum is recorded of both.
        for side, reading in zip(sides, opened, strict=True):
            side.unverified = reading.unverified
            reading.store.close()
    differences = {d.name: d for d in [*tensors, *compared]}
    # Names in the order of A; what only B has comes after it, in B's order.
    order = [*sides[0].rows, *(n for n in sides[1].rows if n not in sides[0].rows)]
    gone = _dropped([differences[name] for name in order if name in differences], different, sides, rules)
    # Equal tensors are named only if others moved: then they are the frozen ones.
    trained = any(difference.has_moved for difference in compared)
    return Difference(
        sides[0].result(),
        sides[1].result(),
        tuple(differences[name] for name in order if name in differences and name not in gone),
        tuple(o for o in different if o.name not in gone),
        len(pairs) - len(compared),
        equal_objects + arrays,
        (*skipped, *refused),
        tuple(gone.values()),
        rules.ignore_dropped,
        tuple(pair.name for pair in pairs if pair.name not in differences) if trained else (),
        rules.by_itself,
    )


def recorded_in(record: str) -> tuple[tuple[str, str], ...]:
    """Return (stored name, rule) of what a conversion left out, by its record.

    Args:
        record: Folder of a saved plan, or a file with the JSON that plan, reshard or consolidate printed.

    Raises:
        UsageError: There is no such record.
    """
    path = Path(record)
    if path.is_dir():
        try:
            with closing(open_store(record)) as store:
                return load_head(store).dropped
        except CkptError as error:
            raise UsageError(f"cannot use {record} as a record: {error.message}") from error
    try:
        if path.stat().st_size > _MAX_RECORD:
            raise UsageError(f"cannot use {record} as a record: it has more than {_MAX_RECORD} bytes")
        with parsing("the record of a conversion"):
            rows = load_json(path.read_bytes())["dropped"]
            pairs = tuple((str(name), str(rule)) for name, rule in rows)
    except (OSError, InvalidText) as error:
        raise UsageError(
            f"cannot use {record} as a record: {error}",
            hint="name the folder of `ckptcore plan --save DIR`, or what `--output json` printed",
        ) from error
    return pairs


def model_alone(a: Manifest, b: Manifest) -> tuple[str, Pairs]:
    """Return why only the model parts are worth comparing: one side is an export of a training checkpoint.

    That side is safetensors, and all of it is a model. At least half of its names are those of the other
    side's model, without the wrappers, and the other side holds more, or other names.

    Returns:
        The reason, empty where the checkpoints are compared as they are stored; and the ties that the card of
        the export states, of names that the other side has.
    """
    for training, export, label in ((a, b, "B"), (b, a, "A")):
        # Two exports, or two training checkpoints, have equal parts: then all of both is compared.
        if export.format != "safetensors" or training.format == "safetensors":
            continue
        names = {t.fqn for t in export.tensors}
        stored = {t.fqn for t in training.tensors}
        # An export has nothing beside its model; a safetensors file with optimizer state is no export.
        if names == stored or _model_names(export) != names:
            continue
        trained = _model_names(training)
        if 2 * len(names & trained) >= len(names):
            # Only a tie whose kept name is exported and whose gone name
            # is in the model is a tie of these two.
            ties = tuple(tie for tie in stated_ties(export) if tie[0] in trained - names and tie[1] in names)
            reason = f"{label} is a model alone, so only the model parts are compared, as with --model"
            spelled = "".join(f", --tie {tied}={owner}" for tied, owner in ties)
            return f"{reason}{spelled}", ties
    return "", ()


def _model_names(manifest: Manifest) -> set[str]:
    inside = in_model(manifest, None)
    return {strip_wrappers(inner) for t in manifest.tensors if (inner := inside(t.fqn)) is not None}


@dataclass
class _Side:
    """One checkpoint, with the names under which it is compared."""

    label: str
    url: str
    source: Manifest
    named: Manifest
    stored: dict[str, str]  # compared name -> stored name
    rows: dict[str, int]  # compared name -> row of ``named``
    model: ModelPart | None
    left_out: list[tuple[str, str]]
    warnings: tuple[Finding, ...]
    unread: frozenset[str]  # compared names of tensors that cannot be read
    objects: Leaves = field(default_factory=dict)
    unverified: int = 0
    form: str = ""

    def spec(self, name: str) -> TensorSpec:
        """Return a tensor under its stored name."""
        return replace(self.named.tensors[self.rows[name]], fqn=self.stored[name])

    def result(self) -> Side:
        """Return the side in the form of the result."""
        specs = [self.named.tensors[row] for row in self.rows.values()]
        return Side(
            self.url,
            self.source.format,
            len(specs),
            sum(s.nbytes for s in specs),
            self.model.because if self.model else "",
            tuple(self.left_out),
            self.unverified,
            self.warnings,
            self.form,
        )


def _prepare(
    manifest: Manifest, label: str, url: str, rules: DiffRules, number: int, form: FormNames
) -> _Side:
    """Name what of one side is compared, and require that it is complete."""
    rename = rules.rename if number == 0 else ()
    prefix = rules.prefixes[number] if number < len(rules.prefixes) else None

    # Without --model a name is what it is stored as.
    inside = in_model(manifest, prefix) if rules.model else str

    def compared(name: str) -> str | None:
        """Return the name under which a stored tensor is compared; None if it is not compared."""
        inner = inside(name)
        if inner is None:
            return None
        return form.name(apply_renames(strip_wrappers(inner) if rules.model else inner, rename))

    def selected(name: str) -> bool:
        compared_name = compared(name)
        return compared_name is not None and not rules.dropped(compared_name)

    with labelled(f"{label} ({url})"):
        # Only errors of what is compared count: a damaged optimizer is no reason against comparing weights.
        report = require_complete(manifest, selected)
        model = find_model(manifest, prefix) if rules.model else None
        mapped = remap(manifest, model=model, rename=rename)
    before = [t.fqn for t in mapped.manifest.tensors]
    new = [form.name(name) for name in before]
    named = mapped.manifest if new == before else select(mapped.manifest, range(len(new)), new)
    origin = {n: o for o, n in mapped.renamed}
    stored = {n: origin.get(b, b) for n, b in zip(new, before, strict=True)}
    warnings = tuple(f for f in report.findings if f.severity == "warning")
    return _Side(
        f"{label} ({url})",
        url,
        manifest,
        named,
        stored,
        {n: i for i, n in enumerate(new)},
        model,
        [(d.fqn, d.rule) for d in mapped.dropped],
        warnings,
        frozenset(n for name in manifest.unread if (n := compared(name)) is not None),
        {}
        # With --model only tensors are compared: plain values are no part of a model.
        if rules.model
        else leaves(manifest.blobs, lambda path: form.name(apply_renames(path, rename)), form.value),
        form=form.because,
    )


def _without_objects(sides: tuple[_Side, _Side], rules: DiffRules) -> list[tuple[str, str]]:
    """Drop the objects if one side's format cannot store any; return (name, reason)."""
    # A format without plain values lacks all of them by design, so
    # each would be a difference without meaning.
    without = [s for s in sides if not by_name(s.source.format).abilities.objects]
    if rules.model or not without or not any(s.objects for s in sides):
        return []
    total = sum(len(s.objects) for s in sides)
    for side in sides:
        side.objects = {}
    formats = " and ".join(dict.fromkeys(s.source.format for s in without))
    return [(count(total, "plain value"), f"{formats} stores no plain values")]


def _tie(sides: tuple[_Side, _Side], ties: Pairs) -> None:
    """Give a side that lacks a tied name the tensor that it is tied to."""
    for tied_name, stored_name in ties:
        for name in (tied_name, stored_name):
            if not any(name in side.rows for side in sides):
                # A typo in a tie would otherwise pass as a side that has the tensor anyway.
                raise UsageError(f"--tie names {name}, which neither side has")
        for side in sides:
            if tied_name not in side.rows and stored_name in side.rows:
                # The same bytes under a second name; the row of the first stays as it is.
                names = [t.fqn for t in side.named.tensors]
                row = side.rows[stored_name]
                side.named = select(side.named, [*range(len(names)), row], [*names, tied_name])
                side.rows[tied_name], side.stored[tied_name] = len(names), side.stored[stored_name]


def _pick(sides: tuple[_Side, _Side], rules: DiffRules) -> None:
    """Apply the globs; raise `UsageError` for a glob that matches nothing, and if nothing is left."""
    # Roots of objects count: a glob may name the dict, while its leaves are what is compared.
    names = {
        n for s in sides for n in (*s.rows, *s.unread, *s.objects, *(o.root for o in s.objects.values()))
    }
    for option, globs in (("--include", rules.include), ("--exclude", rules.exclude)):
        for glob in globs:
            # A glob without a hit is a typo, and would silently compare too much or too little.
            if not any(matches(name, [glob]) for name in names):
                raise UsageError(
                    f"{option} {glob} matches nothing on either side",
                    hint="globs apply to the names after --rename and --model"
                    + "".join(f", and as in {s.form}" for s in sides if s.form)
                    + "; `ckptcore inspect` lists the stored names",
                )
    for side in sides:
        for name in list(side.rows):
            rule = rules.dropped(name)
            if rule:
                side.left_out.append((side.stored[name], rule))
                del side.rows[name]
        dropped = {n: rule for n, o in side.objects.items() if (rule := rules.dropped(n, o.root))}
        side.left_out += dropped.items()
        side.objects = {n: o for n, o in side.objects.items() if n not in dropped}
    if not any(side.rows or side.objects for side in sides):
        raise UsageError("nothing is left to compare", hint="check --include and --exclude")


def _arrays(object_side: _Side, tensor_side: _Side, opened: OpenSide) -> int:
    """Drop arrays that are a plain value on one side and a tensor of the same bits on the other.

    A ``.pt`` that `torch.load` opens with ``weights_only`` has such arrays. Return how many were dropped.
    """
    # Only names that one side has as a value and the other as a tensor; in any other case kinds differ.
    equal = 0
    for name in [n for n in object_side.objects if n in tensor_side.rows and n not in object_side.rows]:
        spec, values = tensor_side.spec(name), object_side.objects[name].values
        array = as_tensor(values[0]) if len(values) == 1 else None
        if array is None or array[:2] != (spec.dtype, spec.shape):
            continue
        # Compared bit by bit: the dtypes are equal, and NaN is then equal to itself.
        if opened.read(tensor_side.rows[name]) == array[2]:
            del object_side.objects[name], tensor_side.rows[name]
            equal += 1
    return equal


def _dropped(
    tensors: Sequence[TensorDifference],
    objects: Sequence[ObjectDifference],
    sides: tuple[_Side, _Side],
    rules: DiffRules,
) -> dict[str, DroppedName]:
    """Return what one side lacks because a conversion leaves it out, by compared name."""
    # Only what one side lacks can have been left out; a value that differs is a difference.
    by_kind, recorded = {ONLY_A: sides[0], ONLY_B: sides[1]}, dict(rules.recorded)
    missing = [
        (t.name, t.what[0], by_kind[t.what[0]].stored[t.name])
        for t in tensors
        if t.what in ((ONLY_A,), (ONLY_B,))
    ]
    missing += [
        (o.name, o.what, by_kind[o.what].objects[o.name].stored) for o in objects if o.what in by_kind
    ]
    ruled = {kind: bound_names(by_kind[kind].source) for kind in {kind for _, kind, _ in missing}}
    gone: dict[str, DroppedName] = {}
    for name, kind, stored in missing:
        why = recorded.get(stored, ruled[kind].get(stored))
        if why is not None:
            gone[name] = DroppedName(name, kind, why, stored in recorded)
    for lost in {d.what for d in gone.values()}:
        output = sides[1 if lost == ONLY_A else 0]
        for difference in objects:
            leaf = output.objects.get(difference.name)
            why = set_by_reshard(difference.name, leaf.values) if leaf is not None else ""
            if why:
                gone[difference.name] = DroppedName(
                    difference.name, difference.what, why, bool(rules.recorded)
                )
    return gone


def _match(a: _Side, b: _Side) -> tuple[list[TensorDifference], list[Pair]]:
    """Return (differences in metadata, pairs whose bytes must be read)."""
    different = [TensorDifference(n, (ONLY_A,), a.spec(n), None) for n in a.rows if n not in b.rows]
    different += [TensorDifference(n, (ONLY_B,), None, b.spec(n)) for n in b.rows if n not in a.rows]
    same = []
    for name in a.rows:
        if name not in b.rows:
            continue
        spec_a, spec_b = a.spec(name), b.spec(name)
        # Tensors of two float dtypes are compared by value: a conversion to bfloat16 is no other model.
        kinds = ((DTYPE, spec_a.dtype != spec_b.dtype), (SHAPE, spec_a.shape != spec_b.shape))
        differing_kinds = tuple(kind for kind, differs in kinds if differs)
        floats = all(BY_NAME[spec.dtype].is_float for spec in (spec_a, spec_b))
        if differing_kinds and not (differing_kinds == (DTYPE,) and floats):
            different.append(TensorDifference(name, differing_kinds, spec_a, spec_b))
        else:
            same.append(Pair(name, spec_a, spec_b, (a.rows[name], b.rows[name])))
    return different, same
