"""The Python face: open, check, diff, read, load into a live model, plan, execute, convert."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptcore.checking.check import Report
from ckptcore.conversion.pipeline import Prepared, Result, finish, inspect, settle, validate
from ckptcore.conversion.pipeline import convert as run_all
from ckptcore.conversion.pipeline import execute as run_files
from ckptcore.conversion.pipeline import prepare as run_prepare
from ckptcore.core import dtype as dtypes
from ckptcore.core.manifest import Manifest
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.compose import Composed, compose
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.workers import Progress

if TYPE_CHECKING:
    import torch

    from ckptcore.checking.export_proof import ExportProof
    from ckptcore.comparison.fingerprint import Fingerprints
    from ckptcore.comparison.result import Difference
    from ckptcore.core.box import Box
    from ckptcore.planning.export_source import KnownExport


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
    from ckptcore.comparison.diff import DiffRules
    from ckptcore.comparison.diff import diff as run

    rules = DiffRules(
        model or bool(model_prefix), *map(_frozen, (model_prefix, rename, tie, include, exclude))
    )
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
    from ckptcore.comparison.fingerprint import FingerprintRules
    from ckptcore.comparison.fingerprint import fingerprint as run

    of_model = model or model_prefix is not None
    rules = FingerprintRules(of_model, model_prefix, *map(_frozen, (include, exclude, rename)))
    manifest = open(source, keep_quantized=keep_quantized) if isinstance(source, str) else source
    return run(manifest, settings or Settings(), progress, rules)


def verify_export(
    export: str,
    *,
    against: str | None = None,
    reference: str | None = None,
    near: str | None = None,
    near_threshold: float = 0.8,
    logits: bool = False,
    logits_dtype: str = "float32",
    logits_tolerance: float = 0.0,
    any_memory: bool = False,
    settings: Settings | None = None,
    progress: Progress | None = None,
    catalog: str | bool | None = False,
    **options: Any,
) -> ExportProof:
    """Whether an export is what its source holds, and a model that transformers opens.

    Args:
        export: A folder or file that ``export`` wrote.
        against: The source; by default the one that the catalog, or else the model card, names.
        reference: A Hugging Face folder that is right: logits are compared with its, in one process.
        near: A related Hugging Face folder: the cosine of tensors of one name is at least
            ``near_threshold``.
        logits: Open the export with transformers, and see that logits are finite.
        logits_dtype, logits_tolerance: How models are opened, and the largest absolute difference.
        any_memory: Open models also where they are larger than what is free.
        settings: Memory, threads, and the device that models run on.
        progress: Called while tensors are read.
        catalog: URL of the catalog that is asked for the source, and keeps the verdict; None for the default
            one, False for none.
        options: Fields of `Request`: how it was exported, where the catalog does not know.

    Returns:
        The checks, each ``ok``, ``failed`` or ``not-done``, and the verdict.

    Raises:
        SourceUnreadable, UnknownFormat: There is no checkpoint at a place that was named.
        BudgetTooSmall: A model is larger than what is free, or ``settings.memory`` too little.
        UsageError: Arguments contradict each other.

    Memory: ``settings.memory``; with logits that of a model.
    """
    from ckptcore.conversion.export_verdict import record_verdict

    known, proof = prove_export(
        export,
        against=against,
        reference=reference,
        near=near,
        near_threshold=near_threshold,
        logits=logits,
        logits_dtype=logits_dtype,
        logits_tolerance=logits_tolerance,
        any_memory=any_memory,
        settings=settings,
        progress=progress,
        catalog=catalog,
        **options,
    )
    return record_verdict(known, proof, catalog)


def prove_export(
    export: str,
    *,
    against: str | None,
    reference: str | None,
    near: str | None,
    near_threshold: float,
    logits: bool,
    logits_dtype: str,
    logits_tolerance: float,
    any_memory: bool,
    settings: Settings | None,
    progress: Progress | None,
    catalog: str | bool | None,
    **options: Any,
) -> tuple[KnownExport, ExportProof]:
    """As `verify_export`, with nothing stored: what is known of the export, and the proof.

    For who shows an answer before a catalog can fail.
    """
    from ckptcore.comparison.export_logits import LogitsWanted
    from ckptcore.comparison.verify_export import Wanted
    from ckptcore.comparison.verify_export import verify_export as run
    from ckptcore.conversion.export_verdict import find_source

    settings = settings or Settings()
    asked = LogitsWanted(
        reference, dtypes.get(logits_dtype).name, settings.device, logits_tolerance, any_memory
    )
    wanted = Wanted(near, near_threshold, asked if logits or reference is not None else None)
    known = find_source(export, against, {k: _frozen(v) for k, v in options.items()}, catalog)
    proof = run(export, known.source, wanted, settings, progress, missing=known.reason, record=known.record)
    return known, replace(proof, conversion=known.conversion)


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
