"""Pack the statistics of all tensors of a checkpoint into one blob of columns, as the catalog stores them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from ckptcore.core import columnar_file
from ckptcore.errors import CkptError
from ckptcore.utils.foreign_text import InvalidText, parsing
from ckptcore.utils.isolation import attempt

_INTEGERS, _FLOATS = ("numel", "nan", "inf", "zeros"), ("norm", "mean", "absmax", "change", "cosine")


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


def unpack_points(blob: bytes) -> tuple[TensorPoint, ...]:
    """Return the tensors of `pack_points`; raise `InvalidText` for another blob."""
    loaded = attempt(columnar_file.load, blob)
    if isinstance(loaded, CkptError):
        raise InvalidText(f"these are no statistics: {loaded.message}")
    head, arrays = loaded
    with parsing("a blob of statistics"):
        names = list(map(str, head["names"]))
        kinds = [(str(dtype), str(role)) for dtype, role in head["kinds"]]
        columns = {name: arrays[name].tolist() for name in ("kind", *_INTEGERS)}
        columns |= {name: arrays[name].view(np.float64).tolist() for name in _FLOATS}
        if head["version"] != 1 or {len(names), *map(len, columns.values())} != {len(names)}:
            raise InvalidText("these are statistics of another version, or truncated")
        spec = [kinds[n] for n in columns.pop("kind")]
    return tuple(
        TensorPoint(name, *kind, **{column: values[n] for column, values in columns.items()})
        for n, (name, kind) in enumerate(zip(names, spec, strict=True))
    )
