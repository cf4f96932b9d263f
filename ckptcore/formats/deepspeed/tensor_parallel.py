"""Place the shards of tensor-parallel ranks in their logical parameters.

``universal_checkpoint_info`` says how parameters are cut: lists of regular expressions for the ways of
Megatron (deepspeed/checkpoint/ds_to_universal.py, `merge_tp_slices`), and since version 0.4 an
``affine_map``. That gives for each rank the pieces as strided views of the logical parameter and of the
shard. A map of a later version is refused.

GPT-NeoX records no rules of its cuts. Names and cuts are those of its converter
(tools/ckpts/convert_neox_to_hf.py), in three sets: ``mlp.dense_*``, ``mlp.linear1`` and ``w1`` to ``w3``, and
those of Transformer Engine. Two kinds of tensors have other values on each rank:

- Norms drift apart, because nothing synchronises them. The converter takes their mean. Where norms of some
  blocks are equal and others are not, the files are no ranks of one save, and the copies are compared.
- Biases of row-parallel layers. With ``gpt-j-residual`` each rank adds its own before the one reduction
  (megatron/model/transformer.py), and the model's bias is their sum. Without it, ranks have copies. The flag
  is in ``configs/*.yml`` of the step, or in the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.dequantize import ADDED
from ckptcore.core.manifest import Manifest, TensorSpec, row_major
from ckptcore.core.object_tree import Named
from ckptcore.core.subset import derive
from ckptcore.errors import MalformedCheckpoint, UnsupportedFormat
from ckptcore.formats.base import Source
from ckptcore.formats.common.model_layers import torn_layers
from ckptcore.formats.common.shard_pieces import Piece, Shape, ShardPlacement, Unmerged, cut_parts, same
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.patterns import UnusablePattern, full_matches
from ckptcore.utils.plain_yaml import MAX_YAML, load_yaml
from ckptcore.utils.text import short_repr

_LAYER = re.compile(r"^(?P<prefix>sequential\.)?(?P<number>\d{1,6})\.(?P<rest>[a-z].*)$", re.DOTALL)
_FIRST_BLOCK, _MAX_LISTED, _MOST_BLOCKS = 2, 20, 1 << 16
# What is behind the layer's number -> how ranks hold it; the first pattern that matches decides.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("copied", r"attention\.rotary_emb\.inv_freq|pos_embedding\..*|position_embeddings\..*"),
        ("columns", r"(?:word_embeddings|final_linear)\.weight"),
        ("columns", r"attention\.(?:query_key_value|qkv)\.(?:weight|bias)"),
        ("columns", r"mlp\.(?:dense_h_to_4h|w1|w3)\.(?:weight|bias)|mlp\.fc1_(?:weight|bias)"),
        ("gated", r"mlp\.linear1\.(?:weight|bias)"),
        (
            "rows",
            r"attention\.(?:dense|proj)\.weight|mlp\.(?:dense_4h_to_h|linear2|w2)\.weight|mlp\.fc2_weight",
        ),
        ("bias", r"attention\.(?:dense|proj)\.bias|mlp\.(?:dense_4h_to_h|linear2|w2)\.bias|mlp\.fc2_bias"),
        ("norm", r"(?:.*layernorm|norm|mlp\.layer_norm|attention\.[a-z_]*norm)[._](?:weight|bias|scale)"),
    )
)
_MARK = re.compile(r"attention\.(?:query_key_value|qkv)\.weight")
_FINAL_NORM = re.compile(r"\d\.norm\.\w+$")
_HEAD = "final_linear.weight"
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


@dataclass(frozen=True, slots=True)
class NeoxRanks:
    """How the ranks of one checkpoint are joined.

    Attributes:
        degree: Tensor-parallel ranks.
        shapes: Name -> shape on a rank.
        residual: The flag ``gpt-j-residual``; None where nothing records it.
        computed: Name -> ``sum`` or ``mean``, of tensors whose values ranks hold in parts.
    """

    degree: int
    shapes: Mapping[str, Shape]
    residual: bool | None
    computed: dict[str, str] = field(default_factory=dict)

    def place(self, name: str, shapes: Mapping[int, Shape]) -> dict[int, ShardPlacement]:
        """Place the ranks' shards of a tensor, as `TensorParallel.place` does; raise `Unmerged`."""
        kind, distinct = kind_of_name(name), set(shapes.values())
        if len(distinct) != 1:
            raise Unmerged(f"its shards have shapes {sorted(distinct)}")
        shape = distinct.pop()
        if kind is None:
            raise Unmerged("no rule of GPT-NeoX says how ranks hold it")
        if kind in ("copied", "norm"):
            return {rank: same(shape) for rank in shapes}
        if kind == "bias":
            if self.residual is None:
                raise Unmerged(
                    "nothing says whether ranks have copies of it or summands: configs/*.yml, which has "
                    "gpt-j-residual, is not there"
                )
            return {rank: same(shape) for rank in shapes}
        dim = len(shape) - 1 if kind == "rows" else 0
        if not shape or (kind == "rows" and len(shape) < 2):
            raise Unmerged(f"a tensor of shape {list(shape)} is not cut")
        length = shape[dim]
        parts = [length // 2] * 2 if kind == "gated" and self._is_gated(name, length) else [length]
        return {rank: cut_parts(shape, dim, parts, self.degree, rank) for rank in shapes}

    def _is_gated(self, name: str, rows: int) -> bool:
        """Return whether the first linear layer has rows of two: twice the columns of the second one."""
        second = self.shapes.get(re.sub(r"linear1\.\w+$", "linear2.weight", name), ())
        if len(second) != 2 or rows not in (second[1], 2 * second[1]):
            raise Unmerged(f"{rows} rows of mlp.linear1 do not fit mlp.linear2 of {list(second)}")
        return rows == 2 * second[1]


def kind_of_name(name: str) -> str | None:
    """Return how ranks hold a tensor, by its name: columns, gated, rows, bias, norm or copied."""
    layer = _LAYER.match(name)
    rest = layer["rest"] if layer is not None else ""
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(rest)), None)


def lacking(source: Source, tree: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (FQN, message) of layers that are not there, and of tensors that a block lacks.

    Blocks have the numbers from 2 without a gap, and the final norm is 2 behind the last one. Embeddings are
    layer 0. A head that is missing is seen by its trainer's settings alone: the embeddings may be tied.

    Args:
        source: The folder of the step.
        tree: A model-state file's dict.
        names: Tensors of all ranks; nothing is found in those of another trainer.
    """
    layers: dict[int, set[str]] = {}
    prefix = ""
    for name in names:
        if match := _LAYER.match(name):
            prefix = match["prefix"] or ""
            layers.setdefault(int(match["number"]), set()).add(match["rest"])
    blocks = {
        n: parts for n, parts in layers.items() if any(r.startswith(("attention.", "mlp.")) for r in parts)
    }
    if not any(_MARK.fullmatch(rest) for parts in blocks.values() for rest in parts):
        return
    norm = max(
        (n for n, parts in layers.items() if any(rest.startswith("norm.") for rest in parts)), default=None
    )
    last = max(blocks) if norm is None else max(norm - 2, max(blocks))
    settings = _all_settings(source, tree)
    counts = _stated(settings, "num-layers")
    if len(counts) == 1 and type(counts[0]) is int:
        last = max(last, min(counts[0], _MOST_BLOCKS) + 1)
    absent = [n for n in range(_FIRST_BLOCK, last + 1) if n not in blocks]
    for number in absent[:_MAX_LISTED]:
        yield (
            f"{prefix}{number}",
            f"layer {number} is in no file: blocks {_FIRST_BLOCK} to {last} are numbered",
        )
    if 0 not in layers:
        yield f"{prefix}0.word_embeddings.weight", "layer 0, the embeddings, is in no file"
    if norm is None:
        yield f"{prefix}{last + 2}.norm.weight", f"layer {last + 2}, the final norm, is in no file"
    is_untied = _stated(settings, "no-weight-tying") == [True]
    if is_untied and not any(_HEAD in parts for parts in layers.values()):
        yield f"{prefix}{last + 3}.{_HEAD}", f"layer {last + 3}, the output weights, is in no file"
    for number, rest in islice(torn_layers(blocks), _MAX_LISTED):
        name = f"{prefix}{number}.{rest}"
        yield name, f"{name} is in no file, and other layers have it"


def neox_ranks(
    source: Source,
    tree: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    degree: int,
    sums: Mapping[str, Iterable[int | None]],
) -> NeoxRanks | None:
    """Return the rules of a checkpoint of several ranks of GPT-NeoX; None for one of another trainer.

    Args:
        source: The folder of the step.
        tree: A model-state file's dict.
        shapes: Name -> shape on a rank, of every weight.
        degree: Tensor-parallel ranks.
        sums: Name -> CRC-32 of the stored weight on each rank, None where it is not stored.
    """
    layers = (_LAYER.match(name) for name in shapes)
    if degree == 1 or not any(m is not None and _MARK.fullmatch(m["rest"]) for m in layers):
        return None
    ranks = NeoxRanks(degree, shapes, _residual(source, tree))
    norms = {n: {*crc} for n, crc in sums.items() if kind_of_name(n) == "norm"}
    apart = {n for n, crc in norms.items() if len(crc) > 1 and None not in crc}
    if apart and apart >= {n for n in norms if not _FINAL_NORM.search(n)}:
        ranks.computed.update(dict.fromkeys(apart, "mean"))
    if ranks.residual:
        ranks.computed.update({n: "sum" for n in sums if kind_of_name(n) == "bias"})
    return ranks


def _residual(source: Source, tree: Mapping[str, Any]) -> bool | None:
    """Return whether each rank adds a bias of its own; False, its default, where settings lack the flag."""
    settings = _all_settings(source, tree)
    flags = _stated(settings, "gpt-j-residual") or [False]
    return flags[0] if settings and flags in ([True], [False]) else None


def _stated(settings: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the different values of a setting, in the spelling of files or of arguments."""
    values: list[Any] = []
    for mapping in settings:
        values += [mapping[k] for k in (key, key.replace("-", "_")) if k in mapping]
    return [value for n, value in enumerate(values) if value not in values[:n]]


def _all_settings(source: Source, tree: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the arguments in a model-state file, and the content of each file of settings."""
    stored = tree.get("args")
    stored = stored.value if isinstance(stored, Named) and stored.kind == "namespace" else stored
    settings: list[Mapping[str, Any]] = [stored] if isinstance(stored, dict) else []
    for path in sorted(source.listing):
        if path.startswith("configs/") and path.endswith((".yml", ".yaml")) and path.count("/") == 1:
            content = _settings(source, path)
            settings += [content] if content is not None else []
    return settings


def _settings(source: Source, path: str) -> Mapping[str, Any] | None:
    size = source.listing[path]
    if size > MAX_YAML:
        return None
    try:
        content = load_yaml(source.store.read(path, 0, size))
    except InvalidText:
        return None
    return content if isinstance(content, dict) else None


def part_name(name: str, rank: int) -> str:
    """Return the name of one rank's part of a tensor that is computed from all of them."""
    return f"{name}/tp{rank}"


def with_computed(manifest: Manifest, computed: Mapping[str, str], degree: int, prefix: str) -> Manifest:
    """Return the manifest with sums and means in place of the ranks' parts, where all of them are there.

    Args:
        manifest: Has the parts, under `part_name`.
        computed: Name -> ``sum`` or ``mean``.
        degree: Number of parts.
        prefix: Of the names in the manifest.
    """
    specs = {t.fqn: t for t in manifest.tensors}
    computed_tensors: dict[str, tuple[TensorSpec, str, tuple[str, ...], tuple[int, ...]]] = {}
    for name, operation in computed.items():
        parts = tuple(part_name(prefix + name, rank) for rank in range(degree))
        forms = {(specs[p].dtype, specs[p].shape) if p in specs else None for p in parts}
        form = forms.pop()
        if not forms and form is not None and form[0] in ADDED:
            computed_tensors[parts[0]] = (
                TensorSpec(prefix + name, *form),
                f"{operation}_{form[0]}",
                parts,
                (degree,),
            )
    return derive(manifest, computed_tensors) if computed_tensors else manifest


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
        return {rank: self._concatenated(rule, shape, dim, rank) for rank in shapes}

    def _by_parts(self, name: str, shapes: Mapping[int, Shape]) -> dict[int, ShardPlacement]:
        fields, pattern = self._sub_params[name]
        widths, version = self._info.get(_WIDTHS), self._info.get("universal_checkpoint_version", 0.0)
        if type(version) not in (int, float):
            raise Unmerged(f"universal_checkpoint_version is {short_repr(version, 40)}")
        rank_widths = widths.get(pattern) if isinstance(widths, dict) else None
        return _by_sub_params(fields, rank_widths, version, shapes, self._degree)

    def _concatenated(self, rule: str | None, shape: Shape, dim: int, rank: int) -> ShardPlacement:
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

    ``shape`` of the fields has the sizes of the fused parameters along ``partition_dim``; before version 0.4
    a number there is how many equal ones there are. Since then ``widths`` has each rank's elements of each.
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
