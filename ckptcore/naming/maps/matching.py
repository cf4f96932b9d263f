"""Match the rules of a map with tensors: make names and shapes, and report what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np

from ckptcore.core.manifest import TensorSpec, row_major
from ckptcore.errors import NameMismatch
from ckptcore.naming.maps.declaration import ArchMap, Term
from ckptcore.naming.maps.index_space import full_boxes
from ckptcore.naming.maps.tensor_groups import (
    UNKNOWN,
    IndicesByTerm,
    RuleAssignment,
    TensorGroup,
    keys_in,
    placed,
    shape_in,
)
from ckptcore.naming.maps.tensor_name import Templates
from ckptcore.utils.text import listed

Shape = tuple[int, ...]
_FEW = 5
_LAYER = "layer"  # the axis of layers of a model, and the number of them
_OF_ALL = frozenset({"experts"})  # axes that have one size, in whatever rule they are
_HALF = ("float16", "bfloat16")  # a constant added in these loses bits of the smallest weights
_MOST_INDICES = 100_000  # of one axis, whatever a config says


@dataclass
class TargetTensor:
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
        tensors: The tensors of the new world.
        assignment: The tensors that every rule takes.
        left: Positions of tensors that no rule takes.
        twice: (position, rules) of those that several take.
        unused: Rules that must take tensors and do not.
        absent: Tensors that rules make for other indices, and not for these.
        problems: Whatever else does not fit.
    """

    map: ArchMap
    tensors: tuple[TargetTensor, ...]
    assignment: RuleAssignment
    left: tuple[int, ...]
    twice: tuple[tuple[int, tuple[str, ...]], ...]
    unused: tuple[str, ...]
    absent: tuple[str, ...]
    problems: tuple[str, ...]

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
    assignment = RuleAssignment(rules, tensors, numbers, templates)
    made_tensors, made_indices, problems = _make(assignment, tensors)
    return Matched(
        rules,
        tuple(made_tensors),
        assignment,
        tuple(np.flatnonzero(assignment.count == 0).tolist()),
        tuple(assignment.twice()),
        tuple(assignment.unused(made_indices)),
        tuple(_absent(assignment, made_indices)),
        (*assignment.problems, *problems, *_disagreeing(assignment.groups, tensors)),
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
    if not hint and any(problem.endswith(UNKNOWN) for problem in matched.problems):
        hint = "add --config with the model's config.json, which says its numbers"
    where = f"{matched.map.arch} ({matched.map.world} to {matched.map.to})"
    raise NameMismatch(
        f"the checkpoint does not fit the map of {where}: {'; '.join(parts)}",
        hint=hint or "try another --arch, or --names stored to keep the names as they are",
        unexpected=left,
        missing=list(matched.unused),
        broken=[*twice, *matched.absent, *matched.problems],
    )


def _disagreeing(groups: Sequence[TensorGroup], tensors: Sequence[TensorSpec]) -> list[str]:
    """Return sizes that differ between tensors: four experts by the router, three by their own."""
    sizes_by_axis: dict[str, dict[int, str]] = {}
    for group in groups:
        for axis in _OF_ALL & group.sizes.keys():
            sizes_by_axis.setdefault(axis, {}).setdefault(group.sizes[axis], tensors[int(group.rows[0])].fqn)
    for group in groups:
        for axis in (_OF_ALL & group.index.keys() & sizes_by_axis.keys()) - group.sizes.keys():
            last = int(group.index[axis].argmax())
            # Fewer than another tensor says: `_absent` names what they do not make.
            if group.index[axis][last] >= max(sizes_by_axis[axis]):
                sizes_by_axis[axis].setdefault(
                    int(group.index[axis][last]) + 1, tensors[int(group.rows[last])].fqn
                )
    return [
        f"{axis} is {' and '.join(f'{size} by {name}' for size, name in sorted(sizes.items()))}"
        for axis, sizes in sizes_by_axis.items()
        if len(sizes) > 1
    ]


def _make(
    assignment: RuleAssignment, tensors: Sequence[TensorSpec]
) -> tuple[list[TargetTensor], IndicesByTerm, list[str]]:
    """Return the tensors that are made, the indices of each term, and what does not fit together."""
    tensor_by_name: dict[str, TargetTensor] = {}
    # Name -> (group, term of `to`, position) of its first part.
    first_parts: dict[str, tuple[TensorGroup, int, int]] = {}
    made_indices: dict[str, set[tuple[int, ...]]] = {}
    problems: list[str] = []
    for group in assignment.groups:
        shape = tensors[int(group.rows[0])].shape
        members = np.arange(len(group.rows))
        boxes = full_boxes(members, np.ones(len(members), np.int64), shape)
        for number, p in placed(boxes, group, members):
            target = shape_in(group, number)
            key, names = keys_in(group, number, p, members)
            columns = [p.names.index(index.axis) for index in group.rule.to[number].name.indices]
            made_at = made_indices.setdefault(str(group.rule.to[number]), set())
            made_at.update(map(tuple, p.lo[:, columns].tolist()))
            rank = len(target)
            count = p.ext[:, :rank].prod(axis=1)
            same = (p.start == 0) & (count == np.prod(shape, dtype=np.int64)) & (target == shape)
            same &= (p.step[:, :rank] == np.array(row_major(target), np.int64)).all(axis=1)
            for k, row, elements, alike in zip(
                key.tolist(), p.row.tolist(), count.tolist(), same.tolist(), strict=True
            ):
                name, source = names[k], int(group.rows[row])
                tensor = tensor_by_name.get(name)
                dtype = tensors[source].dtype
                if group.rule.add and group.rule.widened and dtype in _HALF:
                    dtype = "float32"
                if tensor is None:
                    tensor = tensor_by_name[name] = TargetTensor(
                        name, target, dtype, group.rule.name, group.rule.add
                    )
                    first_parts[name] = group, number, row
                elif tensor.shape != target or tensor.dtype != dtype:
                    first = tensors[tensor.sources[0]]
                    problems.append(
                        f"{name} would be {tensor.dtype} {list(tensor.shape)} by {first.fqn} and "
                        f"{tensors[source].dtype} {list(target)} by {tensors[source].fqn}"
                    )
                if not tensor.sources or tensor.sources[-1] != source:
                    tensor.sources.append(source)
                tensor.same = tensor.same and alike and tensor.filled == 0
                tensor.filled += elements
    stored_names = {t.fqn for t in tensors}
    for tensor in tensor_by_name.values():
        tensor.sources = list(dict.fromkeys(tensor.sources))
        if tensor.filled != tensor.numel:
            problems.append(_gap(tensor, first_parts[tensor.name], tensors, stored_names, assignment.numbers))
    return sorted(tensor_by_name.values(), key=lambda m: min(m.sources)), made_indices, problems


def _gap(
    tensor: TargetTensor,
    first_part: tuple[TensorGroup, int, int],
    tensors: Sequence[TensorSpec],
    stored_names: set[str],
    numbers: Mapping[str, int],
) -> str:
    """Return why a tensor that is made is incomplete, with the names that are missing."""
    group, number, row = first_part
    by = ", ".join(tensors[s].fqn for s in tensor.sources[:_FEW])
    if tensor.filled > tensor.numel:
        return f"{tensor.name} has elements of several tensors: {by}"
    fixed_indices = {
        i.axis: int(group.index[i.axis][row])
        for i in group.rule.to[number].name.indices
        if i.axis in group.index
    }
    missing: list[str] = []
    for term in group.side:
        axes = [i.axis for i in term.name.indices]
        ranges = [
            [fixed_indices[a]] if a in fixed_indices else range(min(group.sizes.get(a, 0), 100_000))
            for a in axes
        ]
        inside = {k: v[row][None, :] for k, v in group.inside.items()}
        for values in product(*ranges):
            index = {
                i.axis: np.array([v + i.shifted(numbers) if i.shift else v])
                for i, v in zip(term.name.indices, values, strict=True)
            }
            (name,) = term.name.spell(index, group.wild, inside, 1)
            if name not in stored_names:
                missing.append(name)
            if len(missing) > _FEW:
                break
    reason = f"missing: {listed(missing)}" if missing else f"there is {by}"
    return f"{tensor.name} is incomplete ({tensor.filled} of {tensor.numel} elements): {reason}"


def _absent(assignment: RuleAssignment, made_indices: IndicesByTerm) -> list[str]:
    """Return indices, mostly layers, for which a rule makes some of its tensors, or none though it must."""
    sizes = _sizes_of_axes(assignment, made_indices)
    out: dict[str, None] = {}
    for rule, terms in assignment.terms_of_rule.items():
        for axes in dict.fromkeys(tuple(i.axis for i in t.name.indices) for t in terms if t.name.indices):
            alike = [t for t in terms if tuple(i.axis for i in t.name.indices) == axes]
            made = [
                set[tuple[int, ...]]().union(
                    *(made_indices.get(name, ()) for name in assignment.by_kind.get(rule, [str(t)]))
                )
                for t in alike
            ]
            all_indices = set[tuple[int, ...]]().union(*made)
            if not all_indices:
                continue
            # Not every layer has every tensor (a mixture of experts is in some of them): only a rule that
            # says so must make each first index. Of the indices behind it, as of experts, all must be there.
            firsts = {values[0] for values in all_indices}
            if assignment.everywhere.get(rule) == axes[0]:
                firsts = set(range(min(sizes[axes[0]], _MOST_INDICES)))
            count = prod([len(firsts), *(sizes[a] for a in axes[1:])])
            # A config may claim any number of layers or experts: do not list far more names than tensors.
            if count > 2 * len(all_indices) * len(alike) + _MOST_INDICES:
                out[f"{len(all_indices)} of {count} are there of {alike[0]}"] = None
                continue
            if len(axes) > 1:
                rest = [range(sizes[a]) for a in axes[1:]]
                all_indices = {(first, *values) for first in firsts for values in product(*rest)}
            else:
                all_indices = {(first,) for first in firsts}
            for term, indices in zip(alike, made, strict=True):
                gone = sorted(all_indices - indices)
                if gone:
                    names = [_tensor_name(term, values, assignment.numbers) for values in gone[:_FEW]]
                    suffix = f" and {len(gone) - _FEW} more" if len(gone) > _FEW else ""
                    out[f"nothing makes {', '.join(names)}{suffix}"] = None
    for term, required in assignment.beside:
        made_there = {values[0] for values in made_indices.get(str(term), ())}
        if made_there and (lacking := sorted(required - made_there)):
            names = [_tensor_name(term, (n,), assignment.numbers) for n in lacking[:_FEW]]
            out[f"nothing makes {listed(names)}"] = None
    # Where each rule is for layers of one kind, none says that a layer is gone as a whole.
    if not out and (layers := _gone_layers(assignment, made_indices)):
        out[f"nothing makes layer {listed([str(layer) for layer in layers])}"] = None
    return list(out)


def _sizes_of_axes(assignment: RuleAssignment, made_indices: IndicesByTerm) -> dict[str, int]:
    """Return how many indices each axis has: as the config says, else up to the highest that a rule made."""
    ends: dict[str, int] = {}
    for terms in assignment.terms_of_rule.values():
        for term in terms:
            for n, index in enumerate(term.name.indices):
                for values in made_indices.get(str(term), ()):
                    ends[index.axis] = max(ends.get(index.axis, 0), values[n] + 1)
    for group in assignment.groups:
        for axis in _OF_ALL & ends.keys() & group.sizes.keys():
            ends[axis] = max(ends[axis], group.sizes[axis])
    return {axis: assignment.numbers.get(axis, end) for axis, end in ends.items()}


def _gone_layers(assignment: RuleAssignment, made_indices: IndicesByTerm) -> list[int]:
    """Return layers of the config of which no tensor is made, where rules make tensors of layers at all."""
    made_layers = {
        values[n]
        for term in {str(t): t for group in assignment.groups for t in group.rule.to}.values()
        for n, index in enumerate(term.name.indices)
        if index.axis == _LAYER
        for values in made_indices.get(str(term), ())
    }
    layers = range(min(assignment.numbers.get(_LAYER, 0), _MOST_INDICES))
    return sorted({*layers} - made_layers) if made_layers else []


def _tensor_name(term: Term, values: tuple[int, ...], numbers: Mapping[str, int]) -> str:
    """Return the name that a term makes for some indices; wild parts stay as they are written."""
    index = {
        i.axis: np.array([v + i.shifted(numbers)]) for i, v in zip(term.name.indices, values, strict=True)
    }
    wild = {label: f"{{{label}}}" for label in term.name.wild}
    return term.name.spell(index, wild, {w: np.zeros((1, 0), np.int64) for w in wild}, 1)[0]
