"""Describe what was uploaded in parts: enough to complete it, to find it again, and to prove its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.errors import OutputMismatch
from ckptcore.store.objects import Checksum, ObjectSeen, UploadedPart
from ckptcore.store.objects.checksums import ALGORITHMS
from ckptcore.utils.crc32 import combine
from ckptcore.utils.part_digest import join_digests

_RERUN = "run the same command again: the file is uploaded again; if that repeats, look for what alters bytes"
_CRC32 = ALGORITHMS["CRC32"]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """An upload with all its parts, complete or not yet.

    Attributes:
        key: Key of the object.
        upload_id: Id of the upload.
        token: Of its entry in the journal.
        nbytes: Bytes of the object, or of a range of its parts.
        part: Bytes of a part.
        started: When its entry was written, seconds since 1970.
        first: Number of its first part.
        blake3: BLAKE3 of each part, hex.
        reply_lost: Of its entry in the journal.
        etags: ETag of each part.
        crcs: CRC-32 of each part.
    """

    key: str
    upload_id: str
    token: str
    nbytes: int
    part: int
    etags: tuple[str, ...]
    crcs: tuple[int, ...]
    started: float
    first: int = 1
    blake3: tuple[str, ...] = ()
    reply_lost: bool = False

    @property
    def digest(self) -> str:
        """Return the digest of all bytes (`ckptcore.utils.part_digest`)."""
        return join_digests(self.part, map(bytes.fromhex, self.blake3))

    @property
    def parts(self) -> list[UploadedPart]:
        """Return the parts as `S3Client.complete` needs them."""
        return [
            UploadedPart(n, etag, self.size_of(n), _CRC32.encoded(crc))
            for n, (etag, crc) in enumerate(zip(self.etags, self.crcs, strict=True), self.first)
        ]

    @property
    def crc(self) -> int:
        """Return the CRC-32 of all bytes."""
        total = 0
        for n, crc in enumerate(self.crcs, self.first):
            total = combine(total, crc, self.size_of(n))
        return total

    def size_of(self, number: int) -> int:
        """Return the bytes of a part."""
        return min(self.part, self.nbytes - (number - self.first) * self.part)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "key": self.key,
            "upload_id": self.upload_id,
            "token": self.token,
            "nbytes": self.nbytes,
            "part": self.part,
            "started": self.started,
            "first": self.first,
            "etags": list(self.etags),
            "crcs": list(self.crcs),
            "blake3": list(self.blake3),
            "reply_lost": self.reply_lost,
        }

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Uploaded:
        """Read the form of `as_dict`."""
        return cls(
            str(form["key"]),
            str(form["upload_id"]),
            str(form["token"]),
            int(form["nbytes"]),
            int(form["part"]),
            tuple(map(str, form["etags"])),
            tuple(map(int, form["crcs"])),
            float(form["started"]),
            int(form["first"]),
            tuple(map(str, form["blake3"])),
            bool(form.get("reply_lost", True)),
        )


def require_checksum(s3_object: ObjectSeen, uploaded: Uploaded) -> bool:
    """Compare an object's size and checksum with the bytes that were sent.

    Returns:
        Whether the store keeps a checksum to compare.

    Raises:
        OutputMismatch: They differ.
    """
    if s3_object.nbytes != uploaded.nbytes:
        raise OutputMismatch(
            f"{uploaded.key} must have {uploaded.nbytes} bytes (got {s3_object.nbytes})", hint=_RERUN
        )
    expected_crc: Checksum = _CRC32.encoded(uploaded.crc)
    stored_crcs = [c for c in s3_object.checksums if c.algorithm == expected_crc.algorithm]
    if stored_crcs and stored_crcs[0] != expected_crc:
        raise OutputMismatch(
            f"{uploaded.key} was altered on its way to the store: it must have CRC-32 {expected_crc.value} "
            f"(the store has {stored_crcs[0].value})",
            hint=_RERUN,
        )
    return bool(stored_crcs)


def joined(parts: Sequence[Uploaded]) -> Uploaded:
    """Return an upload from ranges of its parts, in order and without gaps."""
    first = parts[0]
    return Uploaded(
        first.key,
        first.upload_id,
        first.token,
        sum(p.nbytes for p in parts),
        first.part,
        tuple(etag for p in parts for etag in p.etags),
        tuple(crc for p in parts for crc in p.crcs),
        first.started,
        first.first,
        tuple(digest for p in parts for digest in p.blake3),
        any(p.reply_lost for p in parts),
    )
