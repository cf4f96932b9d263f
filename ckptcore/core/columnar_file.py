r"""Save and load a value with large columns as one small file.

A frame is ``b"CKPF1\n"``, then one zstd stream of: u64 head length, canonical JSON head, then the
arrays' bytes one after the other in the order of the head (little-endian, C order).
Loading a frame executes nothing, and the file's size bounds every length.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from ckptcore.errors import MalformedCheckpoint
from ckptcore.utils.foreign_text import InvalidText, parsing

_MAGIC = b"CKPF1\n"
_KINDS = {"i8": np.int64, "i4": np.int32, "i1": np.int8, "u1": np.uint8}
Array = npt.NDArray[Any]


def canonical_json(value: Any) -> bytes:
    """Return the one byte spelling of a JSON value: sorted keys, no spaces, ASCII.

    File names need not be UTF-8; Python keeps such bytes as surrogates, which only escapes can encode.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


class Spelled:
    """A list of texts in a head, whose JSON is made once for all frames that have it."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.json = _spelled(texts)


@lru_cache(maxsize=16)  # the files of the ranks of a mesh have the same names
def _spelled(texts: tuple[str, ...]) -> bytes:
    return canonical_json(list(texts))


class Heads:
    """The heads of frames that are loaded together: equal ones are parsed once, and nobody changes them."""

    def __init__(self) -> None:
        self.parse = lru_cache(maxsize=2)(json.loads)


def dump(head: dict[str, Any], arrays: dict[str, Array]) -> bytes:
    """Return one frame; equal inputs give equal bytes."""
    parts = _encode(head, arrays)
    content, position = np.empty(sum(map(len, parts)), np.uint8), 0
    for part in filter(len, parts):  # numpy copies without the GIL, which `join` keeps
        content[position : position + len(part)] = np.frombuffer(part, np.uint8)
        position += len(part)
    return _MAGIC + zstandard.ZstdCompressor(level=3).compress(content.data)


# Of the content, not of the file: another version of zstd may compress the same content to other bytes.
def digest(head: dict[str, Any], arrays: dict[str, Array]) -> bytes:
    """Return the BLAKE3 digest of a frame's content before compression."""
    total = blake3()
    for part in _encode(head, arrays):
        total.update(part)
    return total.digest()


def _encode(head: dict[str, Any], arrays: dict[str, Array]) -> list[Any]:
    # Sorted, so that equal values give equal bytes whatever the order in which a caller collected them.
    table = [{"name": k, "kind": _kind(a), "shape": list(a.shape)} for k, a in sorted(arrays.items())]
    body = b'{"arrays":' + canonical_json(table) + b',"head":' + _json(head) + b"}"
    columns = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for _, a in sorted(arrays.items())]
    return [len(body).to_bytes(8, "little"), body, *columns]


def _json(value: Any) -> bytes:
    """Return the canonical JSON of a value, where `Spelled` may be in objects of objects."""
    if isinstance(value, Spelled):
        return value.json
    # Only objects that contain a spelled list are put together here; the C encoder is many times as fast.
    if not _has_spelled(value):
        return canonical_json(value)
    rows = [canonical_json(key) + b":" + _json(member) for key, member in sorted(value.items())]
    return b"{" + b",".join(rows) + b"}"


def _has_spelled(value: Any) -> bool:
    return type(value) is dict and any(isinstance(v, Spelled) or _has_spelled(v) for v in value.values())


def load(
    data: bytes, *, max_bytes: int = 8 << 30, heads: Heads | None = None
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the head and the arrays of a frame.

    Args:
        data: The frame.
        max_bytes: The most bytes of its content.
        heads: Of frames that are loaded together.

    Raises:
        MalformedCheckpoint: The bytes are not a complete frame, or claim more than ``max_bytes`` of content.
    """
    if not data.startswith(_MAGIC):
        raise MalformedCheckpoint("not a ckptcore frame", hint="make the plan again")
    try:
        with parsing("a frame"):
            # Before anything is allocated: a few bytes can claim to expand to terabytes.
            size = zstandard.frame_content_size(data[len(_MAGIC) :])
            if not 0 <= size <= max_bytes:
                raise MalformedCheckpoint(f"frame content must be at most {max_bytes} bytes (got {size})")
            raw = zstandard.ZstdDecompressor().decompress(data[len(_MAGIC) :], max_output_size=size)
            length = int.from_bytes(raw[:8], "little")
            parsed = (json.loads if heads is None else heads.parse)(raw[8 : 8 + length])
            position, arrays = 8 + length, {}
            for row in parsed["arrays"]:
                kind, shape = np.dtype(_KINDS[row["kind"]]), tuple(int(n) for n in row["shape"])
                count = math.prod(shape)  # of Python's integers: a damaged head's sizes may exceed 64 bits
                arrays[row["name"]] = np.frombuffer(raw, kind, count, position).reshape(shape)
                position += count * kind.itemsize
            # Bytes behind the last array would be part of no value, and a
            # digest of the value would not see them.
            if position != len(raw):
                raise MalformedCheckpoint(f"frame must hold {position} bytes (got {len(raw)})")
            return parsed["head"], arrays
    except InvalidText as error:
        raise MalformedCheckpoint(f"cannot read frame: {error}", hint="make the plan again") from error


def _kind(array: Array) -> str:
    for name, kind in _KINDS.items():
        if array.dtype == kind:
            return name
    raise TypeError(f"cannot store dtype {array.dtype} in a frame")
