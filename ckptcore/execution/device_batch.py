"""Batch the tensors that a device casts, computes and sums.

A batch is laid out in a worker's pinned memory, and crosses the bus once. Neighbours of one dtype are cast
by one kernel, and come back with one copy, directly to their place in the output. Whether there are NaNs,
and the sums, come back beside them. Devices write other bits for a NaN than the CPU does (CUDA: 0x7FFF for
float16), and an output's bytes must not depend on the device: what has one is cast or computed once more on
the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckptcore.core.box import Box
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Derived
from ckptcore.execution.device import ANSWERS, DeviceSlot, DeviceSlots
from ckptcore.fingerprints.sums import Sum, box_sum
from ckptcore.planning.tiles import TensorPart
from ckptcore.reading.casting import cast_into, derive_into
from ckptcore.reading.gather import Bytes, tile_view

_MASK = (1 << 64) - 1
_ALIGNED = 16  # bytes, for the widest elements
_HALVES = 1 << 20  # 8-bit floats that are looked at together, as float16: torch compares no narrower ones


class StoredInput(NamedTuple):
    """What a computed box needs of one input."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Count its bytes."""
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


class OutputRange(NamedTuple):
    """Where results go in the output, and their dtype there."""

    start: int
    nbytes: int
    dtype: str


class SumRequest(NamedTuple):
    """A part whose elements, before a cast, are summed; ``shape`` is that of its tensor."""

    part: TensorPart
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Cast:
    """Neighbours that are cast together: bytes of the batch from ``begin`` on become ``place``."""

    dtype: str
    begin: int
    nbytes: int
    result_start: int
    place: OutputRange
    sums: list[tuple[SumRequest, int]]  # with the first byte of each in the batch

    def enqueue(self, slot: DeviceSlot, output: Bytes) -> tuple[Any, list[Any]]:
        """Begin the cast; return whether there is a NaN, and the sums, all on the device."""
        values = _typed(slot, slot.inputs, self.begin, self.nbytes, self.dtype)
        result = _typed(slot, slot.outputs, self.result_start, self.place.nbytes, self.place.dtype)
        result.copy_(values)
        totals = [
            slot.sums.box_total(
                self.dtype, asked.shape, asked.part.box, slot.inputs[begin : begin + _size(asked, self.dtype)]
            )
            for asked, begin in self.sums
        ]
        _take_back(slot, self.result_start, self.place, output)
        return _nan_flag(slot.torch, values, result), totals

    def recast(self, memory: Bytes, output: Bytes) -> None:
        """Cast on the host."""
        tile = memory[self.begin : self.begin + self.nbytes]
        count = self.nbytes // BY_NAME[self.dtype].itemsize
        target = output[self.place.start : self.place.start + self.place.nbytes]
        cast_into(tile_view(tile, (count,), self.dtype), self.dtype, target, self.place.dtype)


@dataclass(slots=True)
class _Computed:
    """A box that is computed.

    Attributes:
        inputs: Where each begins in the batch.
        room: First byte of its elements before a cast, counted from where all inputs of the batch end; None
            where they are not cast.
        uncast: Whether these elements are wanted on the host.
    """

    node: Derived
    part: TensorPart
    inputs: tuple[tuple[int, StoredInput], ...]
    room: int | None
    result_start: int
    place: OutputRange
    shape: tuple[int, ...] | None  # of its tensor, if it is summed
    uncast: bool

    @property
    def box(self) -> Box:
        return self.part.box

    @property
    def dtype(self) -> str:
        return FUNCTIONS[self.node.fn].dtype

    def enqueue(self, slot: DeviceSlot, output: Bytes, memory: Bytes, rooms: int) -> tuple[Any, list[Any]]:
        """Begin the computation; return whether there is a NaN, and the sums, all on the device."""
        sources = [
            _typed(slot, slot.inputs, begin, stored.nbytes, stored.dtype).view(stored.shape)
            for begin, stored in self.inputs
        ]
        result = _typed(slot, slot.outputs, self.result_start, self.place.nbytes, self.place.dtype)
        elements, size = slot.outputs[self.result_start : self.result_start + self.place.nbytes], self._size
        if self.room is not None:
            elements = slot.inputs[rooms + self.room : rooms + self.room + size]
        values = elements.view(getattr(slot.torch, self.dtype))
        FUNCTIONS[self.node.fn].fill(
            slot.torch, self.box, sources, self.node.params, values.view(self.box.shape)
        )
        if self.room is not None:
            result.copy_(values)
            if self.uncast:
                slot.take_back(elements, self.elements(memory, rooms, output))
        totals = []
        if self.shape is not None:
            totals.append(slot.sums.box_total(self.dtype, self.shape, self.box, elements))
        _take_back(slot, self.result_start, self.place, output)
        return _nan_flag(slot.torch, values, values), totals

    def elements(self, memory: Bytes, rooms: int, output: Bytes) -> Bytes:
        """Return the memory on the host that has the elements before a cast, if they are wanted there."""
        if self.room is None:
            return output[self.place.start : self.place.start + self.place.nbytes]
        return memory[rooms + self.room : rooms + self.room + self._size]

    def recompute(self, memory: Bytes, rooms: int, output: Bytes) -> Sum | None:
        """Compute on the host; return the sum, if it is asked for."""
        inputs = [
            (tile_view(memory[begin : begin + stored.nbytes], stored.shape, stored.dtype), stored.dtype)
            for begin, stored in self.inputs
        ]
        elements = self.elements(memory, rooms, output)
        target = output[self.place.start : self.place.start + self.place.nbytes]
        derive_into(self.node, self.box, inputs, target, self.place.dtype, elements)
        return None if self.shape is None else box_sum(self.dtype, self.shape, self.box, elements)

    @property
    def _size(self) -> int:
        return self.box.numel * BY_NAME[self.dtype].itemsize


@dataclass(slots=True)
class DeviceBatch:
    """What one worker gives a device at a time: adds parts until one finds no room, and runs.

    Attributes:
        memory: The worker's buffer for what the device gets, as large as a slot's memories.
        output: Where results go: the buffer of a job.
    """

    memory: Bytes
    output: Bytes
    _used: int = 0  # bytes of `memory` that cross the bus
    _rooms: int = 0  # bytes of results before a cast, behind what crosses
    _result_bytes: int = 0  # bytes of results
    _answers: int = 0
    _casts: list[_Cast] = field(default_factory=list)
    _computed: list[_Computed] = field(default_factory=list)

    def cast(
        self, count: int, dtype: str, place: OutputRange, asked: SumRequest | None = None
    ) -> Bytes | None:
        """Add ``count`` elements of ``dtype`` that are cast.

        Returns:
            Where the caller puts them before `run`; None if there is no room.
        """
        nbytes, answers = count * BY_NAME[dtype].itemsize, 2 if asked is not None else 0
        last = self._casts[-1] if self._casts else None
        begin, result_start = self._used, self._result_bytes
        # Sums read words.
        follows = (
            last is not None
            and _follow(last, begin, result_start, dtype, place)
            and not (asked and begin % 8)
        )
        if not follows:
            begin, result_start, answers = _aligned(begin), _aligned(result_start), answers + 1
        if not self._fits(begin + nbytes, 0, result_start + place.nbytes, answers):
            return None
        if last is None or not follows:
            last = _Cast(dtype, begin, 0, result_start, OutputRange(place.start, 0, place.dtype), [])
            self._casts.append(last)
        last.nbytes += nbytes
        last.place = last.place._replace(nbytes=last.place.nbytes + place.nbytes)
        if asked is not None:
            last.sums.append((asked, begin))
        self._used, self._result_bytes, self._answers = (
            begin + nbytes,
            result_start + place.nbytes,
            self._answers + answers,
        )
        return self.memory[begin : begin + nbytes]

    def compute(
        self,
        node: Derived,
        part: TensorPart,
        inputs: Sequence[StoredInput],
        place: OutputRange,
        shape: tuple[int, ...] | None = None,
        *,
        uncast: bool = False,
    ) -> tuple[Bytes, ...] | None:
        """Add a box that is computed.

        Args:
            node: How it is computed.
            part: The box.
            inputs: What it needs.
            place: Where it goes.
            shape: Of its tensor, if it is summed.
            uncast: Whether `run` returns its elements before a cast.

        Returns:
            Where the caller puts the inputs before `run`; None if there is no room.
        """
        begins, end, dtype = list[int](), self._used, FUNCTIONS[node.fn].dtype
        for stored in inputs:
            begins.append(_aligned(end))
            end = begins[-1] + stored.nbytes
        room = _aligned(part.box.numel * BY_NAME[dtype].itemsize) if place.dtype != dtype else 0
        result_start, answers = _aligned(self._result_bytes), 1 if shape is None else 3
        if not self._fits(end, room, result_start + place.nbytes, answers):
            return None
        start = self._rooms if room else None
        input_places = tuple(zip(begins, inputs, strict=True))
        self._computed.append(_Computed(node, part, input_places, start, result_start, place, shape, uncast))
        self._used, self._result_bytes, self._answers = (
            end,
            result_start + place.nbytes,
            self._answers + answers,
        )
        self._rooms += room
        return tuple(self.memory[begin : begin + stored.nbytes] for begin, stored in input_places)

    def run(self, slots: DeviceSlots) -> tuple[list[tuple[TensorPart, Sum]], list[tuple[TensorPart, Bytes]]]:
        """Do it; the results are in the output.

        Returns:
            The sums that were asked for, and the uncast elements of computed boxes. The caller uses these
            before the batch's memory is used again.
        """
        if not self._answers:
            return [], []
        rooms = _aligned(self._used)
        with slots.one() as slot:
            slot.run(lambda device: self._enqueue(device, rooms))
            answers = slot.answers[: self._answers].tolist()
        lanes = iter(answers[len(self._casts) + len(self._computed) :])
        sums = list[tuple[TensorPart, Sum]]()
        for cast, odd in zip(self._casts, answers, strict=False):
            if odd:
                cast.recast(self.memory, self.output)
            sums += [(asked.part, _lanes(lanes)) for asked, _ in cast.sums]
        for computed, odd in zip(self._computed, answers[len(self._casts) :], strict=False):
            summed = _lanes(lanes) if computed.shape is not None else None
            if odd:
                summed = computed.recompute(self.memory, rooms, self.output)
            if summed is not None:
                sums.append((computed.part, summed))
        return sums, [
            (computed.part, computed.elements(self.memory, rooms, self.output))
            for computed in self._computed
            if computed.uncast
        ]

    def _enqueue(self, slot: DeviceSlot, rooms: int) -> None:
        slot.bring(self.memory[: self._used])
        enqueued = [cast.enqueue(slot, self.output) for cast in self._casts]
        enqueued += [computed.enqueue(slot, self.output, self.memory, rooms) for computed in self._computed]
        flags = slot.torch.stack([flag for flag, _ in enqueued]).to(slot.torch.int64)
        answers = slot.torch.cat([flags, *(total for _, totals in enqueued for total in totals)])
        slot.take_back(answers, slot.answers[: self._answers])

    def _fits(self, used: int, room: int, result_start: int, answers: int) -> bool:
        behind = _aligned(used) + self._rooms + room if self._rooms + room else used
        return max(behind, result_start) <= len(self.memory) and self._answers + answers <= ANSWERS


def _follow(last: _Cast, begin: int, result_start: int, dtype: str, place: OutputRange) -> bool:
    """Report whether elements directly follow those of a cast, there and here, and are cast alike."""
    same = (last.dtype, last.place.dtype) == (dtype, place.dtype)
    ends = (
        last.begin + last.nbytes,
        last.result_start + last.place.nbytes,
        last.place.start + last.place.nbytes,
    )
    return same and ends == (begin, result_start, place.start)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _size(asked: SumRequest, dtype: str) -> int:
    return asked.part.box.numel * BY_NAME[dtype].itemsize


def _lanes(numbers: Any) -> Sum:
    """Return the next two numbers as a sum: int64 has the same bits as the sum modulo 2**64."""
    return next(numbers) & _MASK, next(numbers) & _MASK


def _typed(slot: DeviceSlot, memory: Any, begin: int, nbytes: int, dtype: str) -> Any:
    return memory[begin : begin + nbytes].view(getattr(slot.torch, dtype))


def _take_back(slot: DeviceSlot, result_start: int, place: OutputRange, output: Bytes) -> None:
    target = output[place.start : place.start + place.nbytes]
    slot.take_back(slot.outputs[result_start : result_start + place.nbytes], target)


def _nan_flag(torch: Any, values: Any, result: Any) -> Any:
    """Return whether there is a NaN, on the device; ``result`` is the values after a cast, which keeps NaNs.

    The largest of some floats is NaN where one of them is, and takes no memory to find.
    """
    if values.is_complex():
        values = result = torch.view_as_real(values)
    if not values.is_floating_point():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    wide = next((t for t in (values, result) if t.is_floating_point() and t.element_size() > 1), None)
    if wide is not None:
        return wide.amax().isnan()
    return torch.stack([part.half().amax().isnan() for part in values.split(_HALVES)]).any()
