"""Cast a tile's elements to another dtype, or compute them from other tensors, on the CPU.

Torch does this, with one exception: numpy casts between float32 and bfloat16, the most common cast, to the
same bits. Importing torch takes about as long as casting 10 GB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.manifest import Derived
from ckptcore.errors import DeviceUnavailable


def cast_into(tile: npt.NDArray[Any], dtype: str, target: npt.NDArray[np.uint8], target_dtype: str) -> None:
    """Cast a row-major tile to another dtype, rounding to nearest, ties to even, like torch.

    Args:
        tile: Elements of ``dtype``, as integers of the same width.
        dtype: Dtype of the tile.
        target: Receives the bytes.
        target_dtype: Dtype to cast to.
    """
    plain = PLAIN.get((dtype, target_dtype))
    if plain is not None and "torch" not in sys.modules:
        plain(tile.reshape(-1), target)
        return
    torch = torch_on("cpu")
    source = torch.from_numpy(tile.reshape(-1).view(np.uint8)).view(getattr(torch, dtype))
    torch.from_numpy(target).view(getattr(torch, target_dtype)).copy_(source)


def derive_into(
    node: Derived,
    box: Box,
    inputs: Sequence[tuple[npt.NDArray[Any], str]],
    target: npt.NDArray[np.uint8],
    target_dtype: str,
    spare: npt.NDArray[np.uint8],
) -> None:
    """Compute the elements ``box`` of a derived tensor from its inputs.

    Args:
        node: How the tensor is computed.
        box: Box of the derived tensor.
        inputs: Row-major tiles over the boxes from `Function.needs`, and their dtypes.
        target: Receives the bytes.
        target_dtype: Dtype to cast to.
        spare: Room for the box in the function's own dtype, used if ``target_dtype`` differs. The uncast box
            stays in it.
    """
    torch = torch_on("cpu")
    function = FUNCTIONS[node.fn]
    sources = [
        torch.from_numpy(tile.reshape(-1).view(np.uint8)).view(getattr(torch, dtype)).reshape(tile.shape)
        for tile, dtype in inputs
    ]
    kind = getattr(torch, function.dtype)
    into = torch.from_numpy(target).view(getattr(torch, target_dtype)).reshape(box.shape)
    cast = target_dtype != function.dtype
    out = torch.from_numpy(spare).view(kind).reshape(box.shape) if cast else into
    function.fill(torch, box, sources, node.params, out)
    if cast:
        into.copy_(out)


def _round_to_bfloat16(source: npt.NDArray[Any], target: npt.NDArray[np.uint8]) -> None:
    """Round to the upper halves, to nearest, ties to even.

    A NaN becomes all ones, as in torch's vector code (aten/src/ATen/cpu/vec/vec512/vec512_bfloat16.h,
    `cvtfp32_bf16`).
    """
    halves = target.view(np.uint16)
    room, odd = np.empty(_BLOCK, np.uint32), np.uint32(0x7FFF)
    for start in range(0, len(source), _BLOCK):
        bits = source[start : start + _BLOCK]
        sums, out = room[: len(bits)], halves[start : start + _BLOCK]
        np.right_shift(bits, 16, out=sums)
        np.bitwise_and(sums, 1, out=sums)
        np.add(sums, odd, out=sums)
        np.add(sums, bits, out=sums)
        np.right_shift(sums, 16, out=sums)
        np.copyto(out, sums, casting="unsafe")  # narrowing is vectorised, a copy of every other half is not
        values = bits.view(np.float32)
        if np.isnan(values.max()):
            out[np.isnan(values)] = 0xFFFF


def _widen_bfloat16(source: npt.NDArray[Any], target: npt.NDArray[np.uint8]) -> None:
    halves = target.view(np.uint16)
    halves[0::2] = 0
    halves[1::2] = source


_BLOCK = 1 << 16  # elements that fit a core's cache
PLAIN: dict[tuple[str, str], Callable[[npt.NDArray[Any], npt.NDArray[np.uint8]], None]] = {
    ("float32", "bfloat16"): _round_to_bfloat16,
    ("bfloat16", "float32"): _widen_bfloat16,
}


@cache
def torch_on(device: str) -> Any:
    """Return torch, if it can use the device. One thread each: the workers are the parallelism."""
    import torch

    torch.set_num_threads(1)
    require_device(device)
    return torch


def require_device(device: str) -> None:
    """Raise `DeviceUnavailable` if torch cannot use a device."""
    import torch

    if device == "cpu":
        return
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceUnavailable(f"cannot use device {device!r}: {str(error).splitlines()[0]}") from error
