"""Read several checkpoints as one: the weighted average of their models, or a model with a LoRA adapter.

The inputs may have any formats, topologies and dtypes. Tensors of the model part that have fractions are
computed (`ckptcore.core.weighted_sums`); all else is the last input's: integers, booleans, objects, and what
is outside of the model part. The state of optimizers is left out: moments of one step do not belong to an
average of weights.

The result has the last input's names. Where stored names differ, as between a trainer's wrapper and a bare
model, those inside the model parts are compared, without wrappers.

An adapter is merged into a base: it is what peft saves, or the part of a live model
that is one. Each adapted weight is computed (`ckptcore.core.adapted_weights`). Modules that the adapter saved
as a whole, and biases, take the place of the base's. All else is the base's, without its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.core.adapted_weights import adapted, adapted_node
from ckptcore.core.byte_ledger import ByteLedger
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import SUM, Derived, Manifest, StoredFile, TensorSpec
from ckptcore.core.subset import select
from ckptcore.core.tree_paths import Paths
from ckptcore.core.weighted_sums import SUMMED, packed_weights, summed
from ckptcore.errors import (
    AmbiguousModel,
    DamagedCheckpoint,
    Finding,
    NameMismatch,
    UnsupportedDtype,
    UsageError,
    finding,
)
from ckptcore.formats.base import Source
from ckptcore.formats.common.join import Part, join
from ckptcore.naming.low_rank import adapter_merge
from ckptcore.naming.model_part import find_model
from ckptcore.naming.quantized_names import bound
from ckptcore.naming.rename import strip_wrappers
from ckptcore.naming.training_state import OPTIMIZER, StoredKinds
from ckptcore.store.average import AverageStore, ObservedInput
from ckptcore.utils.average_url import average_url, folder_of_input, normalized, split_average
from ckptcore.utils.foreign_text import InvalidText, load_json_object
from ckptcore.utils.text import count, some
from ckptcore.utils.units import show_size

_FRACTIONS = "fcp"  # kinds of dtypes: floating-point, complex and packed numbers
_FORM = "@1/adapter_config.json"
_MAX_FORM = 1 << 20


@dataclass(frozen=True)
class ModelInput:
    """One input without its optimizer.

    Attributes:
        url: Where it is.
        manifest: Its tensors and objects.
        inside: Stored name of a tensor of the model part -> its name in it, without wrappers; and of what is
            like a weight, and of no known kind, outside of it -> itself.
        left_out: Names of the tensors of optimizers, and of copies of the model.
        left_bytes: Their bytes.
    """

    url: str
    manifest: Manifest
    inside: Mapping[str, str]
    left_out: tuple[str, ...]
    left_bytes: int

    @property
    def summed(self) -> dict[str, str]:
        """Name of a tensor in the model, if it has fractions -> its stored name."""
        stored_by_name: dict[str, str] = {}
        for stored, inner in self.inside.items():
            kind = BY_NAME[self.spec(stored).dtype].kind
            if kind not in _FRACTIONS:
                continue
            if inner in stored_by_name:
                raise NameMismatch(
                    f"{stored_by_name[inner]} and {stored} of {self.url} would both be called {inner}"
                )
            stored_by_name[inner] = stored
        return stored_by_name

    def spec(self, name: str) -> TensorSpec:
        """Return the tensor of a stored name."""
        return self.manifest.tensors[self.manifest.index[name]]


def read_average(source: Source, read: Callable[[str, ObservedInput | None], Manifest]) -> Manifest:
    """Return the manifest of an average.

    Args:
        source: Its store is an `AverageStore`.
        read: Reads the manifest of one input, by its URL; the observer receives the reads of it.

    Raises:
        NameMismatch: Names, shapes or ties of the inputs differ.
        UsageError: An input has quantised weights.
        UnsupportedDtype: A tensor of the model has a dtype that is not summed.
        CkptError: An input cannot be read.
    """
    store = source.store
    assert isinstance(store, AverageStore)  # the caller has checked
    inputs = [model_input(root, manifest) for root, manifest in input_manifests(store, read)]
    return _average(inputs, split_average(store.url)[1])


def input_manifests(
    store: AverageStore, read: Callable[[str, ObservedInput | None], Manifest]
) -> Iterator[tuple[str, Manifest]]:
    """Yield the URL and the manifest of each input; ``read`` as for `read_average`."""
    observer, count = store.observer, len(store.roots)
    for place, root in enumerate(store.roots):
        inner = None if observer is None else ObservedInput(observer, folder_of_input(place, count))
        yield root, read(root, inner)


def model_input(url: str, manifest: Manifest) -> ModelInput:
    """Return an input without the tensors and objects of its optimizers, and without copies of its model."""
    manifest = manifest.without_copies()
    if manifest.inputs is not None:
        name = manifest.tensors[min(manifest.derived)].fqn
        raise UsageError(
            f"cannot average {url}: {name} is computed from several stored tensors",
            hint="export it in a dtype first: ckptcore export SRC PLAIN --dtype bf16",
        )
    if packed := next(iter(bound(manifest.tensors)), None):
        raise UsageError(
            f"cannot average {url}: {packed} is a part of a quantised weight",
            hint="export it in a dtype first: ckptcore export SRC PLAIN --dtype bf16",
        )
    kinds = StoredKinds(manifest)
    try:
        part = find_model(manifest)
        inside = {
            spec.fqn: strip_wrappers(spec.fqn[len(part.prefix) :])
            for spec in manifest.tensors
            if part.holds(spec.fqn)
        }
    except AmbiguousModel:  # several models: all that no trainer keeps for itself
        inside = {
            spec.fqn: strip_wrappers(spec.fqn) for spec in manifest.tensors if kinds.kind_of(spec.fqn) is None
        }
    shapes = {inside[spec.fqn]: spec.shape for spec in manifest.tensors if spec.fqn in inside}
    left_out = []
    for spec in (spec for spec in manifest.tensors if spec.fqn not in inside):
        # DeepSpeed keeps ``lp/<name>``, the weight in low precision, which would not be that of the average.
        is_copy = shapes.get(spec.fqn.partition("/")[2]) == spec.shape
        if is_copy or kinds.kind_of(spec.fqn) == OPTIMIZER:
            left_out.append(spec.fqn)
        elif kinds.kind_of(spec.fqn) is None and kinds.is_weight_like(spec.fqn):
            inside[spec.fqn] = spec.fqn  # nothing says that it was not trained
    values = {b.key for b in manifest.blobs if b.key not in inside and kinds.kind_of(b.key) == OPTIMIZER}
    left_bytes = sum(manifest.tensors[manifest.index[name]].nbytes for name in left_out)
    if left_out or values:
        manifest = _without(manifest, {*left_out, *values})
    return ModelInput(url, manifest, inside, tuple(left_out), left_bytes)


def _without(manifest: Manifest, names: set[str]) -> Manifest:
    """Return a manifest without tensors and objects of these names, and without findings on them."""
    paths, remaining = Paths.of(manifest), Paths()
    for name in paths:
        if name not in names:
            remaining.add(name, paths[name])
    rows = [row for row, spec in enumerate(manifest.tensors) if spec.fqn not in names]
    blobs = tuple(blob for blob in manifest.blobs if blob.key not in names)
    left = select(manifest, rows)
    form = remaining.form([spec.fqn for spec in left.tensors], [blob.key for blob in blobs])
    return replace(
        left,
        blobs=blobs,
        origin=left.origin if form is None else {**left.origin, "paths": form},
        findings=tuple(finding for finding in manifest.findings if finding.fqn not in names),
        order=tuple(name for name in manifest.order if name not in names),
    )


def _average(inputs: Sequence[ModelInput], weights: Sequence[float]) -> Manifest:
    """Return the manifest of the weighted sums of the inputs' tensors."""
    last, shares = inputs[-1], normalized(weights)
    stored = [_stored_names(averaged, last) for averaged in inputs]
    specs = {
        name: [averaged.spec(names[name]) for averaged, names in zip(inputs, stored, strict=True)]
        for name in stored[-1]
    }
    for name, several in specs.items():
        _require_alike(name, several, inputs)
    # The wider dtype counts: max("float32", "float64").
    dtypes = {name: max(SUMMED[spec.dtype] for spec in several) for name, several in specs.items()}
    nodes = {name: Derived(f"{SUM}{dtype}", (), packed_weights(shares)) for name, dtype in dtypes.items()}
    url = average_url([averaged.manifest.root for averaged in inputs], weights)
    manifest = summed(layers_of(url, [averaged.manifest for averaged in inputs], stored), nodes, dtypes)
    evidence = f"the average of {len(inputs)} checkpoints, by the weights {', '.join(map(repr, shares))}"
    manifest = replace(manifest, findings=(*manifest.findings, *_notes(inputs, specs)))
    return with_files(manifest, [averaged.manifest for averaged in inputs], evidence)


def with_files(manifest: Manifest, inputs: Sequence[Manifest], evidence: str) -> Manifest:
    """Return the manifest of a sum with the files of all inputs, under their names in it."""
    last = inputs[-1]
    origin = {**last.origin, "file": None}
    folders = [folder_of_input(place, len(inputs)) for place in range(len(inputs))]
    placed = list(zip(folders, inputs, strict=True))
    return replace(
        manifest,
        origin={**origin, "evidence": [*origin.get("evidence", ()), evidence]},
        stamps={folder + path: stamp for folder, m in placed for path, stamp in m.stamps.items()},
        described=tuple(StoredFile(folder + f.path, f.size) for folder, m in placed for f in m.described),
        beside=tuple(StoredFile(folder + f.path, f.size) for folder, m in placed for f in m.beside),
        ledger=_ledger(placed),
        order=last.order,
    )


def _stored_names(averaged: ModelInput, last: ModelInput) -> dict[str, str]:
    """Return the name of a summed tensor in the last input -> that in this one; raise if names differ."""
    names, last_names = averaged.summed, last.summed
    if names.keys() != last_names.keys() and set(names.values()) == set(last_names.values()):
        names = last_names = {name: name for name in names.values()}
    if names.keys() != last_names.keys():
        names = _without_prefix(names, last_names.keys()) or _with_prefix(names, last_names.keys()) or names
    if names.keys() == last_names.keys():
        return {stored: names[inner] for inner, stored in last_names.items()}
    missing = [name for name in last_names if name not in names]
    unread = [name for name in missing if name in averaged.manifest.unread]
    why = f": {averaged.manifest.unread[unread[0]].reason}" if unread else ""
    unexpected = [name for name in names if name not in last_names]
    lacks = [f"{averaged.url} lacks {some(missing)}{why}"] if missing else []
    lacks += [f"{last.url} lacks {some(unexpected)}"] if unexpected else []
    hint = (
        "a tied weight may be stored by some of them only: export each, then average the exports. "
        "`ckptcore diff A B` shows the names of two"
    )
    if any(".lora_" in name for name in (*names, *last_names)):
        hint = "an adapter is merged into its base by: ckptcore merge BASE DST --adapter ADAPTER"
    raise NameMismatch(
        f"cannot average checkpoints whose tensors differ: {'; '.join(lacks)}",
        hint=hint,
        missing=missing,
        unexpected=unexpected,
    )


def _without_prefix(names: Mapping[str, str], expected_names: Collection[str]) -> dict[str, str]:
    """Return names without one prefix of all of them, if they are the wanted ones then; else nothing.

    What a trainer saved below ``model.`` is the model without it, also where no path records that.
    """
    if len(names) != len(expected_names) or not expected_names:
        return {}
    shortest = min(expected_names, key=len)
    for name in names:
        prefix = name.removesuffix(shortest)
        if prefix == name or not prefix.endswith(".") or not all(n.startswith(prefix) for n in names):
            continue
        bare = {n.removeprefix(prefix): stored for n, stored in names.items()}
        if bare.keys() == set(expected_names):
            return bare
    return {}


def _with_prefix(names: Mapping[str, str], expected_names: Collection[str]) -> dict[str, str]:
    """Return names below one prefix, if they are the wanted ones then; else nothing."""
    bare = _without_prefix({name: name for name in expected_names}, names.keys())
    return {longer: names[shorter] for shorter, longer in bare.items()}


def _require_alike(name: str, specs: Sequence[TensorSpec], inputs: Sequence[ModelInput]) -> None:
    """Require one shape in all inputs, and dtypes that are summed."""
    for spec, averaged in zip(specs, inputs, strict=True):
        if spec.shape != specs[-1].shape:
            raise NameMismatch(
                f"cannot average {name}: its shapes differ (got {list(spec.shape)} in {averaged.url}, "
                f"{list(specs[-1].shape)} in {inputs[-1].url})",
                hint="average checkpoints of one model",
            )
        if spec.dtype not in SUMMED:
            raise UnsupportedDtype(
                f"cannot average {name}: it is {spec.dtype} in {averaged.url}",
                hint=f"export the checkpoints in a dtype that is summed first: {', '.join(SUMMED)}",
            )


def layers_of(url: str, inputs: Sequence[Manifest], stored: Sequence[Mapping[str, str]]) -> list[Manifest]:
    """Return what each input gives to the sums, over the items of all; the last one with all its tensors.

    Args:
        url: Of the sum.
        inputs: In their order.
        stored: For each input: name in its layer -> its stored name.
    """
    parts, spans = [], []
    for place, (manifest, names) in enumerate(zip(inputs, stored, strict=True)):
        folder = folder_of_input(place, len(inputs))
        if folder:
            rows = [manifest.index[name] for name in names.values()]
            called = {stored_name: name for name, stored_name in names.items()}
            findings = tuple(
                report if report.fqn is None else replace(report, fqn=called[report.fqn])
                for report in manifest.findings
                if report.fqn is None or report.fqn in called
            )
            manifest = replace(select(manifest, rows, list(names)), blobs=(), findings=findings, order=())
        spans.append(len(manifest.tensors))
        parts.append(Part(manifest, folder.rstrip("/"), folder.__add__))
    joined = join(inputs[-1].format, url, parts, inputs[-1].origin)
    layers, begin = [], 0
    for part, size in zip(parts, spans, strict=True):
        layer_names = [spec.fqn for spec in part.manifest.tensors]
        layers.append(select(joined, range(begin, begin + size), layer_names))
        begin += size
    return layers


def _notes(inputs: Sequence[ModelInput], summed_names: Mapping[str, object]) -> Iterator[Finding]:
    """Yield findings on what is not summed."""
    last = inputs[-1]
    unsummed = [spec.fqn for spec in last.manifest.tensors if spec.fqn not in summed_names]
    trees = [{blob.key: blob.tree for blob in averaged.manifest.blobs} for averaged in inputs]
    differ = [key for key, tree in trees[-1].items() if any(key in t and t[key] != tree for t in trees[:-1])]
    parts = [f"{count(len(unsummed), 'tensor')} ({some(unsummed)})"] if unsummed else []
    if trees[-1]:
        parts.append(
            count(len(trees[-1]), "object")
            + (f", of which {some(differ)} differ in another input" if differ else "")
        )
    if parts:
        message = f"not averaged, but taken from the last input, {last.url}: {'; '.join(parts)}"
        yield finding("of-last-input", "coverage", message)
    yield from left_out(inputs)


def left_out(inputs: Sequence[ModelInput]) -> Iterator[Finding]:
    """Yield a finding on the optimizers of the inputs."""
    left = [(len(averaged.left_out), averaged.left_bytes) for averaged in inputs]
    tensors, nbytes = (sum(column) for column in zip(*left, strict=True))
    if tensors:
        message = f"left out of the average: the optimizers ({count(tensors, 'tensor')}, {show_size(nbytes)})"
        yield finding("left-out", "coverage", message)


def _ledger(placed: Sequence[tuple[str, Manifest]]) -> ByteLedger | None:
    """Return the account of all inputs' files, under their names in the average."""
    ledger = ByteLedger()
    for folder, manifest in placed:
        input_ledger = manifest.ledger
        if input_ledger is None:
            return None
        ledger.read |= {folder + path for path in input_ledger.read}
        ledger.structure |= {folder + path: spans for path, spans in input_ledger.structure.items()}
        ledger.unused += [
            replace(unread_bytes, file=folder + unread_bytes.file) for unread_bytes in input_ledger.unused
        ]
        ledger.odd += [(folder + path, name, key) for path, name, key in input_ledger.odd]
        ledger.carried += [(folder + path, name, values) for path, name, values in input_ledger.carried]
    return ledger


def read_adapted(source: Source, read: Callable[[str, ObservedInput | None], Manifest]) -> Manifest:
    """Return the manifest of a model with an adapter merged into it.

    Args:
        source: Its store is an `AverageStore` of the adapter and its base.
        read: Reads the manifest of one of them, by its URL; the observer receives the reads of it.

    Raises:
        NameMismatch: Names or shapes of the two do not fit each other, or the adapter's config.
        UsageError: The adapter is of a kind that is not merged, or has no config.
        UnsupportedDtype: A weight has a dtype that is not summed.
        CkptError: One of them cannot be read.
    """
    store = source.store
    assert isinstance(store, AverageStore)  # the caller has checked
    (adapter_url, adapter), (base_url, base_manifest) = input_manifests(store, read)
    adapter = adapter.without_copies()
    if adapter.inputs is not None:
        raise UsageError(
            f"cannot merge {adapter_url}: tensors of it are computed from several stored ones",
            hint="save it in float32 or bfloat16",
        )
    form = _form(store, adapter_url)
    base = model_input(base_url, base_manifest)
    model_names = {name: stored for stored, name in base.inside.items()}
    specs = {strip_wrappers(spec.fqn): spec for spec in adapter.tensors}
    if len(model_names) < len(base.inside) or len(specs) < len(adapter.tensors):
        raise NameMismatch(
            f"cannot merge {adapter_url}: two tensors of it, or of its base, have one name without wrappers",
            hint="export each first",
        )
    merge = adapter_merge(
        {name: spec.shape for name, spec in specs.items()},
        form,
        {name: base.spec(stored).shape for name, stored in model_names.items()},
    )
    nodes = {}
    for name, update in merge.updates.items():
        weight, pair = base.spec(model_names[name]), (specs[update.first], specs[update.second])
        if name in merge.replaced:  # an embedding that was saved as a whole, because it has more rows
            weight = specs[merge.replaced[name]]
        dtype = max(map(_summed, (weight, *pair)))
        node = adapted_node(dtype, update.scale, update.rank, transposed=update.transposed)
        nodes[model_names[name]] = node, [spec.fqn for spec in pair]
    replaced = {model_names[name]: specs[own].fqn for name, own in merge.replaced.items()}
    used = [*(name for _, pair in nodes.values() for name in pair), *replaced.values()]
    inputs = [adapter, base.manifest]
    first, last = layers_of(store.url, inputs, [{name: name for name in used}, {}])
    manifest = adapted(last, first, nodes, replaced)
    manifest = replace(manifest, findings=(*manifest.findings, *left_out([base])))
    evidence = f"{adapter_url} is merged into {count(len(nodes), 'weight')}"
    evidence += f", and takes the place of {count(len(replaced), 'tensor')}" if replaced else ""
    return with_files(manifest, inputs, evidence)


def _form(store: AverageStore, adapter_url: str) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    size = store.size(_FORM)
    if size is None:
        raise UsageError(
            f"cannot merge {adapter_url}: it has no adapter_config.json, which records what no shape does",
            hint="name the folder that has it; ckptcore export makes one of a trainer's adapter",
        )
    damaged = f"cannot read adapter_config.json of {adapter_url}"
    if size > _MAX_FORM:
        raise DamagedCheckpoint(
            f"{damaged}: it must be at most {show_size(_MAX_FORM)} (got {show_size(size)})"
        )
    try:
        return load_json_object(store.read(_FORM, 0, size))
    except InvalidText as error:
        raise DamagedCheckpoint(f"{damaged}: {error}") from error


def _summed(spec: TensorSpec) -> str:
    """Return the dtype in which a tensor is summed."""
    if spec.dtype not in SUMMED:
        raise UnsupportedDtype(
            f"cannot merge an adapter into {spec.fqn}: it is {spec.dtype}",
            hint=f"export it in a dtype that is summed first: {', '.join(SUMMED)}",
        )
    return SUMMED[spec.dtype]
