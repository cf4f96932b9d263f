"""Locate the files inside a tar, without unpacking it: names, first bytes and sizes.

Headers are POSIX's ustar with the extensions of pax and GNU (Python's tarfile.py). Links are not followed,
and no name is used as a path. A tar ends with a block of zeros: one that does not was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckptcore.encodings.torchzip.archive import TAR_BLOCK, is_tar
from ckptcore.errors import MalformedCheckpoint

_MAX_MEMBERS, _MAX_EXTENSION = 4096, 1 << 20
_FILE, _PAX, _GLOBAL_PAX, _LONG_NAME = (b"0", b"\0", b"7"), b"x", b"g", b"L"


class TarMember(NamedTuple):
    """A regular file inside a tar: its name, first byte and bytes."""

    name: str
    start: int
    length: int


def tar_members(read: Callable[[int, int], bytes], length: int, label: str) -> tuple[TarMember, ...]:
    """Return the regular files of a tar.

    Args:
        read: (start, length) -> exactly these bytes of the tar.
        length: Bytes of the tar.
        label: The file, for messages.

    Raises:
        MalformedCheckpoint: A header is not valid, or the tar ends before its end.
    """
    members: list[TarMember] = []
    position, pax_records = 0, dict[str, str]()
    for _ in range(_MAX_MEMBERS):
        block = read(position, TAR_BLOCK) if position + TAR_BLOCK <= length else b""
        if block and not any(block):
            return tuple(members)
        if not is_tar(block) or _number(block[148:156], label) != _checksum(block):
            raise MalformedCheckpoint(f"{label} has no header of a tar at byte {position}", file=label)
        size, kind, start = _number(block[124:136], label), block[156:157], position + TAR_BLOCK
        # The header's own field ends at 8 GiB: pax has larger sizes in a record before it.
        if kind in _FILE and "size" in pax_records:
            stated = pax_records["size"]
            size = int(stated) if stated.isdecimal() and len(stated) < 19 else -1
        if not 0 <= size <= length - start:
            raise MalformedCheckpoint(f"{label} ends inside of a file of {size} bytes", file=label)
        if kind in (_PAX, _GLOBAL_PAX, _LONG_NAME):
            if size > _MAX_EXTENSION:
                raise MalformedCheckpoint(f"{label} has a tar header of {size} bytes", file=label)
            data = read(start, size)
            pax_records |= {"path": _text(data)} if kind == _LONG_NAME else _records(data, label)
        else:
            if kind in _FILE:
                members.append(TarMember(pax_records.get("path", _text(block[:100])), start, size))
            pax_records = {}
        position = start + -(-size // TAR_BLOCK) * TAR_BLOCK
    raise MalformedCheckpoint(f"{label} has more than {_MAX_MEMBERS} headers", file=label)


def _checksum(block: bytes) -> int:
    return sum(block) - sum(block[148:156]) + 8 * ord(" ")


def _number(field: bytes, label: str) -> int:
    """Parse a number: octal text, or GNU's binary form with its first bit set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.strip(b" \0")
    if text.strip(b"01234567") or not text:
        raise MalformedCheckpoint(f"{label} has {field[:12]!r} in the place of a number of a tar", file=label)
    return int(text, 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _records(data: bytes, label: str) -> dict[str, str]:
    """Parse the records of pax, ``LENGTH KEY=VALUE`` and a line feed, where LENGTH is that of all of it."""
    records: dict[str, str] = {}
    while data:
        digits, _, _ = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or data[length - 1 : length] != b"\n":
            raise MalformedCheckpoint(f"{label} has a tar header that is none of pax", file=label)
        records[_text(key)] = value.decode("utf-8", "replace")
        data = data[length:]
    return records
