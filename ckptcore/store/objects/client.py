"""Send requests to S3 through botocore, with the options of s3fs.

s3fs supplies credentials, endpoint and options by its own conventions (`session`). A request is sent by the
thread that asks, or by one of `RequestThreads`. A body is received into the caller's buffer. A response that
ends early is continued behind the last byte that arrived, of the same version of the object.

Threads send requests, so that several are under way at once. A thread is started when all others are at work,
and stays for the next request. They end with the process, which waits for none of them. A request whose
future was cancelled, or whose work has failed (`ckptcore.utils.workers.failed`), ends when it looks at that
next.
"""

from __future__ import annotations

import copy
import hashlib
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from ckptcore.errors import AlteredInTransit, CkptError, SourceChanged, SourceUnreadable, UsageError
from ckptcore.redaction import bare_url
from ckptcore.store import Buffer
from ckptcore.store.objects import (
    MAX_REQUEST_BYTES,
    Checksum,
    KeysBelow,
    ObjectSeen,
    OpenUpload,
    UploadedPart,
)
from ckptcore.store.objects.checksums import ALGORITHMS, checksum_of, kept_checksums
from ckptcore.store.objects.retry import Kind, ShortBody, kind_of, never, with_retries
from ckptcore.store.objects.s3_options import open_file_system
from ckptcore.store.objects.session import PartBody, S3Session
from ckptcore.utils.foreign_text import is_number
from ckptcore.utils.workers import failed

GivenUp = Callable[[], bool]
_AT_ONCE = 16  # calls of `RequestThreads.each`, which may themselves wait for other threads of it


class RequestThreads:
    """Up to ``most`` threads; further requests wait for one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begin()
        # A forked process has none of the threads, and may have copied a lock that is taken.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock, self._idle, self._count = threading.Lock(), threading.Semaphore(0), 0

    def start(self, call: Callable[[GivenUp], T]) -> Future[T]:
        """Run a call in a thread, and return at once.

        Args:
            call: What to do; its argument returns whether nobody waits for it any more.
        """
        future: Future[T] = Future()
        # The call asks whether its work has failed, which is in a context variable.
        context = copy_context()
        self._queue.put(lambda: context.run(_settle, future, call))
        # A thread that waits takes the job, and no other is started.
        if self._idle.acquire(blocking=False):
            return future
        with self._lock:
            if self._count < self._most:
                self._count += 1
                name = f"ckptcore-request-{self._count}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def each(self, call: Callable[[K], T], items: Iterable[K]) -> list[T]:
        """Call a function with each item, several at once; see `S3Client.each`."""
        answers, flying = list[T](), deque[Future[T]]()
        try:
            for item in items:
                if len(flying) == _AT_ONCE:
                    # The oldest first: answers are in the order of the items.
                    answers.append(flying.popleft().result())
                flying.append(self.start(partial(_ignoring, call, item)))
            while flying:
                answers.append(flying.popleft().result())
        finally:
            # Calls that have begun may still use the caller's buffers.
            wait(flying)
        return answers

    def _work(self) -> None:
        waiting = self._queue
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                # Before it waits: `start` begins no other thread then.
                self._idle.release()
                job = waiting.get()
            job()
            del job  # the next one may be long in coming: nothing is kept alive meanwhile


def _ignoring(call: Callable[[K], T], item: K, given_up: GivenUp) -> T:
    return call(item)


def _settle(future: Future[Any], call: Callable[[GivenUp], Any]) -> None:
    if future.cancelled():
        return
    try:
        # Work that failed elsewhere needs no more requests.
        answer = call(lambda: future.cancelled() or failed())
    except BaseException as error:  # whoever waits for it raises it
        with suppress(InvalidStateError):  # cancelled meanwhile
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(answer)


K = TypeVar("K")
T = TypeVar("T")
_SMOOTH = 0.2  # weight of the latest answer
_PUTS = 4  # of a small object that arrives altered
_MD5_HEX = 32
_RECEIVED = 1 << 20  # bytes asked of a body at a time
_THREADS = RequestThreads(64)
_SECRETS = ("key", "secret", "token", "username", "password")


class S3Client:
    """Requests to one bucket. Safe to use from several threads.

    Each method sends one request, repeats it after momentary failures until the deadline, and then raises
    `StorageTrouble`. Final answers raise at once: `SourceUnreadable` or `DestinationUnwritable`. The answer's
    kind is in ``error.values["kind"]`` (`ckptcore.store.objects.retry.Kind`), and
    ``error.values["attempts"]`` counts the requests: with more than one, an earlier reply may have been lost.

    Attributes:
        url: The bucket's URL, without credentials.
        bucket: Its name.
        requests: How many requests were sent, by the name of S3's operation.
        answer_s: How long the store takes until an answer begins, seconds: a moving average of reads.
        file_system: That of s3fs, or its options alone; the same for equal options.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Prepare requests; nothing is sent yet.

        Args:
            url: The bucket, or anything in it.
            options: What s3fs takes (``key``, ``profile``, ``endpoint_url``, ``client_kwargs``, ...), beside
                its own environment variables and those that start with ``FSSPEC_S3_``.

        Raises:
            UsageError: The URL or an option is wrong.
        """
        self.file_system, root = open_file_system(url, options or {})
        self.bucket = root.strip("/").partition("/")[0]
        if not self.bucket:
            raise UsageError(f"cannot open {bare_url(url)}: it names no bucket")
        self.url = f"s3://{self.bucket}"
        self.requests: Counter[str] = Counter()
        self.answer_s = 0.0
        self._md5: bool | None = None  # whether ETags are the MD5 of what was put, once that is known
        self._given_up: GivenUp = never
        self._lock = threading.Lock()
        self._session = S3Session(self.file_system)
        all_options = self.file_system.storage_options
        all_options = {**all_options, **all_options.get("client_kwargs", {})}
        names = (*_SECRETS, "aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        self._secrets = tuple(str(all_options[name]) for name in names if all_options.get(name))

    def unless(self, given_up: GivenUp) -> S3Client:
        """Return this client for requests that are not repeated once ``given_up()``."""
        # A shallow copy shares connections, counters and threads.
        client = copy.copy(self)
        client._given_up = given_up
        return client

    def list(self, prefix: str) -> Iterator[ObjectSeen]:
        """Yield every object whose key starts with ``prefix``, in the store's order, page by page."""
        for page in self._objects(prefix):
            for row in page.get("Contents", ()):
                yield listed(row)

    def below(self, prefix: str) -> KeysBelow:
        """Return what is directly below a prefix that ends with a slash, or is empty."""
        objects, prefixes = list[ObjectSeen](), list[str]()
        for page in self._objects(prefix, Delimiter="/"):
            objects += map(listed, page.get("Contents", ()))
            prefixes += [row["Prefix"] for row in page.get("CommonPrefixes", ())]
        return KeysBelow(tuple(objects), tuple(prefixes))

    def head(self, key: str) -> ObjectSeen | None:
        """Return one object with its metadata and checksums, or None."""
        try:
            answer = self.ask("head_object", key, Key=key, ChecksumMode="ENABLED")
        except CkptError as error:
            if kind_of(error) is Kind.MISSING:
                return None
            raise
        when = answer.get("LastModified")
        return ObjectSeen(
            key,
            int(answer.get("ContentLength") or 0),
            answer.get("ETag") or "",
            answer.get("Metadata") or {},
            kept_checksums(answer),
            when.timestamp() if when is not None else None,
        )

    def get(self, key: str, start: int, etag: str | None, into: Buffer) -> ObjectSeen:
        """Fill ``into`` with bytes of an object, from ``start``.

        The ETag and the length of every response are compared, also where the store ignores conditions.

        Returns:
            The object, with its complete size.

        Raises:
            SourceChanged: The object's ETag is not ``etag``, or changed on the way.
        """
        return self._repeat(_Body(self, key, start, etag, into).attempt, key)

    def start_get(self, key: str, start: int, etag: str | None, into: Buffer) -> Future[ObjectSeen]:
        """Begin a `get`, and return without waiting for it."""

        def work(given_up: GivenUp) -> ObjectSeen:
            body = _Body(self, key, start, etag, into, given_up=given_up)
            return self._repeat(body.attempt, key, given_up=given_up)

        return _THREADS.start(work)

    def get_all(self, key: str, etag: str | None, into: Buffer) -> ObjectSeen:
        """Fill ``into`` with a complete object of that size, like `get`; return its checksums, too."""
        return self._repeat(_Body(self, key, 0, etag, into, complete=True).attempt, key)

    def fetch(self, key: str, most: int = MAX_REQUEST_BYTES) -> bytes | None:
        """Return all bytes of a small object, of one version, or None if there is no such object.

        They are proven: by a checksum of the store, by the ETag, or by a second response.

        Raises:
            SourceUnreadable: It has more than ``most`` bytes (kind INVALID).
        """

        def receive_once() -> tuple[bytes, bool]:  # and whether they are proven
            answer = self._send("get_object", {"Key": key, "ChecksumMode": "ENABLED"})
            nbytes = int(answer.get("ContentLength") or 0)
            if nbytes > most:
                # The connection is given up: the rest of the body would have to be received first.
                answer["Body"].close()
            require_small(self._name(key), nbytes, most)
            data = bytearray(nbytes)
            filled = sum(_pieces(answer["Body"], memoryview(data), never))
            if filled < len(data):
                raise ShortBody(f"the response ended {len(data) - filled} of {len(data)} bytes early")
            content, checksums, etag = bytes(data), kept_checksums(answer), answer.get("ETag") or ""
            if checksums and checksum_of(checksums[0].algorithm, content) != checksums[0]:
                raise ShortBody(f"the response does not match the {checksums[0].algorithm} of the object")
            # Without a checksum and an ETag that proves it, only a second answer can.
            proven = bool(checksums) or not content or _is_md5(etag, content)
            if not proven and self._md5 and len(etag.strip('"')) == _MD5_HEX and not _is_encrypted(answer):
                raise ShortBody("the response does not match the ETag of the object")
            return content, proven

        def attempt() -> bytes:
            data, proven = receive_once()
            if proven:
                return data
            second, proven = receive_once()
            if proven or second == data:
                return second
            raise ShortBody("two responses have different bytes")

        try:
            return self._repeat(attempt, key)
        except CkptError as error:
            if kind_of(error) is Kind.MISSING:
                return None
            raise

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
        asked = {
            "Key": key,
            "Body": _sendable(data),
            **_conditions(create, match),
            **_checked(data, checksum),
        }
        if metadata:
            asked["Metadata"] = dict(metadata)
        for _ in range(_PUTS):
            answer = self.ask("put_object", key, writing=True, create=create, **asked)
            etag: str = answer.get("ETag") or ""
            if self._has(key, etag, data):
                return etag
            # What was just written is replaced, and nothing else.
            # With the ETag of what arrived altered: another writer's object in between stays.
            create, asked = False, {**{k: v for k, v in asked.items() if k != "IfNoneMatch"}, "IfMatch": etag}
        raise self._altered(key, etag)

    def _altered(self, key: str, etag: str) -> AlteredInTransit:
        """Remove an object that arrived altered, which the next run would take for what it says."""
        message = f"cannot write {self._name(key)}: {_PUTS} times the store got other bytes"
        try:
            self.delete(key, match=etag)
        except CkptError as error:
            hint = f"remove {self._name(key)}, and run the same command again ({error.message})"
            return AlteredInTransit(message, hint=hint)
        return AlteredInTransit(message)

    def _has(self, key: str, etag: str, data: Buffer | bytes) -> bool:
        """Report whether the store has the bytes that were sent: some stores compare no checksum.

        The ETag of a plain object is its MD5. Where it is not, and the object reads back as it was sent, this
        store's ETags prove nothing, and are not looked at again.
        """
        # An ETag of another form, or of a store whose ETags are no MD5, proves nothing.
        if self._md5 is False or len(etag.strip('"')) != _MD5_HEX or not data:
            return True
        if _is_md5(etag, data):
            self._md5 = True
            return True
        # It is read back once per client: this decides how the store's ETags are to be taken.
        back = bytearray(len(data))
        try:
            self.get(key, 0, etag, memoryview(back))
        except (SourceChanged, SourceUnreadable):  # another writer was faster, or reading is not permitted
            return True
        if bytes(back) != bytes(data):
            return False
        self._md5 = False
        return True

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
        asked: dict[str, Any] = {"CopySource": {"Bucket": bucket or self.bucket, "Key": key}, "Key": target}
        # Conditions on the target: S3 knows them since October 2025, and older botocores do not send them.
        asked |= _conditions(create, replaces)
        if match:
            asked["CopySourceIfMatch"] = match
        answer = self.ask("copy_object", target, writing=True, **asked)
        return (answer.get("CopyObjectResult") or {}).get("ETag") or ""

    def delete(self, key: str, *, match: str | None = None) -> None:
        """Delete an object, only if it has the ETag ``match``; a missing one is no error."""
        try:
            self.ask("delete_object", key, writing=True, Key=key, **_conditions(False, match))
        except CkptError as error:
            if kind_of(error) is not Kind.MISSING:
                raise

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Begin a call that sends requests, and return without waiting for it."""
        return _THREADS.start(lambda _: call())

    def each(self, call: Callable[[K], T], items: Iterable[K]) -> Sequence[T]:
        """Call a function that sends requests with each item, several at once.

        After an error no further call begins; it is raised when those that have begun have ended.

        Returns:
            What the calls return, in the order of the items.
        """
        return _THREADS.each(call, items)

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
        asked: dict[str, Any] = {"Key": key}
        if metadata:
            asked["Metadata"] = dict(metadata)
        if algorithm:
            checksum_algorithm = ALGORITHMS[algorithm]
            asked["ChecksumAlgorithm"] = checksum_algorithm.name
            # CRCs of parts add up to that of the object; digests do not.
            asked["ChecksumType"] = "FULL_OBJECT" if checksum_algorithm.combine is not None else "COMPOSITE"
        sent = 0

        def attempt() -> str:
            nonlocal sent
            sent += 1
            if sent > 1 and on_repeat is not None:
                on_repeat()
            upload_id: str = self._send("create_multipart_upload", asked)["UploadId"]
            return upload_id

        return self._repeat(attempt, key, writing=True)

    def start_part(
        self, key: str, upload_id: str, number: int, data: Buffer | bytes, checksum: Checksum
    ) -> Future[UploadedPart]:
        """Begin to upload one part; any process may, in any order.

        ``data`` must stay as it is until the answer comes. The checksum is as for `put`.
        """
        asked = {"Key": key, "UploadId": upload_id, "PartNumber": number, **_checked(data, checksum)}

        def work(given_up: GivenUp) -> UploadedPart:
            def attempt() -> UploadedPart:
                answer = self._send("upload_part", {**asked, "Body": PartBody(data, given_up)})
                return UploadedPart(number, answer.get("ETag") or "", len(data), checksum)

            return self._repeat(attempt, key, writing=True, given_up=given_up)

        return _THREADS.start(work)

    def list_parts(self, key: str, upload_id: str) -> Iterator[UploadedPart]:
        """Yield the parts that were uploaded, in order."""
        # `writing`: only a destination has uploads, and an error is about that.
        asked = {"writing": True, "Key": key, "UploadId": upload_id}
        for page in self.pages("list_parts", key, {"PartNumberMarker": "NextPartNumberMarker"}, **asked):
            for row in page.get("Parts", ()):
                checksums = kept_checksums(row)
                checksum = checksums[0] if checksums else None
                number, etag = int(row["PartNumber"]), row.get("ETag") or ""
                yield UploadedPart(number, etag, int(row["Size"]), checksum)

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
        rows = []
        # S3 refuses parts that are not in ascending order.
        for part in sorted(parts, key=lambda uploaded_part: uploaded_part.number):
            row: dict[str, Any] = {"PartNumber": part.number, "ETag": part.etag}
            if part.checksum is not None:
                row[ALGORITHMS[part.checksum.algorithm].field] = part.checksum.value
            rows.append(row)
        asked = {"Key": key, "UploadId": upload_id, "MultipartUpload": {"Parts": rows}}
        asked |= _conditions(create, match)
        if checksum is not None:
            asked[ALGORITHMS[checksum.algorithm].field] = checksum.value
            asked["ChecksumType"] = "FULL_OBJECT"
        answer = self.ask("complete_multipart_upload", key, writing=True, create=create, **asked)
        return answer.get("ETag") or ""

    def abort(self, key: str, upload_id: str) -> None:
        """End an upload and free its parts; one that has ended is no error."""
        try:
            self.ask("abort_multipart_upload", key, writing=True, Key=key, UploadId=upload_id)
        except CkptError as error:
            if kind_of(error) not in (Kind.NO_UPLOAD, Kind.MISSING):
                raise

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Yield the uploads below a prefix that are neither completed nor aborted."""
        marks = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        asked = {"writing": True, "Prefix": prefix, "EncodingType": "url"}
        for page in self.pages("list_multipart_uploads", prefix, marks, **asked):
            for row in page.get("Uploads", ()):
                if row["Key"].startswith(prefix):  # some stores ignore it
                    when = row.get("Initiated")
                    started = when.timestamp() if when is not None else None
                    yield OpenUpload(row["Key"], row["UploadId"], started, row.get("ChecksumAlgorithm"))

    def answered(self, seconds: float) -> None:
        """Count the time until an answer began."""
        # The first answer counts completely: there is no average yet.
        self.answer_s += (seconds - self.answer_s) * (_SMOOTH if self.answer_s else 1.0)

    def _objects(self, prefix: str, **asked: Any) -> Iterator[dict[str, Any]]:
        marks = {"ContinuationToken": "NextContinuationToken"}
        return self.pages("list_objects_v2", prefix, marks, Prefix=prefix, **asked)

    def pages(
        self, method: str, key: str, marks: Mapping[str, str], **asked: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the pages of a list.

        Args:
            method: As for `ask`.
            key: What the list is of, for messages.
            marks: Parameter of the next request -> key of its value in the answer. A first one that is
                missing ends the list.
            asked: Parameters of every request, and `ask`'s own.
        """
        while True:
            page = self.ask(method, key, **asked)
            yield page
            after = {parameter: page.get(name) or "" for parameter, name in marks.items()}
            if not page.get("IsTruncated") or not next(iter(after.values())):
                return
            asked |= after

    def ask(
        self, method: str, key: str, *, writing: bool = False, create: bool = False, **asked: Any
    ) -> dict[str, Any]:
        """Send one request by the name of botocore's method, and repeat it; return the answer."""
        return self._repeat(lambda: self._send(method, asked), key, writing=writing, create=create)

    def _repeat(
        self,
        attempt: Callable[[], T],
        key: str,
        *,
        writing: bool = False,
        create: bool = False,
        given_up: GivenUp | None = None,
    ) -> T:
        """Send a request, and repeat it, in this thread."""
        return with_retries(
            attempt,
            self._name(key),
            writing=writing,
            create=create,
            secrets=self._secrets,
            given_up=given_up or self._given_up,
        )

    def _send(self, method: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.requests[method] += 1
        return self._session.ask(method, {"Bucket": self.bucket, **asked})

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"


class _Body:
    """The bytes of one range, over all attempts to get them."""

    def __init__(
        self,
        client: S3Client,
        key: str,
        start: int,
        etag: str | None,
        into: Buffer,
        *,
        complete: bool = False,
        given_up: GivenUp = never,
    ) -> None:
        self._client, self._key, self._start, self._into = client, key, start, into
        self._complete, self._given_up = complete, given_up
        self._etag, self._filled = etag, 0
        self._kept: tuple[Checksum, ...] = ()

    def attempt(self) -> ObjectSeen:
        """Receive what is still missing."""
        first, last = self._start + self._filled, self._start + len(self._into) - 1
        asked: dict[str, Any] = {"Key": self._key}
        # The store's checksum is of the complete object: a range cannot be compared with it.
        if not self._complete or first:
            asked["Range"] = f"bytes={first}-{last}"
        else:
            asked["ChecksumMode"] = "ENABLED"
        if self._etag:
            asked["IfMatch"] = self._etag
        asked_at = time.perf_counter()
        answer = self._client._send("get_object", asked)
        self._client.answered(time.perf_counter() - asked_at)
        try:
            s3_object = self._checked(answer, first, last)
        except BaseException:
            answer["Body"].close()  # what is left on this connection belongs to no other request
            raise
        for count in _pieces(answer["Body"], self._into[self._filled :], self._given_up):
            self._filled += count
        left = len(self._into) - self._filled
        if left:
            raise ShortBody(f"the response ended {left} of {len(self._into)} bytes early")
        return s3_object

    def _checked(self, answer: Mapping[str, Any], first: int, last: int) -> ObjectSeen:
        """Return the object of a response, if it is the range and the version that was asked for."""
        name, length = self._client._name(self._key), int(answer.get("ContentLength") or 0)
        etag = answer.get("ETag") or ""
        if self._etag and etag and etag.strip('"') != self._etag.strip('"'):
            raise SourceChanged(
                f"{name} was replaced while it was being read (was ETag {self._etag}, got {etag})",
                hint="the source is being written; run again when writing has ended",
                kind=Kind.CHANGED.value,
            )
        self._etag = self._etag or etag or None  # what follows must be of the same version
        place, _, total = (answer.get("ContentRange") or "").removeprefix("bytes ").partition("/")
        range_nbytes = last - first + 1
        # Some stores answer a range with status 200 and without its place; then its length is compared.
        if length != range_nbytes or (place and place != f"{first}-{last}"):
            got = f"{length} bytes" + (f", range {place}" if place else "")
            raise SourceUnreadable(
                f"{name} ends early or its store ignores ranges: {range_nbytes} bytes needed at "
                f"offset {first} (got {got})",
                kind=Kind.RANGE.value,
            )
        if first == 0 and not place:
            self._kept = kept_checksums(answer)
        nbytes = int(total) if is_number(total) else first + length
        return ObjectSeen(self._key, nbytes, etag, checksums=self._kept)


def _pieces(body: Any, into: Buffer, given_up: GivenUp) -> Iterator[int]:
    """Receive a body piece by piece, and yield how many bytes each has."""
    try:
        while len(into) and not given_up():
            # In pieces, so that a request nobody waits for ends soon.
            count: int = body.readinto(into[:_RECEIVED])
            if not count:
                break
            yield count
            into = into[count:]
    finally:
        body.close()  # a body that was received to its end has returned its connection to the pool


def _is_md5(etag: str, data: Buffer | bytes) -> bool:
    return etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()


def _is_encrypted(answer: Mapping[str, Any]) -> bool:
    """Report whether an object is encrypted so that its ETag is not its MD5."""
    return "kms" in (answer.get("ServerSideEncryption") or "") or bool(answer.get("SSECustomerAlgorithm"))


def require_small(url: str, nbytes: int, most: int) -> None:
    """Raise `SourceUnreadable` for an object that is larger than anything that is written there."""
    if nbytes > most:
        raise SourceUnreadable(
            f"cannot read {url}: it must have at most {most} bytes (got {nbytes})",
            hint="no conversion writes such an object: inspect it, and move it away",
            kind=Kind.INVALID.value,
        )


def listed(row: Mapping[str, Any]) -> ObjectSeen:
    """Return the object of a row of a listing."""
    when = row.get("LastModified")
    return ObjectSeen(
        row["Key"],
        int(row.get("Size") or 0),
        row.get("ETag") or "",
        modified=when.timestamp() if when is not None else None,
    )


def _conditions(create: bool, match: str | None) -> dict[str, Any]:
    if create:
        return {"IfNoneMatch": "*"}
    return {"IfMatch": match} if match else {}


def _checked(data: Buffer | bytes, checksum: Checksum | None) -> dict[str, Any]:
    sent = checksum or checksum_of("CRC32", data)
    return {ALGORITHMS[sent.algorithm].field: sent.value}


def _sendable(data: Buffer | bytes) -> bytes | bytearray:
    """Return bytes as botocore takes them, which is no view: without a copy if it is of all of an array."""
    if isinstance(data, bytes | bytearray):
        return data
    # botocore would copy a view; the array below it is the same bytes.
    array = data.obj
    if isinstance(array, bytes | bytearray) and len(array) == data.nbytes and data.contiguous:
        return array
    return bytes(data)
