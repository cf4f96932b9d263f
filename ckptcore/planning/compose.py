"""Composing: from a request and a manifest to a plan, before anything is written.

1. The manifest must be complete (level ``cover``).
2. Names: globs, for an export the model part, wrappers off, renames, ties.
3. Dtypes: the cast and its exceptions.
4. For a Hugging Face folder: the config's files, and names and shapes checked against the model.
5. The plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from ckptcore.checking.check import Report, require_whole
from ckptcore.core import dtype as dtypes
from ckptcore.core.manifest import Blob, Manifest
from ckptcore.core.object_tree import references
from ckptcore.errors import Finding, NameMismatch, UsageError, finding
from ckptcore.fingerprints.sums import map_digest
from ckptcore.formats import by_name, registry
from ckptcore.formats.base import Layout, Writer
from ckptcore.naming.model_part import ModelPart, find_model, in_model
from ckptcore.naming.rename import Mapped, is_kept, keep_blobs, matches, remap
from ckptcore.planning.config_folder import ConfigFolder, check_names, model_card, read_config
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.nesting import LEFT_OUT, nest, without
from ckptcore.planning.plan import Plan, Target, make_plan
from ckptcore.planning.request import Request
from ckptcore.topology.mesh_spec import parse_mesh
from ckptcore.topology.rank_layout import Balance, balance, lay_out
from ckptcore.topology.rank_local_state import require_cut, without_bound

_BY_CONFIG = frozenset({"unproven-shape"})  # what is proven when all shapes are those of the model's class


@dataclass(frozen=True)
class Composed:
    """A plan with everything around it.

    extra: path -> bytes of the small files that go beside the tensors. warnings: findings that do
    not stop the conversion. model: where the model was found, for an export. ranks: what each rank of a mesh
    holds, for a reshard.
    """

    plan: Plan
    files: Iterable[FilePlan]
    extra: Mapping[str, bytes]
    report: Report
    warnings: tuple[Finding, ...]
    model: ModelPart | None
    timings: dict[str, float]
    ranks: Balance | None = None


def compose(request: Request, manifest: Manifest, each: Callable[[FilePlan], None] | None = None) -> Composed:
    """The plan of a request.

    each: called with every file's plan as it is made.
    Raises `DamagedCheckpoint`, `UnprovenCheckpoint` or `UnreadablePart` with the findings when what is asked
    for is not whole, and the errors of naming: `AmbiguousModel`, `NameMismatch`, `UnsupportedDtype`,
    `UsageError`.
    """
    began = time.perf_counter()
    writer = by_name(request.format, writes=True).writer
    assert writer is not None  # by_name finds those that write
    reshard = request.verb == "reshard"
    selected = _selected(request, manifest)
    by_config = request.verb == "export" and request.config is not None
    report = require_whole(manifest, selected, later=_BY_CONFIG if by_config else frozenset())
    checked = time.perf_counter()
    warnings = [f for f in report.findings if f.severity == "warning"]
    export = request.verb == "export"
    layout = _layout(request, writer)
    config = read_config(request.config) if request.config else None
    model = find_model(manifest, request.model_prefix) if export else None
    free, bound = without_bound(manifest, parse_mesh(request.mesh)) if reshard else (manifest, ())
    mapped, told = _names(request, free, model, config)
    if told and by_config:  # the model class was not asked, and proves nothing
        require_whole(manifest, selected)
    warnings += told
    casts = _dtypes(request, mapped.manifest)
    objects = {} if export else _objects(request, free, warnings)
    carried = set(objects)
    mapped, objects, paths, moved = nest(layout, manifest, mapped, objects)
    casts = {moved.get(name, name): dtype for name, dtype in casts.items()}
    target = Target(
        request.format,
        request.single,
        request.max_file_size,
        casts,
        objects,
        request.mesh,
        request.sharding,
        request.serialization,
    )
    if not mapped.manifest.tensors:
        raise UsageError("no tensor is left to write", hint="look at --include, --exclude and --model-prefix")
    topology = None
    if reshard:
        stored = {new: old for old, new in mapped.renamed}
        require_cut(manifest, [stored.get(t.fqn, t.fqn) for t in mapped.manifest.tensors])
        topology = lay_out(mapped.manifest, request.mesh, request.sharding, request.model_prefix)
        if request.sharding is not None:
            from ckptcore.topology.unused_rules import (
                unused_rules,  # pydantic: only those who have rules wait for it
            )

            warnings += unused_rules(mapped.manifest, request.sharding, request.model_prefix)
    extra = _extra(request, mapped, target, config, manifest)
    plan, files = make_plan(
        mapped.manifest,
        target,
        layout,
        twins=mapped.twins,
        ties=mapped.ties,
        renamed=mapped.renamed,
        dropped=[(d.fqn, d.rule) for d in mapped.dropped]
        + _dropped_objects(request, free, carried)
        + list(bound),
        extra=[(path, blake3(data).hexdigest()) for path, data in sorted(extra.items())],
        source=manifest,
        paths=paths,
        topology=topology,
        each=each,
        order=_order(manifest, mapped),
    )
    plan = replace(plan, map_digest=_map_digest(manifest, mapped))
    timings = {"validate": checked - began, "plan": time.perf_counter() - checked}
    ranks = None if topology is None else balance(topology, mapped.manifest.tensors)
    return Composed(plan, files, extra, report, tuple(warnings), model, timings, ranks)


def _layout(request: Request, writer: Writer) -> Layout:
    """How the output is laid out; raises `UsageError` for what the format cannot be written as."""
    layout = writer.for_mesh if request.verb == "reshard" else writer.whole
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
            f"an export holds the model only, which is no {request.format} checkpoint",
            hint="consolidate writes it; export writes safetensors or torch_save",
        )
    return layout


def _writers(able: Callable[[Writer], bool]) -> str:
    """The names of the formats whose writer can do this."""
    return ", ".join(f.name for f in registry().formats if f.writer is not None and able(f.writer))


def _order(manifest: Manifest, mapped: Mapped) -> tuple[str, ...]:
    """The names of what is written, in the order of the saved state dict where that is known by itself."""
    new = dict(mapped.renamed)
    return tuple(new.get(name, name) for name in manifest.order)


def _map_digest(manifest: Manifest, mapped: Mapped) -> str:
    old = {b: a for a, b in mapped.renamed}
    kept = {old.get(t.fqn, t.fqn) for t in mapped.manifest.tensors}
    gone = [t.fqn for t in manifest.tensors if t.fqn not in kept]
    return map_digest(mapped.renamed, gone, mapped.ties)


def _selected(request: Request, manifest: Manifest) -> Callable[[str], bool]:
    """Whether a tensor or object of this name is asked for."""
    inside = in_model(manifest, request.model_prefix) if request.verb == "export" else str

    def selected(name: str) -> bool:
        return is_kept(name, request.include, request.exclude) and inside(name) is not None

    return selected


def _names(
    request: Request, manifest: Manifest, model: ModelPart | None, config: ConfigFolder | None
) -> tuple[Mapped, list[Finding]]:
    options: dict[str, Any] = {
        "include": request.include,
        "exclude": request.exclude,
        "rename": request.rename,
    }
    if model is not None:
        options |= {"prefix": model.prefix, "also": model.foreign, "unwrap": True}
    mapped = remap(manifest, **options, tie=request.tie)
    if config is None or model is None:
        return mapped, []
    expected = check_names(config, {t.fqn: t.shape for t in mapped.manifest.tensors})
    present = {t.fqn for t in mapped.manifest.tensors}
    ties = [(a, b) for a, b in expected.ties if a in present and b in present]
    ties = [*request.tie, *(t for t in ties if t not in request.tie)]
    if ties != list(request.tie):
        mapped = remap(manifest, **options, tie=ties)
    return mapped, list(expected.warnings)


def _dtypes(request: Request, manifest: Manifest) -> dict[str, str]:
    """Name -> output dtype, where it differs from the stored one."""
    general = dtypes.get(request.dtype) if request.dtype else None
    if general is not None and not general.is_float:
        raise UsageError(f"--dtype {request.dtype} is not a floating-point dtype")
    exceptions = [(g, None if d == "keep" else dtypes.get(d)) for g, d in request.dtype_for]
    for glob, _ in exceptions:
        if not any(matches(t.fqn, [glob]) for t in manifest.tensors):
            raise UsageError(f"--dtype-for {glob} matches nothing")
    found: dict[str, str] = {}
    for spec in manifest.tensors:
        hit = next(((True, d) for g, d in exceptions if matches(spec.fqn, [g])), (False, general))
        wanted = hit[1]
        if wanted is None or wanted.name == spec.dtype:
            continue
        if not dtypes.get(spec.dtype).is_float or not wanted.is_float:
            if hit[0]:
                raise UsageError(
                    f"--dtype-for would cast {spec.fqn} from {spec.dtype} to {wanted.name}; "
                    "only floating-point dtypes are cast"
                )
            continue
        found[spec.fqn] = wanted.name
    return found


def _objects(request: Request, manifest: Manifest, warnings: list[Finding]) -> dict[str, Any]:
    """Plain values to carry; one whose tree is unknown stays out, and a finding has said so."""
    kept = keep_blobs(manifest.blobs, request.include, request.exclude)
    names = {t.fqn for t in manifest.tensors if not matches(t.fqn, request.exclude)}
    found: dict[str, Any] = {}
    for blob in kept:
        if not blob.known:
            continue
        gone = sorted(set(references(blob.tree)) - names)
        tree = without(blob.tree, set(gone)) if gone else blob.tree
        if tree is LEFT_OUT:
            warnings.append(
                finding(
                    "refused-global",
                    "cover",
                    f"object {blob.key} refers to {gone[0]}, which is left out; the object is left out too",
                    fqn=blob.key,
                )
            )
            continue
        found[blob.key] = tree
    return found


def _dropped_objects(request: Request, manifest: Manifest, carried: set[str]) -> list[tuple[str, str]]:
    if request.verb == "export":
        return [(b.key, "an export holds the model only") for b in manifest.blobs]
    gone = [b for b in manifest.blobs if b.key not in carried]
    return [(b.key, _why_dropped(b, request)) for b in gone]


def _why_dropped(blob: Blob, request: Request) -> str:
    if blob.unread is not None and is_kept(blob.key, request.include, request.exclude):
        return f"cannot be read: {blob.unread.reason}"
    if blob.refused:
        return f"needs {', '.join(blob.refused)}"
    if not keep_blobs([blob], request.include, request.exclude):
        return "left out by --include or --exclude"
    return "refers to a tensor that is left out" if blob.known else "cannot be read"


def _beside(config: ConfigFolder, floats: set[str], mapped: Mapped) -> dict[str, bytes]:
    one = next(iter(floats)) if len(floats) == 1 else None
    return config.files(one, plain=bool(mapped.manifest.derived))


def _extra(
    request: Request, mapped: Mapped, target: Target, config: ConfigFolder | None, manifest: Manifest
) -> dict[str, bytes]:
    if request.verb != "export" or request.single is not None:
        return {}
    written = {target.dtypes.get(t.fqn, t.dtype) for t in mapped.manifest.tensors}
    floats = {d for d in written if dtypes.get(d).is_float}
    files = _beside(config, floats, mapped) if config is not None else {}
    files.setdefault("README.md", model_card(request, mapped, manifest, has_config=config is not None))
    for spec in mapped.manifest.tensors:
        if spec.fqn in files:
            raise NameMismatch(f"a tensor is called {spec.fqn}, like a file of the folder")
    return files
