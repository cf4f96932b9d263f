"""Take a private copy of a checkpoint folder apart, and change it.

Editing `.metadata` unpickles it with torch: it is only done to this repository's own samples.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass, replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

Codes = frozenset[str]
MAGIC = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}


class NotApplicable(Exception):
    """The folder has nothing that this damage could change; the reason is the message."""


@dataclass(frozen=True, slots=True)
class Place:
    """One item: the metadata file that names it, its key there, its file and byte range.

    dtype, sizes: of the tensor chunk; None and () for an object.
    """

    metadata: Path
    key: Any
    file: Path
    start: int
    length: int
    tensor: bool
    codec: bool
    dtype: Any
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk's elements; 0 for an object."""
        return prod(self.sizes) * self.dtype.itemsize if self.tensor else 0

    @property
    def stop(self) -> int:
        return self.start + self.length


def _stand_in(module: str, name: str, *fields: Any) -> None:
    """A class that metadata of another package names, where that package is not installed."""
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:n]), ModuleType(".".join(parts[:n])))
    if not hasattr(sys.modules[module], name):
        setattr(sys.modules[module], name, make_dataclass(name, fields, namespace={"__module__": module}))


if "olmo_core" not in sys.modules and importlib.util.find_spec("olmo_core") is None:
    # The last is torch's, for damages that set it; OLMo-core's has three.
    _place = ("relative_path", "offset", "length", ("transform_descriptors", Any, None))
    _stand_in("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo", *_place)


def let_torch_read_olmo() -> None:
    """Give the places of OLMo-core, installed or a stand-in, the field that torch's reader asks for."""
    places: Any = importlib.import_module("olmo_core.distributed.checkpoint.filesystem")._StorageInfo
    if not hasattr(places, "transform_descriptors"):
        places.transform_descriptors = None  # nothing is compressed


@dataclass
class Folder:
    """A private copy of a checkpoint folder. others: other checkpoints to take files from.

    sentinel: a path that comes to be when a pickle from the folder is executed.
    """

    path: Path
    sentinel: Path
    others: tuple[Path, ...] = ()
    metas: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        local = sorted(self.path.glob("__*.metadata"))
        self.metas = local or [self.path / ".metadata"]

    @property
    def meta(self) -> Path:
        """The metadata file, the first one of rank-local metadata."""
        return self.metas[0]

    def load(self, meta: Path | None = None) -> Any:
        return pickle.loads((meta or self.meta).read_bytes())

    def dump(self, value: Any, meta: Path | None = None) -> None:
        (meta or self.meta).write_bytes(pickle.dumps(value, protocol=4))

    def places(self) -> list[Place]:
        """Every item that the metadata names, in file order."""
        out = []
        for meta in self.metas:
            loaded = self.load(meta)
            boxes = {
                (fqn, tuple(c.offsets)): (spec.properties.dtype, tuple(c.sizes))
                for fqn, spec in loaded.state_dict_metadata.items()
                if hasattr(spec, "chunks")
                for c in spec.chunks
            }
            for key, info in loaded.storage_data.items():
                box = boxes.get((key.fqn, tuple(key.offset))) if key.offset is not None else None
                dtype, sizes = box or (None, ())
                codec = bool(getattr(info, "transform_descriptors", None))
                file = self.path / info.relative_path
                out.append(
                    Place(meta, key, file, info.offset, info.length, box is not None, codec, dtype, sizes)
                )
        return sorted(out, key=lambda p: (p.file.name, p.start))

    def kind(self, place: Place) -> str:
        """``zip``, ``zstd`` or ``safetensors``: what the item's bytes are."""
        with place.file.open("rb") as file:
            file.seek(place.start)
            return MAGIC.get(file.read(4), "safetensors")

    def tensors(self, *kinds: str) -> list[Place]:
        """Tensor items with data, biggest first, of these kinds (all kinds when none is named)."""
        found = [p for p in self.places() if p.nbytes]
        if kinds:
            found = [p for p in found if self.kind(p) in kinds]
        if not found:
            raise NotApplicable(f"no tensor item of kind {kinds}")
        return sorted(found, key=lambda p: (-p.nbytes, p.file.name, p.start))

    def files(self) -> list[Path]:
        """The data files that metadata refers to, biggest first."""
        used = {p.file for p in self.places()}
        return sorted(used, key=lambda f: (-f.stat().st_size, f.name))

    def read(self, place: Place) -> bytes:
        with place.file.open("rb") as file:
            file.seek(place.start)
            return file.read(place.length)


def layout(folder: Folder, file: Path) -> list[tuple[Any, ...]]:
    """What must agree for two files to be interchangeable: every item's place, dtype and shape."""
    out: list[tuple[Any, ...]] = []
    for p in folder.places():
        if p.file != file:
            continue
        if p.tensor:
            out.append((p.start, p.length, str(p.dtype), p.sizes))
        else:
            out.append((p.start, p.length, hashlib.sha256(folder.read(p)).hexdigest()))
    return out


# --------------------------------------------------------------------------------- small tools


def patch(file: Path, at: int, data: bytes) -> None:
    """Overwrites bytes in place."""
    with file.open("r+b") as out:
        out.seek(at)
        out.write(data)


def flip(file: Path, at: int, bit: int = 3) -> None:
    """Flips one bit of one byte."""
    with file.open("rb") as source:
        source.seek(at)
        (byte,) = source.read(1)
    patch(file, at, bytes([byte ^ (1 << bit)]))


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a stored zip: where its headers and data are, relative to the zip's start."""

    name: str
    header: int
    data: int
    size: int
    central: int


def records(item: bytes) -> dict[str, Record]:
    """The records of a torch zip, by name without the archive's own folder."""
    out = {}
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        central = archive.start_dir
        for info in archive.infolist():
            name_length, extra_length = struct.unpack_from("<HH", item, info.header_offset + 26)
            data = info.header_offset + 30 + name_length + extra_length
            name = info.filename.split("/", 1)[1]
            out[name] = Record(name, info.header_offset, data, info.file_size, central)
            central += 46 + sum(struct.unpack_from("<HHH", item, central + 28))
    return out


def rebuild_zip(item: bytes, changes: dict[str, bytes]) -> bytes:
    """The same torch zip with other record contents; every CRC is right again."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data = changes.get(info.filename.split("/", 1)[1], old.read(info))
            new.writestr(zipfile.ZipInfo(info.filename), data)
    return out.getvalue()


def with_payload(item: bytes, payload: bytes) -> bytes:
    """The same torch zip, byte for byte but for the payload and its checksums."""
    out = bytearray(item)
    record = records(item)["data/0"]
    assert len(payload) == record.size
    out[record.data : record.data + record.size] = payload
    crc = struct.pack("<I", zlib.crc32(payload))
    out[record.central + 16 : record.central + 20] = crc
    after = record.data + record.size
    if out[after : after + 4] == b"PK\x07\x08":
        out[after + 4 : after + 8] = crc
    return bytes(out)


def rewrite(folder: Folder, change: Callable[[Place, bytes], bytes | None]) -> None:
    """Writes every data file anew with items replaced (None: kept) and metadata adjusted."""
    import zstandard

    metas = {m: folder.load(m) for m in folder.metas}
    by_file: dict[Path, list[Place]] = {}
    for place in folder.places():
        by_file.setdefault(place.file, []).append(place)
    for file, places in by_file.items():
        if any(folder.kind(p) == "safetensors" for p in places):
            raise NotApplicable("safetensors items share one blob")
        out = bytearray()
        for place in places:
            old = folder.read(place)
            plain = zstandard.ZstdDecompressor().decompressobj().decompress(old) if place.codec else old
            new = change(place, plain)
            data = old if new is None else zstandard.compress(new) if place.codec else new
            info = metas[place.metadata].storage_data[place.key]
            metas[place.metadata].storage_data[place.key] = replace(info, offset=len(out), length=len(data))
            out += data
        file.write_bytes(out)
    for meta, value in metas.items():
        folder.dump(value, meta)


def payload_at(folder: Folder, place: Place) -> tuple[int, int]:
    """First byte in the file and length of a tensor item's data."""
    item = folder.read(place)
    if folder.kind(place) == "zip":
        record = records(item)["data/0"]
        return place.start + record.data, record.size
    if folder.kind(place) == "safetensors":
        data = place.file.read_bytes()[place.start :]
        length = int.from_bytes(data[:8], "little")
        first, last = json.loads(data[8 : 8 + length])[place.key.fqn]["data_offsets"]
        return place.start + 8 + length + first, last - first
    return place.start + place.length // 3, place.length // 3


# ---------------------------------------------------------------------------------- the values


@dataclass(frozen=True, slots=True)
class Damage:
    """One way to be wrong.

    name: stable. make: changes the folder, or raises `NotApplicable`. codes: at least one of these
    findings or errors must be shown when the damage is noticed; none: any. needs: what the folder
    must hold, a key of `damage.facts`. harmless: the data is not touched, so the right result is
    right and nothing need be said. opaque: objects may be left out with a finding, tensors never.
    """

    name: str
    make: Callable[[Folder], None]
    codes: Codes = frozenset()
    needs: str = "any"
    harmless: bool = False
    opaque: bool = False


MALFORMED: Codes = frozenset({"malformed", "malformed-metadata", "malformed-item", "unsafe"})
COVER: Codes = frozenset(
    {
        "unlisted-item",
        "no-tensors",
        "hole",
        "overlap",
        "out-of-bounds",
        "no-place",
        "length-mismatch",
        "item-mismatch",
    }
)
ITEM: Codes = frozenset({"crc-mismatch", "malformed-item", "item-mismatch", "malformed"})
PATH: Codes = frozenset({"unsafe", "bad-path"})


class Table(dict[str, Damage]):
    """Damages by name; calling it makes the decorator that enters a function under its name."""

    def __call__(
        self, *codes: str | Codes, needs: str = "any", harmless: bool = False, opaque: bool = False
    ) -> Callable[[Callable[[Folder], None]], None]:
        allowed = frozenset().union(*({c} if isinstance(c, str) else c for c in codes))

        def enter(make: Callable[[Folder], None]) -> None:
            self.add(Damage(make.__name__.replace("_", "-"), make, allowed, needs, harmless, opaque))

        return enter

    def add(self, row: Damage) -> None:
        assert row.name not in self
        self[row.name] = row
