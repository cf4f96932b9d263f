"""Read a model and a LoRA adapter as one checkpoint: the model with the adapter merged into it.

The base may have any format, topology and dtype; the adapter is what peft saves, or the part of a live model
that is one. Each adapted weight is computed (`ckptcore.core.adapted_weights`). Modules that the adapter saved
as a whole, and biases, take the place of the base's. All else is the base's, without its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptcore.core.adapted_weights import adapted, adapted_node
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.weighted_sums import SUMMED
from ckptcore.errors import DamagedCheckpoint, NameMismatch, UnsupportedDtype, UsageError
from ckptcore.formats.average import input_manifests, layers_of, left_out, model_input, with_files
from ckptcore.formats.base import Source
from ckptcore.naming.low_rank import adapter_merge
from ckptcore.naming.rename import strip_wrappers
from ckptcore.store.average import AverageStore, ObservedInput
from ckptcore.utils.foreign_text import InvalidText, load_json_object
from ckptcore.utils.text import count
from ckptcore.utils.units import show_size

_FORM = "@1/adapter_config.json"
_MAX_FORM = 1 << 20


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
