"""Upload files whose bytes come in any order, from several threads, and of several files at the same time.

A part is sent when its last byte has come. Parts that are begun and not full stay in memory; the caller
knows how many there can be (`ckptcore.execution.source_order`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from blake3 import blake3

from ckptcore.errors import OutputMismatch
from ckptcore.store import Buffer, Store
from ckptcore.store.objects import UploadedPart
from ckptcore.store.objects.checksums import ALGORITHMS
from ckptcore.store.objects.journal import UploadEntry
from ckptcore.store.objects.part_plan import PartPlan
from ckptcore.store.objects.uploaded import Uploaded
from ckptcore.store.objects.uploads import PartBuffers, Uploads
from ckptcore.utils.crc32 import crc32

_CRC32 = ALGORITHMS["CRC32"]


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


@dataclass(slots=True)
class _OpenPart:
    """A part that is not full: its buffer, and how many bytes are missing."""

    buffer: Buffer
    nbytes: int
    left: int


class ScatteredUploads:
    """Writers of the files of a run, which share buffers and the line.

    Args:
        uploads: The uploads of the plan.
        open_bytes: The most bytes of parts that are begun and not full at the same time.
        part: Bytes of a part.
    """

    def __init__(self, uploads: Uploads, open_bytes: int, part: int) -> None:
        self.uploads = uploads
        uploads.buffers.add(-(-open_bytes // max(part, 1)))
        self._in_flight = max(uploads.in_flight, 1)
        self._lock = threading.Lock()
        self._flying: deque[tuple[Future[UploadedPart], _Flight]] = deque()

    def writer(self, index: int, path: str, nbytes: int) -> ScatteredWriter:
        """Start or continue the upload of a file."""
        return ScatteredWriter(self, *self.uploads.begun(index, path, nbytes))

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer; wait for parts on their way when all are in use."""
        while (buffer := self.uploads.buffers.take(nbytes, must=False)) is None:
            if not self._land():
                buffer = self.uploads.buffers.take(nbytes, must=True)
                assert buffer is not None  # it must
                break
        return buffer

    def send(
        self, entry: UploadEntry, number: int, buffer: Buffer, nbytes: int, crc: int
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
        data, flight = buffer[:nbytes], _Flight(self.uploads.buffers, buffer)
        future = self.uploads.client.start_part(entry.key, entry.upload_id, number, data, _CRC32.encoded(crc))
        future.add_done_callback(lambda _: flight.land())
        with self._lock:
            self._flying.append((future, flight))
        return future

    def _land(self) -> bool:
        """Wait for the oldest part on its way, if any; raises its error."""
        with self._lock:
            if not self._flying:
                return False
            future, flight = self._flying.popleft()
        future.result()
        flight.land()
        return True


class ScatteredWriter:
    """Uploads one file. Safe for threads; see `ckptcore.store.FileWriter`.

    Args:
        shared: Buffers and line.
        entry: The upload.
        present: Parts that the store has, by number.
    """

    sequential = False

    def __init__(
        self, shared: ScatteredUploads, entry: UploadEntry, present: Mapping[int, UploadedPart]
    ) -> None:
        self._shared, self._entry, self._present = shared, entry, present
        self._plan = PartPlan(entry.nbytes, entry.part)
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

    def copy(self, source: Store, path: str, start: int, length: int, offset: int) -> bool:
        """Return False: no copy inside the kernel."""
        return False

    def commit(self) -> None:
        """Wait until the store has every part. The object is not complete yet: see `Uploads.complete`."""
        for number, future in self._sent.items():
            self._etags[number] = future.result().etag
        numbers = range(1, self._plan.count + 1)
        if self._open or self._etags.keys() != set(numbers):
            raise OutputMismatch(f"{self._entry.key} was not written to its end")
        self._uploaded = Uploaded(
            self._entry.key,
            self._entry.upload_id,
            self._entry.token,
            self._entry.nbytes,
            self._plan.part,
            tuple(self._etags[n] for n in numbers),
            tuple(self._digests[n][1] for n in numbers),
            self._entry.started,
            1,
            tuple(self._digests[n][0] for n in numbers),
            self._entry.reply_lost,
        )

    def abort(self) -> None:
        """Stop. The upload stays open and in the journal: the next run resumes or aborts it."""
        for future in self._sent.values():
            future.cancel()
        for future in self._sent.values():
            with suppress(Exception):  # the run ends with the error that came first
                future.result()
        for part in self._open.values():
            self._shared.uploads.buffers.give_back(part.buffer)
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
                part = _OpenPart(self._shared.take(nbytes), nbytes, nbytes)
                with self._lock:
                    self._open[number] = part
            return part

    def _send(self, number: int, part: _OpenPart) -> None:
        data = part.buffer[: part.nbytes]
        crc = crc32(data)
        self._digests[number] = blake3(data).hexdigest(), crc
        stored_part = self._present.get(number)
        if (
            stored_part is not None
            and stored_part.nbytes == len(data)
            and stored_part.checksum == _CRC32.encoded(crc)
        ):
            self._etags[number] = stored_part.etag
            self._shared.uploads.buffers.give_back(part.buffer)
        else:
            self._sent[number] = self._shared.send(self._entry, number, part.buffer, part.nbytes, crc)


def _succeeded(future: Future[UploadedPart]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
