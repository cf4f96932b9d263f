"""Compute which file, and which rank, holds which box of a tensor, and where a hole or an overlap is."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptcore.checking.examine import inspect
from ckptcore.checking.summary import rank_of
from ckptcore.core.manifest import Manifest
from ckptcore.errors import UsageError
from ckptcore.formats import natural

MOST_BOXES = 4096  # of one tensor
MOST_CELLS = 1 << 20  # of the grid that the cuts of all boxes make
Counts = npt.NDArray[np.int32]
_MOST_MANIFESTS = 4  # manifests in memory


@dataclass(frozen=True, slots=True)
class ShardBox:
    """One stored box. owner: the rank in the file's name, or the file. lo, shape: in elements."""

    owner: str
    file: str
    lo: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle of the picture: first row and column, height and width, how often it is stored."""

    row: int
    column: int
    height: int
    width: int
    times: int
    owner: str


@dataclass(frozen=True)
class ShardMap:
    """The boxes of one tensor, and their projection on two of its dimensions.

    Attributes:
        fqn: The tensor.
        dtype: Its dtype.
        shape: Its shape.
        boxes: Its boxes.
        dims: The dimensions that are drawn as rows and columns; -1 for none.
        cells: The rectangles of the picture.
        holes: Elements that no box holds.
        overlaps: Elements that several boxes hold.
        grid: In how many parts each dimension is cut.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[ShardBox, ...]
    dims: tuple[int, int]
    cells: tuple[Cell, ...]
    holes: int
    overlaps: int
    grid: tuple[int, ...]

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners of boxes, in natural order."""
        return tuple(sorted({box.owner for box in self.boxes}, key=natural))


class Manifests:
    """The manifests that were read last. Reading one takes seconds, so only one is read at a time."""

    def __init__(self) -> None:
        self._recent: OrderedDict[tuple[str, str], Manifest] = OrderedDict()
        self._turn = threading.Lock()

    def read(self, uri: str, digest: str) -> Manifest:
        """Return the manifest of a recorded checkpoint. Raises `CkptError`, also if it is another one now."""
        key = (uri, digest)
        with self._turn:
            if key in self._recent:
                self._recent.move_to_end(key)
                return self._recent[key]
            manifest = inspect(uri, recover=True)
            if manifest.digest.rpartition(":")[2] != digest:
                manifest_now = manifest.digest.rpartition(":")[2][:12]
                raise UsageError(
                    f"the checkpoint at {uri} is another one now (its manifest is {manifest_now})",
                    hint="`ckptcore validate` records what is there",
                )
            self._recent[key] = manifest
            while len(self._recent) > _MOST_MANIFESTS:
                self._recent.popitem(last=False)
            return manifest


def shard_map(manifest: Manifest, fqn: str) -> ShardMap:
    """Return where the boxes of a tensor are. Raises `UsageError`."""
    index = manifest.index.get(fqn)
    if index is None:
        raise UsageError(f"the checkpoint has no tensor {fqn!r}", hint="search its tensors")
    spec = manifest.tensors[index]
    rows = int(manifest.chunks.first[index + 1] - manifest.chunks.first[index])
    if rows > MOST_BOXES:
        raise UsageError(f"{fqn} has {rows} boxes; up to {MOST_BOXES} are drawn")
    boxes = []
    for chunk in manifest.chunks_of(index):
        file = manifest.files[int(manifest.items.file[chunk.item])].path
        boxes.append(ShardBox(owner_of(file), file, chunk.box.offset, chunk.box.shape))
    return laid_out(fqn, spec.dtype, spec.shape, boxes)


def laid_out(fqn: str, dtype: str, shape: Sequence[int], boxes: Sequence[ShardBox]) -> ShardMap:
    """Return the picture of boxes of a tensor."""
    cuts = [_cuts(extent, [(b.lo[d], b.lo[d] + b.shape[d]) for b in boxes]) for d, extent in enumerate(shape)]
    grid = tuple(max(len(edges) - 1, 0) for edges in cuts)
    # In float64: a product of int64 could overflow, and then pass the limit.
    cells_of_grid = int(np.prod(grid, dtype=np.float64)) if grid else 1
    if cells_of_grid > MOST_CELLS:
        raise UsageError(f"{fqn} is cut into {cells_of_grid} parts; up to {MOST_CELLS} are drawn")
    times = np.zeros(grid, dtype=np.int32)
    owner = np.full(grid, -1, dtype=np.int32)
    for number, box in enumerate(boxes):
        part = tuple(
            slice(cuts[d].index(box.lo[d]), cuts[d].index(box.lo[d] + box.shape[d]))
            for d in range(len(shape))
        )
        times[part] += 1
        owner[part] = number
    volume = np.ones(grid, dtype=np.float64)
    for d, edges in enumerate(cuts):
        width = np.diff(np.asarray(edges, dtype=np.float64))
        volume *= width.reshape([-1 if i == d else 1 for i in range(len(shape))])
    dims = _dims(shape, grid)
    empty = not all(shape)
    return ShardMap(
        fqn,
        dtype,
        tuple(shape),
        tuple(boxes),
        dims,
        () if empty else tuple(_cells(times, owner, cuts, dims, boxes)),
        int(volume[times == 0].sum()) if len(grid) else int(times == 0),
        int(volume[times > 1].sum()) if len(grid) else int(times > 1),
        grid,
    )


def owner_of(file: str) -> str:
    """Return the rank in a file's name, or the name.

    >>> owner_of("__3_0.distcp"), owner_of("iter_1/mp_rank_01_002/model.pt"), owner_of("model.safetensors")
    ('rank 3', 'rank 01_002', 'model.safetensors')
    """
    rank = rank_of(file)
    return f"rank {rank}" if rank is not None else file.rpartition("/")[2]


def _cuts(extent: int, spans: Sequence[tuple[int, int]]) -> list[int]:
    inside = {edge for span in spans for edge in span if edge >= 0}
    return sorted({0, extent} | inside)


def _dims(shape: Sequence[int], grid: Sequence[int]) -> tuple[int, int]:
    """Return the two dimensions that show most: those that are cut, then the longest."""
    best = sorted(range(len(shape)), key=lambda d: (-min(grid[d], 2), -shape[d], d))[:2]
    if not best:
        return -1, -1
    return (-1, best[0]) if len(best) == 1 else (min(best), max(best))


def _cells(
    times: Counts,
    owner: Counts,
    cuts: Sequence[Sequence[int]],
    dims: tuple[int, int],
    boxes: Sequence[ShardBox],
) -> list[Cell]:
    """Return the rectangles of the picture: over the other dimensions, the worst case counts."""
    keep = [d for d in dims if d >= 0]
    hidden_dims = tuple(d for d in range(times.ndim) if d not in keep)
    # A hole anywhere is a hole; else the most frequent storage counts.
    low, high = times.min(axis=hidden_dims), times.max(axis=hidden_dims)
    worst = np.where(low == 0, 0, high)
    who = owner.max(axis=hidden_dims)
    worst, who = np.atleast_2d(worst), np.atleast_2d(who)
    rows = list(cuts[dims[0]]) if dims[0] >= 0 else [0, 1]
    columns = list(cuts[dims[1]]) if dims[1] >= 0 else [0, 1]
    cells = []
    for r in range(worst.shape[0]):
        for c in range(worst.shape[1]):
            number = int(who[r, c])
            cells.append(
                Cell(
                    rows[r],
                    columns[c],
                    rows[r + 1] - rows[r],
                    columns[c + 1] - columns[c],
                    int(worst[r, c]),
                    boxes[number].owner if number >= 0 else "",
                )
            )
    return cells
