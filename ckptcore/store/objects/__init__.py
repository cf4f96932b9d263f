"""Send requests to an S3 object store: the one seam for reading, uploading, publishing and cleaning up.

`client` sends requests (through botocore, with the options of s3fs), `retry` repeats those that failed for a
moment and turns the others into errors of ckptcore, `checksums` computes the checksums that a store can keep.

Keys are complete: they start behind the bucket. ETags are texts as the store sends them, with their quotes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptcore.store.file_status import NO_VERSION, FileStatus, NameKind

PART_LIMIT = 10_000  # parts of one upload, on S3 and its relatives
MAX_REQUEST_BYTES = 1 << 30  # of an object that is written, or fetched, in one request; S3 takes 5 GiB
RECORD = 64 << 10  # most bytes of a lease, or of an entry of a journal


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum as an object store keeps it.

    Attributes:
        algorithm: A name of `ckptcore.store.objects.checksums.ALGORITHMS`, such as "CRC64NVME".
        value: Base64 of the big-endian digest.
    """

    algorithm: str
    value: str


@dataclass(frozen=True, slots=True)
class ObjectSeen:
    """An object at one moment.

    Attributes:
        key: Its key.
        nbytes: Its size.
        etag: Its ETag, with quotes; "" where the store sends none.
        metadata: What the writer stored beside it; only `S3Client.head` asks for it.
        checksums: Those of its complete bytes that the store keeps; only `S3Client.head` asks for them.
        modified: When it was written, seconds since 1970, or None where the store does not say.
    """

    key: str
    nbytes: int
    etag: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    checksums: tuple[Checksum, ...] = ()
    modified: float | None = None


def of_object(s3_object: ObjectSeen) -> FileStatus:
    """Return the status of an object."""
    modified = None if s3_object.modified is None else round(s3_object.modified * 1e9)
    return FileStatus(NameKind.FILE, s3_object.nbytes, s3_object.etag or NO_VERSION, modified)


@dataclass(frozen=True, slots=True)
class KeysBelow:
    """What is directly below a prefix: its objects, and the longer prefixes, each with its slash."""

    objects: tuple[ObjectSeen, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """One uploaded part.

    Attributes:
        number: From 1 to `PART_LIMIT`.
        etag: What the store answered.
        nbytes: Its size.
        checksum: The checksum it was uploaded with, or None.
    """

    number: int
    etag: str
    nbytes: int
    checksum: Checksum | None = None


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An upload that was neither completed nor aborted.

    Attributes:
        key: The key it would appear under.
        upload_id: Its id.
        started: When it began, seconds since 1970, or None where the store does not say.
        algorithm: The checksum that it was begun with, or None where the store does not say.
    """

    key: str
    upload_id: str
    started: float | None = None
    algorithm: str | None = None
