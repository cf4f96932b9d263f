"""Locate the records of a torch zip, and account for every byte between them.

A torch zip is an uncompressed zip: records with a local header before their payload and a descriptor behind
it, the directory, and the end records (caffe2/serialize/inline_container.cc). Each byte of these is checked
where it was read, or it is of no meaning: versions, times, attributes and flags of the zip format, which
`Archive.unchecked` lists. What is left over, such as a comment or bytes between two records, is in
`Archive.unused`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ckptcore.core.manifest import Ints
from ckptcore.core.metadata_budget import meter
from ckptcore.errors import ChecksumMismatch, MalformedCheckpoint
from ckptcore.utils.crc32 import crc32

Reader = Callable[[int, int], bytes]  # (start, length) inside the zip -> exactly those bytes
_TAIL, _HEAD = 2048, 2048
SMALL = _HEAD + _TAIL + 4096  # bytes of a zip that is read entirely
TAR_BLOCK = 512  # bytes of a header of a tar
DESCRIPTOR = b"PK\x07\x08"  # behind a payload; its CRC-32 follows
_MAX_PICKLE = 256 << 20
_RECORD = 2048  # bytes of a zip record in all stages, and about the time to locate it
_EOCD = struct.Struct("<4s4H2IH")
_EOCD64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_NARROW, _WIDE = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")  # descriptors
_NONE32 = 0xFFFFFFFF
_PAD = 4 + 64  # bytes of an extra field that are read with its header: torch aligns payloads to 64
_NAME = 64  # bytes of a name that are read with it: torch's are shorter
_PADDING = b"FB"  # torch's own extra field, whose bytes are Z
# Flags of a record (APPNOTE.TXT 4.4.4): a descriptor follows; it, or the directory, is encrypted; it is a
# patch. torch refuses the last two.
_FOLLOWED = 1 << 3
_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13
_PATCHED = 1 << 5
# Fields that say nothing about the content, as (first byte, end): version, flags, time, date and attributes.
_FREE_LOCAL = (4, 8), (10, 14)
_FREE_ROW = (4, 10), (12, 16), (36, 42)
_FREE_END64 = ((12, 16),)
_ZIP64 = 1  # number of the extra field with sizes of 8 bytes


class Unused(NamedTuple):
    """Bytes ``[start, end)`` of a zip that belong to nothing, and what they are, or "".

    ``padding``: whether they are only that if all of them are zero.
    """

    start: int
    end: int
    description: str
    padding: bool = False


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record.

    Attributes:
        name: Its complete name.
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


class Window:
    """Serves reads of a zip from its first and last bytes where they suffice.

    Args:
        read: Of the zip.
        length: Of the zip, bytes.
        small: Up to this length all of it is read, at once.
    """

    def __init__(self, read: Reader, length: int, small: int = SMALL) -> None:
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
            offset = start - self._tail_at
            return self._tail[offset : offset + length]
        return self._read(start, length)

    def holds(self, start: int, length: int) -> bool:
        """Report whether `read` serves this range without another read."""
        return start + length <= len(self._head) or start >= self._tail_at

    @property
    def content(self) -> bytes | None:
        """Return all bytes of a small zip, or None."""
        return self._head if len(self._head) == self.length else None


def is_tar(first: bytes) -> bool:
    """Report whether a file that starts with these `TAR_BLOCK` bytes is a tar."""
    return len(first) == TAR_BLOCK and first[257:262] == b"ustar"


def is_zip(first: bytes) -> bool:
    """Report whether a file that starts with these bytes can be a torch zip."""
    return first[:4] == b"PK\x03\x04"


class Archive:
    """The records of a torch zip.

    Args:
        window: The zip.
        label: Its name, for messages.

    Attributes:
        records: By name, without the archive's own folder.
        checked: Whether the zip has checksums.

    Raises:
        MalformedCheckpoint: It is not a complete, uncompressed zip.
    """

    def __init__(self, window: Window, label: str) -> None:
        self._window, self._label = window, label
        self.records: dict[str, ZipRecord] = {}
        self.checked = False
        self._odd: list[Unused] = []  # what the directory and the headers have beyond their own fields
        self._last = 0, b""  # the last bytes that were read around payloads
        self._free: list[tuple[int, int]] = []  # in the end records
        self._payloads: dict[str, int] = {}  # name -> first byte of the payload
        self._places = array("q")  # of `_table`
        self._begin = self._read_directory()

    def start(self, name: str) -> int:
        """Return the first byte of a record's payload, after checking the local header and the descriptor.

        Raises:
            MalformedCheckpoint: They contradict the directory.
            ChecksumMismatch: So does the CRC-32 behind the payload.
        """
        start = self._payloads.get(name)
        if start is None:
            start = self._payloads[name] = self._locate(self.records[name])
        return start

    def read(self, name: str) -> bytes:
        """Return a small record's payload, verified against its CRC-32 where there is one."""
        entry, label = self.records[name], self._label
        if entry.length > _MAX_PICKLE:
            raise MalformedCheckpoint(
                f"{label}: zip record {entry.name!r} must have at most {_MAX_PICKLE} bytes "
                f"(got {entry.length})"
            )
        raw = self._window.read(self.start(name), entry.length)
        if self.checked and crc32(raw) != entry.crc32:
            raise ChecksumMismatch(
                f"{label}: record {entry.name!r} must have CRC-32 {entry.crc32:08x} (got {crc32(raw):08x})",
                hint="copy the file again from where it was written",
            )
        return raw

    def structure(self, consumed: Iterable[str]) -> Ints:
        """Return the ranges around the payloads, and the payloads of the named records: int64 [n, 2]."""
        headers, behind = np.split(self._table(), 2, axis=1)
        inside = [(s := self.start(n), s + self.records[n].length) for n in consumed]
        rest = np.array([*inside, (self._begin, self._window.length)], np.int64)
        return np.concatenate([headers, behind, rest])

    def unused(self, consumed: Set[str]) -> list[Unused]:
        """Return what belongs to nothing: records that are not named, and what is between all of them."""
        for name in self.records.keys() - self._payloads.keys():
            self.start(name)
        leftovers = list(self._odd)
        for name in sorted(self.records.keys() - consumed):
            start, entry = self.start(name), self.records[name]
            if entry.length:
                leftovers.append(Unused(start, start + entry.length, f"zip record {entry.name}"))
        table = self._table()
        table = table[np.argsort(table[:, 0], kind="stable")]
        first = np.append(table[:, 0], self._begin)
        reach = np.maximum.accumulate(np.insert(table[:, 3], 0, 0))
        gaps = np.flatnonzero(first > reach).tolist()
        return [*leftovers, *(Unused(int(reach[n]), int(first[n]), "") for n in gaps)]

    def _table(self) -> Ints:
        """Return where header, payload, descriptor and next record begin, of the records located so far."""
        return np.array(self._places, np.int64).reshape(-1, 4)

    def unchecked(self) -> Ints:
        """Return the ranges of fields that have no meaning here, and are not checked: int64 [n, 2]."""
        of_headers = [(e.header + a, e.header + b) for e in self.records.values() for a, b in _FREE_LOCAL]
        of_rows = [(e.row + a, e.row + b) for e in self.records.values() for a, b in _FREE_ROW]
        return np.array([*of_headers, *of_rows, *self._free], np.int64)

    def _locate(self, entry: ZipRecord) -> int:
        """Check a record around its payload, and return the payload's first byte."""
        label, name = self._label, entry.name.encode()
        begin = entry.header + _LOCAL.size + len(name)
        raw = self._near(entry.header, min(begin + _PAD, self._begin))
        sig, _, flags, method, _, _, crc, packed, plain, name_length, extra_length = _LOCAL.unpack_from(raw)
        if flags & _FOLLOWED and not (crc or packed or plain):
            fits = True  # the descriptor has them, as torch writes it
        else:
            size = min(entry.length, _NONE32)
            fits = (crc, packed, plain) == (entry.crc32, size, size)
        if (
            not fits
            or sig != b"PK\x03\x04"
            or method
            or name_length != len(name)
            or not raw.startswith(name, _LOCAL.size)
        ):
            raise MalformedCheckpoint(f"{label}: zip header of {entry.name!r} is damaged")
        _require_plain(flags, entry.name, label)
        start: int = begin + extra_length
        end = start + entry.length
        if end > self._window.length:
            raise MalformedCheckpoint(f"{label}: zip record {entry.name!r} is cut off")
        extra = raw[begin - entry.header : start - entry.header]
        if len(extra) < extra_length:
            extra = self._window.read(begin, extra_length)
        if extra != _padding_of(extra_length):  # as nearly none
            self._odd += _odd_fields(extra, begin, entry.name)
        # Without checksums only the descriptor shows that the header's lengths are right.
        behind = self._descriptor(entry, end) if flags & _FOLLOWED else 0
        self._places.extend((entry.header, start, end, end + behind))
        return start

    def _descriptor(self, entry: ZipRecord, start: int) -> int:
        """Return the bytes of the descriptor behind a payload."""
        raw = self._near(start, min(start + _WIDE.size, self._begin))
        # The wide form first: of an empty record it begins like the narrow one.
        for form in (_WIDE, _NARROW):
            sig, crc, packed, plain = form.unpack_from(raw) if len(raw) >= form.size else (b"", 0, 0, 0)
            if (sig, packed, plain) == (DESCRIPTOR, entry.length, entry.length):
                break
        else:
            raise MalformedCheckpoint(
                f"{self._label}: zip record {entry.name!r} does not end where it should"
            )
        if crc != entry.crc32:
            raise ChecksumMismatch(
                f"{self._label}: zip record {entry.name!r} has CRC-32 {entry.crc32:08x} in the directory, "
                f"and {crc:08x} behind its payload",
                hint="copy the file again from where it was written",
            )
        return form.size

    def _near(self, start: int, end: int) -> bytes:
        """Return bytes of headers; a descriptor is read with the header behind it."""
        first, data = self._last
        if start < first or end > first + len(data):
            stop = min(start + _WIDE.size + _LOCAL.size + _NAME + _PAD, self._begin)
            first, data = self._last = start, self._window.read(start, max(stop, end, start) - start)
        return data[start - first : max(end - first, 0)]

    def _read_directory(self) -> int:
        """Read the directory, and return its first byte."""
        window, label = self._window, self._label
        count, begin, size, end = self._directory_range()
        meter().take(_RECORD * count + size, label)
        raw = window.read(begin, size)
        row, prefix = 0, None
        for _ in range(count):
            entry, behind = self._row(raw, row, begin)
            folder, _, name = entry.name.partition("/")
            if prefix is None:
                prefix = folder
            if folder != prefix or not name or name in self.records:
                raise MalformedCheckpoint(f"{label}: unexpected zip record {entry.name!r}")
            if entry.header + _LOCAL.size + entry.length > begin:
                raise MalformedCheckpoint(f"{label}: zip record {entry.name!r} is after the directory")
            # `torch.serialization.set_crc32_options(False)` writes 0 for every record.
            self.checked |= entry.crc32 != 0
            self.records[name] = entry
            row = behind
        if begin + row < end:
            self._odd.append(Unused(begin + row, end, "between the zip's directory and its end"))
        return begin

    def _directory_range(self) -> tuple[int, int, int, int]:
        """Return the number of records, the directory's first byte and length, and where its end begins."""
        window, label, size = self._window, self._label, self._window.length
        if size < _EOCD.size:
            raise MalformedCheckpoint(f"{label}: a torch zip must have {_EOCD.size} bytes (got {size})")
        sig, *numbers, comment = _EOCD.unpack(window.read(size - _EOCD.size, _EOCD.size))
        disk, first_disk, disk_count, count, length, begin = numbers
        if sig != b"PK\x05\x06" or comment or disk or first_disk:
            raise MalformedCheckpoint(
                f"{label} does not end like a torch zip: it is truncated or overwritten"
            )
        end = size - _EOCD.size
        if end >= _LOCATOR.size:
            sig, disk, begin64, disks = _LOCATOR.unpack(window.read(end - _LOCATOR.size, _LOCATOR.size))
            if sig == b"PK\x06\x07":
                narrow = disk_count, count, length, begin
                sig, nbytes, _, _, *own_disks, disk_count, count, length, begin = _EOCD64.unpack(
                    window.read(begin64, _EOCD64.size)
                )
                wide = min(disk_count, 0xFFFF), min(count, 0xFFFF), min(length, _NONE32), min(begin, _NONE32)
                fits = begin64 + 12 + nbytes == end - _LOCATOR.size and narrow == wide
                if sig != b"PK\x06\x06" or any((disk, *own_disks)) or disks != 1 or not fits:
                    raise MalformedCheckpoint(f"{label}: the zip64 directory record is damaged")
                if nbytes + 12 > _EOCD64.size:
                    odd = Unused(begin64 + _EOCD64.size, begin64 + 12 + nbytes, "in the zip64 end record")
                    self._odd.append(odd)
                self._free = [(begin64 + a, begin64 + b) for a, b in _FREE_END64]
                end = begin64
        if disk_count != count or begin + length > end or count * _CENTRAL.size > length:
            raise MalformedCheckpoint(f"{label}: the zip directory claims {count} records in {length} bytes")
        return count, begin, length, end

    def _row(self, raw: bytes, row: int, base: int) -> tuple[ZipRecord, int]:
        """Read a row of the directory, which begins at byte ``base``; return it and the place of the next."""
        label = self._label
        if row + _CENTRAL.size > len(raw):
            raise MalformedCheckpoint(f"{label}: the zip directory is truncated")
        fields = _CENTRAL.unpack_from(raw, row)
        sig, method, crc, packed, plain = fields[0], fields[4], fields[7], fields[8], fields[9]
        name_length, extra_length, comment_length, disk = fields[10], fields[11], fields[12], fields[13]
        header = fields[16]
        begin = row + _CENTRAL.size
        body = begin + name_length
        end = body + extra_length + comment_length
        if sig != b"PK\x01\x02" or end > len(raw) or disk:
            raise MalformedCheckpoint(f"{label}: the zip directory is damaged")
        try:
            name = raw[begin:body].decode()
        except UnicodeDecodeError as error:
            raise MalformedCheckpoint(f"{label}: zip record name is not text") from error
        if extra_length:
            extra = raw[body : body + extra_length]
            if _NONE32 in (packed, plain, header):
                plain, packed, header = _wide_sizes(extra, plain, packed, header, label)
            self._odd += _odd_fields(extra, base + body, name)
        elif _NONE32 in (packed, plain, header):
            raise MalformedCheckpoint(f"{label}: zip64 sizes are missing")
        if comment_length:
            comment = base + body + extra_length
            self._odd.append(Unused(comment, comment + comment_length, f"comment of the zip record {name}"))
        _require_plain(fields[3], name, label)
        if method or packed != plain:
            raise MalformedCheckpoint(f"{label}: zip record {name!r} is compressed")
        return ZipRecord(name, header, plain, crc, base + row), end


def _require_plain(flags: int, name: str, label: str) -> None:
    """Raise unless a record's payload is what its bytes say."""
    if flags & (_ENCRYPTED | _PATCHED):
        kind = "encrypted" if flags & _ENCRYPTED else "a patch"
        raise MalformedCheckpoint(
            f"{label}: zip record {name!r} is {kind}",
            hint="decrypt the file where it was written, or save it with torch.save",
        )


@lru_cache(maxsize=256)
def _padding_of(length: int) -> bytes:
    """Return an extra field of torch's padding alone, which has few lengths."""
    return _PADDING + max(length - 4, 0).to_bytes(2, "little") + b"Z" * (length - 4)


def _odd_fields(extra: bytes, base: int, name: str) -> list[Unused]:
    """Return the part of an extra field from its first one that is neither sizes nor torch's padding."""
    position, length = 0, len(extra)
    while position + 4 <= length:
        number, n = struct.unpack_from("<HH", extra, position)
        body, end = extra[position + 4 : position + 4 + n], position + 4 + n
        padding = extra[position : position + 2] == _PADDING and (body.count(b"Z") == n or not any(body))
        sizes = number == _ZIP64 and n % 8 == 0 and n <= 24
        if end > length or not (padding or sizes):
            break
        position = end
    return (
        [Unused(base + position, base + length, f"extra field of the zip record {name}")]
        if position < length
        else []
    )


def _wide_sizes(extra: bytes, plain: int, packed: int, header: int, label: str) -> tuple[int, int, int]:
    """Return the sizes and the place that are too large for their own fields of a directory row."""
    position = 0
    while position + 4 <= len(extra):
        kind, n = struct.unpack_from("<HH", extra, position)
        if kind == _ZIP64:
            values = list(
                struct.unpack_from(f"<{min(n, len(extra) - position - 4) // 8}Q", extra, position + 4)
            )
            is_wide = [v == _NONE32 for v in (plain, packed, header)]
            if len(values) >= sum(is_wide):
                parts = [
                    values.pop(0) if w else v for w, v in zip(is_wide, (plain, packed, header), strict=True)
                ]
                return parts[0], parts[1], parts[2]
        position += 4 + n
    raise MalformedCheckpoint(f"{label}: zip64 sizes are missing")
