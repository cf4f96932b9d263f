"""Write one output file: fill its jobs in any order, flush them in file order.

`fill` runs on any worker at any time; `flush_in_order` passes each filled job in file order to the
digest, to checksums stored behind the data, and to writers that only append.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from blake3 import blake3

from ckptcore.core.box import flat_start
from ckptcore.core.dtype import BY_NAME
from ckptcore.errors import UsageError
from ckptcore.execution.parts import FilePart
from ckptcore.execution.plan_run import PlanRun
from ckptcore.execution.receipts import Receipt, joint_name
from ckptcore.execution.tensor_filler import TensorFiller, Workspace
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Job, LiteralPart, TensorPart
from ckptcore.reading.checksums import Records
from ckptcore.reading.gather import Bytes
from ckptcore.store import FileWriter, Store
from ckptcore.utils.crc32 import Runs, crc32

_RUN = 64 << 10  # bytes: for less, a kernel copy costs more than a read and a write


def open_writer(run: PlanRun, plan: FilePlan, part: FilePart | None = None) -> FileWriter:
    """Return the writer of an output file, or of a part of it.

    Raises:
        UsageError: Several processes cannot write one file of this store.
    """
    files = run.files
    # Parts of uploads have their budget of parts, which is how they are known.
    if part is not None and part.budget is not None:
        if run.uploads is None:
            raise UsageError(
                f"part {part.number} of {plan.path} belongs to an upload", hint="prepare it anew"
            )
        return run.uploads.writer(plan.index, plan.path, plan.nbytes, begin=part.begin, end=part.end)
    if part is None:
        # Files without tensors are small, and are staged.
        if run.uploads is not None and len(plan.columns):
            return run.uploads.writer(plan.index, plan.path, plan.nbytes)
        return files.writer(plan.path, plan.nbytes)
    joint = files.joint(joint_name(plan.path), plan.nbytes)
    if joint is None:
        raise UsageError(
            f"several processes cannot write {plan.path} in {files.url}", hint="write the file as a whole"
        )
    return joint


class FileWork:
    """One output file, or one part of one, while it is written.

    Args:
        plan: Plan of the file.
        source: The checkpoint's folder.
        records: Records of the source.
        writer: Receives the file's bytes.
        settings: Which checks are on.
        part: The part to write; None for the complete file. Checksums in a file of parts are filled in when
            its parts are joined.
    """

    def __init__(
        self,
        plan: FilePlan,
        source: Store,
        records: Records,
        writer: FileWriter,
        settings: Settings,
        part: FilePart | None = None,
    ) -> None:
        # Parts of a shared file are verified by digests, even where the complete file needs none.
        settings = settings if part is None else replace(settings, digest=True)
        self.plan, self.part = plan, part
        self.decodes = bool(plan.items.codec.any())
        self._source, self._records, self.writer = source, records, writer
        self._tensors = TensorFiller(plan, source, settings, records)
        self.strides = self._tensors.strides
        self._began = time.perf_counter()
        self._patched = any(x.crc_at for x in plan.literals)
        # Uploads have a digest of their parts, which their writer computes.
        self._digest = blake3() if settings.digest and writer.part_size is None else None
        # When no check needs the bytes, the kernel moves them.
        looked_at = settings.verify or settings.digest or settings.fingerprint or settings.stats
        # A direct copy never brings the bytes into this process, so nothing that needs them may be on.
        self._direct = not (looked_at or self._patched or writer.sequential)
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Job, Bytes, Callable[[Bytes], None]]] = {}
        self._next, self._flushing, self._closed = 0, False, False
        self._last: int | None = None
        self._slots: dict[int, Runs] = {}

    def fill(self, job: Job, buffer: Bytes, workspace: Workspace) -> None:
        """Put a job's bytes into ``buffer`` and, where the writer allows, into the file."""
        filled = frozenset[int]()
        # Many small tensors are read with few calls; what is left is filled one by one.
        if not self._direct and len(job.parts) > 1:
            filled = self._tensors.fill_small(job.parts, buffer, workspace, counts=self._counts(job))
        filled |= self._tensors.fill_on_device(job.parts, buffer, workspace, counts=self._counts(job))
        # What is filled has its own place in the buffer.
        reused = self._direct and not filled
        for offset, part in job.parts:
            if self._direct and self._copied(part, job.start + offset):
                continue
            target = buffer[: part.nbytes] if reused else buffer[offset : offset + part.nbytes]
            if isinstance(part, LiteralPart):
                data = self.plan.literals[part.literal].data
                target[:] = np.frombuffer(data, np.uint8)[part.begin : part.end]
            else:
                if part.tensor not in filled:
                    self._tensors.fill(part, target, workspace, counts=self._counts(job))
                if self._patched:
                    # Checksums are added up by place: parts of a tensor arrive in any order.
                    crc = crc32(target.data)
                    with self._lock:
                        self._slots.setdefault(part.tensor, Runs()).add(part.offset, part.nbytes, crc)
            if self._direct:
                self.writer.write(job.start + offset, target.data)
        # Written here only if no later byte can change it.
        if not (self._direct or self.writer.sequential or self._waits(job)):
            self.writer.write(job.start, buffer[: job.nbytes].data)

    def flush_in_order(self, job: Job, buffer: Bytes, give_back: Callable[[Bytes], None]) -> None:
        """Pass filled jobs on in file order, up to the first missing one."""
        with self._lock:
            self._waiting[job.sequence] = (job, buffer, give_back)
            if self._flushing:
                return
            # Nobody else is at it: who is takes this job, too, when its turn comes.
            self._flushing = True
        while True:
            with self._lock:
                ready = self._waiting.pop(self._next, None)
                if ready is None:
                    self._flushing = False
                    return
            # Only one thread gets here at a time, so jobs are flushed in file order.
            oldest, filled, free = ready
            # Its checksums are known now, as all bytes before it are flushed.
            late = self._waits(oldest)
            if late:
                self._patch(oldest, filled)
            first, last = self._inside(oldest)
            view = filled[first:last].data
            if (late or self.writer.sequential) and last > first:
                self.writer.write(oldest.start + first, view)
            if self._digest is not None:
                self._digest.update(view)
            # The buffer is free before the next job is looked at: another worker may wait for it.
            free(filled)
            with self._lock:
                self._next += 1

    def last_is(self, sequence: int) -> None:
        """Set the file's last job."""
        with self._lock:
            self._last = sequence

    def complete(self) -> Receipt | None:
        """Make the file, or the part, durable when its last job is flushed; return the receipt, once."""
        with self._lock:
            # Closed once: several workers may see the last job flushed.
            if self._closed or self._last is None or self._next <= self._last or self._flushing:
                return None
            self._closed = True
        self._tensors.close()
        self.writer.commit()
        numbers = self.plan.number.tolist()
        verified = sum(map(self._records.verified, numbers))
        uploaded = self.writer.uploaded
        digest = self._digest.hexdigest() if self._digest is not None else None
        receipt = Receipt(
            self.plan.index,
            self.plan.path,
            self.plan.nbytes,
            uploaded.digest if uploaded is not None else digest,
            round(time.perf_counter() - self._began, 6),
            verified,
            len(numbers) - verified,
            pending=tuple(filter(self._records.pending, numbers)),
            sums=self._tensors.sums,
            statistics=self._tensors.statistics,
            uploaded=uploaded,
        )
        if self.part is None:
            return receipt
        crcs = [(tensor, *piece) for tensor, runs in self._slots.items() for piece in runs]
        return replace(
            receipt,
            begin=self.part.begin,
            nbytes=self.part.nbytes,
            crcs=tuple(sorted(crcs)),
            proven=proven(self.plan, self._records),
        )

    def abort(self) -> None:
        """Discard the file."""
        self._tensors.close()
        if not self._closed:
            self.writer.abort()

    def _inside(self, job: Job) -> tuple[int, int]:
        """Return which bytes of a job are written: at the ends of a part of an upload, not all."""
        # Only uploads are cut at parts; a file of this machine is written as a whole.
        if self.part is None or self.part.budget is None:
            return 0, job.nbytes
        return max(self.part.begin - job.start, 0), min(self.part.end - job.start, job.nbytes)

    def _waits(self, job: Job) -> bool:
        """Report whether a job is written when it is flushed: it gets checksums of what comes before."""
        if not self._patched or self.part is not None:
            return False
        return any(isinstance(x, LiteralPart) and self.plan.literals[x.literal].crc_at for _, x in job.parts)

    def _counts(self, job: Job) -> bool:
        """Report whether a job counts for the fingerprint here: in the part where it begins."""
        return self.part is None or job.start >= self.part.begin

    def _copied(self, part: LiteralPart | TensorPart, first_byte: int) -> bool:
        """Report whether the kernel has copied a part from the source to byte ``first_byte`` of the file."""
        # A literal is in the plan, not in the source.
        if isinstance(part, LiteralPart) or part.nbytes < _RUN:
            return False
        runs = self._tensors.runs(part)
        if runs is None:
            return False
        itemsize = BY_NAME[self.plan.tensors[part.tensor].dtype].itemsize
        for payload, overlap in runs:
            assert payload.path is not None  # runs are in plain files
            start = (
                payload.start
                + flat_start(overlap.chunk.shape, overlap.common.within(overlap.chunk).offset) * itemsize
            )
            place = first_byte + flat_start(part.box.shape, overlap.common.within(part.box).offset) * itemsize
            nbytes = overlap.common.numel * itemsize
            # The caller then writes the part through the buffer, over runs that were copied: they are the
            # same bytes.
            if not self.writer.copy(self._source, payload.path, start, nbytes, place):
                return False
        self._tensors.copied(part, runs)
        return True

    def _patch(self, job: Job, buffer: Bytes) -> None:
        """Fill checksums into the job's literals."""
        for first, part in job.parts:
            slots = self.plan.literals[part.literal].crc_at if isinstance(part, LiteralPart) else ()
            if not slots or not isinstance(part, LiteralPart):
                continue
            target = buffer[first : first + part.nbytes]
            for offset, slot in slots:
                raw = self._crc(slot).to_bytes(4, "little")
                # A checksum may be at the border of two jobs.
                for n in range(4):
                    if part.begin <= offset + n < part.end:
                        target[offset + n - part.begin] = raw[n]

    def _crc(self, slot: int) -> int:
        if not self.plan.tensors[slot].nbytes:
            return 0
        with self._lock:
            crc = self._slots[slot].total(self.plan.tensors[slot].nbytes)
        assert crc is not None  # a literal with a checksum comes after its tensor
        return crc


def proven(plan: FilePlan, records: Records) -> str:
    """Return which source records of a file's plan are verified: one bit each, hex."""
    bits = np.packbits([records.verified(number) for number in plan.number.tolist()])
    return bits.tobytes().hex()
