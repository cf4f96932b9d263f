"""Writing torch zips: which bytes stand around the records of `torch.save`?

Zip records are stored, carry a data descriptor behind their payload (flag bit 3, as
caffe2/serialize/inline_container.cc writes them), and their payloads start at multiples of 64, so
that ``mmap=True`` works. What data.pkl holds is `Pickled`'s.
"""

from __future__ import annotations

import struct

from ckptcore.encodings.pickle.writer import Pickled
from ckptcore.utils.crc32 import crc32

__all__ = ["ALIGN", "Pickled", "central_entry", "descriptor", "end_records", "local_header", "small_record"]
ALIGN = 64
_NONE32 = 0xFFFFFFFF
_FLAGS = 0x0808  # bit 3: sizes and CRC follow the payload; bit 11: UTF-8 names


def local_header(name: str, at: int) -> bytes:
    """The header of a record that begins at byte ``at``, padded so that its payload is aligned."""
    raw = name.encode()
    fixed = 30 + len(raw) + 4
    pad = -(at + fixed) % ALIGN
    # Extra field "FB" is torch's own padding.
    extra = b"FB" + pad.to_bytes(2, "little") + b"Z" * pad
    return (
        struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(raw), len(extra))
        + raw
        + extra
    )


def descriptor(crc: int, length: int) -> bytes:
    """What follows a payload: its CRC-32 and sizes. The CRC stands at byte 4."""
    wide = "Q" if length >= _NONE32 else "I"
    return struct.pack(f"<4sI2{wide}", b"PK\x07\x08", crc, length, length)


def central_entry(name: str, at: int, crc: int, length: int) -> bytes:
    """One row of the central directory. The CRC stands at byte 16."""
    raw = name.encode()
    wide_size, wide_at = length >= _NONE32, at >= _NONE32
    values = ([length, length] if wide_size else []) + ([at] if wide_at else [])
    extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    shown = _NONE32 if wide_size else length
    return (
        struct.pack(
            "<4s6H3I5H2I",
            b"PK\x01\x02",
            0,
            0,
            _FLAGS,
            0,
            0,
            0,
            crc,
            shown,
            shown,
            len(raw),
            len(extra),
            0,
            0,
            0,
            0,
            _NONE32 if wide_at else at,
        )
        + raw
        + extra
    )


def end_records(count: int, at: int, size: int) -> bytes:
    """zip64 end record, its locator, and the classic end record: what torch always writes."""
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
    few = min(count, 0xFFFF)
    return (
        end64
        + locator
        + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, few, few, min(size, _NONE32), min(at, _NONE32), 0)
    )


def small_record(name: str, at: int, data: bytes) -> tuple[bytes, bytes]:
    """(header + payload + descriptor, directory row) of a record whose bytes are known."""
    crc = crc32(data)
    whole = local_header(name, at) + data + descriptor(crc, len(data))
    return whole, central_entry(name, at, crc, len(data))
