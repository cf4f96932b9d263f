"""Read the folder of a bucket: each object is of one version from the first look at it to the last byte.

A *pinned* folder is a source. One listing gives size and ETag of every object; from then on every request is
for that ETag, and another version is `SourceChanged`. A folder that is not pinned is one that this process
writes: it is looked at anew every time.

Expected reads come from blocks (`blocks`), small ones from pages that the process keeps (`small_reads`), and
all others directly, 16 MiB a request.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

from ckptcore.errors import AlteredInTransit, CkptError, SourceUnreadable
from ckptcore.store import Buffer, ReadObserver
from ckptcore.store.ahead import ExpectedReads, StoreProof
from ckptcore.store.file_status import FileStatus
from ckptcore.store.objects import Checksum, ObjectSeen, of_object
from ckptcore.store.objects.blocks import BLOCK, BlockReader, plan_blocks
from ckptcore.store.objects.checksums import checksum_of
from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.ledger import Ledger, altered, damaged
from ckptcore.store.objects.small_reads import LARGEST, SHARED, page_around
from ckptcore.utils.foreign_text import is_number

_SMALL = 1 << 20
_TRIES = 4
_DIRECT_IN_FLIGHT = 4
_FEW_BYTES = 256 << 10  # of a file that are received for its proof beside those of other files
_FEW = 4  # objects that are asked for one by one; more are listed


class FolderReader:
    """What `ckptcore.store.s3.S3Store` reads: the objects below a prefix. Safe for threads.

    Args:
        client: Requests to the bucket.
        prefix: Of all keys, with its slash; "" for the bucket itself.
        url: The folder's URL, for messages.
        pinned: Whether the objects must stay as they are first seen.
        versions: Path -> stamp of objects that were seen before; they are pinned to that.

    Attributes:
        observer: Receives each read, and each block that was read ahead.
    """

    observer: ReadObserver | None = None

    def __init__(
        self,
        client: S3Client,
        prefix: str,
        url: str,
        *,
        pinned: bool,
        versions: Mapping[str, str | None] | None = None,
    ) -> None:
        self.client, self.prefix, self.url, self._pinned = client, prefix, url, pinned
        self._lock = threading.Lock()
        self._pinned_objects: dict[str, ObjectSeen] = {}  # of a pinned folder
        self._missing: set[str] = set()
        self._listed = False
        self._blocks: BlockReader | None = None
        self._bare: frozenset[str] = frozenset()
        self._ledger = Ledger()
        self._checksums: dict[str, tuple[Checksum, ...]] = {}
        for path, stamp in (versions or {}).items():
            s3_object = _of_stamp(prefix + path, stamp)
            if s3_object is not None and pinned:
                self._pinned_objects[path] = s3_object

    def below(self) -> dict[str, FileStatus]:
        """Return every object below the folder by its relative name, sorted; none where nothing is.

        The first listing of a pinned folder pins them.
        """
        objects: dict[str, ObjectSeen] = {}
        for s3_object in self.client.list(self.prefix):
            path = s3_object.key[len(self.prefix) :]
            if path and not path.endswith("/"):  # markers of folders, which some tools create
                objects[path] = s3_object
        if self._pinned:
            with self._lock:
                # An object that was looked at before keeps that version: another one is `SourceChanged`.
                self._pinned_objects = {**objects, **self._pinned_objects}
                self._listed = True
        return {path: of_object(objects[path]) for path in sorted(objects)}

    def listed(self) -> dict[str, int] | None:
        """Return the objects of a pinned folder that was listed, path -> bytes, sorted; else None."""
        if not self._listed:
            return None
        with self._lock:
            return {path: s3_object.nbytes for path, s3_object in sorted(self._pinned_objects.items())}

    def now(self, path: str) -> FileStatus | None:
        """Return size and version of one object as it is now, or None when there is no such object."""
        s3_object = self.client.head(self.prefix + path)
        return None if s3_object is None else of_object(s3_object)

    def look(self, path: str) -> FileStatus | None:
        """Return size and version of one object, or None when there is no such object."""
        s3_object = self._object_at(path)
        return None if s3_object is None else of_object(s3_object)

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes."""
        if not length:
            return b""
        if self._blocks is None and length <= LARGEST and self._pinned:
            page = self._small(path, start, length)
            if self.observer is not None:
                self.observer.observe(path, start, page)
            return page
        data = bytearray(length)
        self.read_into(path, start, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, start: int, into: Buffer) -> None:
        """Fill ``into`` exactly."""
        blocks = self._blocks
        try:
            if blocks is not None:
                blocks.read_into(path, start, into, lambda offset, part: self._unexpected(path, offset, part))
            else:
                self._unexpected(path, start, into)
        except AlteredInTransit:
            self._altered(None)
            raise
        if self.observer is not None:
            self.observer.observe(path, start, into)

    def expect(self, reads: ExpectedReads, memory: int) -> None:
        """Read ahead what is expected, with at most ``memory`` bytes of blocks."""
        self.close()
        if self._pinned and sum(path not in self._pinned_objects for path in reads.paths) > _FEW:
            with contextlib.suppress(SourceUnreadable):  # without the right to list, each is asked for once
                self.below()
        self._ledger, self._bare = Ledger(), reads.bare
        if not len(reads) or not self._pinned:
            return
        table = plan_blocks(reads, memory)
        self._ask_checksums(sorted(reads.bare & set(table.row)))
        self._blocks = BlockReader(table, self._fetch, self._arrived, lambda: self.client.answer_s, memory)
        self._blocks.start()

    def forget(self, path: str, start: int, length: int) -> bool:
        """Drop what is kept of a range, so that the next read asks the store again."""
        s3_object = self._pinned_objects.get(path)
        if s3_object is not None:
            SHARED.forget(self._version(s3_object), start, length)
        if self._blocks is not None:
            self._blocks.forget(path, start, length)
        self._ledger.forget(path, start, length)
        self._altered(path)
        return True

    def prove(self) -> StoreProof:
        """Compare what was read of the expected bare files with the store's checksums."""

        def proves(path: str) -> bool:
            s3_object = objects[path]
            return self._ledger.proves(
                path,
                s3_object.nbytes,
                self._checksums.get(path, ()),
                partial(self._receive, s3_object),
                f"{self.url}/{path}",
            )

        bare_files = ((path, self._object_at(path)) for path in sorted(self._bare))
        objects = {path: s3_object for path, s3_object in bare_files if s3_object is not None}
        left = {
            path: self._ledger.missing(path, s3_object.nbytes, self._checksums.get(path, ()))
            for path, s3_object in objects.items()
        }
        # A few bytes, such as a header, are one request for each file: several at once, in little memory.
        few = [path for path in objects if left[path] <= _FEW_BYTES]
        try:
            good = dict(zip(few, self.client.each(proves, few), strict=True))
            good |= {path: proves(path) for path in objects if path not in good}
        except AlteredInTransit:
            self._altered(None)
            raise
        return StoreProof(
            frozenset(path for path, is_good in good.items() if is_good),
            frozenset(path for path, is_good in good.items() if not is_good),
        )

    def close(self) -> None:
        """Give up what is in flight, and free the blocks."""
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None

    def _object_at(self, path: str) -> ObjectSeen | None:
        """Return an object as it is pinned, or as it is now."""
        if not self._pinned:
            return self.client.head(self.prefix + path)
        pinned_object = self._pinned_objects.get(path)
        if pinned_object is not None or self._listed:
            return pinned_object
        if path in self._missing:
            return None
        s3_object = self.client.head(self.prefix + path)
        with self._lock:
            if s3_object is None:
                self._missing.add(path)
                return None
            # Another thread may have pinned it meanwhile: all of them read that version.
            return self._pinned_objects.setdefault(path, s3_object)

    def _pinned_to(self, path: str) -> ObjectSeen:
        s3_object = self._object_at(path)
        if s3_object is None:
            raise SourceUnreadable(f"{self.url}/{path} does not exist", hint="check the path", file=path)
        return s3_object

    def _small(self, path: str, start: int, length: int) -> bytes:
        """Return a few bytes, from a page that is kept or from a page that is kept from now on."""
        s3_object = self._pinned_to(path)
        _require_inside(f"{self.url}/{path}", path, start, length, s3_object.nbytes)
        version = self._version(s3_object)
        cached_bytes = SHARED.find(version, start, length)
        if cached_bytes is not None:
            return cached_bytes
        first, count = page_around(start, length, s3_object.nbytes)
        data = bytearray(count)
        if count == s3_object.nbytes:
            self._complete(s3_object, memoryview(data), f"{self.url}/{path}")
        else:
            self.client.get(s3_object.key, first, s3_object.etag or None, memoryview(data))
        SHARED.keep(version, first, bytes(data))
        return bytes(data[start - first : start - first + length])

    def _complete(self, s3_object: ObjectSeen, into: Buffer, url: str) -> None:
        """Read a small object, and prove it: by a checksum of the store, by its ETag, or by a second read.

        What describes a checkpoint is small and often has no checksum: a flipped bit would be a wrong name.
        """
        before = None
        for _ in range(_TRIES):  # again, before it is called damaged
            checksums = self.client.get_all(s3_object.key, s3_object.etag or None, into).checksums
            if checksums:
                if checksum_of(checksums[0].algorithm, into) == checksums[0]:
                    return
                continue
            digest = hashlib.md5(into, usedforsecurity=False).hexdigest()  # the ETag of a plain upload
            if digest in (s3_object.etag.strip('"'), before):
                return
            before = digest
        if checksums:
            raise damaged(url, checksums[0].algorithm)
        raise altered(url, 0, len(into))

    def _unexpected(self, path: str, start: int, into: Buffer) -> None:
        """Read what is in no block."""
        if self._pinned and len(into) < _SMALL:
            into[:] = self._small(path, start, len(into))
            return
        if path in self._bare:
            self._ledger.doubt(path)
        etag, key = None, self.prefix + path
        if self._pinned:
            s3_object = self._pinned_to(path)
            _require_inside(f"{self.url}/{path}", path, start, len(into), s3_object.nbytes)
            etag = s3_object.etag or None
        elif len(into) > BLOCK:
            # The first answer says which version the others must be of.
            etag = self.client.get(key, start, None, into[:BLOCK]).etag or None
            start, into = start + BLOCK, into[BLOCK:]
        self._directly(key, start, etag, into)

    def _directly(self, key: str, start: int, etag: str | None, into: Buffer) -> None:
        waiting: deque[Future[ObjectSeen]] = deque()
        try:
            for offset in range(0, len(into), BLOCK):
                part = into[offset : offset + BLOCK]
                waiting.append(self.client.start_get(key, start + offset, etag, part))
                if len(waiting) >= _DIRECT_IN_FLIGHT:
                    waiting.popleft().result()
            while waiting:
                waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _receive(self, s3_object: ObjectSeen, start: int, into: Buffer) -> None:
        """Read past every cache, and compare with the pages that were used."""
        self.client.get(s3_object.key, start, s3_object.etag or None, into)
        for first, page in SHARED.pieces(self._version(s3_object)):
            begin, end = max(first, start), min(first + len(page), start + len(into))
            if begin < end and page[begin - first : end - first] != into[begin - start : end - start]:
                SHARED.forget(self._version(s3_object), first, len(page))
                raise altered(f"{self.client.url}/{s3_object.key}", begin, end - begin)

    def _fetch(self, path: str, start: int, into: Buffer) -> Future[ObjectSeen]:
        """Ask for a block; an error is for those who need its bytes, not for those who read ahead."""
        try:
            s3_object = self._pinned_to(path)
            _require_inside(f"{self.url}/{path}", path, start, len(into), s3_object.nbytes)
        except CkptError as error:
            failed: Future[ObjectSeen] = Future()
            failed.set_exception(error)
            return failed
        return self.client.start_get(s3_object.key, start, s3_object.etag or None, into)

    def _arrived(self, path: str, start: int, data: Buffer) -> None:
        self._ledger.add(path, start, data, f"{self.url}/{path}")
        if self.observer is not None:
            self.observer.observe(path, start, data)

    def _altered(self, path: str | None) -> None:
        """Tell the observer that bytes of a file, or of any, may have come altered."""
        if self.observer is not None:
            self.observer.forget(path)

    def _ask_checksums(self, paths: list[str]) -> None:
        """Ask once which checksums the store keeps of files that have none of their own."""
        asked = [path for path in paths if path not in self._checksums]
        heads = self.client.each(self.client.head, [self.prefix + path for path in asked])
        head_of_path = dict(zip(asked, heads, strict=True))
        for path in paths:
            if path in head_of_path:
                head = head_of_path[path]
                pinned = self._pinned_to(path)
                if head is not None and head.etag.strip('"') == pinned.etag.strip('"'):
                    self._checksums[path] = head.checksums
            self._ledger.prefer(path, self._checksums.get(path, ()))

    def _version(self, s3_object: ObjectSeen) -> tuple[str, str, str]:
        return self.client.url, s3_object.key, s3_object.etag or f"{s3_object.nbytes} bytes"


def _of_stamp(key: str, stamp: str | None) -> ObjectSeen | None:
    """Return the object that a stamp describes; None if it has no ETag."""
    size, mark, version = (stamp or "").partition(" bytes, version ")
    if not mark or not is_number(size) or not version.startswith(('"', 'W/"')):
        return None
    return ObjectSeen(key, int(size), version)


def _require_inside(url: str, path: str, start: int, length: int, size: int) -> None:
    if start < 0 or start + length > size:
        raise SourceUnreadable(
            f"{url} ends early: {length} bytes needed at offset {start} (got {max(0, size - start)})",
            file=path,
        )
