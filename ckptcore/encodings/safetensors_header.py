"""Read and write safetensors headers: the tensors of a file, and the positions of their bytes.

A file is: u64 little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
and the tensors' bytes without holes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from ckptcore.core.dtype import BY_NAME, BY_SAFETENSORS
from ckptcore.core.metadata_budget import Meter, meter
from ckptcore.encodings.json_text import cost
from ckptcore.errors import MalformedCheckpoint, NameMismatch, UnsupportedDtype
from ckptcore.store import Readable
from ckptcore.store.subfolder import FileRange, explain
from ckptcore.utils.foreign_text import InvalidText, load_json_object
from ckptcore.utils.text import short_repr

METADATA = "__metadata__"  # the key of a header that is not a tensor
FIELDS = "__fields__"  # the object of other fields that entries of tensors have
# Entries of `__metadata__` that say how the file is laid out: "pt" is what torch's loaders ask for.
FORMAT = "format"
FOR_TORCH = (FORMAT, "pt")
SHARDS = ("DCP_SHARDING_INFO", "DCP_VERSION")
OWN = "ckptcore."  # what ckptcore's own keys begin with
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
MAX_HEADER = 100_000_000  # the safetensors library's own bound
_MAX_DIM = 1 << 50
_MAX_DTYPE = 40  # characters of a dtype's name


def read_header(
    store: Readable, path: str, size: int, taken: Collection[str] | None = ()
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Read a file's header: (tensors, metadata) of `parse_header`, and the first byte of the data.

    The account of the reading gets the header as structure, and the entries of ``__metadata__`` that nobody
    takes as values to carry.

    Args:
        store: The folder.
        path: The file.
        size: Its bytes.
        taken: Keys of ``__metadata__`` that the caller reads; None if another call of the reading takes all.

    Raises:
        MalformedCheckpoint: The file is not a complete safetensors file.
    """
    header = header_text(store, path, size)
    length = len(header)
    reading = meter()
    last = _last_header.get(reading)
    if last is None or last.raw != header or last.path != path or last.size != size:
        _last_header.pop(reading, None)  # one header at a time is in memory
        extra_fields: dict[str, Any] = {}
        last = _ParsedHeader(
            path, size, header, *parse_header(header, size - 8 - length, path, extra_fields), extra_fields
        )
        _last_header[reading] = last
    if taken is not None:
        explain(store, path, 0, 8 + length)
        content = FileRange(store, path, 0, size)
        free_entries = {k: v for k, v in last.metadata.items() if k not in taken and (k, v) != FOR_TORCH}
        content.carry(METADATA, free_entries)
        content.carry(FIELDS, last.extra_fields)
    return last.tensors, last.metadata, 8 + length


def header_text(store: Readable, path: str, size: int) -> bytes:
    """Return a file's header as it is stored, not parsed.

    Args:
        store: The folder.
        path: The file.
        size: Its bytes.

    Raises:
        MalformedCheckpoint: The file has no header of the length that it states.
    """
    if size < 8:
        raise MalformedCheckpoint(f"{path}: a safetensors file must have 8 bytes (got {size})", file=path)
    length = int.from_bytes(store.read(path, 0, 8), "little")
    if length > min(MAX_HEADER, size - 8):
        raise MalformedCheckpoint(f"{path} claims a header of {length} bytes (got {size})", file=path)
    return store.read(path, 8, length)


def read_blob_header(
    store: Readable, path: str, start: int, nbytes: int
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Read the header of a blob inside a file, as `read_header`, without an account of the reading."""
    length = int.from_bytes(store.read(path, start, 8), "little") if nbytes >= 8 else 0
    if length > min(MAX_HEADER, nbytes - 8):
        raise MalformedCheckpoint(f"{path} claims a header of {length} bytes (got {nbytes})", file=path)
    tensors, metadata = parse_header(store.read(path, start + 8, length), nbytes - 8 - length, path)
    return tensors, metadata, 8 + length


def is_free(key: str, value: object) -> bool:
    """Report whether ``__metadata__`` may have this entry of a user: no reader takes it as its own.

    >>> is_free("epoch", "3"), is_free("epoch", 3), is_free("format", "mlx"), is_free("ckptcore.x", "{}")
    (True, False, False, False)
    """
    is_reserved = key == FORMAT or key in SHARDS or key.startswith(OWN)
    return type(value) is str and not is_reserved and not _not_text(key) and not _not_text(value)


def parse_header(
    raw: bytes, data_length: int, label: str, extra_fields: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse a header.

    Args:
        raw: The JSON text.
        data_length: Bytes behind the header.
        label: The file, for messages.
        extra_fields: Receives tensor -> fields of its entry that the format does not have.

    Returns:
        (name -> (dtype, shape, start, stop), metadata). Start and stop are relative to the data. An
        unsupported dtype is returned as it is spelled.

    Raises:
        MalformedCheckpoint: The tensors do not tile ``data_length`` bytes exactly.
        MetadataTooLarge: The header is over the budget of metadata.
    """
    meter().require(cost(raw), label)  # what the caller keeps is counted there
    try:
        top = load_json_object(raw, finite=True, unique=True, encodable=True)
    except InvalidText as error:
        raise MalformedCheckpoint(f"{label}: cannot read the header: {error}") from error
    metadata = top.pop(METADATA, None)
    if metadata is None:
        metadata = {}
    if type(metadata) is not dict or not set(map(type, metadata.values())) <= {str}:
        raise MalformedCheckpoint(f"{label}: {METADATA} must be an object of texts")
    tensors = {name: _header_entry(name, entry, label) for name, entry in top.items()}
    if extra_fields is not None:
        odd = (name for name, entry in top.items() if len(entry) != len(_FIELDS))
        extra_fields |= {name: {k: v for k, v in top[name].items() if k not in _FIELDS} for name in odd}
    # Writers put entries in the order of the data. Only others are sorted.
    end = _end_of(tensors.items(), label, in_order=True)
    if end is None:
        end = _end_of(sorted(tensors.items(), key=lambda row: row[1][2:]), label)
    if end != data_length:
        cut = next((name for name, row in tensors.items() if row[3] > data_length), None)
        raise MalformedCheckpoint(
            f"{label}: header describes {end} bytes of data, the file has {data_length}"
            f"{f': {cut} is cut off' if cut is not None else ''}",
            hint="the file is truncated, or longer than it should be; copy it again",
        )
    return tensors, metadata


@dataclass(frozen=True, slots=True)
class _ParsedHeader:
    path: str
    size: int
    raw: bytes
    tensors: dict[str, Any]
    metadata: dict[str, Any]
    extra_fields: dict[str, Any]


# The header that a reading has parsed last: detectors and the reader ask for the same one, and a large one
# takes a second. It goes with the reading's meter.
_last_header: WeakKeyDictionary[Meter, _ParsedHeader] = WeakKeyDictionary()

_Entry = tuple[str, tuple[int, ...], int, int]


def _end_of(tensors: Iterable[tuple[str, _Entry]], label: str, *, in_order: bool = False) -> int | None:
    """Return the end of tensors without holes; ``in_order``: None where they are in another order."""
    end = 0
    for name, (_, _, start, stop) in tensors:
        if start != end:
            if in_order:
                return None
            raise MalformedCheckpoint(f"{label}: {name} must start at {end}, behind other data (got {start})")
        end = stop
    return end


def _header_entry(name: str, entry: Any, label: str) -> _Entry:
    """Return the checked dtype, shape and byte range of one entry of a header."""
    try:
        spelled, dims, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        shape = tuple(dims)
        start, stop = offsets
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedCheckpoint(f"{label}: entry {name!r} is not a tensor: {error}") from error
    if type(dims) is not list or type(offsets) is not list:
        raise MalformedCheckpoint(
            f"{label}: entry {name!r} is not a tensor: its shape and offsets must be lists"
        )
    dtype = BY_SAFETENSORS.get(spelled) if type(spelled) is str else None
    if type(spelled) is not str or not 0 < len(spelled) <= _MAX_DTYPE:
        raise MalformedCheckpoint(f"{label}: {name} has an invalid dtype (got {short_repr(spelled, 40)})")
    count = 1 if len(shape) <= 64 else -1
    for n in shape:  # a plain loop: files have tens of thousands of tensors
        if count < 0 or type(n) is not int or not 0 <= n < _MAX_DIM:
            raise MalformedCheckpoint(
                f"{label}: {name} has an invalid shape (got {short_repr(list(shape), 120)})"
            )
        count *= n
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
        raise MalformedCheckpoint(f"{label}: {name} has invalid offsets (got {short_repr([start, stop])})")
    if dtype is not None and dtype.packed > 1:  # torch counts elements, safetensors the values in them
        if not shape or shape[-1] % dtype.packed:
            return spelled, shape, start, stop
        shape, count = (*shape[:-1], shape[-1] // dtype.packed), count // dtype.packed
    if dtype is None:  # the bits of an element are unknown
        return f"?{spelled}" if spelled in BY_NAME else spelled, shape, start, stop
    if stop - start != count * dtype.itemsize:
        raise MalformedCheckpoint(
            f"{label}: {name} ({dtype.name} {list(shape)}) needs {count * dtype.itemsize} bytes "
            f"(got {stop - start})"
        )
    return dtype.name, shape, start, stop


class HeaderText:
    """A header in the making, tensor by tensor in the order of their bytes."""

    def __init__(self, metadata: Mapping[str, str] | None = None) -> None:
        """Start without tensors, with the texts of ``__metadata__``."""
        self._spell = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
        self._rows = [] if metadata is None else [f'"{METADATA}":{self._spell(dict(metadata))}']
        self._kinds: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
        self.end = 0  # bytes of the tensors so far

    def add(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Add a tensor of a dtype that safetensors has, and return its first byte.

        Raises:
            NameMismatch: A header cannot have this name.
            UnsupportedDtype: It cannot have a tensor of this dtype without dims.
        """
        if name == METADATA:
            raise NameMismatch(
                f"a tensor in a safetensors file cannot have the name {METADATA}",
                hint="rename it with --rename",
            )
        if not name.isprintable() and _not_text(name):
            raise NameMismatch(
                f"a tensor's name must be valid UTF-8 (got {name!r})", hint="rename it with --rename"
            )
        kind = self._kinds.get((dtype, shape))
        if kind is None:  # a model has tens of thousands of tensors, of a few shapes
            packed = BY_NAME[dtype].packed
            if packed > 1 and not shape:
                raise UnsupportedDtype(f"a safetensors file cannot have a 0-d tensor of {dtype} ({name})")
            dims = [*shape[:-1], shape[-1] * packed] if shape else []
            fields_text = self._spell({"dtype": BY_NAME[dtype].safetensors, "shape": dims})
            nbytes = prod(shape) * BY_NAME[dtype].itemsize
            kind = self._kinds[dtype, shape] = nbytes, f'{fields_text[:-1]},"data_offsets":['
        nbytes, fields_text = kind
        start, self.end = self.end, self.end + nbytes
        self._rows.append(f"{self._spell(name)}:{fields_text}{start},{self.end}]}}")
        return start

    def packed(self, align: int) -> bytes:
        """Return the bytes before the data: length and JSON, padded with spaces to ``align``."""
        body = f"{{{','.join(self._rows)}}}".encode()
        body += b" " * (-(8 + len(body)) % align)
        return len(body).to_bytes(8, "little") + body


def _not_text(name: str) -> bool:
    """Return whether a name has no UTF-8 form: JSON and pickle can contain lone surrogates."""
    return any("\ud800" <= c <= "\udfff" for c in name)
