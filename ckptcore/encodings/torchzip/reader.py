"""Locate the tensor bytes inside a file of `torch.save`.

A torch zip is an uncompressed zip: ``<name>/data.pkl`` (a pickle whose persistent ids name
storages), ``<name>/data/<key>`` (one record per storage, 64-byte aligned from the zip's start),
``byteorder``, ``version`` (torch/serialization.py, caffe2/serialize/inline_container.cc). The
central directory has every record's CRC-32, which torch itself never checks.

`directory` locates the records, `parse_tensor` resolves a zip with exactly one tensor, and
`read_objects` returns a zip's complete tree. All read through a `Reader`, read a few KiB, and bound
every count and offset before use.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from blake3 import blake3

from ckptcore.core.dtype import BY_NAME, BY_STORAGE, UNSUPPORTED_STORAGES
from ckptcore.core.manifest import SWAPPED, View, is_row_major
from ckptcore.core.metadata_budget import meter, passing
from ckptcore.core.object_tree import Named, Refused, RefusedTensor
from ckptcore.encodings import limits as _bounds
from ckptcore.encodings.limits import bound_tree as bound_tree
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE, TENSOR_TABLE, StoredStorage, StoredView
from ckptcore.encodings.pickle.unpickler import Call, loads
from ckptcore.errors import ChecksumMismatch, MalformedCheckpoint, UnreadablePart, UnsafeContent
from ckptcore.utils.crc32 import crc32
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.text import short_repr

Reader = Callable[[int, int], bytes]  # (start, length) inside the zip -> exactly those bytes
_TAIL, _HEAD = 2048, 2048
_SMALL = _HEAD + _TAIL + 4096  # bytes of a zip that is read entirely
_SMALL_FILE = 1 << 20  # ... if it is a file with many records, each of which takes two reads
DESCRIPTOR = b"PK\x07\x08"  # behind a payload; its CRC-32 follows
_MAX_PICKLE = 256 << 20
_STORAGE = 400  # bytes that a storage's location takes
_RECORD = 2048  # bytes of a zip record in all stages, and about the time to locate it
_EOCD = struct.Struct("<4s4H2IH")
_EOCD64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_NONE32 = 0xFFFFFFFF
# Flags of a record (APPNOTE.TXT 4.4.4): it, or the directory, is encrypted; it is a patch. torch refuses all.
_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13
_PATCHED = 1 << 5


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record.

    Attributes:
        name: Its name, without the archive's folder in `directory`'s keys.
        header: First byte of its local header.
        length: Payload bytes.
        crc32: Stored CRC-32.
        row: First byte of its row in the directory.
    """

    name: str
    header: int
    length: int
    crc32: int
    row: int


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
    """

    dtype: str
    shape: tuple[int, ...]
    view: View
    record_start: int
    record_length: int
    crc32: int | None


Storages = Mapping[str, tuple[int, int, int | None]]  # key -> (start, length, crc32)


@dataclass(frozen=True, slots=True)
class Objects:
    """A zip's complete content: the tree (tensors as `StoredView`), its storages, the refused globals."""

    tree: Any
    storages: Storages
    refused: tuple[str, ...]
    swapped: bool


class SharedTrees:
    """The trees of files that were read before: ranks of one job often pickle the very same tree.

    Equal pickles (SHA-256) give one tree, which is parsed and held once. Callers must not change it.

    Args:
        finish: Makes of what was parsed what is held: called with it, the file's length and name.
    """

    def __init__(self, finish: Callable[[Objects, int, str], Objects]) -> None:
        self._finish = finish
        self._known: dict[bytes, Objects] = {}

    def find(self, key: bytes, storages: Storages, swapped: bool, what: str) -> Objects | None:
        """Return the tree of an equal pickle, with the storages of this file; None for a new one."""
        known = self._known.get(key)
        if known is None or (known.storages == storages and known.swapped == swapped):
            return known
        meter().take(_STORAGE * len(storages), what)
        found = self._known[key] = replace(known, storages=storages, swapped=swapped)
        return found

    def add(self, key: bytes, objects: Objects, length: int, what: str) -> Objects:
        """Finish and hold what was parsed."""
        found = self._known[key] = self._finish(objects, length, what)
        return found


class Window:
    """Serves reads of a zip from its first and last bytes where they suffice.

    Args:
        read: Of the zip.
        length: Of the zip, bytes.
        small: Up to this length all of it is read, at once.
    """

    def __init__(self, read: Reader, length: int, small: int = _SMALL) -> None:
        self._read, self.length = read, length
        if length <= small:
            self._head = read(0, length)
            self._tail, self._tail_at = self._head, 0
        else:
            self._head = read(0, _HEAD)
            self._tail_at = length - _TAIL
            self._tail = read(self._tail_at, _TAIL)

    def read(self, start: int, length: int) -> bytes:
        """Return exactly these bytes; raises `MalformedCheckpoint` for a range outside the zip."""
        if start < 0 or length < 0 or start + length > self.length:
            raise MalformedCheckpoint(
                f"the zip's metadata refers to bytes [{start}, {start + length}), the zip has {self.length}"
            )
        if start + length <= len(self._head):
            return self._head[start : start + length]
        if start >= self._tail_at:
            at = start - self._tail_at
            return self._tail[at : at + length]
        return self._read(start, length)

    def holds(self, start: int, length: int) -> bool:
        """Report whether `read` serves this range without another read."""
        return start + length <= len(self._head) or start >= self._tail_at

    @property
    def content(self) -> bytes | None:
        """Return all bytes of a small zip, or None."""
        return self._head if len(self._head) == self.length else None


def is_zip(first: bytes) -> bool:
    """Report whether a file that starts with these bytes can be a torch zip."""
    return first[:4] == b"PK\x03\x04"


def directory(window: Window, what: str) -> tuple[dict[str, ZipRecord], bool]:
    """Return the records by name, without the archive's own folder, and whether the zip has checksums.

    Raises:
        MalformedCheckpoint: It is not a complete, uncompressed zip.
    """
    size = window.length
    if size < _EOCD.size:
        raise MalformedCheckpoint(f"{what}: a torch zip must have {_EOCD.size} bytes (got {size})")
    sig, disk, cd_disk, here, count, cd_size, cd_at, comment = _EOCD.unpack(
        window.read(size - _EOCD.size, _EOCD.size)
    )
    if sig != b"PK\x05\x06" or comment or disk or cd_disk:
        raise MalformedCheckpoint(f"{what} does not end like a torch zip: it is truncated or overwritten")
    end = size - _EOCD.size
    if end >= _LOCATOR.size:
        sig, _, at64, _ = _LOCATOR.unpack(window.read(end - _LOCATOR.size, _LOCATOR.size))
        if sig == b"PK\x06\x07":
            sig, _, _, _, _, _, here, count, cd_size, cd_at = _EOCD64.unpack(window.read(at64, _EOCD64.size))
            end = at64
            if sig != b"PK\x06\x06":
                raise MalformedCheckpoint(f"{what}: the zip64 directory record is damaged")
    if here != count or cd_at + cd_size > end or count * _CENTRAL.size > cd_size:
        raise MalformedCheckpoint(f"{what}: the zip directory claims {count} records in {cd_size} bytes")
    meter().take(_RECORD * count + cd_size, what)
    raw = window.read(cd_at, cd_size)
    records: dict[str, ZipRecord] = {}
    at, prefix, checked = 0, None, False
    for _ in range(count):
        entry, at = _central_entry(raw, at, cd_at, what)
        folder, _, name = entry.name.partition("/")
        if prefix is None:
            prefix = folder
        if folder != prefix or not name or name in records:
            raise MalformedCheckpoint(f"{what}: unexpected zip record {entry.name!r}")
        if entry.header + _LOCAL.size + entry.length > cd_at:
            raise MalformedCheckpoint(f"{what}: zip record {entry.name!r} is after the directory")
        checked |= entry.crc32 != 0
        records[name] = entry
    return records, checked


def payload_start(window: Window, entry: ZipRecord, what: str) -> int:
    """Return the first byte of a record's payload, after checking the local header and the descriptor."""
    fields = _LOCAL.unpack(window.read(entry.header, _LOCAL.size))
    name_length, extra_length = fields[9], fields[10]
    name = window.read(entry.header + _LOCAL.size, name_length)
    _require_plain(fields[2], entry.name, what)
    if fields[0] != b"PK\x03\x04" or fields[3] != 0 or name != entry.name.encode():
        raise MalformedCheckpoint(f"{what}: zip header of {entry.name!r} is damaged")
    start: int = entry.header + _LOCAL.size + name_length + extra_length
    if start + entry.length > window.length:
        raise MalformedCheckpoint(f"{what}: zip record {entry.name!r} is cut off")
    # Bit 3: the payload is followed by its descriptor. Without checksums only this shows that the
    # header's lengths are right.
    if fields[2] & 8:
        behind = window.read(start + entry.length, 8)
        if behind[:4] != DESCRIPTOR:
            raise MalformedCheckpoint(f"{what}: zip record {entry.name!r} does not end where it should")
        crc = int.from_bytes(behind[4:], "little")
        if crc != entry.crc32:
            raise ChecksumMismatch(
                f"{what}: zip record {entry.name!r} has CRC-32 {entry.crc32:08x} in the directory, and "
                f"{crc:08x} behind its payload",
                hint="copy the file again from where it was written",
            )
    return start


def read_record(window: Window, entry: ZipRecord, checked: bool, what: str) -> bytes:
    """Return a small record's payload, verified against its CRC-32 where there is one."""
    if entry.length > _MAX_PICKLE:
        raise MalformedCheckpoint(
            f"{what}: zip record {entry.name!r} must have at most {_MAX_PICKLE} bytes (got {entry.length})"
        )
    raw = window.read(payload_start(window, entry, what), entry.length)
    if checked and crc32(raw) != entry.crc32:
        raise ChecksumMismatch(
            f"{what}: record {entry.name!r} must have CRC-32 {entry.crc32:08x} (got {crc32(raw):08x})",
            hint="copy the file again from where it was written",
        )
    return raw


_parsed: dict[bytes, Any] = {}  # pickle bytes -> its only tensor; equal shards pickle equally


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


def parse_tensor(window: Window, what: str) -> Parsed:
    """Return the only tensor of a torch zip.

    Raises:
        MalformedCheckpoint: It is not a complete torch zip of one tensor.
        ChecksumMismatch: A record's CRC-32 is wrong.
        UnsafeContent: The pickle needs a global that is not on the allow-list.
        UnreadablePart: The tensor's elements are not plain.
    """
    records, checked = directory(window, what)
    swapped, pickled = _preamble(window, records, checked, what)
    seen = _parsed.get(pickled)
    if seen is None:
        refused: list[str] = []
        seen = loads(pickled, TENSOR_TABLE, what=what, persistent=_storage_fields, refused=refused)
        _require_known(seen, refused, what)
        if len(_parsed) < 4096 and len(pickled) < 4096:
            _parsed[pickled] = seen
    if not isinstance(seen, StoredView):
        raise MalformedCheckpoint(f"{what} must hold a tensor (got a {type(seen).__name__})")
    entry = records.get(f"data/{seen.key}")
    if entry is None:
        raise MalformedCheckpoint(f"{what} has no storage {seen.key!r}")
    start = payload_start(window, entry, what)
    view = check_view(seen, entry.length, start, what, swapped)
    crc = entry.crc32 if checked else None
    resolved = Resolved(seen.dtype, seen.shape, view, start, entry.length, crc)
    ident = records.get(".data/serialization_id")
    if ident is None:
        return Parsed(resolved, entry.row, 0, 0, 0)
    read_record(window, ident, checked, what)
    return Parsed(resolved, entry.row, ident.row, payload_start(window, ident, what), ident.length)


def _require_known(seen: Any, refused: list[str], what: str) -> None:
    """Raise unless a pickle is of one tensor and uses only permitted globals.

    A tensor's foreign class, and what its package keeps in it, make the tensor unreadable. Any other
    global is code that a pickle could run.
    """
    odd = seen if isinstance(seen, RefusedTensor) else None
    package = f"{odd.name.partition('.')[0]}." if odd is not None and odd.foreign else "\0"
    others = [name for name in refused if not name.startswith(package)]
    if others:
        raise UnsafeContent(
            f"cannot load {others[0]!r} for {what}: it is not on the allow-list", **{"global": others[0]}
        )
    if odd is not None:
        raise UnreadablePart(f"{what} cannot be read: it is {odd.what or f'of dtype {odd.dtype}'}")


def head_holds(read: Reader, length: int, text: str, what: str) -> bool:
    """Report whether a torch zip's pickle contains this text; False for anything but a complete torch zip."""
    try:
        window = Window(read, length)
        records, checked = directory(window, what)
        return text.encode() in _preamble(window, records, checked, what)[1]
    except (MalformedCheckpoint, ChecksumMismatch, UnsafeContent):
        return False  # its reader will report what is wrong


def refused_in(tree: Any) -> tuple[str, ...]:
    """Return what was refused in a tree, and permitted classes and functions that are values themselves."""
    return _bounds.refused_in(tree, (Refused, Call))


def read_objects(
    read: Reader,
    length: int,
    what: str,
    table: Mapping[str, Any] = OBJECT_TABLE,
    shared: SharedTrees | None = None,
) -> Objects:
    """Return the complete tree of a torch zip; globals outside ``table`` become `Refused` values.

    Args:
        read: Of the zip.
        length: Of the zip, bytes.
        what: Its name, for messages.
        table: Permitted globals.
        shared: Trees of files that were read with the same table.
    """
    window = Window(read, length, _SMALL_FILE)
    refused: list[str] = []
    with passing():  # the directory, the pickle and the unpickler's memory are freed afterwards
        records, checked = directory(window, what)
        swapped, pickled = _preamble(window, records, checked, what)
        storages = {
            name.removeprefix("data/"): (
                payload_start(window, entry, what),
                entry.length,
                entry.crc32 if checked else None,
            )
            for name, entry in records.items()
            if name.startswith("data/")
        }
        key = blake3(pickled).digest() if shared is not None else b""
        known = shared.find(key, storages, swapped, what) if shared is not None else None
        if known is not None:
            return known
        tree = loads(pickled, table, what=what, persistent=_storage_fields, refused=refused)
    meter().take(_STORAGE * len(storages), what)
    bound_tree(tree, len(pickled), what)
    inside = (name for name in refused_in(tree) if name not in refused)
    found = Objects(tree, storages, (*refused, *inside), swapped)
    return found if shared is None else shared.add(key, found, length, what)


def check_view(seen: StoredView, nbytes: int, start: int, what: str, swapped: bool) -> View:
    """Return the view of a pickled tensor in its record; raises when it reaches outside."""
    itemsize = BY_NAME[seen.dtype].itemsize
    if seen.storage_bytes != nbytes:
        raise MalformedCheckpoint(
            f"{what}: storage {seen.key!r} must have {seen.storage_bytes} bytes (got {nbytes})"
        )
    last = seen.offset + sum((n - 1) * s for n, s in zip(seen.shape, seen.strides, strict=True))
    if 0 not in seen.shape and (last + 1) * itemsize > nbytes:
        raise MalformedCheckpoint(f"{what}: tensor {seen.shape} reaches outside its storage")
    strides = None if is_row_major(seen.shape, seen.strides) else seen.strides
    flags = seen.flags | (SWAPPED if swapped and itemsize > 1 else 0)
    return View(start + seen.offset * itemsize, strides, flags)


def _preamble(
    window: Window, records: Mapping[str, ZipRecord], checked: bool, what: str
) -> tuple[bool, bytes]:
    if "data.pkl" not in records:
        raise MalformedCheckpoint(f"{what} has no data.pkl")
    if "constants.pkl" in records:
        raise UnsafeContent(f"{what} is a TorchScript archive: it holds code, not a checkpoint")
    order = b"little"
    for name in ("byteorder", "version", ".format_version", ".storage_alignment"):
        if name in records:
            raw = read_record(window, records[name], checked, what)
            order = raw if name == "byteorder" else order
    if order not in (b"little", b"big"):
        raise MalformedCheckpoint(f"{what}: byte order {order!r}")
    return order == b"big", read_record(window, records["data.pkl"], checked, what)


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
    found = BY_STORAGE.get(kind.value)
    if found is None:
        raise ValueError(f"unknown storage type {kind.value!r}")
    return StoredStorage(key, found.name, numel, numel * found.itemsize)


def _central_entry(raw: bytes, at: int, base: int, what: str) -> tuple[ZipRecord, int]:
    if at + _CENTRAL.size > len(raw):
        raise MalformedCheckpoint(f"{what}: the zip directory is truncated")
    fields = _CENTRAL.unpack_from(raw, at)
    sig, method, crc, packed, plain = fields[0], fields[4], fields[7], fields[8], fields[9]
    name_length, extra_length, comment_length = fields[10], fields[11], fields[12]
    header = fields[16]
    body = at + _CENTRAL.size
    end = body + name_length + extra_length + comment_length
    if sig != b"PK\x01\x02" or end > len(raw):
        raise MalformedCheckpoint(f"{what}: the zip directory is damaged")
    try:
        name = raw[body : body + name_length].decode()
    except UnicodeDecodeError as error:
        raise MalformedCheckpoint(f"{what}: zip record name is not text") from error
    if _NONE32 in (packed, plain, header):
        extra = raw[body + name_length : body + name_length + extra_length]
        plain, packed, header = _zip64(extra, plain, packed, header, what)
    _require_plain(fields[3], name, what)
    if method or packed != plain:
        raise MalformedCheckpoint(f"{what}: zip record {name!r} is compressed")
    return ZipRecord(name, header, plain, crc, base + at), end


def _require_plain(flags: int, name: str, what: str) -> None:
    """Raise unless a record's payload is what its bytes say."""
    if flags & (_ENCRYPTED | _PATCHED):
        kind = "encrypted" if flags & _ENCRYPTED else "a patch"
        raise MalformedCheckpoint(
            f"{what}: zip record {name!r} is {kind}",
            hint="decrypt the file where it was written, or save it with torch.save",
        )


def _zip64(extra: bytes, plain: int, packed: int, header: int, what: str) -> tuple[int, int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, n = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = list(struct.unpack_from(f"<{min(n, len(extra) - at - 4) // 8}Q", extra, at + 4))
            wanted = [v == _NONE32 for v in (plain, packed, header)]
            if len(values) >= sum(wanted):
                parts = [
                    values.pop(0) if w else v for w, v in zip(wanted, (plain, packed, header), strict=True)
                ]
                return parts[0], parts[1], parts[2]
        at += 4 + n
    raise MalformedCheckpoint(f"{what}: zip64 sizes are missing")
