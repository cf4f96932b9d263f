"""Fingerprint the model of an inference engine, as the folder that it was loaded from.

An engine joins tensors of the files, cuts them for its ranks, and pads them. Which elements are where, its
own loader knows: it runs once more, with tensors of the files that have no values, and each copy that it asks
for is noted instead of made. What it would copy into is summed where it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ckptcore.core.box import Box
from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.fingerprints.result import Fingerprints
from ckptcore.live_model.views import corner_of, dims_of
from ckptcore.loading.live_fingerprint import LiveParts, fingerprint_parts
from ckptcore.utils.text import listed

# Tensors of one dtype are parts of one storage, behind this many elements: where a view begins says which
# tensor it is of. What an engine computes has a storage of its own, and begins before them.
_FIRST = 1 << 40
# On any device, in any dtype and order of memory.
_SAME_ELEMENTS = frozenset({"bfloat16", "clone", "contiguous", "cpu", "cuda", "float", "half", "to"})
_HINT = "fingerprint it before the engine rearranges its weights, or compare the folder that it was given"


def fingerprint_engine(model: Any, specs: Sequence[TensorSpec]) -> Fingerprints:
    """Fingerprint what an engine holds, under the names of the files; all ranks of the engine call it.

    Args:
        model: A module with a method ``load_weights`` that takes (name, tensor) of each tensor of the files.
        specs: The tensors of the files.

    Returns:
        The fingerprint that the folder has, if nothing was cast.

    Raises:
        UsageError: It is not comparable: the engine has rearranged weights, or computes them from the files.
        NameMismatch: It is not comparable: the engine holds nothing of a tensor.
        DamagedCheckpoint: Ranks have different values of one box.
    """
    fingerprints = fingerprint_parts(partial(_parts, model, specs), None)
    taken = {fqn for fqn, *_ in fingerprints.tensors}
    left_out = [spec.fqn for spec in specs if spec.numel and spec.fqn not in taken]
    if left_out:
        raise NameMismatch(
            f"cannot fingerprint: not comparable: the engine takes nothing of {listed(left_out)}",
            hint=_HINT,
            missing=left_out,
        )
    return fingerprints


def _parts(model: Any, specs: Sequence[TensorSpec], rank: int) -> LiveParts:
    """Return what this rank holds of the files."""
    files = _FileTensors(specs)
    parts, dtypes = LiveParts(rank), dict[str, str]()
    with torch.no_grad(), _Copies() as copies:
        try:
            model.load_weights(iter(files))
        except Exception as error:  # an assertion, or anything else of a loader that misses a parameter
            reason = f"its loader does not take {files.last!r} ({type(error).__name__}: {error})"
            raise _not_comparable(reason) from error
    for memory, view in copies.copies:
        spec, box, memory = files.box_of(view, memory)
        dtype = str(memory.dtype).removeprefix("torch.")
        if dtypes.setdefault(spec.fqn, dtype) != dtype:
            raise _not_comparable(f"parts of {spec.fqn} have the dtypes {dtypes[spec.fqn]} and {dtype}")
        if spec.fqn not in parts.summed:
            parts.add_tensor(spec.fqn, dtype, spec.shape)
        parts.add_part(spec.fqn, box, memory)
    return parts


class _Copies(TorchFunctionMode):
    """Note copies from tensors without values into those of a model, and leave the model as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(first, torch.Tensor):
            if first.is_meta:
                if name in _SAME_ELEMENTS:
                    return first
            elif func is torch.Tensor.copy_:
                self.copies.append((first, args[1]))
                return first
            elif func is torch.Tensor.__setitem__:
                if isinstance(args[2], torch.Tensor):
                    self.copies.append((first[args[1]], args[2]))
                return None
            elif name == "__set__":  # of `data`
                return None
            elif name.endswith("_") and not name.endswith("__"):
                return first  # such as zeros behind the last row of a padded vocabulary: they are there
        return func(*args, **(kwargs or {}))


class _FileTensors:
    """The tensors of the files, without values. last: name of the last one that was taken."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = [spec for spec in specs if spec.numel]
        self._starts = [_FIRST, *(_FIRST + n for n in accumulate(spec.numel for spec in self._specs))]
        self.last = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        storages: dict[str, torch.Tensor] = {}
        for spec, start in zip(self._specs, self._starts, strict=False):
            if spec.dtype not in storages:
                kind = getattr(torch, spec.dtype)
                storages[spec.dtype] = torch.empty(self._starts[-1], dtype=kind, device="meta")
            self.last = spec.fqn
            yield spec.fqn, storages[spec.dtype][start : start + spec.numel].view(spec.shape)

    def box_of(self, view: torch.Tensor, memory: torch.Tensor) -> tuple[TensorSpec, Box, torch.Tensor]:
        """Return (tensor, box of it, memory of the box's elements) of a view, and what it is copied to."""
        row = bisect_right(self._starts, view.storage_offset()) - 1 if view.is_meta else -1
        if not 0 <= row < len(self._specs) or view.numel() != memory.numel():
            raise _not_comparable("it computes a parameter from tensors of the files")
        spec = self._specs[row]
        start, extent = int(view.storage_offset()) - self._starts[row], tuple(view.shape)
        dims = dims_of(spec.shape, start, view.stride(), extent)
        if dims is None:
            raise _not_comparable(f"a part that it holds of {spec.fqn} is no box")
        lengths = [1] * len(spec.shape)
        for dim, length in zip(dims, extent, strict=True):
            if dim is not None:
                lengths[dim] = length
        along = [dim for dim in dims if dim is not None]
        order = sorted(range(len(along)), key=along.__getitem__)
        several = [length for dim, length in zip(dims, extent, strict=True) if dim is not None]
        box = Box(corner_of(spec.shape, start), tuple(lengths))
        return spec, box, memory.reshape(several).permute(order).reshape(lengths)


def _not_comparable(reason: str) -> UsageError:
    return UsageError(f"cannot fingerprint: not comparable: {reason}", hint=_HINT)
