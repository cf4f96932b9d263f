"""The Python face: open, check, read, load into a live model, plan, execute, convert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptcore.check import Report
from ckptcore.compose import Composed, compose
from ckptcore.convert import Prepared, Result, inspect, validate
from ckptcore.convert import convert as run_all
from ckptcore.convert import execute as run_files
from ckptcore.convert import prepare as run_prepare
from ckptcore.manifest import Manifest
from ckptcore.receipts import Receipt
from ckptcore.request import Request, Settings

if TYPE_CHECKING:
    import torch

    from ckptcore.box import Box

Progress = Callable[[str, int, int], None]


def open(url: str, *, recover: bool = False) -> Manifest:
    """The manifest of a checkpoint folder or file; no tensor byte is read."""
    return inspect(url, recover)


def check(
    manifest: Manifest, level: str = "cover", *, workers: int = 2, progress: Progress | None = None
) -> Report:
    """Checks a manifest: levels files, cover, bytes, values (see `ckptcore.check`)."""
    return validate(manifest, level, workers=workers, progress=progress)


def read(manifest: Manifest, fqn: str, box: Box | None = None, *, device: str = "cpu",
         verify: bool = True) -> torch.Tensor:  # fmt: skip
    """One tensor, or the part of it that ``box`` names, as a torch tensor of that shape.

    Raises KeyError for an unknown name, ValueError for a box outside the tensor, and
    `DamagedCheckpoint` when elements are in no file or bytes fail their checksum.
    """
    from ckptcore.reading import read_box

    return read_box(manifest, fqn, box, device=device, verify=verify)


def load_into(manifest: Manifest, state_dict: dict[str, Any], *, prefix: str = "", strict: bool = True,
              verify: bool = True) -> list[str]:  # fmt: skip
    """Fills the tensors of a live state dict in place; gives the names of what stays unused.

    state_dict: nested dicts and lists of tensors; DTensors get their local shard, and only the
    boxes that this rank holds are read, with no collective call. prefix: what the checkpoint's
    names have in front. strict: raise `NameMismatch` when a tensor of the state dict is not in
    the checkpoint. Coverage of every filled element is proven first.
    """
    from ckptcore.reading import load_into as run

    return run(manifest, state_dict, prefix=prefix, strict=strict, verify=verify)


def plan(source: str | Manifest, destination: str, **options: Any) -> Composed:
    """What a conversion would do, without writing anything. options: fields of `Request`."""
    manifest = open(source) if isinstance(source, str) else source
    url = source if isinstance(source, str) else manifest.root
    return compose(Request(url, destination, **options), manifest)


def prepare(request: Request, settings: Settings | None = None) -> Prepared:
    """Plans, and saves the plan beside the destination."""
    return run_prepare(request, settings)


def execute(
    plan_uri: str, indices: list[int] | None = None, settings: Settings | None = None
) -> tuple[Receipt, ...]:
    """Writes files of a saved plan (see `prepare`)."""
    return run_files(plan_uri, indices, settings)


def convert(
    source: str,
    destination: str,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    catalog: str | bool | None = False,
    **options: Any,
) -> Result:
    """The whole job. options: fields of `Request`; catalog: URL, None for the default, False for none."""
    request = replace(Request(source, destination, **{k: _frozen(v) for k, v in options.items()}))
    return run_all(request, settings, progress, catalog)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value
