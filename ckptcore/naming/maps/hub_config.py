"""Read a config.json as fields that each have one place, and say which of them change what a model computes.

Loaders read one value in several places (``rope_theta``, ``rope_parameters.rope_theta``). ``hub_config.toml``
has these places, the fields that change no function, and those that the shapes of tensors show. Every other
field counts: a list of those that matter would lack the next model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any

from ckptcore.utils.text import short_repr

FROZEN = "configs.toml"  # in the folder of what is frozen of transformers
NULL = "null"  # in that file, which has no other word for it

ROPE = "rope_parameters"
THETA = ".rope_theta"
PLAIN_ROPE = "default"  # what transformers calls rotary embeddings without scaling
# Values of a config may be lists or dicts: they are compared, never hashed.
_SAME_AS_PLAIN = (PLAIN_ROPE, "mrope")  # sections of the second for pictures, no other frequencies
_FACTOR_ALONE = ("linear", "llama3", "yarn")  # without scaling where the factor is 1
TIE = "tie_word_embeddings"
TEXT = "text_config"  # the config of the language model inside another one


@dataclass(frozen=True)
class Stated:
    """A value of a config.

    Attributes:
        value: As it is compared.
        place: Where the config has it, as a dotted path.
        text: What the config has there, where that is not the value.
    """

    value: Any
    place: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.place} = {self.text or rendered(self.value)}"


@dataclass(frozen=True)
class HubFields:
    """The fields of a config.json.

    Attributes:
        values: Field -> value and place. Fields of nested configs have their path before them.
        clashes: Pairs of places that loaders read one value from, and that differ.
        model_type: Of the config, or "".
        architectures: Its class names.
    """

    values: Mapping[str, Stated]
    clashes: tuple[tuple[Stated, Stated], ...]
    model_type: str
    architectures: tuple[str, ...]

    def get(self, field: str) -> Stated | None:
        """Return a field of the language model: of its own config, where the config has a nested one.

        A head beside the language model is tied where either config says so.
        """
        nested, own = self.values.get(f"{TEXT}.{field}"), self.values.get(field)
        if field == TIE and own is not None and own.value:
            return own
        return nested if nested is not None else own

    @property
    def functional(self) -> dict[str, Stated]:
        """The fields that change what the model computes."""
        return {k: v for k, v in self.values.items() if self.counts(k)}

    @property
    def defaults(self) -> dict[str, Any]:
        """The fields of the model's class, with their defaults, but those that the nested config states."""
        return {f: v for f, v in (self.of_class or {}).items() if f"{TEXT}.{f}" not in self.values}

    @property
    def rope_by_layer(self) -> bool:
        """Whether kinds of layers have rotary embeddings of their own."""
        rope = [(f.partition(f"{ROPE}.")[2], s.place) for f, s in self.values.items() if f"{ROPE}." in f]
        return any("." in inner or place.count(".") - place.count("_config.") > 1 for inner, place in rope)

    @property
    def of_class(self) -> Mapping[str, Any] | None:
        """The fields that the model's class has, with their defaults; None of a class that is not frozen."""
        return _frozen().get(self.model_type)

    @property
    def unset(self) -> Mapping[str, Any]:
        """What loaders take for fields that the config lacks: of its class, and of its rotary embeddings."""
        out = dict(self.of_class or {})
        for field, stated in self.values.items():
            if field.endswith(".rope_type"):
                before, of_kind = (
                    field.removesuffix("rope_type"),
                    _table()["unset_rope"].get(str(stated.value), {}),
                )
                out |= {before + name: value for name, value in of_kind.items()}
        return out

    def reads(self, field: str) -> bool:
        """Return whether the model's class may read a field: a trainer's own notes differ in nothing.

        A class that is not frozen, or whose code is beside the config, may read any; other classes also what
        any frozen class has, and fields that count only in some.
        """
        has = self.of_class
        if has is None or "auto_map" in self.values or "." in field:
            return True
        return field in has or field in _of_any_class()

    def may_count(self, field: str) -> bool:
        """Return whether a field changes what the model computes, with some values of other fields."""
        name = _split(field)[1]
        return not _matches("neutral", name) and name not in _table()["unused"].get(self.model_type, ())

    def counts(self, field: str) -> bool:
        """Return whether a field changes what the model computes."""
        if not self.may_count(field):
            return False
        root, name = _split(field)
        rule = _table()["only"].get(name)
        if rule is None:
            return True
        if "field" in rule:
            stated = self.values.get(root + rule["field"])
            value = (self.of_class or {}).get(rule["field"], "") if stated is None else stated.value
            return str(value) in rule["values"]
        return re.fullmatch(rule["model_types"], self.model_type) is not None or any(
            re.fullmatch(rule["architectures"], architecture) for architecture in self.architectures
        )


def hub_fields(content: Mapping[str, Any]) -> HubFields:
    """Return the fields of a config.json."""
    values: dict[str, Stated] = {}
    clashes: list[tuple[Stated, Stated]] = []
    for place, value in _leaves(content):
        field = field_of(place)
        if value is None and field.endswith(ROPE):
            field = f"{field}.rope_type"
        is_plain = field.endswith(".rope_type") and (value is None or value in _SAME_AS_PLAIN)
        stated = Stated(PLAIN_ROPE, place, rendered(value)) if is_plain else Stated(value, place)
        first = values.setdefault(field, stated)
        if first is stated or same_value(first.value, stated.value):
            continue
        if first.value is not None and stated.value is not None:
            clashes.append((first, stated))
        elif first.value is None:
            values[field] = stated
    for field, stated in list(values.items()):
        if field.endswith(".rope_type"):
            factor = values.get(f"{field.removesuffix('rope_type')}factor")
            if stated.value in _FACTOR_ALONE and factor is not None and factor.value == 1:
                values[field] = Stated(PLAIN_ROPE, stated.place, rendered(stated.value))
        elif field.endswith(THETA):  # without a type there is no scaling
            kind = field.removesuffix("rope_theta") + "rope_type"
            values.setdefault(kind, Stated(PLAIN_ROPE, f"rope_type beside {stated.place}", "None"))
    model_type, classes = content.get("model_type"), content.get("architectures")
    names = classes if isinstance(classes, Sequence) and not isinstance(classes, str) else ()
    return HubFields(
        values,
        tuple(clashes),
        model_type if isinstance(model_type, str) else "",
        tuple(n for n in names if isinstance(n, str)),
    )


def nested_like(content: Mapping[str, Any], model_type: str) -> Mapping[str, Any] | None:
    """Return the nested config of a model type, at any depth, or None."""
    for name, part in content.items():
        if isinstance(part, Mapping) and name.endswith("_config"):
            nested = part if part.get("model_type") == model_type else nested_like(part, model_type)
            if nested is not None:
                return nested
    return None


def same_value(first: Any, second: Any) -> bool:
    """Return whether two values of a field mean the same.

    >>> same_value(1_000_000, 1e6), same_value("swish", "silu"), same_value(1, True)
    (True, True, False)
    """
    if isinstance(first, str) and isinstance(second, str):
        a, b = term(first), term(second)
        return (
            a == b or {a, b} <= {"gelu", "gelu or gelu_tanh"} or {a, b} <= {"gelu_tanh", "gelu or gelu_tanh"}
        )
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_value(v, second[k]) for k, v in first.items())
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same_value, first, second))
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def term(text: str) -> str:
    """Return the first of the texts that mean the same."""
    return _terms().get(text, text)


def in_shapes(field: str) -> bool:
    """Return whether the shapes of tensors show a field."""
    return _matches("sizes", field.rpartition(".")[2])


def rendered(value: Any) -> str:
    """Return a value for a message."""
    if isinstance(value, float):
        return f"{value:.15g}"
    return short_repr(value)


def _leaves(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted place, value) of fields, those of nested configs and of rotary embeddings apart."""
    for name, value in content.items():
        place = f"{before}{name}"
        rope = name in ("rope_scaling", ROPE) or f".{ROPE}." in f".{place}" or ".rope_scaling." in f".{place}"
        if (
            isinstance(value, Mapping)
            and (rope or name.endswith("_config"))
            and not _matches("neutral", name)
        ):
            yield from _leaves(value, f"{place}.")
        else:
            yield place, value


def field_of(place: str) -> str:
    """Return the field that a place holds a value of.

    >>> field_of("text_config.rope_theta"), field_of("rope_scaling.type")
    ('text_config.rope_parameters.rope_theta', 'rope_parameters.rope_type')
    """
    parts = place.split(".")
    nested = 0
    while nested < len(parts) - 1 and parts[nested].endswith("_config"):
        nested += 1
    path = ".".join(parts[nested:])
    moved = ""
    while moved != path:
        moved = path
        for old, new in _table()["place"].items():
            if path == old or path.startswith(f"{old}."):
                path = new + path[len(old) :]
                break
    return ".".join([*parts[:nested], path])


def _split(field: str) -> tuple[str, str]:
    """Return (path of nested configs, field of one config)."""
    start = field.find(f"{ROPE}.")
    cut = start if start >= 0 else field.rfind(".") + 1
    return field[:cut], field[cut:]


def _matches(group: str, name: str) -> bool:
    return _pattern(group).fullmatch(name) is not None


@cache
def _pattern(group: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{p})" for p in _table()[group]["fields"]))


@cache
def _terms() -> Mapping[str, str]:
    return {text: first for first, texts in _table()["terms"].items() for text in texts}


@cache
def _frozen() -> Mapping[str, Mapping[str, Any]]:
    kinds = toml_file("transformers", FROZEN)["class"]
    return {kind: {k: None if v == NULL else v for k, v in of.items()} for kind, of in kinds.items()}


@cache
def _of_any_class() -> frozenset[str]:
    return frozenset(field for of in (*_frozen().values(), _table()["only"]) for field in of)


@cache
def toml_file(*path: str) -> Mapping[str, Any]:
    """Return the content of a TOML file of this folder."""
    import tomllib  # every export imports this module, and few have a config to read

    return tomllib.loads(resources.files(__package__).joinpath(*path).read_text("utf-8"))


_table = partial(toml_file, "hub_config.toml")
