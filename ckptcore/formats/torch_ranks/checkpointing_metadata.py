"""Read metadata.pkl of torch_checkpointing 0.1.1: plain values, in which no class is named.

An item is listed where it declares a resharder (torch_checkpointing/distributed_metadata.py). Version 2.0
groups tensors by item, version 1.0 lists full paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptcore.core.metadata_budget import meter
from ckptcore.encodings.pickle.unpickler import loads
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.base import Source
from ckptcore.formats.common.rank_file_names import METADATA
from ckptcore.store import inner_path
from ckptcore.utils.foreign_text import InvalidText, load_json
from ckptcore.utils.text import short_repr

_MAX_RANKS, _GROUP = 1 << 20, 200  # most ranks; bytes of memory per group of ranks


@dataclass(frozen=True, slots=True)
class Sharding:
    """How some ranks hold a tensor: ``kind`` and fields of its metadata, and the ranks."""

    kind: str
    data: Mapping[str, Any]
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class SavedItem:
    """An item that can be resharded.

    Attributes:
        paths: Rank -> file.
        tensors: Name in the item -> shardings, of which each rank is in one.
    """

    paths: Mapping[int, str]
    tensors: Mapping[str, tuple[Sharding, ...]] = field(default_factory=dict)

    def of_rank(self, rank: int) -> dict[str, Sharding]:
        """Return name -> sharding of the tensors that a rank holds."""
        return {
            name: sharding
            for name, shardings in self.tensors.items()
            for sharding in shardings
            if rank in sharding.ranks
        }


@dataclass(frozen=True, slots=True)
class SavedMetadata:
    """The content of metadata.pkl: the number of ranks, and the items that it lists."""

    world: int
    items: Mapping[str, SavedItem]


def read_metadata(source: Source) -> SavedMetadata | None:
    """Return the content of metadata.pkl; None without one.

    Raises:
        MalformedCheckpoint: It is not the metadata of a checkpoint.
        UnsafeContent: It names a global, or a path that leaves the folder.
        MetadataTooLarge: It is over the budget of metadata.
    """
    size = source.listing.get(METADATA)
    if size is None:
        return None
    meter().require(size, METADATA)
    tree = loads(source.store.read(METADATA, 0, size), {}, label=METADATA)
    source.explain(METADATA)
    try:
        return _parse(tree)
    except (InvalidText, KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedCheckpoint(
            f"{METADATA} is not the metadata of torch_checkpointing: {short_repr(error, 120)}", file=METADATA
        ) from error


def _parse(tree: Any) -> SavedMetadata:
    world, version = tree["world_size"], tree.get("version", "1.0")
    if type(world) is not int or not 0 < world <= _MAX_RANKS:
        raise ValueError(f"world_size is {short_repr(world, 40)}")
    if version not in ("1.0", "2.0"):
        raise ValueError(f"version {short_repr(version, 40)} is not known (1.0 and 2.0 are)")
    layouts: Mapping[str, Mapping[Any, Any]]
    tensors: dict[str, dict[str, tuple[Sharding, ...]]] = {}
    rows: Iterator[tuple[str, list[Any], Any]]
    if version == "2.0":
        layouts = {
            item: dict(item_metadata["rank_to_layout_info"])
            for item, item_metadata in tree["metadata"].items()
        }
        rows = (
            (item, _path(path), groups)
            for item, item_metadata in tree["metadata"].items()
            for path, groups in item_metadata["nested_path_to_metadata"].items()
        )
    else:
        by_rank = tree["rank_to_layout_info_mappings"]
        full = [(_path(path), groups) for path, groups in tree["metadata"].items()]
        layouts = {
            str(p[0]): {rank: rank_layouts.get(p[0]) for rank, rank_layouts in by_rank.items()}
            for p, _ in full
        }
        rows = ((str(path[0]), path[1:], groups) for path, groups in full)
    for item, path, groups in rows:
        name = ".".join(map(str, path))
        if name in tensors.setdefault(item, {}):
            raise ValueError(f"two paths of {item} are {short_repr(name, 80)}")
        tensors[item][name] = tuple(_sharding(group) for group in groups)
    items = {
        str(item): SavedItem(_paths(str(item), layout, world), tensors.get(item, {}))
        for item, layout in layouts.items()
    }
    used = [path for item in items.values() for path in item.paths.values()]
    if len(set(used)) < len(used):
        raise ValueError("two ranks or items have one file")
    return SavedMetadata(world, items)


def _path(text: str) -> list[Any]:
    path = load_json(text.encode())
    if not isinstance(path, list) or any(type(part) not in (str, int) for part in path):
        raise ValueError(f"{short_repr(text, 80)} is no path")
    return path


def _sharding(group: Mapping[str, Any]) -> Sharding:
    meter().keep(_GROUP, METADATA)
    stored = group["sharding_metadata"]
    ranks, data = group["ranks"], stored["data"]
    if type(data) is not dict or any(type(rank) is not int for rank in ranks):
        raise ValueError(f"a sharding of {short_repr(json.dumps(data, default=str), 80)}")
    return Sharding(str(stored["type"]), data, frozenset(ranks))


def _paths(item: str, layout: Mapping[Any, Any], world: int) -> dict[int, str]:
    ranks = {int(rank): info for rank, info in layout.items()}
    if ranks.keys() != set(range(world)):
        raise ValueError(f"{item} has files of {len(ranks)} ranks, and world_size is {world}")
    return {
        rank: f"{item}_{rank}.pt" if info is None else inner_path(str(info["file_path"]), origin=METADATA)
        for rank, info in sorted(ranks.items())
    }
