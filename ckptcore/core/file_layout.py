"""Describe an output file: which bytes are known, and where the bytes of tensors go.

Formats arrange files in this form, and workers fill them. It is apart from the formats, because a worker
process needs none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptcore.core.box import Box


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor's bytes in an output file.

    Attributes:
        tensor: Position in `FileLayout.tensors`.
        start: First byte in the file.
    """

    tensor: int
    start: int


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are known before any tensor is moved.

    Attributes:
        start: First byte in the file.
        data: The bytes.
        crc_at: (position in ``data``, tensor) pairs. The four bytes there become the little-endian CRC-32 of
            that tensor's slot when the slot is written.
    """

    start: int
    data: bytes
    crc_at: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One output file: literals and slots tile ``[0, nbytes)`` exactly.

    Attributes:
        path: Relative to the root of the output.
        nbytes: Size of the file.
        tensors: Positions in the list given to `arrange`, in file order. Slots refer to positions in this
            tuple.
        slots: Where the bytes of each tensor go.
        literals: All other bytes.
        commit: Whether this file makes the folder loadable, and is therefore published last.
        boxes: The box of each of ``tensors`` that its slot holds; empty when all tensors are complete.
    """

    path: str
    nbytes: int
    tensors: tuple[int, ...]
    slots: tuple[Slot, ...]
    literals: tuple[Literal, ...]
    commit: bool = False
    boxes: tuple[Box, ...] = ()
