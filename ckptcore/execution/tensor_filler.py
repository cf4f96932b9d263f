"""Make the bytes of a tensor part of an output file: read, computed, cast, and summed on the way.

Any worker makes parts in any order, with a `Workspace` of its own. Parts that are cast are assembled on the
accelerator, if there is one, and copied back once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptcore.core.box import Box, is_run
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Chunks, view_of
from ckptcore.execution.device import DeviceStream
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


@dataclass(frozen=True, slots=True)
class Workspace:
    """One worker's own buffers of a tile, and its stream through a device, if any.

    Attributes:
        scratch: For what is read and not yet in its place.
        cast: For elements before they are cast, and for inputs of derived tensors.
        stream: None where tiles stay on the host.
    """

    scratch: Bytes
    cast: Bytes
    stream: DeviceStream | None = None

    def of(self, nbytes: int) -> Workspace:
        """Return the first bytes of these buffers."""
        return Workspace(self.scratch[:nbytes], self.cast[:nbytes], self.stream)


class TensorFiller:
    """Fills the tensor parts of one output file. Safe for threads."""

    def __init__(self, plan: FilePlan, source: Store, settings: Settings, records: Records) -> None:
        self._plan, self._device, self._verify = plan, settings.device, settings.verify
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
        # On a device only what is cast: what is only moved would cross the bus twice.
        elif workspace.stream is not None and changes:
            self._on_device(part, target, workspace, workspace.stream, counts=counts)
            return
        else:
            # Elements before a cast go into a buffer of their own; others directly to their place.
            tile = tile_view(workspace.cast if changes else target, part.box.shape, tensor.source_dtype)
            self._chunks.read(self._stored(part.tensor), part.box, tile, workspace.scratch)
            if changes:
                cast_into(tile, tensor.source_dtype, target, tensor.dtype, self._device)
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

    def _derive(self, part: TensorPart, target: Bytes, workspace: Workspace) -> None:
        """Compute a part: its inputs are gathered into the cast buffer, behind room for the result."""
        tensor, node = self._plan.tensors[part.tensor], self._plan.derived[part.tensor]
        room = part.box.numel * BY_NAME[tensor.source_dtype].itemsize
        offset, inputs = room, []
        for i, box in zip(node.inputs, FUNCTIONS[node.fn].needs(part.box, node.params), strict=True):
            stored = self._stored(len(self._plan.tensors) + i)
            nbytes = box.numel * BY_NAME[stored.dtype].itemsize
            offset += -offset % 16  # aligned for the widest elements
            tile = tile_view(workspace.cast[offset : offset + nbytes], box.shape, stored.dtype)
            self._chunks.read(stored, box, tile, workspace.scratch)
            inputs.append((tile, stored.dtype))
            offset += nbytes
        derive_into(node, part.box, inputs, target, tensor.dtype, self._device, workspace.cast[:room])

    def _on_device(
        self, part: TensorPart, target: Bytes, workspace: Workspace, stream: DeviceStream, *, counts: bool
    ) -> None:
        """Scatter, sum and cast a part on the device; copies are compared here, before the cast."""
        tensor, stored = self._plan.tensors[part.tensor], self._stored(part.tensor)
        tile = stream.tile(part.box.shape, stored.dtype)
        # Copies are compared before the cast, which may make different values equal.
        copies = self._chunks.fill(stored, part.box, tile, workspace.scratch)
        if self._sums is not None and counts:
            self._add(part, stream.sum(tile, stored.dtype, tensor.full, part.box))
        measured = self._statistics is not None and counts
        # Statistics and comparisons need the elements here: they are fetched once for both.
        if copies or measured:
            host_tile = tile_view(workspace.cast, part.box.shape, stored.dtype)
            stream.fetch(tile, host_tile.reshape(-1).view(np.uint8))
            if measured:
                self._measure(part, host_tile.reshape(-1).view(np.uint8))
            self._chunks.compare(stored, part.box, copies, host_tile, workspace.scratch)
        stream.fetch_cast(tile, stored.dtype, target, tensor.dtype, workspace.cast)

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
