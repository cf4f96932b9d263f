"""Write the bytes around the records of a torch zip.

Zip records are stored, have a data descriptor behind their payload (flag bit 3, like
caffe2/serialize/inline_container.cc), and their payloads start at multiples of 64, so
that ``mmap=True`` works. `Pickled` writes data.pkl.
"""

from __future__ import annotations

import struct

from ckptcore.encodings.pickle.writer import Classes, Pickled
from ckptcore.utils.crc32 import crc32

__all__ = [
    "ALIGN",
    "Classes",
    "Pickled",
    "central_entry",
    "descriptor",
    "end_records",
    "local_header",
    "small_record",
]
ALIGN = 64
_NONE32 = 0xFFFFFFFF
_FLAGS = 0x0808  # bit 3: sizes and CRC follow the payload; bit 11: UTF-8 names


def local_header(name: str, start: int) -> bytes:
    """Return the header of a record that begins at byte ``start``, padded so that its payload is aligned."""
    raw = name.encode()
    fixed = 30 + len(raw) + 4
    pad = -(start + fixed) % ALIGN
    # Extra field "FB" is torch's own padding.
    extra = b"FB" + pad.to_bytes(2, "little") + b"Z" * pad
    header = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(raw), len(extra))
    return header + raw + extra


def descriptor(crc: int, length: int) -> bytes:
    """Return the bytes behind a payload: its CRC-32 (at byte 4) and sizes."""
    wide = "Q" if length >= _NONE32 else "I"
    return struct.pack(f"<4sI2{wide}", b"PK\x07\x08", crc, length, length)


def central_entry(name: str, start: int, crc: int, length: int) -> bytes:
    """Return one row of the central directory; the CRC is at byte 16."""
    raw = name.encode()
    wide_size, wide_start = length >= _NONE32, start >= _NONE32
    values = ([length, length] if wide_size else []) + ([start] if wide_start else [])
    extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    size32, start32 = _NONE32 if wide_size else length, _NONE32 if wide_start else start
    sizes = size32, size32, len(raw), len(extra)
    row = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 0, 0, _FLAGS, 0, 0, 0, crc, *sizes, 0, 0, 0, 0, start32)
    return row + raw + extra


def end_records(count: int, start: int, size: int) -> bytes:
    """Return the zip64 end record, its locator, and the classic end record: torch always writes all three."""
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    few, size32, start32 = min(count, 0xFFFF), min(size, _NONE32), min(start, _NONE32)
    return end64 + locator + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, few, few, size32, start32, 0)


def small_record(name: str, start: int, data: bytes) -> tuple[bytes, bytes]:
    """Return (header + payload + descriptor, directory row) of a record whose bytes are known."""
    crc = crc32(data)
    record = local_header(name, start) + data + descriptor(crc, len(data))
    return record, central_entry(name, start, crc, len(data))
