"""Write torch's `.metadata` for a job that is too large for this machine.

1. `Job` lists the tensors of a model in training, and the number of ranks that shard dim 0 (FSDP2).
2. `as_torch` builds torch's own plans, results and metadata for it, sent between ranks as in a job
   (torch/distributed/checkpoint/default_planner.py, filesystem.py), and pickles them.
3. `emit` writes the same bytes from templates: millions of chunks in seconds, and in little memory.
   The smoke test compares the two.
4. `write` adds sparse data files of the right sizes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

_ZIP = 1400  # about the bytes that a torch zip adds to its tensor
_FRAME = 64 * 1024  # CPython's pickler ends a frame at the first value after this many bytes
_META = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_WIDTHS = {"bfloat16": 2, "float32": 4}
_GOES_ON = b"(sauebtR\x81\x85\x86\x87\x94"  # opcodes that belong to a value that began before them
_LENGTHS = {0x68: 2, 0x4B: 2, 0x4D: 3, 0x6A: 5, 0x4A: 5}  # bytes of opcodes with a number
_BEGIN = b")\x81\x94}\x94("  # an instance, and a mark for its attributes
_BATCH = 1000  # items that CPython's pickler puts between two marks


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor.

    path: in the saved tree. dtype: torch's name. shape: global. ranks: those that shard it, None for all.
    """

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    ranks: range | None = None

    @property
    def fqn(self) -> str:
        """Its name in the checkpoint."""
        return ".".join(self.path)


@dataclass(frozen=True)
class Job:
    """Tensors in the order of the state dict, sharded on dim 0; each scalar is on one rank."""

    tensors: tuple[Tensor, ...]
    ranks: int

    @cached_property
    def of_rank(self) -> list[list[int]]:
        """The tensors that each rank may save, in their order."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for n, tensor in enumerate(self.tensors):
            for rank in tensor.ranks or range(self.ranks):
                found[rank].append(n)
        return found

    def parts(self, rank: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield (tensor, offset, sizes) of a rank's chunks: torch.chunk's rule, replicas in turn.

        Of the ranks with an empty chunk the first saves it: to torch, these are replicas, too.
        """
        single = 0
        for n in self.of_rank[rank]:
            tensor = self.tensors[n]
            if not tensor.shape:
                if single % self.ranks == rank:
                    yield n, (), ()
                single += 1
                continue
            rows, *rest = tensor.shape
            group = tensor.ranks or range(self.ranks)
            at, step = rank - group.start, -(-rows // len(group))
            begin = min(at * step, rows)
            end = min(begin + step, rows)
            if begin == end and (at - 1) * step >= rows:
                continue
            yield n, (begin, *(0 for _ in rest)), (end - begin, *rest)

    def nbytes(self, tensor: int, sizes: tuple[int, ...]) -> int:
        """Return the bytes of an item."""
        return math.prod(sizes) * _WIDTHS[self.tensors[tensor].dtype] + _ZIP


def as_torch(job: Job) -> bytes:
    """Return what torch pickles; it makes an object for everything, so this is for small jobs."""
    import torch
    from torch.distributed.checkpoint import metadata as meta
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult

    def sent(value: Any) -> Any:
        return pickle.loads(pickle.dumps(value))

    plans = []
    tree = {t.fqn: t.path for t in job.tensors}
    for rank in range(job.ranks):
        items = []
        for n, offset, sizes in job.parts(rank):
            tensor = job.tensors[n]
            chunk = meta.ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
            properties = meta.TensorProperties(dtype=getattr(torch, tensor.dtype))
            data = TensorWriteData(chunk, properties, torch.Size(tensor.shape))
            kind = WriteItemType.SHARD if tensor.shape else WriteItemType.TENSOR
            items.append(WriteItem(meta.MetadataIndex(tensor.fqn, offset), kind, tensor_data=data))
        plans.append(sent(SavePlan(items, planner_data=tree)))
    plans, metadata = create_default_global_save_plan(plans)
    metadata.planner_data = {key: plans[0].planner_data[key] for key in plans[-1].planner_data}
    metadata.storage_data = {}
    for rank, plan in enumerate(plans):
        end, results = 0, []
        path = f"__{rank}_0.distcp"
        for item, (n, _, sizes) in zip(sent(plan).items, job.parts(rank), strict=True):
            length = job.nbytes(n, sizes)
            results.append(WriteResult(item.index, length, _StorageInfo(path, end, length)))
            end += length
        metadata.storage_data |= {r.index: r.storage_data for r in sent(results)}
    return pickle.dumps(metadata, protocol=4)


def write(job: Job, folder: Path) -> None:
    """Write the folder of a job: `.metadata`, and sparse data files."""
    folder.mkdir(parents=True)
    for rank in range(job.ranks):
        size = sum(job.nbytes(n, sizes) for n, _, sizes in job.parts(rank))
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(size)
    with (folder / ".metadata").open("wb") as out:
        emit(job, out)


def emit(job: Job, out: BinaryIO) -> None:
    """Write the bytes of `as_torch`, piece by piece."""
    p = _Emitter(out)
    p.begin(_META, "Metadata")
    p.text("state_dict_metadata")
    p.begin_dict()
    order = list(dict.fromkeys(n for rank in range(job.ranks) for n, _, _ in job.parts(rank)))
    chunks: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {n: [] for n in order}
    for rank in range(job.ranks):
        for n, offset, sizes in job.parts(rank):
            chunks[n].append((offset, sizes))
    p.batched(len(order), lambda i: _entry(p, job.tensors[order[i]], chunks[order[i]]))
    p.text("planner_data")
    p.begin_dict()
    p.batched(len(job.tensors), lambda i: _path(p, job.tensors[i].path))
    p.text("storage_data")
    p.begin_dict()
    _storage(p, job)
    p.text("storage_meta")
    p.write(b"N")
    p.text("version")
    p.write(b"N")
    p.write(b"ub")
    p.finish()


def _entry(p: _Emitter, tensor: Tensor, chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    p.text(tensor.fqn, None)
    p.begin(_META, "TensorStorageMetadata")
    p.text("properties")
    p.new(_META, "TensorProperties")
    p.value()
    p.write(b"(")
    p.glob("torch", tensor.dtype)
    p.call("torch.serialization", "_get_layout", "torch.strided")
    p.write(b"\x89")
    p.call(_META, "_MEM_FORMAT_ENCODING", 0)
    p.write(b"\x89")
    p.write(b"t\x94b", 1)
    p.text("size")
    p.size(tensor.shape)
    p.text("chunks")
    p.write(b"]\x94", 1)

    def chunk(i: int) -> None:
        if i:  # only the numbers are new
            head = p.known[_META, "ChunkStorageMetadata"] + _BEGIN + p.known["offsets"]
            offset, sizes = p.sized(chunks[i][0]), p.sized(chunks[i][1])
            p.spelled(
                b"".join((head, offset, p.known["sizes"], sizes, b"ub")), 2 + (3 + 3 if chunks[i][0] else 4)
            )
            return
        p.begin(_META, "ChunkStorageMetadata")
        p.text("offsets")
        p.size(chunks[i][0])
        p.text("sizes")
        p.size(chunks[i][1])
        p.write(b"ub")

    p.batched(len(chunks), chunk, b"a", b"e")
    p.write(b"ub")


def _path(p: _Emitter, path: tuple[str, ...]) -> None:
    p.text(".".join(path), None)
    p.value()
    if len(path) > 3:
        p.write(b"(")
    for part in path:
        p.text(part)
    p.write({2: b"\x86\x94", 4: b"t\x94"}[len(path)], 1)


def _storage(p: _Emitter, job: Job) -> None:
    rows = _stored(job)
    names = [_text(t.fqn) + b"\x94" for t in job.tensors]

    def row(i: int) -> None:
        n, offset, index, rank, start, length = next(rows)
        path = f"__{rank}_0.distcp"
        if i and path in p.known:
            k = p.known
            parts = (
                k[_META, "MetadataIndex"],
                _BEGIN,
                k["fqn"],
                names[n],
                k["index"],
                number(index),
                k["offset"],
                p.sized(offset),
                b"ub",
                k[_FILES, "_StorageInfo"],
                _BEGIN,
                k["relative_path"],
                k[path],
                k["offset"],
                number(start),
                k["length"],
                number(length),
                b"ub",
            )
            p.spelled(b"".join(parts), 5 + (3 if offset else 2))
            return
        p.begin(_META, "MetadataIndex")
        p.text("fqn")
        p.text(job.tensors[n].fqn, None)
        p.text("index")
        p.integer(index)
        p.text("offset")
        p.size(offset)
        p.write(b"ub")
        p.begin(_FILES, "_StorageInfo")
        p.text("relative_path")
        p.text(path)
        p.text("offset")
        p.integer(start)
        p.text("length")
        p.integer(length)
        p.write(b"ub")

    p.batched(sum(1 for rank in range(job.ranks) for _ in job.parts(rank)), row)


def _stored(job: Job) -> Iterator[tuple[int, tuple[int, ...], int, int, int, int]]:
    """Yield (tensor, offset, chunk of that tensor, rank, first byte, bytes) of each item."""
    count = [0] * len(job.tensors)
    for rank in range(job.ranks):
        end = 0
        for n, offset, sizes in job.parts(rank):
            length = job.nbytes(n, sizes)
            yield n, offset, count[n], rank, end, length
            count[n] += 1
            end += length


class _Emitter:
    """Write protocol 4 like CPython's pickler: memo numbers, batches, frames.

    A frame ends before a value, so each `write` gets the opcodes of one value, and those after it.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._frame = bytearray()
        self.known: dict[Any, bytes] = {}  # value -> the opcodes that get it from the memo
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._count = 0
        out.write(b"\x80\x04")

    def finish(self) -> None:
        """End the pickle."""
        self._frame += b"."
        self._flush()

    def write(self, data: bytes, memoized: int = 0) -> None:
        """Write opcodes that memoize ``memoized`` values; a frame may end before them."""
        if data[0] not in _GOES_ON:
            self.value()
        self._frame += data
        self._count += memoized

    def spelled(self, data: bytes, memoized: int) -> None:
        """Write complete values that memoize ``memoized`` values."""
        self._count += memoized
        if len(self._frame) + len(data) < _FRAME:
            self._frame += data
            return
        at = 0
        while at < len(data):
            op = data[at]
            end = at + (2 + data[at + 1] if op in (0x8C, 0x8A) else _LENGTHS.get(op, 1))
            if op not in _GOES_ON:
                self.value()
            self._frame += data[at:end]
            at = end

    def sized(self, dims: tuple[int, ...]) -> bytes:
        """Return the opcodes of a torch.Size, once the class is known."""
        found = self._sizes.get(dims)
        if found is None:
            end = bytes([0x84 + len(dims)]) + b"\x94" if dims else b")"
            found = b"".join((self.known["torch", "Size"], *map(number, dims), end, b"\x85\x94R\x94"))
            self._sizes[dims] = found
        return found

    def value(self) -> None:
        """Begin a value: end the frame if it is full."""
        if len(self._frame) >= _FRAME:
            self._flush()

    def _flush(self) -> None:
        self._out.write(b"\x95" + len(self._frame).to_bytes(8, "little"))
        self._out.write(self._frame)
        self._frame.clear()

    def remember(self, key: Any) -> None:
        """Memoize the last value under its own number."""
        self._frame += b"\x94"
        if key is not None:
            at = self._count
            self.known[key] = b"h" + bytes([at]) if at < 256 else b"j" + at.to_bytes(4, "little")
        self._count += 1

    def seen(self, key: Any) -> bool:
        """Return whether a value was written before; if so, write its number."""
        ref = self.known.get(key)
        if ref is not None:
            self.write(ref)
        return ref is not None

    def text(self, value: str, key: Any = "") -> None:
        """Write a text; ``key`` distinguishes equal texts that are different objects, None is always new."""
        key = value if key == "" else key
        if key is None or not self.seen(key):
            self.write(_text(value))
            self.remember(key)

    def integer(self, value: int) -> None:
        """Write a number, in the fewest bytes."""
        self.write(number(value))

    def glob(self, module: str, name: str) -> None:
        """Write a class or function."""
        if not self.seen((module, name)):
            # torch's extension types have their own module-name object.
            self.text(module, None if module == "torch" and name == "Size" else module)
            self.text(name)
            self._frame += b"\x93"
            self.remember((module, name))

    def call(self, module: str, name: str, argument: str | int) -> None:
        """Write the value of a call; equal calls are one object."""
        key = module, name, argument
        if not self.seen(key):
            self.glob(module, name)
            self.text(argument) if isinstance(argument, str) else self.integer(argument)
            self.write(b"\x85\x94R", 1)
            self.remember(key)

    def size(self, dims: tuple[int, ...]) -> None:
        """Write a torch.Size."""
        self.glob("torch", "Size")
        if not dims:
            self.write(b")")
            self.write(b"\x85\x94R\x94", 2)
            return
        for n in dims:
            self.integer(n)
        self.write(bytes([0x84 + len(dims)]) + b"\x94\x85\x94R\x94", 3)

    def new(self, module: str, name: str) -> None:
        """Write an instance."""
        self.glob(module, name)
        self.write(b")")
        self.write(b"\x81\x94", 1)

    def begin(self, module: str, name: str) -> None:
        """Write an instance whose attributes follow."""
        self.new(module, name)
        self.begin_dict()
        self.write(b"(")

    def begin_dict(self) -> None:
        """Write an empty dict."""
        self.write(b"}\x94", 1)

    def batched(self, count: int, item: Callable[[int], None], one: bytes = b"s", many: bytes = b"u") -> None:
        """Write items between marks; a batch of one has none."""
        for begin in range(0, count, _BATCH):
            size = min(_BATCH, count - begin)
            self.write(b"(") if size > 1 else None
            for i in range(begin, begin + size):
                item(i)
            self.write(many if size > 1 else one)


def number(value: int) -> bytes:
    """Return the opcodes of a number, like CPython's pickler."""
    if value < 256:
        return b"K" + bytes((value,))
    if value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    n = value.bit_length() // 8 + 1
    return b"\x8a" + bytes((n,)) + value.to_bytes(n, "little")


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes((len(raw),)) + raw
