"""Writing `.metadata`: which pickle does `torch.distributed.checkpoint` expect there?

Protocol 4, as CPython's own pickler spells it, with only the globals and fields that torch 2.4
already knows (torch/distributed/checkpoint/metadata.py, filesystem.py): no transform descriptors,
no version, no storage meta. Equal input gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

META = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item lies: file relative to the folder, first byte, bytes."""

    path: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: name, dtype, global shape, and per chunk (offset, sizes, place), elements."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...], Place]]


def metadata_pickle(tensors: Sequence[StoredTensor], objects: Mapping[str, Place],
                    paths: Mapping[str, Path] | None) -> bytes:  # fmt: skip
    """The bytes of `.metadata`.

    objects: name -> place of its byte item. paths: name -> where it stood in the saved tree
    (``planner_data``); a name without one stood at the top. None where the planner kept none
    (Megatron-Core saves without flattening).
    """
    p = _Pickle()
    p.begin(META, "Metadata")
    p.text("state_dict_metadata")
    _state_dict(p, tensors, objects)
    p.text("planner_data")
    p.none() if paths is None else _planner(p, tensors, objects, paths)
    p.text("storage_data")
    _storage(p, tensors, objects)
    p.text("storage_meta")
    p.none()
    p.end()
    return p.finish()


def _state_dict(p: _Pickle, tensors: Sequence[StoredTensor], objects: Mapping[str, Place]) -> None:
    p.open_dict()
    for name in objects:
        p.text(name)
        p.instance(META, "BytesStorageMetadata")
    for t in tensors:
        p.text(t.fqn)
        p.begin(META, "TensorStorageMetadata")
        p.text("properties")
        _properties(p, t.dtype)
        p.text("size")
        p.size(t.shape)
        p.text("chunks")
        _chunks(p, t)
        p.end()
    p.close_dict()


def _properties(p: _Pickle, dtype: str) -> None:
    # TensorProperties.__getstate__: (dtype, layout, requires_grad, memory format, pin_memory).
    p.instance(META, "TensorProperties")
    p.mark()
    p.glob("torch", dtype)
    p.call("torch.serialization", "_get_layout", "torch.strided")
    p.false()
    p.call(META, "_MEM_FORMAT_ENCODING", 0)
    p.false()
    p.close_tuple()
    p.build()


def _chunks(p: _Pickle, tensor: StoredTensor) -> None:
    p.open_list()
    for offset, sizes, _ in tensor.chunks:
        p.begin(META, "ChunkStorageMetadata")
        p.text("offsets")
        p.size(offset)
        p.text("sizes")
        p.size(sizes)
        p.end()
    p.close_list()


def _planner(p: _Pickle, tensors: Sequence[StoredTensor], objects: Mapping[str, Place],
             paths: Mapping[str, Path]) -> None:  # fmt: skip
    p.open_dict()
    for name in (*objects, *(t.fqn for t in tensors)):
        p.text(name)
        p.mark()
        for part in paths.get(name, (name,)):
            p.plain(part)
        p.close_tuple()
    p.close_dict()


def _storage(p: _Pickle, tensors: Sequence[StoredTensor], objects: Mapping[str, Place]) -> None:
    p.open_dict()
    for name, place in objects.items():
        _stored(p, name, None, None, place)
    for t in tensors:
        for n, (offset, _, place) in enumerate(t.chunks):
            _stored(p, t.fqn, offset, n, place)
    p.close_dict()


def _stored(p: _Pickle, name: str, offset: tuple[int, ...] | None, index: int | None, place: Place) -> None:
    p.begin(META, "MetadataIndex")
    p.text("fqn")
    p.text(name)
    p.text("offset")
    p.none() if offset is None else p.size(offset)
    p.text("index")
    p.none() if index is None else p.integer(index)
    p.end()
    p.begin(FILES, "_StorageInfo")
    p.text("relative_path")
    p.text(place.path)
    p.text("offset")
    p.integer(place.start)
    p.text("length")
    p.integer(place.length)
    p.end()


class _Pickle:
    """Emits protocol 4 opcodes, memoised as CPython's pickler memoises them."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._memo: dict[Any, int] = {}
        self._count = 0

    def finish(self) -> bytes:
        """The whole pickle, in one frame."""
        body = bytes(self._out + b".")
        return b"\x80\x04\x95" + len(body).to_bytes(8, "little") + body

    def none(self) -> None:
        self._out += b"N"

    def false(self) -> None:
        self._out += b"\x89"

    def mark(self) -> None:
        self._out += b"("

    def close_tuple(self) -> None:
        self._out += b"t"
        self._memoize(None)

    def build(self) -> None:
        self._out += b"b"

    def integer(self, value: int) -> None:
        if 0 <= value < 256:
            self._out += b"K" + bytes([value])
        elif 0 <= value < 65536:
            self._out += b"M" + value.to_bytes(2, "little")
        elif value < 1 << 31:
            self._out += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            n = value.bit_length() // 8 + 1
            self._out += b"\x8a" + bytes([n]) + value.to_bytes(n, "little", signed=True)

    def plain(self, value: str | int) -> None:
        """A text or a number."""
        if isinstance(value, int):
            self.integer(value)
        else:
            self.text(value)

    def text(self, value: str) -> None:
        if self._seen(value):
            return
        raw = value.encode("utf-8", "surrogatepass")
        short = len(raw) < 256
        self._out += (b"\x8c" + bytes([len(raw)]) if short else b"X" + len(raw).to_bytes(4, "little")) + raw
        self._memoize(value)

    def glob(self, module: str, name: str) -> None:
        """A class or function by name."""
        if self._seen((module, name)):
            return
        self.text(module)
        self.text(name)
        self._out += b"\x93"
        self._memoize((module, name))

    def call(self, module: str, name: str, argument: str | int) -> None:
        """One call with one argument; equal calls share their result."""
        key = module, name, argument
        if self._seen(key):
            return
        self.glob(module, name)
        self.plain(argument)
        self._out += b"\x85"
        self._memoize(None)
        self._out += b"R"
        self._memoize(key)

    def size(self, dims: tuple[int, ...]) -> None:
        """A torch.Size."""
        self.glob("torch", "Size")
        if len(dims) > 3:
            self.mark()
        for n in dims:
            self.integer(n)
        self._out += {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(dims), b"t")
        if dims:
            self._memoize(None)
        self._out += b"\x85"
        self._memoize(None)
        self._out += b"R"
        self._memoize(None)

    def instance(self, module: str, name: str) -> None:
        """An object without its state."""
        self.glob(module, name)
        self._out += b")\x81"
        self._memoize(None)

    def begin(self, module: str, name: str) -> None:
        """An object whose fields follow, until `end`."""
        self.instance(module, name)
        self._out += b"}"
        self._memoize(None)
        self._out += b"("

    def end(self) -> None:
        self._out += b"ub"

    def open_dict(self) -> None:
        self._out += b"}"
        self._memoize(None)
        self._out += b"("

    def close_dict(self) -> None:
        self._out += b"u"

    def open_list(self) -> None:
        self._out += b"]"
        self._memoize(None)
        self._out += b"("

    def close_list(self) -> None:
        self._out += b"e"

    def _seen(self, key: Any) -> bool:
        at = self._memo.get(key)
        if at is None:
            return False
        self._out += b"h" + bytes([at]) if at < 256 else b"j" + at.to_bytes(4, "little")
        return True

    def _memoize(self, key: Any) -> None:
        self._out += b"\x94"
        if key is not None:
            self._memo[key] = self._count
        self._count += 1
