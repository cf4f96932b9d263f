"""Reading into torch: one box of one tensor, or a live, possibly sharded, state dict in place."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptcore.box import Box
from ckptcore.boxreader import BoxReader
from ckptcore.cover import coverage
from ckptcore.dtype import BY_NAME
from ckptcore.errors import DamagedCheckpoint, NameMismatch, UnsupportedDtype
from ckptcore.gather import tile_view
from ckptcore.manifest import Manifest, TensorSpec
from ckptcore.records import Records
from ckptcore.selection import select
from ckptcore.sharding import local_parts
from ckptcore.store import Store, open_store

if TYPE_CHECKING:
    import torch

_SCRATCH = 16 << 20
_log = logging.getLogger("ckptcore")


def read_box(manifest: Manifest, fqn: str, box: Box | None, *, device: str, verify: bool) -> torch.Tensor:
    """A tensor, or a box of it; see `ckptcore.read`."""
    import torch

    if fqn not in manifest.index:
        raise KeyError(f"the checkpoint has no tensor {fqn!r}")
    row = manifest.index[fqn]
    spec = manifest.tensors[row]
    want = box or Box.whole(spec.shape)
    if len(want.shape) != len(spec.shape) or not Box.whole(spec.shape).contains(want):
        raise ValueError(f"{want} is outside {fqn} {list(spec.shape)}")
    _require_cover(manifest, [row])
    out = torch.empty(want.shape, dtype=getattr(torch, spec.dtype))
    store = open_store(manifest.root)
    try:
        _Filler(manifest, store, verify).fill(row, want, out)
    finally:
        store.close()
    return out.to(device)


def load_into(
    manifest: Manifest, state_dict: dict[str, Any], *, prefix: str, strict: bool, verify: bool
) -> list[str]:
    """Fills a live state dict; see `ckptcore.load_into`."""
    found = list(_tensors(state_dict, ""))
    wanted = dict(found)
    if len(wanted) != len(found):
        twice = next(n for n, c in Counter(n for n, _ in found).items() if c > 1)
        raise NameMismatch(f"two tensors of the state dict are both called {twice}")
    missing = [n for n in wanted if prefix + n not in manifest.index]
    if missing and strict:
        raise NameMismatch(
            f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors: {', '.join(missing[:5])}",
            hint="name the checkpoint's prefix, or pass strict=False", missing=missing,
        )  # fmt: skip
    if missing:
        _log.warning("left as they are, because the checkpoint lacks them: %s", ", ".join(missing))
    plans = [(n, local_parts(t)) for n, t in wanted.items() if n not in missing]
    for name, _ in plans:  # everything is compared before the first byte moves
        _require_fit(name, wanted[name], manifest.tensors[manifest.index[prefix + name]])
    _require_cover(manifest, [manifest.index[prefix + n] for n, _ in plans])
    store = open_store(manifest.root)
    filler = _Filler(manifest, store, verify)
    try:
        for name, parts in plans:
            for local, want in parts:
                if want.numel:
                    filler.fill(manifest.index[prefix + name], want, local)
    finally:
        store.close()
    return sorted(t.fqn for t in manifest.tensors if t.fqn.removeprefix(prefix) not in wanted
                  or not t.fqn.startswith(prefix))  # fmt: skip


def _require_cover(manifest: Manifest, rows: list[int]) -> None:
    holes = coverage(select(manifest, rows))
    if holes:
        raise DamagedCheckpoint(holes[0].message, findings=tuple(holes))


def _require_fit(name: str, tensor: Any, spec: TensorSpec) -> None:
    """Equal shapes, and dtypes that are equal or both floating-point."""
    here = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != spec.shape:
        raise NameMismatch(f"{name} is {list(tensor.shape)} here and {list(spec.shape)} in the checkpoint")
    if here != spec.dtype and not (BY_NAME[here].is_float and BY_NAME[spec.dtype].is_float):
        raise UnsupportedDtype(f"{name} is {here} here and {spec.dtype} in the checkpoint")


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for k, v in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(v, f"{path}.{k}" if path else str(k))


class _Filler:
    """Fills boxes from one store with one scratch buffer."""

    def __init__(self, manifest: Manifest, store: Store, verify: bool) -> None:
        self._manifest, self._store = manifest, store
        self._records = Records(store, len(manifest.items), verify)
        self._scratch = np.empty(_SCRATCH, np.uint8)

    def fill(self, row: int, want: Box, out: Any) -> None:
        """Copies the elements ``want`` of tensor ``row`` into ``out``, casting and moving as needed."""
        import torch

        dtype = self._manifest.tensors[row].dtype
        kind = getattr(torch, dtype)
        direct = out.device.type == "cpu" and out.dtype == kind and out.is_contiguous()
        target = out if direct else torch.empty(want.shape, dtype=kind)
        # What has copies is read from the first: `validate` compares them.
        reader = BoxReader(self._manifest, row, self._store, self._records, once=False, copies=False)
        try:
            reader.read(want, _integers(target, dtype), self._scratch)
        finally:
            reader.close()
        if not direct:
            with torch.no_grad():
                out.copy_(target)


def _integers(tensor: Any, dtype: str) -> Any:
    """A numpy view of a contiguous CPU tensor's memory, as integers of the element's width."""
    import torch

    if not tensor.numel():
        return np.empty(tuple(tensor.shape), np.uint8)
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    assert BY_NAME[dtype].itemsize * tensor.numel() == flat.nbytes
    return tile_view(flat, tuple(tensor.shape), dtype)
