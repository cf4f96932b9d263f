"""Report what an output leaves out, restates or does not use, and ask where evidence contradicts names.

An export leaves training state out, plain values change their form, a reshard has uneven meshes and keys that
are gone. Several models may share a rule file, so a sharding rule that matches no parameter is a warning. A
typo in a glob looks the same, and would leave its parameters to the next rule or to FSDP's default. The
warning lists the names nearest to the glob.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain, islice
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.object_tree import SCALARS
from ckptcore.encodings.pickle.writer import Classes, keeps_class
from ckptcore.errors import AmbiguousModel, Finding, finding
from ckptcore.formats.base import Layout
from ckptcore.naming.optimizer_state import parameters
from ckptcore.naming.rename import ModelPart, is_kept, matches
from ckptcore.naming.training_state import AVERAGE, TRAINING_STATE, StoredKinds
from ckptcore.planning.model_limits import require_possible
from ckptcore.planning.request import Request
from ckptcore.topology.layout import Topology
from ckptcore.topology.mesh_spec import parse_mesh
from ckptcore.topology.pipeline_stages import StageContents, number_of, stage_contents
from ckptcore.topology.rules import ShardingRule, ShardingRules, Stages, load
from ckptcore.utils.globs import covering
from ckptcore.utils.text import count, short_repr, some
from ckptcore.utils.units import show_size


def reshard_findings(
    request: Request,
    source: Manifest,
    written: Manifest,
    bound: Sequence[tuple[str, str]],
    *,
    ruled: bool,
    repads: bool = False,
) -> list[Finding]:
    """Return the warnings of a reshard.

    Args:
        request: The reshard.
        source: The checkpoint, as it is stored.
        written: The tensors that are written.
        bound: (name, reason) of the state that is dropped.
        ruled: Whether rules on names decide the layout, and not the caller.
        repads: Whether loaders of the output pad the vocabulary for their own tp.

    Raises:
        UsageError: The trainer cannot run the model on the mesh.
    """
    findings: list[Finding] = []
    if ruled:
        shapes = parameters(written, request.model_prefix)[0]
        findings += require_possible(source, shapes, parse_mesh(request.mesh), request.config, repads=repads)
    if request.sharding is not None:
        findings += unused_rules(written, request.sharding, request.model_prefix)
    if bound:
        keys = sorted(name for name, _ in bound)
        message = f"{count(len(keys), 'key')} of the source cannot be loaded from the output: {some(keys)}"
        hint = "a strict load must not ask for them; --keep-object GLOB carries them"
        findings.append(finding("dropped-keys", "coverage", message, hint=hint))
    return findings


def stages_of(written: Manifest, topology: Topology, model_prefix: str | None) -> tuple[StageContents, ...]:
    """Return what each pipeline stage has of the model's parameters; nothing without stages."""
    if dict(topology.mesh.axes).get("pp", 1) == 1:
        return ()
    owner = parameters(written, model_prefix)[1]
    shapes = {t.fqn: t.shape for t in written.tensors}
    names = [
        name for name in shapes if name.endswith(owner.get(name, "\0")) and "state" not in name.split(".")
    ]
    return stage_contents(topology, shapes, names)


_MOST = 20  # findings
_NAMES, _LENGTH, _GLOBS = 300, 100, 3  # names compared with a glob, characters of each, globs of a rule


def unused_rules(manifest: Manifest, sharding: str, model_prefix: str | None = None) -> tuple[Finding, ...]:
    """Return a warning for every unused rule and stage key of a sharding file.

    Args:
        manifest: The checkpoint's tensors.
        sharding: TOML text.
        model_prefix: Prefix of the model part, or None to find it.

    Raises:
        UsageError: The text is not a sharding file.
    """
    rule_file = load(sharding)
    names = list(parameters(manifest, model_prefix)[0])
    unused = chain(_unused_patterns(rule_file.rule, names), _stages(rule_file.stages or Stages(), names))
    return tuple(finding("unused-rule", "coverage", message) for message in islice(unused, _MOST))


def _unused_patterns(rules: tuple[ShardingRule, ...], names: Sequence[str]) -> Iterator[str]:
    find = ShardingRules(rules, None, (), "--sharding").find
    used = {id(rule) for name in names if (rule := find(name)) is not None}
    for number, rule in enumerate(rules, 1):
        if id(rule) not in used:
            hit = next((n for n in names if matches(n, rule.fqn)), None)
            label = f"[[rule]] {number} of --sharding, {some(rule.fqn)}, "
            yield label + (_none(rule.fqn, names) if hit is None else _behind(hit))


def _stages(stages: Stages, names: Sequence[str]) -> Iterator[str]:
    used = {
        "layers": bool(number_of(names, stages.layers)),
        "first": any(matches(n, stages.first) for n in names),
        "last": any(matches(n, stages.last) for n in names),
    }
    for key, is_used in used.items():
        globs = getattr(stages, key)
        if globs and not is_used:
            yield f"[stages] {key} of --sharding, {some(globs)}, {_none(globs, names)}"


def _behind(name: str) -> str:
    return f"has no effect: an earlier rule matches its parameters, such as {short_repr(name)[1:-1]}"


def _none(globs: Sequence[str], names: Sequence[str]) -> str:
    kinds: dict[str, str] = {}  # names that differ only in numbers are one kind
    for name in names:
        kinds.setdefault(re.sub(r"[0-9]+", "0", name[:_LENGTH]), name)
    first = list(kinds)[:_NAMES]
    near = {kinds[k]: None for g in globs[:_GLOBS] for k in get_close_matches(_bare(g), first, 2, 0.4)}
    return f"matches no parameter; {f'similar names: {some(list(near))}' if near else 'no name is similar'}"


def _bare(glob: str) -> str:
    """Return a glob's literal characters, to compare it with names."""
    return re.sub(r"[*?\[\]]", "", glob.replace("{n}", "0"))[:_LENGTH]


_UNKNOWN = "no known kind"
_COPY, _OTHER = "copies of the model", "other"


def require_decided(request: Request, manifest: Manifest, model: ModelPart) -> None:
    """Raise `AmbiguousModel` if tensors outside of the model part were trained, and no option decides.

    Args:
        request: The export.
        manifest: Its source.
        model: The model part; without strays if the user named it.
    """
    strays = [name for name in model.strays if is_kept(name, request.include, request.exclude)]
    if not strays:
        return
    other_names = {spec.fqn for spec in manifest.tensors} - set(strays)
    globs = covering(strays, other_names)[:4]
    place = model.prefix or "the model at the top level"
    raise AmbiguousModel(
        f"the optimizer has state for {count(len(strays), 'tensor')} outside of {place}: {some(strays)}",
        hint=f"leave them out: {' '.join(f'--exclude {glob!r}' for glob in globs)}; or export them, too: "
        "--model-prefix '', with --include and --rename; or say that nothing is missing: "
        f"--model-prefix {model.prefix or chr(39) * 2}",
        candidates=[model.prefix, ""],
    )


def left_out_findings(request: Request, manifest: Manifest, model: ModelPart) -> Iterator[Finding]:
    """Yield findings with the kinds, numbers and bytes of what is not in the model part.

    What globs leave out, and parts that `other-part` names, are not repeated.

    Args:
        request: The export.
        manifest: Its source.
        model: The model part.
    """
    kinds = StoredKinds(manifest)
    inside = (spec for spec in manifest.tensors if model.holds(spec.fqn))
    shapes = {spec.fqn[len(model.prefix) :]: spec.shape for spec in inside}
    tensors: dict[str, list[str]] = {}
    values: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for spec in manifest.tensors:
        name = spec.fqn
        if model.holds(name):
            continue
        if not is_kept(name, request.include, request.exclude) or name.startswith(
            model.other_prefixes or ("\0",)
        ):
            continue
        kind = kinds.kind_of(name) or _unknown_kind(name, spec.shape, shapes, kinds)
        tensors.setdefault(kind, []).append(name)
        sizes[kind] = sizes.get(kind, 0) + spec.nbytes
    for blob in manifest.blobs:
        stored = kinds.kind_of(blob.key)
        kind = stored if stored is not None and stored in TRAINING_STATE else _OTHER
        values[kind] = values.get(kind, 0) + 1
    counted = [kind for kind in {**tensors, **values} if kind in TRAINING_STATE or kind == _COPY]
    counted += [_OTHER] if _OTHER in tensors or _OTHER in values else []
    parts = [_part(k, len(tensors.get(k, ())), values.get(k, 0), sizes.get(k, 0)) for k in counted]
    if parts:
        yield finding("left-out", "coverage", f"left out of the export: {'; '.join(parts)}")
    for kind in (AVERAGE, _UNKNOWN):
        names = tensors.get(kind, [])
        if names:
            label = (
                "an average of weights" if kind == AVERAGE else "outside of the model, and no training state"
            )
            size = f"{count(len(names), 'tensor')}, {show_size(sizes[kind])}"
            yield finding("left-out-weights", "coverage", f"left out, {label} ({size}): {some(names)}")


def _unknown_kind(
    name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], kinds: StoredKinds
) -> str:
    """Return what a tensor without a known kind is called in a finding.

    DeepSpeed keeps ``lp/<name>``, the weight in low precision, beside its master.
    """
    if shapes.get(name.partition("/")[2]) == shape:
        return _COPY
    return _UNKNOWN if kinds.is_weight_like(name) else _OTHER


def _part(kind: str, tensors: int, values: int, nbytes: int) -> str:
    numbers = [count(tensors, "tensor") + f", {show_size(nbytes)}"] if tensors else []
    numbers += [count(values, "value")] if values else []
    return f"{kind} ({', '.join(numbers)})"


_MOST_VALUES = 20  # values that a message names
_KEPT = {"trainers": Classes.TRAINERS, "libraries": Classes.LIBRARIES, "plain": Classes.PLAIN}
# Kinds of forms that are values of Python itself.
_PLAIN_KINDS = frozenset(
    {"int", "float", "complex", "bytes", "tensor", "refused", "tuple", "set", "frozenset"}
)
# Arrays become tensors where a format has no arrays; byte tensors are tensors.
_ELSEWHERE = frozenset({"ndarray", "bytetensor"})
# Written as another class, although its own is known: WindowsPath, which opens on Windows only.
_REPLACED = frozenset({"windowspath"})


def value_findings(layout: Layout, objects: Mapping[str, Any]) -> list[Finding]:
    """Return findings for the values of an output's objects.

    Args:
        layout: How the output is laid out.
        objects: Key -> tree in JSON form.
    """
    if layout.values not in _KEPT:
        return []
    classes = _KEPT[layout.values]
    plain: dict[str, str] = {}
    classed: dict[str, str] = {}
    for key, form in objects.items():
        for path, kind in _named(form, key):
            if kind in _ELSEWHERE:
                continue
            if kind in _REPLACED or not keeps_class(kind, classes):
                plain[path] = kind
            elif not keeps_class(kind, Classes.PLAIN):
                classed[path] = kind
    findings: list[Finding] = []
    if plain:
        message = f"{count(len(plain), 'value')} in a plain form: {_listed(plain)}"
        findings.append(finding("restated-value", "files", message, fqn=min(plain)))
    if classed and layout.torch_load:
        message = f"{count(len(classed), 'value')} with a class: {_listed(classed)}"
        findings.append(finding("needs-classes", "files", message, fqn=min(classed)))
    return findings


def _listed(values: Mapping[str, str]) -> str:
    return some([f"{path} ({kind})" for path, kind in sorted(values.items())], _MOST_VALUES)


def _named(form: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (path, kind) of the values of libraries and trainers in a JSON form."""
    if isinstance(form, list):
        inside: Iterable[tuple[Any, Any]] = enumerate(form)
    elif not isinstance(form, dict):
        return
    elif (kind := form.get("$")) is None:
        inside = form.items()
    elif kind in ("dict", "odict"):
        for key, _ in form["items"]:
            yield from _named(key, path)
        inside = ((k if type(k) in SCALARS else "", v) for k, v in form["items"])
    elif kind in _PLAIN_KINDS:
        if kind == "frozenset":
            yield path, kind
        inside = enumerate(form.get("items", ()))
    else:
        yield path, kind
        value = form["value"]
        value = value["items"] if kind in ("deque", "defaultdict") else value
        yield from _named(value, path)
        return
    for key, value in inside:
        if type(value) not in SCALARS:
            yield from _named(value, f"{path}.{key}")
