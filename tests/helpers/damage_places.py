"""Damage places: false statements of `.metadata` about where bytes are, and of which tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from damaging import COVER, ITEM, MALFORMED, PATH, Codes, Folder, NotApplicable, Place
from edits import CONTRADICTIONS, Edits, at, set_place, spec

TABLE = Edits()
FLAW = MALFORMED | COVER | ITEM | {"unsupported-dtype", "unsupported-format"}


@TABLE.edit("no-place")
def place_dropped(meta: Any, place: Place, folder: Folder) -> None:
    del meta.storage_data[place.key]


@TABLE.edit("no-place", MALFORMED)
def all_places_dropped(meta: Any, place: Place, folder: Folder) -> None:
    meta.storage_data = {}


@TABLE.edit(CONTRADICTIONS, needs="global")
def tensor_forgotten(meta: Any, place: Place, folder: Folder) -> None:
    del meta.state_dict_metadata[place.key.fqn]


@TABLE.edit(CONTRADICTIONS, needs="global")
def tensor_forgotten_everywhere(meta: Any, place: Place, folder: Folder) -> None:
    del meta.state_dict_metadata[place.key.fqn]
    meta.storage_data = {k: v for k, v in meta.storage_data.items() if k.fqn != place.key.fqn}
    meta.planner_data = {k: v for k, v in (meta.planner_data or {}).items() if k != place.key.fqn}


@TABLE.edit(CONTRADICTIONS, "stray-file", "not-complete", needs="global")
def everything_forgotten(meta: Any, place: Place, folder: Folder) -> None:
    meta.state_dict_metadata, meta.storage_data, meta.planner_data = {}, {}, {}


@TABLE.edit(CONTRADICTIONS)
def item_one_byte_later(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, offset=place.start + 1)


@TABLE.edit(CONTRADICTIONS)
def item_behind_the_file(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, offset=place.file.stat().st_size + 10_000)


@TABLE.edit(CONTRADICTIONS)
def item_starts_before_the_file(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, offset=-place.length)


@TABLE.edit(CONTRADICTIONS)
def item_empty(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, length=0)


@TABLE.edit(CONTRADICTIONS)
def item_one_byte_short(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, length=place.length - 1)


@TABLE.edit(CONTRADICTIONS)
def item_huge(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, length=1 << 62)


@TABLE.edit(CONTRADICTIONS)
def item_negative(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, length=-5)


@TABLE.edit(CONTRADICTIONS)
def place_of_a_number_that_is_text(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, offset="0")


def _twins(meta: Any, folder: Folder) -> tuple[Any, Any]:
    """Keys of two tensor items of one dtype and shape with different bytes."""
    seen: dict[Any, list[Place]] = {}
    for place in folder.tensors():
        if place.key not in meta.storage_data:
            continue
        stored = spec(meta, place)
        mark = (str(stored.properties.dtype), tuple(stored.chunks[at(meta, place)].sizes))
        for other in seen.setdefault(mark, []):
            if folder.read(other) != folder.read(place):
                return other.key, place.key
        seen[mark].append(place)
    raise NotApplicable("no two items of one dtype and shape")


@TABLE.edit(CONTRADICTIONS)
def places_swapped(meta: Any, place: Place, folder: Folder) -> None:
    a, b = _twins(meta, folder)
    meta.storage_data[a], meta.storage_data[b] = meta.storage_data[b], meta.storage_data[a]


@TABLE.edit("item-overlap", CONTRADICTIONS)
def two_chunks_in_one_place(meta: Any, place: Place, folder: Folder) -> None:
    a, b = _twins(meta, folder)
    meta.storage_data[a] = meta.storage_data[b]


@TABLE.edit(CONTRADICTIONS)
def places_of_different_shapes_swapped(meta: Any, place: Place, folder: Folder) -> None:
    stored = spec(meta, place)
    sizes = tuple(stored.chunks[at(meta, place)].sizes)
    for other in reversed(folder.tensors()):
        if other.key not in meta.storage_data or other.key == place.key:
            continue
        theirs = spec(meta, other)
        if tuple(theirs.chunks[at(meta, other)].sizes) != sizes:
            data = meta.storage_data
            data[place.key], data[other.key] = data[other.key], data[place.key]
            return
    raise NotApplicable("all chunks have one shape")


@TABLE.edit("no-place", MALFORMED, "hole", needs="global")
def name_changed_in_one_table(meta: Any, place: Place, folder: Folder) -> None:
    meta.state_dict_metadata[place.key.fqn + "x"] = meta.state_dict_metadata.pop(place.key.fqn)


@TABLE.edit(CONTRADICTIONS, "refused-global")
def object_called_a_tensor(meta: Any, place: Place, folder: Folder) -> None:
    for key, known in meta.state_dict_metadata.items():
        if not hasattr(known, "chunks"):
            meta.state_dict_metadata[key] = meta.state_dict_metadata[place.key.fqn]
            return
    raise NotApplicable("no objects are stored")


@TABLE.edit(CONTRADICTIONS, "refused-global", harmless=True)
def tensor_called_an_object(meta: Any, place: Place, folder: Folder) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    meta.state_dict_metadata[place.key.fqn] = BytesStorageMetadata()


def _path(name: str, make: Callable[[Place, Folder], Any], *codes: str | Codes) -> None:
    @TABLE.edit(PATH, *codes, name=f"path-{name}")
    def _(meta: Any, place: Place, folder: Folder) -> None:
        set_place(meta, place, relative_path=make(place, folder))


def _outside(place: Place, folder: Folder) -> Path:
    """A good copy of the data file, outside the folder: following the path would work."""
    copy = folder.sentinel.with_name("outside.distcp")
    copy.write_bytes(place.file.read_bytes())
    return copy


_path("absolute", lambda place, folder: str(_outside(place, folder)))
_path("of-a-system-file", lambda place, folder: "/etc/passwd")
_path("upwards", lambda place, folder: f"../{_up(place, folder)}")
_path("down-and-up", lambda place, folder: f"x/../../{_up(place, folder)}")
_path("with-a-zero", lambda place, folder: place.file.name + "\x00", MALFORMED, "missing-file")
_path("empty", lambda place, folder: "", MALFORMED, "missing-file", "source-unreadable")
_path("dot", lambda place, folder: ".", MALFORMED, "missing-file", "source-unreadable")
_path("a-number", lambda place, folder: 7, MALFORMED)
_path("of-a-url", lambda place, folder: "http://127.0.0.1:1/x", MALFORMED, "missing-file")


def _up(place: Place, folder: Folder) -> str:
    copy = folder.path.parent / "outside.distcp"
    copy.write_bytes(place.file.read_bytes())
    return copy.name


@TABLE.edit(FLAW, "unsupported-format", "malformed-item")
def codec_unknown(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, transform_descriptors=["stream.evil/1"])


@TABLE.edit(FLAW, needs="plain")
def codec_that_is_none(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, transform_descriptors=["stream.zstd/1"])


@TABLE.edit(FLAW, needs="zstd")
def codec_forgotten(meta: Any, place: Place, folder: Folder) -> None:
    set_place(meta, place, transform_descriptors=None)
