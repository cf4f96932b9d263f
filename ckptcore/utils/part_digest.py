"""Digest files as a whole, part by part, or from ranges in any order.

The digest of a whole file is its BLAKE3 in hex. A file that is uploaded in several parts, in any order, has
the digest ``blake3-parts-SIZE:HEX``: the BLAKE3 of the BLAKE3 of each SIZE bytes. It depends on the bytes and
the part size alone: not on the order of the parts, nor on how often the upload was resumed.

A file of a source is read in ranges of any size, by several threads, and is digested meanwhile
(`ckptcore.core.file_sums`): ``crc64nvme:HEX`` is the CRC-64/NVME of its bytes. It finds what disks and copies
do to a file, and files that were exchanged, and no forgery.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from blake3 import blake3

from ckptcore.utils.crc64 import crc64

_CRC = "crc64nvme:"
_PARTS = re.compile(r"blake3-parts-([1-9][0-9]{0,12}):([0-9a-f]{64})")


class Hasher(Protocol):
    """What `update` has received is digested."""

    def update(self, data: memoryview | bytes, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes."""


class PartHasher:
    """Digests bytes part by part.

    Args:
        part: Bytes of each part but the last.
    """

    def __init__(self, part: int) -> None:
        self.part, self._left = part, part
        self._part_hasher, self.digests = blake3(), list[bytes]()

    def update(self, data: memoryview | bytes, /) -> None:
        """Add bytes."""
        view = memoryview(data).cast("B")
        while view:
            now = view[: self._left]
            self._part_hasher.update(now)
            self._left -= len(now)
            view = view[len(now) :]
            if not self._left:
                self.digests.append(self._part_hasher.digest())
                self._part_hasher, self._left = blake3(), self.part

    def hexdigest(self) -> str:
        """Return the digest; bytes of at most one part have their plain BLAKE3."""
        # The last part is full, or there is none: an unfinished one is empty.
        if self._left == self.part:
            return join_digests(self.part, self.digests)
        return join_digests(self.part, [*self.digests, self._part_hasher.digest()])


class CrcHasher:
    """Computes the CRC-64 of bytes."""

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: memoryview | bytes, /) -> None:
        """Add bytes."""
        self._crc = crc64(data, self._crc)

    def hexdigest(self) -> str:
        """Return the digest."""
        return crc_digest(self._crc)


def crc_digest(crc: int) -> str:
    """Return the digest of a file with this CRC-64.

    >>> crc_digest(255)
    'crc64nvme:00000000000000ff'
    """
    return f"{_CRC}{crc:016x}"


def join_digests(part: int, digests: Iterable[bytes]) -> str:
    """Return the digest of a file from those of its parts, in order."""
    part_digests = list(digests)
    if len(part_digests) <= 1:
        return (part_digests[0] if part_digests else blake3().digest()).hex()
    return f"blake3-parts-{part}:{blake3(b''.join(part_digests)).hexdigest()}"


def hasher_like(digest: str) -> Hasher:
    """Return a hasher that gives digests of the same kind."""
    if digest.startswith(_CRC):
        return CrcHasher()
    match = _PARTS.fullmatch(digest)
    return blake3() if match is None else PartHasher(int(match[1]))


def is_crc(digest: str) -> bool:
    """Report whether a digest is of a file that was read as a source; a writer's are BLAKE3."""
    return digest.startswith(_CRC)


def short_digest(digest: str) -> str:
    """Return the name and the beginning of a digest, for messages.

    >>> short_digest("0123456789abcdef" * 4), short_digest("crc64nvme:0123456789abcdef")
    ('BLAKE3 0123456789abcdef...', 'CRC-64 0123456789abcdef')
    """
    hexadecimal = digest.rpartition(":")[2]
    return f"CRC-64 {hexadecimal}" if digest.startswith(_CRC) else f"BLAKE3 {hexadecimal[:16]}..."
