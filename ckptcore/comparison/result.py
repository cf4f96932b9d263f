"""Differences: what was compared, and what is not the same? Frozen values with a JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import encode
from ckptcore.errors import Finding

ONLY_A, ONLY_B, DTYPE, SHAPE, VALUES = "only-in-a", "only-in-b", "dtype", "shape", "values"


@dataclass(frozen=True, slots=True)
class Element:
    """One element that differs.

    index: its place in the tensor. a, b: the values, as Python has them. a_bits, b_bits: their bits in
    hex, the highest first; two values that look alike (NaNs, 0.0 and -0.0) differ here.
    """

    index: tuple[int, ...]
    a: Any
    b: Any
    a_bits: str
    b_bits: str


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same on both sides.

    name: under which it was compared. what: ``only-in-a``, ``only-in-b``; ``dtype``, ``shape`` or both; or
    ``values``. a, b: the tensor as each side stores it, under its stored name. differing: number of
    elements with other bits, first: the first of them in row-major order; for ``values`` only.
    """

    name: str
    what: tuple[str, ...]
    a: TensorSpec | None
    b: TensorSpec | None
    differing: int = 0
    first: Element | None = None


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """A plain value that is not the same on both sides.

    name: its place, path elements joined with dots. what: ``only-in-a``, ``only-in-b`` or ``values``.
    a, b: the values in words, shortened; empty where there is none.
    """

    name: str
    what: str
    a: str = ""
    b: str = ""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints.

    url: where it lies. tensors, nbytes: what was compared of it. model: where the model was found, when
    only that was compared. left_out: (stored name, rule). unverified: stored items that were read and
    have no checksum to prove them. warnings: findings that do not stop a comparison.
    """

    url: str
    format: str
    tensors: int
    nbytes: int
    model: str = ""
    left_out: tuple[tuple[str, str], ...] = ()
    unverified: int = 0
    warnings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """The answer of a comparison.

    tensors, objects: what is not the same, tensors in A's order, then what only B has. equal_tensors,
    equal_objects: how many are. skipped: (name, why) of what could not be compared.
    """

    a: Side
    b: Side
    tensors: tuple[TensorDifference, ...]
    objects: tuple[ObjectDifference, ...]
    equal_tensors: int
    equal_objects: int
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is the same: names, dtypes, shapes, bits, plain values."""
        return not self.tensors and not self.objects

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `ckptcore diff --output json`."""
        return {
            "equal": self.equal,
            "a": _side(self.a),
            "b": _side(self.b),
            "equal_tensors": self.equal_tensors,
            "equal_objects": self.equal_objects,
            "tensors": [_tensor(t) for t in self.tensors],
            "objects": [{"name": o.name, "what": o.what, "a": o.a, "b": o.b} for o in self.objects],
            "skipped": [{"name": name, "why": why} for name, why in self.skipped],
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
    }


def _spec(spec: TensorSpec | None) -> dict[str, Any] | None:
    return None if spec is None else {"fqn": spec.fqn, "dtype": spec.dtype, "shape": list(spec.shape)}
