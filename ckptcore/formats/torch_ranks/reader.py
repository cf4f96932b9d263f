"""Read rank files: join the pickles of all ranks in one manifest, one file at a time.

Distributed tensors record their boxes. Plain tensors and objects are in every rank's file. Equal ones become
one, with the tensors as replicas. Different ones are kept as ``<name>.rank<r>`` if they belong to a rank
(random states), and refused if they can only be pieces of something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Blob, Item, Manifest, TensorSpec, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter, passing
from ckptcore.core.object_tree import Refused, RefusedTensor, decode, encode, weight
from ckptcore.core.tree_paths import Path, Paths
from ckptcore.encodings.limits import absent, bound_views
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.pickle.unpickler import Record
from ckptcore.encodings.torchzip.before_zip import BEFORE_ZIP
from ckptcore.encodings.torchzip.reader import check_view, is_torch, read_objects, refused_in
from ckptcore.errors import CkptError, Finding, MalformedCheckpoint, NameMismatch, UnsupportedFormat, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.optimizer_numbers import Shape
from ckptcore.formats.common.part_proof import torn_findings, unproven_findings
from ckptcore.formats.common.rank_file_names import RankFiles, part_name
from ckptcore.formats.common.torch_xla import refuse_shards
from ckptcore.formats.common.trees import kind_of, leaves_below
from ckptcore.formats.torch_ranks.optimizer import Params, names_of, numbered
from ckptcore.formats.torch_ranks.placement import DIST_TABLE, DTENSOR, SHARDED, Placed, Placer
from ckptcore.formats.torch_save.tree import add_unread, note_hidden
from ckptcore.store.subfolder import FileRange, explain
from ckptcore.utils.foreign_text import InvalidText, load_json

_SMALL = 64 << 10  # plain tensors without a checksum are marked by a hash of their bytes up to this size
# Reads one rank's file as `read_rank` does: source, path, prefix, builder, parameters of the model.
ReadFile = Callable[[Source, str, str, Builder, Params], "Content"]
_MAX_TENSORS, _MAX_RANKS = 2_000_000, 1 << 20
_MAX_LISTED = 100  # missing ranks that are named
# Names of values that belong to one rank.
_PER_RANK = re.compile(
    r"(^|[._])(rng|random|seed|generator|dataloader|loader|sampler|extra)(s|_state|_states)?([._]|$)"
)
_STATE = re.compile(r"(^|\.)state\.\d+\.\w+$")  # of a numbered optimizer
_STEP = re.compile(r"(^|\.)(global_)?(step|steps|iteration|last_epoch)$")


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A tensor in the file.

    Attributes:
        box: Its box of the global tensor.
        item: Number of the item with its bytes.
        view: Its place in the item; None for the first bytes, row-major.
    """

    box: Box
    item: int
    view: View | None


@dataclass(frozen=True, slots=True)
class LocalShards:
    """A rank's shards of a distributed tensor.

    Attributes:
        name: FQN.
        path: Path in the rank's tree.
        placed: The tensor with its boxes.
        pieces: The shards.
    """

    name: str
    path: Path
    placed: Placed
    pieces: tuple[LocalShard, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor that is not distributed.

    Attributes:
        name: FQN.
        path: Path in the rank's tree.
        dtype: Its dtype.
        shape: Its shape.
        piece: Its place in the file.
        mark: Text that identifies its bytes, or None when that would need a read of many bytes.
    """

    name: str
    path: Path
    dtype: str
    shape: Shape
    piece: LocalShard
    mark: str | None


@dataclass(slots=True)
class Content:
    """What one rank saved.

    Attributes:
        shards: Distributed tensors.
        plain: Other tensors.
        objects: Name -> (digest, value in JSON form, path).
        refused: Name -> (whether all of the value was refused, globals, file).
        unread: Name -> (what it is, path, file), of tensors that are not read.
        hidden: Bytes of tensors that only refused objects can contain.
        params: Parameters of the model.
        numbers: Whether an optimizer's states kept their numbers; None without such an optimizer.
        names: Every name in the file, in order.
    """

    shards: list[LocalShards] = field(default_factory=list)
    plain: list[Plain] = field(default_factory=list)
    objects: dict[str, tuple[str, Any, Path]] = field(default_factory=dict)
    refused: dict[str, tuple[bool, tuple[str, ...], str]] = field(default_factory=dict)
    unread: dict[str, tuple[RefusedTensor, Path, str]] = field(default_factory=dict)
    hidden: int = 0
    params: Params = ()
    numbers: bool | None = None
    names: list[str] = field(default_factory=list)


def read_rank(source: Source, path: str, prefix: str, builder: Builder, params: Params) -> Content:
    """Read a rank's file.

    The only tensor bytes read are those of meshes and of small plain tensors without a checksum.

    Args:
        source: The folder of the file.
        path: Path of the file.
        prefix: First part of all names, "" for none.
        builder: Receives the items of the file, and nothing else.
        params: Parameters of the model, if another file has it.

    Raises:
        MalformedCheckpoint: The file cannot be parsed.
        UnsafeContent: The file names globals that are not permitted.
        NameMismatch: Two values have one name.
        UnsupportedFormat: The file contains no state dict, or a local state dict of FSDP.
    """
    size, store = source.listing[path], source.store
    if not is_torch(store.read(path, 0, min(size, BEFORE_ZIP))):
        raise MalformedCheckpoint(f"{path} ({size} bytes) is not a file of torch.save", file=path)
    file = _File(source, path, builder)
    tree = file.objects.tree
    content = Content()
    if not isinstance(tree, dict):
        if not prefix:
            raise UnsupportedFormat(f"{path} must contain a state dict (got {kind_of(tree)})")
        for name, path_, value in leaves_below(tree, prefix, (StoredView, Record)):
            file.add(content, name, (prefix, *path_), value)
        content.hidden = file.hidden(bool(content.refused or content.unread))
        return content
    refuse_shards(tree, path)
    inside = numbered(tree)
    content.params = _model_parameters(tree, inside.path if inside else None)
    if inside is not None:
        names = names_of(inside.optimizer, params or content.params, _global_shape)
        content.numbers = names is None
        tree = inside.renamed(tree, names) if names is not None else tree
    leaf_names: set[str] = set()
    for name, where, value in _leaves(tree, prefix):
        if name in leaf_names:
            raise NameMismatch(f"{path}: two values have the name {name}")
        leaf_names.add(name)
        file.add(content, name, where, value)
    content.hidden = file.hidden(bool(content.refused or content.unread))
    return content


class _File:
    """A torch zip whose storages become raw items, shared ones once."""

    def __init__(self, source: Source, path: str, builder: Builder) -> None:
        size, self._store = source.listing[path], source.store
        self._path, self._size, self._builder = path, size, builder
        self.objects = read_objects(FileRange(source.store, path, 0, size), path, DIST_TABLE)
        self._file = builder.file(path, size)
        self._items: dict[str, int] = {}
        self._unread: set[str] = set()  # storages of tensors that are not read
        self._bytes = 0
        self._placer = Placer(self._integers, path, size)

    def add(self, content: Content, name: str, path: Path, value: Any) -> None:
        """Add one value of the tree to the content."""
        content.names.append(name)
        if isinstance(value, Record) and value.kind in (DTENSOR, SHARDED):
            if value.kind == SHARDED and name.endswith("flat_param"):
                raise _flat_refusal(self._path, name)
            placed = self._placer.place(value, name)
            if isinstance(placed, Placed):
                pieces = tuple(self._piece(view, box, name) for view, box in placed.pieces)
                content.shards.append(LocalShards(name, path, placed, pieces))
                return
            value = placed
        if isinstance(value, StoredView):
            piece = self._piece(value, Box.full(value.shape), name)
            mark = self._mark(value, piece)
            content.plain.append(Plain(name, path, value.dtype, value.shape, piece, mark))
        elif isinstance(value, RefusedTensor):
            self._unread.update(value.storages)
            content.unread[name] = value, path, self._path
        elif isinstance(value, Record):  # a mesh or a placement outside of a tensor
            content.refused[name] = False, (value.kind,), self._path
        elif refused := refused_in(value):
            content.refused[name] = isinstance(value, Refused), refused, self._path
        else:
            try:
                tree = encode(value)
            except (TypeError, RecursionError) as error:
                raise MalformedCheckpoint(f"{self._path}: object {name}: {error}") from error
            content.objects[name] = blake3(json.dumps(tree).encode()).hexdigest(), tree, path

    def hidden(self, has_refused: bool) -> int:
        """Return the bytes of unused storages, which refused values may contain; 0 if there are none."""
        for key in self._placer.meshes & self.objects.storages.keys():
            start, length, _ = self.objects.storages[key]
            explain(self._store, self._path, start, start + length)
        used_keys = self._items.keys() | self._placer.meshes | self._placer.storages | self._unread
        left = sum(n for key, (_, n, _) in self.objects.storages.items() if key not in used_keys)
        bound_views(self._bytes, self._size, self._path)
        return left if has_refused else 0

    def _piece(self, value: StoredView, box: Box, name: str) -> LocalShard:
        if value.key not in self.objects.storages:
            raise MalformedCheckpoint(f"{self._path} has no storage {value.key!r} for {name}")
        start, length, crc = self.objects.storages[value.key]
        if value.key not in self._items:
            self._items[value.key] = self._builder.item(Item(self._file, start, length, crc32=crc))
        view = check_view(value, length, 0, self._path, self.objects.swapped)
        self._bytes += _nbytes(value)
        # A trivial view would cost more memory than the chunk itself.
        return LocalShard(box, self._items[value.key], None if view == View() else view)

    def _mark(self, value: StoredView, piece: LocalShard) -> str | None:
        start, length, crc = self.objects.storages[value.key]
        nbytes, view = _nbytes(value), piece.view or View()
        if not nbytes:
            return "empty"
        if view.strides is not None or view.flags:
            return None
        if view.start == 0 and nbytes == length and crc is not None:
            return f"crc {crc}"
        if nbytes > _SMALL:
            return None
        return blake3(self._store.read(self._path, start + view.start, nbytes)).hexdigest()

    def _integers(self, value: StoredView) -> tuple[int, ...]:
        """Return the elements of a small integer tensor."""
        if value.key not in self.objects.storages or BY_NAME[value.dtype].kind != "i":
            raise ValueError(f"ranks as {value.dtype}")
        start, length, _ = self.objects.storages[value.key]
        view = check_view(value, length, 0, self._path, self.objects.swapped)
        if view.strides is not None:
            raise ValueError("a mesh that is not contiguous")
        raw = self._store.read(self._path, start + view.start, _nbytes(value))
        order = ">" if self.objects.swapped else "<"
        return tuple(np.frombuffer(raw, f"{order}i{BY_NAME[value.dtype].itemsize}").tolist())


def _leaves(tree: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Path, Any]]:
    for key, top in tree.items():
        name, first = (f"{prefix}.{key}", (prefix, str(key))) if prefix else (str(key), (str(key),))
        for leaf, path, value in leaves_below(top, name, (StoredView, Record)):
            yield leaf, (*first, *path), value


def _model_parameters(tree: dict[Any, Any], optimizer: tuple[Any, ...] | None) -> Params:
    """Return the model's parameters in their order, tied ones once, without those below the optimizer's path.

    Distributed tensors are parameters, and plain tensors beside them are buffers. In a state dict of plain
    tensors alone, every tensor may be a parameter.
    """
    if optimizer == ():
        return ()
    rows: list[tuple[str, Shape, bool]] = []
    storages: set[Any] = set()
    for key, top in tree.items():
        if optimizer is not None and key == optimizer[0]:
            continue
        for name, path, value in leaves_below(top, str(key), (StoredView, Record)):
            shape, storage = _global_shape(value), _tie_key(value)
            if shape is not None and storage not in storages:
                storages.add(storage)
                # The optimizer uses the names of the model's own dict.
                rows.append((".".join(map(str, path)) or name, shape, isinstance(value, Record)))
    some = any(distributed for *_, distributed in rows)
    return tuple((name, shape) for name, shape, distributed in rows if distributed or not some)


def _global_shape(value: Any) -> Shape | None:
    """Return the global shape of a tensor, None for any other value."""
    if isinstance(value, StoredView):
        return value.shape
    if isinstance(value, Record) and value.kind in (DTENSOR, SHARDED) and len(value.args) > 2:
        size = value.args[2]
        return tuple(size) if type(size) is tuple else tuple(getattr(size, "value", ()))
    return None


def _tie_key(value: Any) -> Any:
    """Return a key that is equal for two names of one tensor."""
    if isinstance(value, Record) and value.kind == DTENSOR:
        parts = value.state if type(value.state) is tuple else (value.state,)
        value = next(
            (p["_local_tensor"] for p in parts if isinstance(p, dict) and "_local_tensor" in p), value
        )
    return (value.key, value.offset, value.shape) if isinstance(value, StoredView) else id(value)


def _nbytes(value: StoredView) -> int:
    return BY_NAME[value.dtype].itemsize * prod(value.shape)


def _flat_refusal(path: str, name: str) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"cannot read {path}, a local state dict of FSDP: {name} is this rank's part of a module's flattened "
        "parameters, and the file does not record their names, shapes and alignment",
        hint="save a sharded or a full state dict, or save through torch.distributed.checkpoint",
        format="fsdp-local",
    )


def read_ranks(source: Source, kinds: tuple[RankFiles, ...], name: str) -> Manifest:
    """Read the manifest of the kinds of rank files of one folder.

    A single kind keeps its names; the names of several kinds begin with the role of their files.

    Args:
        source: The folder.
        kinds: The rank files.
        name: Name of the format.
    """
    builder = Builder()
    reader = RankReader(source, builder)
    for kind in kinds:
        reader.add(kind, kind.role if len(kinds) > 1 else "")
    for kind in kinds:
        builder.findings += reader.missing(kind)
    builder.findings += _config_findings(source, kinds)
    world = next((k.world for k in kinds if k.world), None) or reader.world
    origin: dict[str, Any] = {"parts": [k.role for k in kinds]}
    if world:
        origin["world_size"] = world
    named = any(k.world for k in kinds)  # one saver names all of its kinds alike
    shapes = {t.fqn: t.shape for t in builder.tensors}
    for kind in reader.unproven:
        if named and kind.world is None:
            builder.findings.append(_unproven_order(kind))
        elif not world:
            parts = tuple(part for path in kind.paths.values() if (part := part_name(path)) is not None)
            builder.findings += unproven_findings(source, parts, shapes, builder.blobs)
    if not any(f.code in ("missing-rank", "unproven-parts", "missing-file") for f in builder.findings):
        builder.findings += torn_findings(source, reader.files, shapes)
    return reader.manifest(name, origin)


class RankReader:
    """Collect the files of one save in a builder.

    Attributes:
        paths: Paths of the names in the ranks' trees.
        unproven: Kinds of files of which a missing one would not be noticed.
        files: Tensor -> the only file that has it, in full.
    """

    def __init__(self, source: Source, builder: Builder, read: ReadFile = read_rank) -> None:
        self._source, self._builder, self._read = source, builder, read
        self.paths = Paths()
        self.unproven: list[RankFiles] = []
        self.files: dict[str, str] = {}
        self._indices: dict[str, int] = {}  # FQN -> tensor
        self._names: dict[str, None] = {}  # in the order of the files
        self._params: dict[int, Params] = {}  # rank -> the model's parameters, equal ones shared
        self._models: dict[Params, Params] = {}
        self._ranks: set[int] = set()  # ranks that took part, as numbered in the files' names
        self._shifts: dict[int, str] = {}  # rank in the job minus rank in the name -> a file
        self._span = 0  # all ranks below this one took part
        self._mesh_ids: set[int] = set()

    def add(self, files: RankFiles, prefix: str, *, optional: bool = False) -> None:
        """Add one kind of files.

        Args:
            files: The files.
            prefix: First part of all names, "" for none.
            optional: Whether refused values are left out with a warning, tensors inside included.

        Raises:
            MalformedCheckpoint: Ranks contradict each other.
            CkptError: What `read_rank` raises.
        """
        part = _Part(files, self._builder, self._tensor, self.paths, optional)
        model = not optional and not _PER_RANK.search(files.role)
        for rank, path in files.paths.items():
            self._mesh_ids.clear()
            # The tree of one file is freed before the next is read.
            with passing():
                content = self._read(self._source, path, prefix, self._builder, self._model(rank))
            if model and content.params and rank not in self._params:
                self._params[rank] = self._models.setdefault(content.params, content.params)
            for shards in content.shards:
                self._shards(shards, rank, path)
            part.add(rank, content)
            self._names |= dict.fromkeys(content.names)
        part.finish(one_model=len(self._models) <= 1)
        self.files |= part.single_copies
        if not part.repeated:
            self.unproven.append(files)

    def _model(self, rank: int) -> Params:
        """Return the parameters that a rank's optimizer numbers; other ranks replace a missing model file."""
        only = next(iter(self._models), ()) if len(self._models) == 1 else ()
        return self._params.get(rank, only)

    def missing(self, files: RankFiles) -> list[Finding]:
        """Return findings about ranks that should have a file of this kind, and ranks that should not."""
        world = files.world if files.world is not None else 0
        stop = max(min(world, _MAX_RANKS), self._span, max(files.paths) + 1)
        lost = {*absent(files.paths, stop, _MAX_LISTED), *(self._ranks - files.paths.keys())}
        findings = []
        for rank in sorted(lost)[:_MAX_LISTED]:
            name = files.name_of(rank)
            message = f"{name} is missing: rank {rank} took part in the save"
            findings.append(finding("missing-rank", "files", message, file=name))
        world = max(world, self.world or 0)
        for rank, path in files.paths.items():
            if world and rank >= world:
                message = f"{path} is a file of rank {rank}, but the save had {world} ranks"
                findings.append(finding("mixed-saves", "files", message, file=path))
        return findings

    @property
    def world(self) -> int | None:
        """Return how many ranks took part, according to the files."""
        return max(self._span, max(self._ranks, default=-1) + 1) or None

    def manifest(self, name: str, origin: Mapping[str, Any]) -> Manifest:
        """Return what was collected as a manifest of a format, with its paths, in the order of the files."""
        builder = self._builder
        paths = self.paths.form([t.fqn for t in builder.tensors], [b.key for b in builder.blobs])
        origin = {**origin, "paths": paths} if paths else origin
        names = tuple(n for n in self._names if n in self._indices)
        order = () if names == tuple(self._indices) else names  # they were added so
        return replace(builder.build(name, self._source.store.url, origin), order=order)

    def _shards(self, shards: LocalShards, rank: int, path: str) -> None:
        placed = shards.placed
        index = self._tensor(shards.name, placed.dtype, placed.shape, shards.path, path)
        for piece in shards.pieces:
            self._builder.chunk(index, piece.box.offset, piece.box.shape, piece.item, piece.view)
        # A stage of a pipeline may number its own ranks from 0.
        shift = 0 if placed.rank is None else placed.rank - rank
        if placed.rank is not None and shift not in self._shifts:
            self._shifts[shift] = path
            if len(self._shifts) > 1:
                other_path = next(iter(self._shifts.values()))
                message = (
                    f"rank {placed.rank} wrote {path}: the names of {other_path} and of {path} do not agree"
                )
                self._builder.report("item-mismatch", "files", message, file=path)
        if isinstance(placed.ranks, range):  # all ranks of a job, from 0
            self._span = max(self._span, placed.ranks.stop - shift)
        elif id(placed.ranks) not in self._mesh_ids:  # the tensors of a file share their meshes
            self._mesh_ids.add(id(placed.ranks))
            self._ranks.update(r - shift for r in placed.ranks if r >= shift)

    def _tensor(self, name: str, dtype: str, shape: Shape, where: Path, path: str) -> int:
        """Return the tensor of a name, added on first use; raise when ranks contradict each other."""
        index = self._indices.get(name)
        if index is None:
            index = self._indices[name] = self._builder.tensor(TensorSpec(name, dtype, shape))
            self.paths.add(name, where)
            if index >= _MAX_TENSORS:
                raise MalformedCheckpoint(f"{path} refers to more than 2 * 10^6 tensors", file=path)
        spec = self._builder.tensors[index]
        if (spec.dtype, spec.shape) != (dtype, shape):
            raise MalformedCheckpoint(
                f"{name} is {dtype} {list(shape)} in {path}, but {spec.dtype} {list(spec.shape)} on another "
                "rank: the files belong to different saves",
                file=path,
            )
        return index


class _Part:
    """Compare the ranks' files of one kind, and add what they share and what differs."""

    def __init__(self, files: RankFiles, builder: Builder, tensor: Any, paths: Paths, optional: bool) -> None:
        self._files, self._builder, self._tensor, self._optional = files, builder, tensor, optional
        self._paths = paths
        self._where: dict[str, Path] = {}
        self._plain: dict[str, list[tuple[int, Plain]]] = {}
        self._distributed: set[str] = set()
        self._values: dict[str, dict[str, Any]] = {}  # name -> digest -> value
        self._digests: dict[str, dict[int, str]] = {}  # name -> rank -> digest
        self._refused: dict[str, tuple[bool, tuple[str, ...], str]] = {}
        self._unread: dict[str, tuple[RefusedTensor, Path, str]] = {}
        self._hidden = 0
        self._numbers: set[bool] = set()
        self._apart: set[Path] = set()  # containers with tensors on some rank

    def add(self, rank: int, content: Content) -> None:
        """Add the content of one rank's file."""
        self._distributed.update(s.name for s in content.shards)
        for path in (*(s.path for s in content.shards), *(p.path for p in content.plain)):
            self._apart.update(path[:n] for n in range(1, len(path)))
        for plain in content.plain:
            self._plain.setdefault(plain.name, []).append((rank, plain))
        for name, (digest, tree, where) in content.objects.items():
            self._where.setdefault(name, where)
            if digest not in self._values.setdefault(name, {}):
                meter().keep(weight(tree), self._files.paths[rank])
                self._values[name][digest] = tree
            self._digests.setdefault(name, {})[rank] = digest
        self._refused = {**content.refused, **self._refused}
        self._unread = {**content.unread, **self._unread}
        self._hidden += content.hidden
        if content.numbers is not None:
            self._numbers.add(content.numbers)

    @property
    def repeated(self) -> bool:
        """Return whether there are several ranks, and every plain tensor is in all of their files."""
        ranks = len(self._files.paths)
        return ranks > 1 and all(len(rows) == ranks for rows in self._plain.values())

    @property
    def single_copies(self) -> dict[str, str]:
        """Return plain tensors that only one rank has, with its file."""
        plain = self._plain.items()
        return {name: self._files.paths[rows[0][0]] for name, rows in plain if len(rows) == 1}

    def finish(self, *, one_model: bool) -> None:
        """Add the values that must be compared first; ``one_model`` if all ranks have the same parameters."""
        path = next(iter(self._files.paths.values()))
        confused = len(self._numbers) > 1 or (True in self._numbers and not one_model)
        if True in self._numbers and not confused:
            message = f"{path} numbers the optimizer's states, and nothing proves their names"
            self._builder.report("unnamed-states", "files", message, file=path)
        flat = self._confused(path) if confused else self._flat(path)
        for name, rows in self._plain.items():
            if name in flat:
                self._by_rank(name, rows)
            else:
                self._add_plain(name, rows)
        for name in [n for n, path in self._where.items() if path in self._apart]:
            self._take_apart(name)
        for name, digests in self._digests.items():
            self._add_object(name, self._values[name], digests)
        for name, (_, refused, _) in self._refused.items():
            self._report("refused-global", f"object {name} needs {', '.join(refused)}", name)
            self._builder.blobs.append(Blob(name, -1, None, refused, known=False))
        for name, (value, where, file) in self._unread.items():
            self._paths.add(name, where)
            add_unread(self._builder, name, value, file)
        if self._hidden and not self._optional:
            note_hidden(self._builder, self._refused, self._hidden)

    def _confused(self, path: str) -> frozenset[str]:
        """Return numbered states whose numbers differ in meaning between ranks (pipeline stages).

        Each of them is a finding.
        """
        states = frozenset(n for n in self._plain if _STATE.search(n))
        names = [f"{n}.rank{rank}" for n in self._plain if n in states for rank, _ in self._plain[n]]
        for name in (*names, *sorted(n for n in self._distributed if _STATE.search(n))):
            message = f"{name} is numbered in {path}, but the numbers mean other parameters on other ranks"
            self._report("unmerged-tensor", message, name)
        return states

    def _flat(self, path: str) -> frozenset[str]:
        """Return numbered states that are runs of a flattened parameter (FSDP1), different on each rank.

        If one of them differs between ranks, all are such runs: equal ones, such as zeros, are not copies.
        """
        if True not in self._numbers:
            return frozenset()
        runs = {n: rows for n, rows in self._plain.items() if _STATE.search(n) and rows[0][1].shape}
        differ = [n for n, rows in runs.items() if not _are_copies(rows)]
        if not differ or any(len(plain.shape) != 1 for rows in runs.values() for _, plain in rows):
            return frozenset()
        suffix = f" and {len(runs) - 1} more states" if len(runs) > 1 else ""
        self._builder.report(
            "flat-buffers",
            "files",
            f"{differ[0]}{suffix} are flat, and every rank has its own part: they are kept rank by rank",
            file=path,
            hint="they are carried as they are; sharded state dicts of an optimizer can be resharded",
        )
        return frozenset(runs)

    def _by_rank(self, name: str, rows: list[tuple[int, Plain]]) -> None:
        for rank, plain in rows:
            self._add_full(f"{name}.rank{rank}", plain, _path_of_rank(plain.path, rank), rank)

    def _add_plain(self, name: str, rows: list[tuple[int, Plain]]) -> None:
        if name in self._distributed:
            raise MalformedCheckpoint(f"{name} is distributed on some ranks, but not on others")
        if _are_copies(rows):
            for rank, plain in rows:
                self._add_full(name, plain, plain.path, rank)
            return
        per_rank = (
            self._optional
            or bool(_PER_RANK.search(name))
            # A random state is a row of bytes, whatever its name.
            or all(p.dtype == "uint8" and len(p.shape) == 1 for _, p in rows)
        )
        # Beside distributed tensors, a plain one is no shard: the job would have saved it as theirs.
        if not per_rank and not self._distributed and not _STEP.search(name):
            first, last = (self._files.paths[rank] for rank, _ in (rows[0], rows[-1]))
            message = (
                f"cannot merge {name}: it is a plain tensor in every rank's file, but differs between "
                f"{first} and {last}, and the files do not record how the parts fit together"
            )
            for rank, _ in rows:
                self._report("unmerged-tensor", message, f"{name}.rank{rank}")
        else:
            self._differs(name, per_rank)
        self._by_rank(name, rows)

    def _add_full(self, name: str, plain: Plain, where: Path, rank: int) -> None:
        index = self._tensor(name, plain.dtype, plain.shape, where, self._files.paths[rank])
        piece: LocalShard = plain.piece
        self._builder.chunk(index, piece.box.offset, piece.box.shape, piece.item, piece.view)

    def _add_object(self, name: str, values: Mapping[str, Any], digests: Mapping[int, str]) -> None:
        if len(values) == 1:
            self._paths.add(name, self._where[name])
            self._builder.blobs.append(Blob(name, -1, next(iter(values.values()))))
            return
        self._differs(name, bool(_PER_RANK.search(name)))
        for rank, digest in digests.items():
            self._paths.add(f"{name}.rank{rank}", _path_of_rank(self._where[name], rank))
            self._builder.blobs.append(Blob(f"{name}.rank{rank}", -1, values[digest]))

    def _take_apart(self, name: str) -> None:
        """Replace a container by its values, under their names on ranks with tensors in it.

        A pipeline stage without parameters, for example, has an optimizer with groups only.
        """
        where, ranks = self._where.pop(name), self._digests.pop(name)
        for digest, tree in self._values.pop(name).items():
            for inner, path, value in _leaves_of(decode(tree), name, where, self._apart):
                form = encode(value)
                value_digest = blake3(json.dumps(form).encode()).hexdigest()
                self._where.setdefault(inner, path)
                self._values.setdefault(inner, {}).setdefault(value_digest, form)
                new_digests = {r: value_digest for r, d in ranks.items() if d == digest}
                self._digests[inner] = dict(sorted({**self._digests.get(inner, {}), **new_digests}.items()))

    def _differs(self, name: str, per_rank: bool) -> None:
        if _STEP.search(name):
            message = f"{name} differs between the ranks' files: the files belong to different steps"
            self._report("mixed-saves", message, name)
        elif not per_rank:
            self._report("rank-object", f"{name} differs between ranks, and is kept for each of them", name)

    def _report(self, code: str, message: str, name: str) -> None:
        self._builder.report(code, "files", message, fqn=name)


def _are_copies(rows: list[tuple[int, Plain]]) -> bool:
    """Return whether plain tensors of ranks are copies, as far as dtypes, shapes and checksums show."""
    marks = {p.mark for _, p in rows if p.mark is not None}
    return len({(p.dtype, p.shape) for _, p in rows}) == 1 and len(marks) <= 1


def _leaves_of(value: Any, name: str, path: Path, apart: set[Path]) -> Iterator[tuple[str, Path, Any]]:
    """Yield (name, path, value) of the leaves of a container; ``apart`` has the paths to take apart."""
    if path not in apart or not isinstance(value, (dict, list, tuple)):
        yield name, path, value
        return
    named = isinstance(value, dict)
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves_of(inner, f"{name}.{key}", (*path, str(key) if named else key), apart)


def _path_of_rank(path: Path, rank: int) -> Path:
    """Return the path of one rank's own value, beside those of other ranks in the same dict."""
    return (*path[:-1], f"{path[-1]}.rank{rank}")


def _unproven_order(files: RankFiles) -> Finding:
    path = next(iter(files.paths.values()))
    message = f"nothing in {path} tells how many ranks took part: files of other ranks may be missing"
    return finding("missing-part", "files", message, file=path)


def _config_findings(source: Source, kinds: tuple[RankFiles, ...]) -> list[Finding]:
    """Compare the world size in verl's ``fsdp_config.json``, which older saves lack, with the names."""
    name = "fsdp_config.json"
    if not 0 < source.listing.get(name, 0) < 1 << 16:
        return []
    try:
        raw = source.store.read(name, 0, source.listing[name])
        config = load_json(raw, unique=True)
    except (CkptError, InvalidText):
        return [finding("malformed-metadata", "files", f"{name} is not JSON", file=name)]
    world = config.get("world_size") if isinstance(config, dict) else None
    named = next((k.world for k in kinds if k.world), None)
    if type(world) is not int or named is None or world == named:
        return []
    message = f"{name} records {world} ranks, but the files' names give {named}"
    return [finding("mixed-saves", "files", message, file=name)]
