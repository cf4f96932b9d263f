"""Recognise a torch zip that differs from an earlier one only in its payload.

Shards of equal dtype and shape pickle to zips that are equal byte by byte except for the payload, its
CRC-32 (stored twice) and torch's serialization id with its own CRC-32. A checkpoint has thousands
of them; comparing a few ranges proves the same as parsing them again, in a tenth of the time.
"""

from __future__ import annotations

from ckptcore.encodings.torchzip.reader import Parsed, Resolved, Window, parse_tensor
from ckptcore.errors import ChecksumMismatch
from ckptcore.utils.crc32 import crc32
from ckptcore.utils.dataclass import dataclass

_MAX_TEMPLATES = 1024
_MAX_ALIKE = 8  # templates of one length
_DESCRIPTOR = b"PK\x07\x08"


@dataclass(frozen=True, slots=True)
class _Template:
    """The parts of a zip that are equal in all zips of one kind.

    Attributes:
        resolved: The tensor of the first zip.
        fixed: (start, bytes) that must be equal.
        crc_at: Position of the payload's CRC-32.
        id_at: Position of the serialization id, or 0.
        id_length: Bytes of the serialization id, or 0.
        id_crc_at: Position of its CRC-32, or 0.
    """

    resolved: Resolved
    fixed: tuple[tuple[int, bytes], ...]
    crc_at: int
    id_at: int
    id_length: int
    id_crc_at: int


_templates: dict[int, list[_Template]] = {}


def read_tensor(window: Window, what: str) -> Resolved:
    """Return the only tensor of a DCP tensor item; raises like `parse_tensor`."""
    for template in _templates.get(window.length, ()):
        if all(window.read(at, len(raw)) == raw for at, raw in template.fixed):
            return _resolved_by(template, window, what)
    parsed = parse_tensor(window, what)
    _remember(parsed, window)
    return parsed.resolved


def _resolved_by(template: _Template, window: Window, what: str) -> Resolved:
    if template.resolved.crc32 is None:
        return template.resolved
    if template.id_length:
        crc = crc32(window.read(template.id_at, template.id_length))
        if crc != int.from_bytes(window.read(template.id_crc_at, 4), "little"):
            raise ChecksumMismatch(f"{what}: the serialization id does not match its CRC-32")
    known, crc = template.resolved, int.from_bytes(window.read(template.crc_at, 4), "little")
    return Resolved(known.dtype, known.shape, known.view, known.record_start, known.record_length, crc)


def _remember(parsed: Parsed, window: Window) -> None:
    alike = _templates.get(window.length, [])
    if len(alike) >= _MAX_ALIKE or (not alike and len(_templates) >= _MAX_TEMPLATES):
        return
    found = _template(parsed, window)
    if found is not None:
        _templates.setdefault(window.length, []).append(found)


def _template(parsed: Parsed, window: Window) -> _Template | None:
    resolved = parsed.resolved
    start, end = resolved.record_start, resolved.record_start + resolved.record_length
    if window.read(end, 4) != _DESCRIPTOR:
        return None  # sizes and CRC in the local header: torch writes none
    free = [(start, end), (end + 4, end + 8), (parsed.payload_row + 16, parsed.payload_row + 20)]
    id_at = id_length = id_crc_at = 0
    if parsed.id_row:
        id_at, id_length, id_crc_at = parsed.id_at, parsed.id_length, parsed.id_row + 16
        after = id_at + id_length
        if window.read(after, 4) != _DESCRIPTOR:
            return None
        free += [(id_at, after), (after + 4, after + 8), (id_crc_at, id_crc_at + 4)]
    fixed: list[tuple[int, bytes]] = []
    at = 0
    for first, last in [*sorted(free), (window.length, window.length)]:
        if first < at:
            return None
        if first > at:
            if not window.holds(at, first - at):
                return None
            fixed.append((at, window.read(at, first - at)))
        at = last
    return _Template(resolved, tuple(fixed), parsed.payload_row + 16, id_at, id_length, id_crc_at)
