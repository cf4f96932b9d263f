"""Read any box of a tensor into existing torch memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from ckptcore.core.box import Box
from ckptcore.core.coverage import coverage
from ckptcore.core.manifest import Manifest
from ckptcore.core.subset import select
from ckptcore.errors import DamagedCheckpoint, NameMismatch, UnreadablePart, UsageError
from ckptcore.reading.casting import require_device
from ckptcore.reading.fill_memory import Fill, fill_memory
from ckptcore.store import open_source_store
from ckptcore.utils.near_names import did_you_mean
from ckptcore.utils.text import count

if TYPE_CHECKING:
    import torch


def read_box(manifest: Manifest, fqn: str, box: Box | None, *, device: str, verify: bool) -> torch.Tensor:
    """Read a tensor, or a box of it; see `ckptcore.read`."""
    import torch

    require_device(device)
    require_readable(manifest, [fqn])
    if fqn not in manifest.index:
        raise NameMismatch(
            f"cannot read {fqn!r}: the checkpoint has no tensor of this name",
            hint=did_you_mean(fqn, manifest.index, "`manifest.tensors` lists the names"),
        )
    row = manifest.index[fqn]
    spec = manifest.tensors[row]
    want = box or Box.full(spec.shape)
    if (
        not isinstance(want, Box)
        or len(want.shape) != len(spec.shape)
        or not Box.full(spec.shape).contains(want)
    ):
        raise UsageError(
            f"cannot read a box of {fqn}: it is {list(spec.shape)} (got {want})",
            hint="ckptcore.Box(offset, shape) inside of the tensor's, or no box for all of it",
        )
    require_cover(manifest, [row])
    out = torch.empty(want.shape, dtype=getattr(torch, spec.dtype))
    with closing(open_source_store(manifest.root, manifest.versions)) as store:
        fill_memory(manifest, store, [Fill(row, want, out)], verify=verify)
    return out.to(device)


def require_readable(manifest: Manifest, names: Iterable[str]) -> None:
    """Raise `UnreadablePart` when one of the names is a tensor that cannot be read."""
    lost = [n for n in names if n in manifest.unread]
    if lost:
        why = manifest.unread[lost[0]]
        rest = f" (and {count(len(lost) - 1, 'more tensor')})" if lost[1:] else ""
        raise UnreadablePart(
            f"cannot read {lost[0]}: {why.reason}{rest}",
            hint="leave it out of the request; everything else can be read",
            names=lost,
        )


def require_cover(manifest: Manifest, rows: list[int]) -> None:
    """Raise `DamagedCheckpoint` where elements of these tensors are in no file."""
    holes = coverage(select(manifest, rows))
    if holes:
        raise DamagedCheckpoint(holes[0].message, findings=tuple(holes))
