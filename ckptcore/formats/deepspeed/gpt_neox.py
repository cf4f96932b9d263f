"""Join the tensor-parallel ranks of GPT-NeoX, which records no rules of its cuts.

Names and cuts are those of its converter (tools/ckpts/convert_neox_to_hf.py), in three sets: ``mlp.dense_*``,
``mlp.linear1`` and ``w1`` to ``w3``, and those of Transformer Engine. Two kinds of tensors have other values
on each rank:

- Norms drift apart, because nothing synchronises them. The converter takes their mean. Where norms of some
  blocks are equal and others are not, the files are no ranks of one save, and the copies are compared.
- Biases of row-parallel layers. With ``gpt-j-residual`` each rank adds its own before the one reduction
  (megatron/model/transformer.py), and the model's bias is their sum. Without it, ranks have copies. The flag
  is in ``configs/*.yml`` of the step, or in the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ckptcore.core.dequantize import ADDED
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.object_tree import Named
from ckptcore.core.subset import derive
from ckptcore.formats.base import Source
from ckptcore.formats.common.model_layers import torn_layers
from ckptcore.formats.common.shard_pieces import Shape, ShardPlacement, Unmerged, cut_parts, same
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.plain_yaml import MAX_YAML, load_yaml

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
