"""Locate the tensor bytes inside a file of `torch.save`.

A torch zip is an uncompressed zip: ``<name>/data.pkl`` (a pickle whose persistent ids name
storages), ``<name>/data/<key>`` (one record per storage, 64-byte aligned from the zip's start),
``byteorder``, ``version`` (torch/serialization.py, caffe2/serialize/inline_container.cc). The
central directory has every record's CRC-32, which torch itself never checks. Before torch 1.6 it was no zip:
`before_zip`.

`archive` locates the records, `parse_tensor` resolves a zip with exactly one tensor, and
`read_objects` returns the complete tree of any torch file. All read through a `Reader`, read a few KiB, and
bound every count and offset before use. What nothing in a file refers to is in `Resolved.unused`, or recorded
in the account of the reading.

``torch.save`` writes the complete storage of a slice: the elements outside of it are in the file, and no
tensor shows them. `excess` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3

from ckptcore.core.dtype import BY_NAME, BY_STORAGE, UNSUPPORTED_STORAGES
from ckptcore.core.manifest import SWAPPED, Ints, View, is_row_major
from ckptcore.core.metadata_budget import meter, passing
from ckptcore.core.object_tree import Named, Refused, RefusedTensor
from ckptcore.encodings import limits as _bounds
from ckptcore.encodings.limits import bound_tree as bound_tree
from ckptcore.encodings.pickle.torch_globals import (
    OBJECT_TABLE,
    TENSOR_TABLE,
    StoredStorage,
    StoredView,
    attributes_in,
    tensors_in,
)
from ckptcore.encodings.pickle.unpickler import Call, loads
from ckptcore.encodings.torchzip.archive import Archive, Reader, Unused, Window, is_zip
from ckptcore.encodings.torchzip.before_zip import BEFORE_ZIP, StorageSizes, is_before_zip, read_pickles
from ckptcore.errors import (
    ChecksumMismatch,
    MalformedCheckpoint,
    UnreadablePart,
    UnsafeContent,
    UnsupportedFormat,
)
from ckptcore.store.subfolder import FileRange
from ckptcore.utils.text import short_repr

_MAX_RUNS = 1 << 20  # contiguous ranges of one tensor that are kept apart
# Bytes up to which a file of many records, each of which takes two reads, is read entirely.
_SMALL_FILE = 1 << 20
_STORAGE = 400  # bytes that a storage's location takes
_TEXTS = ("byteorder", "version", ".format_version", ".storage_alignment")
_ID = ".data/serialization_id"
ATTRIBUTES = "__attributes__"  # the object of attributes of tensors
_EXCESS = "elements of storages that no tensor has"
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"  # only of_class takes it, and calls nothing
_WITH_STATE = (b"_rebuild_parameter_with_state", b"_rebuild_from_type_v2")
# Records whose content is read or checked, beside the storages.
_CONSUMED = ("data.pkl", *_TEXTS, _ID)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A tensor inside a zip.

    Attributes:
        dtype: As pickled.
        shape: As pickled.
        view: First byte inside the zip, element strides, flags.
        record_start: First byte of the storage's record inside the zip.
        record_length: Bytes of that record.
        crc32: Stored CRC-32 of that record, or None where the zip was written without checksums.
        unused: Bytes of the zip that belong to nothing.
    """

    dtype: str
    shape: tuple[int, ...]
    view: View
    record_start: int
    record_length: int
    crc32: int | None
    unused: tuple[Unused, ...] = ()


Storages = Mapping[str, tuple[int, int, int | None]]  # key -> (start, length, crc32)


@dataclass(frozen=True, slots=True)
class Objects:
    """A file's complete content.

    Attributes:
        tree: Its value, with tensors as `StoredView`.
        storages: Where the bytes of tensors are.
        refused: The globals that were refused.
        swapped: Whether elements are big-endian.
        behind: Bytes of the record ``data.pkl`` behind the pickle.
        excess: Bytes of storages that no tensor has.
        attributes: Path in the tree -> attributes of the tensor there, which are no part of its value.
    """

    tree: Any
    storages: Storages
    refused: tuple[str, ...]
    swapped: bool
    behind: int = 0
    excess: tuple[Excess, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


class SharedTrees:
    """The trees of files that were read before: ranks of one job often pickle the very same tree.

    Equal pickles (SHA-256) give one tree, which is parsed and held once. Callers must not change it.

    Args:
        finish: Makes of what was parsed what is held: called with it, the file's length and name.
    """

    def __init__(self, finish: Callable[[Objects, int, str], Objects]) -> None:
        self._finish = finish
        self._objects_by_key: dict[bytes, Objects] = {}

    def find(self, key: bytes, storages: Storages, swapped: bool, label: str) -> Objects | None:
        """Return the tree of an equal pickle, with the storages of this file; None for a new one."""
        earlier_objects = self._objects_by_key.get(key)
        if earlier_objects is None or (
            earlier_objects.storages == storages and earlier_objects.swapped == swapped
        ):
            return earlier_objects
        meter().take(_STORAGE * len(storages), label)
        objects = self._objects_by_key[key] = replace(earlier_objects, storages=storages, swapped=swapped)
        return objects

    def add(self, key: bytes, objects: Objects, length: int, label: str) -> Objects:
        """Finish and hold what was parsed."""
        finished = self._objects_by_key[key] = self._finish(objects, length, label)
        return finished


# Pickle bytes -> its only tensor, and how many of the bytes are behind it; equal shards pickle equally.
_parsed: dict[bytes, tuple[Any, int]] = {}


@dataclass(frozen=True, slots=True)
class Parsed:
    """A resolved tensor and the positions of the parts of its zip that may vary.

    Attributes:
        resolved: The tensor.
        payload_row: First byte of the storage's directory row.
        id_row: First byte of the directory row of torch's serialization id (0: there is none).
        id_at: First byte of the id's payload.
        id_length: Bytes of the id's payload.
    """

    resolved: Resolved
    payload_row: int
    id_row: int
    id_at: int
    id_length: int


def parse_tensor(window: Window, label: str) -> Parsed:
    """Return the only tensor of a torch zip.

    Raises:
        MalformedCheckpoint: It is not a complete torch zip of one tensor.
        ChecksumMismatch: A record's CRC-32 is wrong.
        UnsafeContent: The pickle needs a global that is not on the allow-list.
        UnreadablePart: The tensor's elements are not plain.
    """
    archive = Archive(window, label)
    swapped, pickled = _preamble(archive, label)
    tensor, behind = _parsed.get(pickled, (None, 0))
    if tensor is None:
        tensor, behind, refused = _load_pickle(pickled, TENSOR_TABLE, label)
        _require_permitted(tensor, refused, label)
        if len(_parsed) < 4096 and len(pickled) < 4096:
            _parsed[pickled] = tensor, behind
    if not isinstance(tensor, StoredView):
        raise MalformedCheckpoint(f"{label} must hold a tensor (got a {type(tensor).__name__})")
    record = f"data/{tensor.key}"
    entry = archive.records.get(record)
    if entry is None:
        raise MalformedCheckpoint(f"{label} has no storage {tensor.key!r}")
    start = archive.start(record)
    view = check_view(tensor, entry.length, start, label, swapped)
    crc = entry.crc32 if archive.checked else None
    ident = archive.records.get(_ID)
    if ident is not None:
        archive.read(_ID)
    hidden = [Unused(start + gap.start, start + gap.end, _EXCESS, True) for gap in excess([tensor])]
    leftovers = archive.unused({*_CONSUMED, record})
    unused = (*leftovers, *hidden, *_behind(archive, behind), *_attributes(archive, tensor))
    resolved = Resolved(tensor.dtype, tensor.shape, view, start, entry.length, crc, unused)
    if ident is None:
        return Parsed(resolved, entry.row, 0, 0, 0)
    return Parsed(resolved, entry.row, ident.row, archive.start(_ID), ident.length)


def _require_permitted(tensor: Any, refused: list[str], label: str) -> None:
    """Raise unless a pickle is of one tensor and uses only permitted globals.

    A tensor's foreign class, and what its package keeps in it, make the tensor unreadable. Any other
    global is code that a pickle could run.
    """
    odd = tensor if isinstance(tensor, RefusedTensor) else None
    package = f"{odd.name.partition('.')[0]}." if odd is not None and odd.foreign else "\0"
    wraps = {_WRAPPER} if odd is not None and odd.foreign else set()
    unsafe_names = [name for name in refused if name not in wraps and not name.startswith(package)]
    if unsafe_names:
        raise UnsafeContent(
            f"cannot load {unsafe_names[0]!r} for {label}: it is not on the allow-list",
            **{"global": unsafe_names[0]},
        )
    if odd is not None:
        raise UnreadablePart(f"{label} cannot be read: it is {odd.reason or f'of dtype {odd.dtype}'}")


def is_torch(first: bytes) -> bool:
    """Report whether a file that starts with these `BEFORE_ZIP` bytes can be of `torch.save`."""
    return is_zip(first) or is_before_zip(first)


def head_holds(read: Reader, length: int, text: str, label: str) -> bool:
    """Report whether a torch file's pickle contains this text; False for anything but a complete file."""
    try:
        window = Window(read, length)
        if is_before_zip(window.read(0, min(length, BEFORE_ZIP))):
            return text.encode() in read_pickles(window.read, length, label).tree
        # Its records are not compressed: what no byte of the file says is not in the pickle.
        if window.content is not None and text.encode() not in window.content:
            return False
        archive = Archive(window, label)
        is_checkpoint = "data.pkl" in archive.records and "constants.pkl" not in archive.records
        return is_checkpoint and text.encode() in archive.read("data.pkl")
    except (MalformedCheckpoint, ChecksumMismatch, UnsafeContent, UnsupportedFormat):
        return False  # its reader will report what is wrong


def refused_in(tree: Any) -> tuple[str, ...]:
    """Return what was refused in a tree, and permitted classes and functions that are values themselves."""
    return _bounds.refused_in(tree, (Refused, Call))


def read_objects(
    content: FileRange, label: str, table: Mapping[str, Any] = OBJECT_TABLE, shared: SharedTrees | None = None
) -> Objects:
    """Return the complete tree of a torch file; globals outside ``table`` become `Refused` values.

    The account of the reading gets what is structure and what belongs to nothing, and not the storages: these
    are explained by the tensors that the caller makes of them.

    Args:
        content: The file.
        label: Its name, for messages.
        table: Permitted globals.
        shared: Trees of files that were read with the same table.
    """
    with passing():  # the directory, the pickle and the unpickler's memory are freed afterwards
        window = Window(content, content.length, _SMALL_FILE)
        if is_before_zip(window.read(0, min(content.length, BEFORE_ZIP))):
            pickled, parsed = _before_zip(content, window, label, table)
            key = blake3(pickled).digest() if shared is not None else b""
        else:
            archive = Archive(window, label)
            pickled, storages, swapped = _zipped(content, archive, label)
            key = blake3(pickled).digest() if shared is not None else b""
            shared_objects = shared.find(key, storages, swapped, label) if shared is not None else None
            if shared_objects is None:
                tree, behind, refused = _load_pickle(pickled, table, label)
            else:
                behind = shared_objects.behind
            for leftover in _behind(archive, behind):
                content.add_unused(*leftover)
            if shared_objects is not None:
                _report(content, shared_objects)
                return shared_objects
            parsed = Objects(tree, storages, tuple(refused), swapped, behind)
    tree, storages, refused_names = parsed.tree, parsed.storages, parsed.refused
    meter().take(_STORAGE * len(storages), label)
    bound_tree(tree, len(pickled), label)
    inside = (name for name in refused_in(tree) if name not in refused_names)
    attributes = attributes_in(tree) if any(name in pickled for name in _WITH_STATE) else {}
    hidden = excess(tensors_in(tree)) if storages else ()
    objects = replace(parsed, refused=(*refused_names, *inside), excess=hidden, attributes=attributes)
    _report(content, objects)
    return objects if shared is None else shared.add(key, objects, content.length, label)


def _zipped(content: FileRange, archive: Archive, label: str) -> tuple[bytes, Storages, bool]:
    """Return a zip's pickle, its storages, and whether elements are big-endian."""
    swapped, pickled = _preamble(archive, label)
    if _ID in archive.records:
        archive.read(_ID)
    data = {name: entry for name, entry in archive.records.items() if name.startswith("data/")}
    storages = {
        name.removeprefix("data/"): (
            archive.start(name),
            entry.length,
            entry.crc32 if archive.checked else None,
        )
        for name, entry in data.items()
    }
    for leftover in archive.unused({*_CONSUMED, *data}):
        content.add_unused(*leftover)
    content.explain(archive.structure([name for name in _CONSUMED if name in archive.records]))
    return pickled, storages, swapped


def _before_zip(
    content: FileRange, window: Window, label: str, table: Mapping[str, Any]
) -> tuple[bytes, Objects]:
    """Return the pickle of a file of torch.save before 1.6, and what it holds."""
    pickles = read_pickles(window.read, content.length, label)
    sizes = StorageSizes(label)
    tree, behind, refused = _load_pickle(pickles.tree, table, label, partial(_older_fields, sizes))
    places, counts, end = sizes.locate(window.read, content.length, pickles)
    content.explain(np.concatenate([np.array([[0, pickles.end]], np.int64), counts]))
    if pickles.odd_host is not None:
        content.add_unused(*pickles.odd_host, "what torch notes of the host, which no torch writes so")
    if end < content.length:
        content.add_unused(end, content.length, "behind the storages")
    storages = {key: (start, nbytes, None) for key, (start, nbytes) in places.items()}
    return pickles.tree, Objects(tree, storages, tuple(refused), swapped=False, behind=behind)


def _report(content: FileRange, objects: Objects) -> None:
    """Report what a zip's tensors leave, and their attributes."""
    for gap in objects.excess:
        start, length, _ = objects.storages.get(gap.key, (0, 0, None))
        content.add_unused(start + min(gap.start, length), start + min(gap.end, length), _EXCESS, True)
    content.carry(ATTRIBUTES, objects.attributes)


def check_view(tensor: StoredView, nbytes: int, start: int, label: str, swapped: bool) -> View:
    """Return the view of a pickled tensor in its record; raises when it reaches outside."""
    itemsize = BY_NAME[tensor.dtype].itemsize
    if tensor.storage_bytes != nbytes:
        raise MalformedCheckpoint(
            f"{label}: storage {tensor.key!r} must have {tensor.storage_bytes} bytes (got {nbytes})"
        )
    last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    if 0 not in tensor.shape and (last + 1) * itemsize > nbytes:
        raise MalformedCheckpoint(f"{label}: tensor {tensor.shape} reaches outside its storage")
    strides = None if is_row_major(tensor.shape, tensor.strides) else tensor.strides
    flags = tensor.flags | (SWAPPED if swapped and itemsize > 1 else 0)
    return View(start + tensor.offset * itemsize, strides, flags)


def _preamble(archive: Archive, label: str) -> tuple[bool, bytes]:
    """Return whether elements are big-endian, and the pickle."""
    if "data.pkl" not in archive.records:
        raise MalformedCheckpoint(f"{label} has no data.pkl")
    if "constants.pkl" in archive.records:
        raise UnsafeContent(f"{label} is a TorchScript archive: it holds code, not a checkpoint")
    texts = {name: archive.read(name) for name in _TEXTS if name in archive.records}
    order = texts.get("byteorder", b"little")
    if order not in (b"little", b"big"):
        raise MalformedCheckpoint(f"{label}: byte order {order!r}")
    return order == b"big", archive.read("data.pkl")


def _load_pickle(
    pickled: bytes, table: Mapping[str, Any], label: str, persistent: Callable[[Any], Any] | None = None
) -> tuple[Any, int, list[str]]:
    """Return a pickle's value, the number of bytes behind it, and the globals that were refused."""
    refused: list[str] = []
    behind: list[int] = []
    value = loads(
        pickled, table, label=label, persistent=persistent or _storage_fields, refused=refused, behind=behind
    )
    return value, sum(behind), refused


def _behind(archive: Archive, count: int) -> list[Unused]:
    """Return the last bytes of ``data.pkl``, which are behind its pickle."""
    end = archive.start("data.pkl") + archive.records["data.pkl"].length
    return [Unused(end - count, end, "behind the pickle in data.pkl")] if count else []


def _attributes(archive: Archive, tensor: StoredView) -> list[Unused]:
    """Return the pickle of a tensor with attributes, which only reading its item shows."""
    if not tensor.attributes:
        return []
    start = archive.start("data.pkl")
    names = ", ".join(sorted(tensor.attributes)[:8])
    return [Unused(start, start + archive.records["data.pkl"].length, f"attributes of the tensor: {names}")]


def _storage_fields(pid: Any) -> StoredStorage:
    """Return the storage of ('storage', type, key, location, numel)."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise ValueError(f"unknown persistent id {short_repr(pid)}")
    _, kind, key, _, numel = pid
    if type(kind) is not Named or kind.kind != "storage" or type(key) is not str or type(numel) is not int:
        raise ValueError(f"unknown persistent id {short_repr(pid)}")
    if numel < 0 or numel >= 1 << 50:
        raise ValueError(f"storage {key!r} claims {numel} elements")
    if kind.value == "UntypedStorage":
        return StoredStorage(key, "", numel, numel)
    if kind.value in UNSUPPORTED_STORAGES:
        name, width = UNSUPPORTED_STORAGES[kind.value]
        return StoredStorage(key, name, numel, numel * width)
    dtype = BY_STORAGE.get(kind.value)
    if dtype is None:
        raise ValueError(f"unknown storage type {kind.value!r}")
    return StoredStorage(key, dtype.name, numel, numel * dtype.itemsize)


def _older_fields(sizes: StorageSizes, pid: Any) -> Any:
    """Return the storage of ('storage', type, key, location, numel, view), as torch.save wrote it before 1.6.

    ``view`` is None, or the (key, first element, elements) of a part of the storage. ('module', class, file,
    source) is a class with its source, which is not looked at.
    """
    if type(pid) is tuple and len(pid) == 4 and pid[0] == "module":
        return pid[1]
    if type(pid) is not tuple or len(pid) != 6:
        raise ValueError(f"unknown persistent id {short_repr(pid)}")
    storage, view = _storage_fields(pid[:5]), pid[5]
    sizes.add(storage.key, storage.numel, storage.nbytes)
    if view is None:
        return storage
    if type(view) is not tuple or len(view) != 3 or any(type(n) is not int for n in view[1:]):
        raise ValueError(f"unknown part of a storage {short_repr(view)}")
    _, first, numel = view
    if not 0 <= first <= first + numel <= storage.numel:
        raise ValueError(f"part {short_repr(view)} of storage {storage.key!r} of {storage.numel} elements")
    return StoredStorage(storage.key, storage.dtype, numel, storage.nbytes, first)


@dataclass(frozen=True, slots=True)
class Excess:
    """Bytes of a storage that no tensor has.

    Attributes:
        key: Key of the storage.
        start: First byte in the storage.
        end: The byte behind the last.
    """

    key: str
    start: int
    end: int


def excess(tensors: Iterable[StoredView | RefusedTensor]) -> tuple[Excess, ...]:
    """Return what the tensors leave of each storage that one of them has, in the order of storages.

    A tensor that cannot be read may have all of its storages.
    """
    several: dict[str, list[StoredView] | None] = {}  # None: one of them has, or may have, all of it
    sizes: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}  # kind -> bytes, -1 if there are gaps
    for tensor in tensors:
        if isinstance(tensor, RefusedTensor):
            several |= dict.fromkeys(tensor.storages)
            continue
        kind = tensor.dtype, tensor.shape, tensor.strides
        nbytes = sizes.get(kind)
        if nbytes is None:
            nbytes = prod(tensor.shape) * BY_NAME[tensor.dtype].itemsize
            nbytes = sizes[kind] = nbytes if is_row_major(tensor.shape, tensor.strides) else -1
        if nbytes == tensor.storage_bytes and not tensor.offset:
            several[tensor.key] = None
        elif (views := several.setdefault(tensor.key, [])) is not None:
            views.append(tensor)
    return tuple(gap for key, views in several.items() if views for gap in _between(key, views))


def _between(key: str, views: list[StoredView]) -> Iterator[Excess]:
    size = views[0].storage_bytes
    ranges = np.concatenate([*map(_ranges, views), np.array([[size, size]], np.int64)])
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(np.insert(ranges[:, 1], 0, 0))
    for n in np.flatnonzero(ranges[:, 0] > reach[:-1]).tolist():
        yield Excess(key, int(reach[n]), int(ranges[n, 0]))


def _ranges(view: StoredView) -> Ints:
    """Return the bytes of a tensor in its storage: int64 [n, 2]; very many ranges count as one."""
    width = BY_NAME[view.dtype].itemsize
    if 0 in view.shape:
        return np.empty((0, 2), np.int64)
    first, length = np.array([view.offset], np.int64), 1
    for stride, extent in sorted(zip(view.strides, view.shape, strict=True)):
        if stride <= length:  # what a smaller stride covers goes on, or repeats
            length = max(length, stride * (extent - 1) + length)
        elif len(first) * extent <= _MAX_RUNS:
            first = np.add.outer(np.arange(extent, dtype=np.int64) * stride, first).ravel()
        else:
            length += int(first.max() - first.min()) + stride * (extent - 1)
            first = first[:1]
    return np.stack([first, first + length], axis=1) * width
