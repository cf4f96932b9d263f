"""Hold what a device needs to change batches of tensors: pinned memory here, a few slots of memory there.

Workers share the slots. A worker has read a batch (`ckptcore.execution.device_batch`) before it takes one, so
it has it for the transfers and kernels alone, and other workers read meanwhile. It waits once, for all of the
batch. On "cpu" a slot does the same with torch alone, which tests it on machines without a device.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.errors import BudgetTooSmall
from ckptcore.fingerprints.device_sums import DeviceSums
from ckptcore.planning.tiles import DEVICE_SLOTS, paged_buffer
from ckptcore.reading.casting import torch_on

Bytes = npt.NDArray[np.uint8]
ANSWERS = 4096  # numbers that a batch may bring back beside its results


def host_buffer(nbytes: int, device: str) -> Bytes:
    """Allocate a tile on the host, in pinned memory if a device copies from it.

    Raises:
        DeviceUnavailable: torch cannot use the device.
        BudgetTooSmall: That much memory cannot be allocated, or pinned.
    """
    if device == "cpu":
        return paged_buffer(nbytes)
    torch = torch_on(device)
    try:
        pinned: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        raise BudgetTooSmall(f"cannot pin {nbytes} bytes of memory: {_first_line(error)}") from error
    return pinned


class DeviceSlot:
    """A stream on a device, memory there for what a batch brings, and memory for what it takes back.

    Args:
        device: Name of the device.
        nbytes: Bytes of each of the two memories.

    Raises:
        DeviceUnavailable: torch cannot use the device.
        BudgetTooSmall: The device has no room.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        self.torch = torch = torch_on(device)
        self.device = device
        try:
            self.inputs, self.outputs = (
                torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)
            )
        except RuntimeError as error:
            raise BudgetTooSmall(
                f"cannot allocate 2 buffers of {nbytes} bytes on {device}: {_first_line(error)}",
                hint="try a smaller --memory",
            ) from error
        self.answers = host_buffer(8 * ANSWERS, device).view(np.int64)
        self._stream = torch.cuda.Stream(device) if device != "cpu" else None
        # A thread that waits sleeps: others need the core to read.
        self._ended = torch.cuda.Event(blocking=True) if device != "cpu" else None
        self._sums: DeviceSums | None = None

    @property
    def sums(self) -> DeviceSums:
        """Return what sums tensors here; only work that `run` begins uses it."""
        if self._sums is None:
            self._sums = DeviceSums(self.torch, self.device)
        return self._sums

    def run(self, work: Callable[[DeviceSlot], None]) -> None:
        """Begin transfers and kernels, and wait for them once.

        Raises:
            BudgetTooSmall: The device has no room for what the kernels take.
        """
        try:
            self._begin(work)
            self._wait()
        except self.torch.OutOfMemoryError as error:
            raise BudgetTooSmall(
                f"cannot allocate memory on {self.device}: {_first_line(error)}",
                hint="try a smaller --memory",
            ) from error

    def bring(self, source: Bytes) -> None:
        """Copy bytes of the host to the beginning of the inputs."""
        self.inputs[: len(source)].copy_(self.torch.from_numpy(source), non_blocking=True)

    def take_back(self, values: Any, target: npt.NDArray[Any]) -> None:
        """Copy a tensor of the device to the host, into an array of its dtype."""
        self.torch.from_numpy(target).copy_(values, non_blocking=True)

    def _begin(self, work: Callable[[DeviceSlot], None]) -> None:
        with nullcontext() if self._stream is None else self.torch.cuda.stream(self._stream):
            work(self)
            if self._ended is not None:
                self._ended.record()

    def _wait(self) -> None:
        if self._ended is not None:
            self._ended.synchronize()


class DeviceSlots:
    """The slots of all workers of a run on one device.

    Two are enough: one batch is on its way there while the other comes back, and a worker reads and writes
    for much longer than it has a slot.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        self._free: queue.SimpleQueue[DeviceSlot] = queue.SimpleQueue()
        for _ in range(DEVICE_SLOTS):
            self._free.put(DeviceSlot(device, nbytes))

    @contextmanager
    def one(self) -> Iterator[DeviceSlot]:
        """Wait for a slot, and have it."""
        slot = self._free.get()
        try:
            yield slot
        finally:
            self._free.put(slot)


def slots_on(device: str, nbytes: int) -> DeviceSlots | None:
    """Return the slots of a run, each for batches of ``nbytes``; None where nothing leaves the host."""
    return None if device == "cpu" else DeviceSlots(device, nbytes)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
