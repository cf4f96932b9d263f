"""Compose the plan of a request, before anything is written.

1. The manifest must be complete (level ``coverage``).
2. Names: globs, for an export the model part, wrappers off, renames, ties.
3. Dtypes: the cast and its exceptions.
4. For a Hugging Face folder: the config's files, and names and shapes checked against the model.
5. The plan.

A rename that applies to no tensor is found: a misspelt one would leave the stored names. Config and tokenizer
are carried into the folder that a format keeps for them beside its tensors: verl writes ``huggingface/``
beside its rank files, and its merger needs the config in it. An export has files of its own
(`ckptcore.planning.config_folder`): here bytes stay as they are, since names and dtypes stay, too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from ckptcore.checking.check import Report, require_complete
from ckptcore.core import dtype as dtypes
from ckptcore.core.manifest import Blob, Manifest
from ckptcore.core.object_tree import references
from ckptcore.errors import AmbiguousModel, Finding, NameMismatch, UsageError, finding
from ckptcore.fingerprints.sums import map_digest
from ckptcore.formats import by_name, registry
from ckptcore.formats.base import Layout, Writer
from ckptcore.naming.model_part import find_model, in_model
from ckptcore.naming.peft import (
    BELOW,
    Adapter,
    adapted,
    adapter_config,
    dumped,
    find_adapter,
    holds_adapter,
    sizes_without_base,
)
from ckptcore.naming.quantized_names import without_activations
from ckptcore.naming.rename import (
    Dropped,
    Mapped,
    ModelPart,
    applies,
    apply_renames,
    is_kept,
    keep_blobs,
    matches,
    remap,
    strip_wrappers,
    with_names,
    without_tensors,
)
from ckptcore.naming.worlds import HUB, LIVE, PEFT
from ckptcore.planning.casts import find_casts, frozen_float32, half_dtype, loaded_as
from ckptcore.planning.config_folder import (
    UNSAVED,
    ConfigFolder,
    check_adapted,
    check_names,
    exact_prefixes,
    plain_shapes,
)
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.hub_files import ADAPTER, CONFIG, NONE, json_object
from ckptcore.planning.model_card import model_card
from ckptcore.planning.model_files import (
    ModelFiles,
    files_left_out,
    find_adapter_files,
    find_files,
    has_lora_of_its_own,
    unopened,
)
from ckptcore.planning.nesting import LEFT_OUT, nest, split_objects, without
from ckptcore.planning.output_findings import (
    left_out_findings,
    require_decided,
    reshard_findings,
    stages_of,
    value_findings,
)
from ckptcore.planning.plan import Plan, Target, make_plan
from ckptcore.planning.rank_layout import Balance, balance, lay_out
from ckptcore.planning.rank_local_state import require_cut, without_bound
from ckptcore.planning.request import STORED, Request
from ckptcore.planning.several_models import several_models
from ckptcore.planning.target_names import in_world, of_trainer, require_loaded_names, target
from ckptcore.planning.zero_tensors import require_zero
from ckptcore.topology.layout import Topology
from ckptcore.topology.mesh_spec import parse_mesh
from ckptcore.topology.pipeline_stages import StageContents
from ckptcore.utils.memory import reuse_memory, reusing_memory
from ckptcore.utils.text import count, listed

if TYPE_CHECKING:
    from ckptcore.planning.name_maps import MappedNames, NameMap

# Boxes of each rank of a mesh; or a function that returns them for the tensors as they are written.
Layouts = Topology | Callable[[Manifest], Topology]
_OF_AVERAGES = frozenset({"of-last-input", "left-out"})  # a reader's notes on what is not averaged
# Proven when all names and shapes are those of the model's class.
_BY_CONFIG = frozenset({"unproven-shape", "unproven-parts"})


@dataclass(frozen=True)
class Composed:
    """A plan with everything around it.

    Attributes:
        plan: Head of the plan.
        files: Plans of its files.
        mapped: The tensors under the output's names, as boxes of stored items.
        extra: Path -> bytes of the small files beside the tensors.
        report: Report of the check of the source.
        warnings: Findings that do not stop the conversion.
        model: Where the model was found, for an export.
        timings: Stage -> seconds.
        ranks: Bytes of each rank of a mesh, for a reshard.
        stages: Layers and other parameters of each pipeline stage, for a reshard.
        naming: How names were mapped, if they were.
    """

    plan: Plan
    files: Iterable[FilePlan]
    mapped: Mapped
    extra: Mapping[str, bytes]
    report: Report
    warnings: tuple[Finding, ...]
    model: ModelPart | None
    timings: dict[str, float]
    ranks: Balance | None = None
    stages: tuple[StageContents, ...] = ()
    naming: NameMap | None = None


@reusing_memory()
def compose(
    request: Request,
    manifest: Manifest,
    on_file_plan: Callable[[FilePlan], None] | None = None,
    topology: Layouts | None = None,
) -> Composed:
    """Plan a request.

    Args:
        request: The output.
        manifest: The source.
        on_file_plan: Called with every file's plan as it is made.
        topology: Layout of the tensors over the request's mesh; None for the request's rules.

    Raises:
        DamagedCheckpoint: A requested tensor is incomplete; with the findings.
        UnprovenCheckpoint: Nothing proves it complete.
        UnreadablePart: A requested tensor cannot be read.
        AmbiguousModel: Several parts could be the model.
        NameMismatch: Names or shapes do not fit a config or a map.
        UnsupportedDtype: A dtype cannot be written.
        UsageError: Options contradict each other or the source.
    """
    began = time.perf_counter()
    reuse_memory(100 * len(manifest.chunks))  # columns, and as much once more
    format, single = request.format, request.single
    writer = by_name(format, writes=True).writer
    assert writer is not None  # by_name finds those that write
    export, reshard = request.verb == "export", request.verb == "reshard"
    several = several_models(request, manifest) if request.takes_model else None
    if several is not None:  # each model keeps its names, so that none is searched for
        # A pipeline of several models stays as it is: each keeps its folder and its names.
        format, request = several.format, replace(request, verb="consolidate", names=STORED)
    beside, adapter = _files_beside(request, manifest) if request.takes_model else (ModelFiles(), None)
    # What is asked for decides what must be complete: damage outside of it stops nothing.
    selected = _selected(request, manifest, adapter)
    by_config = beside.config is not None
    # Some defects disappear where a config's class proves names and
    # shapes: those are asked about again below.
    report = require_complete(manifest, selected, later=_BY_CONFIG if by_config else frozenset())
    checked = time.perf_counter()
    warnings = [f for f in report.findings if f.severity == "warning" or f.code in _OF_AVERAGES]
    of_diffusers = beside.config is not None and beside.config.of_diffusers
    of_export = writer.adapter if adapter is not None else writer.component if of_diffusers else writer.hub
    # Before names and casts: what a layout keeps decides which values are restated, and where files go.
    layout = _output_layout(request, manifest, writer, of_export) if several is None else several.layout
    carried: dict[str, bytes] = {}
    carried_findings: tuple[Finding, ...] = ()
    if layout.model_folder and single is None and not export:
        carried, carried_findings = carried_files(request, manifest, layout.model_folder)
    model = find_model(manifest, request.model_prefix) if request.takes_model else None
    if model is not None:
        require_decided(request, manifest, model)
    # What no loader of the output uses leaves before names are mapped: a map accounts for every tensor that
    # it sees.
    usable, unused = _without_unused(request, manifest)
    if adapter is None or model is None:
        fitted, beside = _fitted(request, usable, model, beside)
    else:
        mapped, beside = _adapter_alone(request, usable, model, adapter, beside)
        fitted = _Fitted(mapped, float32=frozenset())
    mapped, doubts, naming = fitted.mapped, fitted.findings, fitted.naming
    if by_config and (beside.config is None or any(f.severity != "info" for f in doubts)):
        # What was left to the model class above (`later`) is an error again: the class proves nothing here.
        require_complete(manifest, selected)
    warnings += [
        *doubts,
        *beside.findings,
        *carried_findings,
        *unused_renames(request.rename, (n for _, n in _bare_names(request, manifest, request.takes_model))),
    ]
    if model is not None:
        warnings += [*_other_parts(model), *left_out_findings(request, manifest, model)]
    warnings += several.findings if several is not None else ()
    if export and several is None:
        warnings += unopened(request, beside, [t.fqn for t in mapped.manifest.tensors])
    # Reads tensors, as nothing else here does: a refusal must come before anything is written.
    require_zero(usable, mapped.dropped)
    # Behind the map: the globs of exceptions are on the output's names.
    cast = find_casts(request, manifest, mapped, fitted.float32 if several is None else several.float32)
    warnings += cast.findings
    objects, dropped, left_out = _carried_objects(request, usable)
    if several is not None:
        objects, dropped = {key: objects[key] for key in several.objects}, several.dropped(manifest)
    warnings += left_out
    if naming is not None and layout is writer.starts.get(naming.to):
        from ckptcore.planning.trainer_start import start_state

        mesh = dict(parse_mesh(request.mesh).axes) if request.mesh else {}
        objects, of_arguments = start_state(naming, mapped.manifest.tensors, mesh)
        warnings += of_arguments
    warnings += value_findings(layout, objects) + split_objects(layout, objects)
    mapped, objects, paths, moved = nest(layout, manifest, mapped, objects)
    # Casts were chosen by the names before nesting.
    casts = {moved.get(name, name): dtype for name, dtype in cast.dtypes.items()}
    target = Target(
        format,
        single,
        request.max_file_size,
        casts,
        objects,
        request.mesh,
        request.sharding,
        request.serialization,
    )
    if writer.world or request.verb == "export":  # others are loaded by the names that they have
        config = None if beside.config is None else beside.config.form
        require_loaded_names(request, writer, [t.fqn for t in mapped.manifest.tensors], config)
    # Objects alone are an output, too, but an empty one is a mistake of the options.
    if not mapped.manifest.tensors and (manifest.tensors or not objects):
        if not manifest.tensors:
            raise UsageError(
                "no tensor is left to write: the checkpoint has none that can be read",
                hint="`ckptcore inspect SRC` shows what it has",
            )
        raise UsageError("no tensor is left to write", hint="look at --include, --exclude and --model-prefix")
    # The names of a model part have lost the prefix; rules of a mesh match the names as they are written.
    written_prefix = request.model_prefix if model is None else ""
    # A layout of a mesh is only for a reshard; elsewhere each tensor is written completely.
    if not reshard:
        topology = None
    else:
        # State that only the ranks which saved it can use is known by its stored name.
        stored = {new: old for old, new in mapped.renamed}
        require_cut(manifest, [stored.get(t.fqn, t.fqn) for t in mapped.manifest.tensors])
        # Who passes boxes has laid out the mesh; otherwise rules do, and their guesses are reported.
        ruled = topology is None
        if topology is None:
            topology = lay_out(mapped.manifest, request.mesh, request.sharding, written_prefix)
        elif not isinstance(topology, Topology):
            topology = topology(mapped.manifest)
        named = replace(request, model_prefix=written_prefix)
        warnings += reshard_findings(
            named, manifest, mapped.manifest, unused, ruled=ruled, repads=layout.repads
        )
    if several is None:
        arch = naming.arch if naming is not None and of_trainer(request.names) else ""
        extra = carried
        if export and single is None:
            extra = _extra(request, mapped, target, beside, manifest, arch)
    else:
        extra = several.extra(request, mapped, target.dtypes)
        extra["README.md"] = model_card(request, mapped, manifest, target.dtypes, beside)
    if export:
        carried_urls = beside.urls if several is None else several.urls(manifest.root)
        warnings += files_left_out(manifest, carried_urls)
    plan, files = make_plan(
        replace(mapped, dropped=(*mapped.dropped, *dropped, *(Dropped(name, rule) for name, rule in unused))),
        target,
        layout,
        target.arrangement(mapped.manifest.tensors, paths, topology, _order(manifest, mapped)),
        source=manifest,
        extra=[(path, blake3(data).hexdigest()) for path, data in sorted(extra.items())],
        on_file_plan=on_file_plan,
    )
    plan = replace(plan, map_digest=digest_of_map(manifest, mapped), made=mapped.made)
    timings = {"validate": checked - began, "plan": time.perf_counter() - checked}
    ranks = None if topology is None else balance(topology, mapped.manifest.tensors)
    stages = () if topology is None else stages_of(mapped.manifest, topology, written_prefix)
    return Composed(
        plan, files, mapped, extra, report, tuple(warnings), model, timings, ranks, stages, naming
    )


@dataclass(frozen=True)
class MappedExport:
    """The tensors of an export, before they are laid out in files.

    Attributes:
        mapped: The source's tensors under the export's names, as boxes of stored items.
        dtypes: Name -> dtype that it is cast to.
    """

    mapped: Mapped
    dtypes: Mapping[str, str]


def map_export(request: Request, manifest: Manifest, exported: Set[str] | None = None) -> MappedExport:
    """Map the tensors of an export from its source, as `compose` does.

    Names and shapes are not compared with a config, unless the export has others than the source gives. Only
    ties of the request apply. The errors are those of `compose`: the model part is incomplete, ambiguous, or
    cannot be mapped.

    Args:
        request: The export.
        manifest: The source.
        exported: Names of the tensors of the export, or None.
    """
    several = several_models(request, manifest)
    if several is not None:
        require_complete(manifest, lambda name: True)
        mapped = remap(manifest)
        return MappedExport(mapped, find_casts(request, manifest, mapped, several.float32).dtypes)
    beside, adapter = _files_beside(request, manifest)
    require_complete(manifest, _selected(request, manifest, adapter), later=_BY_CONFIG)
    model = find_model(manifest, request.model_prefix)
    if adapter is not None:
        mapped, _ = _adapter_alone(request, manifest, model, adapter, beside)
        return MappedExport(mapped, find_casts(request, manifest, mapped, frozenset()).dtypes)
    free, unused = _without_unused(request, manifest)
    named = _named_tensors(request, free, model, beside.config)
    fitted = None
    names = {t.fqn for t in named.tied(()).manifest.tensors}
    # Whether names and shapes fit is asked only where it may change the result: it starts transformers.
    if half_dtype(request.dtype) or (exported is not None and not exported <= names):
        with suppress(NameMismatch):  # names and shapes differ from the model's: the caller says which
            fitted = _checked_names(request, free, model, beside.config, class_ties=False)
    if fitted is None:
        fitted = _Fitted(named.tied(request.tie))
    mapped = fitted.mapped
    mapped = replace(mapped, dropped=(*mapped.dropped, *(Dropped(name, rule) for name, rule in unused)))
    if not mapped.manifest.tensors:
        raise UsageError("no tensor is left", hint="look at --include, --exclude and --model-prefix")
    return MappedExport(mapped, find_casts(request, manifest, mapped, fitted.float32).dtypes)


def _without_unused(request: Request, manifest: Manifest) -> tuple[Manifest, tuple[tuple[str, str], ...]]:
    """Return the manifest without what nothing uses that loads the output, and (name, rule)."""
    if request.verb == "reshard":
        return without_bound(manifest, parse_mesh(request.mesh), request.keep_object)
    return without_activations(manifest) if request.verb == "export" else (manifest, ())


def _files_beside(request: Request, manifest: Manifest) -> tuple[ModelFiles, Adapter | None]:
    """Return the files beside the weights, and the LoRA adapter if the model part has one."""
    of_export = request.verb == "export" and request.names in (HUB, PEFT)
    # Only names are needed to see an adapter; tensors are mapped later.
    names = model_names(request, manifest).values() if of_export else ()
    has_adapter = holds_adapter(names)
    of_trainer: Sequence[str] = ()
    if not has_adapter and any(BELOW in name for name in names):
        from ckptcore.planning.trainer_adapter import trainer_adapter, trainer_form  # imports pydantic

        of_trainer = trainer_adapter(names)
    if of_trainer:
        beside = find_adapter_files(request, manifest, lambda base: trainer_form(manifest, base))
        hub = {name: name for name in of_trainer}
        return beside, Adapter("", hub, {}, frozenset(), frozenset(), of_trainer=True)
    # Asked for by name, so its absence is an error; without that the export is of the model.
    if request.names == PEFT and not has_adapter:
        raise UsageError(
            f"cannot export {request.source} under peft's names: its model has no adapter",
            hint="leave --names out",
        )
    # Models with LoRA weights of their own are exported like any other: these are not an adapter of it.
    if not has_adapter or has_lora_of_its_own(request):
        return find_files(request, manifest), None
    beside = find_adapter_files(request, manifest)
    return beside, find_adapter(names, beside.adapter.form if beside.adapter is not None else None)


def model_names(request: Request, manifest: Manifest) -> dict[str, str]:
    """Return stored name -> name in the model, for the tensors that an export keeps."""
    return {old: apply_renames(name, request.rename) for old, name in _bare_names(request, manifest, True)}


@dataclass(frozen=True)
class _Fitted:
    """Tensors under the names of an output, with findings about these, and the map if there was one.

    float32: names of those that stay in float32 in a cast to 16 bits; None if no model tells.
    """

    mapped: Mapped
    findings: tuple[Finding, ...] = ()
    naming: NameMap | None = None
    float32: frozenset[str] | None = None


def _fitted(
    request: Request, manifest: Manifest, model: ModelPart | None, beside: ModelFiles
) -> tuple[_Fitted, ModelFiles]:
    """Map names as the config requires.

    A config that was found, and not named, does not stop an export of a part (--include, --exclude). If it
    does not fit, it is left out.
    """
    config = beside.config
    try:
        return _checked_names(request, manifest, model, config), beside
    except (NameMismatch, UsageError) as error:
        # Only a config that was found, not one that was named, may be left out.
        of_config = "missing" in error.values or error.message.startswith("--config ")
        if config is None or request.config is not None or not of_config:
            raise
        # All of the model was asked for: then a config that does not fit is the user's to choose.
        if not (request.include or request.exclude) or not isinstance(error, NameMismatch):
            if error.hint != error.default_hint:
                raise
            hint = (
                f"{config.url} was found, and not named: name the right one with --config, or --config {NONE}"
            )
            raise type(error)(error.message, hint=hint, **error.values) from error
        message = f"what was asked for does not fit the config that was found, {config.url}: {error.message}"
        other_findings = [f for f in beside.findings if config.url not in f.message]
        left = finding("not-loadable", "files", message)
        without = replace(beside, config=None, findings=(*other_findings, left))
        return _checked_names(request, manifest, model, None), without


def _adapter_alone(
    request: Request, manifest: Manifest, model: ModelPart, adapter: Adapter, beside: ModelFiles
) -> tuple[Mapped, ModelFiles]:
    """Return the adapter without the base weights, and compare it with its config."""
    if request.tie:
        raise UsageError("cannot tie tensors of an adapter", hint="leave --tie out")
    mapped = remap(
        manifest, include=request.include, exclude=request.exclude, model=model, rename=request.rename
    )
    of_trainer = adapter.of_trainer
    if of_trainer:
        from ckptcore.planning.trainer_adapter import to_peft_names

        mapped, warnings = to_peft_names(
            mapped, adapter.hub, arch=request.arch, source=manifest, base=beside.base
        )
        beside = replace(beside, findings=(*beside.findings, *warnings))
        form = beside.adapter.form if beside.adapter is not None else None
        renamed_adapter = find_adapter([t.fqn for t in mapped.manifest.tensors], form)
        assert renamed_adapter is not None  # the map makes nothing else
        adapter = renamed_adapter
    if beside.adapter is not None:
        tensors = mapped.manifest.tensors
        shapes = {t.fqn: t.shape for t in tensors if t.fqn in adapter.hub or dtypes.get(t.dtype).is_float}
        form = adapter_config(adapter, shapes, beside.adapter.form)
        findings = (*beside.findings, *check_adapted(beside.base, sizes_without_base(adapter, shapes)))
        beside = replace(beside, adapter=replace(beside.adapter, form=form), findings=findings)
    elif request.single is None:
        raise UsageError(
            "cannot export the adapter: no adapter_config.json was found, which records what no shape does",
            hint="name the one of the training run: --config FILE; or leave the adapter out: --exclude "
            f"'*.{'adapter.' if of_trainer else 'lora_'}*'; or keep all of it under its stored names: "
            "--names stored",
        )
    return adapted(mapped, adapter), beside


def _output_layout(request: Request, manifest: Manifest, writer: Writer, of_export: Layout | None) -> Layout:
    """Return the layout of the output; raise `UsageError` if the format cannot be written so."""
    layouts = {"reshard": writer.for_mesh, "export": of_export or writer.whole}
    # Each line may replace the layout of the one before: by the verb, by the source's own form, by the names.
    layout = layouts.get(request.verb, writer.whole)
    if writer.like is not None and request.verb != "export":
        layout = writer.like(manifest) or layout
    if layout is not None and request.verb != "export":
        layout = writer.starts.get(target(request.names)[0], layout)
    if layout is None:
        raise UsageError(
            f"{request.format} is not written for the ranks of a mesh",
            hint=f"one of: {_writers(lambda w: w.for_mesh is not None)}",
        )
    if request.serialization not in writer.serializations:
        raise UsageError(
            f"--serialization {request.serialization} is not for {request.format}, whose loaders read "
            f"{', '.join(writer.serializations)}",
            hint=f"leave it out, or write {_writers(lambda w: request.serialization in w.serializations)}",
        )
    if request.verb == "export" and layout.place is not None:
        raise UsageError(
            f"cannot export to {request.format}: an export has only the model",
            hint="try consolidate; export writes safetensors or torch_save",
        )
    return layout


def _writers(able: Callable[[Writer], bool]) -> str:
    """Return the names of the formats whose writer can do this."""
    return ", ".join(f.name for f in registry().formats if f.writer is not None and able(f.writer))


def _order(manifest: Manifest, mapped: Mapped) -> tuple[str, ...]:
    """Return output names in the order of the saved state dict, if the source has recorded it."""
    new = dict(mapped.renamed)
    return tuple(new.get(name, name) for name in manifest.order)


def digest_of_map(manifest: Manifest, mapped: Mapped) -> str:
    """Return the digest of how names were mapped, as plans and conversions record it."""
    old = {b: a for a, b in mapped.renamed}
    mapped_names = {old.get(t.fqn, t.fqn) for t in mapped.manifest.tensors}
    gone = [t.fqn for t in manifest.tensors if t.fqn not in mapped_names]
    return map_digest(mapped.renamed, gone, mapped.ties, (mapped.map, mapped.made))


def _selected(request: Request, manifest: Manifest, adapter: Adapter | None) -> Callable[[str], bool]:
    """Return the test whether a tensor or object of a name is requested."""
    if adapter is not None:
        return {old for old, new in model_names(request, manifest).items() if new in adapter.hub}.__contains__
    inside = in_model(manifest, request.model_prefix) if request.takes_model else str

    def selected(name: str) -> bool:
        return is_kept(name, request.include, request.exclude) and inside(name) is not None

    return selected


def _checked_names(
    request: Request,
    manifest: Manifest,
    model: ModelPart | None,
    config: ConfigFolder | None,
    *,
    class_ties: bool = True,
) -> _Fitted:
    """Return the tensors under the names that the config's model is saved with.

    An attribute that holds the model (``model.``, ``net.module.``) is in front of every name: it is removed
    where the names are then exactly the model's.

    class_ties: whether what the model class ties is tied, too, beside the ties of the request.
    """
    try:
        # First as the names are; only if they do not fit, an attribute in front of all of them is tried.
        return _fitting_names(request, manifest, model, config, class_ties)
    except NameMismatch as error:
        if config is None or model is None or request.names not in (HUB, LIVE):
            raise
        bare = _named_tensors(replace(request, names=STORED), manifest, model, config).bare
        names = {t.fqn: t.shape for t in bare.manifest.tensors}
        # Prefixes below which names are exactly those of the model: no guess by the looks of a name.
        prefixes = [p for p in exact_prefixes(config, names) if p]
        if not prefixes:
            raise
        wrapper = next((p for p in prefixes if all(name.startswith(p) for name in names)), "")
        # Several models are below several prefixes: one must be chosen, and the hint names them.
        if not wrapper:
            raise type(error)(error.message, hint=_part_hint(bare, prefixes), **error.values) from error
        unwrapped = replace(request, rename=(*request.rename, (wrapper, "")))
        fitted = _fitting_names(unwrapped, manifest, model, config, class_ties)
        message = f"every name begins with {wrapper}, an attribute that holds the model; it is removed"
        return replace(fitted, findings=(finding("exact-names", "coverage", message), *fitted.findings))


def _part_hint(bare: Mapped, prefixes: Sequence[str]) -> str:
    """Return the option that names the model, where it is below one of several prefixes of bare names."""
    names = [t.fqn for t in bare.manifest.tensors]
    stored = {new: old for old, new in bare.renamed}
    options = []
    for prefix in prefixes:
        first = next(name for name in names if name.startswith(prefix))
        options.append(stored.get(first, first).removesuffix(first.removeprefix(prefix)))
    beside = [name for name in names if not name.startswith(tuple(prefixes))]
    alternatives = f" (or {', '.join(options[1:4])})" if options[1:] else ""
    return (
        f"add --model-prefix {options[0]}{alternatives}: the names below it are the model's"
        f"{f'; outside of it, and left out: {listed(beside)}' if beside else ''}"
    )


def _fitting_names(
    request: Request,
    manifest: Manifest,
    model: ModelPart | None,
    config: ConfigFolder | None,
    class_ties: bool,
) -> _Fitted:
    """Name the output's tensors, and require that they fit the config of the model, if there is one."""
    named = _named_tensors(request, manifest, model, config)
    mapped_names = named.mapped_names
    warnings, naming = (list(mapped_names.warnings), mapped_names.map) if mapped_names else ([], None)
    if config is None or model is None or of_trainer(request.names):
        mapped = named.tied(request.tie)
        if config is not None and model is not None:
            from ckptcore.planning.config_agreement import require_agreement

            warnings += require_agreement(request, config, manifest, model_names(request, manifest).values())
        return _Fitted(mapped, tuple(warnings), naming, frozen_float32(request.dtype, naming, None, mapped))
    # A tie of the request may name a tensor that the output does not have: that one is left to the exact
    # names.
    names = {t.fqn for t in named.tied(()).manifest.tensors}
    mapped = named.tied([tie for tie in request.tie if names.issuperset(tie)])
    tensors = mapped.manifest.tensors
    computed = bool(mapped.manifest.derived)  # then the config is written without its quantisation
    # Computed tensors have the shapes of the model; stored ones may be quantised, and have others.
    shapes = {t.fqn: t.shape for t in tensors} if computed else plain_shapes(config, tensors)
    from ckptcore.planning.config_agreement import require_agreement  # its tables: where there is a config

    expected = check_names(config, shapes, request.arch)
    warnings += expected.warnings
    if not config.of_diffusers:  # its fields have other meanings
        warnings += require_agreement(request, config, manifest, model_names(request, manifest).values())
    exact: Mapping[str, str] = {}
    # Only where every tensor has the shape of the model's: quantised weights have no exact names.
    if request.names == HUB and shapes.keys() == {t.fqn for t in tensors}:
        expected.require_exact(renaming=True)
        exact = expected.names
        if exact:
            old, new = next(iter(exact.items()))
            message = f"{count(len(exact), 'tensor')} called as {expected.model} saves it: {old} is {new}"
            warnings.append(finding("exact-names", "coverage", message))
    else:
        warnings += expected.kept_names()
    present = {t.fqn for t in tensors}
    ties = [(a, b) for a, b in expected.ties if class_ties and a in present and b in present]
    ties = [*request.tie, *(t for t in ties if t not in request.tie)]
    exact_ties = [(exact.get(a, a), exact.get(b, b)) for a, b in ties]
    # Anything that changes names or ties needs the tensors once more; the usual case keeps what was mapped.
    if exact or ties != list(request.tie) or len(names) - len(present) < len(ties):
        mapped = named.called(exact).tied(exact_ties)
    if request.names == HUB and expected.unsaved:
        unsaved = [exact.get(name, name) for name in expected.unsaved]
        # Buffers that the class computes itself: `save_pretrained` does not write them.
        mapped = without_tensors(mapped, unsaved, UNSAVED)
        message = f"{listed(unsaved)}: left out, as save_pretrained of {expected.model} does"
        warnings.append(finding("exact-names", "coverage", message))
    if expected.float32 is None:
        float32 = frozen_float32(request.dtype, naming, config.form, mapped)
    else:
        in_float32 = expected.float32.get(half_dtype(request.dtype), ())
        float32 = frozenset(exact.get(name, name) for name in in_float32)
    return _Fitted(mapped, tuple(warnings), naming, float32)


def _tied(mapped: Mapped, ties: Sequence[tuple[str, str]]) -> Mapped:
    """Apply ties, by the names after a map."""
    tied = remap(mapped.manifest, tie=ties)
    # A tied tensor that a map made of exactly one stored tensor is known by that one's name.
    uses = Counter(source for m in mapped.made for source in m.sources)
    before = {m.name: m.sources[0] for m in mapped.made if len(m.sources) == 1 and uses[m.sources[0]] == 1}
    before |= {new: old for old, new in mapped.renamed}
    gone = tuple(replace(d, fqn=before.get(d.fqn, d.fqn)) for d in tied.dropped)
    tied_names = {t.fqn for t in tied.manifest.tensors}
    return replace(
        mapped,
        manifest=tied.manifest,
        renamed=tuple((old, new) for old, new in mapped.renamed if new in tied_names),
        dropped=(*mapped.dropped, *gone),
        ties=tied.ties,
        twins=tied.twins,
    )


@dataclass(frozen=True)
class _Named:
    """The tensors under the output's names.

    Attributes:
        bare: The tensors, without ties.
        remapped: Makes them of the source; with ``tie``, too.
        mapped_names: The tensors in another world of names; None if names stay.
        mapped: Those, or the tensors under exact names; None if names stay.
    """

    bare: Mapped
    remapped: Callable[..., Mapped]
    mapped_names: MappedNames | None
    mapped: Mapped | None

    def tied(self, tie: Sequence[tuple[str, str]]) -> Mapped:
        """Apply ties."""
        if self.mapped is not None:
            return _tied(self.mapped, tie) if tie else self.mapped
        return self.remapped(tie=tie) if tie else self.bare

    def called(self, names: Mapping[str, str]) -> _Named:
        """Rename tensors: name -> new name."""
        mapped = self.bare if self.mapped is None else self.mapped
        return replace(self, mapped=with_names(mapped, names)) if names else self


def _named_tensors(
    request: Request, manifest: Manifest, model: ModelPart | None, config: ConfigFolder | None
) -> _Named:
    selection: dict[str, Any] = {
        "include": request.include,
        "exclude": request.exclude,
        "rename": request.rename,
    }
    remapped = partial(remap, manifest, **selection, model=model)
    bare = remapped()
    mapped_names = in_world(request, manifest, bare, config) if model is not None else None
    return _Named(bare, remapped, mapped_names, None if mapped_names is None else mapped_names.mapped)


def _carried_objects(
    request: Request, manifest: Manifest
) -> tuple[dict[str, Any], list[Dropped], list[Finding]]:
    """Return plain values to carry, dropped ones, and findings for references to a missing tensor.

    An object with an unknown tree is dropped; the reader has reported it.
    """
    if request.takes_model:
        why = "an export holds the model only" if request.verb == "export" else f"no names of {request.names}"
        return {}, [Dropped(b.key, why) for b in manifest.blobs], []
    names = {t.fqn for t in manifest.tensors if not matches(t.fqn, request.exclude)}
    carried_trees: dict[str, Any] = {}
    warnings: list[Finding] = []
    for blob in keep_blobs(manifest.blobs, request.include, request.exclude):
        # What could not be read is reported by the reader, and has nothing to carry.
        if not blob.known:
            continue
        gone = sorted(set(references(blob.tree)) - names)
        # Without the references to what is left out, if the object is still one then.
        tree = without(blob.tree, set(gone)) if gone else blob.tree
        if tree is LEFT_OUT:
            warnings.append(
                finding(
                    "refused-global",
                    "coverage",
                    f"object {blob.key} refers to {gone[0]}, which is left out; the object is left out too",
                    fqn=blob.key,
                )
            )
            continue
        carried_trees[blob.key] = tree
    dropped = [Dropped(b.key, _why_dropped(b, request)) for b in manifest.blobs if b.key not in carried_trees]
    return carried_trees, dropped, warnings


def _why_dropped(blob: Blob, request: Request) -> str:
    if blob.unread is not None and is_kept(blob.key, request.include, request.exclude):
        return f"cannot be read: {blob.unread.reason}"
    if blob.refused:
        return f"needs {', '.join(blob.refused)}"
    if not keep_blobs([blob], request.include, request.exclude):
        return "left out by --include or --exclude"
    return "refers to a tensor that is left out" if blob.known else "cannot be read"


def _other_parts(model: ModelPart) -> Iterable[Finding]:
    """Yield findings for other parts that could be the model."""
    for prefix in model.other_prefixes:
        message = f"{prefix[:-1] or 'the top level'} could be the model, too, and is left out"
        yield finding(
            "other-part", "coverage", message, hint=f"export it with --model-prefix {prefix or chr(39) * 2}"
        )


def _extra(
    request: Request, mapped: Mapped, target: Target, beside: ModelFiles, manifest: Manifest, arch: str
) -> dict[str, bytes]:
    """Return path -> bytes of the small files of an export. arch: of the map to a trainer's names, or ""."""
    files = dict(beside.tokenizer or {})
    if beside.adapter is not None:
        files[ADAPTER] = dumped(beside.adapter.form)
    if beside.config is not None and not of_trainer(request.names):  # transformers opens no such names
        plain = bool(mapped.manifest.derived)
        files |= beside.config.files(
            loaded_as(request.dtype, mapped.manifest.tensors, target.dtypes), plain=plain
        )
    files["README.md"] = model_card(request, mapped, manifest, target.dtypes, beside, arch)
    for spec in mapped.manifest.tensors:
        # The card lists the folder's tensors, and the folder has a file for each name: they must not be one.
        if spec.fqn in files:
            raise NameMismatch(f"a tensor is called {spec.fqn}, like a file of the folder")
    return files


def carried_files(
    request: Request, manifest: Manifest, folder: str
) -> tuple[dict[str, bytes], tuple[Finding, ...]]:
    """Return path -> bytes of the files to carry, and findings about them.

    A trainer loads the output without them, so several configs that differ are a warning, and none is taken.

    Args:
        request: The output.
        manifest: The source.
        folder: Where the format keeps them.

    Raises:
        UsageError: A file that an option names is missing, or a tokenizer's file is too large.
    """
    try:
        model_files = find_files(request, manifest)
    except AmbiguousModel as error:
        message = f"no config and no tokenizer is written to {folder}/: {error.message}"
        return {}, (finding("left-beside", "files", message, hint=error.hint),)
    config = model_files.config.content if model_files.config is not None else {}
    files = {**(model_files.tokenizer or {}), **(config if _is_model(config) else {})}
    return {f"{folder}/{name}": data for name, data in files.items()}, model_files.findings


def _is_model(content: Mapping[str, bytes]) -> bool:
    """Return whether config.json is a model's. ``--config`` may also name numbers of another trainer."""
    form = json_object(content.get(CONFIG, b""))
    return form is not None and isinstance(form.get("model_type"), str)


def unused_renames(renames: Sequence[tuple[str, str]], names: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each rename that applies to none of the names that a conversion has."""
    left = list(dict.fromkeys(old for old, _ in renames))
    # As renames see them: one after another, each on the outcome of those before.
    for name in names if left else ():
        for old, new in renames:
            if applies(name, old):
                left = [pattern for pattern in left if pattern != old]
            name = apply_renames(name, [(old, new)])
        if not left:
            return
    for old in left:
        yield finding("unused-option", "files", f"--rename {old}= matches no tensor")


def _bare_names(request: Request, manifest: Manifest, of_model: bool) -> Iterator[tuple[str, str]]:
    """Yield (stored name, the name that renames see) of what is kept.

    of_model: only of the tensors in the model; then it is the name in the model, without wrappers.
    """
    inside = in_model(manifest, request.model_prefix) if of_model else None
    for spec in manifest.tensors:
        if is_kept(spec.fqn, request.include, request.exclude):
            inner = spec.fqn if inside is None else inside(spec.fqn)
            if inner is not None:
                yield spec.fqn, inner if inside is None else strip_wrappers(inner)
