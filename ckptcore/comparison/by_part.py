"""Sum up what changed between two checkpoints, by the part of a model and by its layer, from names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from ckptcore.comparison.measures import Measures
from ckptcore.utils.dataclass import dataclass

OPTIMIZER, OTHER = "optimizer", "other"
Changed = tuple[str, Measures | None]  # name of a tensor, and how far its values are apart
# The first pattern that a name has decides. Names of transformers, Megatron, torchtitan, OLMo and Meta.
_PARTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (part, re.compile(rf"(?:^|[._/]){pattern}", re.IGNORECASE))
    for part, pattern in (
        (OPTIMIZER, r"(?:optim(?:izers?|_states?)?(?=[._/\d]|$)|exp_avg|exp_avg_sq|momentum_buffer)"),
        ("head", r"(?:lm_head|output_layer|embed_out|output\.weight$|score\.)"),
        ("router", r"(?:router|gate\.(?:weight|e_score))"),
        ("norm", r"(?:\w*norm\w*|ln_?\w{1,2})\."),
        ("experts", r"(?:local_)?(?:shared_)?experts?(?=[._/\d])"),
        ("attention", r"(?:self_|linear_|cross_)?(?:attn|attention|mixer)\w*\."),
        ("mlp", r"(?:mlp|ffn|feed_forward|ff_proj|ff_out|fc\d?)(?=[._])"),
        ("embedding", r"(?:\w*embed\w*|wte|wpe)(?=[._])"),
    )
)
_LAYER = re.compile(r"(?:^|[._/])(?:layers?|blocks?|h)[._](\d{1,6})(?=[._])")


@dataclass(frozen=True, slots=True)
class PartChange:
    """What changed in a part or layer.

    Attributes:
        name: The part, or ``layer N``.
        equal: Number of tensors that are equal.
        changed: Number of tensors that differ.
        change: Norm of the difference relative to A's, over the tensors that differ and are measured; None if
            none is, or A is zero.
        max_abs: The largest absolute difference.
    """

    name: str
    equal: int
    changed: int
    change: float | None
    max_abs: float

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "equal": self.equal,
            "changed": self.changed,
            "change": self.change,
            "max_abs": self.max_abs,
        }


def part_of(name: str) -> str:
    """Return the part of a model that a tensor belongs to by its name.

    >>> [part_of(f"model.layers.0.{n}.weight") for n in ("self_attn.q_proj", "mlp.up_proj")]
    ['attention', 'mlp']
    >>> part_of("optim.state.layers.0.mlp.up_proj.weight.exp_avg"), part_of("model.embed_tokens.weight")
    ('optimizer', 'embedding')
    """
    return next((part for part, pattern in _PARTS if pattern.search(name)), OTHER)


def layer_of(name: str) -> int | None:
    """Return the number of a tensor's layer; None outside of the layers and for state of an optimizer."""
    match = _LAYER.search(name) if part_of(name) != OPTIMIZER else None
    return int(match[1]) if match else None


def by_part(equal: Iterable[str], changed: Iterable[Changed]) -> tuple[PartChange, ...]:
    """Return the change of each part, what changed most first; parts without a change come last."""
    return _grouped(equal, changed, part_of)


def by_layer(equal: Iterable[str], changed: Iterable[Changed]) -> tuple[PartChange, ...]:
    """Return the change of each layer, what changed most first."""

    def named(name: str) -> str | None:
        layer = layer_of(name)
        return None if layer is None else f"layer {layer}"

    return _grouped(equal, changed, named)


def _grouped(
    equal: Iterable[str], changed: Iterable[Changed], group_of: Callable[[str], str | None]
) -> tuple[PartChange, ...]:
    same = Counter(filter(None, map(group_of, equal)))
    groups: dict[str, list[Measures | None]] = {group: [] for group in same}
    for name, measures in changed:
        if group := group_of(name):
            groups.setdefault(group, []).append(measures)
    parts = []
    for group, rows in groups.items():
        measured = [measures for measures in rows if measures is not None]
        norm_a = math.hypot(*(each.norm_a for each in measured))
        norm = math.hypot(*(each.norm for each in measured))
        change = norm / norm_a if norm_a and math.isfinite(norm_a) else None
        largest = max((each.max_abs for each in measured), default=0.0)
        parts.append(PartChange(group, same[group], len(rows), change, largest))
    return tuple(sorted(parts, key=lambda part: (not part.changed, -(part.change or 0.0))))
