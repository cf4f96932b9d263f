"""The Python API: open, check, diff, read, load into a live model, plan, execute and convert."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from ckptcore.checking.check import Report
from ckptcore.conversion.pipeline import Prepared, Result, finish, inspect, remove_staging, validate
from ckptcore.conversion.pipeline import convert as run_all
from ckptcore.conversion.pipeline import execute as run_files
from ckptcore.conversion.pipeline import prepare as run_prepare
from ckptcore.core import dtype as dtypes
from ckptcore.core.manifest import Manifest
from ckptcore.errors import UsageError
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.compose import Composed, compose, map_export
from ckptcore.planning.options import Options, VerifyOptions, options_of, pairs, read_rules, request_field
from ckptcore.planning.request import STATED, Request, Settings
from ckptcore.store.merged import source_url
from ckptcore.utils.average_url import sum_url
from ckptcore.utils.near_names import did_you_mean
from ckptcore.utils.python_hints import speaking_python
from ckptcore.utils.units import parse_size
from ckptcore.utils.workers import Progress

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ckptcore.checking.export_proof import ExportProof
    from ckptcore.comparison.result import Difference
    from ckptcore.comparison.statistics import Changes
    from ckptcore.core.box import Box
    from ckptcore.fingerprints.result import Fingerprints
    from ckptcore.fingerprints.statistics import MeasuredTensor
    from ckptcore.planning.export_source import KnownExport


Place = str | os.PathLike[str]  # a path, or an fsspec URL
Several = Place | Sequence[Place]  # the folder of a checkpoint, or those of one in several folders


def _arguments() -> tuple[set[str], set[str], set[str]]:
    """Return the names of keyword arguments, those of switches, and the values that some take by name."""
    kinds = {name: kind for name, (kind, *_) in options_of(Options).items()}
    functions = (fingerprint, diff, verify_export, load_into, open, check, merge)
    parameters = {name: p for f in functions for name, p in signature(f).parameters.items()}
    switches = {name for name, kind in kinds.items() if bool in (kind, *get_args(kind))}
    switches |= {name for name, parameter in parameters.items() if isinstance(parameter.default, bool)}
    literals = {
        literal for kind in kinds.values() if get_origin(kind) is Literal for literal in get_args(kind)
    }
    return {*kinds, *parameters}, switches - {"catalog"}, literals | {"stored", "none"}


# Of the functions of `ckptcore`: the command line calls those of this module, and prints its own options.
speaks_python = speaking_python(_arguments)


def open(
    url: Several, *, allow_incomplete: bool = False, keep_quantized: bool = False, weights: str = "auto"
) -> Manifest:
    """Read the manifest of a checkpoint folder or file, without reading a tensor byte.

    Args:
        url: Path or fsspec URL; several, where each node of a job kept the files of its own ranks.
        allow_incomplete: Accept a save that did not finish, or that cannot be proven complete.
        keep_quantized: Describe quantised weights as stored, instead of their values in float32.
        weights: Which of two stored copies of trained weights is the model: ``master``, ``module``, ``auto``.

    Returns:
        The tensors, objects and files of the checkpoint, and which bytes hold them.

    Raises:
        SourceUnreadable: There is nothing at the URL, or it cannot be read.
        UnknownFormat: Nothing there is a checkpoint of a known format.
        UnsupportedFormat: The format is recognised, but not read.
        NotComplete: The save has not finished.
        DamagedCheckpoint: The metadata cannot be used.
    """
    return inspect(
        url_of(url, {"allow_incomplete": allow_incomplete}), allow_incomplete, keep_quantized, weights
    )


def check(
    manifest: Manifest, level: str = "coverage", *, workers: int = 2, progress: Progress | None = None
) -> Report:
    """Check a checkpoint for completeness and correctness.

    Args:
        manifest: The checkpoint, as `open` returns it.
        level: ``files`` (present, sizes, stray files), ``coverage`` (every element is stored exactly once),
            ``bytes`` (checksums and replicas; reads every byte) or ``values`` (NaN and Inf). Each level
            includes those before it.
        workers: Number of threads for the levels that read tensors.
        progress: Called with (stage, bytes done, bytes in total) while tensors are read.

    Returns:
        The findings; ``report.ok`` is False where one of them is an error.

    Raises:
        UsageError: There is no such level.
    """
    return validate(_opened(manifest), level, workers=workers, progress=progress)


def diff(
    a: Several | Manifest,
    b: Several | Manifest,
    *,
    model: bool = False,
    model_prefix: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[tuple[str, str]] = (),
    tie: Sequence[tuple[str, str]] = (),
    keep_quantized: bool = False,
    weights: str = "auto",
    record: Place | None = None,
    ignore_dropped: bool = False,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare two checkpoints of any format and topology.

    Names, dtypes, shapes and bits of tensors are compared (a NaN equals itself, 0.0 differs from -0.0),
    and plain values. Tensors of two float dtypes are compared after the cast, too. How far values are
    apart is measured, and summed up by part and layer. Every record with a checksum is verified, and
    replicas are compared with each other. The two forms of one trainer, such as Lightning's folder and
    its one file, are compared by meaning. What one side lacks because a conversion leaves it out is in
    ``difference.dropped``.

    Args:
        a: A manifest, or a path or URL, or several of one checkpoint.
        b: The other checkpoint.
        model: Compare the model parts only, as ``export`` finds them, without wrapper prefixes and without
            plain values. It is taken, and said in ``difference.by_itself``, where one side is an export; with
            the ties of its model card.
        model_prefix: Prefix of the model's names in A, then in B.
        include: Globs on the compared names; empty for all.
        exclude: Globs on the compared names.
        rename: (old, new) for A's names, as in `Request`.
        tie: (gone, kept): where a side has no ``gone``, its ``kept`` is compared.
        keep_quantized: Compare quantised weights as stored, instead of their values.
        weights: Which of two stored copies of trained weights is the model, as in `open`.
        record: Folder of the saved plan that made one side of the other, or a file with the JSON answer of
            that conversion. What it lists as left out counts as equal.
        ignore_dropped: Count what a reshard leaves out by its rules as equal without a record.
        settings: Memory budget and threads. Memory use is ``settings.memory``.
        progress: Called with (stage, bytes done, bytes in total).

    Returns:
        What differs; ``difference.equal`` is True where nothing does.

    Raises:
        DamagedCheckpoint: A side is incomplete, or a checksum fails.
        AmbiguousModel: The model part cannot be found.
        NameMismatch: Names collide.
        UsageError: The arguments contradict each other.
    """
    from ckptcore.comparison.diff import DiffRules, model_alone, recorded_in
    from ckptcore.comparison.diff import diff as run

    first, second = (_manifest_of(side, keep_quantized, weights) for side in (a, b))
    named = model or model_prefix or rename or tie or record is not None  # the user says what is compared
    alone, ties = ("", ()) if named else model_alone(first, second)
    rules = DiffRules(
        model=model or bool(model_prefix) or bool(alone),
        prefixes=_frozen(model_prefix),
        rename=_frozen(rename),
        tie=_frozen(tie or ties),
        include=_frozen(include),
        exclude=_frozen(exclude),
        recorded=recorded_in(os.fspath(record)) if record is not None else (),
        ignore_dropped=ignore_dropped,
        by_itself=alone,
    )
    urls = (url_of(a), url_of(b))
    return run(first, second, rules, settings or Settings(), progress, urls)


def fingerprint(
    source: Several | Manifest,
    *,
    model: bool = False,
    model_prefix: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[tuple[str, str]] = (),
    keep_quantized: bool = False,
    weights: str = "auto",
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Fingerprints:
    """Compute one digest of a checkpoint's tensor values, equal for every format, topology and file split.

    Every tensor is read once; every record with a checksum is verified, and replicas are compared with each
    other. `ckptcore.fingerprints.sums` explains what a fingerprint proves.

    Args:
        source: A manifest, or a path or URL, or several of one checkpoint.
        model: Take the model part only, as ``export`` finds it, without wrapper prefixes.
        model_prefix: Prefix of the model's names; None finds it.
        include: Globs on stored names; empty for all.
        exclude: Globs on stored names.
        rename: (old, new), as in `Request`.
        keep_quantized: Take quantised weights as stored, instead of their values.
        weights: Which of two stored copies of trained weights is the model, as in `open`.
        settings: Memory budget, threads and device. Memory use is ``settings.memory``.
        progress: Called with (stage, bytes done, bytes in total).

    Returns:
        The fingerprint, and one for each tensor.

    Raises:
        DamagedCheckpoint: The checkpoint is incomplete, or a checksum fails.
        AmbiguousModel: The model part cannot be found.
        NameMismatch: Names collide.
        UsageError: The arguments contradict each other.
    """
    from ckptcore.comparison.fingerprint import FingerprintRules
    from ckptcore.comparison.fingerprint import fingerprint as run

    of_model = model or model_prefix is not None
    rules = FingerprintRules(of_model, model_prefix, *map(_frozen, (include, exclude, rename)))
    manifest = _manifest_of(source, keep_quantized, weights)
    return run(manifest, settings or Settings(), progress, rules)


def statistics(
    source: Several | Manifest, *, settings: Settings | None = None, progress: Progress | None = None
) -> tuple[MeasuredTensor, ...]:
    """Compute norm, mean, largest value, and counts of NaN, Inf and zeros of every tensor.

    Every tensor is read once, in bounded memory. The bits of the results depend on neither memory nor
    workers, and not on the checkpoint's format and topology.

    Args:
        source: A manifest, or a path or URL, or several of one checkpoint.
        settings: Memory budget and threads. Memory use is ``settings.memory``.
        progress: Called with (stage, bytes done, bytes in total).

    Raises:
        DamagedCheckpoint: The checkpoint is incomplete, or a checksum fails.
    """
    from ckptcore.comparison.statistics import statistics as run

    return run(_manifest_of(source), settings or Settings(), progress)


def changes(
    before: Several | Manifest,
    after: Several | Manifest,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Changes:
    """Compute what `statistics` does of two steps, and how far each tensor moved between them.

    Args:
        before: The first step, as in `statistics`.
        after: The second.
        settings: Memory budget and threads.
        progress: Called with (stage, bytes done, bytes in total).

    Raises:
        DamagedCheckpoint: A checkpoint is incomplete, or a checksum fails.
        UsageError: No tensor has one name and shape in both.
    """
    from ckptcore.comparison.statistics import changes as run

    return run(_manifest_of(before), _manifest_of(after), settings or Settings(), progress)


def fingerprint_state(
    state_dict: Mapping[str, Any] | torch.nn.Module, mesh: DeviceMesh | None = None, *, alone: bool = False
) -> Fingerprints:
    """Fingerprint the tensors of a running job, as `fingerprint` does those of the checkpoint it would save.

    Every rank sums its own boxes where they are: plain tensors, DTensors (FSDP2, HSDP, tensor parallelism)
    and ShardedTensors (FSDP1). Then ranks exchange sums, once a mesh axis; all of them must call it. Equal
    boxes of several ranks count once, and must be equal. Nothing is cast: a job in float32 and its export in
    bfloat16 differ. It detects accidents, not forgery.

    Args:
        state_dict: What `load_into` takes, for example the state dict that is saved. Only tensors count.
        mesh: The ranks that hold it together; None: all ranks of the default process group, or this process
            alone where there is none. With a mesh of several axes, fewer sums are exchanged.
        alone: Nothing is exchanged: this process holds all of it, though it may be one of several, such as
            rank 0 of a replicated model. The state has no sharded tensors.

    Returns:
        The fingerprint, and one for each tensor, on every rank. ``differing`` names what differs from another
        one.

    Raises:
        DamagedCheckpoint: Ranks have different values in equal boxes; the first tensor is named.
        NameMismatch: Ranks have different tensors of one name, or two leaves have one.
        UsageError: A tensor has no values here (meta, fake, a partial sum), or ranks do not hold all of it.
        UnsupportedDtype: No checkpoint has tensors of this dtype.
    """
    from ckptcore.loading.live_fingerprint import fingerprint_state as run

    return run(state_dict, mesh, alone=alone)


def verify_export(
    export: Place,
    *,
    against: Place | None = None,
    reference: Place | None = None,
    near: Place | None = None,
    near_threshold: float = 0.8,
    logits: bool = False,
    logits_dtype: str = "float32",
    logits_tolerance: float = 0.0,
    any_memory: bool = False,
    settings: Settings | None = None,
    progress: Progress | None = None,
    catalog: Place | bool | None = None,
    **options: Any,
) -> ExportProof:
    """Compare an export with its source, and check that transformers opens it.

    Args:
        export: A folder or file that ``export`` wrote.
        against: The source; by default the one in the catalog, otherwise in the model card.
        reference: A Hugging Face folder that is known to be right. Logits are compared with its logits, in
            one process.
        near: A related Hugging Face folder: the cosine of tensors of one name must be at least
            ``near_threshold``.
        near_threshold: The smallest cosine similarity that ``near`` accepts.
        logits: Open the export with transformers, and check that its logits are finite.
        logits_dtype: The dtype in which models are opened.
        logits_tolerance: The largest absolute difference of logits that is accepted.
        any_memory: Also open models that are larger than the free memory.
        settings: Memory, threads, and the device that models run on. Memory use is ``settings.memory``; with
            logits, that of a model.
        progress: Called with (stage, bytes done, bytes in total) while tensors are read.
        catalog: URL of the catalog that is asked for the source and stores the verdict; None for the default
            one, False for none.
        options: Fields of `Request`: how it was exported, where the catalog does not know.

    Returns:
        The checks, each ``ok``, ``failed`` or ``not-done``, and the verdict.

    Raises:
        SourceUnreadable: A named place has no checkpoint.
        UnknownFormat: A named place has no checkpoint of a known format.
        BudgetTooSmall: A model is larger than the free memory, or ``settings.memory`` is too small.
        UsageError: The arguments contradict each other.
    """
    from ckptcore.conversion.export_verdict import record_verdict

    checks = VerifyOptions(
        against=_spelled(against),
        reference=_spelled(reference),
        near=_spelled(near),
        near_threshold=near_threshold,
        logits=logits,
        logits_dtype=logits_dtype,
        logits_tolerance=logits_tolerance,
        any_memory=any_memory,
    )
    place: str | bool | None = _spelled(catalog)
    export_source, proof = prove_export(
        os.fspath(export), checks, settings or Settings(), progress, place, **options
    )
    return record_verdict(export_source, proof, place)


def prove_export(
    export: str,
    checks: VerifyOptions,
    settings: Settings,
    progress: Progress | None,
    catalog: str | bool | None,
    **options: Any,
) -> tuple[KnownExport, ExportProof]:
    """Return what is known about an export, and its proof, as `verify_export` does but without storing it.

    The command line prints the answer before a catalog can fail.
    """
    from ckptcore.comparison.export_logits import LogitsWanted
    from ckptcore.comparison.verify_export import Wanted
    from ckptcore.comparison.verify_export import verify_export as run
    from ckptcore.conversion.export_verdict import find_source

    logits_check = LogitsWanted(
        checks.reference,
        dtypes.get(checks.logits_dtype).name,
        settings.device,
        checks.logits_tolerance,
        checks.any_memory,
    )
    with_logits = checks.logits or checks.reference is not None
    export_source = find_source(export, checks.against, _fields(options), catalog)
    proof = run(
        export,
        export_source.source,
        Wanted(checks.near, checks.near_threshold, logits_check if with_logits else None),
        settings,
        progress,
        missing=export_source.reason,
        record=export_source.record,
    )
    return export_source, replace(proof, conversion=export_source.conversion)


def read(
    manifest: Manifest, fqn: str, box: Box | None = None, *, device: str = "cpu", verify: bool = True
) -> torch.Tensor:
    """Read one tensor, or a box of it.

    Args:
        manifest: The checkpoint, as `open` returns it.
        fqn: The tensor's name in the checkpoint.
        box: The part to read, in elements of the full tensor; None reads all of it.
        device: The torch device of the result.
        verify: Whether stored checksums are verified.

    Returns:
        A tensor of the box's shape, in the stored dtype.

    Raises:
        NameMismatch: The checkpoint has no such tensor.
        UsageError: The box is outside the tensor.
        DamagedCheckpoint: Elements are in no file, or bytes fail their checksum.
    """
    from ckptcore.reading.state_dict import read_box

    return read_box(_opened(manifest), fqn, box, device=device, verify=verify)


def model_part(manifest: Manifest, **options: Any) -> Manifest:
    """Return the model of a checkpoint under the names of the hub, as ``export`` finds and maps it.

    `read`, `load_into`, `check`, `fingerprint` and `diff` take it like any other manifest; nothing is read.

    Args:
        manifest: The checkpoint, as `open` returns it.
        options: Fields of `Request` that say where the model is and how it is named, such as ``config``,
            ``model_prefix``, ``arch`` and ``rename``.

    Raises:
        AmbiguousModel: Several parts could be the model.
        NameMismatch: Names do not fit the map.
        DamagedCheckpoint: A tensor of the model is incomplete.
        UsageError: The options contradict each other, or do not fit the checkpoint.
    """
    root = _opened(manifest).root
    request = _request(root, f"{root}.model", {"verb": "export", **options})
    return map_export(request, manifest).mapped.manifest


def load_into(
    manifest: Manifest,
    state_dict: MutableMapping[str, Any] | torch.nn.Module,
    *,
    prefix: str = "",
    strict: bool = True,
    verify: bool = True,
) -> list[str]:
    """Fill a live state dict in place from any format, as `torch.distributed.checkpoint.load` does.

    Tensors are filled in place. Of a DTensor or ShardedTensor, only this rank's part is read, without a
    collective call. Plain values are replaced in the dict or list that holds them. Objects with
    ``state_dict`` and ``load_state_dict`` (modules, optimizers, torch's `Stateful`) provide the first, and
    receive the second when everything is filled. A meta tensor is replaced by one in memory, where its
    container allows it. As many threads as this process has cores (with torchrun, this rank's share of them)
    read into memory directly. Each has buffers of 16 MiB: one, up to four where memory is not contiguous CPU
    memory of the stored dtype. A tensor that is stored with its dims in another order is read at once.

    Args:
        manifest: The checkpoint, as `open` returns it.
        state_dict: Nested mappings, lists and tuples of tensors, plain values and such objects. Names are
            those of `torch.distributed.checkpoint`: the keys of the path, joined with dots. A module, or
            another such object, has the names of its own state dict.
        prefix: A prefix of the checkpoint's names.
        strict: Whether every leaf must get a value. Otherwise leaves that the checkpoint lacks are unchanged,
            and logged.
        verify: Whether stored checksums are verified. The rest of a record that only a part is wanted of,
            such as the rows of one rank, is not read for it: ``check`` with level "bytes" reads all.

    Returns:
        Names of the checkpoint's tensors that the state dict does not have.

    Raises:
        NameMismatch: A leaf is not in the checkpoint (strict), is a tensor on one side only, has another
            shape or the name of another leaf, or its value was refused when the checkpoint was read.
        UsageError: A tensor cannot be filled: sparse, quantised, fake, expanded, a partial sum.
        UnsupportedDtype: torch does not cast the stored dtype to the live one (`Tensor.copy_`).
        DamagedCheckpoint: Elements are in no file, or a checksum fails. A failed checksum leaves memory
            partly filled, and objects unchanged. Every other error changes nothing.
    """
    from ckptcore.loading.load_into import load_into as run

    return run(_opened(manifest), state_dict, prefix=prefix, strict=strict, verify=verify)


def plan(source: Several | Manifest, destination: Place, **options: Any) -> Composed:
    """Plan a conversion without writing anything.

    Args:
        source: A manifest, or a path or URL, or several of one checkpoint.
        destination: Path or URL of the output.
        options: Fields of `Request`.

    Returns:
        The plan, the warnings, and how names and ranks are laid out.

    Raises:
        DamagedCheckpoint: The checkpoint is incomplete.
        UsageError: The options contradict each other, or do not fit the checkpoint.
    """
    manifest = _manifest_of(source)
    return compose(_request(url_of(source, options), destination, options), manifest)


def prepare(
    source: Several, destination: Place, *, settings: Settings | None = None, **options: Any
) -> Prepared:
    """Plan a conversion, claim its destination, and save the plan beside it.

    Args:
        source: Path or URL of the checkpoint, or several of one checkpoint.
        destination: Path or URL of the output.
        settings: Memory budget, threads and device.
        options: Fields of `Request`.

    Raises:
        DestinationExists: The destination exists, and may not be replaced.
        Busy: Another process is writing the destination.
        DamagedCheckpoint: The checkpoint is incomplete.
        UsageError: The options contradict each other, or do not fit the checkpoint.
    """
    return run_prepare(_request(url_of(source, options), destination, options), settings)


def execute(
    plan: Prepared | str,
    indices: Sequence[int] | None = None,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> tuple[Receipt, ...]:
    """Write files of a prepared plan; finished files are kept.

    Args:
        plan: The plan, or its ``plan_uri``.
        indices: Which of its files to write; None for all.
        settings: Memory budget, threads and device. Memory use is ``settings.memory``.
        progress: Called with (stage, bytes done, bytes in total).

    Returns:
        A receipt for each file, in the order of the indices.

    Raises:
        SourceChanged: The source has changed since the plan was made.
        DamagedCheckpoint: A checksum of the source fails.
    """
    return run_files(_uri(plan), indices, settings, progress)


def publish(plan: Prepared | str) -> Result:
    """Verify the files of a prepared plan, and publish them at the destination.

    Args:
        plan: The plan, or its ``plan_uri``.

    Raises:
        OutputMismatch: A file is missing, or differs from its plan.
    """
    result = finish(_uri(plan))
    remove_staging(result.plan_uri)
    return result


def convert(
    source: Several,
    destination: Place,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    catalog: Place | bool | None = None,
    **options: Any,
) -> Result:
    """Convert a checkpoint: plan, write, verify and publish.

    Args:
        source: Path or URL of the checkpoint, or several of one checkpoint.
        destination: Path or URL of the output.
        settings: Memory budget, threads and device. Memory use is ``settings.memory``.
        progress: Called with (stage, bytes done, bytes in total).
        catalog: URL of the catalog to register in; None for the default one, False for none.
        options: Fields of `Request`.

    Returns:
        The published files, tensors and timings.

    Raises:
        CkptError: The conversion failed; the subclass and its ``code`` tell why. Nothing was published.
    """
    request = _request(url_of(source, options), destination, options)
    return run_all(request, settings, progress, _spelled(catalog))


def merge(
    sources: Sequence[Place],
    destination: Place,
    *,
    weights: Sequence[float] | None = None,
    decay: float | None = None,
    adapter: Place | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
    catalog: Place | bool | None = None,
    **options: Any,
) -> Result:
    """Average checkpoints of one model, of any formats, topologies and dtypes, and write the average.

    Each tensor with fractions is ``((x1 * w1) + (x2 * w2)) + ...`` in float32 (float64 where one is stored
    so), in the order of ``sources``, by weights that are divided by their sum; everything else is the last
    source's. The optimizers are left out.

    With ``adapter``, a LoRA adapter is merged into the one source, as peft's `merge_and_unload` does it.

    Args:
        sources: Paths or URLs, two or more; with an adapter one, its base.
        destination: Path or URL of the output.
        weights: One for each source; None for equal ones.
        decay: Of an exponential moving average in the order of the sources, instead of weights.
        adapter: Path or URL of the folder that has adapter_config.json.
        settings: Memory budget, threads and device. Memory use is ``settings.memory``, for any number of
            sources.
        progress: Called with (stage, bytes done, bytes in total).
        catalog: URL of the catalog to register in; None for the default one, False for none.
        options: Fields of `Request`, as for `convert`; but ``weights`` are those of the sum.

    Returns:
        The published files, tensors and timings.

    Raises:
        NameMismatch: Names or shapes of the sources differ.
        UsageError: There are fewer than two sources, or weights do not fit.
        CkptError: The conversion failed; the subclass and its ``code`` tell why. Nothing was published.
    """
    places = [_place(source, "source") for source in sources]
    merged_adapter = None if adapter is None else _place(adapter, "adapter")
    url = sum_url(places, weights, decay, merged_adapter)
    return run_all(_request(url, destination, options), settings, progress, _spelled(catalog))


def _manifest_of(source: Several | Manifest, keep_quantized: bool = False, weights: str = "auto") -> Manifest:
    if isinstance(source, Manifest):
        return source
    return open(source, keep_quantized=keep_quantized, weights=weights)


def _request(source: str, destination: Place, options: dict[str, Any]) -> Request:
    request = Request(source, _place(destination, "destination"), **_fields(options))
    request.require_writer()
    return request


def _place(place: Any, noun: str) -> str:
    """Return a path or URL as text; raise `UsageError` for anything else."""
    if not isinstance(place, str | os.PathLike):
        raise UsageError(f"{noun} must be a path or a URL (got {place!r})", hint=f"name the {noun} as a text")
    return os.fspath(place)


def _opened(manifest: Manifest) -> Manifest:
    """Return a manifest; raise `UsageError` for what is none, such as the path of a checkpoint."""
    if isinstance(manifest, Manifest):
        return manifest
    raise UsageError(
        f"the checkpoint must be a manifest (got {manifest!r})", hint="`ckptcore.open(url)` returns one"
    )


def url_of(source: Several | Manifest, options: Mapping[str, Any] | None = None) -> str:
    """Return the URL of a source as a request has it. options: of the request."""
    if isinstance(source, Manifest):
        return source.root
    recover = any((options or {}).get(name) for name in ("recover", "allow_incomplete"))
    if isinstance(source, str | os.PathLike):
        return source_url(os.fspath(source), recover=recover)
    folders = source if isinstance(source, Sequence) else [source]
    return source_url([_place(folder, "source") for folder in folders], recover=recover)


_GLOBS = ("include", "exclude", "keep_object")
_PAIRS = ("rename", "tie", "dtype_for")


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return options, as people write them, as fields of `Request`.

    One glob is a list of one; pairs may be a dict, or texts as on the command line; a mesh may be a dict of
    its axes.
    """
    names = set(STATED)
    for name in options:
        if request_field(name) not in names:
            raise UsageError(
                f"a conversion has no option {name}",
                hint=did_you_mean(name, names, "`help(ckptcore.Request)` lists them"),
            )
    return {request_field(name): _value(name, value) for name, value in options.items()}


def _value(name: str, value: Any) -> Any:
    if name == "sharding" and isinstance(value, os.PathLike):
        return read_rules(os.fspath(value))
    if name == "mesh" and isinstance(value, Mapping):
        return ",".join(f"{axis}={size}" for axis, size in value.items())
    if name == "max_file_size" and isinstance(value, str):
        return parse_size(value)
    if name in (*_GLOBS, *_PAIRS) and isinstance(value, str):
        value = [value]
    if name in (*_GLOBS, *_PAIRS) and not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a list (got {value!r})", hint=f"try {name}=['...']")
    if name in _PAIRS:
        listed = list(value.items() if isinstance(value, Mapping) else value)
        return tuple(p for v in listed for p in (pairs(name, [v]) if isinstance(v, str) else [tuple(v)]))
    return _frozen(_spelled(value))


def _spelled(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _uri(plan: Prepared | str) -> str:
    return plan if isinstance(plan, str) else plan.plan_uri


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value
