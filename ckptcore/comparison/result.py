"""Hold the result of a comparison: frozen values with a JSON form.

What changed is summed up by the part of a model and by its layer, from names.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ckptcore.comparison.measures import Measures
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import encode
from ckptcore.errors import Finding

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
ONLY_A, ONLY_B, DTYPE, SHAPE, VALUES = "only-in-a", "only-in-b", "dtype", "shape", "values"


@dataclass(frozen=True, slots=True)
class Element:
    """One element that differs.

    Attributes:
        index: Its index in the tensor.
        a: A's value, as a Python number.
        b: B's value.
        a_bits: The bits of A's value in hex, the highest first; they differ even for NaNs, or 0.0 and -0.0.
        b_bits: The bits of B's value.
    """

    index: tuple[int, ...]
    a: Any
    b: Any
    a_bits: str
    b_bits: str


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs between the two sides.

    Attributes:
        name: The name under which it was compared.
        what: ``only-in-a``, ``only-in-b``; ``dtype``, ``shape`` or both; or ``values``. Of two float dtypes
            the values are compared, too: ``dtype`` alone then means that they are equal after the cast.
        a: The tensor as A stores it, under its stored name.
        b: The tensor as B stores it.
        differing: Number of elements whose bits differ; for ``values`` only.
        first: The first of them in row-major order; for ``values`` only.
        measures: How far the values are apart; None where they were not read, or are no numbers.
        cast: The narrower of two float dtypes, to which the other side was cast; empty otherwise.
    """

    name: str
    what: tuple[str, ...]
    a: TensorSpec | None
    b: TensorSpec | None
    differing: int = 0
    first: Element | None = None
    measures: Measures | None = None
    cast: str = ""

    @property
    def has_moved(self) -> bool:
        """Whether values differ."""
        return VALUES in self.what

    @property
    def is_optimizer(self) -> bool:
        """Whether its name is that of an optimizer's state."""
        return part_of(self.name) == OPTIMIZER

    @property
    def is_cast(self) -> bool:
        """Whether nothing but a cast differs."""
        return bool(self.cast) and self.what == (DTYPE,)


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A plain value that differs between the two sides.

    Attributes:
        name: Its path, elements joined with dots.
        what: ``only-in-a``, ``only-in-b`` or ``values``.
        a: A's value as text, shortened; empty if there is none.
        b: B's value as text.
    """

    name: str
    what: str
    a: str = ""
    b: str = ""


@dataclass(frozen=True, slots=True)
class DroppedName:
    """A tensor or plain value that one side lacks, because a conversion leaves it out by a rule.

    A value that the conversion sets because of that is one, too.

    Attributes:
        name: The name under which it was compared.
        what: ``only-in-a`` or ``only-in-b``; ``values`` for one that was set.
        why: The rule.
        recorded: Whether the conversion's record lists it; else its name fits the rule.
    """

    name: str
    what: str
    why: str
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints.

    Attributes:
        url: Its path or URL.
        format: Its format.
        tensors: Number of tensors that were compared.
        nbytes: Bytes of these tensors.
        model: How the model part was found, if only that was compared.
        left_out: (stored name, rule).
        unverified: Number of stored items that were read and have no checksum.
        warnings: Findings that do not stop a comparison.
        form: Which names were moved, where the sides have two forms of one trainer.
    """

    url: str
    format: str
    tensors: int
    nbytes: int
    model: str = ""
    left_out: tuple[tuple[str, str], ...] = ()
    unverified: int = 0
    warnings: tuple[Finding, ...] = ()
    form: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of a comparison.

    Attributes:
        a: The first checkpoint.
        b: The second checkpoint.
        tensors: Tensors that differ, in A's order, then those that only B has.
        objects: Plain values that differ.
        equal_tensors: Number of equal tensors.
        equal_objects: Number of equal plain values.
        skipped: (name, reason) of values that could not be compared.
        dropped: What one side lacks because a conversion leaves it out, apart from those above.
        ignore_dropped: Whether ``dropped`` counts as equal even where no record lists it.
        frozen: Names of equal tensors, where others differ in values: nothing has trained them.
        by_itself: Why only the model parts were compared, where nobody asked for that.
    """

    a: Side
    b: Side
    tensors: tuple[TensorDifference, ...]
    objects: tuple[ObjectDifference, ...]
    equal_tensors: int
    equal_objects: int
    skipped: tuple[tuple[str, str], ...] = ()
    dropped: tuple[DroppedName, ...] = ()
    ignore_dropped: bool = False
    frozen: tuple[str, ...] = ()
    by_itself: str = ""

    @property
    def verdict(self) -> str:
        """``equal``; ``equal after the cast to DTYPE``, where nothing else differs; or ``different``."""
        if self.equal:
            return "equal"
        dtypes = list(dict.fromkeys(tensor.cast for tensor in self.tensors))
        if self.objects or self.dropped or not all(tensor.is_cast for tensor in self.tensors):
            return "different"
        return f"equal after the cast to {' and '.join(dtypes)}" if dtypes else "different"

    @property
    def parts(self) -> tuple[PartChange, ...]:
        """What changed in each part of the model, most first, by the tensors that both sides have."""
        return _group_changes(self.frozen, self._measures(), part_of)

    @property
    def layers(self) -> tuple[PartChange, ...]:
        """What changed in each layer, most first."""
        return _group_changes(self.frozen, self._measures(), _layer_name)

    def _measures(self) -> list[tuple[str, Measures | None]]:
        return [(tensor.name, tensor.measures) for tensor in self.tensors if tensor.has_moved]

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is equal: names, dtypes, shapes, bits, plain values.

        What the record of a conversion lists as left out is equal; without a record only if it is ignored.
        """
        accounted = self.ignore_dropped or all(d.recorded for d in self.dropped)
        return accounted and not self.tensors and not self.objects

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `ckptcore diff --output json`."""
        return {
            "equal": self.equal,
            "verdict": self.verdict,
            "a": _side(self.a),
            "b": _side(self.b),
            "equal_tensors": self.equal_tensors,
            "equal_objects": self.equal_objects,
            "parts": [part.as_dict() for part in self.parts],
            "layers": [layer.as_dict() for layer in self.layers],
            "frozen": list(self.frozen),
            "by_itself": self.by_itself or None,
            "tensors": [_tensor(t) for t in self.tensors],
            "objects": [asdict(difference) for difference in self.objects],
            "skipped": [{"name": name, "why": why} for name, why in self.skipped],
            "dropped": [asdict(dropped) for dropped in self.dropped],
        }


def _side(side: Side) -> dict[str, Any]:
    return {
        "url": side.url,
        "format": side.format,
        "tensors": side.tensors,
        "bytes": side.nbytes,
        "model": side.model or None,
        "left_out": [{"name": name, "rule": rule} for name, rule in side.left_out],
        "unverified": side.unverified,
        "warnings": [w.as_dict() for w in side.warnings],
        "form": side.form or None,
    }


def _tensor(difference: TensorDifference) -> dict[str, Any]:
    first = difference.first
    return {
        "name": difference.name,
        "what": list(difference.what),
        "a": _spec(difference.a),
        "b": _spec(difference.b),
        "differing": difference.differing,
        "first": first
        and {**asdict(first), "index": list(first.index), "a": encode(first.a), "b": encode(first.b)},
        "measures": difference.measures and difference.measures.as_dict(),
        "cast": difference.cast or None,
    }


def _spec(spec: TensorSpec | None) -> dict[str, Any] | None:
    return None if spec is None else {"fqn": spec.fqn, "dtype": spec.dtype, "shape": list(spec.shape)}


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
        return asdict(self)


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


def _layer_name(name: str) -> str | None:
    layer = layer_of(name)
    return None if layer is None else f"layer {layer}"


def _group_changes(
    equal: Iterable[str], changed: Iterable[Changed], group_of: Callable[[str], str | None]
) -> tuple[PartChange, ...]:
    """Return the change of each part or layer, what changed most first; those without a change come last."""
    same = Counter(filter(None, map(group_of, equal)))
    groups: dict[str, list[Measures | None]] = {group: [] for group in same}
    for name, measures in changed:
        if group := group_of(name):
            groups.setdefault(group, []).append(measures)
    parts = []
    for group, rows in groups.items():
        measured = [measures for measures in rows if measures is not None]
        norm_a = math.hypot(*(measure.norm_a for measure in measured))
        norm = math.hypot(*(measure.norm for measure in measured))
        change = norm / norm_a if norm_a and math.isfinite(norm_a) else None
        largest = max((measure.max_abs for measure in measured), default=0.0)
        parts.append(PartChange(group, same[group], len(rows), change, largest))
    return tuple(sorted(parts, key=lambda part: (not part.changed, -(part.change or 0.0))))
