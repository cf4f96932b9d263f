"""Damage items: flip bits inside a file, or replace what an item holds.

An item of a torch zip that is edited here has every checksum right again, so that the checksum is
not what notices it.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from attacks import Evil, attack_payloads
from damaging import (
    ITEM,
    MALFORMED,
    Codes,
    Damage,
    Folder,
    NotApplicable,
    Place,
    Table,
    flip,
    payload_at,
    rebuild_zip,
    records,
    rewrite,
)

TABLE = Table()

# -------------------------------------------------------------------------------- flipped bits


def _spot(record: str, part: str) -> Callable[[Folder, Place], int]:
    """The place in the file of one part of one record of a torch zip."""

    def at(folder: Folder, place: Place) -> int:
        r = records(folder.read(place))[record]
        spots = {
            "middle": r.data + r.size // 2,
            "header": r.header + 6,
            "name": r.header + 32,
            "padding": r.data - 2,
            "directory-size": r.central + 20,
            "directory-offset": r.central + 42,
            "directory-crc": r.central + 17,
            "descriptor": r.data + r.size + 5,
        }
        return place.start + spots[part]

    return at


def _middle(folder: Folder, place: Place) -> int:
    start, length = payload_at(folder, place)
    return start + length // 2


# name: (item kind, where)
FLIPS: dict[str, tuple[str, Callable[[Folder, Place], int]]] = {
    "flip-payload": ("zip", _middle),
    "flip-item-pickle": ("zip", _spot("data.pkl", "middle")),
    "flip-local-header": ("zip", _spot("data/0", "header")),
    "flip-record-name": ("zip", _spot("data/0", "name")),
    "flip-alignment": ("zip", _spot("data/0", "padding")),
    "flip-directory-size": ("zip", _spot("data/0", "directory-size")),
    "flip-directory-offset": ("zip", _spot("data/0", "directory-offset")),
    "flip-directory-crc": ("zip", _spot("data/0", "directory-crc")),
    "flip-descriptor": ("zip", _spot("data/0", "descriptor")),
    "flip-byteorder": ("zip", _spot("byteorder", "middle")),
    "flip-version": ("zip", _spot("version", "middle")),
    "flip-end-record": ("zip", lambda folder, place: place.stop - 12),
    "flip-end-offset": ("zip", lambda folder, place: place.stop - 4),
    "flip-zip64-end": ("zip", lambda folder, place: place.stop - 98 + 30),
    "flip-stream-head": ("zstd", lambda folder, place: place.start + 5),
    "flip-stream-middle": ("zstd", lambda folder, place: place.start + place.length // 2),
    "flip-stream-end": ("zstd", lambda folder, place: place.stop - 2),
    "flip-header-length": ("safetensors", lambda folder, place: place.start + 6),
    "flip-header": ("safetensors", lambda folder, place: place.start + 60),
    "flip-unsummed-payload": ("safetensors", _middle),
}


def _flip(folder: Folder, kind: str, where: Callable[[Folder, Place], int]) -> None:
    place = folder.tensors(kind)[0]
    flip(place.file, where(folder, place))


for _name, (_kind, _where) in FLIPS.items():
    # Bits that no reader looks at may stay unnoticed: then the result must be right.
    _codes = ITEM | MALFORMED | {"length-mismatch", "hole", "lost-at-save", "out-of-bounds"}
    TABLE.add(Damage(_name, partial(_flip, kind=_kind, where=_where), _codes, _kind, harmless=True))

# ------------------------------------------------------------------- items with right checksums


def _edit(
    name: str,
    codes: Codes,
    change: Callable[[bytes, Folder], bytes],
    *,
    of: str = "tensor",
    harmless: bool = False,
) -> None:
    """Enters a row that replaces one item. of: ``tensor`` or ``object``."""

    def make(folder: Folder) -> None:
        objects = [p for p in folder.places() if not p.tensor]
        found = folder.tensors("zip") if of == "tensor" else objects
        if not found:
            raise NotApplicable("no objects are stored")
        # Rank-local saves hold one copy of an object per rank: all of them, or the other copy counts.
        same = {p for p in found if p.key.fqn == found[0].key.fqn} if of == "object" else {found[0]}
        rewrite(folder, lambda place, item: change(item, folder) if place in same else None)

    TABLE.add(Damage(name, make, codes, "plain", harmless=harmless, opaque=of == "object"))


def _saved(value: Any) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


# An item that shrank below its tensor is seen from its length, before it is opened.
REFUSED = MALFORMED | ITEM | {"refused-global", "unsafe-item", "length-mismatch"}
_edit(
    "attack-in-an-object",
    frozenset({"refused-global", "unsafe"}),
    lambda item, folder: _saved({"lr": 0.1, "hook": Evil(folder.sentinel)}),
    of="object",
)
_edit("attack-for-a-tensor", REFUSED, lambda item, folder: _saved(Evil(folder.sentinel)))


def _attack(item: bytes, folder: Folder, name: str) -> bytes:
    return rebuild_zip(item, {"data.pkl": attack_payloads(folder.sentinel)[name]})


for _name in attack_payloads(Path()):
    _edit(f"attack-object-{_name}", REFUSED, partial(_attack, name=_name), of="object")
    _edit(f"attack-tensor-{_name}", REFUSED, partial(_attack, name=_name))


def _tensor_pickle(
    numel: int,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    key: str = "0",
    storage: str = "FloatStorage",
) -> bytes:
    """data.pkl of a tensor, with any numbers in it."""

    def number(value: int) -> bytes:
        if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        raw = value.to_bytes(16, "little", signed=True)
        return b"\x8a\x10" + raw

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(number(v) for v in values) + b"t"

    pid = b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text("cpu")
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + pid
        + number(numel)
        + b"tQ"
        + number(offset)
        + numbers(shape)
        + numbers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )


# What a hostile or truncated tensor pickle may state about its storage: (numel, offset, shape, stride).
VIEWS: dict[str, tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {
    "offset-behind-the-end": (4, 1 << 40, (2,), (1,)),
    "offset-negative": (4, -8, (2,), (1,)),
    "stride-huge": (4, 0, (2, 2), (1 << 61, 1)),
    "stride-negative": (4, 3, (4,), (-1,)),
    "shape-huge": (1 << 62, 0, (1 << 40, 1 << 40), (0, 0)),
    "shape-negative": (4, 0, (-2, -2), (1, 1)),
    "numel-huge": (1 << 100, 0, (2,), (1,)),
    "rank-1000": (4, 0, (1,) * 1000, (1,) * 1000),
    "strides-missing": (4, 0, (2, 2), (1,)),
}
for _name, _view in VIEWS.items():
    _pickle = _tensor_pickle(*_view)
    _edit(
        f"view-{_name}", ITEM | MALFORMED, lambda item, _, data=_pickle: rebuild_zip(item, {"data.pkl": data})
    )
_edit(
    "view-storage-elsewhere",
    ITEM | MALFORMED,
    lambda item, _: rebuild_zip(
        item, {"data.pkl": _tensor_pickle(4, 0, (2,), (1,), key="../../../../etc/passwd")}
    ),
)
_edit("item-is-a-number", ITEM | MALFORMED, lambda item, _: _saved(3.5))
_edit(
    "item-is-a-list",
    ITEM | MALFORMED,
    lambda item, _: rebuild_zip(item, {"data.pkl": pickle.dumps([1, 2, 3], protocol=2)}),
)
_edit("item-is-text", ITEM | MALFORMED, lambda item, _: b"hello " * 300)
_edit("item-pickle-empty", ITEM | MALFORMED, lambda item, _: rebuild_zip(item, {"data.pkl": b""}))


def _without(item: bytes, gone: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            if not info.filename.endswith(gone):
                new.writestr(zipfile.ZipInfo(info.filename), old.read(info))
    return out.getvalue()


def _bomb(item: bytes) -> bytes:
    """The payload deflated from 200 MB of zeros."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            if info.filename.endswith("data/0"):
                new.writestr(info.filename, b"\x00" * 200_000_000, zipfile.ZIP_DEFLATED)
            else:
                new.writestr(zipfile.ZipInfo(info.filename), old.read(info))
    return out.getvalue()


def _claims(item: bytes, at: int, data: bytes) -> bytes:
    """Other bytes in the end records, counted from the end."""
    start = len(item) + at
    return item[:start] + data + item[start + len(data) :]


_edit("zip-without-payload", ITEM | MALFORMED, lambda item, _: _without(item, "/data/0"))
_edit("zip-without-pickle", ITEM | MALFORMED, lambda item, _: _without(item, "/data.pkl"))
_edit("zip-bomb", ITEM | MALFORMED, lambda item, _: _bomb(item))
_edit(
    "zip-claims-2^32-records",
    ITEM | MALFORMED,
    lambda item, _: _claims(item, -98 + 24, struct.pack("<QQ", 1 << 32, 1 << 32)),
    harmless=True,
)
_edit(
    "zip-directory-of-2^60-bytes",
    ITEM | MALFORMED,
    lambda item, _: _claims(item, -98 + 40, struct.pack("<Q", 1 << 60)),
    harmless=True,
)
_edit(
    "zip-directory-far-away",
    ITEM | MALFORMED,
    lambda item, _: _claims(item, -98 + 48, struct.pack("<Q", 1 << 62)),
    harmless=True,
)


@TABLE(ITEM, MALFORMED, "length-mismatch", needs="zstd")
def stream_bomb(folder: Folder) -> None:
    """A stream of a few KiB that expands to 16 GB of zeros."""
    import zstandard

    place = folder.tensors("zstd")[0]
    frame = zstandard.compress(b"\x00" * (64 << 20))
    data = frame * 256
    at = place.file.stat().st_size
    with place.file.open("ab") as file:
        file.write(data)
    meta = folder.load(place.metadata)
    meta.storage_data[place.key] = replace(meta.storage_data[place.key], offset=at, length=len(data))
    folder.dump(meta, place.metadata)
