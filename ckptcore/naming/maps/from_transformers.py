"""Make the steps between live modules and files from the installed transformers.

transformers says how it renames, stacks, splits and permutes tensors between a file and a module: a list of
transforms for a model type or a class (`transformers.conversion_mapping`). They are read here as data:
patterns as its own constructors compiled them, in both directions, and operations by their class. No
operation is run, and one that is not known becomes a step that is refused by its class.

```
python -m ckptcore.naming.maps.from_transformers FOLDER   # writes steps, families and configs (.toml)
```
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptcore.naming import transformers_private
from ckptcore.naming.maps.declaration import RuleForm, built_in_maps, compiled
from ckptcore.naming.maps.hub_config import FROZEN, NULL, TEXT, hub_fields
from ckptcore.naming.maps.live_families import LiveFamilyForm, PartForm
from ckptcore.naming.maps.live_steps import ITEM, StepForm, Substitution

RENAMINGS = ("WeightRenaming", "GroupWeightRename", "Inkling2IndexOffsetWeightRename", "PrefixChange")
_LOADING = "transformers.core_model_loading"  # the module of its transforms and operations
_LOADING_ONLY = ("PrefixChange",)  # a module that was never loaded is saved without it
_SOME = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
_FEW = 4
_ANY = "\0"  # any number, in names: `re.escape` leaves it
_ROPE = ("rope_parameters", "rope_scaling")
_HEADS = "num_attention_heads"
_SPLIT = "the parts are as long as the module's parameters, which files do not say"
_EITHER = "files may hold it either way round; it is saved as the module has it"


class _Unknown(Exception):
    """An operation that is none of those known."""


@dataclass
class _Tensors:
    """The tensors of a join, while its operations are followed from files to the module.

    Attributes:
        hub, live: Dims of each, as expressions of layouts.
        axes: Sizes. numbers: Where a config has a number.
        lists: Whether files hold numbered parts. one_way: Why there is no way back.
    """

    hub: list[list[str]]
    live: list[list[str]]
    axes: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    lists: bool = False
    one_way: str = ""

    def part(self, n: int) -> str:
        """Return the label of a part, of one element."""
        self.axes[f"p{n}"] = 1
        return f"p{n}"

    def put(self, old: str, new: str) -> None:
        """Replaces an axis everywhere."""
        for dims in (*self.hub, *self.live):
            dims[:] = [_with(d, old, new) for d in dims]


def steps_of(transforms: Iterable[Any]) -> tuple[StepForm, ...]:
    """Return the steps of a list of transformers' transforms."""
    return tuple(_step_form(t) for t in transforms)


def entries() -> dict[str, tuple[StepForm, ...]]:
    """Return the steps of every model type and class that the installed transformers lists."""
    listed = transformers_private.transforms_by_name()
    return {name: steps_of(transforms) for name, transforms in sorted(listed.items()) if name != "legacy"}


def entries_of(names: Iterable[str]) -> dict[str, tuple[StepForm, ...]]:
    """Return the steps of some entries."""
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    return {name: steps_of(mapping.get_checkpoint_conversion_mapping(name)) for name in names}


def family_of(model: Any, model_type: str, names: Sequence[str]) -> LiveFamilyForm:
    """Return the entries of a model and its submodules, in transformers' order.

    As `get_model_conversion_mapping` finds them; entries are named, not copied.

    Args:
        model: On the meta device.
        model_type: Of its config.
        names: Of classes that have the same parts.
    """
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    paths_by_entry: dict[str, list[str]] = {}
    parts: list[PartForm] = []
    for path, module in model.named_modules():
        if not isinstance(module, modeling.PreTrainedModel) or module.is_custom_code():
            continue
        name, kind = type(module).__name__, module.config.model_type
        if _is_below(path, paths_by_entry.get(name, ())):
            continue
        by_class = mapping.get_checkpoint_conversion_mapping(name) is not None
        if not by_class and (not kind or _is_below(path, paths_by_entry.get(kind, ()))):
            continue
        entry = name if by_class else kind
        if mapping.get_checkpoint_conversion_mapping(entry) is None:
            continue
        scope = path.removeprefix(model.base_model_prefix).removeprefix(".") if path else None
        parts.append(PartForm(entry=entry, scope=scope))
        paths_by_entry.setdefault(name, []).append(path)
        if not by_class:
            paths_by_entry.setdefault(kind, []).append(path)
    return LiveFamilyForm(
        arch=model_type,
        architectures=tuple(names),
        base=model.base_model_prefix or "",
        parts=tuple(parts),
        within=dict(sorted(_types_within(model.config.to_dict()))),
        float32=_float32(model),
        float32_in_half=_patterns(transformers_private.kept_in_float32(model, strictly=False)),
    )


def _patterns(listed: Iterable[str]) -> tuple[str, ...]:
    """Return what transformers searches in names of parameters for the modules that a class lists."""
    return tuple(p.replace("*", ".*") for p in listed)


def _float32(model: Any) -> tuple[str, ...]:
    """Return patterns of the parameters and buffers that a model of 16 bits has in float32.

    They are those of modules that its class lists, and those that a model of bfloat16 has in float32
    nevertheless: of these, the end of names, of at least two parts, that no other parameter has.
    """
    torch: Any = importlib.import_module("torch")
    listed = _patterns(transformers_private.kept_in_float32(model, strictly=True))
    dtypes = {n: t.dtype for n, t in model.state_dict().items() if hasattr(t, "dtype")}
    bfloat16_names = [_numbered(name) for name, dtype in dtypes.items() if dtype == torch.bfloat16]
    patterns: dict[str, None] = {}
    for name, dtype in dtypes.items():
        is_listed = any(re.search(pattern, name) for pattern in listed)
        if is_listed or not dtype.is_floating_point or dtype == torch.bfloat16:
            continue
        parts = _numbered(name).split(".")
        ends = ["." + ".".join(parts[-n:]) for n in range(2, len(parts))]
        end = next(
            (e for e in ends if not any(bfloat16_name.endswith(e) for bfloat16_name in bfloat16_names)), ""
        )
        pattern = re.escape(end) if end else "^" + re.escape(".".join(parts))
        patterns[pattern.replace(_ANY, r"\d+") + "$"] = None
    return (*listed, *sorted(patterns))


def _numbered(name: str) -> str:
    """Return a name with a sign for each number that is a part of it."""
    return ".".join(_ANY if part.isdecimal() else part for part in name.split("."))


def built(model_type: str, name: str) -> Any:
    """Build a model of a class from its default config, in bfloat16 on the meta device, with few layers."""
    library: Any = importlib.import_module("transformers")
    torch: Any = importlib.import_module("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = _small(library, library.CONFIG_MAPPING[model_type]())
        with torch.device("meta"):
            return transformers_private.new_model(getattr(library, name), config)


def classes() -> dict[str, list[str]]:
    """Return the classes of each model type in transformers' tables for `AutoModel...`."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    out: dict[str, dict[str, None]] = {}
    for table in sorted(n for n in vars(auto) if n.startswith("MODEL_") and n.endswith("_MAPPING_NAMES")):
        for kind, names in getattr(auto, table).items():
            for name in [names] if isinstance(names, str) else names:
                out.setdefault(kind, {})[name] = None
    return {kind: sorted(names) for kind, names in sorted(out.items())}


def families(kinds: Iterable[str] | None = None) -> list[LiveFamilyForm]:
    """Return the families of model types; classes with equal parts are one family.

    Those that cannot be built of their default config are left out.

    Args:
        kinds: Model types; all by default.
    """
    library: Any = importlib.import_module("transformers")
    named = classes()
    alike: dict[str, tuple[LiveFamilyForm, set[str]]] = {}
    for kind in sorted(library.CONFIG_MAPPING.keys()) if kinds is None else kinds:
        for name in named.get(kind, []):
            try:
                model = built(kind, name)
            except Exception:  # a default config need not be one that a class takes
                continue
            family = family_of(model, model.config.model_type or kind, ())
            alike.setdefault(family.model_dump_json(), (family, set()))[1].add(name)
    merged_families = (
        f.model_copy(update={"architectures": tuple(sorted(names))}) for f, names in alike.values()
    )
    return sorted(merged_families, key=lambda f: (f.arch, f.architectures))


def _step_form(transform: Any) -> StepForm:
    """Return one transform in both directions."""
    kind = type(transform).__name__ if type(transform).__module__ == _LOADING else ""
    to_live, to_hub = _substitution(transform), _substitution(transform.reverse_transform())
    made_of = tuple(type(op).__name__ for op in getattr(transform, "operations", ()))
    if kind in RENAMINGS:
        saved = None if kind in _LOADING_ONLY else to_hub
        return StepForm(to_live=to_live, to_hub=saved, made_of=(kind,))
    if kind != "WeightConverter":
        name = type(transform).__name__
        return StepForm(to_live=to_live, to_hub=to_hub, refused=_refusal_of(name), made_of=(name,))
    try:
        rule, numbers = _rule_of_operations(transform.operations, to_hub.put, to_live.put)
    except _Unknown as error:
        return StepForm(to_live=to_live, to_hub=to_hub, refused=_refusal_of(str(error)), made_of=made_of)
    return StepForm(to_live=to_live, to_hub=to_hub, rule=rule, numbers=numbers, made_of=made_of)


def _refusal_of(kind: str) -> str:
    return f"transformers' {kind} is arbitrary Python, which no rule can express"


def _substitution(transform: Any) -> Substitution:
    return Substitution(
        find=transform.compiled_sources.pattern,
        put=tuple(transform.target_patterns),
        shift=getattr(transform, "offset", 0),
        guarded=type(transform).__name__ == "GroupWeightRename",
    )


def _rule_of_operations(
    operations: Sequence[Any], hub: Sequence[str], live: Sequence[str]
) -> tuple[RuleForm, dict[str, str]]:
    """Return the rule of operations, for parts of names.

    Raises:
        _Unknown: Naming the class of an operation that is not known, or not in this place.
    """
    if any("\\" in name for name in (*hub, *live)):
        raise _Unknown("WeightConverter with a group")
    rank = 1 + max((_deepest(op) for op in operations), default=0)
    rank -= any(type(op).__name__ == "MergeModulelist" for op in operations)
    dims = [*(f"d{n}" for n in range(rank)), "..."]
    tensors = _Tensors([list(dims) for _ in hub], [list(dims) for _ in hub])
    for op in operations:
        follow = _OPERATIONS.get(type(op).__name__)
        if follow is None or type(op).__module__ != _LOADING:
            raise _Unknown(type(op).__name__)
        follow(tensors, op, hub, live)
    if len(tensors.live) != len(live) or tensors.lists != any("*" in h for h in hub):
        raise _Unknown(" and ".join(type(op).__name__ for op in operations))
    form = {
        "name": "join",
        "from": tuple(_term(n, d) for n, d in zip(live, tensors.live, strict=True)),
        "to": tuple(_term(n.replace("*", ITEM), d) for n, d in zip(hub, tensors.hub, strict=True)),
        "axes": dict(sorted(tensors.axes.items())),
        "presence": "some",
        "one_way": tensors.one_way,
    }
    try:
        rule = RuleForm.model_validate(form)
        compiled(rule)
    except ValueError as error:  # both sides would not be the same elements
        raise _Unknown(" and ".join(type(op).__name__ for op in operations)) from error
    return rule, tensors.numbers


def _deepest(op: Any) -> int:
    """Return the last dim that an operation names."""
    return max((getattr(op, name, 0) for name in ("dim", "dim0", "dim1")), default=0)


def _stack(t: _Tensors, op: Any, hub: Sequence[str], live: Sequence[str]) -> None:
    """Apply `MergeModulelist`: a list becomes one tensor, with a dim for its numbers."""
    for dims in t.live:
        dims.insert(op.dim, "item")
    t.lists = True


def _join(t: _Tensors, op: Any, hub: Sequence[str], live: Sequence[str]) -> None:
    """Apply `Concatenate`: parts of one length, as saving cuts them, or a list of them."""
    if len(live) != 1:
        raise _Unknown("Concatenate")
    if op.num_shards_attribute is not None:
        if len(hub) != 1:
            raise _Unknown("Concatenate")
        t.live[0][op.dim] = f"(item {t.live[0][op.dim]})"
        t.lists = True
        return
    parts = [t.part(n) for n in range(len(hub))]
    if any(dims != t.live[0] for dims in t.live):
        raise _Unknown("Concatenate")
    joined = list(t.live[0])
    joined[op.dim] = f"(({' + '.join(parts)}) {joined[op.dim]})"
    for part, dims in zip(parts, t.hub, strict=True):
        dims[0] = f"({part} {dims[0]})"
    t.live = [joined]


def _chunk(t: _Tensors, op: Any, hub: Sequence[str], live: Sequence[str]) -> None:
    """Apply `Chunk`: parts of one length."""
    if len(t.live) != 1 or op.num_shards_attribute is not None:
        raise _Unknown("Chunk")
    parts = [t.part(n) for n in range(len(live))]
    dims, halves = t.live[0], f"({' + '.join(parts)})"
    if "two" in t.axes:  # they are what was beside each other
        if len(parts) != 2 or not dims[op.dim].startswith("(two "):
            raise _Unknown("Chunk")
        del t.axes["two"]
        t.live = [[_with(d, "two", part) for d in dims] for part in parts]
        t.hub = [[_with(d, "two", halves) for d in t.hub[0]]]
        return
    axis = dims[op.dim]
    t.live = [[_with(d, axis, f"({part} {axis})") for d in dims] for part in parts]
    t.hub = [[_with(d, axis, f"({halves} {axis})") for d in t.hub[0]]]


def _split(t: _Tensors, op: Any, hub: Sequence[str], live: Sequence[str]) -> None:
    """Apply `Split`: parts with the lengths of the module's parameters."""
    if len(t.live) != 1:
        raise _Unknown("Split")
    parts = [f"part{n}" for n in range(len(live))]
    axis = t.live[0][op.dim]
    t.hub = [[_with(d, axis, f"({' + '.join(parts)})") for d in t.hub[0]]]
    t.live = [[_with(d, axis, part) for d in t.live[0]] for part in parts]
    t.one_way = _SPLIT


def _interleave(t: _Tensors, op: Any, hub: Sequence[str], live: Sequence[str]) -> None:
    """Apply `Interleave`: neighbours in files are blocks in the module."""
    if len(t.live) != 1:
        raise _Unknown("Interleave")
    axis = t.live[0][op.dim]
    pair = (f"(two {axis})", f"({axis} two)")
    t.axes["two"] = 2
    t.hub[0] = [pair[not op.inverse] if d == axis else d for d in t.hub[0]]
    t.live[0][op.dim] = pair[op.inverse]


def _transpose(t: _Tensors, op: Any, hub: Sequence[str], live: Sequence[str]) -> None:
    """Apply `Transpose`; with ``check_dims`` only for files in the other order."""
    if len(t.live) != 1:
        raise _Unknown("Transpose")
    if op.check_dims:
        if tuple(hub) != tuple(live):  # saving looks for a parameter by the hub's name
            raise _Unknown("Transpose")
        t.one_way = _EITHER
        return
    dims = t.live[0]
    dims[op.dim0], dims[op.dim1] = dims[op.dim1], dims[op.dim0]


def _rope(t: _Tensors, op: Any, hub: Sequence[str], live: Sequence[str]) -> None:
    """Apply `PermuteForRope`: the module has halves of heads, files have pairs."""
    if len(t.live) != len(live) or op.inverse:
        raise _Unknown("PermuteForRope")
    where = f"{op.subconfig_key}.{_HEADS}" if op.subconfig_key else _HEADS
    heads = where.replace(".", "_")  # another number than that of another config
    t.numbers[heads] = where
    t.axes["two"] = 2
    t.put("d0", f"({heads} pairs two)")
    for name, dims in zip(live, t.live, strict=True):
        if op.permute_layer_names is None or any(x in name for x in op.permute_layer_names):
            dims[:] = [d.replace("pairs two", "two pairs") for d in dims]


_OPERATIONS: Mapping[str, Callable[[_Tensors, Any, Sequence[str], Sequence[str]], None]] = {
    "MergeModulelist": _stack,
    "Concatenate": _join,
    "Chunk": _chunk,
    "Split": _split,
    "Interleave": _interleave,
    "Transpose": _transpose,
    "PermuteForRope": _rope,
}


def _with(dim: str, axis: str, new: str) -> str:
    """Return a dim with one axis replaced."""
    tokens = dim.replace("(", "( ").replace(")", " )").split()
    if dim == axis:
        return new
    return " ".join(new if w == axis else w for w in tokens).replace("( ", "(").replace(" )", ")")


def _term(name: str, dims: Sequence[str]) -> str:
    return f"{name} : {' '.join(dims)}"


def _is_below(path: str, places: Sequence[str]) -> bool:
    return any(p == "" or path.startswith(p + ".") for p in places)


def _types_within(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield (place, model type) of every config inside another."""
    for key, value in config.items():
        if isinstance(value, Mapping) and isinstance(value.get("model_type"), str):
            yield f"{before}{key}", value["model_type"]
            yield from _types_within(value, f"{before}{key}.")


def _small(library: Any, config: Any) -> Any:
    """Return a config with four layers: only submodules count, and experts may begin in the fourth."""
    for name in _SOME:
        if isinstance(vars(config).get(name), int) and vars(config)[name] > _FEW:
            setattr(config, name, _FEW)
    for value in vars(config).values():
        if isinstance(value, library.PreTrainedConfig):
            _small(library, value)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(vars(config).get(name), list):
            setattr(config, name, vars(config)[name][: getattr(config, "num_hidden_layers", _FEW)])
    return config


def steps_toml(steps_by_entry: Mapping[str, Sequence[StepForm]], version: str) -> str:
    """Return the text of ``steps.toml``: steps of every entry; equal ones are written once."""
    first: dict[str, str] = {}
    same: list[str] = []
    out = [_HEAD, f"version = {_toml_string(version)}\n\n[entries]\n"]
    for name, steps in steps_by_entry.items():
        content = "".join(
            f"  {_toml_value(s.model_dump(mode='json', by_alias=True, exclude_defaults=True))},\n"
            for s in steps
        )
        of = first.setdefault(content, name)
        if of == name:
            out.append(f"{_key(name)} = [\n{content}]\n\n")
        else:
            same.append(f"{_key(name)} = {_toml_string(of)}\n")
    return "".join([*out, "[same] # entry = the one that has the same steps\n", *same])


def families_toml(forms: Iterable[LiveFamilyForm], version: str) -> str:
    """Return the text of ``families.toml``."""
    lines = [f"  {_toml_value(f.model_dump(mode='json', exclude_defaults=True))},\n" for f in forms]
    return "".join([_HEAD, f"version = {_toml_string(version)}\n\nfamily = [\n", *lines, "]\n"])


_HEAD = "# Made by `python -m ckptcore.naming.maps.from_transformers`. Do not edit.\n"


def configs_toml(version: str) -> str:
    """Return the fields of the config classes of mapped families, with the defaults of those classes."""
    library: Any = importlib.import_module("transformers")
    kinds = sorted(
        {kind for m in built_in_maps() for kind in m.model_types if kind in library.CONFIG_MAPPING}
    )
    lines = [_HEAD, f"version = {json.dumps(version)}", ""]
    for kind in kinds:
        lines.append(f"[class.{_key(kind)}]")
        lines += [
            f"{_key(name)} = {_toml_value(value)}" for name, value in sorted(_defaults(library, kind).items())
        ]
        lines.append("")
    return "\n".join(lines)


def _defaults(library: Any, kind: str) -> dict[str, Any]:
    """Return field -> default of a config class; "null" for none, or one that other fields give.

    Fields of its language model, which a config has in a config of its own or, of earlier releases, among the
    others, are those of the class.
    """
    cls = library.CONFIG_MAPPING[kind]
    nested = cls.sub_configs.get(TEXT)
    language_model = (
        _defaults(library, nested.model_type) if nested in library.CONFIG_MAPPING.values() else {}
    )
    config = cls()
    saved = {k: v for k, v in config.to_dict().items() if k not in ("architectures", "transformers_version")}
    fields = hub_fields({k: v for k, v in saved.items() if k in _ROPE or not isinstance(v, (list, dict))})
    functional_defaults = {
        f: s.value for f, s in fields.functional.items() if isinstance(s.value, (bool, int, float, str))
    }
    declared = {f: getattr(cls, f, None) for f in saved if "." not in f}
    derived = [f for f in functional_defaults if f in declared and declared[f] is None]
    has = [name for name in (*saved, *cls.attribute_map) if fields.may_count(name) and name not in _ROPE]
    # They count with other values of the field that `hub_config.toml` names beside them.
    uncounted = {n: declared.get(n) for n in has if not fields.counts(n)}
    unused = {n: v for n, v in uncounted.items() if isinstance(v, (bool, int, float, str))}
    own = dict.fromkeys(has, NULL) | unused | functional_defaults | dict.fromkeys(derived, NULL)
    return language_model | own


def _toml_value(value: Any) -> str:
    """Return a value as TOML, on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else _toml_string(value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _toml_string(key)


def _toml_string(text: str) -> str:
    """Return a string as TOML; literal if possible, for readable regexes."""
    if "\\" in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return json.dumps(text)


def main(folder: str) -> None:
    """Writes the files into a folder."""
    library: Any = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    steps = steps_toml(entries(), library.__version__)
    (Path(folder) / "steps.toml").write_text(steps, encoding="utf-8")
    (Path(folder) / "families.toml").write_text(
        families_toml(families(), library.__version__), encoding="utf-8"
    )
    (Path(folder) / FROZEN).write_text(configs_toml(library.__version__), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {__spec__.name} FOLDER")
    main(sys.argv[1])
