"""The Python face: open, check, diff, read, load into a live model, plan, execute, convert."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptcore.checking.check import Report
from ckptcore.conversion.pipeline import Prepared, Result, finish, inspect, settle, validate
from ckptcore.conversion.pipeline import convert as run_all
from ckptcore.conversion.pipeline import execute as run_files
from ckptcore.conversion.pipeline import prepare as run_prepare
from ckptcore.core.manifest import Manifest
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.compose import Composed, compose
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.workers import Progress

if TYPE_CHECKING:
    import torch

    from ckptcore.comparison.fingerprint import Fingerprints
    from ckptcore.comparison.result import Difference
    from ckptcore.core.box import Box


def open(url: str, *, recover: bool = False, keep_quantized: bool = False) -> Manifest:
    """The manifest of a checkpoint folder or file; no tensor byte is read.

    keep_quantized: give quantised weights as they are stored, instead of their values in float32.
    """
    return inspect(url, recover, keep_quantized)


def check(
    manifest: Manifest, level: str = "cover", *, workers: int = 2, progress: Progress | None = None
) -> Report:
    """Checks a manifest: levels files, cover, bytes, values (see `ckptcore.check`)."""
    return validate(manifest, level, workers=workers, progress=progress)


def diff(
    a: str | Manifest,
    b: str | Manifest,
    *,
    model: bool = False,
    model_prefix: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[tuple[str, str]] = (),
    tie: Sequence[tuple[str, str]] = (),
    keep_quantized: bool = False,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Difference:
    """What is not the same in two checkpoints, of whatever formats and topologies.

    Compared are names, dtypes, shapes and bits of tensors (a NaN equals itself, 0.0 is not -0.0), and plain
    values. Every record with a checksum is verified, copies are compared with each other.
    model: compare the model parts alone, as ``export`` finds them, wrappers off the names, without
    plain values. model_prefix: where the model is in A, and in B. rename: (old, new) for A's names,
    as in `Request`. tie: (gone, kept): a side that lacks ``gone`` has ``kept`` there, too. include, exclude:
    globs on the names that are compared.
    Raises `DamagedCheckpoint` when a side is not whole or a checksum fails, `AmbiguousModel`,
    `NameMismatch`, `UsageError`. Memory: ``settings.memory``.
    """
    from ckptcore.comparison.diff import Rules
    from ckptcore.comparison.diff import diff as run

    rules = Rules(model or bool(model_prefix), *map(_frozen, (model_prefix, rename, tie, include, exclude)))
    one, two = (open(s, keep_quantized=keep_quantized) if isinstance(s, str) else s for s in (a, b))
    urls = (a if isinstance(a, str) else a.root, b if isinstance(b, str) else b.root)
    return run(one, two, rules, settings or Settings(), progress, urls)


def fingerprint(
    source: str | Manifest,
    *,
    model: bool = False,
    model_prefix: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[tuple[str, str]] = (),
    keep_quantized: bool = False,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Fingerprints:
    """What a checkpoint holds as one digest, equal for every copy of whatever format, topology and files.

    Every tensor is read once; every record with a checksum is verified, copies are compared with each other.
    model: of the model part alone, as ``export`` finds it, wrappers off the names. model_prefix: where that
    is. include, exclude: globs on stored names. rename: (old, new), as in `Request`. See
    `ckptcore.fingerprints.sums` for what a fingerprint proves, and what not.
    Raises `DamagedCheckpoint` when it is not whole or a checksum fails, `AmbiguousModel`, `NameMismatch`,
    `UsageError`. Memory: ``settings.memory``.
    """
    from ckptcore.comparison.fingerprint import fingerprint as run

    manifest = open(source, keep_quantized=keep_quantized) if isinstance(source, str) else source
    return run(
        manifest,
        settings or Settings(),
        progress,
        model=model or model_prefix is not None,
        model_prefix=model_prefix,
        include=tuple(include),
        exclude=tuple(exclude),
        rename=_frozen(rename),
    )


def read(
    manifest: Manifest, fqn: str, box: Box | None = None, *, device: str = "cpu", verify: bool = True
) -> torch.Tensor:
    """One tensor, or the part of it that ``box`` names, as a torch tensor of that shape.

    Raises KeyError for an unknown name, ValueError for a box outside the tensor, and
    `DamagedCheckpoint` when elements are in no file or bytes fail their checksum.
    """
    from ckptcore.reading.state_dict import read_box

    return read_box(manifest, fqn, box, device=device, verify=verify)


def load_into(
    manifest: Manifest,
    state_dict: MutableMapping[str, Any],
    *,
    prefix: str = "",
    strict: bool = True,
    verify: bool = True,
) -> list[str]:
    """Fills a live state dict in place, as `torch.distributed.checkpoint.load` does, from any format.

    Tensors are filled where they are; of a DTensor or ShardedTensor only what this rank holds is read, with
    no collective call. Plain values are replaced in the dict or list that holds them. Objects with
    ``state_dict`` and ``load_state_dict`` (modules, optimizers, torch's `Stateful`) give the first, and get
    the second when everything is filled. A meta tensor is replaced by one in memory, where its container
    takes it.

    Args:
        manifest: The checkpoint, as `open` gives it.
        state_dict: Nested mappings, lists and tuples of tensors, plain values and such objects. Names are
            those of `torch.distributed.checkpoint`: the keys on the way, joined with dots.
        prefix: What the checkpoint's names have in front.
        strict: Whether every leaf must get a value. Otherwise what the checkpoint lacks is left as it is, and
            logged.
        verify: Whether stored checksums are verified.

    Returns:
        Names of the checkpoint's tensors that nothing asked for.

    Raises:
        NameMismatch: A leaf is not in the checkpoint (strict), is a tensor on one side alone, has another
            shape or the name of another leaf, or its value was refused when the checkpoint was read.
        UsageError: A tensor cannot be filled: sparse, quantised, fake, expanded, a partial sum.
        UnsupportedDtype: torch does not cast the stored dtype to the live one (`Tensor.copy_`).
        DamagedCheckpoint: Elements are in no file. A checksum that fails is found while memory is filled, and
            leaves it partly filled; objects are given nothing then. Every other error changes nothing.

    Memory: 16 MiB, and one local shard where it is not contiguous CPU memory of the stored dtype.
    """
    from ckptcore.loading.load_into import load_into as run

    return run(manifest, state_dict, prefix=prefix, strict=strict, verify=verify)


def plan(source: str | Manifest, destination: str, **options: Any) -> Composed:
    """What a conversion would do, without writing anything. options: fields of `Request`."""
    manifest = open(source) if isinstance(source, str) else source
    url = source if isinstance(source, str) else manifest.root
    return compose(_request(url, destination, options), manifest)


def prepare(source: str, destination: str, *, settings: Settings | None = None, **options: Any) -> Prepared:
    """Plans, claims the destination, and saves the plan beside it; options: fields of `Request`."""
    return run_prepare(_request(source, destination, options), settings)


def execute(
    plan: Prepared | str,
    indices: Sequence[int] | None = None,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> tuple[Receipt, ...]:
    """Writes files of a prepared plan (or of its `plan_uri`); finished ones are kept."""
    return run_files(_uri(plan), indices, settings, progress)


def publish(plan: Prepared | str) -> Result:
    """Verifies what a prepared plan has written, and makes it visible at its destination."""
    result = finish(_uri(plan))
    settle(result.plan_uri)
    return result


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
    return run_all(_request(source, destination, options), settings, progress, catalog)


def _request(source: str, destination: str, options: dict[str, Any]) -> Request:
    return Request(source, destination, **{k: _frozen(v) for k, v in options.items()})


def _uri(plan: Prepared | str) -> str:
    return plan if isinstance(plan, str) else plan.plan_uri


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value
