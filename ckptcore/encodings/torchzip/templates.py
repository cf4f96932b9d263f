"""Recognise a torch zip that differs from an earlier one only in its payload.

Shards of equal dtype and shape pickle to zips that are equal byte by byte except for the payload, its
CRC-32 (stored twice) and torch's serialization id with its own CRC-32. A checkpoint has thousands
of them; comparing a few ranges proves the same as parsing them again, in a tenth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckptcore.core.dtype import BY_NAME
from ckptcore.encodings.torchzip.archive import DESCRIPTOR, Window
from ckptcore.errors import ChecksumMismatch
from ckptcore.utils.crc32 import crc32

if TYPE_CHECKING:
    from ckptcore.encodings.torchzip.reader import Parsed, Resolved

_MAX_TEMPLATES = 1024
_MAX_ALIKE = 8  # templates of one length


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
        same: Pairs of positions of one CRC-32: in the directory, and behind the bytes that it is of.
    """

    resolved: Resolved
    fixed: tuple[tuple[int, bytes], ...]
    crc_at: int
    id_at: int
    id_length: int
    id_crc_at: int
    same: tuple[tuple[int, int], ...]


_templates: dict[int, list[_Template]] = {}


def read_tensor(window: Window, label: str) -> Resolved:
    """Return the only tensor of a DCP tensor item; raises like `parse_tensor`."""
    for template in _templates.get(window.length, ()):
        if all(window.read(position, len(raw)) == raw for position, raw in template.fixed) and all(
            window.read(position, 4) == window.read(behind, 4) for position, behind in template.same
        ):
            return _resolved_by(template, window, label)
    # A late import: a process that reads no torch zip needs no pickles.
    from ckptcore.encodings.torchzip.reader import parse_tensor

    parsed = parse_tensor(window, label)
    _remember(parsed, window)
    return parsed.resolved


def _resolved_by(template: _Template, window: Window, label: str) -> Resolved:
    if template.resolved.crc32 is None:
        return template.resolved
    if template.id_length:
        crc = crc32(window.read(template.id_at, template.id_length))
        if crc != int.from_bytes(window.read(template.id_crc_at, 4), "little"):
            raise ChecksumMismatch(f"{label}: the serialization id does not match its CRC-32")
    resolved, crc = template.resolved, int.from_bytes(window.read(template.crc_at, 4), "little")
    return replace(resolved, crc32=crc)


def _remember(parsed: Parsed, window: Window) -> None:
    alike = _templates.get(window.length, [])
    if len(alike) >= _MAX_ALIKE or (not alike and len(_templates) >= _MAX_TEMPLATES):
        return
    template = _template(parsed, window)
    if template is not None:
        _templates.setdefault(window.length, []).append(template)


def _template(parsed: Parsed, window: Window) -> _Template | None:
    """Return which bytes of a zip are the same in all zips of its kind; None where that is not certain."""
    resolved = parsed.resolved
    start, end = resolved.record_start, resolved.record_start + resolved.record_length
    if window.read(end, 4) != DESCRIPTOR:
        return None  # sizes and CRC in the local header: torch writes none
    free = [(start, end), (end + 4, end + 8), (parsed.payload_row + 16, parsed.payload_row + 20)]
    same = [(parsed.payload_row + 16, end + 4)]
    id_at = id_length = id_crc_at = 0
    if parsed.id_row:
        id_at, id_length, id_crc_at = parsed.id_at, parsed.id_length, parsed.id_row + 16
        after = id_at + id_length
        if window.read(after, 4) != DESCRIPTOR:
            return None
        free += [(id_at, after), (after + 4, after + 8), (id_crc_at, id_crc_at + 4)]
        same.append((id_crc_at, after + 4))
    fixed: list[tuple[int, bytes]] = []
    position = 0
    for first, last in [*sorted(free), (window.length, window.length)]:
        if first < position:
            return None
        if first > position:
            # Another read for each zip would cost what the template saves.
            if not window.holds(position, first - position):
                return None
            fixed.append((position, window.read(position, first - position)))
        position = last
    crc_at = parsed.payload_row + 16
    return _Template(resolved, tuple(fixed), crc_at, id_at, id_length, id_crc_at, tuple(same))


class AlikeZips:
    """Zips of one length, verified against the templates of that length, many at a time.

    Args:
        content: The zips, end to end.
        length: Bytes of each.
    """

    def __init__(self, content: memoryview, length: int) -> None:
        self._content, self._length = content, length
        self._rows = np.frombuffer(content, np.uint8).reshape(-1, length)

    def payloads(self, dtype: str, shape: tuple[int, ...], label: str) -> tuple[int, npt.NDArray[np.bool_]]:
        """Find the zips that hold one complete row-major tensor.

        Args:
            dtype: Dtype of the tensor.
            shape: Its shape.
            label: The first zip, for messages.

        Returns:
            (first byte of the payload in each of these zips, which zips hold such a tensor with intact
            checksums). What is wrong with the others, if anything, `read_tensor` says.

        Raises:
            CkptError: `read_tensor` cannot read the first zip, and no earlier one was of its kind.
        """
        if not self._templates(dtype, shape):
            first = bytes(self._content[: self._length])
            read_tensor(
                Window(lambda position, count: first[position : position + count], len(first), len(first)),
                label,
            )
        for template in self._templates(dtype, shape):
            resolved, good = template.resolved, np.ones(len(self._rows), np.bool_)
            for position, raw in template.fixed:
                good &= (self._rows[:, position : position + len(raw)] == np.frombuffer(raw, np.uint8)).all(
                    axis=1
                )
            for position, behind in template.same:
                good &= (self._rows[:, position : position + 4] == self._rows[:, behind : behind + 4]).all(
                    axis=1
                )
            if template.id_length:
                self._verify(template.id_at, template.id_length, template.id_crc_at, good)
            self._verify(resolved.record_start, resolved.record_length, template.crc_at, good)
            if good.any():
                return resolved.record_start, good
        return 0, np.zeros(len(self._rows), np.bool_)

    def _templates(self, dtype: str, shape: tuple[int, ...]) -> list[_Template]:
        """Return the templates of this length whose only record is such a tensor, with a checksum."""
        nbytes = prod(shape) * BY_NAME[dtype].itemsize
        templates = []
        for template in _templates.get(self._length, ()):
            resolved = template.resolved
            plain = resolved.view.strides is None and not resolved.view.flags and resolved.crc32 is not None
            complete = (resolved.view.start, nbytes) == (resolved.record_start, resolved.record_length)
            if (resolved.dtype, resolved.shape) == (dtype, shape) and plain and complete:
                templates.append(template)
        return templates

    def _verify(self, start: int, length: int, crc_at: int, good: npt.NDArray[np.bool_]) -> None:
        """Clear ``good`` where a range does not match the CRC-32 at ``crc_at``."""
        stored = np.ascontiguousarray(self._rows[:, crc_at : crc_at + 4]).view("<u4").reshape(-1)
        content, end = self._content, len(self._content)
        begins = range(start, end, self._length)
        checksums = np.fromiter(
            (crc32(content[begin : begin + length]) for begin in begins), np.uint32, len(begins)
        )
        good &= checksums == stored
