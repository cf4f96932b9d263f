"""Casting and deriving: how do a tile's elements change dtype, or come from others, on which device?

Torch does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.box import Box
from ckptcore.derive import FUNCTIONS
from ckptcore.errors import DeviceUnavailable
from ckptcore.manifest import Derived


def cast_into(tile: npt.NDArray[Any], dtype: str, target: npt.NDArray[np.uint8], target_dtype: str,
              device: str) -> None:  # fmt: skip
    """Casts a row-major tile of ``dtype`` (as same-width integers) into the bytes ``target``.

    Rounds as torch rounds (to nearest, ties to even). Raises `DeviceUnavailable`.
    """
    torch = torch_on(device)
    source = torch.from_numpy(tile.reshape(-1).view(np.uint8)).view(getattr(torch, dtype))
    into = torch.from_numpy(target).view(getattr(torch, target_dtype))
    if device == "cpu":
        into.copy_(source)
    else:
        into.copy_(source.to(device).to(into.dtype))


def derive_into(node: Derived, box: Box, inputs: Sequence[tuple[npt.NDArray[Any], str]],
                target: npt.NDArray[np.uint8], target_dtype: str, device: str,
                spare: npt.NDArray[np.uint8]) -> None:  # fmt: skip
    """Computes the elements ``box`` of a derived tensor from its inputs into the bytes ``target``.

    inputs: row-major tiles over the boxes that `Function.needs` names, and their dtypes.
    spare: room for the box in the function's own dtype, where ``target_dtype`` is another.
    Raises `DeviceUnavailable`.
    """
    torch = torch_on(device)
    function = FUNCTIONS[node.fn]
    held = [
        torch.from_numpy(tile.reshape(-1).view(np.uint8)).view(getattr(torch, dtype)).reshape(tile.shape)
        for tile, dtype in inputs
    ]
    kind = getattr(torch, function.dtype)
    into = torch.from_numpy(target).view(getattr(torch, target_dtype)).reshape(box.shape)
    if device != "cpu":
        held = [t.to(device) for t in held]
        out = torch.empty(box.shape, dtype=kind, device=device)
    elif target_dtype == function.dtype:
        out = into
    else:
        out = torch.from_numpy(spare).view(kind).reshape(box.shape)
    function.fill(torch, box, held, node.params, out)
    if out is not into:
        into.copy_(out.to(into.dtype) if device != "cpu" else out)


@cache
def torch_on(device: str) -> Any:
    """torch, when it can use the device. One thread each: the workers are the parallelism."""
    import torch

    torch.set_num_threads(1)
    if device != "cpu":
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise DeviceUnavailable(f"cannot use device {device!r}: {str(error).splitlines()[0]}") from error
    return torch
