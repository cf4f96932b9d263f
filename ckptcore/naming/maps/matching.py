"""Match the rules of a map with tensors: make names and shapes, and report what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import product
from math import prod

import numpy as np

from ckptcore.core.manifest import TensorSpec, row_major
from ckptcore.errors import NameMismatch
from ckptcore.naming.maps.classes import Class, Seen, Takers, keys_in, placed, shape_in
from ckptcore.naming.maps.declaration import ArchMap, Term
from ckptcore.naming.maps.index_space import full_boxes
from ckptcore.naming.maps.tensor_name import Templates
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.text import listed

Shape = tuple[int, ...]
_FEW = 5
_OF_ALL = frozenset({"experts"})  # axes that have one size, in whatever rule they are
_MOST_INDICES = 100_000  # of one axis, whatever a config says


@dataclass
class Made:
    """A tensor that a map makes.

    Attributes:
        name: Name in the new world.
        shape: Global shape, elements.
        dtype: Stored dtype.
        rule: Name of the rule that makes it.
        add: Value added to every element.
        sources: Positions of the tensors that it is made of.
        filled: Elements that these give it.
        same: Whether it is one tensor's elements in their order and shape.
    """

    name: str
    shape: Shape
    dtype: str
    rule: str
    add: int
    sources: list[int] = field(default_factory=list)
    filled: int = 0
    same: bool = True

    @property
    def numel(self) -> int:
        """Elements of its shape."""
        return TensorSpec(self.name, self.dtype, self.shape).numel


@dataclass(frozen=True)
class Matched:
    """The result of matching a map with tensors.

    Attributes:
        map: The map.
        made: The tensors of the new world.
        classes: Classes of the tensors that are mapped.
        dropped: Position -> why the tensor is dropped.
        left: Positions of tensors that no rule takes.
        twice: (position, rules) of those that several take.
        only_zero: Position of a tensor that is dropped -> why it must be all zero.
        parts: (position, reason, elements) of tensors of which a part is dropped.
        unused: Rules that must take tensors and do not.
        guessed: (axis, size) that neither numbers nor shapes give.
        absent: Tensors that rules make for other indices, and not for these.
        problems: Whatever else does not fit.
    """

    map: ArchMap
    made: tuple[Made, ...]
    classes: tuple[Class, ...]
    dropped: Mapping[int, str]
    left: tuple[int, ...]
    twice: tuple[tuple[int, tuple[str, ...]], ...]
    parts: tuple[tuple[int, str, int], ...]
    unused: tuple[str, ...]
    guessed: tuple[tuple[str, int], ...]
    absent: tuple[str, ...]
    problems: tuple[str, ...]
    only_zero: Mapping[int, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether every tensor is used once, and every tensor that is made is complete."""
        return self.fits_in_part and not (self.unused or self.absent)

    @property
    def fits_in_part(self) -> bool:
        """Whether every tensor is used once, though others may be missing."""
        return not (self.left or self.twice or self.problems)


def match(
    rules: ArchMap,
    tensors: Sequence[TensorSpec],
    numbers: Mapping[str, int],
    templates: Templates | None = None,
) -> Matched:
    """Match a map with tensors, by their names and shapes.

    Args:
        rules: The map.
        tensors: All that are to be mapped.
        numbers: Of the model, by the names that rules use.
        templates: Of the tensors' names, where they are known already.
    """
    templates = templates or Templates.of(t.fqn for t in tensors)
    taken = Takers(rules, tensors, numbers, templates)
    made, seen, problems = _make(taken, tensors)
    return Matched(
        rules,
        tuple(made),
        tuple(taken.classes),
        taken.dropped,
        tuple(np.flatnonzero(taken.count == 0).tolist()),
        tuple(taken.twice()),
        tuple(taken.parts),
        tuple(taken.unused(seen)),
        tuple(sorted(taken.guessed.items())),
        tuple(_absent(taken, seen)),
        (*taken.problems, *problems, *_disagreeing(taken.classes, tensors)),
        taken.only_zero,
    )


def require_fit(
    matched: Matched, tensors: Sequence[TensorSpec], *, part: bool = False, hint: str = ""
) -> None:
    """Require that everything fits.

    Args:
        matched: A map and tensors.
        tensors: The tensors.
        part: Whether a part of a model is enough.
        hint: The next step, where one is known.

    Raises:
        NameMismatch: With the names that are missing and left over.
    """
    if matched.fits or (part and matched.fits_in_part):
        return
    left = [tensors[t].fqn for t in matched.left]
    twice = [f"{tensors[t].fqn} ({' and '.join(rules)})" for t, rules in matched.twice]
    kinds = {
        "no rule for": left,
        "two rules for": twice,
        "nothing for the rules": list(matched.unused),
        "": [*matched.absent, *matched.problems],
    }
    parts = [f"{kind} {listed(names)}".strip() for kind, names in kinds.items() if names]
    where = f"{matched.map.arch} ({matched.map.world} to {matched.map.to})"
    raise NameMismatch(
        f"the checkpoint does not fit the map of {where}: {'; '.join(parts)}",
        hint=hint or "try another --arch, or --names stored to keep the names as they are",
        unexpected=left,
        missing=list(matched.unused),
        broken=[*twice, *matched.absent, *matched.problems],
    )


def _disagreeing(classes: Sequence[Class], tensors: Sequence[TensorSpec]) -> list[str]:
    """Return sizes that differ between tensors: four experts by the router, three by their own."""
    found: dict[str, dict[int, str]] = {}
    for of in classes:
        for axis in _OF_ALL & of.sizes.keys():
            found.setdefault(axis, {}).setdefault(of.sizes[axis], tensors[int(of.rows[0])].fqn)
    for of in classes:
        for axis in (_OF_ALL & of.index.keys() & found.keys()) - of.sizes.keys():
            last = int(of.index[axis].argmax())
            if of.index[axis][last] >= max(found[axis]):  # fewer of them are said by what they do not make
                found[axis].setdefault(int(of.index[axis][last]) + 1, tensors[int(of.rows[last])].fqn)
    return [
        f"{axis} is {' and '.join(f'{size} by {name}' for size, name in sorted(sizes.items()))}"
        for axis, sizes in found.items()
        if len(sizes) > 1
    ]


def _make(taken: Takers, tensors: Sequence[TensorSpec]) -> tuple[list[Made], Seen, list[str]]:
    """Return the tensors that are made, the indices of each term, and what does not fit together."""
    made: dict[str, Made] = {}
    begun: dict[str, tuple[Class, int, int]] = {}  # name -> (class, term of `to`, position) of its first part
    seen: dict[str, set[tuple[int, ...]]] = {}
    problems: list[str] = []
    for of in taken.classes:
        shape = tensors[int(of.rows[0])].shape
        at = np.arange(len(of.rows))
        boxes = full_boxes(at, np.ones(len(at), np.int64), shape)
        for number, p in placed(boxes, of, at):
            target = shape_in(of, number)
            key, names = keys_in(of, number, p, at)
            columns = [p.names.index(each.axis) for each in of.rule.to[number].name.indices]
            made_at = seen.setdefault(str(of.rule.to[number]), set())
            made_at.update(map(tuple, p.lo[:, columns].tolist()))
            rank = len(target)
            count = p.ext[:, :rank].prod(axis=1)
            same = (p.start == 0) & (count == np.prod(shape, dtype=np.int64)) & (target == shape)
            same &= (p.step[:, :rank] == np.array(row_major(target), np.int64)).all(axis=1)
            for k, row, elements, alike in zip(
                key.tolist(), p.row.tolist(), count.tolist(), same.tolist(), strict=True
            ):
                name, source = names[k], int(of.rows[row])
                one = made.get(name)
                if one is None:
                    dtype = tensors[source].dtype
                    one = made[name] = Made(name, target, dtype, of.rule.name, of.rule.add)
                    begun[name] = of, number, row
                elif one.shape != target or one.dtype != tensors[source].dtype:
                    first = tensors[one.sources[0]]
                    problems.append(
                        f"{name} would be {one.dtype} {list(one.shape)} by {first.fqn} and "
                        f"{tensors[source].dtype} {list(target)} by {tensors[source].fqn}"
                    )
                if not one.sources or one.sources[-1] != source:
                    one.sources.append(source)
                one.same = one.same and alike and one.filled == 0
                one.filled += elements
    stored_names = {t.fqn for t in tensors}
    for one in made.values():
        one.sources = list(dict.fromkeys(one.sources))
        if one.filled != one.numel:
            problems.append(_gap(one, begun[one.name], tensors, stored_names, taken.numbers))
    return sorted(made.values(), key=lambda m: min(m.sources)), seen, problems


def _gap(
    one: Made,
    begun: tuple[Class, int, int],
    tensors: Sequence[TensorSpec],
    stored_names: set[str],
    numbers: Mapping[str, int],
) -> str:
    """Return why a tensor that is made is incomplete, with the names that are missing."""
    of, number, row = begun
    by = ", ".join(tensors[s].fqn for s in one.sources[:_FEW])
    if one.filled > one.numel:
        return f"{one.name} has elements of several tensors: {by}"
    kept = {i.axis: int(of.index[i.axis][row]) for i in of.rule.to[number].name.indices if i.axis in of.index}
    missing: list[str] = []
    for term in of.side:
        axes = [i.axis for i in term.name.indices]
        ranges = [[kept[a]] if a in kept else range(min(of.sizes.get(a, 0), 100_000)) for a in axes]
        inside = {k: v[row][None, :] for k, v in of.inside.items()}
        for values in product(*ranges):
            index = {
                i.axis: np.array([v + i.shifted(numbers) if i.shift else v])
                for i, v in zip(term.name.indices, values, strict=True)
            }
            (name,) = term.name.spell(index, of.wild, inside, 1)
            if name not in stored_names:
                missing.append(name)
            if len(missing) > _FEW:
                break
    what = f"missing: {listed(missing)}" if missing else f"there is {by}"
    return f"{one.name} is incomplete ({one.filled} of {one.numel} elements): {what}"


def _absent(taken: Takers, seen: Seen) -> list[str]:
    """Return indices, mostly layers, for which a rule makes some of its tensors, or none though it must."""
    ends: dict[str, int] = {}
    for terms in taken.made.values():
        for term in terms:
            for n, each in enumerate(term.name.indices):
                for values in seen.get(str(term), ()):
                    ends[each.axis] = max(ends.get(each.axis, 0), values[n] + 1)
    for of in taken.classes:
        for axis in _OF_ALL & ends.keys() & of.sizes.keys():
            ends[axis] = max(ends[axis], of.sizes[axis])
    sizes = {axis: taken.numbers.get(axis, end) for axis, end in ends.items()}
    out: dict[str, None] = {}
    for rule, terms in taken.made.items():
        for axes in dict.fromkeys(tuple(i.axis for i in t.name.indices) for t in terms if t.name.indices):
            alike = [t for t in terms if tuple(i.axis for i in t.name.indices) == axes]
            every = set[tuple[int, ...]]().union(*(seen.get(str(t), set()) for t in alike))
            if not every:
                continue
            firsts = {values[0] for values in every}
            if taken.everywhere.get(rule) == axes[0]:
                firsts = set(range(min(sizes[axes[0]], _MOST_INDICES)))
            count = prod([len(firsts), *(sizes[a] for a in axes[1:])])
            if count > 2 * len(every) * len(alike) + _MOST_INDICES:
                out[f"{len(every)} of {count} are there of {alike[0]}"] = None
                continue
            if len(axes) > 1:
                rest = [range(sizes[a]) for a in axes[1:]]
                every = {(first, *values) for first in firsts for values in product(*rest)}
            else:
                every = {(first,) for first in firsts}
            for term in alike:
                gone = sorted(every - seen.get(str(term), set()))
                if gone:
                    names = [_tensor_name(term, values, taken.numbers) for values in gone[:_FEW]]
                    more = f" and {len(gone) - _FEW} more" if len(gone) > _FEW else ""
                    out[f"nothing makes {', '.join(names)}{more}"] = None
    return list(out)


def _tensor_name(term: Term, values: tuple[int, ...], numbers: Mapping[str, int]) -> str:
    """Return the name that a term makes for some indices; wild parts stay as they are written."""
    index = {
        i.axis: np.array([v + i.shifted(numbers)]) for i, v in zip(term.name.indices, values, strict=True)
    }
    wild = {label: f"{{{label}}}" for label in term.name.wild}
    return term.name.spell(index, wild, {w: np.zeros((1, 0), np.int64) for w in wild}, 1)[0]
