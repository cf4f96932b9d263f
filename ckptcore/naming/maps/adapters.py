"""Derive the rules for a trainer's LoRA adapters from those for the weights that they adapt.

Megatron-Bridge and NeMo put an adapter below the linear layer that it adapts (Megatron-Bridge, peft/utils.py,
peft/canonical_lora.py, models/conversion/peft_bridge.py):

- ``linear_qkv.adapter.linear_in.weight`` [rank, columns] and ``linear_out.weight`` [rows, rank], for all that
  the layer computes. The hub has several layers in its place: ``lora_B`` of each has the rows that its weight
  has, ``lora_A`` of all is the same.
- canonical: ``linear_qkv.adapter.adapter_q.linear_in.weight`` for one part of the rows, in their own order.

So a rule for a weight gives one for either half. A weight of more dims than rows and columns gives none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from blake3 import blake3

from ckptcore.naming.maps.declaration import ArchMap, Rule, Term, built_in_maps
from ckptcore.naming.maps.layout import ELLIPSIS, Axis, AxisLayout, Node, Product, Sum
from ckptcore.naming.maps.tensor_name import TensorName
from ckptcore.naming.worlds import HUB, PEFT

# A half of a pair; gate and up may be apart, as ``weight_w`` and ``weight_v``.
_HALF = re.compile(
    r"(?P<module>.+)\.adapter\.(?P<part>adapter_(?:q|k|v|gate|up)\.)?linear_(?P<half>in|out)\.weight(?:_[wv])?"
)
_BELOW = ".adapter."
# Linear layers: embeddings and norms have no adapters, and that of a router has no counterpart in peft.
_ADAPTED = re.compile(r"(?:.+\.)?(?:linear_\w+|output_layer|in_proj|out_proj)")
_RANK = Axis("lora_rank")
_OPEN = Axis(ELLIPSIS)
_WEIGHTS = (".weight", ".weight_w", ".weight_v")
_PARTS = ("q", "k", "v", "gate", "up")  # axes that canonical adapters are named after
_WHY_ONE_WAY = "several adapters share one half"


@dataclass(frozen=True)
class Half:
    """One half of an adapter. pair: what both halves have in common. out: whether it is ``linear_out``."""

    pair: str
    out: bool


def half_of(name: str) -> Half | None:
    """Return which half of which adapter a tensor is; None for another tensor.

    >>> half_of("decoder.layers.0.mlp.linear_fc2.adapter.linear_out.weight")
    Half(pair='decoder.layers.0.mlp.linear_fc2', out=True)
    """
    match = _HALF.fullmatch(name) if _BELOW in name else None
    if match is None:
        return None
    pair = match["module"] + (f".{match['part'][:-1]}" if match["part"] else "")
    return Half(pair, match["half"] == "out")


@cache
def adapter_maps(world: str) -> tuple[ArchMap, ...]:
    """Return the maps of a world's adapters to those of peft."""
    maps = (m for m in built_in_maps() if (m.world, m.to) == (world, HUB) and not m.refused)
    return tuple(_adapter_map(m) for m in maps)


def _adapter_map(of: ArchMap) -> ArchMap:
    rules = {(r.spellings, r.to): r for rule in of.rules for r in _rules(rule)}
    digest = blake3(f"adapters {of.digest}".encode()).hexdigest()
    return replace(of, to=PEFT, rules=tuple(rules.values()), digest=digest)


def _rules(rule: Rule) -> Iterator[Rule]:
    """Yield the rules for the adapters of the weights that a rule takes."""
    for side in rule.spellings if rule.to else ():
        modules: dict[str, list[tuple[Term, str]]] = {}
        for term in side:
            module, end = _split(term.name)
            if end and _ADAPTED.fullmatch(module):
                modules.setdefault(module, []).append((term, end))
        for parts in modules.values():
            blocks = {block for term, _ in parts for block in term.blocks}
            targets = [t for t in rule.to if blocks.issuperset(t.blocks) and _split(t.name)[1] == ".weight"]
            if targets:
                yield from _shared(rule, parts, targets)
                yield from _canonical(rule, parts, targets)


def _shared(rule: Rule, parts: Sequence[tuple[Term, str]], targets: Sequence[Term]) -> Iterator[Rule]:
    """Yield the rules of one adapter for everything that a module computes."""
    first = parts[0][0]
    hub = [upright for t in targets if (upright := _upright(t, first)) is not None]
    if len(hub) < len(targets) or any(_columns(t) != _columns(first) for t, _ in parts):
        return
    lora_b = [_half_term(t, f"{_BELOW}linear_out{end}", _rows_by_rank) for t, end in parts]
    yield _derived(rule, "lora_B", lora_b, [_half_term(t, ".lora_B.weight", _rows_by_rank) for t in hub])
    lora_a = _half_term(first, f"{_BELOW}linear_in.weight", _rank_by_columns)
    yield _derived(rule, "lora_A", [lora_a], [_half_term(hub[0], ".lora_A.weight", _rank_by_columns)])


def _canonical(rule: Rule, parts: Sequence[tuple[Term, str]], targets: Sequence[Term]) -> Iterator[Rule]:
    """Yield the rules of an adapter for each part of a module, which is a module of the hub."""
    if len(targets) < 2:
        return
    for target in targets:
        axes = [a for a in _PARTS if all(a in block for block in target.blocks)]
        source = next((t for t, _ in parts if set(target.blocks) <= set(t.blocks)), None)
        if len(axes) != 1 or source is None:
            continue
        part = Term(source.name, AxisLayout(tuple(_of_part(d, axes[0]) for d in source.layout.dims)))
        hub = _upright(target, part)
        if hub is None:
            continue
        below = f"{_BELOW}adapter_{axes[0]}."
        for name, half, layout in (
            ("lora_B", "linear_out", _rows_by_rank),
            ("lora_A", "linear_in", _rank_by_columns),
        ):
            taken = _half_term(part, f"{below}{half}.weight", layout)
            yield _derived(rule, name, [taken], [_half_term(hub, f".{name}.weight", layout)])


def _derived(rule: Rule, name: str, side: Sequence[Term], to: Sequence[Term]) -> Rule:
    blocks = [block for term in side for block in term.blocks]
    return Rule(
        f"{rule.name}/{name.replace('_', '-').lower()}",
        (tuple(side),),
        tuple(to),
        "optional",
        rule.axes,
        rule.default,
        rule.where,
        {axis: why for axis, why in rule.drops.items() if any(axis in block for block in blocks)},
        one_way=_WHY_ONE_WAY,
    )


def _split(name: TensorName) -> tuple[str, str]:
    """Return a weight's module and what is behind it; ("", "") for another tensor."""
    text = str(name)
    end = next((e for e in _WEIGHTS if text.endswith(e)), "")
    return (text.removesuffix(end), end) if end else ("", "")


def _matrix(term: Term) -> tuple[tuple[Node, ...], tuple[Node, ...]] | None:
    """Return (dims that are indices of layers, rows and columns); None where it is no matrix."""
    dims = term.layout.dims
    leading = dims[:1] if dims[0] == Axis("layer") and Axis("layer") not in dims[1:] else ()
    inner = dims[len(leading) :]
    return (leading, inner) if inner == (_OPEN,) or len(inner) == 2 else None


def _columns(term: Term) -> Node | None:
    """Return the columns of a matrix; an ellipsis where they stay as they are."""
    split = _matrix(term)
    return None if split is None else split[1][-1]


def _upright(target: Term, source: Term) -> Term | None:
    """Return a term of the hub with the source's rows in front; None where columns are split differently.

    The hub has some weights transposed (Conv1D); peft has the halves of all alike.
    """
    split, of = _matrix(target), _matrix(source)
    if split is None or of is None or len(split[1]) != len(of[1]):
        return None
    inner = split[1]
    if inner[-1] != of[1][-1]:
        inner = inner[::-1]
    return Term(target.name, AxisLayout((*split[0], *inner))) if inner[-1] == of[1][-1] else None


def _rows_by_rank(inner: tuple[Node, ...]) -> tuple[Node, ...]:
    return inner if inner == (_OPEN,) else (inner[0], _RANK)


def _rank_by_columns(inner: tuple[Node, ...]) -> tuple[Node, ...]:
    return inner if _OPEN in inner else (_RANK, inner[1])


def _half_term(term: Term, end: str, layout: Callable[[tuple[Node, ...]], tuple[Node, ...]]) -> Term:
    """Return the term of one half; columns that stay as they are stay so in ``lora_A``, with its rank."""
    split = _matrix(term)
    assert split is not None  # the caller has looked
    leading, inner = split
    half = layout(inner)
    if _OPEN in half:
        half = (_OPEN,)
    *front, last = term.name.parts
    assert isinstance(last, str)  # it ends with the name of a weight
    ending = next(e for e in _WEIGHTS if last.endswith(e))
    return Term(TensorName((*front, last.removesuffix(ending) + end)), AxisLayout((*leading, *half)))


def _of_part(node: Node, axis: str) -> Node:
    """Return a dim with those parts of its sums alone that have an axis."""
    if isinstance(node, Sum):
        having = [p for p in node.parts if axis in AxisLayout((p,)).axes]
        return _of_part(having[0], axis) if len(having) == 1 else node
    if isinstance(node, Product):
        return Product(tuple(_of_part(f, axis) for f in node.factors))
    return node
