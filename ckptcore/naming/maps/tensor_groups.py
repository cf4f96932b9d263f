"""Group stored tensors into groups: one term of a rule takes them, and their shapes and sizes are equal.

A group is handled at once, in columns, whatever the number of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from ckptcore.core.manifest import Ints, TensorSpec
from ckptcore.naming.maps.declaration import ArchMap, Rule, Term
from ckptcore.naming.maps.index_space import Pieces, closed, joined, opened, single, with_index
from ckptcore.naming.maps.layout import AxisLayout, size_of, solved
from ckptcore.naming.maps.sizes import UnknownNumber, value_of
from ckptcore.naming.maps.tensor_name import NameMatch, Templates
from ckptcore.utils.distinct_values import unique

Shape = tuple[int, ...]
UNKNOWN = " is not known"  # the end of a problem with a number that no config, name or shape says
# Term of `to`, as it is written -> indices of what it makes.
IndicesByTerm = Mapping[str, set[tuple[int, ...]]]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one shape that one term of a rule takes, with their axes.

    Attributes:
        rule: The rule that takes them.
        side: The spelling of the rule.
        term: The term of that spelling.
        rows: int64 [n], the tensors.
        index: Axis -> int64 [n], their indices.
        wild: Text of each wild part of their names, see `NameMatch`.
        inside: Numbers in these texts, see `NameMatch`.
        sizes: Axis -> elements, of every axis of the rule.
        rank: Dims in place of the ellipsis.
        shifts: Per term of ``to``: axis -> what is added to an index in the name.
    """

    rule: Rule
    side: tuple[Term, ...]
    term: Term
    rows: Ints
    index: Mapping[str, Ints]
    wild: Mapping[str, str]
    inside: Mapping[str, Ints]
    sizes: Mapping[str, int]
    rank: int
    shifts: tuple[Mapping[str, int], ...]

    @property
    def layout(self) -> AxisLayout:
        """Layout of the tensors, without an ellipsis."""
        return self.term.layout.filled(self.rank)


def placed(pieces: Pieces, group: TensorGroup, members: Ints) -> Iterator[tuple[int, Pieces]]:
    """Yield where boxes of a group's tensors are in what is made of them.

    Args:
        pieces: Boxes over the dims of the group's tensors.
        group: The group.
        members: Number of a box -> number of its tensor in the group.

    Yields:
        The number of a term of ``to``, and the boxes over its dims, with a column per index of its name
        behind them.
    """
    for axis, value in group.index.items():
        pieces = with_index(pieces, axis, value[members[pieces.row]])
    blocks: dict[tuple[str, ...], list[Pieces]] = {}
    for block in opened(pieces, group.layout, group.sizes):
        if len(block) and not group.rule.drops.keys() & set(block.names):
            blocks.setdefault(block.names, []).append(block)
    for names, parts in blocks.items():
        axes = frozenset(names)
        number = next(n for n, term in enumerate(group.rule.to) if _has(group, term, axes))
        term = group.rule.to[number]
        boxes = joined(parts)
        for index in term.name.indices:
            boxes = single(boxes, index.axis)
        yield number, closed(boxes, term.layout.filled(group.rank), group.sizes)


def shape_in(group: TensorGroup, number: int) -> Shape:
    """Return the shape of the tensors that a term of ``to`` makes."""
    return sizes_of(group.rule.to[number].layout.filled(group.rank), group.sizes)


def keys_in(group: TensorGroup, number: int, pieces: Pieces, members: Ints) -> tuple[Ints, list[str]]:
    """Return the tensor that each box is part of: (int64 [n], the names that these number)."""
    name = group.rule.to[number].name
    columns = [
        pieces.lo[:, pieces.names.index(index_field.axis)] + group.shifts[number].get(index_field.axis, 0)
        for index_field in name.indices
    ]
    width = len(columns)
    spans: dict[str, tuple[int, int]] = {}
    for label in name.wild:
        texts = group.inside[label][members[pieces.row]]
        spans[label] = len(columns), len(columns) + texts.shape[1]
        columns += list(texts.T)
    if not columns:
        return np.zeros(len(pieces), np.int64), name.spell({}, group.wild, group.inside, 1)
    keys, which = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    index = {index_field.axis: keys[:, n] for n, index_field in enumerate(name.indices[:width])}
    inside = {label: keys[:, a:b] for label, (a, b) in spans.items()}
    return which.reshape(-1).astype(np.int64), name.spell(index, group.wild, inside, len(keys))


def _has(group: TensorGroup, term: Term, axes: frozenset[str]) -> bool:
    """Return whether a term has the block of these axes."""
    indices = frozenset(i.axis for i in term.name.indices)
    blocks = term.layout.filled(group.rank).blocks
    return any((block | indices) - group.rule.repeats == axes for block in blocks)


class RuleAssignment:
    """The tensors that every rule of a map takes.

    Attributes:
        groups: Groups of the tensors that are mapped.
        dropped: Position -> why the tensor is dropped.
        only_zero: Position of a tensor that is dropped -> why it must be all zero.
        parts: (position, reason, elements) of tensors of which a part is dropped.
        guessed: Axis -> size that neither numbers nor shapes give.
    """

    def __init__(
        self, rules: ArchMap, tensors: Sequence[TensorSpec], numbers: Mapping[str, int], templates: Templates
    ) -> None:
        self._tensors, self._templates, self.numbers = tensors, templates, numbers
        shapes: dict[Shape, int] = {}
        self._shape = np.array([shapes.setdefault(t.shape, len(shapes)) for t in tensors], np.int64)
        self._shapes = tuple(shapes)
        self._rank = np.array([len(s) for s in self._shapes], np.int64)
        self._by: list[tuple[str, Ints]] = []
        self.count = np.zeros(len(tensors), np.int64)
        self.groups: list[TensorGroup] = []
        self.dropped: dict[int, str] = {}
        self.only_zero: dict[int, str] = {}
        self.parts: list[tuple[int, str, int]] = []
        self.guessed: dict[str, int] = {}
        self.problems: list[str] = []
        self.needed: dict[str, str] = {}  # rule that must take something -> a name that it takes
        self.part: dict[str, str] = {r.name: r.part for r in rules.rules}
        self.terms_of_rule: dict[str, tuple[Term, ...]] = {}  # rule -> what it makes
        self.everywhere: dict[str, str] = {}  # rule that must take something for each index -> its axis
        # Rule -> what its inverses make, one for the layers of each kind: together they have every index.
        self.by_kind: dict[str, list[str]] = {}
        # What a rule must make beside tensors that tell a layer's kind -> their indices.
        self.beside: list[tuple[Term, set[int]]] = []
        # A declared rule is several here, one for each choice of texts in its names. The first of them states
        # what must be there (`_rules_of_form` makes the others optional): hence `setdefault`.
        for rule in rules.rules:
            if rule.presence != "optional":
                self.needed.setdefault(rule.name, str(rule.spellings[0][0]))
            self.terms_of_rule.setdefault(rule.name, rule.to)
            if rule.presence == "every" and rule.only_beside is not None:
                self.by_kind.setdefault(rule.name, []).append(str(rule.to[0]))
            if rule.presence == "every" and rule.to and rule.to[0].name.indices:
                self.everywhere.setdefault(rule.name, rule.to[0].name.indices[0].axis)
            self._take(rule)

    def twice(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield the tensors that several rules take, with the names of these rules."""
        for row in np.flatnonzero(self.count > 1).tolist():
            yield row, tuple(name for name, rows in self._by if row in rows)

    def unused(self, made_indices: IndicesByTerm) -> Iterator[str]:
        """Yield the rules that must make tensors and do not, with a name that they would take."""
        used = {name for name, rows in self._by if len(rows)}
        parts = {"", *(self.part[name] for name in used)}
        for name, of in self.needed.items():
            if (
                name not in used
                and self.part[name] in parts
                and not all(str(term) in made_indices for term in self.terms_of_rule[name])
            ):
                yield f"{name} ({of})"

    def _take(self, rule: Rule) -> None:
        try:
            sizes, wrong = _sizes_from_numbers(rule, self.numbers), ""
        except ValueError as error:
            sizes, wrong = {}, str(error)
        for side in rule.spellings:
            matches_by_term = [self._matches(rule, term, sizes) for term in side]
            if not matches_by_term[0]:  # others may be terms of another spelling, too
                continue
            for matches in matches_by_term:
                for match in matches:
                    self.count[match.rows] += 1
                    self._by.append((rule.name, match.rows))
                    if rule.drop:
                        self.dropped |= dict.fromkeys(match.rows.tolist(), rule.drop)
                        if rule.only_zero:
                            self.only_zero |= dict.fromkeys(match.rows.tolist(), rule.only_zero)
            if wrong and any(matches_by_term):
                self.problems.append(f"{rule.name} does not fit the numbers: {wrong}")
            elif not rule.drop and any(matches_by_term):
                self._group(rule, side, matches_by_term, sizes)

    def _matches(self, rule: Rule, term: Term, sizes: Mapping[str, int]) -> list[NameMatch]:
        """Return the names that a term takes, with indices on its axes."""
        out: list[NameMatch] = []
        try:
            beside = self._beside(rule)
        except UnknownNumber as error:
            self.problems.append(f"{rule.name} needs a number: {error}{UNKNOWN}")
            return out
        if beside is None:
            return out
        for axis, values in beside.items() if rule.to and len(rule.to[0].name.indices) == 1 else ():
            end = sizes.get(axis, int(values.max(initial=-1)) + 1)  # others are of another rule, as of MTP
            self.beside.append((rule.to[0], {n for n in values.tolist() if 0 <= n < end}))
        for match in term.name.match(self._templates):
            index = dict(match.index)
            rank = self._rank[self._shape[match.rows]]
            dims = len(term.layout.dims)
            keep = rank >= dims - 1 if term.layout.open else rank == dims
            try:
                for field_ in term.name.indices:
                    index[field_.axis] = match.index[field_.axis] - field_.shifted(self.numbers)
                    size = sizes.get(field_.axis)
                    keep &= index[field_.axis] >= 0
                    if size is not None:
                        keep &= index[field_.axis] < size
                for axis, values in beside.items():
                    keep &= np.isin(index[axis], values)
                if rule.where:
                    keep &= value_of(rule.where, {**self.numbers, **sizes, **index})
            except UnknownNumber as error:
                self.problems.append(f"{rule.name} needs a number: {error}{UNKNOWN}")
                continue
            except ValueError as error:
                self.problems.append(f"{rule.name} does not fit the numbers: {error}")
                continue
            rows = np.flatnonzero(keep)
            if len(rows):
                inside = {k: v[rows] for k, v in match.inside.items()}
                indices = {k: v[rows] for k, v in index.items()}
                out.append(NameMatch(match.rows[rows], indices, match.wild, inside))
        return out

    def _beside(self, rule: Rule) -> dict[str, Ints] | None:
        """Return axis -> indices that a rule is limited to: those of tensors that its own must be beside.

        Returns:
            None where there is no such tensor: the rule takes nothing.
        """
        if rule.only_beside is None:
            return {}
        matches = rule.only_beside.name.match(self._templates)
        if not matches:
            return None
        return {
            index.axis: np.concatenate([m.index[index.axis] for m in matches]) - index.shifted(self.numbers)
            for index in rule.only_beside.name.indices
        }

    def _group(
        self,
        rule: Rule,
        side: tuple[Term, ...],
        matches_by_term: list[list[NameMatch]],
        sizes_from_numbers: Mapping[str, int],
    ) -> None:
        """Group the tensors that a spelling takes."""
        dims = {a for term in rule.to for a in term.layout.axes}
        longest: dict[str, int] = {}
        for matches in matches_by_term:
            for match in matches:
                for axis, value in match.index.items():
                    if axis in dims and axis not in sizes_from_numbers:
                        longest[axis] = max(longest.get(axis, 0), int(value.max()) + 1)
        sizes = {**sizes_from_numbers, **longest}
        if len(side) == 1:
            for match in matches_by_term[0]:
                shape = self._shape[match.rows]
                for kind in unique(shape).tolist():
                    self._add(rule, side, (kind,), [(0, match, np.flatnonzero(shape == kind))], sizes)
            return
        for same in _matches_together(matches_by_term):
            for kinds, members in self._instances(rule, side, same):
                self._add(rule, side, kinds, members, sizes)

    def _instances(
        self, rule: Rule, side: tuple[Term, ...], matches: Sequence[tuple[int, NameMatch]]
    ) -> Iterator[tuple[tuple[int, ...], list[tuple[int, NameMatch, Ints]]]]:
        """Yield tensors that go together by shapes: (shape of each term, its (term, match, rows))."""
        shared = set.intersection(*({i.axis for i in t.name.indices} for t in side))
        keys = [
            np.hstack(
                [
                    np.stack([m.index[a] for a in sorted(shared)], axis=1)
                    if shared
                    else np.zeros((len(m.rows), 0), np.int64),
                    *(m.inside[w] for w in sorted(m.inside)),
                ]
            )
            for _, m in matches
        ]
        lengths = np.cumsum([0, *(len(k) for k in keys)])
        row_count, which = _unique_rows(np.vstack(keys))
        # -1: the term has no tensor for these indices; its shape is then none of those that give sizes.
        table = np.full((row_count, len(side)), -1, np.int64)
        for (term, m), (a, b) in zip(matches, pairwise(lengths.tolist()), strict=True):
            table[which[a:b], term] = self._shape[m.rows]
            differing = np.flatnonzero(table[which[a:b], term] != self._shape[m.rows])
            if len(differing):
                row = int(m.rows[differing[0]])
                self.problems.append(
                    f"{self._tensors[row].fqn} has another shape than what {rule.name} joins it with"
                )
        kinds, kind = np.unique(table, axis=0, return_inverse=True)
        kind = kind.reshape(-1)
        for n, row in enumerate(kinds.tolist()):
            members = []
            for (term, m), (a, b) in zip(matches, pairwise(lengths.tolist()), strict=True):
                chosen = np.flatnonzero(kind[which[a:b]] == n)
                if len(chosen):
                    members.append((term, m, chosen))
            yield tuple(row), members

    def _add(
        self,
        rule: Rule,
        side: tuple[Term, ...],
        kinds: tuple[int, ...],
        members: Sequence[tuple[int, NameMatch, Ints]],
        initial_sizes: Mapping[str, int],
    ) -> None:
        """Add the groups of tensors that go together, if their sizes are known."""
        _, m, chosen = members[0]
        first = self._tensors[int(m.rows[chosen[0]])].fqn
        shapes = [None if k < 0 else self._shapes[k] for k in kinds]
        try:
            sizes, guessed = _all_sizes(rule, side, shapes, initial_sizes, self.numbers)
            shifts = tuple({i.axis: i.shifted(self.numbers) for i in term.name.indices} for term in rule.to)
        except UnknownNumber as error:
            self.problems.append(f"{first} cannot be mapped: {error}{UNKNOWN}")
            return
        except ValueError as error:
            self.problems.append(
                f"{first} {list(shapes[members[0][0]] or ())} does not fit {rule.name}: {error}"
            )
            return
        self.guessed |= guessed
        lost = [a for a in rule.drops if sizes.get(a, 0)]
        for number, match_, rows in members:
            term, shape = side[number], shapes[number]
            assert shape is not None  # every member has a shape
            rank = len(shape) - len(term.layout.dims) + 1 if term.layout.open else 0
            index = {a: v[rows] for a, v in match_.index.items()}
            inside = {k: v[rows] for k, v in match_.inside.items()}
            self.groups.append(
                TensorGroup(
                    rule, side, term, match_.rows[rows], index, match_.wild, inside, sizes, rank, shifts
                )
            )
            self.parts += [
                (row, rule.drops[a], _elements_along(a, term.layout.filled(rank), sizes))
                for a in lost
                for row in match_.rows[rows].tolist()
            ]


def _elements_along(axis: str, layout: AxisLayout, sizes: Mapping[str, int]) -> int:
    """Count the elements of the blocks of a layout that have an axis."""
    return sum(prod(sizes[a] for a in block) for block in layout.blocks if axis in block)


def _sizes_from_numbers(rule: Rule, numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of a rule's axes that follow from the numbers."""
    terms = [t for side in (*rule.spellings, rule.to) for t in side]
    axes = {a for t in terms for a in (*t.layout.axes, *(i.axis for i in t.name.indices))}
    sizes = {a: numbers[a] for a in axes - rule.axes.keys() if a in numbers}
    return _evaluated(rule, sizes, numbers)


def _evaluated(rule: Rule, sizes: Mapping[str, int], numbers: Mapping[str, int]) -> dict[str, int]:
    """Add the axes that can be computed; raise `ValueError` where one contradicts a known size."""
    all_sizes = dict(sizes)
    while True:
        before = len(all_sizes)
        for axis, expression in rule.axes.items():
            try:
                value = int(value_of(expression, {**numbers, **all_sizes}))
            except UnknownNumber:
                continue
            if all_sizes.setdefault(axis, value) != value:
                raise ValueError(f"{axis} is {expression} = {value}, and the tensor has {all_sizes[axis]}")
        if len(all_sizes) == before:
            return all_sizes


def _all_sizes(
    rule: Rule,
    side: Sequence[Term],
    shapes: Sequence[Shape | None],
    initial_sizes: Mapping[str, int],
    numbers: Mapping[str, int],
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the size of every axis of a rule, and the sizes that are guessed.

    Raises:
        UnknownNumber: For an axis of unknown size.
        ValueError: Where sizes contradict each other.
    """
    layouts = []
    for term, shape in zip(side, shapes, strict=True):
        layout = None if shape is None else term.layout.closed(len(shape))
        if layout is not None and shape is not None:
            layouts.append((layout, shape))
    # Shapes and expressions give each other sizes. A default comes last: it must not contradict either.
    sizes, guessed = dict(initial_sizes), dict[str, int]()
    while True:
        before = len(sizes)
        for layout, shape in layouts:
            sizes = solved(layout, shape, sizes)
        sizes = _evaluated(rule, sizes, numbers)
        if len(sizes) != before:
            continue
        axis = next((a for a in rule.default if a not in sizes), None)
        if axis is None:
            break
        sizes[axis] = guessed[axis] = rule.default[axis]
    layouts_there = [layout for layout, _ in layouts]
    tail = max(
        (
            len(x.dims) - len(t.layout.dims) + 1
            for x, t in zip(layouts_there, side, strict=False)
            if t.layout.open
        ),
        default=0,
    )
    for layout in (*layouts_there, *(t.layout.filled(tail) for t in rule.to)):
        for node in layout.dims:
            if size_of(node, sizes) is None:
                raise UnknownNumber(next(a for a in sorted(layout.axes) if a not in sizes))
    return sizes, guessed


def _matches_together(
    matches_by_term: Sequence[Sequence[NameMatch]],
) -> Iterator[list[tuple[int, NameMatch]]]:
    """Group the matches of several terms by the texts of their wild parts."""
    groups: dict[tuple[tuple[str, str], ...], list[tuple[int, NameMatch]]] = {}
    for term, matches in enumerate(matches_by_term):
        for match in matches:
            groups.setdefault(tuple(sorted(match.wild.items())), []).append((term, match))
    yield from groups.values()


def _unique_rows(table: Ints) -> tuple[int, Ints]:
    """Return (number of distinct rows, number of each row among these)."""
    if not table.shape[1]:
        return 1, np.zeros(len(table), np.int64)
    unique_rows, which = np.unique(table, axis=0, return_inverse=True)
    return len(unique_rows), which.reshape(-1).astype(np.int64)


def sizes_of(layout: AxisLayout, sizes: Mapping[str, int]) -> Shape:
    """Return the shape that a layout has with these sizes."""
    shape = tuple(size_of(d, sizes) for d in layout.dims)
    assert None not in shape  # `_all_sizes` has checked
    return tuple(int(n) for n in shape if n is not None)
