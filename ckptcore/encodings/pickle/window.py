"""Windows of a pickle: its opcodes without frame headers, as columns to look values up in.

Protocol 4 cuts a pickle into frames of about 64 KiB (PEP 3154). A header may stand before any
opcode; a window leaves them out, and remembers where they were.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_BYTES = 4 << 20
_MOST_FRAMES = 1024  # real ones have 64 KiB
_FRAME, _HEADER = 0x95, 9
_PADDING = bytes(2048)  # what looks like an instance may be decoded to behind the last byte
# EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: an instance, and its attributes follow.
_HEAD = int.from_bytes(b")\x81\x94}\x94(", "little")
_HEAD_BYTES = np.uint64((1 << 48) - 1)


class Window:
    """A part of a pickle from ``begin`` on.

    data: its opcodes. words: uint64 per byte of it, the eight bytes there, little-endian. heads: where
    instances begin, or bytes that look like it. cuts: where frame headers stood.
    """

    def __init__(self, pickle: bytes, begin: int, frame_end: int) -> None:
        """frame_end: where the frame ends that ``begin`` lies in; behind the pickle if there are none."""
        self._raw: list[int] = []  # of each piece: first byte in the pickle, in the window, frame's end
        self._at: list[int] = []
        self._ends: list[int] = []
        pieces: list[bytes] = []
        at, held = begin, 0
        view = memoryview(pickle)
        while held < _BYTES and at < len(pickle) and len(pieces) < _MOST_FRAMES:
            end = min(frame_end, at + _BYTES - held, len(pickle))
            if end <= at:
                break
            self._raw.append(at)
            self._at.append(held)
            self._ends.append(frame_end)
            pieces.append(view[at:end])  # type: ignore[arg-type]
            held += end - at
            if end != frame_end or end + _HEADER > len(pickle) or pickle[end] != _FRAME:
                break
            at = end + _HEADER
            frame_end = at + int.from_bytes(pickle[end + 1 : at], "little")
        self.begin, self.end = begin, at if not self._raw else self._raw[-1] + held - self._at[-1]
        self._whole = self.end == len(pickle)
        self.data = b"".join((*pieces, _PADDING))
        self.words: npt.NDArray[np.uint64] = np.ndarray(
            (len(self.data) - 7,), "<u8", buffer=self.data, strides=(1,)
        )
        self.cuts = np.array(self._at[1:], np.int64)
        found = np.flatnonzero(np.frombuffer(self.data, np.uint8, held) == 0x81) - 1
        found = found[1:] if len(found) and found[0] < 0 else found
        self.heads: Ints = found[(self.words[found] & _HEAD_BYTES) == _HEAD]

    def holds(self, at: int, cycle: int) -> bool:
        """Whether more than so many instances begin behind a place of the window, or nothing follows it."""
        left = len(self.heads) - int(np.searchsorted(self.heads, at))
        return left > cycle or self._whole

    def place(self, raw: int) -> int | None:
        """Where a byte of the pickle lies in the window; None when it does not."""
        if not self.begin <= raw < self.end:
            return None
        n = bisect_right(self._raw, raw) - 1
        at = self._at[n] + raw - self._raw[n]
        return at if n + 1 == len(self._at) or at < self._at[n + 1] else None

    def raw(self, at: int) -> tuple[int, int]:
        """Where the window's byte ``at`` lies in the pickle, and where its frame ends.

        A place between two frames is the end of the first.
        """
        n = bisect_right(self._at, at) - 1
        if n and self._at[n] == at:
            n -= 1
        return self._raw[n] + at - self._at[n], self._ends[n]
