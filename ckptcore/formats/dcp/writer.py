"""Lay out DCP folders: the items of each `.distcp` file, and `.metadata`.

The files are those of `torch.distributed.checkpoint.save`. Rank R writes ``__R_0.distcp``,
``__R_1.distcp``, ..., objects first (rank 0 only), then its tensors; a rank with nothing to write leaves an
empty ``__R_0.distcp``. `.metadata` comes last, and lists the chunks of a tensor in the order of the ranks
that wrote them.

With torch_save an item is a torch zip of one tensor or object, and FileSystemWriter of
`torch.distributed.checkpoint` writes the zips back to back. With ``SerializationFormat.SAFETENSORS`` objects
stay zips, and all tensors of a file are one safetensors blob after them, to which every item points
(torch/distributed/checkpoint/filesystem.py, _write_files_from_queue). Items do not depend on the rank: equal
shapes give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import TensorRef, decode
from ckptcore.encodings.pickle.writer import Classes, Pickled
from ckptcore.encodings.safetensors_header import MAX_HEADER, HeaderText
from ckptcore.errors import NameMismatch, UnsupportedDtype
from ckptcore.formats.base import Arrangement, FileLayout, Literal, Slot, natural
from ckptcore.formats.common.torch_file import Around, torch_file
from ckptcore.formats.common.trees import built, leaves_below
from ckptcore.formats.common.write_assignment import Kind, Share, WriteItem, by_rank, in_order
from ckptcore.formats.dcp.metadata_writer import ItemPlace, Path, Stored, StoredTensor, metadata_pickle
from ckptcore.utils.ordering import stable_order

METADATA = ".metadata"
Ints = npt.NDArray[np.int64]
Items = tuple[tuple[int, int], ...]


def arrange_folder(request: Arrangement, *, folder: str = "", commit: bool = True) -> Iterator[FileLayout]:
    """Yield the files of a DCP folder as the ranks of a mesh save it, `.metadata` last.

    Args:
        request: What to write.
        folder: Folder below the root of the output, "" for the root itself.
        commit: Whether `.metadata` completes the output.
    """
    order = in_order(request.tensors)
    objects, places_in_tree = _stored_objects(request)
    files = Files(request, f"{folder}/" if folder else "")
    for key, value in objects.items():
        files.object(key, value)
    yield from files.ranks(order)
    pickled = metadata_pickle(files.stored(order), files.objects, {**request.paths, **places_in_tree})
    name = f"{folder}/{METADATA}" if folder else METADATA
    yield FileLayout(name, len(pickled), (), (), (Literal(0, pickled),), commit)


class Files:
    """Fill ``__R_I.distcp`` files one after the other: first objects, then the tensors of every rank.

    Attributes:
        objects: Name -> place of the object.
    """

    def __init__(self, request: Arrangement, prefix: str) -> None:
        self._request, self._prefix = request, prefix
        self.objects: dict[str, ItemPlace] = {}
        self._written: list[tuple[str, Sequence[int], Sequence[WriteItem], Items]] = []  # of each run
        self._full: list[FileLayout] = []  # of this rank
        # The files of the ranks of an even mesh are alike, or those of each tensor-parallel group.
        self._zips = lru_cache(maxsize=32)(zips)
        self._only: Run | None = None  # what the file holds, if nothing else
        self._cuts = lru_cache(maxsize=16)(partial(_groups, most=request.max_file_bytes))
        self._rank = 0
        self._begin()

    def object(self, key: str, value: Any) -> None:
        """Add an object without tensors."""
        data = object_zip(value)
        self.objects[key] = ItemPlace(self._name(), self._at, len(data))
        self._literals.append(Literal(self._at, data))
        self._at += len(data)

    def embed(self, key: str, layout: FileLayout) -> None:
        """Add an object with its tensors inside: a torch file of its own, as one item."""
        if set(layout.tensors) & set(self._tensors):  # a file may contain a tensor once
            self._end()
        self.objects[key] = ItemPlace(self._name(), self._at, layout.nbytes)
        n = len(self._tensors)
        self._tensors += layout.tensors
        self._boxes += [Box.full(self._request.tensors[i].shape) for i in layout.tensors]
        self._slots += [Slot(slot.tensor + n, slot.start + self._at) for slot in layout.slots]
        for literal in layout.literals:
            patches = tuple((position, slot + n) for position, slot in literal.crc_at)
            self._literals.append(Literal(literal.start + self._at, literal.data, patches))
        self._at += layout.nbytes

    def ranks(
        self, order: Sequence[int], recut: Callable[[Share], Share] = lambda share: share
    ) -> Iterator[FileLayout]:
        """Yield all files: those of rank 0, which has the objects, then those of the other ranks.

        Args:
            order: Positions of the tensors.
            recut: Cuts what a rank writes into further items.
        """
        for rank, full in enumerate(by_rank(self._request.tensors, order, self._request.topology)):
            self._rank, share = rank, recut(full)
            for first, stop in self._cuts(tuple([piece.nbytes for piece in share.pieces])):
                if first:
                    self._end()
                self._add(share.tensors[first:stop], share.pieces[first:stop])
            self._end()
            yield from self._full
            self._full = []

    def stored(self, order: Sequence[int]) -> list[StoredTensor]:
        """Return the tensors with their chunks, in the order of the ranks that write them."""
        names = [name for name, *_ in self._written]
        tables: dict[int, Ints] = {}  # of runs that are alike, one
        for _, _, _, items in self._written:
            if id(items) not in tables:
                tables[id(items)] = np.array(items, np.int64).reshape(-1, 2)
        pieces = list(chain.from_iterable(pieces for _, _, pieces, _ in self._written))
        piece = np.fromiter(map(id, pieces), np.int64, len(pieces))
        place = np.concatenate([np.zeros((0, 2), np.int64), *(tables[id(w[3])] for w in self._written)])
        tensor = np.array(list(chain.from_iterable(w[1] for w in self._written)), np.int64)
        file = np.repeat(np.arange(len(names)), [len(w[1]) for w in self._written])
        by_tensor = stable_order(tensor)
        tensor, piece, file = tensor[by_tensor], piece[by_tensor], file[by_tensor]
        place = place.take(by_tensor, axis=0)
        first = np.searchsorted(tensor, np.array(order, np.int64))
        stop = np.searchsorted(tensor, np.array(order, np.int64), side="right")
        alike: dict[tuple[bytes, bytes], tuple[tuple[Stored, ...], tuple[str, ...]]] = {}
        stored_tensors = []
        for i, a, b in zip(order, first.tolist(), stop.tolist(), strict=True):
            key = piece[a:b].tobytes(), file[a:b].tobytes()
            if key not in alike:
                tensor_pieces = [pieces[n] for n in by_tensor[a:b].tolist()]
                boxes = tuple([p.stored or (p.box.offset, p.box.shape) for p in tensor_pieces])
                alike[key] = boxes, tuple([names[n] for n in file[a:b].tolist()])
            spec = self._request.tensors[i]
            stored_tensors.append(StoredTensor(spec.fqn, spec.dtype, spec.shape, *alike[key], place[a:b]))
        return stored_tensors

    def _add(self, tensors: Sequence[int], pieces: Sequence[WriteItem]) -> None:
        if not tensors:
            return
        run, name = self._run(tensors, pieces), self._name()
        self._written.append((name, tensors, pieces, run.items))
        self._only = run if not self._tensors and not self._literals else None
        if not isinstance(run.order, range):
            tensors, pieces = [tensors[n] for n in run.order], [pieces[n] for n in run.order]
        self._tensors += tensors
        self._boxes += [piece.box for piece in pieces]
        self._slots += run.slots
        self._literals += run.literals
        self._at = run.end

    def _run(self, tensors: Sequence[int], pieces: Sequence[WriteItem]) -> Run:
        first = len(self._tensors)
        if self._request.serialization == "safetensors":
            # A blob identifies tensors by name alone, and a rank has one piece of each.
            return blob([self._request.tensors[i].fqn for i in tensors], pieces, self._at, first)
        return self._zips(tuple([p.kind for p in pieces]), self._at, first)

    def _name(self) -> str:
        return f"__{self._rank}_{len(self._full)}.distcp"

    def _begin(self) -> None:
        self._at = 0
        self._tensors: list[int] = []
        self._boxes: list[Box] = []
        self._slots: list[Slot] = []
        self._literals: list[Literal] = []
        self._only = None

    def _end(self) -> None:
        tensors, only = self._request.tensors, self._only
        cut = any(b.shape != tensors[i].shape for i, b in zip(self._tensors, self._boxes, strict=True))
        self._full.append(
            FileLayout(
                self._prefix + self._name(),
                self._at,
                tuple(self._tensors),
                # The tuples of a run that many ranks share: what is made of them is made once.
                tuple(self._slots) if only is None else only.slots,
                tuple(self._literals) if only is None else only.literals,
                boxes=tuple(self._boxes) if cut else (),
            )
        )
        self._begin()


def _groups(sizes: Sequence[int], most: int) -> tuple[tuple[int, int], ...]:
    """Return (first, stop) of the pieces that go into one file each; at least one group."""
    groups = []
    first = size = 0
    for n, nbytes in enumerate(sizes):
        if size and size + nbytes > most:
            groups.append((first, n))
            first, size = n, 0
        size += nbytes
    return (*groups, (first, len(sizes)))


def _stored_objects(request: Arrangement) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the objects to store by name, and their paths; one with tensors inside becomes its leaves."""
    objects: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for key in sorted(request.objects, key=natural):
        base = request.paths.get(key, (key,))
        for name, inner, leaf in leaves_below(decode(request.objects[key]), key, TensorRef):
            if inner:
                paths[name] = (*base, *inner)
            if not isinstance(leaf, TensorRef):
                objects[name] = leaf
    return _join_tensorless_dicts(request, objects, paths)


def _join_tensorless_dicts(
    request: Arrangement, objects: dict[str, Any], inner: dict[str, Path]
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the objects and their paths, with every dict that has no tensor below as one object.

    Since 2.4 torch saves, and asks for, each entry of a dict by a name of its own. Where it finds a dict
    stored as one object, it asks for all by the names that 2.3 gave them: there the topmost dict without a
    tensor below is one object. Which dict that is changes when tensors are left out, such as random states.
    """
    if not any(_has_dict(value) for value in objects.values()):
        return objects, inner
    where = {name: inner.get(name) or tuple(request.paths.get(name, (name,))) for name in objects}
    bare = _Bare([t.fqn for t in request.tensors], {*where.values()})
    rows: dict[Path, list[tuple[str, Path, Any]]] = {}
    for name, path in where.items():
        top = bare.above(path)
        if top is not None:
            rows.setdefault(top, []).append((name, path[len(top) :], objects[name]))
    joined = {name for leaves in rows.values() for name, _, _ in leaves}
    stored_objects = {name: value for name, value in objects.items() if name not in joined}
    stored_objects |= {".".join(map(str, top)): built(leaves) for top, leaves in rows.items()}
    places = {name: path for name, path in inner.items() if name not in joined}
    places |= {".".join(map(str, top)): top for top in rows}
    return {name: stored_objects[name] for name in sorted(stored_objects, key=natural)}, places


def _has_dict(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_dict, value)))


class _Bare:
    """Find the containers of a saved tree that have no tensor below."""

    def __init__(self, tensors: Sequence[str], taken: set[Path]) -> None:
        self._tensors, self._taken = tensors, taken
        self._bare: dict[Path, bool] = {}

    def above(self, path: Path) -> Path | None:
        """Return the topmost container of a path without a tensor, made of dicts alone; None without one."""
        for n in range(1, len(path)):
            if self._is_bare(path[:n]):
                return path[:n] if all(type(step) is str for step in path) else None
        return None

    def _is_bare(self, top: Path) -> bool:
        if top not in self._bare:
            below = ".".join(map(str, top)) + "."
            self._bare[top] = top not in self._taken and not any(t.startswith(below) for t in self._tensors)
        return self._bare[top]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tensors in a file.

    Attributes:
        order: Positions of the given tensors, in file order; a range where that is the given order.
        items: (first byte, bytes) of each given tensor, as `.metadata` records them.
        slots: Where the tensors' bytes go.
        literals: All other bytes.
        end: First byte after all tensors.
    """

    order: range | tuple[int, ...]
    items: tuple[tuple[int, int], ...]
    slots: tuple[Slot, ...]
    literals: tuple[Literal, ...]
    end: int


def zips(kinds: Sequence[Kind], offset: int, first: int) -> Run:
    """Lay out tensors as torch zips from byte ``offset`` on; their slots count from ``first``."""
    items, slots, literals = [], [], []
    for n, (dtype, shape) in enumerate(kinds, first):
        head, tail, crc_at, nbytes = _zip(dtype, shape)
        data = offset + len(head)
        literals.append(Literal(offset, head))
        literals.append(Literal(data + nbytes, tail, tuple([(c, n) for c in crc_at])))
        slots.append(Slot(n, data))
        length = len(head) + nbytes + len(tail)
        items.append((offset, length))
        offset += length
    return Run(range(len(items)), tuple(items), tuple(slots), tuple(literals), offset)


def blob(names: Sequence[str], pieces: Sequence[WriteItem], offset: int, first: int) -> Run:
    """Lay out tensors as one safetensors blob, wide elements first as in the library.

    Args:
        names: FQNs of the tensors.
        pieces: The box of each tensor.
        offset: First byte of the blob in the file.
        first: Number of the first slot.

    Raises:
        UnsupportedDtype: safetensors has no dtype for some tensors.
        NameMismatch: The names do not fit a header.
    """
    dtypes = [p.kind[0] for p in pieces]
    odd = {n: d for n, d in zip(names, dtypes, strict=True) if not BY_NAME[d].safetensors}
    if odd:
        some = ", ".join(f"{n} ({d})" for n, d in list(odd.items())[:4])
        raise UnsupportedDtype(
            f"safetensors has no dtype for {len(odd)} {'tensor' if len(odd) == 1 else 'tensors'}: {some}",
            tensors=sorted(odd),
        )
    order = sorted(range(len(names)), key=lambda n: (-BY_NAME[dtypes[n]].itemsize, names[n]))
    sharding = {names[n]: {"saved_offsets": list(pieces[n].box.offset)} for n in order}
    metadata = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}
    header = HeaderText(metadata)
    starts = [header.add(names[n], dtypes[n], pieces[n].box.shape) for n in order]
    head = header.packed(8)
    if len(head) - 8 > MAX_HEADER:
        raise NameMismatch(
            f"the safetensors header of a file must have at most {MAX_HEADER} bytes (got {len(head) - 8})",
            hint="lower --max-file-size",
        )
    slots = tuple(Slot(first + k, offset + len(head) + start) for k, start in enumerate(starts))
    items = tuple((offset, p.nbytes) for p in pieces)
    return Run(tuple(order), items, slots, (Literal(offset, head),), offset + len(head) + header.end)


def object_zip(value: Any) -> bytes:
    """Return the bytes that `torch.save` writes for an object without tensors; DCP loads classes."""
    pickled = Pickled(_no_tensor, classes=Classes.LIBRARIES)
    pickled.value(value)
    return b"".join(literal.data for literal in Around().of("", pickled.finish(), (), (), ()).literals)


@lru_cache(maxsize=4096)
def _zip(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes, tuple[int, ...], int]:
    """Return what `torch.save` writes around the bytes of a contiguous tensor, before and after them.

    Behind that: where their CRC-32 is in the latter, and how many bytes they are.
    """
    spec = TensorSpec("tensor", dtype, shape)
    layout = torch_file("", TensorRef(spec.fqn), [spec], [0])
    end = layout.slots[0].start + spec.nbytes
    head = b"".join(literal.data for literal in layout.literals if literal.start < layout.slots[0].start)
    after = [literal for literal in layout.literals if literal.start >= end]
    crc_at = tuple(literal.start - end + position for literal in after for position, _ in literal.crc_at)
    return head, b"".join(literal.data for literal in after), crc_at, spec.nbytes


def _no_tensor(fqn: str) -> tuple[str, TensorSpec]:
    raise TypeError(f"an object refers to the tensor {fqn}")
