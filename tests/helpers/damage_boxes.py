"""Damage boxes: false statements of `.metadata` about shapes, chunks and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from damaging import COVER, MALFORMED, Folder, NotApplicable, Place
from edits import CONTRADICTIONS, Edits, at, set_chunk, size, spec, wide

TABLE = Edits()


@TABLE.edit("hole", "no-place")
def chunk_dropped(meta: Any, place: Place, folder: Folder) -> None:
    spec(meta, place).chunks.pop(at(meta, place))


@TABLE.edit("hole")
def chunk_dropped_everywhere(meta: Any, place: Place, folder: Folder) -> None:
    spec(meta, place).chunks.pop(at(meta, place))
    del meta.storage_data[place.key]


@TABLE.edit("hole", "no-place")
def all_chunks_dropped(meta: Any, place: Place, folder: Folder) -> None:
    spec(meta, place).chunks.clear()


@TABLE.edit("overlap", "item-overlap", harmless=True)
def chunk_named_twice(meta: Any, place: Place, folder: Folder) -> None:
    chunks = spec(meta, place).chunks
    chunks.append(chunks[at(meta, place)])


@TABLE.edit("overlap", "item-overlap", "hole", "no-place", "out-of-bounds")
def chunk_overlaps(meta: Any, place: Place, folder: Folder) -> None:
    """A second chunk, half over the first, with the first one's bytes."""
    sizes = wide(meta, place)
    stored = spec(meta, place)
    dim = max(range(len(sizes)), key=lambda d: sizes[d])
    moved = list(place.key.offset)
    moved[dim] += 1 if moved[dim] + sizes[dim] < stored.size[dim] else -1
    if min(moved) < 0:
        stored.size = size(*(n + (d == dim) for d, n in enumerate(stored.size)))
        moved[dim] = 1
    stored.chunks.append(replace(stored.chunks[at(meta, place)], offsets=size(*moved)))
    meta.storage_data[replace(place.key, offset=size(*moved), index=None)] = meta.storage_data[place.key]


@TABLE.edit("hole", "no-place", "out-of-bounds", "overlap", "item-mismatch")
def chunk_moved(meta: Any, place: Place, folder: Folder) -> None:
    sizes = wide(meta, place)
    dim = max(range(len(sizes)), key=lambda d: sizes[d])
    set_chunk(meta, place, offsets=size(*(o + (d == dim) for d, o in enumerate(place.key.offset))))


@TABLE.edit("hole", "no-place", "item-mismatch")
def chunk_shrunk(meta: Any, place: Place, folder: Folder) -> None:
    sizes = wide(meta, place)
    dim = max(range(len(sizes)), key=lambda d: sizes[d])
    set_chunk(meta, place, sizes=size(*(n - (d == dim) for d, n in enumerate(sizes))))


@TABLE.edit("out-of-bounds", "overlap", "length-mismatch", "item-mismatch")
def chunk_grown(meta: Any, place: Place, folder: Folder) -> None:
    sizes = wide(meta, place)
    set_chunk(meta, place, sizes=size(*(n * 2 for n in sizes)))


@TABLE.edit("hole", "malformed-metadata")
def shape_grown(meta: Any, place: Place, folder: Folder) -> None:
    wide(meta, place)
    shape = tuple(spec(meta, place).size)
    spec(meta, place).size = size(shape[0] + 1, *shape[1:])


@TABLE.edit("out-of-bounds", "malformed-metadata")
def shape_shrunk(meta: Any, place: Place, folder: Folder) -> None:
    wide(meta, place)
    shape = tuple(spec(meta, place).size)
    spec(meta, place).size = size(shape[0] - 1, *shape[1:])


@TABLE.edit(COVER, MALFORMED)
def shape_of_another_rank(meta: Any, place: Place, folder: Folder) -> None:
    spec(meta, place).size = size(*spec(meta, place).size, 1)


@TABLE.edit("item-mismatch", COVER, MALFORMED)
def shape_transposed(meta: Any, place: Place, folder: Folder) -> None:
    """Every statement agrees on the transposed shape; only the item knows better."""
    stored = spec(meta, place)
    if len(stored.size) != 2 or len(set(stored.size)) == 1:
        square = [
            f
            for f, s in meta.state_dict_metadata.items()
            if hasattr(s, "chunks") and len(s.size) == 2 and s.size[0] != s.size[1] and 0 not in s.size
        ]
        if not square:
            raise NotApplicable("no tensor whose transpose has another shape")
        fqn = square[0]
    else:
        fqn = place.key.fqn
    stored = meta.state_dict_metadata[fqn]
    stored.size = size(*reversed(stored.size))
    moved = {}
    for i, c in enumerate(stored.chunks):
        stored.chunks[i] = replace(c, offsets=size(*reversed(c.offsets)), sizes=size(*reversed(c.sizes)))
    for key, info in meta.storage_data.items():
        if key.fqn == fqn:
            key = replace(key, offset=size(*reversed(key.offset)))
        moved[key] = info
    meta.storage_data = moved


@TABLE.edit("item-mismatch", "length-mismatch", "hole", MALFORMED)
def shape_flattened(meta: Any, place: Place, folder: Folder) -> None:
    stored = spec(meta, place)
    if len(stored.size) < 2 or len(stored.chunks) != 1:
        raise NotApplicable("the biggest tensor is flat or sharded")
    stored.size = size(stored.size.numel())
    set_chunk(meta, place, offsets=size(0), sizes=stored.size)


def _false_dtype(name: str, of_width: Callable[[int], int]) -> None:
    @TABLE.edit("item-mismatch", "length-mismatch", MALFORMED, name=name)
    def _(meta: Any, place: Place, folder: Folder) -> None:
        import torch

        stored = spec(meta, place)
        width = of_width(stored.properties.dtype.itemsize)
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if width not in kinds or kinds[width] == stored.properties.dtype:
            raise NotApplicable("no dtype of that width")
        stored.properties.dtype = kinds[width]


_false_dtype("dtype-of-the-same-width", lambda width: width)
_false_dtype("dtype-twice-as-wide", lambda width: width * 2)
_false_dtype("dtype-half-as-wide", lambda width: width // 2)


# -------------------------------------------------------------------------------- absurd numbers


def _numbers(name: str, shape: Any, offsets: Any = None, sizes: Any = None) -> None:
    """Shapes that no tensor has, consistently in every statement about one tensor."""

    @TABLE.edit(CONTRADICTIONS, name=f"numbers-{name}")
    def _(meta: Any, place: Place, folder: Folder) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        stored = spec(meta, place)
        info = meta.storage_data[place.key]
        start = tuple(0 for _ in shape) if offsets is None else offsets
        stored.size = shape
        stored.chunks = [ChunkStorageMetadata(start, shape if sizes is None else sizes)]
        for key in [k for k in meta.storage_data if k.fqn == place.key.fqn]:
            del meta.storage_data[key]
        meta.storage_data[replace(place.key, offset=start, index=0)] = info


_numbers("of-a-petabyte", (10**15,))
_numbers("of-10^12-rows", (10**12, 1))
_numbers("past-2^63", (1 << 63,))
_numbers("past-2^70", (1 << 70, 3))
_numbers("whose-product-wraps", (1 << 32, 1 << 32))
_numbers("negative", (-4, -4))
_numbers("of-rank-5000", (1,) * 5000)
_numbers("fractions", (4.0, 2.5))
_numbers("texts", ("4", "2"))
_numbers("none", (None,))
_numbers("nested", ((1, 2), 3))
_numbers("offset-negative", (4,), (-2,), (4,))
_numbers("offset-past-2^63", (4,), ((1 << 63) - 1,), (4,))
_numbers("chunk-of-another-rank", (4,), (0, 0), (2, 2))


@TABLE.edit(CONTRADICTIONS)
def one_chunk_named_200000_times(meta: Any, place: Place, folder: Folder) -> None:
    """A huge tensor whose chunk is named again and again, by two bytes each."""
    stored = spec(meta, place)
    stored.size = size(*(10**6 * n for n in stored.size))
    stored.chunks *= 200_000
