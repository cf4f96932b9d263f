"""Lay out the items of DCP files: the bytes around a tensor, and the tensor's place in the file.

With torch_save an item is a torch zip of one tensor or object, and FileSystemWriter of
`torch.distributed.checkpoint` writes the zips back to back. With ``SerializationFormat.SAFETENSORS`` objects
stay zips, and all tensors of a file are one safetensors blob after them, to which every item points
(torch/distributed/checkpoint/filesystem.py, _write_files_from_queue). Nothing here depends on the rank: equal
shapes give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import TensorRef
from ckptcore.encodings.safetensors_header import MAX_HEADER, HeaderText
from ckptcore.encodings.torchzip import writer as write
from ckptcore.errors import NameMismatch, UnsupportedDtype
from ckptcore.formats.base import Literal, Slot
from ckptcore.formats.common.write_assignment import Kind, WriteItem


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tensors in a file.

    Attributes:
        order: Positions of the given tensors, in file order; a range where that is the given order.
        items: (first byte, bytes) of each given tensor, as `.metadata` records them.
        slots: Where the tensors' bytes go.
        literals: All other bytes.
        end: First byte after all tensors.
    """

    order: range | tuple[int, ...]
    items: tuple[tuple[int, int], ...]
    slots: tuple[Slot, ...]
    literals: tuple[Literal, ...]
    end: int


def zips(kinds: Sequence[Kind], offset: int, first: int) -> Run:
    """Lay out tensors as torch zips from byte ``offset`` on; their slots count from ``first``."""
    items, slots, literals = [], [], []
    for n, (dtype, shape) in enumerate(kinds, first):
        head, tail, crc_at, nbytes = _zip(dtype, shape)
        data = offset + len(head)
        literals.append(Literal(offset, head))
        literals.append(Literal(data + nbytes, tail, tuple([(c, n) for c in crc_at])))
        slots.append(Slot(n, data))
        length = len(head) + nbytes + len(tail)
        items.append((offset, length))
        offset += length
    return Run(range(len(items)), tuple(items), tuple(slots), tuple(literals), offset)


def blob(names: Sequence[str], pieces: Sequence[WriteItem], offset: int, first: int) -> Run:
    """Lay out tensors as one safetensors blob, wide elements first as in the library.

    Args:
        names: FQNs of the tensors.
        pieces: The box of each tensor.
        offset: First byte of the blob in the file.
        first: Number of the first slot.

    Raises:
        UnsupportedDtype: safetensors has no dtype for some tensors.
        NameMismatch: The names do not fit a header.
    """
    dtypes = [p.kind[0] for p in pieces]
    odd = {n: d for n, d in zip(names, dtypes, strict=True) if not BY_NAME[d].safetensors}
    if odd:
        some = ", ".join(f"{n} ({d})" for n, d in list(odd.items())[:4])
        raise UnsupportedDtype(
            f"safetensors has no dtype for {len(odd)} {'tensor' if len(odd) == 1 else 'tensors'}: {some}",
            tensors=sorted(odd),
        )
    order = sorted(range(len(names)), key=lambda n: (-BY_NAME[dtypes[n]].itemsize, names[n]))
    sharding = {names[n]: {"saved_offsets": list(pieces[n].box.offset)} for n in order}
    metadata = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}
    header = HeaderText(metadata)
    starts = [header.add(names[n], dtypes[n], pieces[n].box.shape) for n in order]
    head = header.packed(8)
    if len(head) - 8 > MAX_HEADER:
        raise NameMismatch(
            f"the safetensors header of a file must have at most {MAX_HEADER} bytes (got {len(head) - 8})",
            hint="lower --max-file-size",
        )
    slots = tuple(Slot(first + k, offset + len(head) + start) for k, start in enumerate(starts))
    items = tuple((offset, p.nbytes) for p in pieces)
    return Run(tuple(order), items, slots, (Literal(offset, head),), offset + len(head) + header.end)


def object_zip(value: Any) -> bytes:
    """Return the bytes that `torch.save` writes for an object without tensors; DCP loads classes."""
    pickled = write.Pickled(_no_tensor, classes=write.Classes.LIBRARIES)
    pickled.value(value)
    records = (("data.pkl", pickled.finish()), ("byteorder", b"little"), ("version", b"3\n"))
    body, rows = bytearray(), bytearray()
    for name, data in records:
        record, row = write.small_record(f"archive/{name}", len(body), data)
        body += record
        rows += row
    return bytes(body + rows + write.end_records(len(records), len(body), len(rows)))


@lru_cache(maxsize=4096)
def _zip(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes, tuple[int, int], int]:
    """Return what `torch.save` writes around the bytes of a contiguous tensor.

    Returns:
        (bytes before the payload, bytes after it, positions of the payload's CRC-32 in the latter, bytes of
        the payload).
    """
    spec = TensorSpec("tensor", dtype, shape)
    pickled = write.Pickled(lambda _: ("0", spec))
    pickled.value(TensorRef(spec.fqn))
    head, rows = bytearray(), bytearray()
    for name, data in (("data.pkl", pickled.finish()), ("byteorder", b"little")):
        record, row = write.small_record(f"archive/{name}", len(head), data)
        head += record
        rows += row
    payload_row = write.central_entry("archive/data/0", len(head), 0, spec.nbytes)
    head += write.local_header("archive/data/0", len(head))
    tail_at = len(head) + spec.nbytes
    tail = bytearray(write.descriptor(0, spec.nbytes))
    version, version_row = write.small_record("archive/version", tail_at + len(tail), b"3\n")
    tail += version
    directory_at, crc_row = tail_at + len(tail), len(tail) + len(rows) + 16
    rows += payload_row + version_row
    tail += rows + write.end_records(4, directory_at, len(rows))
    # The CRC-32 follows the descriptor's signature, and is at byte 16 of the payload's directory entry.
    return bytes(head), bytes(tail), (4, crc_row), spec.nbytes


def _no_tensor(fqn: str) -> tuple[str, TensorSpec]:
    raise TypeError(f"an object refers to the tensor {fqn}")
