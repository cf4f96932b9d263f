"""Read and write zarr version 2 arrays: the positions and layout of their chunks.

An array is a folder with ``.zarray`` (JSON) and one file per chunk, named by its grid index. Every
chunk has the full chunk shape, also at the edge of the array, where the excess is not data
(zarr specification, storage v2). Only uncompressed chunks are read, which are byte ranges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME, BY_ZARR, DType
from ckptcore.core.manifest import SWAPPED, View, is_row_major, row_major
from ckptcore.errors import MalformedCheckpoint, UnreadablePart, UnsupportedFormat
from ckptcore.utils.foreign_text import InvalidText, load_json_object
from ckptcore.utils.text import short_repr

ARRAY = ".zarray"
MAX_ARRAY = 64 << 10  # bytes of a .zarray
_MAX_RANK, _MAX_DIM = 64, 1 << 50
# The specification of zarr v2 requires them, also where the value is null: a key with a flipped bit is a
# missing key. What is written where a chunk is missing is not asked for: a missing chunk is a hole.
_REQUIRED = frozenset(
    {"chunks", "compressor", "dtype", "fill_value", "filters", "order", "shape", "zarr_format"}
)
_FIELDS = _REQUIRED | {"dimension_separator"}


@dataclass(frozen=True, slots=True)
class Array:
    """The content of a ``.zarray``.

    Attributes:
        dtype: The element type.
        shape: Elements.
        chunks: Shape of a chunk, elements.
        order: C or F, inside a chunk.
        separator: Between the numbers of a chunk's name.
        swapped: Whether elements are big-endian.
        extra_fields: Fields that the format does not have.
    """

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    order: str = "C"
    separator: str = "."
    swapped: bool = False
    extra_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> tuple[int, ...]:
        """Count the chunks per dim."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))

    @property
    def count(self) -> int:
        """Count the chunk files."""
        return prod(self.grid)

    @property
    def chunk_bytes(self) -> int:
        """Count the bytes of every chunk file."""
        return prod(self.chunks) * self.dtype.itemsize

    def name(self, index: tuple[int, ...]) -> str:
        """Return the file of a chunk; an array of rank 0 has one, called 0."""
        return self.separator.join(map(str, index)) or "0"

    def index(self, name: str) -> tuple[int, ...] | None:
        """Return the grid index in a file name, or None when it is no chunk of the grid."""
        if not self.shape:
            return () if name == "0" else None
        parts = name.split(self.separator)
        if len(parts) != len(self.shape) or not all(_INDEX.match(p) for p in parts):
            return None
        grid_index = tuple(map(int, parts))
        return grid_index if all(i < n for i, n in zip(grid_index, self.grid, strict=True)) else None

    def outside(self, name: str) -> bool:
        """Report whether a file is named like a chunk of an array of this rank, but of a larger one."""
        parts = name.split(self.separator)
        named = bool(self.shape) and len(parts) == len(self.shape) and all(_INDEX.match(p) for p in parts)
        return named and self.index(name) is None

    def place(self, index: tuple[int, ...]) -> tuple[Box, View | None]:
        """Return the box of a chunk, and the layout of its elements in its file."""
        offset = tuple(i * c for i, c in zip(index, self.chunks, strict=True))
        shape = tuple(  # an edge chunk has excess elements
            min(c, n - o) for o, c, n in zip(offset, self.chunks, self.shape, strict=True)
        )
        strides = row_major(self.chunks) if self.order == "C" else _column_major(self.chunks)
        flags = SWAPPED if self.swapped and self.dtype.itemsize > 1 else 0
        plain = not flags and is_row_major(shape, strides)
        return Box(offset, shape), None if plain else View(0, strides, flags)

    def missing(self, present: Iterable[tuple[int, ...]], limit: int) -> Iterator[tuple[int, ...]]:
        """Yield the first ``limit`` grid indices without a file."""
        present_cells = set(present)
        # A complete grid, which may have millions of cells, is recognised by their number.
        left = limit if self.count > len(present_cells) else 0
        for number in range(self.count if left else 0):
            index = cell(self.grid, number)
            if index not in present_cells:
                yield index
                left -= 1
                if not left:
                    return


def cell(grid: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Return the index of a cell of a grid, counted row by row.

    >>> cell((2, 3), 4)
    (1, 1)
    """
    index = []
    for n in reversed(grid):
        number, coordinate = divmod(number, n)
        index.append(coordinate)
    return tuple(reversed(index))


_INDEX = re.compile(r"^(?:0|[1-9]\d{0,14})$")


def parse(raw: bytes, label: str) -> Array:
    """Parse the array of a ``.zarray``.

    Raises:
        MalformedCheckpoint: The text is damaged.
        UnsupportedFormat: It is another version of zarr.
        UnreadablePart: A required key is missing, the array is compressed or filtered, or its dtype is not a
            plain number; has dtype and shape.
    """
    form = _form(raw, label)
    if form.get("zarr_format") != 2:
        raise UnsupportedFormat(
            f"{label} must be zarr format 2 (got {short_repr(form.get('zarr_format'), 20)})", hint="known: 2"
        )
    shape, chunks = (_dims(form.get(field), field, label) for field in ("shape", "chunks"))
    if len(shape) != len(chunks) or any(c < 1 and n for c, n in zip(chunks, shape, strict=True)):
        raise MalformedCheckpoint(
            f"{label}: chunks {list(chunks)} do not fit shape {list(shape)}", file=label
        )
    if missing_fields := sorted(_REQUIRED - form.keys()):
        raise UnreadablePart(
            f"{label} has no {', '.join(missing_fields)}, which zarr v2 requires",
            hint="copy the file again from where it was saved",
            shape=shape,
            dtype=short_repr(form.get("dtype"), 40),
        )
    order, separator = form["order"], form.get("dimension_separator", ".")
    if order not in ("C", "F") or separator not in (".", "/"):
        raise MalformedCheckpoint(
            f"{label}: unknown order or separator (got {short_repr(order, 20)}, {short_repr(separator, 20)})",
            file=label,
        )
    for name in ("compressor", "filters"):
        if form[name]:
            raise UnreadablePart(
                f"{label}: cannot read chunks with {name} {_codec_names(form[name])}",
                hint="rewrite the array uncompressed with zarr or tensorstore, like Megatron-Core",
                shape=shape,
                dtype=short_repr(form["dtype"], 40),
            )
    dtype_and_order = _dtype(form["dtype"])
    if dtype_and_order is None:
        raise UnreadablePart(
            f"{label}: cannot read elements of dtype {short_repr(form['dtype'])}",
            hint=f"known: {', '.join(BY_ZARR)}",
            shape=shape,
            dtype=short_repr(form["dtype"], 40),
        )
    dtype, swapped = dtype_and_order
    extra_fields = {name: value for name, value in form.items() if name not in _FIELDS}
    # A dim without elements may have chunks of 0 elements, by which `grid` would divide.
    return Array(dtype, shape, tuple(max(c, 1) for c in chunks), order, separator, swapped, extra_fields)


def dump(dtype: DType, shape: tuple[int, ...], chunks: tuple[int, ...]) -> bytes:
    """Return the ``.zarray`` of an uncompressed array, spelled like zarr 2.18."""
    assert dtype.zarr is not None  # the writer has refused others
    form: dict[str, Any] = {
        "chunks": list(chunks),
        "compressor": None,
        "dtype": dtype.zarr,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }
    return json.dumps(form, indent=4, sort_keys=True, ensure_ascii=True).encode()


def _form(raw: bytes, label: str) -> dict[str, Any]:
    try:
        return load_json_object(raw, unique=True)
    except InvalidText as error:
        raise MalformedCheckpoint(f"cannot read {label}: {error}", file=label) from error


def _codec_names(value: Any) -> str:
    entries = value if isinstance(value, list) else [value]
    return ", ".join(str(e.get("id") if isinstance(e, dict) else e)[:40] for e in entries[:8])


def _dims(value: Any, field: str, label: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > _MAX_RANK
        or any(type(n) is not int or not 0 <= n < _MAX_DIM for n in value)
        or prod(value) >= 1 << 62
    ):
        raise MalformedCheckpoint(f"{label}: invalid {field} (got {short_repr(value)})", file=label)
    return tuple(value)


def _dtype(text: Any) -> tuple[DType, bool] | None:
    """Return the element type and whether it is big-endian; None for an unsupported one.

    bfloat16 and float8 have no spelling in zarr 2: Megatron-Core writes what tensorstore reads.
    """
    if isinstance(text, str):
        dtype = BY_ZARR.get(text) or (BY_NAME.get(text) if text.startswith("float8_") else None)
        if dtype is not None:
            return dtype, False
        if text[:1] in (">", "|", "=") and (dtype := BY_ZARR.get("<" + text[1:])) and text[0] != "=":
            return dtype, text[0] == ">"
    return None


def _column_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reversed(row_major(tuple(reversed(shape)))))
