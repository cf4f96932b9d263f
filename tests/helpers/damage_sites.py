"""Find sites of damage: the files of a checkpoint of any format, and what each byte is for.

A `Tree` is an undamaged sample; a row of a table gives the `Cut`s that can be made in it, each with
what is true at its place. Only the files' own format pages are used, nothing of the product.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from damaging import MAGIC, records

from ckptcore.encodings.torchzip.before_zip import is_before_zip

# Files beside a checkpoint in a sample: the expected tensors, and notes on how the sample was made.
BESIDE = re.compile(r"^(expected.*|fixture\.json|flat_meta\.json)$")


@dataclass(frozen=True, slots=True)
class Cut:
    """One damage at one place.

    where: for people. do: changes a private copy, given its root. facts: what is true at the place,
    before the damage; the conditions of `gaps.UNDETECTABLE`. first: changes that are no damage, and
    without which this one could not be seen.
    """

    where: str
    do: Callable[[Path], None]
    facts: frozenset[str] = frozenset()
    first: Callable[[Path], None] | None = None


Row = Callable[["Tree", random.Random], Iterator[Cut]]


class Rows(dict[str, Row]):
    """Rows by name; calling it enters a function under its name."""

    def __call__(self, row: Row) -> Row:
        self.enter(row.__name__.replace("_", "-"), row)
        return row

    def enter(self, name: str, row: Row) -> None:
        assert name not in self
        self[name] = row


@dataclass
class Tree:
    """An undamaged checkpoint: a folder, or one file. root: the folder. name: the file, or None."""

    root: Path
    name: str | None = None
    kinds: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in [self.name] if self.name else sorted(self._listing()):
            self.kinds[path] = kind_of(self.root, path)

    def _listing(self) -> Iterator[str]:
        for path in self.root.rglob("*"):
            relative = path.relative_to(self.root).as_posix()
            if path.is_file() and not BESIDE.match(relative):
                yield relative

    def copy_to(self, target: Path) -> Path:
        """Copies it; gives what is to be named on the command line."""
        for path in self.kinds:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.root / path, target / path)
        return target / self.name if self.name else target

    def files(self, *kinds: str) -> list[str]:
        """Files of these kinds that are not empty; all kinds when none is named."""
        return [p for p, k in self.kinds.items() if k != "empty" and (not kinds or k in kinds)]

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def size(self, path: str) -> int:
        return (self.root / path).stat().st_size

    @cached_property
    def has_digests(self) -> bool:
        """Whether a file tells digests of the others."""
        return "integrity.json" in self.kinds


def kind_of(root: Path, path: str) -> str:
    """What a file is, from its name and first bytes."""
    file = root / path
    with file.open("rb") as opened:
        head = opened.read(16)
    name = file.name
    if not head:
        return "empty"
    if name == ".metadata" or re.fullmatch(r"__\d+\.metadata", name):
        return "metadata"
    if name == ".zarray":
        return "zarray"
    if name.endswith(".distcp"):
        return "distcp"
    if (file.parent / ".zarray").is_file() and re.fullmatch(r"\d+(\.\d+)*", name):
        return "zchunk"
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith(".json"):
        return "json"
    if is_before_zip(head):
        return "before-zip"
    return MAGIC.get(head[:4], "text")


# --------------------------------------------------------------------------- what a byte is


def facts_at(tree: Tree, path: str, at: int, bit: int) -> frozenset[str]:
    """What flipping one bit hits."""
    found = ZONES.get(tree.kinds[path], lambda *_: set())(tree, path, at, bit)
    return frozenset(found if not tree.has_digests else set())


def _in_safetensors(tree: Tree, path: str, at: int, bit: int) -> set[str]:
    data = tree.read(path)
    length = int.from_bytes(data[:8], "little")
    if at >= 8 + length:
        return {"unsummed"}
    if at < 8:
        return set()
    return _in_json_bytes(data[8 : 8 + length], at - 8, bit)


def _in_json(tree: Tree, path: str, at: int, bit: int) -> set[str]:
    return _in_json_bytes(tree.read(path), at, bit)


def _in_json_bytes(raw: bytes, at: int, bit: int) -> set[str]:
    """``text`` inside a string, ``number`` inside a number."""
    for m in re.finditer(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*', raw):
        if m.start() <= at < m.end():
            return {"text" if raw[m.start() : m.start() + 1] == b'"' else "number"}
    return set()


def _in_metadata(tree: Tree, path: str, at: int, bit: int) -> set[str]:
    """``text`` inside a string of the pickle."""
    last = None
    for opcode, _, place in pickletools.genops(tree.read(path)):
        if place is not None and place > at:
            break
        last = opcode.name
    return {"text"} if last and "UNICODE" in last else set()


def _in_chunk(tree: Tree, path: str, at: int, bit: int) -> set[str]:
    return {"unsummed"} if at < tree.size(path) and not is_padding(tree, path, at) else set()


def _in_distcp(tree: Tree, path: str, at: int, bit: int) -> set[str]:
    """Items that are members of a safetensors blob, at the end of the file, have no checksum."""
    data = tree.read(path)
    blob = re.search(rb'(.{8})\{"(?:__metadata__|[^"]+)":\s*\{', data, re.DOTALL)
    if blob is None or b'"data_offsets"' not in data or at < blob.start():
        return set()
    length = int.from_bytes(blob[1], "little")
    begin = blob.start() + 8
    if at >= begin + length:
        return {"unsummed"}
    return _in_json_bytes(data[begin : begin + length], at - begin, bit) if at >= begin else set()


def _before_zip(tree: Tree, path: str, at: int, bit: int) -> set[str]:
    """``text`` inside a string of the pickles, ``unsummed`` inside a number, and behind the pickles."""
    stream, last = io.BytesIO(tree.read(path)), ""
    for _ in range(5):
        for opcode, _, place in pickletools.genops(stream):
            if place is not None and place <= at:
                last = opcode.name
    if at >= stream.tell() or "INT" in last or "LONG" in last or "FLOAT" in last:
        return {"unsummed"}
    return {"text"} if "UNICODE" in last else set()


ZONES: dict[str, Callable[[Tree, str, int, int], set[str]]] = {
    "safetensors": _in_safetensors,
    "json": _in_json,
    "metadata": _in_metadata,
    "zchunk": _in_chunk,
    "distcp": _in_distcp,
    "before-zip": _before_zip,
}


def is_padding(tree: Tree, path: str, at: int) -> bool:
    """Return whether a byte of a zarr chunk is behind the end of its array."""
    folder, _, name = path.rpartition("/")
    array = json.loads(tree.read(f"{folder}/.zarray"))
    chunks, shape = array["chunks"], array["shape"]
    if not shape:
        return False
    width = tree.size(path) // prod(chunks)
    index = [int(n) for n in name.split(".")]
    cell, place = at // width, []
    for n in reversed(chunks) if array["order"] == "C" else chunks:
        cell, rest = divmod(cell, n)
        place.append(rest)
    place = place[::-1] if array["order"] == "C" else place
    return any(i * c + p >= n for i, c, p, n in zip(index, chunks, place, shape, strict=True))


# ------------------------------------------------------------------------------ editing files


def put(root: Path, path: str, data: bytes) -> None:
    """Writes a file anew."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(data)


def safetensors_parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def safetensors_joined(header: dict[str, Any], body: bytes) -> bytes:
    """A file of a header and a body."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def with_records(item: bytes, changes: dict[str, bytes]) -> bytes:
    """The same torch zip with records of equal length replaced in place; checksums are right again."""
    out = bytearray(item)
    for name, data in changes.items():
        record = records(item)[name]
        assert len(data) == record.size
        out[record.data : record.data + record.size] = data
        crc = struct.pack("<I", zlib.crc32(data))
        out[record.central + 16 : record.central + 20] = crc
        after = record.data + record.size
        if out[after : after + 4] == b"PK\x07\x08":
            out[after + 4 : after + 8] = crc
    return bytes(out)


def record_data(item: bytes) -> dict[str, bytes]:
    """The records of a torch zip, by name without the archive's own folder."""
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        return {i.filename.split("/", 1)[1]: archive.read(i) for i in archive.infolist()}


def zip_items(data: bytes) -> list[tuple[int, int, bytes]]:
    """(first byte, length, pickle) of every torch zip in a data file; [] where it holds others, too."""
    out, start = [], 0
    for end in re.finditer(rb"PK\x05\x06.{18}", data, re.DOTALL):
        item = data[start : end.end()]
        if not item.startswith(b"PK\x03\x04"):
            return []
        try:
            out.append((start, len(item), record_data(item).get("data.pkl", b"")))
        except zipfile.BadZipFile:  # the end of a zip inside this one
            continue
        start = end.end()
    return out if start == len(data) else []
