"""One output file in the making: filling its tiles in any order, settling them in file order.

`fill` runs on any worker at any time; `settle` passes each filled tile on in file order to the
digest, to checksums stored behind the data, and to writers that only append.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckptcore.core.box import Box, flat_start, is_run
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import view_of
from ckptcore.execution.device import Lane, sum_held
from ckptcore.execution.receipts import Receipt
from ckptcore.execution.tiles import Job, LiteralPart, TensorPart
from ckptcore.fingerprints.sums import ZERO, Sum, add, pack
from ckptcore.planning.file_plan import COMPARE, FilePlan, PlannedTensor
from ckptcore.planning.request import Settings
from ckptcore.reading.casting import cast_into, derive_into
from ckptcore.reading.checksums import Place, Records
from ckptcore.reading.equality import require_equal
from ckptcore.reading.gather import Placed, overlaps, sub_tile, tile_view
from ckptcore.reading.interleave import Interleaver
from ckptcore.reading.payload import Payload
from ckptcore.store import Store, Writer
from ckptcore.utils.crc32 import Runs, crc32

Bytes = npt.NDArray[np.uint8]
_RUN = 64 << 10  # bytes: a kernel copy of less costs more than a read and a write
_KEEP = 1 << 20  # bytes: chunks above this are resolved once and remembered while they last


class FileWork:
    """The state of one file while it is written."""

    def __init__(
        self,
        plan: FilePlan,
        source: Store,
        files: Store,
        settings: Settings,
        records: Records,
        scratch: str | None,
    ) -> None:
        self.plan = plan
        self._source, self._settings, self._scratch = source, settings, scratch
        self._records = records
        self._writer = self._open(files)
        self._began = time.perf_counter()
        self._patched = any(x.crc_at for x in plan.literals)
        self._digest = blake3() if settings.digest else None
        # Where nobody looks at the bytes, the kernel moves them.
        looked_at = settings.verify or settings.digest or settings.fingerprint
        self._direct = not (looked_at or self._patched or self._writer.sequential)
        self._sums = [ZERO] * len(plan.tensors) if settings.fingerprint else None
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Job, Bytes, Callable[[Bytes], None]]] = {}
        self._next, self._settling, self._closed = 0, False, False
        self._last: int | None = None
        self._payloads: dict[int, Payload] = {}
        self._slots: dict[int, Runs] = {}
        self._by_tensor = self._index()
        # What is read: the tensors, and behind them what derived ones are computed from.
        self._specs = (*plan.tensors, *plan.inputs)

    def _open(self, files: Store) -> Writer:
        return files.writer(self.plan.path, self.plan.nbytes)

    def _index(self) -> list[tuple[int, int]]:
        first = self.plan.reads.first.tolist()
        return list(pairwise(first))

    def fill(self, job: Job, buffer: Bytes, scratch: Bytes, cast: Bytes, lane: Lane | None = None) -> None:
        """Puts a job's bytes into ``buffer`` and, where the writer allows, into the file.

        scratch, cast: the worker's own. lane: its way through a device, where there is one.
        """
        if self._direct:
            self._copy(job, buffer, scratch, cast, lane)
            return
        for part in job.parts:
            if isinstance(part, LiteralPart):
                literal = self.plan.literals[part.literal]
                raw = np.frombuffer(literal.data, np.uint8)[part.begin : part.end]
                buffer[part.at : part.at + len(raw)] = raw
            else:
                self._tensor(part, buffer[part.at : part.at + part.nbytes], scratch, cast, lane)
        if not self._writer.sequential:
            self._writer.write(job.start, buffer[: job.nbytes].data)

    def settle(self, job: Job, buffer: Bytes, give_back: Callable[[Bytes], None], seconds: float) -> None:
        """Passes filled tiles on in file order, as far as they are there."""
        with self._lock:
            self._waiting[job.sequence] = (job, buffer, give_back)
            if self._settling:
                return
            self._settling = True
        while True:
            with self._lock:
                ready = self._waiting.pop(self._next, None)
                if ready is None:
                    self._settling = False
                    return
            self._pass_on(ready[0], ready[1])
            ready[2](ready[1])
            with self._lock:
                self._next += 1

    def last_is(self, sequence: int) -> None:
        """Tells which job is the file's last."""
        with self._lock:
            self._last = sequence

    def complete(self) -> Receipt | None:
        """Makes the file durable when its last tile has settled; the receipt, once."""
        with self._lock:
            if self._closed or self._last is None or self._next <= self._last or self._settling:
                return None
            self._closed = True
        for payload in self._payloads.values():
            payload.close()
        self._writer.commit()
        numbers = self.plan.number.tolist()
        verified = sum(map(self._records.verified, numbers))
        return Receipt(
            self.plan.index,
            self.plan.path,
            self.plan.nbytes,
            self._digest.hexdigest() if self._digest is not None else None,
            round(time.perf_counter() - self._began, 6),
            verified,
            len(numbers) - verified,
            pending=tuple(filter(self._records.pending, numbers)),
            sums=pack(self._sums) if self._sums is not None else None,
        )

    def told(self, receipt: Receipt) -> str:
        """What was written, for people."""
        return (
            f"wrote {receipt.path}: {receipt.nbytes} bytes, {len(self.plan.tensors)} tensors, "
            f"{receipt.seconds:.2f} s, BLAKE3 {receipt.digest}"
        )

    def abort(self) -> None:
        """Drops the file."""
        for payload in self._payloads.values():
            payload.close()
        if not self._closed:
            self._writer.abort()

    def _copy(self, job: Job, buffer: Bytes, scratch: Bytes, cast: Bytes, lane: Lane | None) -> None:
        """Writes a job part by part, with kernel copies where a part is whole runs of the source."""
        for part in job.parts:
            at = job.start + part.at
            if isinstance(part, LiteralPart):
                self._writer.write(at, self.plan.literals[part.literal].data[part.begin : part.end])
            elif not self._copied(part, at):
                target = buffer[: part.nbytes]
                self._tensor(part, target, scratch, cast, lane)
                self._writer.write(at, target.data)

    def _copied(self, part: TensorPart, at: int) -> bool:
        tensor = self.plan.tensors[part.tensor]
        if tensor.dtype != tensor.source_dtype or part.nbytes < _RUN or part.tensor in self.plan.derived:
            return False
        itemsize = BY_NAME[tensor.dtype].itemsize
        for row, chunk, common in self._overlaps(part):
            inside = common.within(chunk)
            if not is_run(part.box.shape, common.shape) or not is_run(chunk.shape, inside.shape):
                return False
            payload, kept = self._payload(row, _place(self.plan, row, chunk.shape, tensor))
            try:
                if payload.path is None or payload.strides is not None or payload.flags:
                    return False
                start = payload.start + flat_start(chunk.shape, inside.offset) * itemsize
                place = at + flat_start(part.box.shape, common.within(part.box).offset) * itemsize
                if not self._writer.copy(self._source, payload.path, start, common.numel * itemsize, place):
                    return False
            finally:
                if not kept:
                    payload.close()
        return True

    def _tensor(
        self, part: TensorPart, target: Bytes, scratch: Bytes, cast: Bytes, lane: Lane | None
    ) -> None:
        tensor = self.plan.tensors[part.tensor]
        changes, summed = tensor.dtype != tensor.source_dtype, False
        if part.tensor in self.plan.derived:
            self._derive(part, target, scratch, cast)
        elif lane is not None and (changes or self._scatters(part)):
            self._on_device(part, target, scratch, cast, lane)
            summed = True
        else:
            where = cast if changes else target
            tile = tile_view(where, part.box.shape, tensor.source_dtype)
            self._gather(part, tile, scratch)
            if changes:
                cast_into(tile, tensor.source_dtype, target, tensor.dtype, self._settings.device)
        if self._sums is not None and not summed:
            self._sum(part, cast if changes else target, scratch, lane)
        if self._patched:
            crc = crc32(target.data)
            with self._lock:
                self._slots.setdefault(part.tensor, Runs()).add(part.offset, part.nbytes, crc)

    def _sum(self, part: TensorPart, held: Bytes, scratch: Bytes, lane: Lane | None) -> None:
        """Sums a part that is on the host, as it is before any cast."""
        tensor = self.plan.tensors[part.tensor]
        elements = held[: part.box.numel * BY_NAME[tensor.source_dtype].itemsize]
        self._add(part, sum_held(lane, tensor.source_dtype, tensor.full, part.box, elements, scratch))

    def _add(self, part: TensorPart, found: Sum) -> None:
        """Adds a part's sum to that of a tensor's box in this file."""
        assert self._sums is not None  # the caller has looked
        with self._lock:
            self._sums[part.tensor] = add(self._sums[part.tensor], found)

    def _on_device(self, part: TensorPart, target: Bytes, scratch: Bytes, cast: Bytes, lane: Lane) -> None:
        """Scatters, sums and casts a part on the device; copies are compared here, before the cast."""
        tensor = self.plan.tensors[part.tensor]
        tile = lane.tile(part.box.shape, tensor.source_dtype)
        copies = self._fill(part, tile, scratch)
        changes = tensor.dtype != tensor.source_dtype
        here = tile_view(cast, part.box.shape, tensor.source_dtype)
        if self._sums is not None:
            self._add(part, lane.sum(tile, tensor.source_dtype, tensor.full, part.box))
        if copies and self._settings.verify:
            lane.fetch(tile, here.reshape(-1).view(np.uint8))
        if self._settings.verify:
            for row, chunk, common in copies:
                self._compare(row, part, chunk, common, sub_tile(here, common, part.box), scratch)
        if not changes:
            lane.fetch(tile, target)
        else:
            lane.fetch_cast(tile, tensor.source_dtype, target, tensor.dtype)

    def _scatters(self, part: TensorPart) -> bool:
        """Whether a part is more than runs of what is stored."""
        return any(
            not is_run(part.box.shape, common.shape) or not is_run(chunk.shape, common.shape)
            for _, chunk, common in self._overlaps(part)
        )

    def _derive(self, part: TensorPart, target: Bytes, scratch: Bytes, cast: Bytes) -> None:
        """Computes a part: its inputs are gathered into the cast buffer, behind room for the result."""
        tensor, node = self.plan.tensors[part.tensor], self.plan.derived[part.tensor]
        room = part.box.numel * BY_NAME[tensor.source_dtype].itemsize
        at, inputs = room, []
        for i, box in zip(node.inputs, FUNCTIONS[node.fn].needs(part.box, node.params), strict=True):
            number = len(self.plan.tensors) + i
            dtype = self._specs[number].source_dtype
            nbytes = box.numel * BY_NAME[dtype].itemsize
            at += -at % 16  # wide elements are read where the machine likes them
            tile = tile_view(cast[at : at + nbytes], box.shape, dtype)
            self._gather(TensorPart(number, box, 0, nbytes, 0), tile, scratch)
            inputs.append((tile, dtype))
            at += nbytes
        derive_into(node, part.box, inputs, target, tensor.dtype, self._settings.device, cast[:room])

    def _gather(self, part: TensorPart, tile: npt.NDArray[Any], scratch: Bytes) -> None:
        compared = self._fill(part, tile, scratch)
        if self._settings.verify:
            for row, chunk, common in compared:
                self._compare(row, part, chunk, common, sub_tile(tile, common, part.box), scratch)

    def _fill(
        self, part: TensorPart, tile: npt.NDArray[Any] | Placed, scratch: Bytes
    ) -> list[tuple[int, Box, Box]]:
        """Reads a part into its tile; gives the reads that are copies, to be compared."""
        compared: list[tuple[int, Box, Box]] = []
        into = Interleaver(tile, part.box, self._specs[part.tensor].source_dtype, scratch)
        for row, chunk, common in self._overlaps(part):
            if self.plan.op[row] == COMPARE:
                compared.append((row, chunk, common))
            else:
                self._read(row, part, chunk, common, into)
        into.flush()
        return compared

    def _overlaps(self, part: TensorPart) -> Iterator[tuple[int, Box, Box]]:
        """(read, its box, what it shares with the part) of every read that shares something."""
        first, last = self._by_tensor[part.tensor]
        return overlaps(self.plan.reads.lo, self.plan.reads.shape, first, last, part.box)

    def _read(self, row: int, part: TensorPart, chunk: Box, common: Box, into: Interleaver) -> None:
        tensor = self._specs[part.tensor]
        place = _place(self.plan, row, chunk.shape, tensor)
        payload, kept = self._payload(row, place)
        try:
            into.put(payload, chunk, common, self._records.seen(payload, place))
        finally:
            if not kept:
                payload.close()

    def _compare(
        self, row: int, part: TensorPart, chunk: Box, common: Box, tile: npt.NDArray[Any], scratch: Bytes
    ) -> None:
        """Reads a copy in halves of the scratch buffer and holds it against the tile."""
        tensor = self._specs[part.tensor]
        half = len(scratch) // 2
        for piece in common.tiles(half // BY_NAME[tensor.source_dtype].itemsize):
            other = tile_view(scratch[:half], piece.shape, tensor.source_dtype)
            into = Interleaver(other, piece, tensor.source_dtype, scratch[half:])
            self._read(row, part, chunk, piece, into)
            into.flush()
            paths = partial(self._files, part, piece, row)
            require_equal(sub_tile(tile, piece, common), other, piece, tensor.name, paths)

    def _files(self, part: TensorPart, piece: Box, copy: int) -> tuple[str, str]:
        """The file that a piece was read from, or the first of several, and that of its copy."""
        reads = (row for row, _, common in self._overlaps(part) if common.intersect(piece) is not None)
        return self._path(next(row for row in reads if self.plan.op[row] != COMPARE)), self._path(copy)

    def _payload(self, row: int, place: Place) -> tuple[Payload, bool]:
        with self._lock:
            found = self._payloads.get(row)
        if found is not None:
            return found, True
        payload = place.resolve(self._source, self._scratch)
        if place.item.length < _KEEP:
            return payload, False
        with self._lock:
            other = self._payloads.setdefault(row, payload)
        if other is not payload:
            payload.close()
        return other, True

    def _path(self, row: int) -> str:
        return self.plan.files[self.plan.items[int(self.plan.reads.item[row])].file].path

    def _pass_on(self, job: Job, buffer: Bytes) -> None:
        if self._patched:
            self._patch_all(job, buffer)
        view = buffer[: job.nbytes].data
        if self._writer.sequential and job.nbytes:
            self._writer.write(job.start, view)
        if self._digest is not None:
            self._digest.update(view)

    def _patch_all(self, job: Job, buffer: Bytes) -> None:
        for part in job.parts:
            if isinstance(part, LiteralPart) and self.plan.literals[part.literal].crc_at:
                self._patch(part, job, buffer)

    def _patch(self, part: LiteralPart, job: Job, buffer: Bytes) -> None:
        literal = self.plan.literals[part.literal]
        for at, slot in literal.crc_at:
            raw = self._crc(slot).to_bytes(4, "little")
            for n in range(4):
                if part.begin <= at + n < part.end:
                    buffer[part.at + at + n - part.begin] = raw[n]
        if not self._writer.sequential:
            self._writer.write(job.start + part.at, buffer[part.at : part.at + part.end - part.begin].data)

    def _crc(self, slot: int) -> int:
        if not self.plan.tensors[slot].nbytes:
            return 0
        with self._lock:
            found = self._slots[slot].whole(self.plan.tensors[slot].nbytes)
        assert found is not None  # a literal with a checksum stands behind what it is of
        return found


def expect(plan: FilePlan, pending: Sequence[int], records: Records) -> None:
    """Asks for records to be proven that an earlier run, which wrote this file, had read in part."""
    numbers = plan.number[plan.reads.item].tolist()
    rows = {number: row for row, number in reversed(list(enumerate(numbers)))}
    specs = (*plan.tensors, *plan.inputs)
    for number in pending:
        spec = specs[int(plan.reads.tensor[rows[number]])]
        shape = tuple(plan.reads.shape[rows[number], : len(spec.shape)].tolist())
        records.expect(_place(plan, rows[number], shape, spec))


def _place(plan: FilePlan, row: int, shape: tuple[int, ...], tensor: PlannedTensor) -> Place:
    at = int(plan.reads.item[row])
    item, view = plan.items[at], view_of(plan.reads, row, len(shape))
    path = plan.files[item.file].path
    return Place(int(plan.number[at]), path, item, tensor.source_dtype, shape, view, tensor.name)
