"""Record conversions in the catalog.

A conversion is recorded as begun before any work, so that an unusable catalog stops it early. It ends as
succeeded, with source, output and lineage, or as failed, with its error.

A source's facts about its training are those that its trainer saved beside the tensors: the Trainer of
transformers `trainer_state.json`, Lightning its hyperparameters and metrics, Megatron its arguments, OLMo its
config and counters. They are read from what the manifest holds already, and from few small files. Nothing of
that can fail a conversion, whose output is published by then: what cannot be read is logged and left out.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptcore.catalog.training import STORED, USER, LiveVerdict, Training, TrainingFacts, measured, read_facts
from ckptcore.checking.source_stamps import published_stamp
from ckptcore.conversion.export_verdict import keep
from ckptcore.conversion.file_fingerprints import matching
from ckptcore.conversion.source_digests import Recorded, inputs_of
from ckptcore.core.manifest import Manifest
from ckptcore.core.object_tree import Named, Refused, TensorRef, decode
from ckptcore.errors import CatalogError, CatalogUnavailable, CkptError, Finding, UsageError, ended_by
from ckptcore.fingerprints.statistics import MeasuredTensor
from ckptcore.fingerprints.sums import Fingerprinted
from ckptcore.planning.request import Request
from ckptcore.store import local_path, open_store, split_url
from ckptcore.utils.average_url import is_average, split_average
from ckptcore.utils.foreign_text import InvalidText, load_json, parsing
from ckptcore.utils.isolation import error_of
from ckptcore.utils.merged_url import roots_of
from ckptcore.utils.plain_yaml import load_yaml
from ckptcore.utils.step_names import step_of

if TYPE_CHECKING:
    from ckptcore.catalog import CheckpointFacts
    from ckptcore.catalog.catalog import Catalog
    from ckptcore.catalog.types import ConversionStart, StatisticsRow
    from ckptcore.checking.export_proof import ExportProof
    from ckptcore.comparison.live_comparison import LiveComparison
    from ckptcore.comparison.statistics import Changes
    from ckptcore.conversion.publish import Result


MAX_FILE = 32 << 20  # bytes; the log in a trainer_state.json grows with the run
_MOST_LOGGED = 200_000  # entries of such a log that are read

Form = dict[str, Any]


def stored_facts(manifest: Manifest) -> TrainingFacts:
    """Return the facts about the training that a checkpoint stores; empty if there are none."""
    # Facts are extra: whatever a trainer stored in their place, the conversion is not stopped by it.
    try:
        with parsing("facts about a training"):
            facts, left_out = read_facts(_merged(manifest))
    except InvalidText as error:
        _log.warning("facts about the training in %s are left out: %s", manifest.root, error)
        return TrainingFacts()
    if left_out:
        _log.info("facts about the training in %s are left out: %s", manifest.root, "; ".join(left_out))
    return facts


def _merged(manifest: Manifest) -> Form:
    form: Form = {}
    for part in _parts(manifest):
        for key, value in part.items():
            # Parts come the most specific first: of two objects of one name
            # the fields of the first win, one by one.
            if isinstance(value, dict) and isinstance(form.get(key), dict):
                form[key] = {**value, **form[key]}
            else:
                form.setdefault(key, value)
    return form


def _parts(manifest: Manifest) -> Iterator[Form]:
    """Yield forms of facts, the most specific first."""
    # A part that cannot be read does not hide the others.
    for name, read in _OBJECTS:
        try:
            with parsing(name):
                facts = read(_Objects(manifest))
        except (CkptError, InvalidText) as error:
            _log.warning("cannot read %s of %s: %s", name, manifest.root, error)
            continue
        if facts:
            yield facts
    for path, read_bytes in _FILES:
        data = _file(manifest, path)
        if data is None:
            continue
        try:
            with parsing("a trainer's file"):
                yield read_bytes(data)
        except InvalidText as error:
            _log.warning("cannot read %s of %s: %s", path, manifest.root, error)


class _Objects:
    """The objects of a manifest by name, decoded when they are asked for."""

    def __init__(self, manifest: Manifest) -> None:
        self._trees = {b.key: b.tree for b in manifest.blobs if b.known}
        self.format = manifest.format

    def __call__(self, key: str) -> Any:
        """Return a value by its dotted name, or None."""
        if key in self._trees:
            return _bare(decode(self._trees[key]))
        # A dotted name may be a key inside of an object, as OLMo's `train.global_step` is.
        above, _, name = key.rpartition(".")
        value = self(above) if above else None
        return value.get(name) if isinstance(value, Mapping) else None


def _bare(value: Any) -> Any:
    """Return plain values: names such as dtypes become texts, tensors their names."""
    if isinstance(value, Named):
        return _bare(value.value)
    if isinstance(value, TensorRef | Refused):
        return f"tensor {value.fqn}" if isinstance(value, TensorRef) else f"not read: {value.name}"
    if isinstance(value, Mapping):
        return {k: _bare(v) for k, v in value.items()}
    return [_bare(v) for v in value] if isinstance(value, list | tuple) else value


def _trainer(of: _Objects) -> Form:
    state = of("trainer_state")
    return _of_trainer_state(state) if isinstance(state, Mapping) else {}


def _of_trainer_state(state: Mapping[str, Any]) -> Form:
    """Return the facts of the Trainer's state: the last value of each metric up to the saved step.

    transformers, trainer_callback.py, `TrainerState`: log_history holds a dict for each logged step.
    """
    if "global_step" not in state and "log_history" not in state:
        return {}
    last = state.get("global_step")
    metrics: Form = {}
    log = state.get("log_history")
    # The end of the log: a metric's last value is asked for, and a log may have grown for months.
    for entry in log[-_MOST_LOGGED:] if isinstance(log, list) else ():
        if not isinstance(entry, Mapping):
            continue
        step = entry.get("step")
        # A trainer that resumed from an earlier step has entries of steps behind the saved one in its log.
        if isinstance(step, int) and isinstance(last, int) and step > last:
            continue
        for name, value in entry.items():
            if name not in ("step", "epoch") and measured(value) is not None:
                metrics[str(name)] = {"value": value, "step": step}
    best = state.get("best_metric")
    # The best metric is a number without a name; one of that name in the log is more exact.
    if measured(best) is not None:
        metrics.setdefault("best_metric", best)
    rest = {n: state[n] for n in ("max_steps", "num_train_epochs", "best_model_checkpoint") if state.get(n)}
    return {
        "framework": "transformers",
        "epoch": state.get("epoch"),
        "tokens": state.get("num_input_tokens_seen") or None,
        "metrics": metrics,
        "extra": rest,
    }


def _lightning(of: _Objects) -> Form:
    """Return facts of Lightning's state (trainer/connectors/checkpoint_connector.py, `dump_checkpoint`)."""
    if of("global_step") is None or (of("loops") is None and of("pytorch-lightning_version") is None):
        return {}
    metrics: Form = {}
    for name, value in _items(of("callback_metrics")):
        if measured(value) is not None:
            metrics[name] = value
    for callback, state in _items(of("callbacks")):
        monitor = state.get("monitor") if isinstance(state, Mapping) else None
        # Its key has the settings of the callback behind the name, so only the beginning is compared.
        if not callback.startswith("ModelCheckpoint") or not isinstance(monitor, str):
            continue
        if measured(state.get("current_score")) is not None:
            metrics.setdefault(monitor, state["current_score"])
    config = of("hyper_parameters")
    return {
        "framework": "lightning",
        "epoch": of("epoch"),
        "metrics": metrics,
        "config": config if isinstance(config, Mapping) else None,
    }


def _megatron(of: _Objects) -> Form:
    """Return facts of Megatron-LM's state (training/checkpointing.py, `generate_state_dict`).

    ``args`` is a namespace.
    """
    args = of("args")
    # Other trainers have an `args` as well; these two fields are in every Megatron's.
    if not isinstance(args, Mapping) or not {"num_layers", "hidden_size"} & set(args):
        return {}
    samples, length = args.get("consumed_train_samples"), args.get("seq_length")
    is_countable = isinstance(samples, int) and isinstance(length, int)
    # Not stored by Megatron: the samples are, and all have one length.
    tokens = samples * length if is_countable else 0  # type: ignore[operator]  # both are integers
    data = args.get("data_path")
    return {
        "framework": "megatron",
        "samples": samples,
        "tokens": tokens or None,
        "dataset": " ".join(map(str, data)) if isinstance(data, list | tuple) else data,
        "config": dict(args),
    }


def _olmo(of: _Objects) -> Form:
    """Return facts of the state of OLMo (train.py, `trainer_state_dict`) and OLMo-core (train/trainer.py)."""
    if of("train.global_step") is None:
        return {}
    tokens, loader = of("train.global_train_tokens_seen"), of("train.data_loader")
    epoch = loader.get("epoch") if isinstance(loader, Mapping) else of("train.epoch")
    return {
        "framework": "olmo",
        "epoch": epoch,
        "tokens": tokens,
        "samples": of("train.global_train_examples_seen_this_epoch"),
    }


def _deepspeed(of: _Objects) -> Form:
    """Return facts of DeepSpeed's state (runtime/engine.py, `_save_checkpoint`)."""
    samples = of("global_samples")
    if samples is None or of("ds_version") is None:
        return {}
    config = of("ds_config")
    return {
        "framework": "deepspeed",
        "samples": samples,
        "config": config if isinstance(config, Mapping) else None,
    }


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    for name, stored in value.items() if isinstance(value, Mapping) else ():
        yield str(name), stored


def _json_state(data: bytes) -> Form:
    state = load_json(data)
    return _of_trainer_state(state) if isinstance(state, Mapping) else {}


def _olmo_core_config(data: bytes) -> Form:
    """Return facts of OLMo-core's config (train/callbacks/config_saver.py).

    A hub's config has the same name, and none of its keys.
    """
    config = load_json(data)
    # A Hugging Face config.json is in the same place, with other keys.
    is_config = isinstance(config, dict) and {"trainer", "train_module", "data_loader"} & set(config)
    return {"config": config} if is_config else {}


def _yaml_config(data: bytes) -> Form:
    config = load_yaml(data)
    if not isinstance(config, dict):
        return {}
    return {"config": config, "extra": {"run_name": config["run_name"]} if config.get("run_name") else {}}


def _file(manifest: Manifest, path: str) -> bytes | None:
    """Return a small file of the checkpoint, or None if it is not among its listed files."""
    # One file has no folder of its own: files beside it may be of any checkpoint.
    if manifest.origin.get("file") is not None:
        return None
    # Only what was listed with the checkpoint is opened: a path is never made up here.
    sizes = {f.path: f.size for f in (*manifest.files, *manifest.beside)}
    size = sizes.get(path)
    if not size:
        return None
    if size > MAX_FILE:
        _log.warning("%s of %s is not read: it has more than %d bytes", path, manifest.root, MAX_FILE)
        return None
    try:
        with closing(open_store(manifest.root)) as store:
            return bytes(store.read(path, 0, size))
    except CkptError as error:
        _log.warning("cannot read %s of %s: %s", path, manifest.root, error.message)
        return None


_OBJECTS: tuple[tuple[str, Callable[[_Objects], Form]], ...] = (
    ("the Trainer's state", _trainer),
    ("Lightning's state", _lightning),
    ("Megatron's arguments", _megatron),
    ("OLMo's trainer state", _olmo),
    ("DeepSpeed's state", _deepspeed),
)
_FILES: tuple[tuple[str, Callable[[bytes], Form]], ...] = (
    ("trainer_state.json", _json_state),
    ("config.yaml", _yaml_config),  # OLMo
    ("config.json", _olmo_core_config),
    ("run_config.yaml", _yaml_config),  # Megatron-Bridge
)


_MOST = (1 << 63) - 1  # a forged shape can claim more than a database integer can store
StoredFingerprints = tuple[str | None, Mapping[str, str]]
Published = tuple[str, int, str | None]
_log = logging.getLogger("ckptcore")


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a user or an announcement reports about a source.

    run: instead of the folder's name. step: for a folder whose name has none. meta: facts about the
    training, as `read_facts` reads them. origin: user or announced.
    """

    run: str = ""
    step: int | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    origin: str = USER


UNANNOUNCED = Announcement()


@dataclass(frozen=True, slots=True)
class Registration:
    """A conversion that the catalog records as running.

    source: what it has at the source's place. training: what it knows about the training of that.
    """

    catalog: Catalog
    id: str
    request: Request
    announcement: Announcement = UNANNOUNCED
    source: Recorded | None = None
    training: Training | None = None


def start(
    request: Request,
    catalog_url: str | bool | None,
    flow_run_id: str | None = None,
    announcement: Announcement = UNANNOUNCED,
) -> Registration | None:
    """Record the begin of a conversion.

    Args:
        request: What is converted.
        catalog_url: URL of the catalog; None for the default, False for none.
        flow_run_id: Id of the Prefect flow run, or None.
        announcement: Run and step of the source, if it was announced.

    Returns:
        The running conversion; None if there is no catalog.
    """
    # False is no catalog at all; None is the default one.
    if catalog_url is False:
        return None
    from ckptcore.catalog import open_catalog

    # No connection stays open while files are written, nor where it may not begin; the next use opens one.
    with open_catalog(catalog_url if isinstance(catalog_url, str) else None) as catalog:
        return start_each([request], catalog, flow_run_id, announcement)[0]


def start_each(
    requests: Sequence[Request],
    catalog: Catalog,
    flow_run_id: str | None = None,
    announcement: Announcement = UNANNOUNCED,
) -> list[Registration]:
    """Record the begin of several conversions in one transaction; see `start`."""
    conversions = catalog.begin_each([_start_of(request, flow_run_id) for request in requests])
    return [
        Registration(catalog, begun.id, request, announcement, begun.source, begun.training)
        for begun, request in zip(conversions, requests, strict=True)
    ]


def _start_of(request: Request, flow_run_id: str | None) -> ConversionStart:
    from ckptcore.catalog.types import ConversionStart
    from ckptcore.utils.version import __version__

    options, ends = request.anchored().as_dict(), (request.source, request.destination)
    return ConversionStart(options, *ends, request.verb, __version__, flow_run_id)


def register(registration: Registration | None, result: Result, source: Manifest) -> Result:
    """Record a published result.

    Args:
        registration: The running conversion, or None.
        result: The published output.
        source: The source's manifest.

    Returns:
        The result with the conversion's id.

    Raises:
        CatalogError: The output is published, but could not be registered.
    """
    if registration is None:
        return result
    try:
        registration.catalog.succeed(registration.id, **_made(registration, result, source))
        _keep_verdicts(registration, result.proof, is_measured=bool(result.measured))
    except Exception as error:
        # Also for an error that is none of ours: the output is published, and its user must learn where.
        raise not_recorded(result, error_of(error)) from error
    finally:
        registration.catalog.close()
    return replace(result, conversion=registration.id)


def register_each(published: Sequence[tuple[Registration, Result, Manifest]]) -> list[Result | CkptError]:
    """Record several published results in one transaction that a power cut cannot undo.

    If the transaction fails, each result is recorded in one of its own, so that no result is lost by another.

    Args:
        published: The running conversions of one catalog, with their results and the manifests of their
            sources.

    Returns:
        The results with their conversions' ids, or the error of `register`.
    """
    if not published:
        return []
    try:
        published[0][0].catalog.succeed_each(
            [
                (registration.id, _made(registration, result, source))
                for registration, result, source in published
            ]
        )
    except Exception as error:
        ended = error_of(error)
        if ended.transient or len(published) == 1:  # the next try would wait as long
            return [not_recorded(result, ended) for _, result, _ in published]
        return [outcome for row in published for outcome in register_each([row])]
    outcomes: list[Result | CkptError] = []
    for registration, result, _ in published:
        try:
            _keep_verdicts(registration, result.proof, is_measured=bool(result.measured))
            outcomes.append(replace(result, conversion=registration.id))
        except Exception as error:
            outcomes.append(not_recorded(result, error_of(error)))
    return outcomes


def not_recorded(result: Result, error: CkptError) -> CkptError:
    """Return the error of a result that is published, and could not be recorded."""
    kind = CatalogUnavailable if isinstance(error, CatalogUnavailable) else CatalogError
    return kind(
        f"{result.destination} is published, but not registered: {error.message}",
        hint=f"{error.hint}; the next run with the catalog registers the output",
        **error.values,
    )


def _keep_verdicts(registration: Registration, proof: ExportProof | None, *, is_measured: bool) -> None:
    """Keep the proof of an export, and judge a source that was measured by other steps of its run."""
    if proof is not None:
        keep(registration.catalog, registration.id, proof)
    if is_measured and not is_average(registration.request.source):
        from ckptcore.comparison.step_history import settle  # most conversions measure nothing

        settle(registration.catalog, registration.request.source)


def _statistics(
    source: Manifest, measured: Sequence[MeasuredTensor], names: Mapping[str, str]
) -> StatisticsRow | None:
    """Return the statistics of the tensors of a source that were read as they are.

    names: FQN in the source -> name in ``measured``, where they differ.
    """
    if not measured:
        return None
    from ckptcore.comparison.step_history import statistics_row

    by_name = {tensor.fqn: tensor for tensor in measured}
    mine = []
    for spec in source.tensors:
        tensor = by_name.get(names.get(spec.fqn, spec.fqn))
        # Another dtype is a cast, whose statistics are of other values.
        if tensor is not None and (tensor.dtype, tensor.shape) == (spec.dtype, spec.shape):
            mine.append(tensor._replace(fqn=spec.fqn))
    return statistics_row(source, mine)


def _made(registration: Registration, result: Result, source: Manifest) -> dict[str, Any]:
    """Return what `Catalog.succeed` records of a result."""
    from ckptcore.catalog import ConversionFacts

    digests = {r.path: r.digest for r in result.files}
    numbers = result.fingerprints
    # A tensor that a name map split, merged or permuted is another tensor than its sources.
    old = dict(result.renamed) | {
        s: "" for derived in result.made if not derived.same for s in derived.sources
    }
    # The source was checked up to coverage before it was planned, whatever level it had in the catalog.
    read = facts(
        source,
        registration.request.source,
        result.source_digests,
        verified="coverage",
        announcement=registration.announcement,
        training=True,
    )
    derived = facts(
        result.written, result.destination, digests, verified="coverage", published=result.published
    )
    read = replace(with_fingerprints(read, matching(source, numbers, old)), live=result.live)
    if not is_average(registration.request.source):
        read = replace(read, statistics=_statistics(source, result.measured, old))
    derived = with_fingerprints(derived, matching(result.written, numbers, {}))
    derived = replace(derived, stamp=published_stamp(result.written))
    conversion_facts = ConversionFacts(
        plan_digest=result.plan_digest,
        bytes_in=result.bytes_in,
        bytes_out=result.nbytes,
        # ru_maxrss is in KiB on Linux.
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        timings=result.timings,
        map_digest=result.map_digest or None,
        fingerprint=result.fingerprint,
        source_stamp=result.source_stamp,
        source_ctime=result.source_ctime,
        findings=tuple(result.warnings),
    )
    if is_average(registration.request.source):
        # Each input of an average is a checkpoint of the catalog; the average itself is recorded as none.
        inputs = tuple(
            (
                averaged.weight,
                facts(averaged.manifest, averaged.url, averaged.digests, verified="coverage", training=True),
            )
            for averaged in inputs_of(registration.request, result.source_digests)
        )
        conversion_facts = replace(conversion_facts, inputs=inputs)
    return {"facts": conversion_facts, "source": read, "derived": derived}


def fail(registration: Registration | None, error: BaseException, source: Manifest | None) -> None:
    """Record a failure; a usage error is none, and leaves no record.

    If that fails, too, it is logged: it must not hide the first error.
    """
    if registration is None:
        return
    try:
        # First with the source, whose facts may be the part that cannot be recorded; then the failure alone.
        if source is None or not _failed(registration, ended_by(error), source):
            _failed(registration, ended_by(error), None)
    finally:
        registration.catalog.close()


def _failed(registration: Registration, ended: CkptError, source: Manifest | None) -> bool:
    """Record a failure and what is known of its source; return False if that is not possible."""
    request, announcement = registration.request, registration.announcement
    findings = tuple(ended.values.get("findings", ()))
    try:
        # A mistake in the request says nothing about the source: its row goes, as if it had not been begun.
        if isinstance(ended, UsageError):
            registration.catalog.withdraw(registration.id)
            return True
        source_facts = None
        at_a_place = not is_average(request.source)
        # `recorded` False: what is there is not what the row describes, and must not overwrite it.
        # Damage replaces no row with digests.
        if source is not None and at_a_place and ended.values.get("recorded", True):
            source_facts = facts(source, request.source, announcement=announcement, training=True)
            if "live" in ended.values:
                source_facts = replace(source_facts, live=LiveVerdict(*ended.values["live"]))
        registration.catalog.fail(
            registration.id, code=ended.code, message=ended.message, findings=findings, source=source_facts
        )
    except Exception as second:
        _log.warning("the failure could not be registered: %s", ended_by(second).message)
        return isinstance(second, CatalogUnavailable)  # a second try would wait as long
    return True


def record_fingerprint(
    manifest: Manifest,
    uri: str,
    fingerprinted: Sequence[Fingerprinted],
    names: Mapping[str, str],
    catalog_url: str | None,
    live: LiveComparison | None = None,
) -> None:
    """Record the fingerprints of tensors that were read.

    names: FQN -> its name in ``fingerprinted``. live: the comparison with what the job
    sent, if it sent a fingerprint.
    """
    from ckptcore.catalog import open_catalog

    prints = matching(manifest, fingerprinted, names)
    with open_catalog(catalog_url) as catalog:
        record_prints(catalog, manifest, uri, prints, live)


def record_prints(
    catalog: Catalog,
    manifest: Manifest,
    uri: str,
    prints: StoredFingerprints,
    live: LiveComparison | None = None,
) -> None:
    """Record the fingerprints of a checkpoint and of its tensors in an open catalog."""
    warnings = [f for f in manifest.findings if f.severity == "warning"]
    checkpoint_facts = with_fingerprints(facts(manifest, uri, verified="coverage"), prints)
    if live is not None:
        checkpoint_facts = replace(checkpoint_facts, live=live.verdict)
        warnings += [f for f in live.findings if f.severity == "error"]
    catalog.record_validation(checkpoint_facts, warnings, level="coverage")


def record_statistics(
    manifest: Manifest,
    uri: str,
    measured: Sequence[MeasuredTensor],
    catalog_url: str | None,
    before: tuple[str, Changes] | None = None,
) -> list[Finding]:
    """Record the statistics of tensors that were read, and judge the step by its run.

    Args:
        manifest: The checkpoint.
        uri: Its path or URL.
        measured: Its tensors.
        catalog_url: URL of the catalog; None for the default.
        before: Path or URL of another step, and what changed since.

    Returns:
        The alarms about the step.
    """
    from ckptcore.catalog import open_catalog
    from ckptcore.comparison.step_history import settle, statistics_row

    with open_catalog(catalog_url) as catalog:
        recorded = catalog.at(before[0]) if before is not None else None
        changes = before[1] if before is not None else None
        against = None if recorded is None else recorded[0].id
        row = statistics_row(manifest, measured, changes, against)
        warnings = [f for f in manifest.findings if f.severity == "warning"]
        checkpoint_facts = replace(facts(manifest, uri, verified="coverage"), statistics=row)
        catalog.record_validation(checkpoint_facts, warnings, level="coverage")
        return settle(catalog, uri)


def with_fingerprints(checkpoint_facts: CheckpointFacts, prints: StoredFingerprints) -> CheckpointFacts:
    """Return what the catalog stores of a checkpoint, with the fingerprint of it and those of its tensors."""
    return replace(checkpoint_facts, fingerprint=prints[0], fingerprints=prints[1])


def facts(
    manifest: Manifest,
    uri: str,
    digests: Mapping[str, str | None] | None = None,
    *,
    verified: str | None = None,
    announcement: Announcement = UNANNOUNCED,
    published: Sequence[Published] = (),
    training: bool = False,
) -> CheckpointFacts:
    """Return what the catalog stores of a manifest.

    Args:
        manifest: The checkpoint.
        uri: Its path or URL.
        digests: Path -> digest of its files.
        verified: The check level that it passed.
        announcement: Run, and the step for a place whose name has none.
        published: (path, size, digest) of every known file; files that the manifest does not list are
            recorded, too, as are those that the format's reader read.
        training: Read what the checkpoint stores about its training.
    """
    from ckptcore.catalog import CheckpointFacts

    step, run = _step_and_run(uri)
    # An announced name wins: a folder's name is only a guess, such as `checkpoints`.
    run = announcement.run or run
    if step is None:
        step = announcement.step
    name = manifest.origin.get("file")
    digest_of = digests or {}
    # Left out of the row: the paths of names are as many as the tensors.
    origin = {k: v for k, v in manifest.origin.items() if k != "paths"}
    files = [
        # Second copies (`redundant_copies`) are no files of the checkpoint itself.
        (f.path, f.size or 0, digest_of.get(f.path))
        for f in manifest.without_copies().files
        if name is None or f.path == name
    ]
    named = {path for path, _, _ in files}
    # Also files without tensors, such as the tokenizer: `which` finds them, and scrub proves them.
    other_files = [row for row in published if row[0] not in named]
    if name is None:
        named |= {path for path, _, _ in other_files}
        other_files += [
            (f.path, f.size or 0, digest_of.get(f.path)) for f in manifest.described if f.path not in named
        ]
    return CheckpointFacts(
        uri,
        manifest.format,
        manifest.digest,
        # A false shape may claim more bytes than a column holds; a check has reported it.
        min(manifest.nbytes, _MOST),
        [(t.fqn, t.dtype, t.shape, min(t.nbytes, _MOST)) for t in manifest.tensors],
        files,
        step,
        run,
        origin,
        verified,
        extra=other_files,
        training=tuple(_training(manifest, announcement, training)),
    )


def record_announced(announcement: Announcement, source: str, catalog_url: str | bool | None) -> None:
    """Record the facts of an announcement about a source that was converted before."""
    reported, _ = read_facts(announcement.meta)
    if not reported or catalog_url is False:
        return
    from ckptcore.catalog import open_catalog

    with open_catalog(catalog_url if isinstance(catalog_url, str) else None) as catalog:
        if catalog.at(source) is not None:
            catalog.describe(source, reported, announcement.origin)


def _training(
    manifest: Manifest, announcement: Announcement, stored: bool
) -> Iterator[tuple[str, TrainingFacts]]:
    """Yield the origin and the facts about the training of a checkpoint."""
    announced, left_out = read_facts(announcement.meta)
    if left_out:
        _log.warning("facts about the training are left out: %s", "; ".join(left_out))
    if announced:
        yield announcement.origin, announced
    if not stored:
        return
    try:
        # Also what is no error of ours, such as a recursion in a trainer's object.
        training_facts = stored_facts(manifest)
    except Exception as error:  # facts about a training never cost the record of an output
        _log.warning("facts about the training are left out: %s", error_of(error).message)
        return
    if training_facts:
        yield STORED, training_facts


def _step_and_run(uri: str) -> tuple[int | None, str | None]:
    """Return the training step in a folder's name, and the run by its parent's name.

    >>> _step_and_run("/runs/llama-7b/step-300"), _step_and_run("/data/model")
    ((300, 'llama-7b'), (None, None))
    >>> _step_and_run("merged://[/node0/llama/step-300,/node1/llama/step-300]")
    (300, 'llama')
    """
    if is_average(uri):  # the step of the last input, and the run of all
        inputs = [_step_and_run(root) for root in split_average(uri)[0]]
        return inputs[-1][0], inputs[-1][1] if len({run for _, run in inputs}) == 1 else None
    if roots := roots_of(uri):  # what all of its folders say
        steps, runs = zip(*map(_step_and_run, roots), strict=True)
        return (steps[0] if len({*steps}) == 1 else None), (runs[0] if len({*runs}) == 1 else None)
    path = local_path(uri)
    parent, name = split_url(str(path.absolute()) if path is not None else uri)
    step = step_of(name)
    if step is None:
        return None, None
    run = split_url(parent)[1]
    return step, run or None
