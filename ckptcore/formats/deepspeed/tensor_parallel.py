"""Place the shards of tensor-parallel ranks in their logical parameters.

``universal_checkpoint_info`` says how parameters are cut: lists of regular expressions for the ways of
Megatron (deepspeed/checkpoint/ds_to_universal.py, `merge_tp_slices`), and since version 0.4 an
``affine_map``. That gives for each rank the pieces as strided views of the logical parameter and of the
shard. A map of a later version is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.manifest import row_major
from ckptcore.core.object_tree import Named
from ckptcore.errors import MalformedCheckpoint, UnsupportedFormat
from ckptcore.formats.common.shard_pieces import Piece, ShardPlacement, Unmerged, cut_parts, same
from ckptcore.utils.patterns import UnusablePattern, full_matches
from ckptcore.utils.text import short_repr

Shape = tuple[int, ...]
_MAX_PIECES = 65_536
_MAX_ALL_PIECES = 200_000
_MAX_RANK = 64
_LITERAL = re.compile(r"\^?((?:[\w]|\\[^\w])*)\$")
INFO = "universal_checkpoint_info"
# Patterns -> how a parameter that one of them matches is joined, in the order in which DeepSpeed asks.
_REPLICATED = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_ROWS = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
_SUB_PARAMS = "parameter_with_sub_params"
_WIDTHS, _WIDTHS_SINCE = "sub_param_shard_widths", 0.4  # of universal_checkpoint_version


class TensorParallel:
    """The rules of one checkpoint.

    Args:
        tree: A model-state file's dict.
        names: Every parameter and buffer that will be asked for.
        degree: Tensor-parallel ranks.

    Raises:
        UnsupportedFormat: An ``affine_map`` of a version that is not known.
        MalformedCheckpoint: Rules that are none.
    """

    def __init__(self, tree: Mapping[str, Any], names: Sequence[str], degree: int) -> None:
        info = tree.get(INFO)
        self._info: Mapping[str, Any] = info if isinstance(info, dict) else {}
        self._degree = degree
        self._maps: dict[str, Any] = {}
        self._rules: dict[str, str] = {}
        self._sub_params: dict[str, tuple[Mapping[str, Any], str]] = {}  # name -> fields, pattern
        self._pieces = 0
        if degree > 1:
            self._match(names)

    def place(self, name: str, shapes: Mapping[int, Shape]) -> dict[int, ShardPlacement]:
        """Place the shards of a parameter.

        Args:
            name: FQN.
            shapes: Tensor-parallel rank -> shape of its shard, of the ranks that have one.

        Returns:
            Rank -> placement.

        Raises:
            Unmerged: Nothing says how the shards are joined, or they do not fit what says it.
        """
        if self._degree == 1:
            return {rank: same(shape) for rank, shape in shapes.items()}
        if name in self._maps:
            placed = _by_map(self._maps[name], shapes)
            # One entry may serve any number of names, and a strided piece becomes many boxes.
            self._pieces += sum(len(p.pieces) for p in placed.values())
            if self._pieces > _MAX_ALL_PIECES:
                raise MalformedCheckpoint(
                    f"affine_map cuts parameters into more than {_MAX_ALL_PIECES} pieces"
                )
            return placed
        if name in self._sub_params:
            return self._by_parts(name, shapes)
        rule = self._rules.get(name)
        if rule is None and not self._info.keys() & {*_REPLICATED, _HALVES, _ROWS, _VOCABULARY, _SUB_PARAMS}:
            raise Unmerged(f"the checkpoint has no {INFO} that says how tensor-parallel ranks cut it")
        distinct = set(shapes.values())
        if rule == "replicated":
            if len(distinct) != 1:
                raise Unmerged(
                    "it is replicated over tensor-parallel ranks, and its copies have other shapes"
                )
            return {rank: same(shape) for rank, shape in shapes.items()}
        if len(distinct) != 1:
            raise Unmerged(f"its shards have shapes {sorted(distinct)}")
        shape = distinct.pop()
        if not shape:
            return {rank: same(shape) for rank in shapes}
        dim = 1 if rule == "rows" and len(shape) > 1 else 0
        return {rank: self._concatenated(name, rule, shape, dim, rank) for rank in shapes}

    def _by_parts(self, name: str, shapes: Mapping[int, Shape]) -> dict[int, ShardPlacement]:
        fields, pattern = self._sub_params[name]
        widths, version = self._info.get(_WIDTHS), self._info.get("universal_checkpoint_version", 0.0)
        if type(version) not in (int, float):
            raise Unmerged(f"universal_checkpoint_version is {short_repr(version, 40)}")
        rank_widths = widths.get(pattern) if isinstance(widths, dict) else None
        return _by_sub_params(fields, rank_widths, version, shapes, self._degree)

    def _concatenated(self, name: str, rule: str | None, shape: Shape, dim: int, rank: int) -> ShardPlacement:
        if rule == "halves":
            if shape[0] % 2:
                raise Unmerged(f"half of {shape[0]} rows is no number of rows")
            half = shape[0] // 2
            return cut_parts(shape, 0, [half, half], self._degree, rank)
        full = shape[dim] * self._degree
        if rule == "vocabulary":
            vocabulary = self._info.get("original_vocab_size")
            if type(vocabulary) is int and 0 < vocabulary < full:
                return _strip_vocabulary_padding(shape, rank, vocabulary)
        return cut_parts(shape, dim, [shape[dim]], self._degree, rank)

    def _match(self, names: Sequence[str]) -> None:
        """Assign a rule to each name that a pattern of ``universal_checkpoint_info`` matches."""
        affine_map = self._info.get("affine_map")
        if affine_map is not None:
            version = affine_map.get("version") if isinstance(affine_map, dict) else None
            params = affine_map.get("params") if isinstance(affine_map, dict) else None
            if version != 1 or not isinstance(params, dict) or any(type(p) is not str for p in params):
                raise UnsupportedFormat(
                    f"affine_map of version {short_repr(version, 20)} is not known (1 is)",
                    hint="convert it with the DeepSpeed that wrote it (deepspeed.checkpoint.ds_to_universal)",
                )
            for pattern, matched in _matches([*params], names).items():
                self._maps |= {name: params[pattern] for name in matched if name not in self._maps}
        rules = [(key, "replicated") for key in _REPLICATED]
        rules += [(_HALVES, "halves"), (_ROWS, "rows"), (_VOCABULARY, "vocabulary")]
        for key, rule in rules:
            for matched in _matches(_texts(self._info, key), names).values():
                for name in matched:
                    self._rules.setdefault(name, rule)
        for sub_params in _entries(self._info, _SUB_PARAMS):
            is_record = isinstance(sub_params, Named) and sub_params.kind == "record"
            fields = sub_params.value[1] if is_record else sub_params
            if not isinstance(fields, dict):
                raise MalformedCheckpoint(f"{_SUB_PARAMS} lists {short_repr(sub_params, 40)}")
            for pattern, matched in _matches(_texts(fields, "patterns"), names).items():
                first = ("replicated", "halves")  # which the converter asks before
                unplaced = [
                    n for n in matched if self._rules.get(n) not in first and n not in self._sub_params
                ]
                self._sub_params |= dict.fromkeys(unplaced, (fields, pattern))


def _texts(values: Mapping[str, Any], key: str) -> list[str]:
    patterns = values.get(key) or []
    if not isinstance(patterns, (list, tuple)) or any(type(p) is not str for p in patterns):
        raise MalformedCheckpoint(f"{key} must be a list of patterns (got {short_repr(patterns, 40)})")
    return list(patterns)


def _entries(values: Mapping[str, Any], key: str) -> list[Any]:
    rules = values.get(key) or []
    if not isinstance(rules, (list, tuple)):
        raise MalformedCheckpoint(f"{key} must be a list (got {short_repr(rules, 40)})")
    return list(rules)


def _matches(patterns: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names that each pattern matches at their beginning, as `re.match` does."""
    # A converter may list thousands of escaped names: those are looked up, not matched.
    name_set, matched, expressions = set(names), {}, []
    for pattern in patterns:
        literal = _LITERAL.fullmatch(pattern)
        if literal is None:
            expressions.append(pattern)
        else:
            name = re.sub(r"\\(.)", r"\1", literal[1])
            matched[pattern] = [name] if name in name_set else []
    try:
        # `full_matches` anchors both ends, `re.match` only the first.
        rows = full_matches([rf"(?:{p})[\s\S]*" for p in expressions], names)
    except UnusablePattern as error:
        raise MalformedCheckpoint(f"a pattern of {INFO} cannot be used: {error}") from error
    for pattern, row in zip(expressions, rows, strict=True):
        matched[pattern] = [name for name, hit in zip(names, row, strict=True) if hit]
    return {pattern: matched[pattern] for pattern in patterns}


def _strip_vocabulary_padding(shape: Shape, rank: int, vocabulary: int) -> ShardPlacement:
    """Return the rows of a vocabulary, without those that fill it up to a multiple of the ranks."""
    rows = min(max(vocabulary - rank * shape[0], 0), shape[0])
    piece = Piece(Box((0,) * len(shape), (rows, *shape[1:])), (rank * shape[0], *(0,) * (len(shape) - 1)))
    return ShardPlacement((vocabulary, *shape[1:]), (piece,) if rows else (), shape)


def _by_sub_params(
    fields: Mapping[str, Any], widths: Any, version: float, shapes: Mapping[int, Shape], degree: int
) -> dict[int, ShardPlacement]:
    """Place shards of parameters that were fused before they were cut (`SubparamShape`).

    Args:
        fields: ``shape`` has the sizes of the fused parameters along ``partition_dim``; before version 0.4 a
            number there is how many equal ones there are.
        widths: For each fused parameter its elements on each rank, recorded since version 0.4.
        version: Of ``universal_checkpoint_info``.
        shapes: Tensor-parallel rank -> shape of its shard.
        degree: Tensor-parallel ranks.
    """
    dim, sizes = fields.get("partition_dim"), fields.get("shape")
    sizes = sizes.value if isinstance(sizes, Named) else sizes
    rank = len(next(iter(shapes.values())))
    if type(dim) is not int or not isinstance(sizes, (tuple, list)) or len(sizes) != rank:
        raise Unmerged(f"its {_SUB_PARAMS} ({short_repr(dict(fields), 80)}) do not fit its shards")
    if not 0 <= dim < rank:
        raise Unmerged(f"it is cut along dim {dim}, and has {rank}")
    for d, size in enumerate(sizes):
        extent = sum(size) if _are_sizes(size) else size
        if d != dim and type(extent) is int and extent >= 0 and any(s[d] != extent for s in shapes.values()):
            raise Unmerged(f"its shards have other extents than {short_repr(sizes, 60)} along dim {d}")
    parts = sizes[dim]
    if type(parts) is int and version < _WIDTHS_SINCE:
        full = degree * next(iter(shapes.values()))[dim]
        if parts <= 0 or full % parts:
            raise Unmerged(f"{full} elements along dim {dim} are no {parts} equal parts")
        parts = (full // parts,) * min(parts, full)
    if not _are_sizes(parts) or len(parts) > _MAX_PIECES:
        raise Unmerged(f"its {_SUB_PARAMS} have no sizes along dim {dim} (got {short_repr(parts, 40)})")
    if version < _WIDTHS_SINCE:
        if any(n % degree for n in parts):
            raise Unmerged(f"parts of {short_repr(parts, 40)} elements for {degree} tensor-parallel ranks")
        widths = [[n // degree] * degree for n in parts]
    rows = widths if isinstance(widths, (list, tuple)) else ()
    if len(rows) != len(parts) or any(
        not _are_sizes(row) or len(row) != degree or sum(row) != n for row, n in zip(rows, parts, strict=True)
    ):
        raise Unmerged(f"{_WIDTHS} ({short_repr(widths, 60)}) are not those of parts {short_repr(parts, 40)}")
    return {r: _place_fused(shape, dim, parts, rows, r) for r, shape in shapes.items()}


def _place_fused(
    shape: Shape, dim: int, parts: Sequence[int], widths: Sequence[Sequence[int]], rank: int
) -> ShardPlacement:
    pieces, local, begin = [], 0, 0
    for size, row in zip(parts, widths, strict=True):
        local_offset = tuple(local if d == dim else 0 for d in range(len(shape)))
        extent = tuple(row[rank] if d == dim else n for d, n in enumerate(shape))
        offset = tuple(begin + sum(row[:rank]) if d == dim else 0 for d in range(len(shape)))
        if row[rank]:
            pieces.append(Piece(Box(local_offset, extent), offset))
        local, begin = local + row[rank], begin + size
    if local != shape[dim]:
        raise Unmerged(f"its parts have {local} elements along dim {dim}, the shard has {shape[dim]}")
    return ShardPlacement(tuple(begin if d == dim else n for d, n in enumerate(shape)), tuple(pieces), shape)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(n) is int and 0 <= n < 1 << 50 for n in value)


# --- affine maps ----------------------------------------------------------------------------------


def _by_map(entry: Any, shapes: Mapping[int, Shape]) -> dict[int, ShardPlacement]:
    full = _dims(entry.get("logical_shape") if isinstance(entry, dict) else None)
    ranks = entry.get("ranks") if isinstance(entry, dict) else None
    if full is None or not isinstance(ranks, dict):
        raise Unmerged("its affine map is malformed")
    placements = {}
    for rank, shape in shapes.items():
        rank_map = ranks.get(rank, ranks.get(str(rank)))
        declared = _dims(rank_map.get("shard_shape")) if isinstance(rank_map, dict) else None
        if declared is None or prod(declared) != prod(shape):
            raise Unmerged(f"its affine map gives rank {rank} a shard {declared}, it has {list(shape)}")
        pieces: list[Piece] = []
        listed = rank_map.get("pieces") if isinstance(rank_map, dict) else None
        if not isinstance(listed, (list, tuple)):
            raise Unmerged("its affine map is malformed")
        for piece in listed:
            if not isinstance(piece, dict) or piece.get("scale", 1) not in (1, 1.0, None):
                raise Unmerged("its affine map scales values, which is not undone here")
            pieces += _affine(piece, full, shape)
            if len(pieces) > _MAX_PIECES:
                raise Unmerged(f"its affine map has more than {_MAX_PIECES} pieces")
        placements[rank] = ShardPlacement(full, tuple(pieces), shape)
    return placements


def _affine(piece: Mapping[str, Any], full: Shape, local: Shape) -> Iterator[Piece]:
    """Yield the boxes of a strided piece; leading dims that are no box of both are taken one by one."""
    shape = _dims(piece.get("shape"))
    source, dest = (_strided(piece.get(key), shape) for key in ("source", "dest"))
    if shape is None or source is None or dest is None:
        raise Unmerged("a piece of its affine map is malformed")
    if 0 in shape:
        return
    lead = 0
    while lead <= len(shape):
        below = shape[lead:]
        full_box, local_box = _box_of(below, source[1][lead:], full), _box_of(below, dest[1][lead:], local)
        if full_box is not None and full_box == local_box:
            break
        lead += 1
    if prod(shape[:lead]) > _MAX_PIECES:
        raise Unmerged(f"its affine map has more than {_MAX_PIECES} pieces")
    size = full_box if lead <= len(shape) and full_box is not None else None
    for index in product(*(range(n) for n in shape[:lead])):
        full_index = source[0] + sum(i * s for i, s in zip(index, source[1], strict=False))
        local_index = dest[0] + sum(i * s for i, s in zip(index, dest[1], strict=False))
        a, b = _index(full_index, full), _index(local_index, local)
        extent = size if size is not None else None
        if a is None or b is None or extent is None:
            raise Unmerged("a piece of its affine map reaches outside")
        wide, narrow = _extents(extent, len(full)), _extents(extent, len(local))
        if len(full) != len(local) or wide != narrow:
            raise Unmerged("a piece of its affine map is no box of its shard")
        if any(o + n > d for o, n, d in zip(a, wide, full, strict=True)) or any(
            o + n > d for o, n, d in zip(b, narrow, local, strict=True)
        ):
            raise Unmerged("a piece of its affine map reaches outside")
        yield Piece(Box(b, narrow), a)


def _box_of(shape: Shape, strides: Shape, tensor: Shape) -> dict[int, int] | None:
    """Return dim of ``tensor`` -> extent, where the strides make a box of its row-major layout; else None."""
    steps = row_major(tensor)
    extents: dict[int, int] = {}
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        dims = [d for d, s in enumerate(steps) if s == stride and tensor[d] >= n and d not in extents]
        if not dims or (extents and max(extents) >= dims[-1]):
            return None
        extents[dims[-1]] = n
    return extents


def _extents(extent: Mapping[int, int], rank: int) -> Shape:
    return tuple(extent.get(d, 1) for d in range(rank))


def _index(flat_index: int, shape: Shape) -> Shape | None:
    if not 0 <= flat_index < max(prod(shape), 1):
        return None
    out = []
    for step in row_major(shape):
        out.append(flat_index // step)
        flat_index %= step
    return tuple(out)


def _strided(value: Any, shape: Shape | None) -> tuple[int, Shape] | None:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or shape is None:
        return None
    strides = _dims(value[1])
    if type(value[0]) is not int or value[0] < 0 or strides is None or len(strides) != len(shape):
        return None
    return value[0], strides


def _dims(value: Any) -> Shape | None:
    value = value.value if isinstance(value, Named) else value
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_RANK:
        return None
    if any(type(n) is not int or not 0 <= n < 1 << 50 for n in value):
        return None
    return tuple(value)
