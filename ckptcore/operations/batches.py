"""Group the checkpoints of a sweep into batches that are converted together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptcore.conversion.batch import MOST
from ckptcore.store import local_path

if TYPE_CHECKING:
    from ckptcore.operations.sweep_items import SweepItem

SMALL = 256 << 20  # bytes of a checkpoint; a larger one keeps disks and processors busy alone


def batches(items: Sequence[SweepItem], ready: Sequence[int], most: int = MOST) -> Iterator[list[int]]:
    """Yield the positions of checkpoints to convert together, in their order.

    A batch has small checkpoints that replace nothing, with local destinations of which none is inside
    another one: their conversions cannot meet. Any other checkpoint is a batch of its own.

    Args:
        items: The checkpoints of a root.
        ready: Positions of those to convert.
        most: The most checkpoints of a batch.
    """
    batch: list[int] = []
    places: list[str] = []
    for n in ready:
        place = _place(items[n])
        meets = place is None or any(_is_inside(place, p) or _is_inside(p, place) for p in places)
        if batch and (meets or len(batch) >= most):
            yield batch
            batch, places = [], []
        if place is None:
            yield [n]
        else:
            batch.append(n)
            places.append(place)
    if batch:
        yield batch


def _place(item: SweepItem) -> str | None:
    """Return the destination of a checkpoint that may be in a batch, else None."""
    request = item.request
    if request is None or request.replaces or item.nbytes > SMALL:
        return None
    path = local_path(request.destination)
    return None if path is None else str(path.absolute())


def _is_inside(place: str, other: str) -> bool:
    return place == other or place.startswith(f"{other.rstrip('/')}/")
