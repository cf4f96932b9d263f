"""Compute the checksums that S3 object stores keep, and combine those of neighbouring ranges.

Names and encodings are those of "Checking object integrity" in the user guide of Amazon S3. CRC-64/NVME,
which S3 keeps of every new object, and CRC-32C are computed by awscrt, which botocore uses, too.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isal.isal_zlib import crc32, crc32_combine

from ckptcore.store import Buffer
from ckptcore.store.objects import Checksum
from ckptcore.utils.crc64 import combine64, crc64

_Update = Callable[[Buffer | bytes, int], int]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A checksum that a store may keep of an object.

    Attributes:
        name: As in S3's API.
        field: The parameter of requests and the key of answers.
        width: Bytes of the digest.
        update: CRCs alone: (bytes, CRC of the bytes before) -> CRC.
        combine: CRCs alone: (CRC, CRC of the bytes behind, their number) -> CRC.
    """

    name: str
    width: int
    update: _Update | None = None
    combine: Callable[[int, int, int], int] | None = None

    @property
    def field(self) -> str:
        """Return the parameter of requests, and the key of answers."""
        return f"Checksum{self.name}"

    def encoded(self, value: int) -> Checksum:
        """Return a CRC as the store keeps it."""
        return Checksum(self.name, base64.b64encode(value.to_bytes(self.width, "big")).decode())

    def decoded(self, checksum: Checksum) -> int:
        """Return a kept CRC as a number."""
        return int.from_bytes(base64.b64decode(checksum.value), "big")


def _crc32c(data: Buffer | bytes, before: int) -> int:
    from awscrt.checksums import crc32c

    crc: int = crc32c(data, before)
    return crc


def _combine_crc32c(crc_before: int, crc_behind: int, nbytes: int) -> int:
    from awscrt.checksums import combine_crc32c

    total_crc: int = combine_crc32c(crc_before, crc_behind, nbytes)
    return total_crc


# Best first: those that ranges add up to, in any order.
ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("CRC64NVME", 8, crc64, combine64),
        Algorithm("CRC32C", 4, _crc32c, _combine_crc32c),
        Algorithm("CRC32", 4, crc32, crc32_combine),
        Algorithm("SHA256", 32),
    )
}


def checksum_of(algorithm: str, data: Buffer | bytes) -> Checksum:
    """Return the checksum of bytes as a store keeps it.

    >>> checksum_of("CRC32", b"123456789")
    Checksum(algorithm='CRC32', value='y/Q5Jg==')
    >>> checksum_of("CRC64NVME", b"123456789").value, checksum_of("CRC32C", b"123456789").value
    ('rosUhgp5mIg=', '4waSgw==')
    """
    checksum_algorithm = ALGORITHMS[algorithm]
    if checksum_algorithm.update is not None:
        return checksum_algorithm.encoded(checksum_algorithm.update(data, 0))
    return Checksum(algorithm, base64.b64encode(hashlib.sha256(data).digest()).decode())


def kept_checksums(answer: Mapping[str, Any]) -> tuple[Checksum, ...]:
    """Return the checksums of the complete object in an answer of S3, best first.

    A checksum of the checksums of parts proves no bytes by itself, and is left out.
    """
    if answer.get("ChecksumType") == "COMPOSITE":
        return ()
    checksums = []
    for algorithm in ALGORITHMS.values():
        value = answer.get(algorithm.field)
        if isinstance(value, str) and _is_digest(value, algorithm.width):
            checksums.append(Checksum(algorithm.name, value))
    return tuple(checksums)


def _is_digest(value: str, width: int) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == width
    except ValueError:  # "...-3": a checksum of checksums
        return False
