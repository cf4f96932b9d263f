"""Compute statistics of the tensors of a checkpoint, and of what changed between two, in bounded memory.

Workers share the boxes of all tensors, as for a fingerprint. Boxes are runs of a tensor in row-major order,
so the segments of `ckptcore.fingerprints.statistics` are those of the full tensor, whatever format, topology,
budget and workers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptcore.checking.check import require_complete
from ckptcore.comparison.box_walk import OpenTensor, read_boxes
from ckptcore.comparison.measures import ratio
from ckptcore.comparison.opened import OpenSide, closing_sides
from ckptcore.comparison.tensor_processes import read_shared
from ckptcore.core.box import Box, flat_start
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.errors import UsageError
from ckptcore.fingerprints.statistics import (
    COLUMNS,
    Accumulator,
    MeasuredTensor,
    Statistics,
    is_comparable,
    pair_accumulator,
)
from ckptcore.fingerprints.statistics import accumulator as of_tensor
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Tiles
from ckptcore.reading.rereading import rereading
from ckptcore.utils.workers import Progress, ProgressMeter


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that two checkpoints have, and what changed from the first to the second.

    Attributes:
        fqn: Its name.
        before: Its statistics in the first.
        after: In the second.
        norm: Euclidean norm of the difference.
        cosine: Of the angle between both; None if one of them is zero, or not finite.
    """

    fqn: str
    before: Statistics
    after: Statistics
    norm: float
    cosine: float | None

    @property
    def relative(self) -> float:
        """The norm of the difference relative to that of the first; infinite where only that is zero."""
        return ratio(self.norm, self.before.norm)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; null for what is infinite."""
        relative = self.relative if math.isfinite(self.relative) else None
        sides = {"before": self.before.as_dict(), "after": self.after.as_dict()}
        return {"fqn": self.fqn, "change": relative, "cosine": self.cosine, **sides}


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed between two checkpoints.

    Attributes:
        tensors: Of each tensor that both have in one shape.
        only_before: Names that only the first has, or has in another shape.
        only_after: Those of the second.
        unmeasured: Tensors of both that have no numbers to compare: packed values, or complex beside real.
        specs: FQN -> dtype and shape of the tensors in the second.
        others: The statistics of tensors of the second that were compared with none.
    """

    tensors: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    unmeasured: tuple[str, ...]
    specs: Mapping[str, TensorSpec] = field(default_factory=dict, repr=False)
    others: tuple[MeasuredTensor, ...] = ()

    @property
    def measured(self) -> tuple[MeasuredTensor, ...]:
        """The statistics of all tensors of the second checkpoint that have numbers."""
        specs = ((self.specs[change.fqn], change.after) for change in self.tensors)
        compared = (MeasuredTensor(spec.fqn, spec.dtype, spec.shape, after) for spec, after in specs)
        return (*compared, *self.others)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        lists = {name: list(getattr(self, name)) for name in ("only_before", "only_after", "unmeasured")}
        return {"tensors": [tensor.as_dict() for tensor in self.tensors], **lists}


@rereading
def statistics(
    manifest: Manifest, settings: Settings, progress: Progress | None = None
) -> tuple[MeasuredTensor, ...]:
    """Compute the statistics of every tensor of a checkpoint that has numbers.

    Args:
        manifest: The checkpoint.
        settings: Memory and threads.
        progress: Called with the number of bytes read.

    Raises:
        DamagedCheckpoint: A tensor is incomplete or does not match its checksum.
    """
    require_complete(manifest, lambda name: True)
    return _measure(manifest, range(len(manifest.tensors)), settings, progress)


def _measure(
    manifest: Manifest, tensors: Sequence[int], settings: Settings, progress: Progress | None
) -> tuple[MeasuredTensor, ...]:
    """Compute the statistics of some tensors (rows of the manifest)."""
    rows = _read([manifest], [(n,) for n in tensors], settings, progress)
    specs = (manifest.tensors[n] for n in tensors)
    return tuple(
        MeasuredTensor(spec.fqn, spec.dtype, spec.shape, Statistics.of_row(spec.dtype, spec.numel, row))
        for spec, row in zip(specs, rows, strict=True)
        if row is not None
    )


def changes(
    before: Manifest, after: Manifest, settings: Settings, progress: Progress | None = None
) -> Changes:
    """Compute what changed in the tensors that two checkpoints have under one name and in one shape.

    Both are read once, side by side. Of the second, the other tensors are measured behind these.

    Args:
        before: The first checkpoint.
        after: The second.
        settings: Memory and threads.
        progress: Called with the number of bytes read.

    Raises:
        DamagedCheckpoint: A tensor is incomplete or does not match its checksum.
        UsageError: They have no tensor in common.
    """
    for side in (before, after):
        require_complete(side, lambda name: True)
    shared = [
        (before.index[spec.fqn], row)
        for row, spec in enumerate(after.tensors)
        if spec.fqn in before.index and before.tensors[before.index[spec.fqn]].shape == spec.shape
    ]
    if not shared:
        raise UsageError(
            "the checkpoints have no tensor of one name and shape",
            hint="`ckptcore inspect SRC` lists the names",
        )
    compared = [(a, b) for a, b in shared if is_comparable((before.tensors[a].dtype, after.tensors[b].dtype))]
    rows = _read([before, after], compared, settings, progress) if compared else []
    behind = {b for _, b in compared}
    alone = [row for row in range(len(after.tensors)) if row not in behind]
    others = _measure(after, alone, settings, progress) if alone else ()
    names = {after.tensors[row].fqn for _, row in shared}
    specs = [(before.tensors[a], after.tensors[b]) for a, b in compared]
    return Changes(
        tuple(_change(*pair, row) for pair, row in zip(specs, rows, strict=True) if row is not None),
        tuple(spec.fqn for spec in before.tensors if spec.fqn not in names),
        tuple(spec.fqn for spec in after.tensors if spec.fqn not in names),
        tuple(after.tensors[row].fqn for _, row in shared if row not in behind),
        {spec.fqn: spec for _, spec in specs},
        others,
    )


def _change(before: TensorSpec, spec: TensorSpec, row: Sequence[float]) -> Change:
    width = len(COLUMNS)
    a = Statistics.of_row(before.dtype, before.numel, row[:width])
    b = Statistics.of_row(spec.dtype, spec.numel, row[width : 2 * width])
    norm, root = row[2 * width :]  # a root, as products of norms can exceed float64
    defined = a.norm and b.norm and math.isfinite(a.norm) and math.isfinite(b.norm)
    cosine = root / a.norm * (abs(root) / b.norm) if defined else None
    # Rounding can make a cosine exceed 1.
    return Change(spec.fqn, a, b, norm, None if cosine is None else max(-1.0, min(1.0, cosine)))


Row = tuple[float, ...] | None


def _read(
    manifests: Sequence[Manifest],
    rows: Sequence[tuple[int, ...]],
    settings: Settings,
    progress: Progress | None,
) -> list[Row]:
    """Measure tensors, each given by its row in every manifest, in several processes where that pays."""
    sides = [OpenSide(manifest.root, manifest) for manifest in manifests]
    with closing_sides(sides):
        sizes = [
            sum(side.manifest.tensors[row].nbytes for side, row in zip(sides, side_rows, strict=True))
            for side_rows in rows
        ]
        meter = ProgressMeter(progress, "read", sum(sizes))
        numbers = read_shared(measure_tensors, sides, rows, sizes, settings, meter)
        for side in sides:
            side.finish()
    return numbers


class _Measured(OpenTensor):
    """A tensor while its boxes are read and measured, in one checkpoint or two."""

    measured: Accumulator | None = None
    result: Row = None

    def open(self) -> None:
        """Open the readers, and begin with no numbers."""
        super().open()
        dtypes, numel = [spec.dtype for spec in self.specs], self.spec.numel
        self.measured = (
            of_tensor(dtypes[0], numel)
            if len(dtypes) == 1
            else pair_accumulator((dtypes[0], dtypes[1]), numel)
        )

    def close(self) -> None:
        """Close the readers; keep the numbers alone."""
        super().close()
        if self.measured is not None:
            self.result, self.measured = self.measured.row(), None


def measure_tensors(
    sides: Sequence[OpenSide], rows: Sequence[tuple[int, ...]], settings: Settings, meter: ProgressMeter
) -> list[Row]:
    """Return the numbers of some tensors, read in the threads of this process.

    Args:
        sides: The checkpoints.
        rows: Of each tensor in each of them.
        settings: Memory and threads.
        meter: Counts the bytes that are read.
    """
    opened = [_Measured(sides, side_rows) for side_rows in rows]

    def worker(tiles: Tiles) -> Callable[[_Measured, Box], None]:
        *buffers, scratch = (tiles.take() for _ in (*sides, None))

        def read(tensor: _Measured, box: Box) -> None:
            elements = tensor.read(box, buffers, scratch)
            if tensor.measured is not None:
                tensor.measured.add(flat_start(tensor.spec.shape, box.offset), *elements)

        return read

    read_boxes(sides, opened, worker, settings, meter)
    return [tensor.result for tensor in opened]
