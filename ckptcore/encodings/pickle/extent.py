"""Find the end of a pickle inside a file, without a length that says it.

Each opcode states how many bytes follow it (Lib/pickletools.py, CPython). Nothing is built here: the bytes
up to STOP go to `unpickler.loads`. Only opcodes of `loads` are known.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptcore.errors import MalformedCheckpoint

_STOP, _GLOBAL, _PROTO = 0x2E, 0x63, 0x80
# Opcode -> bytes of its operand.
_OPERANDS = {
    **dict.fromkeys(b"\x28\x29\x30\x31\x32\x4e\x51\x52\x5d\x61\x62\x65\x73\x74\x75\x7d", 0),
    **dict.fromkeys(b"\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94", 0),
    **dict.fromkeys(b"\x4b\x68\x71\x80", 1),
    0x4D: 2,
    **dict.fromkeys(b"\x4a\x6a\x72", 4),
    **dict.fromkeys(b"\x47\x95", 8),
}
# Opcode -> bytes of the number before its operand, which is the operand's length.
_COUNTED = {
    **dict.fromkeys(b"\x43\x55\x8a\x8c", 1),
    **dict.fromkeys(b"\x42\x54\x58", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_BLOCK, _LONGEST = 1 << 16, 9  # bytes read at once, and of an opcode with its fixed operand
_MAX_NAME = 1 << 12  # bytes of a global's module and name
_MAX_PICKLE = 256 << 20


def pickle_end(read: Callable[[int, int], bytes], start: int, end: int, label: str) -> int:
    """Return the place behind a pickle.

    Args:
        read: (start, length) -> exactly these bytes of the file.
        start: First byte of the pickle.
        end: Where the pickle ends at the latest.
        label: The file, for messages.

    Raises:
        MalformedCheckpoint: There is no complete pickle of 256 MiB at most.
    """
    position, base, block = start, start, b""
    end = min(end, start + _MAX_PICKLE)
    while position < end:
        offset = position - base
        if offset + _LONGEST > len(block) and base + len(block) < end:
            base, block, offset = position, read(position, min(_BLOCK, end - position)), 0
        opcode = block[offset]
        if opcode == _STOP:
            return position + 1
        if opcode == _GLOBAL:
            names = read(position + 1, min(_MAX_NAME, end - position - 1)).split(b"\n", 2)
            if len(names) < 3:
                break
            position += 3 + len(names[0]) + len(names[1])
        elif (width := _COUNTED.get(opcode)) is not None:
            count = int.from_bytes(block[offset + 1 : offset + 1 + width], "little")
            position += 1 + width + count
        elif (length := _OPERANDS.get(opcode)) is not None:
            position += 1 + length
        else:
            raise MalformedCheckpoint(f"{label} uses pickle opcode {opcode:#04x} at byte {position}")
    raise MalformedCheckpoint(f"{label} has no complete pickle at byte {start}")
