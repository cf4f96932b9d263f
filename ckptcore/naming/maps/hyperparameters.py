"""Read a model's numbers and terms from the configs of all trainers (``numbers.toml``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import isclose, isfinite
from typing import TYPE_CHECKING, Any

from ckptcore.errors import NameMismatch
from ckptcore.naming.maps.hub_config import (
    TEXT,
    HubFields,
    Stated,
    hub_fields,
    in_shapes,
    rendered,
    same_value,
    toml_file,
)
from ckptcore.naming.worlds import HUB
from ckptcore.utils.text import short_repr

if TYPE_CHECKING:
    from ckptcore.naming.maps.rope_scaling import RopeScaling

Number = int | float
# Numbers that no model has 0 of: a map would drop every element.
_POSITIVE = frozenset({"layer", "hidden", "heads", "kv_heads", "head_dim", "vocab"})
# Megatron stores these, with their defaults, for models without experts, too.
_OF_ROUTERS = ("experts_of_token", "expert_scale", "expert_groups", "groups_of_token")
_WINDOW = "window"
_LAYERS = "layer_types"
# Lists with an entry for each layer, and the pattern of hybrid models before transformers 5.
_LAYER_KINDS = ("layers_block_type", _LAYERS, "hybrid_override_pattern")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST_LAYERS = 4096  # that are compared one by one
_SKIPPED = "window_attn_skip_freq"  # Megatron's, of layers whose attention is full
_KINDS, _LOCAL = "model.block_pattern", "local"  # OLMo-core's, of blocks with and without a window
_INTERLEAVED = "rope_interleaved"  # nanotron's: whether the dims of a rotary pair are neighbours
_SCALE = "softmax_scale"  # Megatron's, for None: 1 / sqrt(kv_channels)
_TABLES = ("null", "unset", "terms", "flags", "untold")  # beside the numbers of a world
_MISSING = object()
_NO = "no "

# Sizes that have one name in every map.
NUMBERS = frozenset({"layer", "hidden", "heads", "kv_heads", "head_dim", "vocab", "experts"})


@dataclass(frozen=True)
class Config:
    """One config of a model.

    Attributes:
        name: Name for messages.
        world: World whose keys it has.
        content: Its keys and values.
    """

    name: str
    world: str
    content: Mapping[str, Any]

    @cached_property
    def fields(self) -> HubFields | None:
        """The fields of a config.json; None for the config of a trainer."""
        return hub_fields(self.content) if self.world == HUB else None

    @cached_property
    def numbers(self) -> dict[str, tuple[Number, str]]:
        """Number -> (value, key of the config).

        Raises:
            NameMismatch: A value is impossible, as -1 layers.
        """
        table = _config_keys()[self.world]
        nulls: Mapping[str, Number] = table.get("null", {})
        unset: Mapping[str, Number] = table.get("unset", {})
        stated_numbers: dict[str, tuple[Number, str]] = {}
        for number, places in table.items():
            if number in _TABLES:
                continue
            for place in [*places, ""]:
                stated = self._stated(place) if place else self._of_class(places, number in nulls)
                if stated is not None and number in unset and stated.value == unset[number]:
                    continue
                if place.startswith("|"):
                    stated_numbers |= (
                        {number: stated_numbers[place[1:]]} if place[1:] in stated_numbers else {}
                    )
                elif stated is not None and stated.value is None and number in nulls:
                    suffix = "" if stated.place.startswith(_NO) else " = None"
                    stated_numbers[number] = nulls[number], stated.place + suffix
                elif stated is not None and (value := _scalar(stated.value)) is not None:
                    stated_numbers[number] = self._number(number, stated.place, value), stated.place
                if number in stated_numbers:
                    break
        if self.fields is not None and "layer" not in stated_numbers:
            stated_numbers |= _layers_of_kinds(self.fields)
        if self.world == "megatron":
            _of_megatron(self.content, stated_numbers)
        if self.world == "olmo_core" and "head_dim" in stated_numbers:
            # Its attention is scaled by the width of a head, whatever else a config says.
            stated_numbers["query_scalar"] = stated_numbers["head_dim"]
        if self.world == "nanotron":
            _of_nanotron(self.content, stated_numbers)
        return stated_numbers

    @cached_property
    def terms(self) -> dict[str, tuple[str, str]]:
        """Word -> (text, key of the config), as ``activation``."""
        table = _config_keys()[self.world]
        stated_terms: dict[str, tuple[str, str]] = {}
        for name, places in table.get("terms", {}).items():
            stated = [*map(self._stated, places), self._of_class(places, False)]
            text = next((s for s in stated if s is not None and isinstance(s.value, str)), None)
            if text is not None:
                stated_terms[name] = text.value, text.place
        for name, flags in table.get("flags", {}).items():
            stored = {f: value for f in flags if isinstance(value := self.at(f), bool)}
            flag = next((f for f, value in stored.items() if value), "")
            # The last flag is "" for none of them: true only of a release that has the one before it.
            if name not in stated_terms and (flag or [*flags][-2] in stored):
                stated_terms[name] = (
                    flags[flag],
                    f"{flag} = True" if flag else f"{' = '.join(stored)} = False",
                )
        if self.world == "megatron" and "experts" not in self.numbers:
            stated_terms.pop("router_score", None)
        return stated_terms

    def _stated(self, place: str) -> Stated | None:
        """Return what the config says at a place; None where it has no such place, or the class none."""
        if place.startswith("|"):
            return None
        if self.fields is None:
            value = value_at(self.content, place, _MISSING)
            return None if value is _MISSING else Stated(value, place)
        stated, has = self.fields.get(place), self.fields.of_class
        if stated is None or (has is not None and "." not in place and place not in has):
            return None
        nested = f"{TEXT}.{place}"
        field = nested if nested in self.fields.values else place
        return stated if self.fields.counts(field) else Stated(None, stated.place)

    def _of_class(self, places: Sequence[str], is_null: bool) -> Stated | None:
        """Return the default of a config.json's class; the value is None where it has no such field."""
        has = None if self.fields is None else self.fields.of_class
        if has is None or self.fields is None:
            return None
        place = next((p for p in places if p in has), "")
        if not place:
            return Stated(None, f"{_NO}{places[0]}") if is_null else None
        if in_shapes(place):
            return None  # a map needs the size of this model
        if not self.fields.counts(place):
            return Stated(None, place)
        return Stated(has[place], f"{place} (unset, the class has)")

    def _number(self, number: str, place: str, value: Any) -> Number:
        """Return the value at a place as a number of a model."""
        able = not isinstance(value, str) and (
            isfinite(value) if isinstance(value, float) else 0 <= value < 1 << 31
        )  # no model has more of anything
        if not able or (number in _POSITIVE and value <= 0):
            raise NameMismatch(
                f"{self.name} says {place} = {short_repr(value)}, which no model has",
                hint="try the config of the model that was trained",
            )
        return value  # type: ignore[no-any-return]  # text is not valid

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """How it scales rotary embeddings; None if it does not say."""
        from ckptcore.naming.maps.rope_scaling import BY_WORLD, rope_scaling_of_hub

        if self.fields is not None:
            return rope_scaling_of_hub(self.fields)
        read = BY_WORLD.get(self.world)
        return None if read is None else read(self.content)

    @property
    def sliding_layers(self) -> tuple[tuple[bool, ...], str] | None:
        """Which layers attend to a window of tokens, and the field that says so; None if none does.

        In Megatron every layer does, but each of a number, or those that a list has 0 of
        (core/transformer/utils.py, `is_layer_window_attention`).
        """
        layers, window = (self.numbers.get(name) for name in ("layer", _WINDOW))
        if layers is None or window is None or layers[0] > _MOST_LAYERS:
            return None
        count = int(layers[0])
        if self.fields is not None:
            stated, has = self._stated(_LAYERS), self.fields.of_class
            if stated is None or not isinstance(stated.value, (list, tuple)):
                all_slide = window[0] and has is not None and _LAYERS not in has
                return ((True,) * count, says(window[1], window[0])) if all_slide else None
            sliding = tuple(kind == _SLIDING for kind in stated.value)
            compared = all(kind in (_SLIDING, _FULL) for kind in stated.value)
            return (sliding, str(stated)) if compared and window[0] else None
        kinds = self.at(_KINDS) if self.world == "olmo_core" else None
        if isinstance(kinds, (list, tuple)) and kinds:
            sliding = tuple(kinds[layer % len(kinds)] == _LOCAL for layer in range(count))
            return sliding, f"{_KINDS} = {short_repr(kinds)}"
        if self.world != "megatron" or _SKIPPED not in self.content or not window[0]:
            return None
        skipped = self.content[_SKIPPED]
        if isinstance(skipped, (list, tuple)):
            sliding = tuple(map(bool, skipped))
        elif skipped is None or (type(skipped) is int and skipped > 0):
            sliding = tuple(not skipped or layer % skipped != 0 for layer in range(1, count + 1))
        else:
            return None
        return (sliding, f"{_SKIPPED} = {short_repr(skipped)}") if len(sliding) == count else None

    @property
    def architectures(self) -> tuple[str, ...]:
        """Model type and class names in a config of transformers; none for other configs."""
        if self.fields is None:
            return ()
        return tuple(n for n in (self.fields.model_type, *self.fields.architectures) if n)

    @property
    def sums_to_one(self) -> tuple[bool, str] | None:
        """Whether the weights of a token's experts sum to 1, and the field that says so; None if none does.

        Megatron's do with sigmoid scores of several experts, or if the softmax is taken after the choice
        (moe_utils.py, `topk_routing_with_score_function`).
        """
        if self.fields is not None:
            key = "norm_topk_prob"
            stated = self._stated(key) or self._of_class([key], False)
            return (
                (stated.value, f"{key} = {stated.value}")
                if stated and isinstance(stated.value, bool)
                else None
            )
        if self.world != "megatron":
            return None
        key, score = "moe_router_pre_softmax", self.content.get("moe_router_score_function")
        if score == "sigmoid":
            return self.content.get("moe_router_topk") != 1, f"moe_router_score_function = {score}"
        value = self.content.get(key)
        return (not value, f"{key} = {value}") if isinstance(value, bool) else None

    def at(self, place: str) -> Any:
        """Return the value at a dotted path, or None, as for a scale that is what it is without one."""
        value = value_at(self.content, place)
        if self.world == "megatron" and place == _SCALE and isinstance(value, float):
            usual = _usual_scale(self.content)
            return None if usual and isclose(value, usual, rel_tol=1e-6) else value
        return value


def says(place: str, value: Any) -> str:
    """Return a place and its value as a clause; the place alone where it has one, as a flag that is on."""
    return place if " = " in place or place.startswith(_NO) else f"{place} = {rendered(value)}"


def is_untold(world: str, name: str, model_type: str) -> bool:
    """Return whether the flags of a trainer do not tell a term of a model type."""
    return model_type in _config_keys()[world].get("untold", {}).get(name, ())


def stated_in(
    world: str, numbers: Mapping[str, Number], terms: Mapping[str, str], model_type: str
) -> dict[str, Any]:
    """Return how a trainer's config states numbers and terms: the way back of `Config.numbers` and `terms`.

    What it states by several values, as the sides of a window, is left out.

    Args:
        world: The trainer's.
        numbers: Number -> value.
        terms: Term -> text.
        model_type: Of the config.json that says them.
    """
    table = _config_keys()[world]
    content: dict[str, Any] = {}
    for number, value in numbers.items():
        place = next(iter(table.get(number, ())), "") if number not in _TABLES else ""
        if place and "." not in place:
            content[place] = None if table.get("null", {}).get(number) == value else value
    for name, text in terms.items():
        content |= {place: text for place in table.get("terms", {}).get(name, ()) if "." not in place}
        if not is_untold(world, name, model_type):
            flags = table.get("flags", {}).get(name, {})
            content |= {flag: same_value(says_on, text) for flag, says_on in flags.items() if flag}
    return content


def hub_places(name: str) -> tuple[str, ...]:
    """Return the fields of a config.json that have a number or a word."""
    table = _config_keys()[HUB]
    return tuple(table.get(name) or table["terms"][name])


def _of_megatron(content: Mapping[str, Any], numbers: dict[str, tuple[Number, str]]) -> None:
    """Set query groups and scales as Megatron does without the options; leave unused routers out."""
    if "heads" in numbers and ("kv_heads" not in numbers or content.get("group_query_attention") is False):
        numbers["kv_heads"] = numbers["heads"]
    usual = _usual_scale(content)
    if _SCALE in content and "attention_scale" not in numbers and usual:
        numbers["attention_scale"] = (usual, "1 / sqrt(kv_channels)")
    if "experts" not in numbers:
        for number in _OF_ROUTERS:
            numbers.pop(number, None)


def _of_nanotron(content: Mapping[str, Any], numbers: dict[str, tuple[Number, str]]) -> None:
    """Set what nanotron's models derive: the dims of a head, and which of them are a rotary pair."""
    if type(content.get(_INTERLEAVED)) is bool:
        inner = 2 if content[_INTERLEAVED] else 1
        numbers["rotary_inner"] = inner, f"{_INTERLEAVED} = {content[_INTERLEAVED]}"
    hidden, heads = (numbers.get(name, (0, ""))[0] for name in ("hidden", "heads"))
    if hidden and heads and hidden % heads == 0:
        numbers["head_dim"] = int(hidden // heads), "hidden_size / num_attention_heads"


def _usual_scale(content: Mapping[str, Any]) -> float:
    """Return what Megatron multiplies scores of attention with unless a scale is given, or 0.0."""
    channels = content.get("kv_channels")
    return channels**-0.5 if isinstance(channels, int) and channels > 0 else 0.0


def _scalar(value: Any) -> Number | str | None:
    """Return a number or text; None for anything else, as a list of one value a layer."""
    return None if isinstance(value, bool) or not isinstance(value, (int, float, str)) else value


def _layers_of_kinds(fields: HubFields) -> dict[str, tuple[Number, str]]:
    """Return the number of layers of a class that has no field for it, but a list of their kinds."""
    for place in _LAYER_KINDS:
        stated = fields.get(place)
        if stated is not None and isinstance(stated.value, (list, tuple, str)) and stated.value:
            return {"layer": (len(stated.value), stated.place)}
    return {}


def value_at(root: Mapping[str, Any], place: str, missing: Any = None) -> Any:
    """Return the value at a dotted path in a config; ``missing`` where it has no such place."""
    value: Any = root
    for key in place.split("."):
        if isinstance(value, (list, tuple)) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key, missing) if isinstance(value, Mapping) else missing
    return value


_config_keys = partial(toml_file, "numbers.toml")
