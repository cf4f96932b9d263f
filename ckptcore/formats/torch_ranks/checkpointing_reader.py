"""Read the items of all ranks: each file by its suffix, its shards by the file itself or by metadata.pkl.

A ``.pt`` file has DTensors, which record their boxes. A ``.safetensors`` file has the local tensors alone,
and metadata.pkl has the mesh and the placements, or the boxes of a tensor of another kind. It lists an item
that declares a resharder (torch_checkpointing/distributed_metadata.py), and names no class. Version 2.0
groups tensors by item, version 1.0 lists full paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from blake3 import blake3

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Item, Manifest, Unread, View, is_row_major, row_major
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter
from ckptcore.core.object_tree import Named, encode
from ckptcore.core.tree_paths import Path
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.pickle.unpickler import Record, loads
from ckptcore.encodings.safetensors_header import read_header
from ckptcore.errors import MalformedCheckpoint, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.optimizer_numbers import Shape
from ckptcore.formats.common.part_proof import lack, unproven_findings
from ckptcore.formats.common.rank_file_names import (
    ITEM,
    METADATA,
    PartName,
    PartNumber,
    RankFiles,
    item_files,
)
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.torch_ranks.optimizer import Params
from ckptcore.formats.torch_ranks.placement import DTENSOR, Placed, Placer
from ckptcore.formats.torch_ranks.reader import Content, LocalShard, LocalShards, Plain, RankReader, read_rank
from ckptcore.store import inner_path
from ckptcore.utils.foreign_text import InvalidText, load_json
from ckptcore.utils.text import short_repr

_MAX_RANKS, _GROUP = 1 << 20, 200  # most ranks; bytes of memory per group of ranks
_TEMPORARY = "tmp_"  # checkpoint_writer.py: renamed when all ranks have written
_MAX_LISTED = 20


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


def read_items(source: Source) -> Manifest:
    """Read the manifest of all items and ranks.

    Raises:
        MalformedCheckpoint: A file cannot be parsed, or ranks contradict each other.
        CkptError: What `read_metadata` and `read_rank` raise.
    """
    saved, builder = read_metadata(source), Builder()
    listed = saved.items if saved is not None else {}
    paths_by_item = item_files(source)
    builder.findings += [
        finding("stray-file", "files", f"{path} is of no rank in {METADATA}, and is not read", file=path)
        for item in paths_by_item.keys() & listed.keys()
        for path in paths_by_item[item].values()
        if path not in listed[item].paths.values()
    ]
    unlisted = {item: paths for item, paths in paths_by_item.items() if item not in listed}
    kinds = [RankFiles(item, saved.world if saved else None, paths) for item, paths in unlisted.items()]
    for item, saved_item in listed.items():
        present_paths = {rank: path for rank, path in saved_item.paths.items() if path in source.listing}
        lost = [path for rank, path in saved_item.paths.items() if rank not in present_paths]
        for path in lost[:_MAX_LISTED]:
            builder.report("missing-rank", "files", f"{path} is missing: {METADATA} lists it", file=path)
        if present_paths:
            kinds.append(RankFiles(item, None, present_paths))
    # The model first: its parameters prove the names of the optimizer's numbered states.
    kinds.sort(key=lambda kind: (kind.stem != "model", kind.stem))
    files = _Files(source, builder, saved, {path: (k.stem, r) for k in kinds for r, path in k.paths.items()})
    reader = RankReader(source, builder, files.read)
    for kind in kinds:
        reader.add(kind, kind.stem)
    world = saved.world if saved is not None else reader.world
    for kind in kinds:
        if kind.stem not in listed:
            builder.findings += reader.missing(kind)
    for kind in reader.unproven if world is None else ():
        shapes = {t.fqn: t.shape for t in builder.tensors}
        parts = tuple(_part(path) for path in kind.paths.values())
        builder.findings += unproven_findings(source, parts, shapes, builder.blobs)
    folder = source.store.url.rstrip("/").rsplit("/", 1)[-1]
    if folder.startswith(_TEMPORARY):
        message = f"{folder} is the folder of a save that did not finish: it is renamed at the end"
        builder.findings.append(lack(source, "not-complete", "files", message))
    origin: dict[str, Any] = {"parts": [kind.stem for kind in kinds]}
    if world is not None:
        origin["world_size"] = world
    return reader.manifest("torch_checkpointing", origin)


def _part(path: str) -> PartName:
    """Return a file of a rank as a part that nothing counts."""
    match = ITEM.match(path)
    assert match is not None  # of the default names: others are listed in metadata.pkl
    return PartName(path, (PartNumber(int(match["rank"]), None, 0, match.span("rank")),))


class _Files:
    """Read one file at a time, as `read_rank` does, and place its tensors by metadata.pkl."""

    def __init__(
        self,
        source: Source,
        builder: Builder,
        saved: SavedMetadata | None,
        owners: Mapping[str, tuple[str, int]],
    ) -> None:
        self._source, self._builder, self._saved, self._owners = source, builder, saved, owners
        self._kinds: dict[str, str] = {}  # item in JSON -> kind of its value on the first rank

    def read(self, source: Source, path: str, prefix: str, builder: Builder, params: Params) -> Content:
        """Read one rank's file of an item; see `read_rank`."""
        if path.endswith(".safetensors"):
            content = _tensors_of(source, path, prefix, builder)
        elif path.endswith(".json"):
            content = self._values(source, path, prefix)
        else:
            content = read_rank(source, path, prefix, builder, params)
        item, rank = self._owners[path]
        listed = self._saved.items.get(item) if self._saved is not None else None
        if listed is not None:
            self._place(content, item, rank, path, listed.of_rank(rank))
        return content

    def _values(self, source: Source, path: str, item: str) -> Content:
        size, content = source.listing[path], Content()
        meter().require(size, path)
        try:
            tree = parse(source.store.read(path, 0, size), path)
        except InvalidText as error:
            raise MalformedCheckpoint(f"{path} is not JSON: {error}", file=path) from error
        source.explain(path)
        kind = kind_of(tree)
        if self._kinds.setdefault(item, kind) != kind:
            message = f"{path} holds a {kind}, and other ranks have a {self._kinds[item]} of {item}"
            self._builder.report("item-mismatch", "files", message, file=path)
        rows: list[tuple[str, Path, Any]] = [(item, (item,), tree)]
        if isinstance(tree, dict) and tree:
            rows = [(f"{item}.{key}", (item, key), value) for key, value in tree.items()]
        for name, where, value in rows:
            form = encode(value)
            content.objects[name] = blake3(json.dumps(form).encode()).hexdigest(), form, where
            content.names.append(name)
        return content

    def _place(
        self, content: Content, item: str, rank: int, path: str, shardings: Mapping[str, Sharding]
    ) -> None:
        """Make shards of the tensors that metadata.pkl places, and report those that it does not fit."""
        shardings = {f"{item}.{name}" if name else item: sharding for name, sharding in shardings.items()}
        placer, meshes = Placer(_no_integers, path, self._source.listing[path]), _Meshes(rank, path)
        shapes: dict[str, tuple[str, Shape]] = {}
        plain: list[Plain] = []
        for tensor in content.plain:
            sharding = shardings.get(tensor.name)
            if sharding is None:
                plain.append(tensor)
                continue
            shapes[tensor.name] = tensor.dtype, _sizes(sharding.data.get("global_shape"), path)
            if tensor.dtype in BY_NAME:
                content.shards.append(_shards(tensor, sharding, meshes, placer))
            else:
                reason = f"dtype {tensor.dtype} is not supported"
                self._builder.withdraw(
                    tensor.name, Unread(reason, tensor.dtype, shapes[tensor.name][1], path)
                )
        content.plain[:] = plain
        shapes |= {s.name: (s.placed.dtype, s.placed.shape) for s in content.shards}
        for name, sharding in shardings.items():
            dtype, shape = sharding.data.get("dtype"), _sizes(sharding.data.get("global_shape"), path)
            file_tensor = shapes.get(name)
            if name in content.unread or name in content.refused:
                continue
            if file_tensor is None:
                message = f"{path} lacks {name}, which {METADATA} lists"
                self._builder.report("hole", "coverage", message, fqn=name, file=path)
            elif file_tensor[0] in BY_NAME and file_tensor != (str(dtype).removeprefix("torch."), shape):
                file_text = f"{file_tensor[0]} {list(file_tensor[1])}"
                message = f"{name} is {file_text} in {path}, and {METADATA} has {dtype} {list(shape)}"
                self._builder.report("item-mismatch", "files", message, fqn=name, file=path)


def _tensors_of(source: Source, path: str, item: str, builder: Builder) -> Content:
    tensors, _, begin = read_header(source.store, path, source.listing[path])
    file, content = builder.file(path, source.listing[path]), Content()
    for name, (dtype, shape, start, end) in tensors.items():
        number = builder.item(Item(file, begin + start, end - start))
        piece = LocalShard(Box.full(shape), number, None)
        fqn = f"{item}.{name}" if name else item
        mark = None if end > start else "empty"
        content.plain.append(Plain(fqn, (item, name), dtype, shape, piece, mark))
        content.names.append(fqn)
    return content


class _Meshes:
    """The records that pickles of a rank's device meshes would have, one for each mesh of a file."""

    def __init__(self, rank: int, path: str) -> None:
        self.rank, self.path = rank, path
        self._records: dict[tuple[Shape, Shape], Record] = {}

    def of(self, spec: Any, name: str) -> Record:
        """Return the mesh of a ``mesh_spec``. name: the tensor's, for the error."""
        spec = spec if isinstance(spec, dict) else {}
        shape = _sizes(spec.get("mesh_shape"), self.path)
        ranks = _sizes(spec.get("mesh_data"), self.path)
        if (record := self._records.get((shape, ranks))) is not None:
            return record
        if self.rank not in ranks or len(ranks) != int(np.prod(shape, dtype=np.int64)):
            raise MalformedCheckpoint(f"{METADATA} has no mesh for {name} of rank {self.rank}", file=METADATA)
        state = {
            "_layout": _record("_MeshLayout", {"shape": shape}),
            "_coordinate_on_dim": tuple(int(n) for n in np.unravel_index(ranks.index(self.rank), shape)),
            "_flatten_rank_map": list(ranks),
            "_rank": self.rank,
        }
        record = self._records[shape, ranks] = _record("DeviceMesh", state)
        return record


def _shards(tensor: Plain, sharding: Sharding, meshes: _Meshes, placer: Placer) -> LocalShards:
    """Return a local tensor as the shards of the tensor that metadata.pkl describes."""
    view = tensor.piece.view or View()
    strides = view.strides or row_major(tensor.shape)
    local = StoredView(tensor.name, 0, tensor.dtype, tensor.shape, 0, strides)
    if sharding.kind == "default_tensor_v1":
        placed = _boxes(local, sharding.data, meshes.rank, meshes.path)
    elif sharding.kind == "DTensorShardingMetadata":
        dtensor = placer.place(_dtensor(local, sharding.data, meshes), tensor.name)
        assert isinstance(dtensor, Placed)  # the local tensor is no refused one
        placed = dtensor
    else:
        raise MalformedCheckpoint(
            f"{METADATA} places {tensor.name} by {short_repr(sharding.kind, 60)}, which is not known",
            file=METADATA,
        )
    width = BY_NAME[tensor.dtype].itemsize
    pieces = []
    for local_range, box in placed.pieces:
        piece_view = View(view.start + local_range.offset * width, local_range.strides, view.flags)
        is_contiguous = is_row_major(local_range.shape, local_range.strides)
        piece_view = View(piece_view.start, None, view.flags) if is_contiguous else piece_view
        pieces.append(LocalShard(box, tensor.piece.item, None if piece_view == View() else piece_view))
    return LocalShards(tensor.name, tensor.path, placed, tuple(pieces))


def _dtensor(local: StoredView, data: Mapping[str, Any], meshes: _Meshes) -> Record:
    """Return the record that a pickle of this DTensor would have."""
    device = meshes.of(data.get("mesh_spec"), local.key)
    stored = data.get("placements")
    placements = (
        tuple(_placement(placement) for placement in stored) if isinstance(stored, (list, tuple)) else None
    )
    spec = _record("DTensorSpec", {"mesh": device, "placements": placements})
    dtype = Named("dtype", str(data.get("dtype")).removeprefix("torch."))
    tensor = Record(DTENSOR, (None, dtype, _sizes(data.get("global_shape"), meshes.path)))
    tensor.state = {"_local_tensor": local, "_spec": spec}
    return tensor


def _placement(stored: Any) -> Record:
    fields = stored if isinstance(stored, dict) else {}
    kind = {"StridedShard": "_StridedShard"}.get(str(fields.get("type")), str(fields.get("type")))
    return _record(kind, {key: value for key, value in fields.items() if key != "type"})


def _record(kind: str, state: dict[str, Any]) -> Record:
    record = Record(kind, ())
    record.state = state
    return record


def _boxes(local: StoredView, data: Mapping[str, Any], rank: int, path: str) -> Placed:
    """Return the boxes of a tensor that lists them (torch_checkpointing/default_metadata.py)."""
    shape = _sizes(data.get("global_shape"), path)
    columns = [data.get(key) for key in ("global_offsets", "local_offsets", "local_sizes")]
    if any(not isinstance(column, (list, tuple)) for column in columns):
        raise MalformedCheckpoint(f"{METADATA} has no boxes of {local.key}", file=METADATA)
    rows = [[_sizes(sizes, path) for sizes in column or ()] for column in columns]
    if len({len(row) for row in rows}) != 1 or any(len(sizes) != len(shape) for row in rows for sizes in row):
        raise MalformedCheckpoint(f"the boxes of {local.key} do not fit each other", file=METADATA)
    pieces = []
    for offset, inner, extent in zip(*rows, strict=True):
        if len(local.shape) != len(shape) or any(
            a + n > size for a, n, size in zip(inner, extent, local.shape, strict=True)
        ):
            raise MalformedCheckpoint(
                f"{METADATA} has {list(extent)} at {list(inner)} of {local.key}, which is "
                f"{list(local.shape)}",
                file=METADATA,
            )
        first = sum(a * s for a, s in zip(inner, local.strides, strict=True))
        if 0 not in extent:
            pieces.append((replace(local, shape=extent, offset=first), Box(offset, extent)))
    return Placed(local.dtype, shape, tuple(pieces), rank, (rank,))


def _sizes(value: Any, path: str) -> Shape:
    # type(), because a bool is an int; bounded, because sizes from the file are multiplied.
    if (
        not isinstance(value, (list, tuple))
        or len(value) > 1 << 20
        or any(type(n) is not int or not 0 <= n < 1 << 50 for n in value)
    ):
        raise MalformedCheckpoint(
            f"{METADATA} must have sizes for {path} (got {short_repr(value, 60)})", file=METADATA
        )
    return tuple(value)


def _no_integers(value: StoredView) -> tuple[int, ...]:
    raise ValueError(f"ranks in a tensor {value.key}")
