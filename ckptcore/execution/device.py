"""Assemble, sum and cast tiles on an accelerator, through reused buffers.

Each worker has one `DeviceStream`: a stream, two tiles on the device, and room for a range that was read.
Ranges are copied to the device as they are and scattered there; the tile is summed and cast there, and copied
back once. The host's side of every transfer is pinned memory, so that copies run beside reading and beside
other streams. On "cpu" a stream does the same with torch alone, which tests it on machines without a device.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import CONJ, NEG
from ckptcore.errors import BudgetTooSmall
from ckptcore.fingerprints.device_sums import DeviceSums
from ckptcore.fingerprints.sums import Sum
from ckptcore.planning.tiles import paged_buffer
from ckptcore.reading.casting import cast_into, has_nan, torch_on
from ckptcore.reading.gather import tile_view

Bytes = npt.NDArray[np.uint8]
# Bits move as integers of their width, whatever they mean; 16 bytes are one complex number.
_UNITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


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


class DeviceStream:
    """One worker's stream and buffers on a device.

    The device holds three tiles, and at most `ckptcore.fingerprints.device_sums.ROOM` bytes more during sums.

    Args:
        device: Name of the device.
        nbytes: Bytes of a tile.

    Raises:
        DeviceUnavailable: torch cannot use the device.
        BudgetTooSmall: The device has no room.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        self._torch = torch = torch_on(device)
        self.device = device
        try:
            self._front, self._back, self._read = (
                torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(3)
            )
        except RuntimeError as error:
            raise BudgetTooSmall(
                f"cannot allocate 3 tiles of {nbytes} bytes on {device}: {_first_line(error)}",
                hint="try a smaller --memory or fewer --workers",
            ) from error
        self._stream = torch.cuda.Stream(device) if device != "cpu" else None
        self._copied = torch.cuda.Event() if device != "cpu" else None
        self._sums: DeviceSums | None = None

    def tile(self, shape: tuple[int, ...], dtype: str) -> DeviceTile:
        """Return a row-major tile on the device; its elements are undefined until they are placed."""
        unit = getattr(self._torch, _UNITS[BY_NAME[dtype].itemsize])
        nbytes = prod(shape) * BY_NAME[dtype].itemsize
        return DeviceTile(self, self._front[:nbytes].view(unit).reshape(shape))

    def fetch(self, tile: DeviceTile, into: Bytes) -> None:
        """Copy a tile's bits to the host."""
        self._home(tile.bits.reshape(-1).view(self._torch.uint8), into)

    def fetch_cast(self, tile: DeviceTile, dtype: str, into: Bytes, target_dtype: str, spare: Bytes) -> None:
        """Cast a tile of ``dtype`` on the device, and copy the result to the host.

        A tile with a NaN comes to ``spare``, memory of a tile on the host, and is cast there: see
        `ckptcore.reading.casting.has_nan`.
        """
        cast = self._back[: len(into)]
        with self._on():
            values = self.values(tile, dtype)
            self._cast(values, cast.view(getattr(self._torch, target_dtype)))
            odd = has_nan(values)
        if not odd:
            self._home(cast, into)
            return
        host_tile = tile_view(spare, tuple(tile.bits.shape), dtype)
        self.fetch(tile, host_tile.reshape(-1).view(np.uint8))
        cast_into(host_tile, dtype, into, target_dtype, "cpu")

    def _cast(self, values: Any, into: Any) -> None:
        into.copy_(values)

    def sum(self, tile: DeviceTile, dtype: str, shape: tuple[int, ...], box: Box) -> Sum:
        """Return what a tile adds to the sum of a tensor.

        Args:
            tile: The tile.
            dtype: Dtype of its elements.
            shape: Shape of the tensor.
            box: Box of the tile in the tensor.

        Raises:
            BudgetTooSmall: The device has no room for sums.
        """
        elements = tile.bits.reshape(-1).view(self._torch.uint8)
        try:
            with self._on():
                if self._sums is None:
                    self._sums = DeviceSums(self._torch, self.device)
                return self._sums.box_sum(dtype, shape, box, elements)
        except self._torch.OutOfMemoryError as error:
            raise BudgetTooSmall(
                f"cannot allocate memory for sums on {self.device}: {_first_line(error)}",
                hint="try a smaller --memory or fewer --workers",
            ) from error

    def values(self, tile: DeviceTile, dtype: str) -> Any:
        """Return the tile as a torch tensor of its dtype, on the device."""
        return tile.bits.reshape(-1).view(self._torch.uint8).view(getattr(self._torch, dtype))

    def place(
        self,
        target: Any,
        buffer: Bytes,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        flags: int,
    ) -> None:
        """Scatter a range that was read: its elements at ``strides`` go to ``target``.

        The buffer may be overwritten when this returns.
        """
        torch = self._torch
        with self._on():
            range_bytes = self._read[: len(buffer)]
            range_bytes.copy_(torch.from_numpy(buffer), non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            lazy = flags & (CONJ | NEG)
            kind = getattr(torch, dtype) if lazy else target.dtype
            values = range_bytes.view(kind).as_strided(shape, strides)
            if flags & CONJ:
                values = values.conj()
            if flags & NEG:
                values = -values
            (target.view(kind) if lazy else target).copy_(values)
        # The caller reuses the buffer: it waits for the copy alone, and not for the scattering.
        if self._copied is not None:
            self._copied.synchronize()

    def _home(self, bits: Any, into: Bytes) -> None:
        with self._on():
            self._torch.from_numpy(into).copy_(bits, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _on(self) -> Any:
        return nullcontext() if self._stream is None else self._torch.cuda.stream(self._stream)


def stream_on(device: str, nbytes: int) -> DeviceStream | None:
    """Return a worker's stream, or None where tiles stay on the host."""
    return None if device == "cpu" else DeviceStream(device, nbytes)


class DeviceTile:
    """A tile, or a part of one, on a device; ``bits`` is a torch tensor of integers of the same width."""

    __slots__ = ("_device_stream", "bits")

    def __init__(self, stream: DeviceStream, bits: Any) -> None:
        self._device_stream, self.bits = stream, bits

    def __getitem__(self, index: Any) -> DeviceTile:
        return DeviceTile(self._device_stream, self.bits[index])

    def place(
        self, buffer: Bytes, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, flags: int
    ) -> None:
        """See `DeviceStream.place`."""
        self._device_stream.place(self.bits, buffer, shape, strides, dtype, flags)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
