"""Find the adapter of a PEFT model, and give its tensors the names that they have on the hub.

A live module that `get_peft_model` wrapped holds the base weights beside the adapter's, and each adapter
under a name: ``base_model.model.<module>.lora_A.default.weight``. In ``adapter_model.safetensors`` the base
weights and the adapter's name are gone (peft/utils/save_and_load.py, `get_peft_model_state_dict`). The
rank, which shapes give, is compared with adapter_config.json. ``lora_alpha`` is in no shape, only there.
The other sizes of a pair are those of the module that it adapts: they are compared with its weight, and among
the modules of an MLP. One rank's rows of a ``lora_B`` are a pair, too.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckptcore.errors import NameMismatch, UsageError
from ckptcore.naming.rename import Mapped, with_names, without_tensors
from ckptcore.utils.patterns import UnusablePattern, full_matches

Shape = tuple[int, ...]
PREFIX = "base_model.model."
BELOW = ".adapter."  # in names of trainers: what is behind it is the adapter's own
BASE_WEIGHT = "a base weight: an adapter holds its own alone"
# Kind -> its names in a live module, and behind the module on the hub. The adapter's name may be gone.
_KINDS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "lora": (
        re.compile(r"^(?P<module>.+?)\.(?P<part>lora_[AB])(?:\.(?P<name>[^.]+))?\.(?P<end>weight|bias)$"),
        "{part}.{end}",
    ),
    "embedding": (
        re.compile(r"^(?P<module>.+?)\.(?P<part>lora_embedding_[AB])(?:\.(?P<name>[^.]+))?$"),
        "{part}",
    ),
    "dora": (
        re.compile(r"^(?P<module>.+?)\.lora_magnitude_vector(?:\.(?!weight$)(?P<name>[^.]+))?(?:\.weight)?$"),
        "lora_magnitude_vector",
    ),
    "saved": (re.compile(r"^(?P<module>.+?)\.modules_to_save\.(?P<name>[^.]+)\.(?P<end>.+)$"), "{end}"),
    "tokens": (
        re.compile(r"^(?P<module>.+?)\.token_adapter\.trainable_tokens_delta(?:\.(?P<name>[^.]+))?$"),
        "token_adapter.trainable_tokens_delta",
    ),
}
# Kind of adapter_config.json -> parts of a module; of each group one alternative is complete in a module.
# Their names on the hub are those in a live module without the adapter's (peft/tuners/*/layer.py).
_OTHER_KINDS: Mapping[str, tuple[tuple[tuple[str, ...], ...], ...]] = {
    "ADALORA": ((("lora_A", "lora_B", "lora_E"),),),
    "LOHA": ((("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),),),
    "LOKR": ((("lokr_w1",), ("lokr_w1_a", "lokr_w1_b")), (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))),
    "VERA": ((("vera_lambda_b", "vera_lambda_d"),),),
    "IA3": ((("ia3_l",),),),
    "OFT": ((("oft_R.weight",),),),
    "LN_TUNING": ((("ln_tuning_layers.weight",),),),
    "TRAINABLE_TOKENS": ((("trainable_tokens_delta",),),),
}
_OTHER = re.compile(
    r"^(?P<module>.+?)\.(?P<part>lora_[ABE]|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t[12])"
    r"|vera_lambda_[bd]|ia3_l|oft_R|ln_tuning_layers|(?<!token_adapter\.)trainable_tokens_delta)"
    r"(?:\.(?!(?:weight|bias)$)(?P<name>[^.]+))?(?:\.(?P<end>weight|bias))?$"
)
# Projections that all modules of VeRA share; a config may leave them out (``save_projection``).
_SHARED = re.compile(r"^base_model\.(?P<part>vera_[AB])(?:\.(?P<name>[^.]+))?$")
# The one tensor of prompt and prefix tuning; an encoder behind it computes what peft saves.
_PROMPT = re.compile(r"^prompt_encoder(?:\.(?P<name>[^.]+))?\.embedding\.weight$")
_PROMPTS, _PROMPT_HUB = ("PROMPT_TUNING", "PREFIX_TUNING"), "prompt_embeddings"
# What encoders of peft have below that module (peft/tuners: p_tuning, prefix_tuning, multitask_..., cpt).
# Segment Anything has a module of the same name with other tensors.
_ENCODER = re.compile(
    r"^prompt_encoder(?:\.[^.]+)?\.(?:embedding\.weight|(?:lstm_head|mlp_head|transform)\..+"
    r"|prefix_task_(?:cols|rows)|delta_embedding\.weight)$"
)
# Kinds whose tensors are not the ones that peft saves, or that nobody has asked for.
_REFUSED = re.compile(
    r"(?:^|\.)(?:boft_[RS]|c3a_kernel|fourierft_spectrum|hra_u|miss_block|randlora_lambda|road_theta"
    r"|shira_weight|vblora_logits|waveft_spectrum|xlora_\w+)\.(?P<name>[^.]+)"
)
_OTHER_LAYOUTS = ("target_parameters", "layer_replication", "use_bdlora", "use_qalora", "megatron_config")
_HEADS = ("classifier", "score")
_ALL_LINEAR = "all-linear"
_OTHER_PARTS = ("lora_", "hada_", "lokr_", "vera_", "ia3_", "oft_", "ln_tuning_", "trainable_tokens_delta")
_CORES = ("hada_t", "lokr_t")  # Tucker cores of convolutions
_PLAIN = re.compile(r"[\w.]+")
_NARROWED = ("exclude_modules", "layers_to_transform", "layers_pattern", "layer_replication")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter inside a model.

    Attributes:
        name: Name in the live module, "" if names lack it.
        hub: Name in the model -> name on the hub, for the adapter's tensors.
        modules: Module (without `PREFIX`) -> part (lora_A, ...) -> name in the model.
        saved: Modules of which the adapter has all weights (``modules_to_save``).
        base: Modules whose base weights are in the model.
        is_other_kind: Whether it is of another kind than LoRA: `_OTHER_KINDS`.
        of_trainer: Whether it has the names of a trainer, which a map takes to those of a live module.
    """

    name: str
    hub: Mapping[str, str]
    modules: Mapping[str, Mapping[str, str]]
    saved: frozenset[str]
    base: frozenset[str]
    is_other_kind: bool = False
    of_trainer: bool = False


def holds_adapter(names: Iterable[str]) -> bool:
    """Return whether a model's names include tensors of an adapter that peft can load.

    Raises:
        UsageError: They are those of an adapter whose tensors are not the ones that peft saves.
    """
    tensor_names = list(names)
    if any(
        (hit := _parsed_name(name)) is not None and hit[0] in ("lora", "embedding") for name in tensor_names
    ):
        return True
    if any(_of_other_kind(name) is not None for name in tensor_names):
        return True
    prompts = [name for name in tensor_names if name.startswith("prompt_encoder.")]
    if prompts and all(_PROMPT.match(name) for name in prompts):
        return True
    # Only with peft's own prefix: a model may have modules with such names.
    odd = next((name for name in tensor_names if _REFUSED.search(name) and name.startswith(PREFIX)), None)
    if odd is None and prompts and all(map(_ENCODER.match, prompts)):
        odd = next(name for name in prompts if not _PROMPT.match(name))
    if odd is not None:
        raise UsageError(
            f"cannot export an adapter that has {odd}: the kinds that are exported are LORA, "
            f"{', '.join((*_OTHER_KINDS, *_PROMPTS))}",
            hint="save it with peft's save_pretrained; or keep the tensors as they are: --names stored",
        )
    return False


def _of_other_kind(name: str) -> re.Match[str] | None:
    # A cheap test first: of a large model every name comes by here.
    match = _OTHER.match(name) if any(part in name for part in _OTHER_PARTS) else None
    if match is not None and match["part"].startswith("lora_") and match["end"] is not None:
        return None  # of LoRA
    return match


def _find_other(tensor_names: Sequence[str]) -> Adapter:
    """Return the adapter of another kind than LoRA."""
    hub: dict[str, str] = {}
    modules: dict[str, dict[str, str]] = {}
    adapter_names, saved = set[str](), set[str]()
    for name in tensor_names:
        if (shared := _SHARED.match(name)) is not None:
            hub[name] = f"base_model.{shared['part']}"
            adapter_names.add(shared["name"] or "")
        elif (prompt := _PROMPT.match(name)) is not None:
            hub[name] = _PROMPT_HUB
            adapter_names.add(prompt["name"] or "")
        elif (match := _of_other_kind(name)) is not None:
            part = ".".join(p for p in (match["part"], match["end"]) if p)
            module = match["module"].removeprefix(PREFIX)
            hub[name] = f"{PREFIX}{module}.{part}"
            modules.setdefault(module, {})[part] = name
            adapter_names.add(match["name"] or "")
        elif (hit := _parsed_name(name)) is not None and hit[0] == "saved":
            module = hit[1]["module"].removeprefix(PREFIX)
            hub[name] = f"{PREFIX}{module}.{hit[1]['end']}"
            saved.add(module)
            adapter_names.add(hit[1]["name"] or "")
    # One adapter at a time, since peft saves each into a folder of its own.
    _require_one(sorted(adapter_names))
    base = _base_modules(n for n in tensor_names if n not in hub)
    return Adapter(next(iter(adapter_names)), hub, modules, frozenset(saved), base, is_other_kind=True)


def _base_modules(names: Iterable[str]) -> frozenset[str]:
    """Return the modules of base weights, as an adapter names them: without ``.base_layer``."""
    modules = {n.removeprefix(PREFIX).rpartition(".")[0] for n in names}
    return frozenset(m.removesuffix(".base_layer") for m in modules if ".original_module" not in m)


def _require_one(adapter_names: Sequence[str]) -> None:
    if len(adapter_names) > 1:
        raise UsageError(
            f"cannot export one adapter of several: "
            f"{', '.join(c or '(without a name)' for c in adapter_names)}",
            hint=" ".join(f"--exclude '*.{c}.*' --exclude '*.{c}'" for c in adapter_names[1:] if c)
            + f" exports {adapter_names[0]}",
        )


def find_adapter(names: Iterable[str], form: Mapping[str, Any] | None = None) -> Adapter | None:
    """Return the LoRA adapter of a model, or None.

    Args:
        names: Names in the model, without wrappers.
        form: Content of adapter_config.json. It names biases and saved modules that names do not identify.

    Raises:
        UsageError: There are several adapters; the message lists them.
    """
    tensor_names = list(names)
    matches = [(name, *hit) for name in tensor_names if (hit := _parsed_name(name)) is not None]
    if not any(kind in ("lora", "embedding") for _, kind, _ in matches):
        is_other_kind = any(_of_other_kind(name) is not None or _PROMPT.match(name) for name in tensor_names)
        return _find_other(tensor_names) if is_other_kind else None
    adapter_names = sorted({m["name"] or "" for _, _, m in matches})
    _require_one(adapter_names)
    hub: dict[str, str] = {}
    modules: dict[str, dict[str, str]] = {}
    saved = set()
    for name, kind, match in matches:
        module = match["module"].removeprefix(PREFIX)
        parts = match.groupdict()
        end = _KINDS[kind][1].format(**{k: v for k, v in parts.items() if v is not None})
        hub[name] = f"{PREFIX}{module}.{end}"
        if kind == "saved":
            saved.add(module)
        else:
            modules.setdefault(module, {})[end] = name
    unmatched_names = [name for name in tensor_names if name not in hub]
    by_config = _named_by_config(unmatched_names, modules, form or {}, live=adapter_names != [""])
    hub |= {name: PREFIX + name.removeprefix(PREFIX) for name in by_config}
    saved |= {n.removeprefix(PREFIX).rpartition(".")[0] for n in by_config if not n.endswith(".bias")}
    base = _base_modules(n for n in unmatched_names if n not in by_config)
    return Adapter(adapter_names[0], hub, modules, frozenset(saved), base)


def adapted(mapped: Mapped, adapter: Adapter) -> Mapped:
    """Drop the base weights, and give the adapter's tensors their names on the hub.

    Raises:
        NameMismatch: Two tensors would have one name.
    """
    base = {t.fqn for t in mapped.manifest.tensors if t.fqn not in adapter.hub}
    own = without_tensors(mapped, base, BASE_WEIGHT)
    hub_names = Counter(adapter.hub[t.fqn] for t in own.manifest.tensors)
    if double := next((name for name, count in hub_names.items() if count > 1), None):
        raise NameMismatch(f"two tensors of the adapter would both be called {double}")
    # What a map made of several tensors has no stored name.
    joined = {m.name for m in mapped.made} - {new for _, new in mapped.renamed}
    renamed = with_names(own, adapter.hub)
    return replace(renamed, renamed=tuple(pair for pair in renamed.renamed if pair[0] not in joined))


def adapter_config(adapter: Adapter, shapes: Mapping[str, Shape], form: Mapping[str, Any]) -> dict[str, Any]:
    """Return adapter_config.json for an adapter, with missing fields filled in from names and shapes.

    Args:
        adapter: The adapter.
        shapes: Name in the model -> shape; of base weights those alone whose elements are not packed.
        form: The config of the training run.

    Raises:
        NameMismatch: Names or shapes contradict the config.
        UsageError: It is no LoRA config, or lacks ``lora_alpha``.
    """
    # Kinds other than LoRA have no rank that shapes could be compared by.
    if adapter.is_other_kind:
        is_prompt = _PROMPT_HUB in adapter.hub.values()
        return _prompt_config(adapter, shapes, form) if is_prompt else _other_config(adapter, form)
    if form.get("peft_type") != "LORA":
        raise UsageError(
            f"cannot use an adapter_config.json of the type {form.get('peft_type')!r}: only LORA is exported"
        )
    # Required, because no shape shows it: a wrong scale would pass every other check.
    if type(form.get("lora_alpha")) not in (int, float):
        raise UsageError(
            f"cannot export the adapter: its config must record lora_alpha (got {form.get('lora_alpha')!r})",
            hint="name the adapter_config.json of the training run: --config FILE",
        )
    # Other layouts store pairs whose shapes are not those of one module.
    ranks = _ranks(adapter, shapes) if not any(form.get(k) for k in _OTHER_LAYOUTS) else {}
    out = dict(form)
    if form.get("r") is None:
        if len(set(ranks.values())) != 1:
            raise UsageError(
                f"cannot find r of the adapter: its shapes differ (got {_few(ranks)})",
                hint="name a config that records it",
            )
        # Only where all modules agree; otherwise peft needs a rank_pattern, which shapes do not give.
        out["r"] = next(iter(ranks.values()))
    if form.get("target_modules") is None and not form.get("target_parameters"):
        out["target_modules"] = sorted(m for m, parts in adapter.modules.items() if _is_lora(parts))
    sizes = _adapted_sizes(adapter, shapes)
    problems = [*_odd_ranks(ranks, out), *_odd_parts(adapter, out), *_odd_targets(adapter, out)]
    # Without ranks the pairs have another layout, and sizes would say nothing.
    if ranks:
        problems += [*_unlike_base(sizes, _base_sizes(adapter, shapes)), *_unlike_beside(sizes)]
    if problems:
        suffix = f" and {len(problems) - 5} more" if problems[5:] else ""
        raise _unfit(f"does not fit its config: {'; '.join(problems[:5])}{suffix}")
    return out


def _other_config(adapter: Adapter, form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of another kind than LoRA, which is compared with the adapter's modules and parts."""
    kind = form.get("peft_type")
    groups = _OTHER_KINDS.get(str(kind))
    if groups is None:
        raise _unfit(f"has {_few_parts(adapter)}, and its config is of the type {kind!r}")
    # peft cuts rows by the pattern when it saves: the tensors here are not the ones that it would store.
    if kind == "ADALORA" and form.get("rank_pattern"):
        raise UsageError(
            "cannot export the AdaLoRA adapter: its config has a rank_pattern, by which peft leaves out rows",
            hint="save it with peft's save_pretrained; or keep the tensors as they are: --names stored",
        )
    problems = []
    parts_of_kind = {part.partition(".")[0] for group in groups for parts in group for part in parts}
    for module, parts in sorted(adapter.modules.items()):
        lacking = [
            group[-1]
            for group in groups
            if not any(parts.keys() >= set(alternative) for alternative in group)
        ]
        problems += [f"{module} lacks {' and '.join(lacking_parts)}" for lacking_parts in lacking]
        odd = [
            part for part in parts if part.partition(".")[0] not in parts_of_kind and part[:6] not in _CORES
        ]
        problems += [f"{module} has {part}, which is not of {kind}" for part in odd]
    shared = {new for new in adapter.hub.values() if new.startswith("base_model.vera_")}
    # peft leaves out the two shared projections only if the config says so.
    if kind == "VERA" and form.get("save_projection", True) and len(shared) != 2:
        problems.append("save_projection is set, and vera_A and vera_B are not both there")
    saved = form.get("modules_to_save") or []
    problems += [
        f"{m} is saved, and is not in modules_to_save" for m in adapter.saved if not _is_inside(m, saved)
    ]
    missing = [m for m in saved if not any(_is_inside(saved_module, [m]) for saved_module in adapter.saved)]
    # A head that peft names by default may not be in the model.
    problems += [f"modules_to_save names {m}, of which nothing is there" for m in missing if m not in _HEADS]
    if kind != "TRAINABLE_TOKENS":
        problems += _odd_targets(adapter, form)
    if problems:
        raise _unfit(f"does not fit its config: {'; '.join(problems[:5])}")
    return dict(form)


def _prompt_config(adapter: Adapter, shapes: Mapping[str, Shape], form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of prompt or prefix tuning, which is compared with the rows of its tensor."""
    rows = next(shapes[name][0] for name, new in adapter.hub.items() if new == _PROMPT_HUB)
    tokens, parts = form.get("num_virtual_tokens"), form.get("num_transformer_submodules") or 1
    copies = parts if form.get("peft_type") == "PROMPT_TUNING" else 1
    stated = tokens * copies if type(tokens) is int and type(copies) is int else None
    if form.get("peft_type") not in _PROMPTS or form.get("prefix_projection") or rows != stated:
        kind = form.get("peft_type")
        raise _unfit(f"has {rows} virtual tokens, and its config has {stated} of the type {kind!r}")
    return dict(form)


def _unfit(what: str) -> NameMismatch:
    hint = "name the adapter_config.json of this training run: --config FILE"
    return NameMismatch(f"the adapter {what}", hint=hint)


def _few_parts(adapter: Adapter) -> str:
    return ", ".join(sorted({part for parts in adapter.modules.values() for part in parts})[:4])


def sizes_without_base(adapter: Adapter, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the `_adapted_sizes` of modules whose base weights are not in the model."""
    base = _base_sizes(adapter, shapes)
    return {m: size for m, size in _adapted_sizes(adapter, shapes).items() if m not in base}


class AdapterFit(NamedTuple):
    """How a LoRA adapter fits what it adapts.

    Attributes:
        problems: What contradicts each other.
        unknown: Modules whose size nothing states.
    """

    problems: Sequence[str] = ()
    unknown: Sequence[str] = ()


def adapter_fit(
    shapes: Mapping[str, Shape], form: Mapping[str, Any], known_sizes: Mapping[str, Shape]
) -> AdapterFit:
    """Compare the pairs of a LoRA adapter with its config, the base weights beside it, and known sizes.

    Args:
        shapes: Name in the model -> shape.
        form: adapter_config.json; {} where it is not there.
        known_sizes: End of a module's name -> shape of its weight.
    """
    # Nothing is claimed of a layout that this comparison does not know.
    if any(form.get(key) for key in _OTHER_LAYOUTS) or form.get("peft_type", "LORA") != "LORA":
        return AdapterFit()
    try:
        adapter = find_adapter(tuple(shapes), form)
        ranks = _ranks(adapter, shapes) if adapter is not None and not adapter.is_other_kind else {}
    except (NameMismatch, UsageError):
        return AdapterFit()  # several adapters, or halves, which are no question of size
    if adapter is None or not ranks:
        return AdapterFit()
    sizes, base = _adapted_sizes(adapter, shapes), _base_sizes(adapter, shapes)
    by_name = {m: size for m in sizes for end, size in known_sizes.items() if f".{m}".endswith(f".{end}")}
    problems = [
        *(_odd_ranks(ranks, form) if type(form.get("r")) is int else ()),
        *_unlike_base(sizes, by_name | base),
        *_unlike_beside(sizes),
    ]
    return AdapterFit(problems, [m for m in sizes if m not in base and m not in by_name])


def _adapted_sizes(adapter: Adapter, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return module -> shape that its weight has according to its pair of lora_A and lora_B."""
    sizes: dict[str, Shape] = {}
    for module, parts in adapter.modules.items():
        if {"lora_A.weight", "lora_B.weight"} <= parts.keys():
            first, second = shapes[parts["lora_A.weight"]], shapes[parts["lora_B.weight"]]
            if len(first) == len(second) == 2:
                sizes[module] = second[0], first[1]
    return sizes


def _base_sizes(adapter: Adapter, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return module -> shape of its base weight, of the matrices in the model.

    bitsandbytes packs weights of 4 bits into a column of any dtype, with their scales below their names.
    """
    packed = {name.rpartition(".")[0] for name in shapes}
    sizes: dict[str, Shape] = {}
    for name, shape in shapes.items():
        plain = len(shape) == 2 and name not in packed and shape[1] > 1
        if plain and name not in adapter.hub and name.endswith(".weight"):
            sizes[name.removeprefix(PREFIX).removesuffix(".weight").removesuffix(".base_layer")] = shape
    return sizes


def _parsed_name(name: str) -> tuple[str, re.Match[str]] | None:
    if "lora_" not in name and ".modules_to_save." not in name and ".token_adapter." not in name:
        return None
    for kind, (pattern, _) in _KINDS.items():
        if (match := pattern.match(name)) is not None:
            return kind, match
    return None


def _named_by_config(
    names: Sequence[str], modules: Mapping[str, Any], form: Mapping[str, Any], *, live: bool
) -> list[str]:
    """Return names that only the config identifies: biases, and saved modules outside of a live module."""
    bias, saved = form.get("bias", "none"), form.get("modules_to_save")
    # Without an adapter's name and with peft's prefix on all names, it is a file
    # that peft saved: all of it is the adapter's.
    if not live and all(name.startswith(PREFIX) for name in names):
        return list(names)  # the adapter's own file
    config_names = []
    for name in names:
        module, _, end = name.removeprefix(PREFIX).rpartition(".")
        of_lora = end == "bias" and module.removesuffix(".base_layer") in modules
        is_bias = (bias == "all" and end == "bias") or (bias == "lora_only" and of_lora)
        is_saved = not live and isinstance(saved, list) and _is_inside(module, saved)
        if (is_bias and ".original_module." not in name) or is_saved:
            config_names.append(name)
    return config_names


def _ranks(adapter: Adapter, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return module -> rank; raise `NameMismatch` for half of a pair, or two halves that do not fit."""
    ranks = {}
    for module, parts in adapter.modules.items():
        for a, b in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")):
            if a not in parts and b not in parts:
                continue
            lacking = a if a not in parts else b if b not in parts else None
            if lacking is not None:
                raise NameMismatch(f"the adapter lacks {PREFIX}{module}.{lacking}", missing=[lacking])
            first, second = shapes[parts[a]], shapes[parts[b]]
            if len(first) < 2 or len(second) < 2 or first[0] != second[1]:
                raise NameMismatch(
                    f"{parts[a]} {list(first)} and {parts[b]} {list(second)} have no rank in common"
                )
            ranks[module] = first[0]
    return ranks


def _odd_ranks(ranks: Mapping[str, int], form: Mapping[str, Any]) -> Iterable[str]:
    try:
        stated_ranks = pattern_values(form.get("rank_pattern") or {}, list(ranks), form["r"])
    except UsageError as error:
        yield f"rank_pattern: {error.message}"
        return
    for (module, rank), hit in zip(ranks.items(), stated_ranks, strict=True):
        if hit != rank:
            yield f"{module} has rank {rank} (config says {hit})"


def pattern_values(pattern: Mapping[str, Any], modules: Sequence[str], default: Any) -> list[Any]:
    """Return the value of each module in ``rank_pattern`` or ``alpha_pattern``, as peft matches its keys.

    Raises:
        UsageError: A key cannot be matched.
    """
    if all(_PLAIN.fullmatch(key) for key in pattern):
        hits = [[_ends(module, [key]) for module in modules] for key in pattern]
    else:  # as peft matches them, `get_pattern_key`
        try:
            hits = [list(h) for h in full_matches([rf"(.*\.)?({key})" for key in pattern], modules)]
        except UnusablePattern as error:
            raise UsageError(f"a pattern of the adapter's config cannot be matched: {error}") from error
    return [
        next((value for value, of in zip(pattern.values(), hits, strict=True) if of[n]), default)
        for n in range(len(modules))
    ]


def _unlike_base(sizes: Mapping[str, Shape], base: Mapping[str, Shape]) -> Iterable[str]:
    """Yield the pairs that do not fit the base weight; a Conv1D has it transposed."""
    # Only modules whose base weight is there can be compared; an adapter's own file has none.
    for module, size in sizes.items():
        if module in base and base[module] not in (size, size[::-1]):
            yield f"{module} is adapted as {list(size)}, and its weight is {list(base[module])}"


def _unlike_beside(sizes: Mapping[str, Shape]) -> Iterable[str]:
    """Yield the modules of an MLP that do not fit each other: gate and up read what down writes."""
    for module, (rows, columns) in sizes.items():
        above, _, name = module.rpartition(".")
        if name == "down_proj":
            for projection in ("gate_proj", "up_proj"):
                inside = sizes.get(f"{above}.{projection}")
                if inside is not None and inside != (columns, rows):
                    yield (
                        f"{above}.{projection} is adapted as {list(inside)}, "
                        f"and down_proj as {[rows, columns]}"
                    )
        elif name == "gate_proj" and sizes.get(f"{above}.up_proj", (rows, columns)) != (rows, columns):
            up = sizes[f"{above}.up_proj"]
            yield f"{module} is adapted as {[rows, columns]}, and up_proj as {list(up)}"


def _odd_parts(adapter: Adapter, form: Mapping[str, Any]) -> Iterable[str]:
    lora = [parts for parts in adapter.modules.values() if _is_lora(parts)]
    stored_by_key = {
        "use_dora": any("lora_magnitude_vector" in parts for parts in lora),
        "lora_bias": any("lora_B.bias" in parts for parts in lora),
        "trainable_token_indices": any(
            "token_adapter.trainable_tokens_delta" in p for p in adapter.modules.values()
        ),
    }
    for key, is_stored in stored_by_key.items():
        if bool(form.get(key)) != is_stored:
            yield f"{key} is {form.get(key)!r}, and its tensors are {'there' if is_stored else 'not there'}"
    saved = form.get("modules_to_save") or []
    odd = [m for m in sorted(adapter.saved) if not _is_inside(m, saved) and m not in adapter.modules]
    yield from (f"{m} is saved, and is not in modules_to_save" for m in odd if not m.endswith(".base_layer"))
    # peft adds both names of a classifier's head, whichever the model has (peft/peft_model.py).
    heads = _HEADS if form.get("task_type") in ("SEQ_CLS", "TOKEN_CLS") else ()
    has_head = any(_is_inside(m, heads) for m in adapter.saved)
    for name in dict.fromkeys(saved):
        if not (name in heads and has_head) and not any(_is_inside(m, [name]) for m in adapter.saved):
            yield f"modules_to_save names {name}, of which nothing is there"


def _odd_targets(adapter: Adapter, form: Mapping[str, Any]) -> Iterable[str]:
    """Yield the modules that are targets without an adapter, or have an adapter and are no targets."""
    targets = form.get("target_modules")
    lora = {m for m, parts in adapter.modules.items() if _adapts(parts)}
    if form.get("target_parameters"):
        return
    # Each of these takes modules away from the targets by rules of
    # the model's layers, which names do not show.
    if any(form.get(k) for k in _NARROWED):
        return
    bare = sorted(adapter.base - set(adapter.modules))
    if isinstance(targets, list):
        meant = {m for m in (*lora, *bare) if _ends(m, targets)}
    elif isinstance(targets, str) and targets != _ALL_LINEAR:
        modules = [*lora, *bare]
        try:
            (hits,) = full_matches([targets], modules)
        except UnusablePattern as error:
            yield f"target_modules cannot be matched: {error}"
            return
        meant = {m for m, hit in zip(modules, hits, strict=True) if hit}
    else:
        return  # which modules are linear only the model knows
    yield from (f"{m} has an adapter, but is not a target" for m in sorted(lora - meant))
    yield from (f"{m} is a target, and has no adapter" for m in bare if m in meant)


def _is_lora(parts: Mapping[str, str]) -> bool:
    return any(part.startswith("lora_") for part in parts)


def _adapts(parts: Mapping[str, str]) -> bool:
    return any(part.startswith(_OTHER_PARTS) for part in parts)


def _ends(module: str, names: Sequence[Any]) -> bool:
    """Return whether a module is one of these names, or ends with one, as peft compares them."""
    return any(isinstance(n, str) and (module == n or module.endswith(f".{n}")) for n in names)


def _is_inside(module: str, names: Sequence[Any]) -> bool:
    """Return whether a module is in one of these modules; peft compares the ends of names as texts.

    >>> _is_inside("model.layers.0.input_layernorm", ["norm"]), _is_inside("model.norms.0", ["norm"])
    (True, False)
    """
    parts = module.split(".")
    around = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(isinstance(n, str) and path.endswith(n) for n in names for path in around)


def _few(ranks: Mapping[str, int]) -> str:
    return ", ".join(f"{m}: {r}" for m, r in list(ranks.items())[:4]) or "no pair of lora_A and lora_B"


def dumped(form: Mapping[str, Any]) -> bytes:
    """Return the bytes of an adapter_config.json, as peft writes it."""
    return (json.dumps(form, indent=2, sort_keys=True) + "\n").encode()
