"""Compare the configs of one model: a config.json with the trainer's, the source's and the reference's.

Nothing else would catch a wrong config: no tensor shows rotary angles, an epsilon or an activation. A config
of the hub is compared with another one field by field, all but the neutral ones (`hub_config`), and with a
trainer's by the numbers and terms that both have (`numbers`). What no other config says is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

from ckptcore.errors import NameMismatch
from ckptcore.naming.maps.hub_config import (
    HubFields,
    Stated,
    field_of,
    hub_fields,
    in_shapes,
    nested_like,
    same_value,
)
from ckptcore.naming.maps.numbers import Config, Number, hub_places, is_untold, says
from ckptcore.naming.maps.rope_scaling import same_scaling
from ckptcore.utils.dataclass import dataclass

HINT = "try the config of the model that was trained"
# Numbers that configs may differ in: a vocabulary may be padded in one and not in the other; shapes and the
# other numbers show the rest.
_NOT_COMPARED = frozenset({"vocab", "tokens", "head_dim", "q_rank", "kv_rank", "dense_layers", "mtp_layers"})
_WINDOW = "window"  # of tokens before the own one, or with it
_ROUTING = "norm_topk_prob"
_ROPE_TYPE = "rope_parameters.rope_type"


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two places that differ. field: of a config.json. text: what both say."""

    field: str
    text: str


@dataclass(frozen=True)
class Agreement:
    """What other configs say to a config.

    Attributes:
        contradictions: Fields of which another config, or another place of the same one, says something else.
        confirmed: Fields of which another config says the same.
        one_sided: Fields that only one of two configs has, and whose default is unknown.
        unconfirmed: Fields that change what the model computes, and that nothing confirms.
    """

    contradictions: tuple[Contradiction, ...] = ()
    confirmed: frozenset[str] = frozenset()
    one_sided: frozenset[str] = frozenset()
    unconfirmed: tuple[str, ...] = ()


@dataclass
class _Notes:
    """What is noted while configs are compared."""

    contradictions: list[Contradiction] = field(default_factory=list)
    confirmed: set[str] = field(default_factory=set)
    one_sided: set[str] = field(default_factory=set)

    def differs(self, name: str, one: str, other: str) -> None:
        """Note a contradiction."""
        self.contradictions.append(Contradiction(name, f"two configs contradict each other: {one}, {other}"))


def agreement(config: Config, others: Sequence[Config]) -> Agreement:
    """Compare a config with itself and with other ones.

    Raises:
        NameMismatch: A config says a number that no model has.
    """
    notes = _Notes()
    for one, two in config.fields.clashes if config.fields is not None else ():
        text = f"{config.name} contradicts itself: {one}, {two}, and loaders differ in which they read"
        notes.contradictions.append(Contradiction(two.place, text))
    for other in others:
        pair = _hub_pair(config, other)
        if pair is not None:
            _compare_fields(config, other, *pair, notes)
            continue
        for compare in _BY_MEANING:
            compare(config, other, notes)
    own = _open_fields(config.fields) if config.fields is not None else set()
    return Agreement(
        tuple({c.text: c for c in notes.contradictions}.values()),
        frozenset(notes.confirmed),
        frozenset(notes.one_sided),
        tuple(sorted(own - notes.confirmed)),
    )


def agreed(configs: Sequence[Config]) -> dict[str, tuple[Number, str]]:
    """Return number -> (value, config and key that give it); the first config with a number counts.

    Raises:
        NameMismatch: A config contradicts itself or another one. The message has both values.
    """
    for n, config in enumerate(configs):
        for contradiction in agreement(config, configs[n + 1 :]).contradictions:
            raise NameMismatch(contradiction.text, hint=HINT)
    found: dict[str, tuple[Number, str]] = {}
    for config in configs:
        for number, (value, key) in config.numbers.items():
            found.setdefault(number, (value, f"{config.name} says {says(key, value)}"))
    return found


def _open_fields(fields: HubFields) -> set[str]:
    """Return the fields that shapes do not show, also those that a config leaves to its class."""
    of_class = (
        f for f, default in (fields.of_class or {}).items() if default is not None and fields.counts(f)
    )
    return {f for f in (*fields.functional, *of_class) if not in_shapes(f)}


def _hub_pair(config: Config, other: Config) -> tuple[HubFields, HubFields] | None:
    """Return the fields of two configs of one model type; one may be nested in the other."""
    one, two = config.fields, other.fields
    if one is None or two is None:
        return None
    if one.model_type == two.model_type:
        return one, two
    if (part := nested_like(other.content, one.model_type)) is not None:
        return one, hub_fields(part)
    if (part := nested_like(config.content, two.model_type)) is not None:
        return hub_fields(part), two
    return None


def _compare_fields(config: Config, other: Config, one: HubFields, two: HubFields, notes: _Notes) -> None:
    """Compare all fields of two configs of one model type."""
    mine, theirs = one.functional, two.functional
    defaults = one.of_class or {}
    for name in mine.keys() | theirs.keys():
        first, second = mine.get(name), theirs.get(name)
        if defaults.get(name) is not None or (name in defaults and _is_null(first or second)):
            of_class = Stated(defaults[name], f"{name} (unset, the class has)")
            first, second = first or of_class, second or of_class
        if first is None or second is None:
            if name in one.values and name in two.values:
                continue  # it counts in one of them alone, by a field that is compared itself
            notes.one_sided.add(name)
        elif same_value(first.value, second.value):
            notes.confirmed.add(name)
        elif not name.endswith("vocab_size") and one.reads(name):
            notes.differs(first.place, f"{config.name} says {first}", f"{other.name} says {second}")


def _is_null(stated: Stated | None) -> bool:
    return stated is not None and stated.value is None


def _compare_types(config: Config, other: Config, notes: _Notes) -> None:
    """Require that two configs of classes that are known, and neither of which has the other, are of one."""
    one, two = config.fields, other.fields
    if one is not None and two is not None and None not in (one.of_class, two.of_class):
        says = [f"{c.name} says model_type = {of.model_type}" for c, of in ((config, one), (other, two))]
        notes.differs("model_type", *says)


def _compare_numbers(config: Config, other: Config, notes: _Notes) -> None:
    for number, (value, key) in config.numbers.items():
        if number in _NOT_COMPARED or number not in other.numbers:
            continue
        second, place = other.numbers[number]
        if value == second or (number == _WINDOW and abs(value - second) == 1 and value and second):
            notes.confirmed.update(_names(config, key, number))
        else:
            notes.differs(
                key, f"{config.name} says {says(key, value)}", f"{other.name} says {says(place, second)}"
            )


def _compare_terms(config: Config, other: Config, notes: _Notes) -> None:
    for name, (text, key) in config.terms.items():
        if name not in other.terms:
            continue
        second, place = other.terms[name]
        kind = config.fields.model_type if config.fields is not None else ""
        if " = " in place and is_untold(other.world, name, kind):
            continue
        if same_value(text, second):
            notes.confirmed.update(_names(config, key, name))
        else:
            notes.differs(
                key, f"{config.name} says {says(key, text)}", f"{other.name} says {says(place, second)}"
            )


def _compare_routing(config: Config, other: Config, notes: _Notes) -> None:
    """Compare whether the weights of a token's experts sum to 1."""
    one, two = config.sums_to_one, other.sums_to_one
    if one is None or two is None:
        return
    if one[0] == two[0]:
        notes.confirmed.add(_ROUTING)
    else:
        notes.differs(_ROUTING, f"{config.name} says {one[1]}", f"{other.name} says {two[1]}")


def _compare_sliding(config: Config, other: Config, notes: _Notes) -> None:
    """Compare which layers attend to a window of tokens."""
    kind = config.fields.model_type if config.fields is not None else ""
    if is_untold(other.world, "sliding_layers", kind):
        return
    one, two = config.sliding_layers, other.sliding_layers
    if one is None or two is None:
        return
    if one[0] == two[0]:
        notes.confirmed.update(("layer_types", "max_window_layers"))
    else:
        notes.differs("layer_types", f"{config.name} says {one[1]}", f"{other.name} says {two[1]}")


def _compare_scaling(config: Config, other: Config, notes: _Notes) -> None:
    one, two = config.rope_scaling, other.rope_scaling
    if one is None or two is None:
        return
    if same_scaling(one, two):
        shared = one.parameters.keys() & two.parameters.keys()
        notes.confirmed |= {_ROPE_TYPE, *(f"rope_parameters.{k}" for k in shared)}
    else:
        notes.differs(_ROPE_TYPE, one.text, two.text)


def _compare_vocabulary(config: Config, other: Config, notes: _Notes) -> None:
    """Require that no vocabulary is smaller than the tokens of a trainer: later rows are no padding."""
    if config.fields is not None and other.fields is not None:
        return
    for one, two in ((config, other), (other, config)):
        vocab, tokens = one.numbers.get("vocab"), two.numbers.get("tokens")
        if vocab is not None and tokens is not None and vocab[0] < tokens[0]:
            mine = f"{one.name} says {vocab[1]} = {vocab[0]}"
            notes.differs(
                vocab[1], mine, f"and later rows are not padding: {two.name} says {tokens[1]} = {tokens[0]}"
            )


_BY_MEANING = (
    _compare_types,
    _compare_numbers,
    _compare_terms,
    _compare_routing,
    _compare_sliding,
    _compare_scaling,
    _compare_vocabulary,
)


def _names(config: Config, key: str, name: str) -> Iterator[str]:
    """Yield the fields of a config.json that a number or a word of it is in."""
    if config.fields is not None:
        place = field_of(key.partition(" ")[0])
        yield from (f for f in (place, *hub_places(name)) if f in config.fields.values)
