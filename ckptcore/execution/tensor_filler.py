"""Make the bytes of a tensor part of an output file: read, computed, cast, and summed on the way.

Any worker makes parts in any order, with a `Workspace` of its own. An accelerator, if there is one, casts and
computes those of a job in few batches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptcore.core.box import Box, is_run
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Chunks, view_of
from ckptcore.execution.device import DeviceSlots
from ckptcore.execution.small_tensors import SmallTensors
from ckptcore.fingerprints.statistics import FileStatistics
from ckptcore.fingerprints.sums import ZERO, Sum, add, box_sum, pack
from ckptcore.planning.file_plan import COMPARE, FilePlan, PlannedTensor
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import LiteralPart, TensorPart
from ckptcore.reading.casting import cast_into, derive_into
from ckptcore.reading.checksums import Records
from ckptcore.reading.chunk_reader import COPY, READ, ChunkedTensor, ChunkReader
from ckptcore.reading.gather import Bytes, Overlap, tile_view
from ckptcore.reading.payload import Payload, StoredChunk
from ckptcore.store import Store

if TYPE_CHECKING:
    from ckptcore.execution.device_batch import DeviceBatch, OutputRange

_DEVICE_SUM = 1 << 20  # bytes: a sum there takes a dozen kernels, here as long as to begin them


@dataclass(frozen=True, slots=True)
class Workspace:
    """One worker's own buffers of a tile, and the slots of all workers on a device, if any.

    Attributes:
        scratch: For what is read and not yet in its place.
        cast: For elements before they are cast, and for inputs of derived tensors.
        slots: None where everything stays on the host.
    """

    scratch: Bytes
    cast: Bytes
    slots: DeviceSlots | None = None

    def of(self, nbytes: int) -> Workspace:
        """Return the first bytes of these buffers."""
        return Workspace(self.scratch[:nbytes], self.cast[:nbytes], self.slots)


class TensorFiller:
    """Fills the tensor parts of one output file. Safe for threads."""

    def __init__(self, plan: FilePlan, source: Store, settings: Settings, records: Records) -> None:
        self._plan = plan
        self._chunks = ChunkReader(_PlannedReads(plan), records, compare=settings.verify)
        self._small = SmallTensors(plan, source, records) if settings.verify else None
        self._sums = [ZERO] * len(plan.columns) if settings.fingerprint else None
        self._statistics = FileStatistics(len(plan.columns), self._run_of) if settings.stats else None
        self._passes = settings.fingerprint or settings.stats
        self._lock = threading.Lock()

    @property
    def sums(self) -> bytes | None:
        """Return what the file adds to the fingerprint of each tensor, packed; None when they are off."""
        return pack(self._sums) if self._sums is not None else None

    @property
    def statistics(self) -> bytes | None:
        """Return the statistics of the boxes of tensors in the file, packed; None when they are off."""
        return self._statistics.pack() if self._statistics is not None else None

    def strides(self, tensor: int, row: int) -> tuple[int, ...] | None:
        """Return the strides, elements, of a chunk of a tensor as its item has them; None when row-major."""
        return self._chunks.strides(self._stored(tensor), row)

    def fill(self, part: TensorPart, target: Bytes, workspace: Workspace, *, counts: bool = True) -> None:
        """Write the bytes of a part, as in the output file, into ``target``.

        Args:
            part: The part.
            target: Where its bytes go.
            workspace: The worker's buffers.
            counts: Add the part to fingerprint and statistics.

        Raises:
            DamagedCheckpoint: There are holes, wrong checksums, or copies that differ.
        """
        tensor = self._plan.tensors[part.tensor]
        changes = tensor.dtype != tensor.source_dtype
        if part.tensor in self._plan.derived:
            self._derive(part, target, workspace)
        else:
            # Elements before a cast go into a buffer of their own; others directly to their place.
            tile = tile_view(workspace.cast if changes else target, part.box.shape, tensor.source_dtype)
            self._chunks.read(self._stored(part.tensor), part.box, tile, workspace.scratch)
            if changes:
                cast_into(tile, tensor.source_dtype, target, tensor.dtype)
        if self._passes and counts:
            self._sum(part, workspace.cast if changes else target, workspace)

    def fill_small(
        self,
        parts: Sequence[tuple[int, LiteralPart | TensorPart]],
        buffer: Bytes,
        workspace: Workspace,
        *,
        counts: bool = True,
    ) -> frozenset[int]:
        """Fill the small tensors of a job, many at a time.

        Args:
            parts: The job's parts, with their first bytes in ``buffer``.
            buffer: Of the job.
            workspace: The worker's buffers.
            counts: Add the parts to fingerprint and statistics.

        Returns:
            The tensors that are filled; `fill` is for the others.
        """
        if self._small is None or not self._small.any:
            return frozenset()
        filled = self._small.read(parts, buffer, workspace.scratch)
        if self._passes and counts:
            for start, part in parts:
                if isinstance(part, TensorPart) and part.tensor in filled:
                    self._sum(part, buffer[start : start + part.nbytes], workspace)
        return filled

    def fill_on_device(
        self,
        parts: Sequence[tuple[int, LiteralPart | TensorPart]],
        output: Bytes,
        workspace: Workspace,
        *,
        counts: bool = True,
    ) -> frozenset[int]:
        """Fill what a device casts and computes of a job; what only moves would cross the bus twice.

        Args:
            parts: The job's parts, with their first bytes in ``output``.
            output: The job's buffer.
            workspace: The worker's buffers.
            counts: Add the parts to fingerprint and statistics.

        Returns:
            The tensors that are filled; `fill` is for the others.
        """
        slots, filled = workspace.slots, set[int]()
        if slots is None:
            return frozenset()
        # A late import, here and below: most conversions have no device.
        from ckptcore.execution.device_batch import DeviceBatch, OutputRange

        batch = DeviceBatch(workspace.cast, output)
        for start, part in parts:
            if not isinstance(part, TensorPart):
                continue
            tensor = self._plan.tensors[part.tensor]
            derived = part.tensor in self._plan.derived
            if not derived and tensor.dtype == tensor.source_dtype:
                continue
            add = self._compute_in if derived else self._cast_in
            place = OutputRange(start, part.nbytes, tensor.dtype)
            if not add(batch, part, place, workspace, counts):
                self._run(batch, slots)
                batch = DeviceBatch(workspace.cast, output)
                fits = add(batch, part, place, workspace, counts)
                assert fits  # a part is at most a tile, with all of its inputs
            filled.add(part.tensor)
        self._run(batch, slots)
        return frozenset(filled)

    def runs(self, part: TensorPart) -> list[tuple[Payload, Overlap]] | None:
        """Return the chunks of a part if it is complete runs of them, uncast, row-major, in plain files.

        Return None otherwise. `copied` ends their use.
        """
        tensor = self._plan.tensors[part.tensor]
        # The kernel moves bytes; anything that changes them needs this process.
        if tensor.dtype != tensor.source_dtype or part.tensor in self._plan.derived:
            return None
        stored, chunk_runs = self._stored(part.tensor), []
        for overlap in self._chunks.overlaps(stored, part.box):
            inside = overlap.common.within(overlap.chunk)
            # Both sides must be one run, in the same order.
            if not is_run(part.box.shape, overlap.common.shape) or not is_run(
                overlap.chunk.shape, inside.shape
            ):
                return None
            # Views with strides or flags, and decoded items, have no run in a file.
            _, payload = self._chunks.find(stored, overlap)
            if payload.path is None or payload.strides is not None or payload.flags:
                return None
            chunk_runs.append((payload, overlap))
        return chunk_runs

    def copied(self, part: TensorPart, runs: list[tuple[Payload, Overlap]]) -> None:
        """Count the runs of a part that the kernel has copied."""
        for _, overlap in runs:
            self._chunks.done(self._stored(part.tensor), overlap)

    def close(self) -> None:
        """Close what was resolved of the source."""
        self._chunks.close()

    def _stored(self, number: int) -> ChunkedTensor:
        """Return a tensor of the plan, or, behind these, an input of derived ones, as it is stored."""
        tensors = self._plan.tensors
        if number < len(tensors):
            # Each element is read once, so that a record's checksum can be put together from its parts.
            return ChunkedTensor(number, tensors[number].name, tensors[number].source_dtype, once=True)
        tensor = self._plan.inputs[number - len(tensors)]
        once = number - len(tensors) in self._plan.summed_once
        return ChunkedTensor(number, tensor.name, tensor.source_dtype, once)

    def _inputs(self, part: TensorPart) -> Iterator[tuple[ChunkedTensor, Box]]:
        """Yield the inputs of a computed part, each with the box that is needed of it."""
        node = self._plan.derived[part.tensor]
        for i, box in zip(node.inputs, FUNCTIONS[node.fn].needs(part.box, node.params), strict=True):
            yield self._stored(len(self._plan.tensors) + i), box

    def _derive(self, part: TensorPart, target: Bytes, workspace: Workspace) -> None:
        """Compute a part: its inputs are gathered into the cast buffer, behind room for the result."""
        tensor, node = self._plan.tensors[part.tensor], self._plan.derived[part.tensor]
        room = part.box.numel * BY_NAME[tensor.source_dtype].itemsize
        offset, inputs = room, []
        for stored, box in self._inputs(part):
            nbytes = box.numel * BY_NAME[stored.dtype].itemsize
            offset += -offset % 16  # aligned for the widest elements
            tile = tile_view(workspace.cast[offset : offset + nbytes], box.shape, stored.dtype)
            self._chunks.read(stored, box, tile, workspace.scratch)
            inputs.append((tile, stored.dtype))
            offset += nbytes
        derive_into(node, part.box, inputs, target, tensor.dtype, workspace.cast[:room])

    def _cast_in(
        self, batch: DeviceBatch, part: TensorPart, place: OutputRange, workspace: Workspace, counts: bool
    ) -> bool:
        """Read a part that is cast in a batch; return False if the batch has no room."""
        from ckptcore.execution.device_batch import SumRequest

        tensor, stored = self._plan.tensors[part.tensor], self._stored(part.tensor)
        sums = self._sums is not None and counts
        large = part.box.numel * BY_NAME[stored.dtype].itemsize >= _DEVICE_SUM
        asked = SumRequest(part, tensor.full) if sums and large else None
        elements = batch.cast(part.box.numel, stored.dtype, place, asked)
        if elements is None:
            return False
        tile = tile_view(elements, part.box.shape, stored.dtype)
        # Copies are compared before the cast, which may make different values equal.
        self._chunks.read(stored, part.box, tile, workspace.scratch)
        if counts:
            self._measure(part, elements)
        if sums and asked is None:
            self._add(part, box_sum(stored.dtype, tensor.full, part.box, elements, workspace.scratch))
        return True

    def _compute_in(
        self, batch: DeviceBatch, part: TensorPart, place: OutputRange, workspace: Workspace, counts: bool
    ) -> bool:
        """Read the inputs of a part that is computed in a batch; return False if the batch has no room."""
        from ckptcore.execution.device_batch import StoredInput

        node, inputs = self._plan.derived[part.tensor], list(self._inputs(part))
        shape = self._plan.tensors[part.tensor].full if self._sums is not None and counts else None
        needs = [StoredInput(box.shape, stored.dtype) for stored, box in inputs]
        measured = self._statistics is not None and counts
        memories = batch.compute(node, part, needs, place, shape, uncast=measured)
        if memories is None:
            return False
        for (stored, box), memory in zip(inputs, memories, strict=True):
            self._chunks.read(stored, box, tile_view(memory, box.shape, stored.dtype), workspace.scratch)
        return True

    def _run(self, batch: DeviceBatch, slots: DeviceSlots) -> None:
        """Let the device do a batch; count what it found."""
        sums, uncast = batch.run(slots)
        for part, part_sum in sums:
            self._add(part, part_sum)
        for part, elements in uncast:
            self._measure(part, elements)

    def _sum(self, part: TensorPart, source: Bytes, workspace: Workspace) -> None:
        """Sum a part on the host, as it is before any cast."""
        tensor = self._plan.tensors[part.tensor]
        elements = source[: part.box.numel * BY_NAME[tensor.source_dtype].itemsize]
        self._measure(part, elements)
        if self._sums is not None:
            self._add(part, box_sum(tensor.source_dtype, tensor.full, part.box, elements, workspace.scratch))

    def _measure(self, part: TensorPart, elements: Bytes) -> None:
        """Add a part, before any cast, to the statistics of a tensor's box in this file."""
        if self._statistics is not None:
            width = BY_NAME[self._plan.tensors[part.tensor].dtype].itemsize
            self._statistics.add(part.tensor, part.offset // width, elements)

    def _run_of(self, number: int) -> tuple[str, int]:
        tensor = self._plan.tensors[number]
        return tensor.source_dtype, tensor.box.numel

    def _add(self, part: TensorPart, part_sum: Sum) -> None:
        """Add a part's sum to that of a tensor's box in this file."""
        assert self._sums is not None  # the caller has checked
        with self._lock:
            self._sums[part.tensor] = add(self._sums[part.tensor], part_sum)


class _PlannedReads:
    """The reads of a file plan, as a `ckptcore.reading.chunk_reader.ChunkTable`."""

    def __init__(self, plan: FilePlan) -> None:
        self._plan = plan

    @property
    def chunks(self) -> Chunks:
        return self._plan.reads

    def role(self, row: int) -> int:
        return COPY if self._plan.op[row] == COMPARE else READ

    def asked(self, tensor: ChunkedTensor) -> Box:
        own = self._plan.tensors
        if tensor.number < len(own):
            return own[tensor.number].box
        return own[self._plan.summed_once[tensor.number - len(own)]].box  # asked of inputs that are read once

    def stored(self, tensor: ChunkedTensor, row: int, shape: tuple[int, ...]) -> StoredChunk:
        return _stored_chunk(self._plan, row, shape, tensor.dtype, tensor.fqn)


def expect(plan: FilePlan, pending: Sequence[int], records: Records) -> None:
    """Request the verification of records that an earlier run, which wrote this file, had read in part."""
    rows = {n: row for row, n in reversed(list(enumerate(plan.number[plan.reads.item].tolist())))}
    tensors: tuple[PlannedTensor, ...] = (*plan.tensors, *plan.inputs)
    for number in pending:
        row = rows[number]
        tensor = tensors[int(plan.reads.tensor[row])]
        shape = tuple(plan.reads.shape[row, : len(tensor.shape)].tolist())
        records.expect(_stored_chunk(plan, row, shape, tensor.source_dtype, tensor.name))


def _stored_chunk(plan: FilePlan, row: int, shape: tuple[int, ...], dtype: str, fqn: str) -> StoredChunk:
    item_row = int(plan.reads.item[row])
    item, view = plan.items[item_row], view_of(plan.reads, row, len(shape))
    return StoredChunk(int(plan.number[item_row]), plan.files[item.file].path, item, dtype, shape, view, fqn)
