"""Remember the checksum of every block that was received, and compare them with what the store keeps.

A bit may flip on the way. What is received twice must be equal both times; and where the store keeps a
checksum of a complete object, the blocks that were received must add up to it. SHA-256 does not add up: then
the object is received once more, and each block of that must equal the one that was used.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptcore.errors import AlteredInTransit, DamagedCheckpoint, finding
from ckptcore.store import Buffer
from ckptcore.store.objects import Checksum
from ckptcore.store.objects.checksums import ALGORITHMS, Algorithm

_OWN = "CRC64NVME"  # where the store names none
# For the proof, what is missing of a file is read if it is no more than this, or than what was read.
_CHEAP = 64 << 20
_STEP = 8 << 20

Receive = Callable[[int, Buffer], None]  # (first byte, buffer to fill), from the store, past every cache


@dataclass(slots=True)
class _File:
    """What was received of one object: first byte -> (bytes, CRC)."""

    algorithm: Algorithm
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)


class Ledger:
    """The blocks that were received of the objects of a folder. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._doubted: set[str] = set()

    def prefer(self, path: str, checksums: tuple[Checksum, ...]) -> None:
        """Use the algorithm of a checksum that the store keeps; call it before the first `add`."""
        name = next((c.algorithm for c in checksums if ALGORITHMS[c.algorithm].combine is not None), _OWN)
        with self._lock:
            self._files.setdefault(path, _File(ALGORITHMS[name]))

    def add(self, path: str, start: int, data: Buffer, url: str) -> None:
        """Record a block; raises `AlteredInTransit` if it differs from the one received before."""
        with self._lock:
            file = self._files.setdefault(path, _File(ALGORITHMS[_OWN]))
        crc = _crc(file.algorithm, data)
        with self._lock:
            first_block = file.blocks.setdefault(start, (len(data), crc))
        if first_block[0] == len(data) and first_block[1] != crc:
            raise altered(url, start, len(data))

    def forget(self, path: str, start: int, length: int) -> None:
        """Drop the blocks with any byte of a range: one of them may be the altered one."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                end = start + length
                for block_start in [a for a, (n, _) in file.blocks.items() if a < end and start < a + n]:
                    del file.blocks[block_start]

    def doubt(self, path: str) -> None:
        """Note that bytes of a file were used that no block contains: it cannot be proven."""
        with self._lock:
            self._doubted.add(path)

    def missing(self, path: str, nbytes: int, checksums: tuple[Checksum, ...]) -> int:
        """Return how many bytes `proves` receives of a file, if it is as its store says."""
        file = self._files.get(path)
        if file is None or not checksums or path in self._doubted:
            return 0
        if all(c.algorithm != file.algorithm.name for c in checksums):
            return nbytes  # a digest does not add up
        return sum(n for _, n in _gaps({start: file.blocks[start] for start in sorted(file.blocks)}, nbytes))

    def proves(
        self, path: str, nbytes: int, checksums: tuple[Checksum, ...], receive: Receive, url: str
    ) -> bool:
        """Compare a file's blocks with the store's checksum, after receiving what is missing.

        Args:
            path: The file.
            nbytes: Its size.
            checksums: What the store keeps of it.
            receive: Asks the store for a range.
            url: Its URL, for messages.

        Returns:
            False if the store keeps no checksum that is known here, or too much of the file is missing.

        Raises:
            AlteredInTransit: A block was altered on its way here.
            DamagedCheckpoint: The bytes in the store do not match its own checksum.
        """
        file = self._files.get(path)
        if file is None or not checksums or path in self._doubted:
            return False
        blocks = {start: file.blocks[start] for start in sorted(file.blocks)}
        gaps = _gaps(blocks, nbytes)
        missing = sum(n for _, n in gaps)
        if missing > max(_CHEAP, nbytes - missing):
            return False
        adds_up = next((c for c in checksums if c.algorithm == file.algorithm.name), None)
        if adds_up is not None:
            _require_sum(file.algorithm, adds_up, blocks, gaps, receive, url)
            return True
        digest = next((c for c in checksums if c.algorithm == "SHA256"), None)
        if digest is not None:
            _require_digest(file.algorithm, digest, blocks, gaps, receive, url)
        return digest is not None


_Blocks = Mapping[int, tuple[int, int]]
_Gaps = Sequence[tuple[int, int]]


def _require_sum(
    algorithm: Algorithm, checksum: Checksum, blocks: _Blocks, gaps: _Gaps, receive: Receive, url: str
) -> None:
    assert algorithm.combine is not None  # `prefer` chooses no other
    pieces = dict(blocks)
    for start, length in gaps:
        pieces[start] = (length, _received(algorithm, start, length, receive))
    total = 0
    for first_byte in sorted(pieces):
        total = algorithm.combine(total, pieces[first_byte][1], pieces[first_byte][0])
    if total == algorithm.decoded(checksum):
        return
    for start, (length, crc) in pieces.items():
        if _received(algorithm, start, length, receive) != crc:
            raise altered(url, start, length)
    raise damaged(url, checksum.algorithm)


def _require_digest(
    algorithm: Algorithm, checksum: Checksum, blocks: _Blocks, gaps: _Gaps, receive: Receive, url: str
) -> None:
    total = hashlib.sha256()
    for start, length in sorted([*gaps, *((first_byte, n) for first_byte, (n, _) in blocks.items())]):
        crc = _received(algorithm, start, length, receive, total.update)
        if start in blocks and blocks[start][1] != crc:
            raise altered(url, start, length)
    if base64.b64encode(total.digest()).decode() != checksum.value:
        raise damaged(url, checksum.algorithm)


def _received(
    algorithm: Algorithm,
    start: int,
    length: int,
    receive: Receive,
    also: Callable[[Buffer], None] | None = None,
) -> int:
    """Receive a range, and return its CRC."""
    crc, buffer = 0, bytearray(min(_STEP, length))
    for offset in range(0, length, _STEP):
        view = memoryview(buffer)[: min(_STEP, length - offset)]
        receive(start + offset, view)
        crc = _crc(algorithm, view, crc)
        if also is not None:
            also(view)
    return crc


def _crc(algorithm: Algorithm, data: Buffer, before: int = 0) -> int:
    assert algorithm.update is not None  # those of blocks are CRCs
    return algorithm.update(data, before)


def _gaps(blocks: _Blocks, nbytes: int) -> list[tuple[int, int]]:
    gaps, covered_end = [], 0
    for start, (length, _) in blocks.items():
        if start > covered_end:
            gaps.append((covered_end, start - covered_end))
        covered_end = max(covered_end, start + length)
    if covered_end < nbytes:
        gaps.append((covered_end, nbytes - covered_end))
    return gaps


def altered(url: str, start: int, length: int) -> AlteredInTransit:
    """Return the error for bytes that differ from what was received of them before."""
    return AlteredInTransit(
        f"cannot trust what was read of {url}: bytes {start} to {start + length} came twice, and differ"
    )


def damaged(url: str, algorithm: str) -> DamagedCheckpoint:
    """Return the error for an object that does not match the checksum that its store keeps."""
    message = f"{url} does not match the {algorithm} that its store keeps of it"
    return DamagedCheckpoint(message, findings=(finding("digest-mismatch", "bytes", message, file=url),))
