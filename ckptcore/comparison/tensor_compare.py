"""Walking: are two tensors equal bit for bit, read side by side in bounded memory?

A tensor is cut into boxes; a box is read from both sides and compared as bits. Workers share the
boxes, also those of one large tensor. At the end every record with a checksum that was touched is
verified, and the files must still be those that were opened.

Peak memory: the interpreter, torch where it is needed, and ``Settings.memory``: two tiles, a buffer
for strided reads and room for comparing or computing, a worker. Nothing grows with a tensor's size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ckptcore.comparison.result import VALUES, Element, TensorDifference
from ckptcore.core.box import Box, flat_start
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.errors import CkptError
from ckptcore.execution.execute import tile_bytes
from ckptcore.execution.source_stamps import require_same, take
from ckptcore.execution.tiles import READ, TILES
from ckptcore.planning.request import Settings
from ckptcore.reading.box_reader import BoxReader
from ckptcore.reading.checksums import Records
from ckptcore.reading.equality import differing
from ckptcore.reading.gather import Bytes, beside, tile_view
from ckptcore.store import open_store
from ckptcore.utils.threads import work_together

Progress = Callable[[str, int, int], None]
_SMALL = 1 << 20


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor to compare: a name, what each side calls it, its rows in both manifests."""

    name: str
    a: TensorSpec
    b: TensorSpec
    rows: tuple[int, int]


class Opened:
    """One checkpoint that is read. label: what errors call it."""

    def __init__(self, label: str, manifest: Manifest) -> None:
        self.label, self.manifest = label, manifest
        self.store = open_store(manifest.root)
        self.records = Records(self.store, len(manifest.items))
        self._noted = take(manifest, self.store)

    @property
    def unverified(self) -> int:
        """Stored items that were read and have no checksum."""
        return self.records.unverified

    def read(self, row: int) -> bytes:
        """The bytes of a small tensor."""
        spec = self.manifest.tensors[row]
        data, box = np.empty(spec.nbytes, np.uint8), Box.whole(spec.shape)
        with telling(self.label):
            reader = BoxReader(self.manifest, row, self.store, self.records)
            try:
                reader.read(box, tile_view(data, spec.shape, spec.dtype), np.empty(_SMALL, np.uint8))
            finally:
                reader.close()
        return data.tobytes()

    def finish(self) -> None:
        """Proves what is partly read; raises `DamagedCheckpoint`, or `SourceChanged`."""
        with telling(self.label):
            self.records.finish()
            require_same(self._noted, self.store)

    def beside(self, row: int) -> int:
        """How many chunks of a tensor lie beside each other."""
        chunks = self.manifest.chunks
        first, last = (int(n) for n in chunks.first[row : row + 2])
        return beside(chunks.lo, first, last, len(self.manifest.tensors[row].shape))


def walk(
    a: Opened, b: Opened, pairs: Sequence[Pair], settings: Settings, progress: Progress | None = None
) -> list[TensorDifference]:
    """The pairs of equal dtype and shape that are not equal bit for bit, in order.

    Raises the first error of any worker.
    """
    found = _Walk(a, b, pairs, settings, progress).run()
    a.finish()
    b.finish()
    return found


@contextmanager
def telling(label: str) -> Iterator[None]:
    """Errors inside say which of two checkpoints they are about."""
    try:
        yield
    except CkptError as error:
        error.message = f"{label}: {error.message}"
        error.args = (error.message,)
        raise


class _Open:
    """A pair while it is read: its readers, what was found, how many boxes are under way."""

    def __init__(self, pair: Pair, sides: tuple[Opened, Opened]) -> None:
        self.pair = pair
        self.readers = [
            BoxReader(s.manifest, row, s.store, s.records) for s, row in zip(sides, pair.rows, strict=True)
        ]
        self.under_way, self.whole = 0, False
        self.differing = 0
        self.first: tuple[int, bytes, bytes] | None = None  # row-major place, both elements

    def add(self, place: int, count: int, one: bytes, two: bytes) -> None:
        """Notes ``count`` elements that differ, the first of them at ``place``."""
        self.differing += count
        if self.first is None or place < self.first[0]:
            self.first = place, one, two

    def result(self) -> TensorDifference:
        """What is told of a pair that is not equal."""
        assert self.first is not None  # something differs
        pair, (place, one, two) = self.pair, self.first
        index = tuple(int(i) for i in np.unravel_index(place, pair.a.shape)) if pair.a.shape else ()
        dtype = pair.a.dtype
        element = Element(index, _value(one, dtype), _value(two, dtype), _hex(one), _hex(two))
        return TensorDifference(pair.name, (VALUES,), pair.a, pair.b, self.differing, element)


class _Walk:
    """The workers and the shared state of one walk."""

    def __init__(
        self, a: Opened, b: Opened, pairs: Sequence[Pair], settings: Settings, progress: Progress | None
    ) -> None:
        self._sides, self._pairs, self._threads = (a, b), pairs, settings.threads
        self._tile = tile_bytes(settings)
        self._progress, self._done = progress, 0
        self._total = sum(p.a.nbytes for p in pairs)
        self._stream = self._boxes()
        self._take, self._lock = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._open: set[_Open] = set()
        self._found: dict[str, _Open] = {}

    def run(self) -> list[TensorDifference]:
        """Runs to the end; raises the first error."""
        try:
            work_together(self._threads, self._work, self._stop.set)
        finally:
            for each in list(self._open):
                self._close(each)
        if self._error is not None:
            raise self._error
        return [self._found[p.name].result() for p in self._pairs if p.name in self._found]

    def _boxes(self) -> Iterator[tuple[_Open, Box]]:
        usual = min(self._tile, max(TILES // self._threads, 1 << 20))
        read = max(READ // self._threads, 64 << 10)
        for pair in self._pairs:
            each = _Open(pair, self._sides)
            with self._lock:
                self._open.add(each)
            across = max(side.beside(row) for side, row in zip(self._sides, pair.rows, strict=True))
            limit = min(self._tile, max(usual, across * read))
            for box in Box.whole(pair.a.shape).tiles(limit // BY_NAME[pair.a.dtype].itemsize):
                with self._lock:
                    each.under_way += 1
                yield each, box
            with self._lock:
                each.whole = True
                finished = not each.under_way
            if finished:
                self._close(each)

    def _work(self) -> None:
        try:
            buffers = [np.empty(self._tile, np.uint8) for _ in range(3)]
            while not self._stop.is_set():
                with self._take:
                    taken = next(self._stream, None)
                if taken is None:
                    break
                self._compare(*taken, *buffers)
        except BaseException as error:  # carried to `run`, which raises it
            with self._lock:
                self._error = self._error or error
            self._stop.set()

    def _compare(self, each: _Open, box: Box, one: Bytes, two: Bytes, scratch: Bytes) -> None:
        spec = each.pair.a
        itemsize = BY_NAME[spec.dtype].itemsize
        nbytes = box.numel * itemsize
        for side, reader, buffer in zip(self._sides, each.readers, (one, two), strict=True):
            with telling(side.label):
                reader.read(box, tile_view(buffer, box.shape, spec.dtype), scratch)
        found = differing(one[:nbytes], two[:nbytes], itemsize)
        with self._lock:
            if found is not None:
                at, count = found
                span = slice(at * itemsize, (at + 1) * itemsize)
                each.add(flat_start(spec.shape, box.offset) + at, count, bytes(one[span]), bytes(two[span]))
                self._found[each.pair.name] = each
            each.under_way -= 1
            finished = each.whole and not each.under_way
            self._done += nbytes
            if self._progress is not None:
                self._progress("compare", self._done, self._total)
        if finished:
            self._close(each)

    def _close(self, each: _Open) -> None:
        for reader in each.readers:
            reader.close()
        with self._lock:
            self._open.discard(each)


def _value(raw: bytes, dtype: str) -> bool | int | float | complex:
    """The element of little-endian bytes."""
    import torch

    element = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype))
    wide = {"f": torch.float64, "c": torch.complex128}.get(BY_NAME[dtype].kind)
    value: bool | int | float | complex = (element if wide is None else element.to(wide))[0].item()
    return value


def _hex(raw: bytes) -> str:
    return raw[::-1].hex()
