"""Apply a map to a manifest: make every tensor of the new world a set of views into stored items.

A chunk of a mapped tensor is a box, an item, and a view: first byte and strides, relative to the elements of
the item in row-major order. An item can have a layout of its own (the strides of a torch zip). Resolving the
item combines it with the view. No tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from ckptcore.core.coverage import equal_boxes
from ckptcore.core.dequantize import ADDED
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Chunks, Derived, Envelope, Ints, Manifest, TensorSpec, with_dims
from ckptcore.core.subset import chunks_of_rows
from ckptcore.core.weighted_sums import layers, stacked_chunks, summed
from ckptcore.errors import UsageError
from ckptcore.naming.maps.declaration import ArchMap
from ckptcore.naming.maps.index_space import Bools, Pieces, pieces_of
from ckptcore.naming.maps.matching import Matched, match, require_fit
from ckptcore.naming.maps.tensor_groups import RuleAssignment, TensorGroup, keys_in, placed, sizes_of
from ckptcore.naming.maps.tensor_name import Templates
from ckptcore.utils.distinct_values import isin, unique


@dataclass(frozen=True)
class MappedManifest:
    """A manifest in another world of names.

    Attributes:
        manifest: The tensors under their new names, over the same items.
        map: The map that was applied.
        sources: New name -> names of the tensors it is made of.
        rules: New name -> the rule that made it.
        moved: New name -> old name, where elements, order and shape do not change.
        dropped: (old name, reason) of tensors that are dropped.
        only_zero: Old name of a dropped tensor -> why it must be all zero.
        parts: (old name, reason, elements) of tensors of which a part is dropped.
        guessed: (axis, size) that a rule assumes, because neither numbers nor shapes give it.
        zeros: (new name, why zeros are right, the tensor beside which it is).
        padding: New name -> rows of zeros behind those of the source.
    """

    manifest: Manifest
    map: ArchMap
    sources: Mapping[str, tuple[str, ...]]
    rules: Mapping[str, str]
    moved: Mapping[str, str]
    dropped: tuple[tuple[str, str], ...]
    parts: tuple[tuple[str, str, int], ...]
    guessed: tuple[tuple[str, int], ...]
    only_zero: Mapping[str, str] = field(default_factory=dict)
    zeros: tuple[tuple[str, str, str], ...] = ()
    padding: Mapping[str, int] = field(default_factory=dict)


def convert(manifest: Manifest, rules: ArchMap, numbers: Mapping[str, int]) -> MappedManifest:
    """Return the manifest after a map.

    Args:
        manifest: The map has a rule for each of its tensors.
        rules: The map.
        numbers: The model's sizes, by the names that rules use.

    Raises:
        NameMismatch: Naming what is missing, left over, or does not fit.
        UsageError: For a computed tensor that would have to be cut.
    """
    matched = match(rules, manifest.tensors, numbers)
    require_fit(matched, manifest.tensors)
    return converted(manifest, matched)


def converted(manifest: Manifest, matched: Matched) -> MappedManifest:
    """Return the manifest after a map that fits it; raise `UsageError` as `convert` does."""
    if of_sums := layers(manifest):
        return _converted_sums(manifest, matched, of_sums)
    _require_stored(manifest, matched)
    names = [t.fqn for t in manifest.tensors]
    number = {tensor.name: n for n, tensor in enumerate(matched.tensors)}
    ids, parts = _pieces(manifest.chunks, manifest, matched.assignment.groups, number)
    specs = [TensorSpec(m.name, m.dtype, m.shape) for m in matched.tensors]
    result = _mapped_manifest(manifest, matched, specs, ids, parts, number)
    return MappedManifest(
        result,
        matched.map,
        {m.name: tuple(names[s] for s in m.sources) for m in matched.tensors},
        {m.name: m.rule for m in matched.tensors},
        {
            m.name: names[m.sources[0]]
            for m in matched.tensors
            if m.same and not m.add and len(m.sources) == 1
        },
        tuple((names[t], reason) for t, reason in matched.assignment.dropped.items()),
        tuple((names[t], reason, count) for t, reason, count in matched.assignment.parts),
        tuple(sorted(matched.assignment.guessed.items())),
        {names[t]: reason for t, reason in matched.assignment.only_zero.items()},
    )


def _converted_sums(manifest: Manifest, matched: Matched, parts: Sequence[Manifest]) -> MappedManifest:
    """Return the manifest after a map that is applied to every layer of its sums."""
    sums = [tensor for tensor in matched.tensors if not manifest.derived.keys().isdisjoint(tensor.sources)]
    for tensor in sums:
        if not manifest.derived.keys() >= set(tensor.sources):
            names = ", ".join(manifest.tensors[source].fqn for source in tensor.sources)
            raise UsageError(f"cannot make {tensor.name} of {names}: only some of them are averaged")
    if added := next((tensor for tensor in sums if tensor.add), None):
        raise UsageError(
            f"cannot make {added.name}: a constant is added to it, and an average is of what is stored",
            hint="export each checkpoint first, and average the exports",
        )
    mapped = [converted(part, _with_dtypes(matched, part)) for part in parts]
    result = summed(
        [part.manifest for part in mapped],
        {tensor.name: manifest.derived[tensor.sources[0]] for tensor in sums},
        {tensor.name: tensor.dtype for tensor in sums},
    )
    items = replace(result.items, holds=_united([part.manifest.items.holds for part in mapped]))
    inputs = None if result.inputs is None else replace(result.inputs, items=items)
    return replace(mapped[-1], manifest=replace(result, items=items, inputs=inputs))


def _with_dtypes(matched: Matched, part: Manifest) -> Matched:
    """Return a match with the dtypes of a layer, which those of the sums are not."""
    tensors = []
    for tensor in matched.tensors:
        dtypes = sorted({part.tensors[source].dtype for source in tensor.sources})
        if len(dtypes) > 1:
            names = ", ".join(part.tensors[source].fqn for source in tensor.sources)
            raise UsageError(
                f"cannot make {tensor.name} of {names}: their dtypes differ (got {', '.join(dtypes)})"
            )
        tensors.append(replace(tensor, dtype=dtypes[0]))
    return replace(matched, tensors=tuple(tensors))


def _united(tables: Sequence[Ints | None]) -> Ints | None:
    """Return the promised shapes of all layers: each layer has those of its own items, -1 elsewhere."""
    promised = [table for table in tables if table is not None]
    if not promised:
        return None
    columns = max(table.shape[1] for table in promised)
    united: Ints = np.maximum.reduce([with_dims(table, columns, -1) for table in promised])
    return united


def with_zeros(mapped: MappedManifest, source: Manifest, numbers: Mapping[str, int]) -> MappedManifest:
    """Return the result of an inverse with the tensors that it makes of nothing: zeros in float32.

    Args:
        mapped: The result, without them.
        source: The tensors that were mapped.
        numbers: The model's sizes, by the names that rules use.
    """
    if not mapped.map.zeros:
        return mapped
    rules = replace(mapped.map, rules=mapped.map.zeros, zeros=())
    assignment = RuleAssignment(rules, source.tensors, numbers, Templates.of(t.fqn for t in source.tensors))
    specs: list[TensorSpec] = []
    zeros: list[tuple[str, str, str]] = []
    for group in assignment.groups:
        (term,) = group.rule.to
        for name, row in zip(
            term.name.spell(group.index, group.wild, group.inside, len(group.rows)),
            group.rows.tolist(),
            strict=True,
        ):
            specs.append(TensorSpec(name, "float32", sizes_of(term.layout.filled(0), group.sizes)))
            zeros.append((name, group.rule.name, source.tensors[row].fqn))
    if not specs:
        return mapped
    manifest = mapped.manifest
    # Zeros have no chunks: their tensors end where they begin in the table, and `Derived` makes them.
    below = manifest.inputs
    first = np.concatenate([manifest.chunks.first, np.full(len(specs), manifest.chunks.first[-1], np.int64)])
    nodes = dict(manifest.derived) | {
        len(manifest.tensors) + n: Derived("zeros_float32", (), spec.shape) for n, spec in enumerate(specs)
    }
    inputs = below.tensors if below is not None else ()
    chunks = below.chunks if below is not None else chunks_of_rows(manifest.chunks, ())
    extended = replace(
        manifest, tensors=(*manifest.tensors, *specs), chunks=replace(manifest.chunks, first=first)
    )
    return replace(mapped, manifest=extended.deriving(nodes, inputs, chunks), zeros=tuple(zeros))


def with_padding(mapped: MappedManifest, step: int) -> MappedManifest:
    """Return the result of an inverse with vocabularies of a multiple of ``step`` rows, zeros behind theirs.

    step: 0 for vocabularies as they are.

    Raises:
        UsageError: A vocabulary has a dtype that is not padded.
    """
    manifest = mapped.manifest
    padding: dict[str, int] = {}
    below = manifest.inputs
    inputs = [] if below is None else [*below.tensors]
    spans = [] if below is None else [(below.chunks, n) for n in range(len(inputs))]
    nodes, specs = dict(manifest.derived), [*manifest.tensors]
    for n, spec in enumerate(manifest.tensors):
        is_padded = step > 0 and mapped.rules.get(spec.fqn) in mapped.map.padded
        more = -spec.shape[0] % step if is_padded else 0
        if not more:
            continue
        if spec.dtype not in ADDED:
            raise UsageError(
                f"cannot pad {spec.fqn} of {spec.dtype} (must be one of {', '.join(ADDED)})",
                hint="export the model in one of these dtypes first",
            )
        shape = (spec.shape[0] + more, *spec.shape[1:])
        specs[n], padding[spec.fqn] = replace(spec, shape=shape), more
        nodes[n] = Derived(f"padded_{spec.dtype}", (len(inputs),), (spec.shape[0], *shape))
        inputs.append(spec)
        spans.append((manifest.chunks, n))
    if not padding:
        return mapped
    return replace(
        mapped,
        manifest=_computing(replace(manifest, tensors=tuple(specs)), nodes, inputs, spans),
        moved={new: old for new, old in mapped.moved.items() if new not in padding},
        padding=padding,
    )


def _require_stored(manifest: Manifest, matched: Matched) -> None:
    """Require that computed tensors are renamed only."""
    for tensor in matched.tensors:
        if tensor.add and tensor.dtype not in ADDED:
            raise UsageError(
                f"cannot make {tensor.name}: cannot add to {tensor.dtype} "
                f"(must be one of {', '.join(ADDED)})",
                hint="try --names stored to keep the names as they are",
            )
        computed = next((s for s in tensor.sources if s in manifest.derived), None)
        if computed is not None and (not tensor.same or tensor.add):
            raise UsageError(
                f"cannot make {tensor.name} of {manifest.tensors[computed].fqn}: its values are not stored",
                hint="try --names stored, or carry the stored values with --keep-quantized",
            )


def _pieces(
    chunks: Chunks, manifest: Manifest, groups: Sequence[TensorGroup], number: Mapping[str, int]
) -> tuple[Ints, list[tuple[int, Pieces, Ints]]]:
    """Return (the tensor of every box, (rank, boxes, chunk of each) group by group)."""
    ids: list[Ints] = [np.zeros(0, np.int64)]
    parts: list[tuple[int, Pieces, Ints]] = []
    twin = np.full(len(chunks), -1, np.int64)
    for first, copy in equal_boxes(manifest):
        twin[first] = twin[copy] = first
    for group in groups:
        begin, count = chunks.first[group.rows], np.diff(chunks.first)[group.rows]
        members = np.repeat(np.arange(len(group.rows)), count)
        within = np.arange(len(members)) - np.repeat(np.cumsum(count) - count, count)
        row = np.repeat(begin, count) + within
        rank = len(manifest.tensors[int(group.rows[0])].shape)
        width = np.array([BY_NAME[manifest.tensors[t].dtype].itemsize for t in group.rows.tolist()], np.int64)
        view = None if chunks.view is None else chunks.view[row]
        loose = manifest.items.envelope[chunks.item[row]] == Envelope.TORCHZIP
        lo, shape = chunks.lo[row, :rank], chunks.shape[row, :rank]
        boxes = pieces_of(np.arange(len(row)), width[members], lo, shape, view, loose, twin[row])
        for term, p in placed(boxes, group, members):
            which, names = keys_in(group, term, p, members)
            ids.append(np.array([number[name] for name in names], np.int64)[which])
            parts.append((len(group.rule.to[term].layout.filled(group.rank).dims), p, row[p.row]))
    return np.concatenate(ids), parts


def _mapped_manifest(
    manifest: Manifest,
    matched: Matched,
    specs: Sequence[TensorSpec],
    ids: Ints,
    parts: Sequence[tuple[int, Pieces, Ints]],
    number: Mapping[str, int],
) -> Manifest:
    """Return the manifest of the mapped tensors, with nodes for those that are computed."""
    ranks = np.array([len(t.shape) for t in manifest.tensors], np.int64)
    chunks = _chunk_columns(manifest.chunks, ranks, len(specs), ids, parts)
    # Paths are recorded by the names that the map has just replaced.
    origin = {k: v for k, v in manifest.origin.items() if k != "paths"}
    items = replace(manifest.items, holds=_promised(manifest, ranks, parts))
    mapped = replace(
        manifest,
        tensors=tuple(specs),
        chunks=chunks,
        items=items,
        origin=origin,
        derived={},
        inputs=None,
        order=(),
    )
    nodes: dict[int, Derived] = {}
    inputs: list[TensorSpec] = []
    spans: list[tuple[Chunks, int]] = []
    for n, tensor in enumerate(matched.tensors):
        source = tensor.sources[0]
        if source in manifest.derived and manifest.inputs is not None:
            node = manifest.derived[source]
            nodes[n] = replace(node, inputs=tuple(range(len(inputs), len(inputs) + len(node.inputs))))
            inputs += [manifest.inputs.tensors[i] for i in node.inputs]
            spans += [(manifest.inputs.chunks, i) for i in node.inputs]
        elif tensor.add:
            nodes[n] = Derived(f"add_{tensor.dtype}", (len(inputs),), (tensor.add,))
            stored = manifest.tensors[source]
            inputs.append(TensorSpec(stored.fqn, stored.dtype, tensor.shape))
            spans.append((chunks, n))
    return _computing(mapped, nodes, inputs, spans) if nodes else mapped


def _chunk_columns(
    stored: Chunks, ranks: Ints, tensors: int, ids: Ints, parts: Sequence[tuple[int, Pieces, Ints]]
) -> Chunks:
    """Return chunk columns by tensor; an unchanged chunk that was unresolved stays so.

    ranks: int64 [T], dims of the stored tensors.
    """
    rank = max((r for r, _, _ in parts), default=0)
    total = len(ids)
    lo, shape = np.zeros((total, rank), np.int64), np.ones((total, rank), np.int64)
    step, start, row = np.ones((total, rank), np.int64), np.zeros(total, np.int64), np.zeros(total, np.int64)
    box_ranks = np.zeros(total, np.int64)  # the rank of each
    end = 0
    for r, p, of in parts:
        begin, end = end, end + len(p)
        lo[begin:end, :r], shape[begin:end, :r] = p.lo[:, :r], p.ext[:, :r]
        step[begin:end, :r], start[begin:end], row[begin:end] = p.step[:, :r], p.start, of
        box_ranks[begin:end] = r
    # `Chunks` wants the chunks of one tensor together; the last key of `lexsort` is the first.
    order = (
        np.lexsort((*(lo[:, d] for d in reversed(range(rank))), row, ids)) if total else np.zeros(0, np.int64)
    )
    lo, shape, step, start, row = lo[order], shape[order], step[order], start[order], row[order]
    view = np.hstack([start[:, None], _flags(stored, row)[:, None], step])
    unchanged = _unchanged(stored, row, shape, step, start) & (box_ranks[order] == ranks[stored.tensor[row]])
    view[unchanged, 0] = -1
    first = np.searchsorted(ids[order], np.arange(tensors + 1)).astype(np.int64)
    resolved_view = view if bool((view[:, 0] >= 0).any()) else None
    return Chunks(first, lo, shape, stored.item[row], resolved_view)


def _promised(manifest: Manifest, ranks: Ints, parts: Sequence[tuple[int, Pieces, Ints]]) -> Ints | None:
    """Return the shape that metadata promises for every item that boxes are views into: see `Items`."""
    stored, earlier_shapes = manifest.chunks, manifest.items.holds
    rows = unique(np.concatenate([np.zeros(0, np.int64), *(of for _, _, of in parts)]))
    if stored.view is not None:
        rows = rows[stored.view[rows, 0] < 0]
    rows = rows[stored.item[rows] >= 0]
    if not len(rows):
        return earlier_shapes
    rank = stored.shape.shape[1]
    # An earlier map may have cut items of more dims.
    width = 1 + rank if earlier_shapes is None else max(1 + rank, earlier_shapes.shape[1])
    shapes = np.full((len(manifest.items), width), -1, np.int64)
    if earlier_shapes is not None:
        shapes[:, : earlier_shapes.shape[1]] = earlier_shapes
    shapes[stored.item[rows], 0] = ranks[stored.tensor[rows]]
    shapes[stored.item[rows], 1 : 1 + rank] = stored.shape[rows]
    return shapes


def _flags(stored: Chunks, row: Ints) -> Ints:
    """Return the view flags of chunks, 0 for unresolved ones."""
    if stored.view is None:
        return np.zeros(len(row), np.int64)
    view = stored.view[row]
    return np.where(view[:, 0] >= 0, view[:, 1], 0)


def _unchanged(stored: Chunks, row: Ints, shape: Ints, step: Ints, start: Ints) -> Bools:
    """Return which boxes are an entire unresolved chunk in its own shape and order."""
    rank = min(shape.shape[1], stored.shape.shape[1])
    same: Bools
    same = (start == 0) & (shape[:, :rank] == stored.shape[row, :rank]).all(axis=1)
    for columns in (shape[:, rank:], stored.shape[row, rank:]):
        same &= (columns == 1).all(axis=1)
    expected = np.ones(len(row), np.int64)
    for d in reversed(range(shape.shape[1])):
        same &= (shape[:, d] == 1) | (step[:, d] == expected)
        expected = expected * shape[:, d]
    if stored.view is not None:
        same &= stored.view[row, 0] < 0
    return same


def _computing(
    manifest: Manifest,
    nodes: Mapping[int, Derived],
    inputs: Sequence[TensorSpec],
    spans: Sequence[tuple[Chunks, int]],
) -> Manifest:
    """Return a manifest with tensors that are computed, whose own chunks go.

    Args:
        manifest: Has the tensors.
        nodes: Tensor -> how to compute it.
        inputs: What they are computed from.
        spans: Table with the chunks of each input, and its row there.
    """
    tables = {id(table): table for table, _ in spans}
    rank = max(table.lo.shape[1] for table in (manifest.chunks, *tables.values()))
    shifts = dict(
        zip(tables, accumulate((len(t.first) - 1 for t in tables.values()), initial=0), strict=False)
    )
    stored = stacked_chunks([_with_rank(table, rank) for table in tables.values()])
    below = chunks_of_rows(stored, [shifts[id(table)] + row for table, row in spans])
    has_chunks = ~isin(manifest.chunks.tensor, np.array(sorted(nodes), np.int64))
    chunks = _with_rank(manifest.chunks.where(has_chunks), rank)
    return replace(manifest, chunks=chunks).deriving(nodes, tuple(inputs), below)


def _with_rank(chunks: Chunks, rank: int) -> Chunks:
    """Return the chunks with columns for ``rank`` dims and a view each."""
    lo, shape = with_dims(chunks.lo, rank, 0), with_dims(chunks.shape, rank, 1)
    return Chunks(chunks.first, lo, shape, chunks.item, with_dims(chunks.views, 2 + rank, 1))
