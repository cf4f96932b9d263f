"""Map live transformers modules to files on the hub: frozen families, and the map for a checkpoint's names.

``transformers/steps.toml`` has the steps of every model type and class that transformers lists
(`from_transformers` wrote it, with the version). ``transformers/families.toml`` has the steps of each model
and of its submodules. The steps of a family run over the names of one checkpoint, whatever the options of its
config. The result becomes the rules of an `ArchMap`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

import numpy as np
from blake3 import blake3
from pydantic import Field

from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import UsageError
from ckptcore.naming.maps.declaration import ArchMap, Form, Rule, RuleForm, built_in_maps, compiled
from ckptcore.naming.maps.hub_config import toml_file
from ckptcore.naming.maps.hyperparameters import value_at
from ckptcore.naming.maps.live_steps import (
    ITEM,
    Route,
    Step,
    StepForm,
    live_names,
    saved_names,
    wanted_numbers,
)
from ckptcore.naming.maps.tensor_name import NUMBER, SLOT
from ckptcore.naming.worlds import HUB, LIVE
from ckptcore.utils.distinct_values import unique

Columns = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_FOLDER = "transformers"
_MEANS = re.compile(r"[{}<>\0]| : |^\s|\s$|^$")  # the syntax of names and terms of rules


class PartForm(Form):
    """Steps of a model: an entry of transformers' list; within a submodule, or of the whole (None)."""

    entry: str
    scope: str | None = None


class LiveFamilyForm(Form):
    """Classes of models that have the same steps.

    Attributes:
        arch: Model type. architectures: Classes.
        base: What the base model is called in them.
        parts: In the order of loading.
        within: Place of a config inside the config -> its model type, where submodules depend on it.
        float32: Patterns in names of parameters that stay in float32 in models of 16 bits.
        float32_in_half: The same in models of float16 alone.
    """

    arch: str
    architectures: tuple[str, ...] = ()
    base: str = ""
    parts: tuple[PartForm, ...] = ()
    within: dict[str, str] = Field(default_factory=dict)
    float32: tuple[str, ...] = ()
    float32_in_half: tuple[str, ...] = ()


Shapes = Mapping[str, Sequence[int]]
# In a layout: parts of one length that are one after the other.
_EQUAL_PARTS = re.compile(r"\(\((p\d+(?: \+ p\d+)+)\) (\w+)\)")


@dataclass(frozen=True)
class LiveFamily:
    """A family with its steps.

    Attributes:
        form: What is known of it.
        steps: In the order of loading.
        version: Of the transformers that they come from.
    """

    form: LiveFamilyForm
    steps: tuple[Step, ...]
    version: str

    @property
    def digest(self) -> str:
        """Of its steps and the version they come from, hex."""
        steps = [(s.scope, s.form.model_dump(mode="json")) for s in self.steps]
        return blake3(canonical_json([self.version, self.form.model_dump(mode="json"), steps])).hexdigest()

    @classmethod
    def of(cls, form: LiveFamilyForm, entry: Callable[[str], Sequence[StepForm]], version: str) -> LiveFamily:
        """Return the family with the steps of its entries."""
        steps = [Step(s, p.scope, form.base) for p in form.parts for s in entry(p.entry)]
        return cls(form, tuple(steps), version)


def frozen_version() -> str:
    """Return the version of transformers of the frozen steps."""
    return str(toml_file(_FOLDER, "steps.toml")["version"])


def frozen_entries() -> tuple[str, ...]:
    """Return the model types and classes that this version lists."""
    frozen = toml_file(_FOLDER, "steps.toml")
    return tuple(sorted([*frozen["entries"], *frozen["same"]]))


@cache
def frozen_steps(entry: str) -> tuple[StepForm, ...]:
    """Return the steps of a model type or class."""
    frozen = toml_file(_FOLDER, "steps.toml")
    steps = frozen["entries"][frozen["same"].get(entry, entry)]
    return tuple(StepForm.model_validate(s) for s in steps)


@cache
def frozen_families() -> tuple[LiveFamilyForm, ...]:
    """Return every family that is known without transformers."""
    return tuple(LiveFamilyForm.model_validate(f) for f in toml_file(_FOLDER, "families.toml")["family"])


def frozen_family(config: Mapping[str, Any]) -> LiveFamily | None:
    """Return the frozen family of a config.json, or None.

    A config that names no class is of its model type's only family. Where configs inside of it have other
    model types than those that were frozen, the submodules are others, and so may be their steps.
    """
    kind, named = config.get("model_type"), config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    forms = [f for f in frozen_families() if f.arch == kind]
    form = _if_alike([f for f in forms if name in f.architectures] or ([] if name else forms))
    if form is None:
        return None
    for place, model_type in form.within.items():
        inside = value_at(config, place)
        if isinstance(inside, Mapping) and inside.get("model_type", model_type) != model_type:
            return None
    return LiveFamily.of(form, frozen_steps, frozen_version())


def called(arch: str) -> LiveFamily | None:
    """Return the frozen family of a model type or class; None if there is none, or classes differ.

    Where the classes of a model type differ, that of the trainers' maps counts: its causal language model.
    """
    forms = [f for f in frozen_families() if arch == f.arch or arch in f.architectures]
    mapped_classes = {
        name
        for m in built_in_maps(frozenset({arch}))
        if arch in (m.arch, *m.model_types)
        for name in m.architectures
    }
    form = _if_alike(forms) or _if_alike([f for f in forms if mapped_classes & set(f.architectures)])
    return None if form is None else LiveFamily.of(form, frozen_steps, frozen_version())


def near(arch: str) -> list[str]:
    """Return the model types and classes that are spelled nearly as a name is, the nearest first.

    >>> near("Llama")[:1], near("qwen-3-moe")[:1], near("")
    (['llama'], ['qwen3_moe'], [])
    """
    names = {name.lower(): name for f in frozen_families() for name in (*f.architectures, f.arch)}
    return [names[name] for name in get_close_matches(arch.lower(), names, n=3, cutoff=0.65)]


def _if_alike(forms: Sequence[LiveFamilyForm]) -> LiveFamilyForm | None:
    """Return the first of families, if all have the same steps."""
    kinds = {f.model_dump_json(include={"base", "parts"}) for f in forms}
    return forms[0] if len(kinds) == 1 else None


def live_map(
    family: LiveFamily,
    names: Iterable[str],
    config: Mapping[str, Any] | None = None,
    shapes: Shapes | None = None,
) -> ArchMap:
    """Return the map from a module's tensors to the hub's files, as `save_pretrained` writes them.

    Args:
        family: Of the model.
        names: Of every tensor of the module that there is.
        config: What config.json holds, for the numbers that rules need.
        shapes: Of the tensors of either side, for rules whose parts are not of one length.

    Raises:
        UsageError: For tensors whose step is refused, and for numbers that are not in the config.
        NameMismatch: Where two tensors would be one part of the same.
    """
    routes = saved_names(family.steps, names)
    for name in (n for r in routes for n in (*r.live, *r.hub)):
        if _MEANS.search(name.replace(ITEM, "")):
            raise UsageError(
                f"cannot map {name!r}: its characters mean something in rules",
                hint="try --rename for that tensor, or --names stored",
            )
    numbers = numbers_of(family, config or {})
    rules = tuple(r for form in _rules_of_routes(routes, numbers, shapes or {}) for r in compiled(form))
    return _arch_map(family, rules)


def hub_map(
    family: LiveFamily,
    names: Iterable[str],
    config: Mapping[str, Any] | None = None,
    shapes: Shapes | None = None,
    parameters: Iterable[str] | None = None,
) -> ArchMap:
    """Return the map from the hub's files to a module's tensors; errors as of `live_map`.

    Args:
        family: Of the model.
        names: Of every tensor of the files that there is.
        config: What config.json holds, for the numbers that rules need.
        shapes: Of the tensors of either side, for rules whose parts are not of one length.
        parameters: Names of the module's tensors where it is built: the map is then saving, backwards. Else
            they are what loading makes of the names of files, which is wrong where a step finds something in
            a name that it is not meant for.

    Raises:
        UsageError: Also for rules that have no way back.
    """
    live = _loaded(family, names) if parameters is None else _stored(family, parameters, names)
    return live_map(family, live, config, shapes).inverted()


def _stored(family: LiveFamily, parameters: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return the module's tensors that files have something of: of those that are tied, one."""
    files = {*names}
    routes = saved_names(family.steps, parameters)
    return {n for r in routes if any(h.replace(ITEM, "0") in files for h in r.hub) for n in r.live}


def world_of(family: LiveFamily, names: Iterable[str]) -> str | None:
    """Return the world of names: the hub's, also if both worlds have equal names, or a module's.

    They are the hub's when loading and saving gives them again, a module's when saving and loading does;
    None where neither does. A step may find something in names that it has already made: only both ways
    together tell. Where a step finds something in a name that it is not meant for, transformers' loader takes
    the parameter that has the name itself (`convert_and_load_state_dict_in_model`), and so do both ways.
    """
    sampled = _sampled(names)
    kinds = _kinds(sampled)
    resaved = _kinds(_saved(family, _loaded(family, sampled, refuse=False)))
    untouched = {name for name in sampled if not _kinds([name]) <= resaved}
    if untouched and untouched < sampled:
        loaded = _loaded(family, sampled - untouched, refuse=False)
        resaved = _kinds(_saved(family, loaded | untouched))
    if resaved == kinds:
        return HUB
    reloaded: set[str] = set()
    for name, loaded_as in live_names(family.steps, _saved(family, sampled), refuse=False).items():
        parameters, itself = _kinds(loaded_as), _kinds([name])
        reloaded |= itself if itself <= kinds and not parameters <= kinds else parameters
    return LIVE if reloaded == kinds else None


def float32_names(family: LiveFamily, names: Iterable[str], dtype: str) -> set[str]:
    """Return the names, of files or of a module, of what stays in float32 in a model of a 16-bit dtype."""
    form = family.form
    patterns = [*form.float32, *(form.float32_in_half if dtype == "float16" else ())]
    if not patterns:
        return set()
    listed = re.compile("|".join(f"(?:{p})" for p in patterns))
    loaded = live_names(family.steps, names, refuse=False)
    return {name for name, live in loaded.items() if listed.search(live[0])}


def _sampled(names: Iterable[str]) -> set[str]:
    """Return a few names of every kind: one number for all that steps do not distinguish."""
    out: dict[str, str] = {}
    for name in names:
        out.setdefault(NUMBER.sub(lambda match: match[0] if len(match[0]) < 2 else SLOT, name), name)
    return set(out.values())


def _loaded(family: LiveFamily, names: Iterable[str], *, refuse: bool = True) -> set[str]:
    return {n for parameters in live_names(family.steps, names, refuse=refuse).values() for n in parameters}


def _saved(family: LiveFamily, names: Iterable[str]) -> set[str]:
    """Return one name of each list."""
    return {
        n.replace(ITEM, "0") for route in saved_names(family.steps, names, refuse=False) for n in route.hub
    }


def _kinds(names: Iterable[str]) -> set[str]:
    """Names without their numbers."""
    return {NUMBER.sub(SLOT, n) for n in names}


def _arch_map(family: LiveFamily, rules: tuple[Rule, ...]) -> ArchMap:
    form = family.form
    return ArchMap(
        form.arch,
        form.architectures,
        (form.arch,),
        LIVE,
        HUB,
        rules,
        digest=family.digest,
        version=f"transformers {family.version}",
    )


def numbers_of(family: LiveFamily, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the config's numbers, by their names in rules."""
    stated = {name: value_at(config, place) for name, place in wanted_numbers(family.steps).items()}
    return {name: value for name, value in stated.items() if type(value) is int}


@dataclass(frozen=True)
class _Alike:
    """Routes whose names differ in numbers only.

    Attributes:
        routes: All of them.
        live, hub: Templates of their names.
    """

    routes: tuple[Route, ...]
    live: tuple[str, ...]
    hub: tuple[str, ...]


def _rules_of_routes(routes: Sequence[Route], numbers: Mapping[str, int], shapes: Shapes) -> list[RuleForm]:
    """Return the rules that take exactly the routes' tensors."""
    groups: dict[tuple[int, tuple[str, ...], tuple[str, ...]], list[Route]] = defaultdict(list)
    for route in routes:
        live, hub = (tuple(NUMBER.sub(SLOT, n) for n in side) for side in (route.live, route.hub))
        groups[id(route.step), live, hub].append(route)
    alike = [_Alike(tuple(alike_routes), live, hub) for (_, live, hub), alike_routes in groups.items()]
    taken: dict[str, int] = defaultdict(int)
    for group in alike:
        for template in set(group.live):
            taken[template] += 1
    out: list[RuleForm] = []
    for group in alike:
        many = all(taken[t] == 1 for t in group.live)
        for live, hub in _indexed(group, len(out)) if many else [(r.live, r.hub) for r in group.routes]:
            out.append(_step_rule(len(out), group, live, hub, numbers, shapes))
    return out


def _step_rule(
    number: int,
    alike: _Alike,
    live: Sequence[str],
    hub: Sequence[str],
    numbers: Mapping[str, int],
    shapes: Shapes,
) -> RuleForm:
    """Return the rule of a step, for full names. number: of the rule, for names of its axes."""
    step, name = alike.routes[0].step, f"{_slug(alike.live[0])}-{number}"
    if step is None or step.rule is None:
        form = {"name": name, "from": tuple(live), "to": tuple(hub), "presence": "some"}
        return RuleForm.model_validate(form)
    joined = step.rule
    needed = {k: place for k, place in step.numbers.items() if k not in numbers}
    if needed:
        raise UsageError(
            f"cannot map {live[0]}: the config does not say {next(iter(needed.values()))}",
            hint="try --config FOLDER with the model's config.json",
        )
    axes = {**joined.axes, **{k: numbers[k] for k in step.numbers}}
    axes |= _uneven_parts(joined, alike.routes[0], shapes)
    item = re.compile(rf"\b{ITEM[1:-1]}\b")

    def full_terms(names: Sequence[str], terms: Sequence[str]) -> tuple[str, ...]:
        """Return names with the layouts of terms; each rule has list axes of its own."""
        layouts = [item.sub(f"item{number}", t[t.index(" : ") :]) for t in terms]
        return tuple(
            n.replace(ITEM, f"{{item{number}}}") + layout for n, layout in zip(names, layouts, strict=True)
        )

    return joined.model_copy(
        update={
            "name": name,
            "source": full_terms(live, joined.source),
            "to": full_terms(hub, joined.to or ()),
            "axes": {k: str(v) for k, v in axes.items()},
        }
    )


def _uneven_parts(joined: RuleForm, route: Route, shapes: Shapes) -> dict[str, str]:
    """Return the sizes of joined parts of different lengths, as files have them, or as saving cuts them.

    `save_pretrained` cuts with `torch.chunk`, whose parts have a length that is rounded up, and the last what
    is left.
    """
    equal = _EQUAL_PARTS.search(joined.source[0])
    if equal is None:
        return {}
    names = equal[1].split(" + ")
    dim = len(joined.source[0][: equal.start()].partition(" : ")[2].split())
    lengths = [shape[dim] for name in (route.live[0], *route.hub) if len(shape := shapes.get(name, ())) > dim]
    sizes = lengths
    if route.live[0] in shapes and lengths:
        length = -(-lengths[0] // len(names))
        sizes = [min(length, lengths[0] - n * length) for n in range(len(names))]
    if len(sizes) < len(names) or len({*sizes}) == 1 or min(sizes) < 1:
        return {}  # parts of one length, or none: shapes are compared with the rule
    return {name: str(size) for name, size in zip(names, sizes, strict=True)} | {equal[2]: "1"}


Sides = tuple[tuple[str, ...], tuple[str, ...]]


def _indexed(alike: _Alike, number: int) -> list[Sides]:
    """Names with an index where numbers differ, for one rule or several.

    A rule's indices are all combinations of theirs, as lists of modules are: else only one number is an index
    in a rule, and where the hub's numbers are not the module's, none is.
    """
    live = np.array([_digits(r.live) for r in alike.routes], np.int64)
    hub = np.array([_digits(r.hub) for r in alike.routes], np.int64)
    axes = _distinct_columns(live)
    if len(axes) > 1 and not _is_product(axes):
        widest = max(range(len(axes)), key=lambda n: len(unique(axes[n])))
        narrower_axes = np.stack([a for n, a in enumerate(axes) if n != widest], axis=1)
        parts = [np.flatnonzero((narrower_axes == values).all(axis=1)) for values in unique(narrower_axes)]
        out: list[Sides] = []
        for rows in parts:
            part = replace(alike, routes=tuple(alike.routes[r] for r in rows.tolist()))
            out += _indexed(part, number + len(out))
        return out
    live_fields = [_field(column, axes, number) for column in live.T]
    hub_fields = [_field(column, axes, number) for column in hub.T]
    live_indices = [f for f in live_fields if f is not None]
    hub_indices = [f for f in hub_fields if f is not None]
    if len(hub_indices) < len(hub_fields) or not axes:
        return [(r.live, r.hub) for r in alike.routes]
    return [(_filled_templates(alike.live, live_indices), _filled_templates(alike.hub, hub_indices))]


def _distinct_columns(columns: Columns) -> list[Columns]:
    """Return the columns that are not constant, each once."""
    out: list[Columns] = []
    for column in columns.T:
        if not (column == column[0]).all() and not any((column == earlier).all() for earlier in out):
            out.append(column)
    return out


def _is_product(axes: Sequence[Columns]) -> bool:
    """Return whether rows are all combinations of numbers, from 0 on for every axis but the first."""
    sizes = [len(unique(axis)) for axis in axes]
    rows = len(unique(np.stack(axes, axis=1)))
    return rows == math.prod(sizes) and all(
        int(axis.max()) == n - 1 for axis, n in zip(axes[1:], sizes[1:], strict=True)
    )


def _field(column: Columns, axes: Sequence[Columns], number: int) -> str | None:
    """Return the text for a column in a name: its number or an index; None for a column of no axis."""
    if (column == column[0]).all():
        return str(column[0])
    for n, axis in enumerate(axes):
        shift = column - axis
        if (shift == shift[0]).all():
            return f"{{n{number}_{n} {int(shift[0]):+d}}}" if shift[0] else f"{{n{number}_{n}}}"
    return None


def _digits(names: Sequence[str]) -> list[int]:
    return [int(d) for n in names for d in NUMBER.findall(n)]


def _filled_templates(templates: Sequence[str], fields: Sequence[str]) -> tuple[str, ...]:
    """Fill the slots of templates, in order."""
    rest = iter(fields)
    return tuple("".join(c if c != SLOT else next(rest) for c in t) for t in templates)


def _slug(template: str) -> str:
    """Return the name of a rule."""
    text = "".join(c if c.isalnum() and c.isascii() else "-" for c in template.lower())
    return "-".join(part for part in text.split("-") if part) or "tensor"
