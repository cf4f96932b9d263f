"""Pack the statistics of all tensors of a checkpoint into one blob of columns, as the catalog stores them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptcore.core import columnar_file
from ckptcore.errors import CkptError
from ckptcore.utils.foreign_text import InvalidText, parsing
from ckptcore.utils.isolation import attempt

_INTEGERS, _FLOATS = ("numel", "nan", "inf", "zeros"), ("norm", "mean", "absmax", "change", "cosine")

# Bytes of a blob before compression, at most: of its head, and of each tensor its name and numbers.
_HEAD, _TENSOR = 1 << 20, 8 << 10


class TensorPoint(NamedTuple):
    """A tensor at one step.

    Attributes:
        fqn: Its name.
        dtype: Its dtype.
        role: As `ckptcore.naming.optimizer_state` names it.
        numel: Number of elements.
        norm: Euclidean norm of the finite ones.
        mean: Their mean.
        absmax: The largest absolute value of them.
        nan: Number of NaN.
        inf: Number of Inf.
        zeros: Number of zeros.
        change: Norm of the change since another step, relative to that one's norm; NaN if not measured.
        cosine: Of the angle between both; NaN if it was not measured, or there is none.
    """

    fqn: str
    dtype: str
    role: str
    numel: int
    norm: float
    mean: float
    absmax: float
    nan: int
    inf: int
    zeros: int
    change: float = math.nan
    cosine: float = math.nan

    @property
    def rms(self) -> float:
        """The root of the mean square of the finite elements."""
        return self.norm / math.sqrt(max(self.numel - self.nan - self.inf, 1))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; null for what is not finite."""
        form = self._asdict()
        odd = {name: None for name in _FLOATS if not math.isfinite(form[name])}
        return form | odd


class StepColumns(NamedTuple):
    """The tensors of a step, by columns: many steps of many tensors are read at once.

    Attributes:
        names: FQN of each.
        kinds: Dtype and role of the kinds of tensors.
        kind: Of each tensor, the number of its kind.
        numbers: Name of a field of `TensorPoint` -> its value of each tensor.
    """

    names: list[str]
    kinds: list[tuple[str, str]]
    kind: npt.NDArray[np.int64]
    numbers: dict[str, npt.NDArray[Any]]

    def point(self, number: int) -> TensorPoint:
        """Return one tensor."""
        values = {name: column[number].item() for name, column in self.numbers.items()}
        return TensorPoint(self.names[number], *self.kinds[self.kind[number]], **values)

    def points(self) -> tuple[TensorPoint, ...]:
        """Return all tensors."""
        values = [self.numbers[name].tolist() for name in (*_INTEGERS, *_FLOATS)]
        spec = [self.kinds[n] for n in self.kind.tolist()]
        rows = zip(self.names, spec, *values, strict=True)
        return tuple(
            TensorPoint(fqn, dtype, role, numel, norm, mean, absmax, nan, inf, zeros, change, cosine)
            for fqn, (dtype, role), numel, nan, inf, zeros, norm, mean, absmax, change, cosine in rows
        )

    def of_role(self, role: str) -> npt.NDArray[np.bool_]:
        """Return of each tensor whether it has a role."""
        have = np.array([kind_role == role for _, kind_role in self.kinds], np.bool_)
        matching: npt.NDArray[np.bool_] = have[self.kind]
        return matching


def pack_points(points: Collection[TensorPoint]) -> bytes:
    """Return tensors in one compressed blob, in order."""
    kinds = list(dict.fromkeys((point.dtype, point.role) for point in points))
    place = {kind: n for n, kind in enumerate(kinds)}
    head = {"version": 1, "names": [point.fqn for point in points], "kinds": [list(kind) for kind in kinds]}
    arrays = {"kind": np.array([place[point.dtype, point.role] for point in points], np.int64)}
    for names, dtype in ((_INTEGERS, np.int64), (_FLOATS, np.float64)):
        columns = {name: np.array([getattr(point, name) for point in points], dtype) for name in names}
        arrays |= {name: column.view(np.int64) for name, column in columns.items()}  # floats by their bits
    return columnar_file.dump(head, arrays)


def unpack_columns(blob: bytes, tensors: int, heads: columnar_file.Heads | None = None) -> StepColumns:
    """Return the tensors of `pack_points` by columns; raise `InvalidText` for another blob.

    Args:
        blob: What was packed.
        tensors: How many tensors it has, by whoever stored it: nothing larger is allocated.
        heads: Of blobs that are unpacked together; the steps of a run mostly have one head.
    """
    loaded = attempt(columnar_file.load, blob, max_bytes=_HEAD + _TENSOR * max(tensors, 0), heads=heads)
    if isinstance(loaded, CkptError):
        raise InvalidText(f"these are no statistics: {loaded.message}")
    head, arrays = loaded
    with parsing("a blob of statistics"):
        names = list(map(str, head["names"]))
        kinds = [(str(dtype), str(role)) for dtype, role in head["kinds"]]
        numbers = {name: arrays[name] for name in _INTEGERS}
        numbers |= {name: arrays[name].view(np.float64) for name in _FLOATS}
        kind, shapes = arrays["kind"], {column.shape for column in (arrays["kind"], *numbers.values())}
        if len(names) != tensors:
            raise InvalidText(f"these are statistics of {len(names)} tensors, and not of {tensors}")
        if head["version"] != 1 or shapes != {(len(names),)}:
            raise InvalidText("these are statistics of another version, or truncated")
        if names and not 0 <= kind.min() <= kind.max() < len(kinds):
            raise InvalidText("these are statistics of unknown dtypes")
    return StepColumns(names, kinds, kind, numbers)


NOTHING = unpack_columns(pack_points(()), 0)
