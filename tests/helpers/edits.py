"""Change one statement of `.metadata`, and keep everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from damaging import COVER, ITEM, MALFORMED, Codes, Damage, Folder, NotApplicable, Place, Table

CONTRADICTIONS: Codes = COVER | ITEM | MALFORMED | {"item-overlap", "truncated-file", "oversized-file"}
Change = Callable[[Any, Place, Folder], None]


class Edits(Table):
    """Damages that are edits of the metadata."""

    def edit(
        self, *codes: str | Codes, needs: str = "any", harmless: bool = False, name: str = ""
    ) -> Callable[[Change], None]:
        """Enters a function of (metadata, place, folder) that changes the metadata.

        The place is that of the biggest tensor item, and the metadata is the file that names it.
        """
        allowed = frozenset[str]().union(*({c} if isinstance(c, str) else c for c in codes))

        def enter(change: Change) -> None:
            def make(folder: Folder) -> None:
                place = folder.tensors()[0]
                meta = folder.load(place.metadata)
                change(meta, place, folder)
                folder.dump(meta, place.metadata)

            key = name or change.__name__.replace("_", "-")
            self.add(Damage(key, make, allowed, needs, harmless))

        return enter


def spec(meta: Any, place: Place) -> Any:
    return meta.state_dict_metadata[place.key.fqn]


def at(meta: Any, place: Place) -> int:
    chunks = spec(meta, place).chunks
    return next(i for i, c in enumerate(chunks) if tuple(c.offsets) == tuple(place.key.offset))


def set_chunk(meta: Any, place: Place, offsets: Any = None, sizes: Any = None) -> None:
    """Changes a chunk's box, and the key of its place with it."""
    chunks = spec(meta, place).chunks
    row = at(meta, place)
    old = chunks[row]
    chunks[row] = replace(
        old, offsets=old.offsets if offsets is None else offsets, sizes=old.sizes if sizes is None else sizes
    )
    info = meta.storage_data.pop(place.key)
    meta.storage_data[replace(place.key, offset=chunks[row].offsets)] = info


def set_place(meta: Any, place: Place, **changes: Any) -> None:
    meta.storage_data[place.key] = replace(meta.storage_data[place.key], **changes)


def size(*shape: int) -> Any:
    import torch

    return torch.Size(shape)


def wide(meta: Any, place: Place) -> tuple[int, ...]:
    """The chunk's sizes; only tensors with a dim of more than one element will do."""
    sizes = tuple(spec(meta, place).chunks[at(meta, place)].sizes)
    if not sizes or max(sizes) < 2:
        raise NotApplicable("the biggest chunk is a single element")
    return sizes
