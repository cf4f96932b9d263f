"""Frames: how does a value with large columns become one small file, and come back safely?

A frame is ``b"CKPF1\\n"``, then one zstd stream of: u64 head length, canonical JSON head, then the
arrays' bytes one after the other in the order the head lists them (little-endian, C order).
Nothing in a frame is executed, and every length is bounded by the bytes that are there.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from ckptcore.errors import MalformedCheckpoint

_MAGIC = b"CKPF1\n"
_KINDS = {"i8": np.int64, "i4": np.int32, "i1": np.int8, "u1": np.uint8}
Array = npt.NDArray[Any]


def canonical_json(value: Any) -> bytes:
    """The one byte spelling of a JSON value: sorted keys, no spaces, ASCII.

    File names need not be UTF-8; what is left of them in a str has no other encoding than escapes.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def dump(head: dict[str, Any], arrays: dict[str, Array]) -> bytes:
    """One frame; equal inputs give equal bytes."""
    return _MAGIC + zstandard.ZstdCompressor(level=3).compress(b"".join(_encoded(head, arrays)))


def digest(head: dict[str, Any], arrays: dict[str, Array]) -> bytes:
    """BLAKE3 of what a frame holds, before compression."""
    whole = blake3()
    for part in _encoded(head, arrays):
        whole.update(part)
    return whole.digest()


def _encoded(head: dict[str, Any], arrays: dict[str, Array]) -> list[Any]:
    table = [{"name": k, "kind": _kind(a), "shape": list(a.shape)} for k, a in sorted(arrays.items())]
    body = canonical_json({"head": head, "arrays": table})
    columns = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for _, a in sorted(arrays.items())]
    return [len(body).to_bytes(8, "little"), body, *columns]


def load(data: bytes, *, max_bytes: int = 8 << 30) -> tuple[dict[str, Any], dict[str, Array]]:
    """The head and the arrays of a frame.

    Raises `MalformedCheckpoint` when the bytes are not a whole frame or claim more than
    ``max_bytes`` of content.
    """
    if not data.startswith(_MAGIC):
        raise MalformedCheckpoint("not a ckptcore frame", hint="make the plan again")
    try:
        size = zstandard.frame_content_size(data[len(_MAGIC) :])
        if not 0 <= size <= max_bytes:
            raise MalformedCheckpoint(f"frame claims {size} bytes of content")
        raw = zstandard.ZstdDecompressor().decompress(data[len(_MAGIC) :], max_output_size=size)
        length = int.from_bytes(raw[:8], "little")
        parsed = json.loads(raw[8 : 8 + length])
        at, arrays = 8 + length, {}
        for row in parsed["arrays"]:
            kind, shape = np.dtype(_KINDS[row["kind"]]), tuple(int(n) for n in row["shape"])
            count = int(np.prod(shape, dtype=object)) if shape else 1
            arrays[row["name"]] = np.frombuffer(raw, kind, count, at).reshape(shape)
            at += count * kind.itemsize
    except (ValueError, KeyError, TypeError, zstandard.ZstdError) as error:
        raise MalformedCheckpoint(f"frame is damaged: {error}", hint="make the plan again") from error
    if at != len(raw):
        raise MalformedCheckpoint(f"frame holds {len(raw)} bytes, {at} expected")
    return parsed["head"], arrays


def _kind(array: Array) -> str:
    for name, kind in _KINDS.items():
        if array.dtype == kind:
            return name
    raise TypeError(f"frames do not hold {array.dtype}")
