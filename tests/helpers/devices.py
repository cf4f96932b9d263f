"""Devices of tests: a twin whose work happens as late as it may, and counters of what a device is asked."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckptcore.execution.device import DeviceSlot

# Operations that make no kernel: other views of a memory, and memory without values.
_VIEWS = ("view", "as_strided", "slice", "select", "detach", "alias", "expand", "permute", "split", "empty")
_VIEWS += ("unsqueeze", "squeeze", "_unsafe_view", "_reshape_alias", "t", "unflatten", "new_empty")


class LateSlot(DeviceSlot):
    """A slot on the CPU whose transfers and kernels happen when a worker waits for them, and not before.

    Its memory has other values before each batch, as after the batch of another worker.
    """

    counts: ClassVar[Counter[str]] = Counter()

    def bring(self, source: np.ndarray) -> None:
        self.counts["to the device"] += 1
        self.counts["bytes to the device"] += len(source)
        super().bring(source)

    def take_back(self, values: torch.Tensor, target: np.ndarray) -> None:
        self.counts["back"] += 1
        self.counts["bytes back"] += target.nbytes
        super().take_back(values, target)

    def _begin(self, work: Callable[[DeviceSlot], None]) -> None:
        for memory in (self.inputs, self.outputs):
            memory.random_(0, 256)
        self._work = work

    def _wait(self) -> None:
        self.counts["waits"] += 1
        with Operations() as operations:
            self._work(self)
        self.counts["kernels"] += operations.kernels
        self.counts["hidden waits"] += operations.values_asked
        self.counts["most bytes"] = max(self.counts["most bytes"], operations.most_bytes)


class Operations(TorchDispatchMode):
    """What torch is asked: kernels, values on the host, and the most bytes that it has made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.values_asked = self.most_bytes = 0
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.values_asked += name == "_local_scalar_dense"
        self.kernels += name not in _VIEWS
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in given:
            self._made.append(weakref.ref(result))
        self._made = [made for made in self._made if made() is not None]
        storages = [made.untyped_storage() for made in (ref() for ref in self._made) if made is not None]
        bytes_of = {storage._cdata: storage.nbytes() for storage in storages}
        self.most_bytes = max(self.most_bytes, sum(bytes_of.values()))
        return result
