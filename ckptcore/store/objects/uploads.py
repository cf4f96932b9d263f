"""Upload the files of a plan to the keys where they are published, part by part, and complete them later.

Nothing that is uploaded can be seen before `Uploads.complete`. Any worker uploads any parts in any order; a
part that the store has already, with the same checksum, is not sent again. Every part is sent with its
CRC-32, and the store is asked for that of the complete object where it keeps one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from blake3 import blake3

from ckptcore.errors import (
    CkptError,
    DestinationExists,
    OutputMismatch,
    SourceChanged,
    SourceUnreadable,
    StorageTrouble,
)
from ckptcore.store import Buffer, FileWriter
from ckptcore.store.objects import Checksum, ObjectSeen, UploadedPart
from ckptcore.store.objects.checksums import ALGORITHMS
from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.journal import TOKEN, UploadEntry, UploadJournal
from ckptcore.store.objects.part_plan import PartPlan, plan_parts
from ckptcore.store.objects.pinned import first_page
from ckptcore.store.objects.retry import Kind, kind_of
from ckptcore.store.objects.uploaded import Uploaded, require_checksum
from ckptcore.utils.crc32 import crc32
from ckptcore.utils.memory import untouched

_TRIES = 4
_CONDITIONS = (Kind.EXISTS, Kind.CHANGED, Kind.MISSING, Kind.UNSUPPORTED)  # what a condition may lead to
_CRC32 = ALGORITHMS["CRC32"]


@dataclass(frozen=True, slots=True)
class AtKey:
    """What was found at a key: an object, or none."""

    s3_object: ObjectSeen | None


class PartBuffers:
    """Buffers of parts for all writers of a run.

    Args:
        count: How many may be in use. A writer without any gets one beyond that: it could wait for ever.
    """

    def __init__(self, count: int) -> None:
        self._lock, self._left = threading.Lock(), count
        self._free: list[Buffer] = []

    def take(self, nbytes: int, *, must: bool) -> Buffer | None:
        """Return a buffer of at least ``nbytes``; None when all are in use, unless ``must``."""
        with self._lock:
            # A writer with nothing on its way cannot wait for a buffer to come
            # back: only its own parts would return one.
            if self._left <= 0 and not must:
                return None
            self._left -= 1
            index = next((n for n, b in enumerate(self._free) if len(b) >= nbytes), None)
            if index is not None:
                return self._free.pop(index)
            if self._free:  # too short for this file: it makes room
                self._free.pop()
        return untouched(nbytes)

    def add(self, count: int) -> None:
        """Allow so many more buffers."""
        with self._lock:
            self._left += count

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer."""
        with self._lock:
            self._left += 1
            # More buffers than are allowed are not kept.
            if self._left > len(self._free):
                self._free.append(buffer)


@dataclass(slots=True)
class _Flight:
    """A part on its way, and its buffer, which is given back once."""

    buffers: PartBuffers
    buffer: Buffer
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_returned: bool = False

    def land(self) -> None:
        with self.lock:
            if self.is_returned:
                return
            self.is_returned = True
        self.buffers.give_back(self.buffer)


class PartLine:
    """Parts on their way: of one writer, or of several that share the line. Safe for threads.

    Args:
        client: The store.
        buffers: Where parts are collected.
        in_flight: Parts on their way at once.
    """

    def __init__(self, client: S3Client, buffers: PartBuffers, in_flight: int) -> None:
        self.buffers, self._client, self._in_flight = buffers, client, max(in_flight, 1)
        self._lock = threading.Lock()
        self._flying: deque[tuple[Future[UploadedPart], _Flight]] = deque()

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer; wait for parts on their way when all are in use."""
        while (buffer := self.buffers.take(nbytes, must=False)) is None:
            if not self._land():
                buffer = self.buffers.take(nbytes, must=True)
                assert buffer is not None  # it must
                break
        return buffer

    def send(
        self, entry: UploadEntry, number: int, buffer: Buffer, nbytes: int, checksum: Checksum
    ) -> Future[UploadedPart]:
        """Begin to upload a full part; wait for older ones when too many are on their way."""
        while True:
            with self._lock:
                # A part that failed stays: `_land` raises its error.
                while self._flying and _succeeded(self._flying[0][0]):
                    self._flying.popleft()[1].land()
                busy = sum(not future.done() for future, _ in self._flying)
            if busy < self._in_flight or not self._land():
                break
        data, flight = buffer[:nbytes], _Flight(self.buffers, buffer)
        future = self._client.start_part(entry.key, entry.upload_id, number, data, checksum)
        future.add_done_callback(lambda _: flight.land())
        with self._lock:
            self._flying.append((future, flight))
        return future

    def cancel(self, futures: Collection[Future[UploadedPart]]) -> None:
        """Give up parts that are on their way, and whose file is not written to its end."""
        for future in futures:
            future.cancel()
        for future in futures:
            with suppress(Exception):  # the run ends with the error that came first
                future.result()
        with self._lock:
            self._flying = deque(flying for flying in self._flying if flying[0] not in futures)

    def _land(self) -> bool:
        """Wait for the oldest part on its way, if any; raises its error."""
        with self._lock:
            if not self._flying:
                return False
            future, flight = self._flying.popleft()
        future.result()
        flight.land()
        return True


@dataclass(slots=True)
class _OpenPart:
    """A part that is not full: its buffer, and how many bytes are missing."""

    buffer: Buffer
    nbytes: int
    left: int


class UploadWriter(FileWriter):
    """Uploads one file, or some of its parts: each is sent when its last byte has come. Safe for threads.

    Args:
        line: Where its parts are sent.
        entry: The upload.
        present: Parts that the store has, by number.
        begin: First byte, at the beginning of a part.
        end: Behind the last byte; None for the end of the file.
        sequential: Bytes come in file order, so that one part is open at a time. In any other order parts
            that are begun and not full stay in memory, and the caller has counted them (`PartBuffers.add`).
    """

    def __init__(
        self,
        line: PartLine,
        entry: UploadEntry,
        present: Mapping[int, UploadedPart],
        *,
        begin: int,
        end: int | None,
        sequential: bool,
    ) -> None:
        self._line, self._entry, self._present, self.sequential = line, entry, present, sequential
        self._plan = PartPlan(entry.nbytes, entry.part)
        end = entry.nbytes if end is None else end
        self._nbytes = end - begin
        last = self._plan.count if end == entry.nbytes else self._plan.number_at(end) - 1
        self._numbers = range(self._plan.number_at(begin), last + 1)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._open: dict[int, _OpenPart] = {}
        self._digests: dict[int, tuple[str, int]] = {}  # number -> (BLAKE3, CRC-32)
        self._sent: dict[int, Future[UploadedPart]] = {}
        self._etags: dict[int, str] = {}
        self._uploaded: Uploaded | None = None

    @property
    def part_size(self) -> int | None:
        """Return the bytes of a part."""
        return self._plan.part

    @property
    def uploaded(self) -> Uploaded | None:
        """Return the upload after `commit`."""
        return self._uploaded

    def write(self, offset: int, data: Buffer | bytes) -> None:
        """Add bytes at their place. Each byte comes once."""
        view = memoryview(data).cast("B")
        while view:
            number = self._plan.number_at(offset)
            begin, end = self._plan.bounds(number)
            now = view[: end - offset]
            part = self._part(number, end - begin)
            part.buffer[offset - begin : offset - begin + len(now)] = now
            with self._lock:
                part.left -= len(now)
                full = not part.left
                if full:
                    del self._open[number]
            if full:
                self._send(number, part)
            offset, view = offset + len(now), view[len(now) :]

    def commit(self) -> None:
        """Wait until the store has every part. The object is not complete yet: see `Uploads.complete`."""
        if not self._entry.nbytes:  # an empty object has one empty part
            self._send(1, _OpenPart(self._line.take(0), 0, 0))
        for number, future in self._sent.items():
            self._etags[number] = future.result().etag
        if self._open or self._etags.keys() != set(self._numbers):
            raise OutputMismatch(f"{self._entry.key} was not written to its end")
        self._uploaded = Uploaded(
            self._entry.key,
            self._entry.upload_id,
            self._entry.token,
            self._nbytes,
            self._plan.part,
            tuple(self._etags[n] for n in self._numbers),
            tuple(self._digests[n][1] for n in self._numbers),
            self._entry.started,
            self._numbers.start,
            tuple(self._digests[n][0] for n in self._numbers),
            self._entry.reply_lost,
        )

    def abort(self) -> None:
        """Stop. The upload stays open and in the journal: the next run resumes or aborts it."""
        self._line.cancel(self._sent.values())
        for part in self._open.values():
            self._line.buffers.give_back(part.buffer)
        self._open.clear()

    def _part(self, number: int, nbytes: int) -> _OpenPart:
        with self._lock:
            part = self._open.get(number)
        if part is not None:
            return part
        with self._opening:  # one thread at a time waits for a buffer of this file
            with self._lock:
                part = self._open.get(number)
            if part is None:
                part = _OpenPart(self._line.take(nbytes), nbytes, nbytes)
                with self._lock:
                    self._open[number] = part
            return part

    def _send(self, number: int, part: _OpenPart) -> None:
        data = part.buffer[: part.nbytes]
        crc = crc32(data)
        self._digests[number] = blake3(data).hexdigest(), crc
        stored_part, checksum = self._present.get(number), _CRC32.encoded(crc)
        # By number, size and checksum: the plan and its bytes are the same, and so must be the part.
        if stored_part is not None and stored_part.nbytes == len(data) and stored_part.checksum == checksum:
            self._etags[number] = stored_part.etag
            self._line.buffers.give_back(part.buffer)
        else:
            self._sent[number] = self._line.send(self._entry, number, part.buffer, part.nbytes, checksum)


class Uploads:
    """The uploads of one plan.

    Args:
        client: The store.
        journal: Where they are recorded.
        key_of: Path of a file of the plan -> key of its object.
        plan: Digest of the plan.
        buffers: Part buffers of all writers together.
        in_flight: Parts of one line on their way at once.
        none_begun: Nothing was begun before: the journal was empty when this process took the lease.

    Attributes:
        client: The store.
    """

    def __init__(
        self,
        client: S3Client,
        journal: UploadJournal,
        key_of: Callable[[str], str],
        plan: str,
        *,
        buffers: int = 1,
        in_flight: int = 0,
        none_begun: bool = False,
    ) -> None:
        self._none_begun, self._begun = none_begun, set[int]()
        self._ahead: dict[int, Future[UploadEntry | None]] = {}
        self._under_way: list[Future[UploadEntry | None]] = []
        self._stopped = threading.Event()
        self.client, self._journal, self._key_of, self._plan = client, journal, key_of, plan
        self._buffers, self._in_flight = PartBuffers(buffers), in_flight

    def line(self, open_parts: int = 0) -> PartLine:
        """Return a line; ``open_parts`` are begun and not full at the same time, beside the budget."""
        self._buffers.add(open_parts)
        return PartLine(self.client, self._buffers, self._in_flight)

    def writer(
        self,
        index: int,
        path: str,
        nbytes: int,
        *,
        begin: int = 0,
        end: int | None = None,
        shared: PartLine | None = None,
    ) -> UploadWriter:
        """Start or continue the upload of a file, or of its parts from byte ``begin`` to ``end``.

        shared: The line of several writers, whose bytes come in any order.
        """
        entry, present = self.begun(index, path, nbytes)
        line = self.line() if shared is None else shared
        return UploadWriter(line, entry, present, begin=begin, end=end, sequential=shared is None)

    def begun(self, index: int, path: str, nbytes: int) -> tuple[UploadEntry, dict[int, UploadedPart]]:
        """Start or continue the upload of a file; return it, and the parts that the store has."""
        # Only the first time: a second writer of the file must adopt what the first one began.
        if self._none_begun and index not in self._begun:
            self._begun.add(index)
            ahead = self._ahead.pop(index, None)
            upload = self._upload_of(index, path, nbytes)
            fresh = self._journal.create(upload) if ahead is None else ahead.result()
            if fresh is not None:
                return fresh, {}
        before = self._journal.find(index)
        entry = self._entry(before, index, path, nbytes)
        if before is None or entry.token != before.token:  # begun a moment ago, unless by another worker
            return entry, {}
        present = self._present(entry)
        if present is None:  # completed or aborted meanwhile, or its entry was lost
            left = self._journal.abort(entry)  # also if only the answer was wrong: no upload is left behind
            return self._journal.begin(entry, left), {}
        return entry, present

    def begin_ahead(self, files: Iterable[tuple[int, str, int]]) -> None:
        """Begin uploads, given (index, path, bytes), before anyone writes them; `begun` waits for each."""
        if self._none_begun:
            for index, path, nbytes in files:
                upload = self._upload_of(index, path, nbytes)
                create = partial(self._journal.create, upload, given_up=self._stopped.is_set)
                self._ahead[index] = self.client.start(create)
        self._under_way += self._ahead.values()

    def stop(self) -> None:
        """Begin no further upload ahead, and repeat no request for one, since the run ends with an error.

        Uploads that were begun are in the journal, as after any other end.
        """
        self._stopped.set()

    def wait(self) -> None:
        """Wait until no upload is being begun ahead: its entry must be written under the lease."""
        wait(self._under_way)

    def entry(self, index: int, path: str, nbytes: int) -> UploadEntry:
        """Return the entry of a file's upload, which is begun if there is none."""
        return self._entry(self._journal.find(index), index, path, nbytes)

    def _entry(self, upload_entry: UploadEntry | None, index: int, path: str, nbytes: int) -> UploadEntry:
        """Return a file's entry, given the one that was found."""
        upload = self._upload_of(index, path, nbytes)
        if upload_entry is not None:
            if upload_entry.upload_id and upload.fits(upload_entry):
                return upload_entry
            # Entries of another plan, or of other parts: what they began can never be completed.
            upload_entry = self._journal.abort(upload_entry)
        return self._journal.begin(upload, upload_entry)

    def _upload_of(self, index: int, path: str, nbytes: int) -> UploadEntry:
        part = plan_parts(nbytes, path).part
        return UploadEntry(index, self._key_of(path), "", nbytes, part, self._plan)

    def holds(self, uploaded: Uploaded) -> bool:
        """Report whether the store has exactly these parts, or the object that was completed from them."""
        try:
            stored_parts = list(self.client.list_parts(uploaded.key, uploaded.upload_id))
        except CkptError as error:
            if kind_of(error) is not Kind.NO_UPLOAD:
                raise
            return self.find(uploaded) is not None
        # The store may have parts that an earlier run sent and this one does not need.
        sent_parts = {(p.number, p.nbytes, _bare(p.etag)) for p in uploaded.parts}
        return sent_parts <= {(p.number, p.nbytes, _bare(p.etag)) for p in stored_parts}

    def find(self, uploaded: Uploaded) -> ObjectSeen | None:
        """Return the object that an upload became; None if it is another object, or there is none.

        Raises:
            OutputMismatch: It is this upload's object, but with another size or checksum. It is removed: the
                next run can upload the file again then.
        """
        return self._own(uploaded, self.client.head(uploaded.key))

    def _own(self, uploaded: Uploaded, s3_object: ObjectSeen | None) -> ObjectSeen | None:
        """Return an object if an upload became it; see `find`."""
        if s3_object is None:
            return None
        tokens = {name.casefold(): value for name, value in s3_object.metadata.items()}
        # Names of metadata may come back in another case.
        if tokens.get(TOKEN) != uploaded.token:
            return None
        try:
            require_checksum(s3_object, uploaded)
        except OutputMismatch as error:
            try:
                # With its ETag, so that an object that replaced it since is not removed.
                self.client.delete(uploaded.key, match=s3_object.etag or None)
            except CkptError as second:
                hint = f"remove it, and run the same command again ({second.message})"
                raise OutputMismatch(error.message, hint=hint) from error
            raise
        return s3_object

    def complete(
        self,
        uploaded: Uploaded,
        *,
        create: bool,
        match: str | None = None,
        look: AtKey | None = None,
        page: bool = False,
        beside: Callable[[], object] | None = None,
    ) -> ObjectSeen:
        """Make an upload the object at its key, or find that it is.

        Args:
            uploaded: The upload.
            create: Refuse to replace an object.
            match: Replace only the object with this ETag, where the store knows that condition.
            look: What was at its key a moment ago; None to look.
            page: Its first page is read next: it is asked for while the object is looked at.
            beside: Called whenever the store has answered, at the same time.

        Returns:
            The object.

        Raises:
            DestinationExists: Another object has the key, and ``create`` or ``match`` is set.
            OutputMismatch: The store does not have the bytes that were sent.
            StorageTrouble: The upload was aborted, or the store keeps failing.
        """
        refused: CkptError | None = None
        for _ in range(_TRIES):
            # Asked first: some stores ignore the condition on a Complete, and a killed run may have sent it.
            if refused is None:
                # Only for the first request: after a refusal the loop has looked already.
                object_at_key = self.client.head(uploaded.key) if look is None else look.s3_object
                look = None
                if (own_object := self._own(uploaded, object_at_key)) is not None:
                    return own_object
                if create and object_at_key is not None:
                    raise self._exists(uploaded)
            etag = ""
            try:
                etag = self.client.complete(
                    uploaded.key,
                    uploaded.upload_id,
                    uploaded.parts,
                    create=create and not _unknown(refused),
                    match=None if _unknown(refused) else match,
                    checksum=_CRC32.encoded(uploaded.crc),
                )
                refused = None
            except CkptError as error:
                refused = error
            # Whatever was answered: the reply to an earlier request may be lost, or misleading.
            object_at_key = self._looked_at(uploaded, etag if page else "", beside)
            if (own_object := self._own(uploaded, object_at_key)) is not None:
                return own_object
            # A refusal for any other reason does not go away by asking again.
            if refused is not None and kind_of(refused) not in _CONDITIONS:
                break
            if object_at_key is None:
                # What was to be replaced is gone: from now on nothing may be at the key.
                create, match = create or match is not None, None  # it was removed meanwhile
            elif create or (match is not None and _bare(object_at_key.etag) != _bare(match)):
                raise self._exists(uploaded)
        raise self._lost(uploaded, refused)

    def _looked_at(
        self, uploaded: Uploaded, etag: str, beside: Callable[[], object] | None
    ) -> ObjectSeen | None:
        """Look at the object of an upload; ask for the first page of the one with an ETag meanwhile."""

        def page() -> None:
            with suppress(SourceChanged, SourceUnreadable):  # the look says more
                first_page(self.client, uploaded.key, etag, uploaded.nbytes)

        asked: list[Callable[[], Any]] = [partial(self.client.head, uploaded.key)]
        if etag and uploaded.nbytes:
            asked.append(page)
        if beside is not None:
            asked.append(beside)
        s3_object: ObjectSeen | None = self.client.each(lambda ask: ask(), asked)[0]
        return s3_object

    def forget(self, completed: Mapping[int, Uploaded]) -> None:
        """Remove the entries of completed uploads, by their files' indices, and uploads without an owner."""
        self._journal.abort_strays(
            {upload.key: upload.started for upload in completed.values() if upload.reply_lost}
        )
        self.client.each(self._journal.forget, completed)

    def _exists(self, uploaded: Uploaded) -> CkptError:
        return DestinationExists(
            f"{self.client.url}/{uploaded.key} appeared meanwhile",
            hint="inspect it, move it away, and run the same command again",
        )

    def _lost(self, uploaded: Uploaded, refused: CkptError | None) -> CkptError:
        url = f"{self.client.url}/{uploaded.key}"
        if refused is not None and kind_of(refused) is Kind.NO_UPLOAD:
            return StorageTrouble(
                f"cannot complete {url}: its upload was ended by another process or a lifecycle rule",
                hint="run the same command again: it uploads what is missing",
                kind=Kind.NO_UPLOAD.value,
            )
        if refused is not None:
            return refused
        return StorageTrouble(
            f"cannot complete {url}: the store confirmed it, but does not have the object",
            hint="run the same command again",
        )

    def _present(self, entry: UploadEntry) -> dict[int, UploadedPart] | None:
        """Return the parts of an upload by number, or None if it has ended."""
        try:
            return {p.number: p for p in self.client.list_parts(entry.key, entry.upload_id)}
        except CkptError as error:
            if kind_of(error) is Kind.NO_UPLOAD:
                return None
            raise


def _succeeded(future: Future[UploadedPart]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _bare(etag: str) -> str:
    return etag.strip('"')


def _unknown(error: CkptError | None) -> bool:
    """Report whether a store does not know a condition of a request."""
    return error is not None and kind_of(error) is Kind.UNSUPPORTED
