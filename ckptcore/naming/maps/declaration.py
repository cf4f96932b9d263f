"""Read maps of names from TOML, and reject impossible ones.

A family of models is one file in ``families/``; what families share are named groups of rules in ``shared/``:

```
arch = "qwen3"                                     # --arch
architectures = ["Qwen3ForCausalLM"]               # of a config.json
model_types = ["qwen3"]

[[map]]
world = "megatron"                                 # of the source; `to` is the other one, hf-hub by default
use = ["megatron/embedding", "megatron/attention"] # groups of shared rules
with = { mlp = "mlp" }                             # texts for <mlp> in shared rules, before their defaults

[[map.rule]]
name = "query-norm"                                # unique in the map
from = "decoder.layers.{layer}.self_attention.q_layernorm.weight"
to = "model.layers.{layer}.self_attn.q_norm.weight"
```

A rule maps tensors of one world to tensors of the other. ``from`` and ``to`` are a term, or a list of terms
that belong together. ``or`` is a list of other spellings of ``from``; their first terms identify them. A term
is a name (`tensor_name`) and, after ``" : "``, a layout (`layout`). Without layouts tensors do not change.
More fields of a rule:

- ``axes = {q = "heads / kv_heads", k = 1}``: sizes, by arithmetic on numbers and other axes. Without one,
  the number of its name or the shapes give the size of an axis, or else ``default = {pad = 0}`` does. The
  size of an axis that is an index in names bounds that index.
- ``drops = {pad = "reason"}``: parts that no tensor of ``to`` has. ``drop = "reason"`` instead of ``to``: the
  tensor is dropped. ``only_zero = "reason"`` beside it: one with another value than zero is an error.
- ``repeats = ["heads"]``: axes of ``to`` along which elements of ``from`` are repeated.
- ``add = 1``: added to every element, in float32, rounded to the stored dtype. The way back adds the
  opposite; of 16-bit floats it makes float32, in which the sum has all bits of nearly every weight.
- ``where = "layer < dense"``: of indices and numbers.
- ``presence``: ``every`` (the default: for all indices of the first name), ``some``, or ``optional``.
- ``part``: rules of one part are all needed if one of them takes something, and none of them otherwise.
- ``one_way = "reason"``: why there is no inverse, where no drop is the reason.
- ``spelled = ["wq", "qkv_linear|wqkv"]``: the generations of the trainer's names
  (`naming.worlds.GENERATIONS`) that have each spelling, for the way back; "" for all, "-" for none. Without
  it all have the first one.
- ``back = "every"``: the presence of the inverse, where it is another one.
- ``back_beside = "name"``: a name of the other world; the way back takes only tensors with an index that has
  a tensor of this name, too: where a trainer names a tensor by its layer's kind. A list has one for each
  spelling: of a generation that several spellings have, each is for the layers of its kind.
- ``tied = "name"``: the tensor of the other world that has the elements where its config ties both, and the
  trainer's loader looks for both.
- ``beside = "term"`` with ``only_zero``: a term of the other world; the way back makes zeros for each tensor
  of it.

More fields of a map: ``requires = {"model.block.name" = ["default"]}``, values that the trainer's own config
must have if there is one (``[]`` for a key that must be unset: null, 0, or a list of these);
``target_requires``, the same for the config of the other world; ``refused = "reason"`` instead of rules,
with ``signs``, patterns of its names. ``generations = ["wq"]`` are those of the trainer's names that it has,
all by default; one that `GENERATIONS` does not list is only read. ``loaded_by = "torchtitan 0.3.0"`` is the
release of the trainer whose own code has loaded what the way back makes, in tests. ``by_name = true`` is for
a map that only ``--arch`` or a config selects, because its names and shapes are those of another family.
``stacked = {layer = "decoder.layers."}``, also of a group: names below that prefix may also come without
their index, with the layers in a first dim of their own. ``below = "language_model."``: names of the trainer
in groups have this prefix, because its model is a module of another one.

A map may have ``[[map.again]]`` for layers that are built like others: a rule whose names all begin with the
first text of ``from`` and of ``to`` also applies with the other texts, as the part ``name``; ``without``
names rules of these that such layers do not have.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from itertools import cycle, product
from typing import Annotated, Any, Literal

from blake3 import blake3
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import UsageError
from ckptcore.naming.maps.layout import ELLIPSIS, Axis, AxisLayout, parse_layout
from ckptcore.naming.maps.sizes import names_in
from ckptcore.naming.maps.tensor_name import Index, TensorName, parse_name
from ckptcore.naming.worlds import GENERATIONS, is_world
from ckptcore.utils.foreign_text import load_toml
from ckptcore.utils.text import short_repr

_TEXT = re.compile(r"<([a-z_][a-z_0-9]*)>")
_ALL, _NONE = frozenset[str](), frozenset({"-"})  # generations of names that have a spelling
# Generations of names in which one tensor holds all layers.
STACKED = frozenset({"stacked", "transformer-engine"})
PADDING = "padding"  # the axis of rows that pad a vocabulary


@dataclass(frozen=True)
class Term:
    """A tensor of a rule, or one for each index in its name."""

    name: TensorName
    layout: AxisLayout

    @cached_property
    def blocks(self) -> tuple[frozenset[str], ...]:
        """The axes of each block with indices, without dims of an ellipsis."""
        indices = frozenset(i.axis for i in self.name.indices)
        return tuple((block | indices) - {ELLIPSIS} for block in self.layout.blocks)

    def __str__(self) -> str:
        return str(self.name)


@dataclass(frozen=True)
class Rule:
    """One rule, with one text chosen for each choice in its names.

    Attributes:
        name: Name in the declaration, with its group.
        spellings: Terms of the tensors that it takes; exactly one spelling is used.
        to: Terms of the tensors that it makes; none where tensors are dropped.
        presence: ``every``, ``some`` or ``optional``.
        axes: Axis -> expression.
        default: Axis -> size if nothing else gives it.
        where: Expression over indices and numbers, or "".
        drops: Axis -> why its part is dropped.
        drop: Why tensors are dropped, or "".
        repeats: Axes along which elements are repeated.
        add: Value added to every element.
        one_way: Why it has no inverse; "" where it has one.
        part: Part of the model that may be absent; "" for what every model has.
        only_zero: Why dropped tensors must be all zero; "" where values do not matter.
        spelled: Generations of names that have each spelling; none where all have the first.
        beside: The way back makes zeros for each tensor of this term; None where it makes none.
        back: Presence of the inverse; "" for the same.
        tied: Name of the tensor that has the elements of ``to`` in a model that ties them; "" for none.
        back_beside: The inverse of a spelling takes only tensors with an index that its term has, too; none
            where it takes all.
        only_beside: Of an inverse: what the rule says in ``back_beside``.
        widened: Whether a sum with ``add`` is float32 where the tensor has 16 bits an element.
    """

    name: str
    spellings: tuple[tuple[Term, ...], ...]
    to: tuple[Term, ...]
    presence: str = "every"
    axes: Mapping[str, str] = field(default_factory=dict)
    default: Mapping[str, int] = field(default_factory=dict)
    where: str = ""
    drops: Mapping[str, str] = field(default_factory=dict)
    drop: str = ""
    repeats: frozenset[str] = frozenset()
    add: int = 0
    one_way: str = ""
    part: str = ""
    only_zero: str = ""
    spelled: tuple[frozenset[str], ...] = ()
    beside: Term | None = None
    back: str = ""
    tied: str = ""
    back_beside: tuple[Term | None, ...] = ()
    only_beside: Term | None = None
    widened: bool = False

    @property
    def loses(self) -> str:
        """Why nothing can be made of what it makes, "" where the inverse makes all but dropped parts."""
        return "" if self.drop or self.drops else self.one_way

    def spellings_of(self, generation: str) -> list[tuple[tuple[Term, ...], Term | None]]:
        """Return the spellings that a generation of names has, each with what its inverse must be beside.

        There are several where layers of each kind have their own, and none where it has no such name.
        """
        besides = self.back_beside or (None,) * len(self.spellings)
        if not self.spelled:
            return [(self.spellings[0], besides[0])]
        rows = list(zip(self.spellings, besides, self.spelled, strict=True))
        named = [(side, beside) for side, beside, labels in rows if generation in labels]
        named = named or [(side, beside) for side, beside, labels in rows if not labels]
        if len(named) > 1 and all(beside for _, beside in named):
            return named
        by_kind = len(set(besides)) > 1  # one spelling is then for the layers of every kind
        return [(side, None if by_kind else beside) for side, beside in named[:1]]

    def inverses(self, generation: str = "") -> Iterator[Rule]:
        """Yield the inverses, which make the spellings of a generation; none where nothing is made.

        Parts that are dropped have no elements in them: no rows pad a vocabulary.
        """
        if self.drop and self.beside is None:
            return
        axes = {a: e for a, e in self.axes.items() if a not in self.drops} | dict.fromkeys(self.drops, "0")
        default = {a: n for a, n in self.default.items() if a not in self.drops}
        for side, beside in self.spellings_of(generation):
            if self.beside is not None:
                yield replace(self, spellings=((self.beside,),), to=side, drop="", one_way="", spelled=())
                continue
            yield replace(
                self,
                spellings=(self.to,),
                to=side,
                presence=self.back or self.presence,
                axes=axes,
                default=default,
                drops={},
                one_way="",
                spelled=(),
                add=-self.add,
                widened=True,
                only_beside=beside,
            )


@dataclass(frozen=True)
class ArchMap:
    """The rules between two worlds for one architecture.

    Attributes:
        arch: Name of the architecture.
        architectures: Class names in config.json.
        model_types: Model types in config.json.
        world: World of the source's names.
        to: World of the target's names.
        rules: In the order of the declaration.
        refused: Why there is no map for a known architecture; "" where there is one.
        requires: Path in a config of ``world`` -> values that it may have there; none if it must be unset.
        signs: Patterns of names that identify a refused architecture.
        digest: Digest of the declaration with the groups it uses, hex.
        version: Version of the library that the rules come from, or "".
        target_requires: The same as ``requires`` for a config of ``to``.
        by_name: Whether only ``--arch`` or a config selects it, never names and shapes.
        generations: Generations of the names of ``world`` that it has; none where there is one.
        loaded_by: The trainer whose own code has loaded what the inverse makes, in its newest names, with the
            release; or "".
        generation: Generation of the names that an inverse makes, or "".
        left_out: (rule, reason) of what an inverse does not make.
        zeros: Rules of an inverse that make zeros, which it takes no tensor for.
        padded: Rules of an inverse whose tensors a trainer pads by rows.
        ties: (name, name of the tensor that has its elements) of what an inverse takes twice in tied models.
    """

    arch: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    world: str
    to: str
    rules: tuple[Rule, ...]
    refused: str = ""
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    signs: tuple[re.Pattern[str], ...] = ()
    digest: str = ""
    version: str = ""
    target_requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    by_name: bool = False
    generations: tuple[str, ...] = ()
    loaded_by: str = ""
    generation: str = ""
    left_out: tuple[tuple[str, str], ...] = ()
    zeros: tuple[Rule, ...] = ()
    padded: frozenset[str] = frozenset()
    ties: tuple[tuple[str, str], ...] = ()

    def inverted(self, generation: str = "") -> ArchMap:
        """Return the map of the other direction.

        Args:
            generation: Of the names that it makes; "" for the newest.

        Raises:
            UsageError: With the rules that have no inverse, or the generations that there are.
        """
        if generation and generation not in self.generations:
            raise UsageError(
                f"cannot map {self.arch} to {self.world}:{generation}: it has no such names",
                hint=f"one of: {', '.join(f'{self.world}:{g}' for g in self.generations) or self.world}",
            )
        if lost := [f"{r.name} ({r.loses})" for r in self.rules if r.loses]:
            raise UsageError(
                f"cannot map {self.arch} from {self.to} to {self.world}: {'; '.join(lost)}",
                hint="import the model with the trainer's own converter",
            )
        newest = next(iter(self.generations), "")
        generation = generation or newest
        turned = [(r, tuple(r.inverses(generation))) for r in self.rules]
        inverses = [back for _, of_rule in turned for back in of_rule]
        left_out = dict.fromkeys((r.name, r.drop) for r, of_rule in turned if r.drop and not of_rule)
        digest = blake3(f"inverse {self.digest} {generation}".encode()).hexdigest()
        return replace(
            self,
            world=self.to,
            to=self.world,
            rules=tuple(back for back in inverses if back.beside is None),
            zeros=tuple(back for back in inverses if back.beside is not None),
            digest=digest,
            requires=self.target_requires,
            target_requires=self.requires,
            generation=generation,
            loaded_by=self.loaded_by if generation == newest else "",
            left_out=tuple(left_out),
            ties=tuple((str(r.to[0]), r.tied) for r in self.rules if r.tied),
            padded=frozenset(r.name for r in self.rules if PADDING in r.drops),
        )


def _list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _number_as_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


def _infinite(value: float) -> float:
    """Return a limit that is none. Other numbers are integers."""
    if not math.isinf(value):
        raise ValueError(f"must be an integer or inf (got {value})")
    return value


Terms = Annotated[tuple[str, ...], BeforeValidator(_list), Field(min_length=1)]
Values = tuple[str | int | Annotated[float, AfterValidator(_infinite)] | bool, ...]
Expression = Annotated[str, BeforeValidator(_number_as_text)]


class Form(BaseModel):
    """Base of the tables in TOML files."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class RuleForm(Form):
    """A rule as TOML has it: see the module."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    source: Terms = Field(alias="from")
    spellings: tuple[Terms, ...] = Field((), alias="or")
    to: Terms | None = None
    axes: dict[str, Expression] = {}
    default: dict[str, int] = {}
    where: str = ""
    drops: dict[str, str] = {}
    drop: str = ""
    repeats: tuple[str, ...] = ()
    add: int = 0
    presence: Literal["every", "some", "optional"] = "every"
    one_way: str = ""
    part: str = ""
    # They change no output of the map: no part of its digest.
    only_zero: str = Field("", exclude=True)
    spelled: tuple[str, ...] = Field((), exclude=True)
    beside: str = Field("", exclude=True)
    back: Literal["", "every", "some", "optional"] = Field("", exclude=True)
    tied: str = Field("", exclude=True)
    back_beside: Annotated[tuple[str, ...], BeforeValidator(_list)] = Field((), exclude=True)

    @model_validator(mode="after")
    def _is_consistent(self) -> RuleForm:
        if (self.to is None) != bool(self.drop):
            raise ValueError("a rule has either `to` or `drop`")
        if self.only_zero and not self.drop:
            raise ValueError("`only_zero` is for a rule with `drop`")
        if bool(self.beside) != bool(self.only_zero):
            raise ValueError("a rule with `only_zero` says in `beside` what the way back makes zeros for")
        if self.tied and (self.to is None or len(self.to) != 1):
            raise ValueError("`tied` is for a rule with one term in `to`")
        if self.spelled and len(self.spelled) != 1 + len(self.spellings):
            raise ValueError("`spelled` has a text for `from` and for each spelling of `or`")
        if len(self.back_beside) not in (0, 1, 1 + len(self.spellings)):
            raise ValueError("`back_beside` has one name, or one for `from` and for each spelling of `or`")
        for expression in (*self.axes.values(), *([self.where] if self.where else [])):
            names_in(expression)
        if self.repeats and not self.one_way:
            raise ValueError("`repeats` has no way back: say why in `one_way`")
        return self

    def below(self, prefix: str) -> RuleForm:
        """Return the rule for a trainer whose names have a prefix."""
        source, *spellings = (tuple(prefix + t for t in side) for side in (self.source, *self.spellings))
        return self.model_copy(update={"source": source, "spellings": tuple(spellings)})


class GroupForm(Form):
    """Rules that families share, or what their maps require. defaults: texts for names in angle brackets."""

    defaults: dict[str, str] = {}
    axes: dict[str, Expression] = {}
    stacked: dict[str, str] = {}
    requires: dict[str, Values] = {}
    rule: tuple[RuleForm, ...] = ()


class AlikeForm(Form):
    """Layers that are built like others. source, to: prefixes of names, those of the other layers first."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    source: tuple[str, ...] = Field(alias="from", min_length=2)
    to: tuple[str, str]
    without: tuple[str, ...] = Field((), exclude=True)

    def of(self, form: RuleForm) -> RuleForm | None:
        """Return the rule for these layers; None for a rule of other tensors."""
        sides = (form.source, *form.spellings)
        if not all(t.startswith(self.source[0]) for side in sides for t in side):
            return None
        if not all(t.startswith(self.to[0]) for t in form.to or ()):
            return None
        copied_sides = [
            tuple(start + t.removeprefix(self.source[0]) for t in side)
            for start in self.source[1:]
            for side in sides
        ]
        to = form.to and tuple(self.to[1] + t.removeprefix(self.to[0]) for t in form.to)
        spelled = form.spelled and form.spelled + ("-",) * (len(copied_sides) - len(form.spelled))
        beside = tuple(name and self.to[1] + name.removeprefix(self.to[0]) for name in form.back_beside)
        if len(beside) > 1:
            beside += ("",) * (len(copied_sides) - len(beside))
        update = {
            "source": copied_sides[0],
            "spellings": tuple(copied_sides[1:]),
            "to": to,
            "part": self.name,
            "spelled": spelled,
            "back_beside": beside,
        }
        return form.model_copy(update=update)


class MapForm(Form):
    """The map of a family from one world."""

    world: str
    to: str = "hf-hub"
    use: tuple[str, ...] = ()
    texts: dict[str, str] = Field({}, alias="with")
    axes: dict[str, Expression] = {}
    stacked: dict[str, str] = {}
    without: tuple[str, ...] = ()
    rule: tuple[RuleForm, ...] = ()
    alike: tuple[AlikeForm, ...] = Field((), alias="again")
    refused: str = ""
    requires: dict[str, Values] = {}
    target_requires: dict[str, Values] = {}
    by_name: bool = False
    signs: tuple[str, ...] = ()
    version: str = ""
    # They change no output of the map: no part of its digest.
    generations: tuple[str, ...] = Field((), exclude=True)
    loaded_by: str = Field("", exclude=True)
    # Part of the digest where there is one, so that digests of maps without it stay.
    below: str = Field("", exclude=True)


class FamilyForm(Form):
    """A family's file."""

    arch: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    map: tuple[MapForm, ...] = Field(min_length=1)


@cache
def built_in_maps(calls: frozenset[str] = frozenset()) -> tuple[ArchMap, ...]:
    """Return the maps that come with ckptcore, by architecture.

    Rules of a family are compiled when it is asked for: all of them take a third of a second.

    Args:
        calls: Names of architectures, model types or classes; none for all maps.
    """
    return tuple(
        arch_map
        for file_name, family in _families().items()
        if not calls or calls & {family.arch, *family.model_types, *family.architectures}
        for arch_map in _built_in(file_name)
    )


@cache
def _families() -> Mapping[str, FamilyForm]:
    """Return file name -> declaration of every family that comes with ckptcore."""
    folder = resources.files(__package__) / "families"
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".toml"))
    return {name: family_form((folder / name).read_text("utf-8"), name) for name in names}


@cache
def _built_in(file_name: str) -> tuple[ArchMap, ...]:
    return maps_of(_families()[file_name], file_name)


def family_form(text: str, file_name: str) -> FamilyForm:
    """Read a family's file; raise `UsageError` where it is not valid. file_name: for messages."""
    try:
        return FamilyForm.model_validate(load_toml(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"cannot read the map {file_name}: {where}: {first['msg']}") from error
    except ValueError as error:
        raise UsageError(f"cannot read the map {file_name}: {error}") from error


def maps_of(family: FamilyForm, file_name: str) -> tuple[ArchMap, ...]:
    """Return the maps of a family; raise `UsageError` where its rules contradict each other."""
    try:
        return tuple(_map(family, form) for form in family.map)
    except ValueError as error:
        raise UsageError(f"cannot read the map {file_name}: {error}") from error


def compiled(form: RuleForm) -> list[Rule]:
    """Return the rules of a declaration, one for each choice in its names.

    Raises:
        ValueError: The rule is impossible.
    """
    return list(_rules_of_form(form, "", {}, {}, {}))


@cache
def _groups(name: str) -> Mapping[str, GroupForm]:
    """Return the groups of a shared file."""
    files = {file.name: file for file in (resources.files(__package__) / "shared").iterdir()}
    file = files.get(f"{name}.toml")
    if file is None:
        raise ValueError(f"there is no file of shared rules called {short_repr(name, 60)}")
    return {k: GroupForm.model_validate(v) for k, v in tomllib.loads(file.read_text("utf-8")).items()}


def _group(name: str) -> GroupForm:
    file, slash, group = name.partition("/")
    form = _groups(file).get(group) if slash else None
    if form is None:
        raise ValueError(f"no group of shared rules is called {name}")
    return form


def _map(family: FamilyForm, form: MapForm) -> ArchMap:
    for world in (form.world, form.to):
        if not is_world(world):
            raise ValueError(f"no world is called {world!r}")
    groups = [(name, _group(name)) for name in form.use]
    rules: list[Rule] = []
    generations = form.generations or GENERATIONS.get(form.world, ())
    stacked_in = STACKED if "stacked" in generations else _ALL  # layers that differ are never stacked
    used: set[str] = set()
    for name, group in groups:
        used |= {x for r in group.rule for x in _TEXT.findall(r.model_dump_json())}
        texts = group.defaults | form.texts
        axes = group.axes | form.axes
        stacked = {axis: form.below + prefix for axis, prefix in group.stacked.items()}
        group_rules = [r.below(form.below) for r in group.rule if f"{name}/{r.name}" not in form.without]
        for rule_form in group_rules:
            rules += _rules_of_form(rule_form, name, texts, axes, form.stacked | stacked, stacked_in)
            rules += _rules_of_alike(form, rule_form, name, texts, axes)
    for rule_form in form.rule:
        rules += _rules_of_form(rule_form, "", form.texts, form.axes, form.stacked, stacked_in)
        rules += _rules_of_alike(form, rule_form, "", form.texts, form.axes)
    group_rule_names = {f"{name}/{r.name}" for name, group in groups for r in group.rule}
    if unknown := [w for w in form.without if w not in group_rule_names]:
        raise ValueError(f"`without` names {unknown[0]}, which is in no group that is used")
    if unused := sorted(set(form.texts) - used):
        raise ValueError(f"`with` has a text for <{unused[0]}>, which no rule names")
    if not rules and not form.refused:
        raise ValueError(f"the map from {form.world} has no rules, and no reason to be refused")
    declared = [r.name for r in form.rule] + [f"{n}/{r.name}" for n, g in groups for r in g.rule]
    if len(set(declared)) != len(declared):
        raise ValueError("two rules have one name")
    declaration = form.model_dump(mode="json")
    # A digest depends on the declaration, not on names of fields here: plans record it.
    declaration["again"] = declaration.pop("alike")
    for alike, alike_form in zip(form.alike, declaration["again"], strict=True):
        alike_form.update({"without": list(alike.without)} if alike.without else {})
    declaration |= {"below": form.below} if form.below else {}
    content = [family.arch, declaration, [g.model_dump(mode="json") for _, g in groups]]
    return ArchMap(
        family.arch,
        family.architectures,
        family.model_types,
        form.world,
        form.to,
        tuple(rules),
        form.refused,
        {k: v for _, g in groups for k, v in g.requires.items()} | form.requires,
        tuple(re.compile(s) for s in form.signs),
        blake3(canonical_json(content)).hexdigest(),
        form.version,
        form.target_requires,
        form.by_name,
        generations,
        form.loaded_by,
    )


def _rules_of_alike(
    form: MapForm, rule: RuleForm, group: str, texts: Mapping[str, str], axes: Mapping[str, str]
) -> Iterator[Rule]:
    """Yield a rule's copies for the layers of a map that are built like others."""
    if not form.alike:
        return
    update = {
        "source": tuple(_with_texts(t, texts) for t in rule.source),
        "spellings": tuple(tuple(_with_texts(t, texts) for t in side) for side in rule.spellings),
        "to": rule.to and tuple(_with_texts(t, texts) for t in rule.to),
        "back_beside": tuple(_with_texts(t, texts) for t in rule.back_beside),
    }
    for alike in form.alike:
        if (f"{group}/{rule.name}" if group else rule.name) in alike.without:
            continue
        alike_rule = alike.of(rule.model_copy(update=update))
        if alike_rule is not None:
            yield from _rules_of_form(
                alike_rule, f"{alike.name}/{group}" if group else alike.name, {}, axes, {}
            )


def _rules_of_form(
    form: RuleForm,
    group: str,
    texts: Mapping[str, str],
    axes: Mapping[str, str],
    stacked: Mapping[str, str],
    stacked_in: frozenset[str] = STACKED,
) -> Iterator[Rule]:
    """Yield the rules of a declaration, one for each choice in its names.

    stacked_in: Generations in which one tensor holds all layers of ``stacked``.
    """
    name = f"{group}/{form.name}" if group else form.name
    try:
        ends = [
            [_with_texts(t, texts) for t in side]
            for side in (
                form.source,
                *form.spellings,
                form.to or (),
                (form.beside,) * bool(form.beside),
                *((name,) * bool(name) for name in form.back_beside),
            )
        ]
        parsed = [[_terms(t) for t in side] for side in ends]
        spelling_count = 1 + len(form.spellings)
        labels: dict[str, dict[str, None]] = {}
        for side in parsed:
            for term in side:
                for _, chosen in term:
                    for label, value in chosen.items():
                        labels.setdefault(label, {})[value] = None
        for n, values in enumerate(product(*labels.values())):
            chosen = dict(zip(labels, values, strict=True))
            sides = [tuple(_chosen(term, chosen) for term in side) for side in parsed]
            written, (to, beside, *named_beside) = sides[:spelling_count], sides[spelling_count:]
            besides = [next(iter(term), None) for term in named_beside] or [None]
            labels_of = [_labels(text) for text in form.spelled] or [_ALL, *[_NONE] * (len(written) - 1)]
            spellings = [
                (*spelling, back_beside)
                for side, generations, back_beside in zip(written, labels_of, cycle(besides))
                for spelling in _stacked(side, stacked, generations, stacked_in)
            ]
            rule = Rule(
                name,
                tuple(side for side, _, _ in spellings),
                to,
                # A model may lack some texts of a choice, such as biases: only the first must be there.
                form.presence if n == 0 else "optional",
                dict(axes) | form.axes,
                form.default,
                form.where,
                form.drops,
                form.drop,
                frozenset(form.repeats),
                form.add,
                form.one_way or form.drop or "; ".join(form.drops.values()),
                form.part,
                form.only_zero,
                tuple(generations for _, generations, _ in spellings),
                next(iter(beside), None),
                form.back if n == 0 else "",
                form.tied,
                tuple(back_beside for _, _, back_beside in spellings) if any(besides) else (),
            )
            _require_bijective(rule)
            yield rule
    except ValueError as error:
        raise ValueError(f"rule {name}: {error}") from error


def _with_texts(text: str, texts: Mapping[str, str]) -> str:
    """Return a name with texts in place of angle brackets."""

    def put(match: re.Match[str]) -> str:
        if match[1] not in texts:
            raise ValueError(f"there is no text for <{match[1]}>")
        return texts[match[1]]

    return _TEXT.sub(put, text)


def _terms(text: str) -> list[tuple[Term, dict[str, str]]]:
    name, colon, layout = text.partition(" : ")
    shape = parse_layout(layout) if colon else AxisLayout((Axis(ELLIPSIS),))
    return [(Term(tensor_name, shape), chosen) for tensor_name, chosen in parse_name(name.strip())]


def _chosen(terms: Sequence[tuple[Term, dict[str, str]]], chosen: Mapping[str, str]) -> Term:
    for term, texts in terms:
        if texts.items() <= chosen.items():
            return term
    label = next(k for k, v in terms[0][1].items() if k not in chosen or v != chosen[k])
    raise ValueError(f"{{{label}:...}} has other texts elsewhere in the rule")


def _labels(text: str) -> frozenset[str]:
    return frozenset(text.split("|")) if text else _ALL


def _stacked(
    side: tuple[Term, ...], stacked: Mapping[str, str], labels: frozenset[str], stacked_in: frozenset[str]
) -> list[tuple[tuple[Term, ...], frozenset[str]]]:
    """Return a spelling, and the same with layers in the tensors' first dim, each with its generations."""
    stacked_sides = [
        tuple(_with_stacked_axis(t, axis) for t in side)
        for axis, prefix in stacked.items()
        if all(_is_below(t, axis, prefix) for t in side)
    ]
    if not stacked_sides:
        return [(side, labels)]
    stacked_labels = (stacked_in & labels if labels else stacked_in) or _NONE
    return [
        (side, labels - stacked_labels or _ALL if labels != _NONE else _NONE),
        *((stacked_side, stacked_labels) for stacked_side in stacked_sides),
    ]


def _is_below(term: Term, axis: str, prefix: str) -> bool:
    parts = term.name.parts
    return len(parts) > 2 and parts[0] == prefix and parts[1] == Index(axis) and str(parts[2])[:1] == "."


def _with_stacked_axis(term: Term, axis: str) -> Term:
    prefix, _, rest, *later_parts = term.name.parts
    assert isinstance(prefix, str)  # `_is_below` has checked
    assert isinstance(rest, str)
    name = TensorName((prefix + rest.removeprefix("."), *later_parts))
    return Term(name, AxisLayout((Axis(axis), *term.layout.dims)))


def _require_bijective(rule: Rule) -> None:
    """Require that every block of one side is a block of the other, or dropped with a reason."""
    for side in (*rule.spellings, rule.to):
        if len({t.layout.open for t in (*side, *rule.spellings[0])}) > 1:
            raise ValueError("some of its layouts have an ellipsis, and some have none")
        for term in side:
            indices = [i.axis for i in term.name.indices]
            if double := next((a for a in indices if a in term.layout.axes), None):
                raise ValueError(f"{double} is an index and a dim of {term}")
    if any(not t.name.wild and set(t.name.wild) != set(rule.to[0].name.wild) for t in rule.to[1:]):
        raise ValueError("its names have other wild parts")
    if rule.drop:
        return
    target_blocks = [block - rule.repeats for term in rule.to for block in term.blocks]
    for side in rule.spellings:
        blocks = [block for term in side for block in term.blocks]
        source_blocks = [b for b in blocks if not b & rule.drops.keys()]
        for block in source_blocks:
            if target_blocks.count(block) != 1:
                raise ValueError(
                    f"{_first_terms(side)} has a part of {sorted(block)}, "
                    f"and `to` {_count(target_blocks, block)}"
                )
        for block in target_blocks:
            if source_blocks.count(block) != 1:
                raise ValueError(
                    f"`to` has a part of {sorted(block)}, "
                    f"and {_first_terms(side)} {_count(source_blocks, block)}"
                )
        for axis in rule.drops:
            if not any(axis in block for block in blocks):
                raise ValueError(f"it drops {axis}, which {_first_terms(side)} has not")
        wild = {w for term in side for w in term.name.wild}
        if any(set(t.name.wild) - wild for t in rule.to):
            raise ValueError(f"`to` has a wild part that {_first_terms(side)} has not")


def _first_terms(side: Sequence[Term]) -> str:
    return ", ".join(map(str, side[:3]))


def _count(blocks: Sequence[frozenset[str]], block: frozenset[str]) -> str:
    count = blocks.count(block)
    return "has none" if not count else f"has {count} of them"
