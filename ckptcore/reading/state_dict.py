"""Read any box of a tensor into existing torch memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptcore.core.box import Box
from ckptcore.core.coverage import coverage
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest
from ckptcore.core.subset import select
from ckptcore.errors import DamagedCheckpoint, NameMismatch, UnreadablePart, UsageError
from ckptcore.reading.box_reader import BoxReader
from ckptcore.reading.checksums import Records
from ckptcore.reading.gather import tile_view
from ckptcore.reading.rereading import rereading
from ckptcore.store import Store, open_source_store
from ckptcore.utils.near_names import did_you_mean
from ckptcore.utils.text import count

if TYPE_CHECKING:
    import torch

_SCRATCH = 16 << 20


def read_box(manifest: Manifest, fqn: str, box: Box | None, *, device: str, verify: bool) -> torch.Tensor:
    """Read a tensor, or a box of it; see `ckptcore.read`."""
    import torch

    require_readable(manifest, [fqn])
    if fqn not in manifest.index:
        raise NameMismatch(
            f"cannot read {fqn!r}: the checkpoint has no tensor of this name",
            hint=did_you_mean(fqn, manifest.index, "`manifest.tensors` lists the names"),
        )
    row = manifest.index[fqn]
    spec = manifest.tensors[row]
    want = box or Box.full(spec.shape)
    if len(want.shape) != len(spec.shape) or not Box.full(spec.shape).contains(want):
        raise UsageError(f"cannot read a box of {fqn}: it is {list(spec.shape)} (got {want})")
    require_cover(manifest, [row])
    out = torch.empty(want.shape, dtype=getattr(torch, spec.dtype))
    store = open_source_store(manifest.root, manifest.versions)
    try:
        Filler(manifest, store, verify).fill(row, want, out)
    finally:
        store.close()
    return out.to(device)


def require_readable(manifest: Manifest, names: Iterable[str]) -> None:
    """Raise `UnreadablePart` when one of the names is a tensor that cannot be read."""
    lost = [n for n in names if n in manifest.unread]
    if lost:
        why = manifest.unread[lost[0]]
        more = f" (and {count(len(lost) - 1, 'more tensor')})" if lost[1:] else ""
        raise UnreadablePart(
            f"cannot read {lost[0]}: {why.reason}{more}",
            hint="leave it out of the request; everything else can be read",
            names=lost,
        )


def require_cover(manifest: Manifest, rows: list[int]) -> None:
    """Raise `DamagedCheckpoint` where elements of these tensors are in no file."""
    holes = coverage(select(manifest, rows))
    if holes:
        raise DamagedCheckpoint(holes[0].message, findings=tuple(holes))


class Filler:
    """Fills boxes from one store with one scratch buffer."""

    def __init__(self, manifest: Manifest, store: Store, verify: bool) -> None:
        self._manifest = manifest
        self._records = Records(store, len(manifest.items), verify)
        self._scratch = np.empty(_SCRATCH, np.uint8)

    @rereading
    def fill(self, row: int, want: Box, out: Any) -> None:
        """Copy the elements ``want`` of tensor ``row`` into ``out``, casting and moving as needed."""
        import torch

        dtype = self._manifest.tensors[row].dtype
        kind = getattr(torch, dtype)
        direct = (
            out.device.type == "cpu" and out.dtype == kind and out.is_contiguous() and _holds_its_values(out)
        )
        target = out if direct else torch.empty(want.shape, dtype=kind)
        # Copies are not compared here: `validate` does that.
        reader = BoxReader(self._manifest, row, self._records, once=False, copies=False)
        try:
            reader.read(want, _integers(target, dtype), self._scratch)
        finally:
            reader.close()
        if not direct:
            with torch.no_grad():
                out.copy_(target)


def _holds_its_values(tensor: Any) -> bool:
    """Report whether the bytes are the values: torch may keep a conjugation or a sign as a flag."""
    return not (tensor.is_conj() or tensor.is_neg())


def _integers(tensor: Any, dtype: str) -> Any:
    """Return a numpy view of a contiguous CPU tensor's memory, as integers of the element's width."""
    import torch

    if not tensor.numel():
        return np.empty(tuple(tensor.shape), np.uint8)
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    assert BY_NAME[dtype].itemsize * tensor.numel() == flat.nbytes
    return tile_view(flat, tuple(tensor.shape), dtype)
