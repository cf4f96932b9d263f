"""What merging a LoRA adapter adds to the weights of its base, by names, shapes and adapter_config.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.errors import NameMismatch, UsageError
from ckptcore.naming.peft import PREFIX, Adapter, adapter_config, find_adapter, pattern_values
from ckptcore.utils.text import some

Shape = tuple[int, ...]
_PAIRS = (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B"))
# What peft adds in another way than a product of two matrices, or to other tensors than a module's weight.
_OTHERS = (
    "use_dora",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
    "megatron_config",
    "alora_invocation_tokens",
    "arrow_config",
)
_EXPORT = "merge it with peft's merge_and_unload"


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """What is added to one weight: the product of B and A, scaled.

    Attributes:
        first: Name of A.
        second: Name of B.
        rank: Rows of A.
        scale: Factor of the product.
        transposed: Whether the weight is [in, out].
    """

    first: str
    second: str
    rank: int
    scale: float
    transposed: bool


@dataclass(frozen=True, slots=True)
class AdapterMerge:
    """What an adapter makes of its base.

    Attributes:
        updates: Name of the base's weight -> what is added to it.
        replaced: Name of a base's tensor of which the adapter has all elements -> the adapter's name of it.
    """

    updates: Mapping[str, LowRankUpdate]
    replaced: Mapping[str, str]


def adapter_merge(
    adapter_shapes: Mapping[str, Shape], form: Mapping[str, Any], base_shapes: Mapping[str, Shape]
) -> AdapterMerge:
    """Return what an adapter makes of its base.

    Args:
        adapter_shapes: Name of the adapter's tensor -> shape.
        form: Its adapter_config.json.
        base_shapes: Name in the base's model -> shape.

    Raises:
        NameMismatch: Names or shapes contradict the config, or do not fit the base.
        UsageError: There is no adapter, there are several, or it is of a kind that is not merged here.
    """
    adapter = find_adapter(tuple(adapter_shapes), form)
    if adapter is None:
        raise UsageError("cannot merge the adapter: no tensor of it is called like one of peft's adapters")
    odd = next((key for key in _OTHERS if form.get(key)), None)
    if adapter.is_other_kind or form.get("peft_type") != "LORA" or odd is not None:
        kind = odd if odd is not None and form.get("peft_type") == "LORA" else form.get("peft_type")
        raise UsageError(f"cannot merge the adapter: only plain LoRA is merged (got {kind})", hint=_EXPORT)
    form = adapter_config(adapter, adapter_shapes, form)
    names = _base_names(adapter, base_shapes)
    scales = _scales(adapter, adapter_shapes, form)
    updates = {}
    for module, parts in adapter.modules.items():
        pair = next((pair for pair in _PAIRS if pair[0] in parts), None)
        if pair is None or parts.keys() != set(pair):
            raise UsageError(f"cannot merge the adapter: {module} has {some(sorted(parts))}", hint=_EXPORT)
        first, second = (parts[part] for part in pair)
        rank, scale = scales[module]
        updates[names[module + ".weight"]] = LowRankUpdate(first, second, rank, scale, pair == _PAIRS[1])
    replaced = {names[inner]: stored for inner, stored in _complete_tensors(adapter).items()}
    updates = _oriented(updates, adapter_shapes, base_shapes, bool(form.get("fan_in_fan_out")))
    for name, stored in replaced.items():
        if adapter_shapes[stored] != base_shapes[name]:
            raise NameMismatch(
                f"cannot merge the adapter: {stored} is {list(adapter_shapes[stored])}, and {name} of the "
                f"base is {list(base_shapes[name])}"
            )
    return AdapterMerge(updates, replaced)


def _complete_tensors(adapter: Adapter) -> dict[str, str]:
    """Return name in the base -> the adapter's name, of tensors of which the adapter has all elements."""
    pairs = {name for parts in adapter.modules.values() for name in parts.values()}
    return {
        hub.removeprefix(PREFIX).replace(".base_layer.", "."): stored
        for stored, hub in adapter.hub.items()
        if stored not in pairs
    }


def _base_names(adapter: Adapter, base_shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Return name in the model that was adapted -> name in the base, which may lack a prefix or have one.

    Raises:
        NameMismatch: The base lacks some of them, whatever its prefix.
    """
    weight_names = [*(f"{module}.weight" for module in adapter.modules), *_complete_tensors(adapter)]
    shortest = min(weight_names, key=len)
    longer = {name.removesuffix(shortest) for name in base_shapes if f".{name}".endswith(f".{shortest}")}
    shorter = {shortest.removesuffix(name) for name in base_shapes if f".{shortest}".endswith(f".{name}")} - {
        ""
    }
    fits = []
    for added, removed in [
        *((prefix, "") for prefix in sorted(longer)),
        *(("", cut) for cut in sorted(shorter)),
    ]:
        names = {
            name: added + name.removeprefix(removed) for name in weight_names if name.startswith(removed)
        }
        if len(names) == len(weight_names) and base_shapes.keys() >= set(names.values()):
            fits.append(names)
    if len(fits) == 1:
        return fits[0]
    missing = [name for name in weight_names if name not in base_shapes]
    why = "the base lacks" if not fits else "several parts of the base have"
    raise NameMismatch(
        f"cannot merge the adapter: {why} {some(missing or weight_names)}",
        hint="name the base that it was trained on; where a trainer has other names, export the base first",
        missing=missing,
    )


def _scales(
    adapter: Adapter, shapes: Mapping[str, Shape], form: Mapping[str, Any]
) -> dict[str, tuple[int, float]]:
    """Return module -> its rank, and the factor of its product, as `update_layer` of peft's LoRA has it."""
    modules = list(adapter.modules)
    alphas = pattern_values(form.get("alpha_pattern") or {}, modules, form["lora_alpha"])
    scales = {}
    for module, alpha in zip(modules, alphas, strict=True):
        parts = adapter.modules[module]
        first = next((parts[pair[0]] for pair in _PAIRS if pair[0] in parts), None)
        if first is None:
            continue
        rank = shapes[first][0]
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise UsageError(
                f"cannot merge the adapter: lora_alpha of {module} must be a number (got {alpha!r})"
            )
        scales[module] = rank, alpha / (math.sqrt(rank) if form.get("use_rslora") else rank)
    return scales


def _oriented(
    updates: Mapping[str, LowRankUpdate],
    adapter_shapes: Mapping[str, Shape],
    base_shapes: Mapping[str, Shape],
    fan_in_fan_out: bool,
) -> dict[str, LowRankUpdate]:
    """Return the updates, transposed where the weight is [in, out].

    Raises:
        NameMismatch: An update has another size than its weight.
        UsageError: Neither shapes nor the config say how a square weight is stored.
    """
    sizes = {
        name: (adapter_shapes[update.second][0], adapter_shapes[update.first][-1])
        for name, update in updates.items()
    }
    oriented, square = {}, []
    orientations: Collection[bool] = set()
    for name, update in updates.items():
        size, shape = sizes[name], base_shapes[name]
        pair = adapter_shapes[update.first], adapter_shapes[update.second]
        if shape not in (size, size[::-1]) or any(len(one) != 2 for one in pair):
            raise NameMismatch(
                f"cannot merge the adapter: its update of {name} is {list(size)}, and the base's weight is "
                f"{list(shape)}",
                hint="name the base that it was trained on",
            )
        if update.transposed:  # an embedding
            if shape != size[::-1]:
                raise NameMismatch(f"cannot merge the adapter: {name} of the base is {list(shape)}")
            oriented[name] = update
        elif size[0] == size[1]:
            square.append(name)
        else:
            orientations = {*orientations, shape != size}
            oriented[name] = replace(update, transposed=shape != size)
    if square and orientations not in (set(), {fan_in_fan_out}):
        raise UsageError(
            f"cannot merge the adapter: how {square[0]} is stored is unknown, because fan_in_fan_out is "
            f"{fan_in_fan_out}, and other weights are stored otherwise",
            hint=_EXPORT,
        )
    return oriented | {name: replace(updates[name], transposed=fan_in_fan_out) for name in square}
