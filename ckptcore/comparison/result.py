"""Hold the result of a comparison: frozen values with a JSON form."""

from __future__ import annotations

from typing import Any

from ckptcore.comparison.by_part import OPTIMIZER, PartChange, by_layer, by_part, part_of
from ckptcore.comparison.measures import Measures
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import encode
from ckptcore.errors import Finding
from ckptcore.utils.dataclass import dataclass

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
        return by_part(self.frozen, self._measured())

    @property
    def layers(self) -> tuple[PartChange, ...]:
        """What changed in each layer, most first."""
        return by_layer(self.frozen, self._measured())

    def _measured(self) -> list[tuple[str, Measures | None]]:
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
            "objects": [{"name": o.name, "what": o.what, "a": o.a, "b": o.b} for o in self.objects],
            "skipped": [{"name": name, "why": why} for name, why in self.skipped],
            "dropped": [
                {"name": d.name, "what": d.what, "why": d.why, "recorded": d.recorded} for d in self.dropped
            ],
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


def _tensor(found: TensorDifference) -> dict[str, Any]:
    first = found.first and {
        "index": list(found.first.index),
        "a": encode(found.first.a),
        "b": encode(found.first.b),
        "a_bits": found.first.a_bits,
        "b_bits": found.first.b_bits,
    }
    return {
        "name": found.name,
        "what": list(found.what),
        "a": _spec(found.a),
        "b": _spec(found.b),
        "differing": found.differing,
        "first": first,
        "measures": found.measures and found.measures.as_dict(),
        "cast": found.cast or None,
    }


def _spec(spec: TensorSpec | None) -> dict[str, Any] | None:
    return None if spec is None else {"fqn": spec.fqn, "dtype": spec.dtype, "shape": list(spec.shape)}
