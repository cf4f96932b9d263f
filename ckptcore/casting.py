"""Casting: how do a tile's elements change dtype, on which device? Torch does it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptcore.errors import DeviceUnavailable


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
