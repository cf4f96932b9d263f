"""Send requests to an S3 object store: the one seam for reading, uploading, publishing and cleaning up.

`client` sends requests (through botocore, with the options of s3fs), `retry` repeats those that failed for a
moment and turns the others into errors of ckptcore, `checksums` computes the checksums that a store can keep.

Keys are complete: they start behind the bucket. ETags are texts as the store sends them, with their quotes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ckptcore.store import Buffer
from ckptcore.store.file_status import NO_VERSION, FileStatus, NameKind

K = TypeVar("K")
T = TypeVar("T")
PART_LIMIT = 10_000  # parts of one upload, on S3 and its relatives
IN_ONE = 1 << 30  # most bytes of an object that is written in one request, or fetched; S3 takes 5 GiB
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
        metadata: What the writer stored beside it; only `ObjectClient.head` asks for it.
        checksums: Those of its complete bytes that the store keeps; only `ObjectClient.head` asks for them.
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


class ObjectClient(Protocol):
    """Requests to one bucket. Safe to use from several threads.

    Each method sends one request, repeats it after momentary failures until the deadline, and then raises
    `StorageTrouble`. Final answers raise at once: `SourceUnreadable` or `DestinationUnwritable`. The answer's
    kind is in ``error.values["kind"]`` (`ckptcore.store.objects.retry.Kind`), and
    ``error.values["attempts"]`` counts the requests: with more than one, an earlier reply may have been lost.

    Attributes:
        url: The bucket's URL, without credentials.
        answer_s: How long the store takes until an answer begins, seconds: a moving average of reads.
    """

    url: str
    answer_s: float

    def list(self, prefix: str) -> Iterator[ObjectSeen]:
        """Yield every object whose key starts with ``prefix``, in the store's order, page by page."""

    def below(self, prefix: str) -> KeysBelow:
        """Return what is directly below a prefix that ends with a slash, or is empty."""

    def head(self, key: str) -> ObjectSeen | None:
        """Return one object with its metadata and checksums, or None."""

    def get(self, key: str, start: int, etag: str | None, into: Buffer) -> ObjectSeen:
        """Fill ``into`` with bytes of an object, from ``start``.

        The ETag and the length of every response are compared, also where the store ignores conditions.

        Returns:
            The object, with its complete size.

        Raises:
            SourceChanged: The object's ETag is not ``etag``, or changed on the way.
        """

    def get_all(self, key: str, etag: str | None, into: Buffer) -> ObjectSeen:
        """Fill ``into`` with a complete object of that size, like `get`; return its checksums, too."""

    def start_get(self, key: str, start: int, etag: str | None, into: Buffer) -> Future[ObjectSeen]:
        """Begin a `get`, and return without waiting for it."""

    def fetch(self, key: str, most: int = IN_ONE) -> bytes | None:
        """Return all bytes of a small object, of one version, or None if there is no such object.

        Raises:
            SourceUnreadable: It has more than ``most`` bytes (kind INVALID).
        """

    def put(
        self,
        key: str,
        data: Buffer | bytes,
        *,
        create: bool = False,
        match: str | None = None,
        metadata: Mapping[str, str] | None = None,
        checksum: Checksum | None = None,
    ) -> str:
        """Write a small object in one request, and return its ETag.

        Args:
            key: Its key.
            data: Its bytes.
            create: Refuse to replace an object (kind EXISTS).
            match: Replace only the object with this ETag (kind CHANGED).
            metadata: Stored beside it.
            checksum: Compared by the store; None to compute a CRC-32.
        """

    def copy(
        self,
        key: str,
        target: str,
        *,
        match: str | None = None,
        bucket: str | None = None,
        create: bool = False,
        replaces: str | None = None,
    ) -> str:
        """Copy an object on the server, to a key of this bucket.

        Args:
            key: The object to copy.
            target: Where the copy goes.
            match: Copy only the object with this ETag, where the store knows that condition.
            bucket: The bucket of the object to copy; None for this one.
            create: Refuse to replace an object (kind CHANGED), where the store knows that condition.
            replaces: Replace only the object with this ETag, where the store knows that condition.

        Returns:
            The ETag of the copy; "" where the store does not say it.
        """

    def delete(self, key: str, *, match: str | None = None) -> None:
        """Delete an object, only if it has the ETag ``match``; a missing one is no error."""

    def unless(self, given_up: Callable[[], bool]) -> ObjectClient:
        """Return this client for requests that are not repeated once ``given_up()``."""

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Begin a call that sends requests, and return without waiting for it."""

    def each(self, call: Callable[[K], T], items: Iterable[K]) -> Sequence[T]:
        """Call a function that sends requests with each item, several at once.

        After an error no further call begins; it is raised when those that have begun have ended.

        Returns:
            What the calls return, in the order of the items.
        """

    def begin(
        self,
        key: str,
        metadata: Mapping[str, str] | None = None,
        *,
        algorithm: str | None = "CRC32",
        on_repeat: Callable[[], object] | None = None,
    ) -> str:
        """Begin an upload in parts, and return its id.

        Args:
            key: The key it will appear under.
            metadata: Stored beside it.
            algorithm: The checksum of each part, combined to that of the object; None for none.
            on_repeat: Called before the request is sent again: an upload whose id was lost may be open then.
        """

    def upload_part(
        self, key: str, upload_id: str, number: int, data: Buffer | bytes, checksum: Checksum | None = None
    ) -> UploadedPart:
        """Upload one part; any process may, in any order. The checksum is as for `put`."""

    def start_part(
        self, key: str, upload_id: str, number: int, data: Buffer | bytes, checksum: Checksum | None = None
    ) -> Future[UploadedPart]:
        """Begin an `upload_part`, and return without waiting; ``data`` must stay as it is until it ends."""

    def list_parts(self, key: str, upload_id: str) -> Iterator[UploadedPart]:
        """Yield the parts that were uploaded, in order."""

    def complete(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[UploadedPart],
        *,
        create: bool = False,
        match: str | None = None,
        checksum: Checksum | None = None,
    ) -> str:
        """Make an upload the object, and return the ETag of the answer, which some stores leave empty.

        Args:
            key: Its key.
            upload_id: Its id; one that has ended is kind NO_UPLOAD.
            parts: All of its parts.
            create: Refuse to replace an object (kind EXISTS), where the store knows that condition.
            match: Replace only the object with this ETag (kind CHANGED).
            checksum: That of the complete object, compared by the store.
        """

    def abort(self, key: str, upload_id: str) -> None:
        """End an upload and free its parts; one that has ended is no error."""

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Yield the uploads below a prefix that are neither completed nor aborted."""
