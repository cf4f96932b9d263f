"""Compare two checkpoints by what the catalog knows of their tensors; none of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from ckptcore.catalog.models import Tensor
from ckptcore.catalog.query import resolve_checkpoint, tensor_row
from ckptcore.catalog.types import TensorRow

if TYPE_CHECKING:
    from sqlalchemy import Connection

MOST = 500  # differences that are listed


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that differs between two checkpoints, or cannot be compared.

    what: added, removed, dtype, shape, values, unknown (a side has no fingerprint), made (of several tensors
    or parts of the other side) or dropped (by a rule of the conversion). left, right: None where it is
    missing.
    """

    fqn: str
    what: str
    left: TensorRow | None
    right: TensorRow | None


@dataclass(frozen=True, slots=True)
class CatalogComparison:
    """Two checkpoints side by side, by what the catalog knows.

    Attributes:
        counts: Tensors by what differs.
        equal: Tensors with equal fingerprints.
        changes: The first tensors that differ.
        renamed: Tensors that were compared though they are called differently.
        named_by: How their names were found: ``mapping`` of the conversion, ``fingerprints``, or "".
        unmapped: Why the conversion's mapping could not be used; "" if it was, or there is none.
    """

    counts: dict[str, int]
    equal: int
    changes: tuple[TensorChange, ...]
    renamed: int = 0
    named_by: str = ""
    unmapped: str = ""


@dataclass(frozen=True)
class NameMapping:
    """How the tensors of a source are called in what was made of it.

    Attributes:
        source: The side of the source: 0 for left, 1 for right.
        renamed: Name in the source -> name in the output, of tensors that stay as they are.
        composed: Name in the output -> the source's names that it is made of.
        dropped: Name in the source -> the rule that leaves it out.
        unmapped: Why there is no mapping.
    """

    source: int = 0
    renamed: Mapping[str, str] = field(default_factory=dict)
    composed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    unmapped: str = ""


def compare(
    conn: Connection, left: str, right: str, limit: int = MOST, mapping: NameMapping | None = None
) -> CatalogComparison:
    """Compare two checkpoints by the names, dtypes, shapes and fingerprints of their tensors.

    No tensor is read: where a side has no fingerprint, the comparison is unknown. Tensors of a source are
    compared under the names that the mapping gives them. What is then left on one side only is the same
    tensor as one of the other side if both have one fingerprint that no third tensor has.
    """
    sides = [
        {
            t.fqn: t
            for r in conn.execute(select(Tensor).where(Tensor.checkpoint_id == row))
            for t in [tensor_row(r)]
        }
        for row in (resolve_checkpoint(conn, left), resolve_checkpoint(conn, right))
    ]
    counts: dict[str, int] = {}
    changes: list[TensorChange] = []

    def note(change: TensorChange) -> None:
        counts[change.what] = counts.get(change.what, 0) + 1
        if len(changes) < limit:
            changes.append(change)

    mapping = mapping or NameMapping()
    for change in _taken_out(sides, mapping):
        note(change)
    renamed = _called_alike(sides, mapping)
    same_prints = _with_equal_prints(*sides)
    for old, new in same_prints.items():
        sides[0][new] = sides[0].pop(old)
    equal = 0
    for fqn in sorted(sides[0].keys() | sides[1].keys()):
        a, b = sides[0].get(fqn), sides[1].get(fqn)
        difference = _difference(a, b)
        if difference is None:
            equal += 1
        else:
            note(TensorChange(fqn, difference, a, b))
    named_by = "mapping" if renamed else "fingerprints" if same_prints else ""
    changes.sort(key=lambda change: change.fqn)
    return CatalogComparison(
        counts, equal, tuple(changes), renamed + len(same_prints), named_by, mapping.unmapped
    )


def _taken_out(sides: list[dict[str, TensorRow]], mapping: NameMapping) -> list[TensorChange]:
    """Remove what a conversion made of several tensors, or left out, from both sides; return it."""
    source, output = sides[mapping.source], sides[1 - mapping.source]
    taken = []
    for name, sources in mapping.composed.items():
        if name in output and all(fqn in source for fqn in sources):
            taken.append(_change(name, "made", source[sources[0]], output.pop(name), mapping))
    for name in {fqn for sources in mapping.composed.values() for fqn in sources}:
        source.pop(name, None)
    gone = [name for name in mapping.dropped if name in source]
    return taken + [_change(name, "dropped", source.pop(name), None, mapping) for name in gone]


def _change(
    name: str, difference: str, source: TensorRow, output: TensorRow | None, mapping: NameMapping
) -> TensorChange:
    left, right = (source, output) if mapping.source == 0 else (output, source)
    return TensorChange(name, difference, left, right)


def _called_alike(sides: list[dict[str, TensorRow]], mapping: NameMapping) -> int:
    """Give the source's tensors the names of the output, in place; return how many."""
    source = sides[mapping.source]
    stored = {old: source.pop(old) for old in mapping.renamed if old in source}
    for old, row in stored.items():
        source[mapping.renamed[old]] = row
    return len(stored)


def _with_equal_prints(left: Mapping[str, TensorRow], right: Mapping[str, TensorRow]) -> dict[str, str]:
    """Return left name -> right name of tensors that one side has each, with a fingerprint of their own."""
    prints: list[dict[tuple[Any, ...], str | None]] = []
    for side, opposite in ((left, right), (right, left)):
        names: dict[tuple[Any, ...], str | None] = {}
        for name, row in side.items():
            if row.fingerprint is not None:
                key = (row.fingerprint, row.dtype, row.shape)
                # None: several tensors (of zeros, say) have the fingerprint, which then pairs none of them.
                names[key] = None if key in names or name in opposite else name
        prints.append(names)
    pairs = ((name, prints[1].get(key)) for key, name in prints[0].items() if name is not None)
    return {old: new for old, new in pairs if new is not None}


def _difference(a: TensorRow | None, b: TensorRow | None) -> str | None:
    if a is None or b is None:
        return "added" if a is None else "removed"
    if a.trouble or b.trouble:
        return "unknown"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    if a.fingerprint is None or b.fingerprint is None:
        return "unknown"
    return None if a.fingerprint == b.fingerprint else "values"
