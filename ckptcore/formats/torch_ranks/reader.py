"""Reading rank files: from each rank's pickle to one manifest, one file at a time.

Distributed tensors say which boxes they hold. Plain tensors and objects stand in every rank's file:
equal ones are one, with the tensors as replicas; different ones are kept under ``<name>.rank<r>``
where that is what they are (random states), and refused where they can only be pieces of something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from blake3 import blake3

from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter, passing
from ckptcore.core.object_tree import RefusedTensor, decode, encode, weight
from ckptcore.core.tree_paths import Path, Paths
from ckptcore.encodings.json_text import loads
from ckptcore.encodings.limits import absent
from ckptcore.errors import CkptError, Finding, MalformedCheckpoint, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.rank_file_names import RankFiles
from ckptcore.formats.common.shape_matching import Shape
from ckptcore.formats.torch_ranks.file_reader import Content, LocalShard, LocalShards, Plain, read_rank
from ckptcore.formats.torch_ranks.optimizer import Params
from ckptcore.formats.torch_save.tree import add_unread, note_hidden

_MAX_TENSORS, _MAX_RANKS = 2_000_000, 1 << 20
_TOLD = 100  # missing ranks that are named
# What is each rank's own by its nature.
_OWN = re.compile(
    r"(^|[._])(rng|random|seed|generator|dataloader|loader|sampler|extra)(s|_state|_states)?([._]|$)"
)
_STATE = re.compile(r"(^|\.)state\.\d+\.\w+$")  # of a numbered optimizer
_STEP = re.compile(r"(^|\.)(global_)?(step|steps|iteration|last_epoch)$")


def read_ranks(source: Source, kinds: tuple[RankFiles, ...], name: str) -> Manifest:
    """The manifest of the kinds of rank files of one folder, as format ``name``.

    A single kind keeps its names; several are told apart by what their files are called.
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
    named = any(k.world for k in kinds)  # by names that one saver gave to all of its kinds
    builder.findings += [
        _unproven_order(k) for k in reader.unproven if not world or (named and k.world is None)
    ]
    paths = reader.paths.form([t.fqn for t in builder.tensors], [b.key for b in builder.blobs])
    if paths:
        origin["paths"] = paths
    return replace(builder.build(name, source.store.url, origin), order=reader.order())


class RankReader:
    """Collects the files of one save into a builder.

    paths: where the names stood in the ranks' trees. unproven: kinds of which a lost file would not show.
    """

    def __init__(self, source: Source, builder: Builder) -> None:
        self._source, self._builder = source, builder
        self.paths = Paths()
        self.unproven: list[RankFiles] = []
        self._at: dict[str, int] = {}  # FQN -> tensor
        self._names: dict[str, None] = {}  # in the order of the files
        self._params: dict[int, Params] = {}  # rank -> the model's parameters, equal ones shared
        self._known: dict[Params, Params] = {}
        self._ranks: set[int] = set()  # that the files say took part, as numbered in their names
        self._shifts: dict[int, str] = {}  # rank in the job minus rank in the name -> a file
        self._span = 0  # all ranks below this one took part
        self._seen: set[int] = set()

    def add(self, files: RankFiles, prefix: str, *, optional: bool = False) -> None:
        """Adds one kind of files; names begin with ``prefix`` and a dot, unless that is "".

        optional: what is refused there is left out with a warning, tensors inside included.
        Raises as `read_rank` does, and when ranks contradict each other.
        """
        part = _Part(files, self._builder, self._tensor, self.paths, optional)
        model = not optional and not _OWN.search(files.role)
        for rank, path in files.paths.items():
            self._seen.clear()
            with passing():
                content = read_rank(self._source, path, prefix, self._builder, self._model(rank))
            if model and content.params and rank not in self._params:
                self._params[rank] = self._known.setdefault(content.params, content.params)
            for shards in content.shards:
                self._shards(shards, rank, path)
            part.add(rank, content)
            self._names |= dict.fromkeys(content.names)
        part.finish(one_model=len(self._known) <= 1)
        if not part.repeated:
            self.unproven.append(files)

    def _model(self, rank: int) -> Params:
        """The parameters that a rank's optimizer numbers; a lost model file's are those of the others."""
        only = next(iter(self._known), ()) if len(self._known) == 1 else ()
        return self._params.get(rank, only)

    def missing(self, files: RankFiles) -> list[Finding]:
        """Findings about ranks that should have a file of this kind, and ranks that should not."""
        world = files.world if files.world is not None else 0
        stop = max(min(world, _MAX_RANKS), self._span, max(files.paths) + 1)
        lost = {*absent(files.paths, stop, _TOLD), *(self._ranks - files.paths.keys())}
        told = []
        for rank in sorted(lost)[:_TOLD]:
            name = files.name_of(rank)
            message = f"there is no {name}: rank {rank} took part in the save"
            told.append(finding("missing-rank", "files", message, file=name))
        world = max(world, self.world or 0)
        for rank, path in files.paths.items():
            if world and rank >= world:
                message = f"{path} is of rank {rank}, the save had {world} ranks"
                told.append(finding("mixed-saves", "files", message, file=path))
        return told

    @property
    def world(self) -> int | None:
        """How many ranks the files say took part."""
        return max(self._span, max(self._ranks, default=-1) + 1) or None

    def order(self) -> tuple[str, ...]:
        """The tensors in the order of the files; () where that is the order in which they were added."""
        names = tuple(n for n in self._names if n in self._at)
        return () if names == tuple(self._at) else names

    def _shards(self, shards: LocalShards, rank: int, path: str) -> None:
        placed = shards.placed
        at = self._tensor(shards.name, placed.dtype, placed.shape, shards.path, path)
        for piece in shards.pieces:
            self._builder.chunk(at, piece.box.offset, piece.box.shape, piece.item, piece.view)
        # A stage of a pipeline may number its own ranks from 0.
        shift = 0 if placed.rank is None else placed.rank - rank
        if placed.rank is not None and shift not in self._shifts:
            self._shifts[shift] = path
            if len(self._shifts) > 1:
                other = next(iter(self._shifts.values()))
                message = f"rank {placed.rank} wrote {path}: the names of {other} and of {path} do not agree"
                self._builder.findings.append(finding("item-mismatch", "files", message, file=path))
        if isinstance(placed.ranks, range):  # all of a job: from 0 on
            self._span = max(self._span, placed.ranks.stop - shift)
        elif id(placed.ranks) not in self._seen:  # the tensors of a file share their meshes
            self._seen.add(id(placed.ranks))
            self._ranks.update(r - shift for r in placed.ranks if r >= shift)

    def _tensor(self, name: str, dtype: str, shape: Shape, where: Path, path: str) -> int:
        """The tensor of a name, added on first sight; raises when another rank says otherwise."""
        at = self._at.get(name)
        if at is None:
            at = self._at[name] = self._builder.tensor(TensorSpec(name, dtype, shape))
            self.paths.add(name, where)
            if at >= _MAX_TENSORS:
                raise MalformedCheckpoint(f"{path} refers to more than 2 * 10^6 tensors", file=path)
        spec = self._builder.tensors[at]
        if (spec.dtype, spec.shape) != (dtype, shape):
            raise MalformedCheckpoint(
                f"{path} says {name} is {dtype} {list(shape)}, another rank says {spec.dtype} "
                f"{list(spec.shape)}: the files are of different saves",
                file=path,
            )
        return at


class _Part:
    """What the ranks' files of one kind have in common, and what they have not."""

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
        """Whether every whole tensor is in more than one rank's file, and in all of them."""
        ranks = len(self._files.paths)
        return ranks > 1 and all(len(rows) == ranks for rows in self._plain.values())

    def finish(self, *, one_model: bool) -> None:
        """Adds what has to be compared first. one_model: whether all ranks hold the same parameters."""
        path = next(iter(self._files.paths.values()))
        confused = len(self._numbers) > 1 or (True in self._numbers and not one_model)
        if True in self._numbers and not confused:
            message = f"{path} numbers the optimizer's states, and nothing proves their names"
            self._builder.findings.append(finding("unnamed-states", "files", message, file=path))
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
            self._tell("refused-global", f"object {name} needs {', '.join(refused)}", name)
            self._builder.blobs.append(Blob(name, -1, None, refused, known=False))
        for name, (value, where, file) in self._unread.items():
            self._paths.add(name, where)
            add_unread(self._builder, name, value, file)
        if self._hidden and not self._optional:
            note_hidden(self._builder, self._refused, self._hidden)

    def _confused(self, path: str) -> frozenset[str]:
        """Numbered states that are of other parameters on other ranks, each a finding: those of pipeline
        stages, say."""
        states = frozenset(n for n in self._plain if _STATE.search(n))
        names = [f"{n}.rank{rank}" for n in self._plain if n in states for rank, _ in self._plain[n]]
        for name in (*names, *sorted(n for n in self._distributed if _STATE.search(n))):
            message = f"{name} is numbered in {path}, and the numbers mean other parameters on other ranks"
            self._tell("unmerged-tensor", message, name)
        return states

    def _flat(self, path: str) -> frozenset[str]:
        """Numbered states that are runs of a flattened parameter: FSDP1's, which each rank has its own of.

        Where one of them differs between ranks all are: equal ones, zeros say, are no copies.
        """
        if True not in self._numbers:
            return frozenset()
        runs = {n: rows for n, rows in self._plain.items() if _STATE.search(n) and rows[0][1].shape}
        differ = [n for n, rows in runs.items() if not _are_copies(rows)]
        if not differ or any(len(plain.shape) != 1 for rows in runs.values() for _, plain in rows):
            return frozenset()
        more = f" and {len(runs) - 1} more states" if len(runs) > 1 else ""
        message = f"{differ[0]}{more} are flat, and every rank has its own part: they are kept rank by rank"
        self._builder.findings.append(
            finding(
                "flat-buffers",
                "files",
                message,
                file=path,
                hint="they are carried as they are; sharded state dicts of an optimizer can be resharded",
            )
        )
        return frozenset(runs)

    def _by_rank(self, name: str, rows: list[tuple[int, Plain]]) -> None:
        for rank, plain in rows:
            self._whole(f"{name}.rank{rank}", plain, _own_path(plain.path, rank), rank)

    def _add_plain(self, name: str, rows: list[tuple[int, Plain]]) -> None:
        if name in self._distributed:
            raise MalformedCheckpoint(f"{name} is distributed on some ranks, and whole on others")
        if _are_copies(rows):
            for rank, plain in rows:
                self._whole(name, plain, plain.path, rank)
            return
        own = (
            self._optional
            or bool(_OWN.search(name))
            or all(p.dtype == "uint8" and len(p.shape) == 1 for _, p in rows)
        )
        if not own and not self._distributed and not _STEP.search(name):
            first, last = (self._files.paths[rank] for rank, _ in (rows[0], rows[-1]))
            message = (
                f"{name} is a plain tensor in every rank's file, and not the same in {first} and {last}: "
                "nothing in the files says how they belong together"
            )
            for rank, _ in rows:
                self._tell("unmerged-tensor", message, f"{name}.rank{rank}")
        else:
            self._differs(name, own)
        self._by_rank(name, rows)

    def _whole(self, name: str, plain: Plain, where: Path, rank: int) -> None:
        at = self._tensor(name, plain.dtype, plain.shape, where, self._files.paths[rank])
        piece: LocalShard = plain.piece
        self._builder.chunk(at, piece.box.offset, piece.box.shape, piece.item, piece.view)

    def _add_object(self, name: str, values: Mapping[str, Any], digests: Mapping[int, str]) -> None:
        if len(values) == 1:
            self._paths.add(name, self._where[name])
            self._builder.blobs.append(Blob(name, -1, next(iter(values.values()))))
            return
        self._differs(name, bool(_OWN.search(name)))
        for rank, digest in digests.items():
            self._paths.add(f"{name}.rank{rank}", _own_path(self._where[name], rank))
            self._builder.blobs.append(Blob(f"{name}.rank{rank}", -1, values[digest]))

    def _take_apart(self, name: str) -> None:
        """Gives the values of a container under the names that they have on ranks with tensors in it: a
        stage without parameters has an optimizer of groups alone."""
        where, ranks = self._where.pop(name), self._digests.pop(name)
        for digest, tree in self._values.pop(name).items():
            for inner, path, value in _leaves_of(decode(tree), name, where, self._apart):
                form = encode(value)
                known = blake3(json.dumps(form).encode()).hexdigest()
                self._where.setdefault(inner, path)
                self._values.setdefault(inner, {}).setdefault(known, form)
                told = {r: known for r, d in ranks.items() if d == digest}
                self._digests[inner] = dict(sorted({**self._digests.get(inner, {}), **told}.items()))

    def _differs(self, name: str, own: bool) -> None:
        if _STEP.search(name):
            message = f"{name} is not the same in every rank's file: the files are of different steps"
            self._tell("mixed-saves", message, name)
        elif not own:
            self._tell("rank-object", f"{name} differs between ranks, and is kept for each of them", name)

    def _tell(self, code: str, message: str, name: str) -> None:
        self._builder.findings.append(finding(code, "files", message, fqn=name))


def _are_copies(rows: list[tuple[int, Plain]]) -> bool:
    """Whether plain tensors of ranks are copies of one another, as far as dtypes, shapes and checksums
    tell."""
    marks = {p.mark for _, p in rows if p.mark is not None}
    return len({(p.dtype, p.shape) for _, p in rows}) == 1 and len(marks) <= 1


def _leaves_of(value: Any, name: str, path: Path, apart: set[Path]) -> Iterator[tuple[str, Path, Any]]:
    """(name, path, value) of what stands in a container and in those in it that are taken apart."""
    if path not in apart or not isinstance(value, (dict, list, tuple)):
        yield name, path, value
        return
    named = isinstance(value, dict)
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves_of(inner, f"{name}.{key}", (*path, str(key) if named else key), apart)


def _own_path(path: Path, rank: int) -> Path:
    """Where one rank's own value stands: beside the others' in their dict."""
    return (*path[:-1], f"{path[-1]}.rank{rank}")


def _unproven_order(files: RankFiles) -> Finding:
    path = next(iter(files.paths.values()))
    message = f"nothing in {path} tells how many ranks took part: files of other ranks may be missing"
    return finding("missing-part", "files", message, file=path)


def _config_findings(source: Source, kinds: tuple[RankFiles, ...]) -> list[Finding]:
    """verl's ``fsdp_config.json`` repeats the world size; older saves have none."""
    name = "fsdp_config.json"
    if not 0 < source.listing.get(name, 0) < 1 << 16:
        return []
    try:
        raw = source.store.read(name, 0, source.listing[name])
        told = loads(raw)
    except (CkptError, ValueError, RecursionError):
        return [finding("malformed-metadata", "files", f"{name} is no JSON", file=name)]
    world = told.get("world_size") if isinstance(told, dict) else None
    named = next((k.world for k in kinds if k.world), None)
    if type(world) is not int or named is None or world == named:
        return []
    message = f"{name} says {world} ranks, the files' names say {named}"
    return [finding("mixed-saves", "files", message, file=name)]
