"""Compare the configs of one model: a config.json with the trainer's, the source's and the reference's.

Nothing else would catch a wrong config: no tensor shows rotary angles, an epsilon or an activation. A config
of the hub is compared with another one field by field, all but the neutral ones (`hub_config`), and with a
trainer's by the numbers and terms that both have (`hyperparameters`). What no other config says is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from ckptcore.errors import NameMismatch
from ckptcore.naming.maps.hub_config import (
    TEXT,
    HubFields,
    Stated,
    field_of,
    hub_fields,
    in_shapes,
    nested_like,
    same_value,
)
from ckptcore.naming.maps.hyperparameters import Config, Number, hub_places, is_untold, says
from ckptcore.naming.maps.rope_scaling import same_scaling

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


class _Comparison(NamedTuple):
    """What two configs say by their meaning.

    Attributes:
        fields: Those of a config.json that are confirmed if both say the same.
        same: Whether they do.
        place: Of the first config.
        first: What it says.
        second: What the other one says.
    """

    fields: Iterable[str]
    same: bool
    place: str
    first: str
    second: str


@dataclass
class _Notes:
    """What is noted while configs are compared."""

    contradictions: list[Contradiction] = field(default_factory=list)
    confirmed: set[str] = field(default_factory=set)
    one_sided: set[str] = field(default_factory=set)

    def differs(self, name: str, first: str, second: str) -> None:
        """Note a contradiction."""
        self.contradictions.append(
            Contradiction(name, f"two configs contradict each other: {first}, {second}")
        )


def agreement(config: Config, other_configs: Sequence[Config]) -> Agreement:
    """Compare a config with itself and with other ones.

    Raises:
        NameMismatch: A config says a number that no model has.
    """
    notes = _Notes()
    for first, second in config.fields.clashes if config.fields is not None else ():
        text = f"{config.name} contradicts itself: {first}, {second}, and loaders differ in which they read"
        notes.contradictions.append(Contradiction(second.place, text))
    for other_config in other_configs:
        pair = _hub_pair(config, other_config)
        if pair is not None:
            _compare_fields(config, other_config, *pair, notes)
            continue
        for row in chain.from_iterable(compare(config, other_config) for compare in _BY_MEANING):
            if row.same:
                notes.confirmed.update(row.fields)
            else:
                mine, theirs = f"{config.name} says {row.first}", f"{other_config.name} says {row.second}"
                notes.differs(row.place, mine, theirs)
        _compare_vocabulary(config, other_config, notes)
    open_fields = _open_fields(config.fields) if config.fields is not None else set()
    # What is compared is of the language model, whose config may be within the other one.
    unconfirmed = {f for f in open_fields if notes.confirmed.isdisjoint((f, f.removeprefix(f"{TEXT}.")))}
    return Agreement(
        tuple({c.text: c for c in notes.contradictions}.values()),
        frozenset(notes.confirmed),
        frozenset(notes.one_sided),
        tuple(sorted(unconfirmed)),
    )


def agreed(configs: Sequence[Config]) -> dict[str, tuple[Number, str]]:
    """Return number -> (value, config and key that give it); the first config with a number counts.

    Raises:
        NameMismatch: A config contradicts itself or another one. The message has both values.
    """
    for n, config in enumerate(configs):
        for contradiction in agreement(config, configs[n + 1 :]).contradictions:
            raise NameMismatch(contradiction.text, hint=HINT)
    stated_numbers: dict[str, tuple[Number, str]] = {}
    for config in configs:
        for number, (value, key) in config.numbers.items():
            stated_numbers.setdefault(number, (value, f"{config.name} says {says(key, value)}"))
    return stated_numbers


def _open_fields(fields: HubFields) -> set[str]:
    """Return the fields that shapes do not show, also those that a config leaves to its class."""
    of_class = (f for f, default in fields.defaults.items() if default is not None and fields.counts(f))
    return {f for f in (*fields.functional, *of_class) if not in_shapes(f)}


def _hub_pair(config: Config, other_config: Config) -> tuple[HubFields, HubFields] | None:
    """Return the fields of two configs of one model type; one may be nested in the other."""
    fields, other_fields = config.fields, other_config.fields
    if fields is None or other_fields is None:
        return None
    if fields.model_type == other_fields.model_type:
        return fields, other_fields
    if (part := nested_like(other_config.content, fields.model_type)) is not None:
        return fields, hub_fields(part)
    if (part := nested_like(config.content, other_fields.model_type)) is not None:
        return hub_fields(part), other_fields
    return None


def _compare_fields(
    config: Config, other_config: Config, fields: HubFields, other_fields: HubFields, notes: _Notes
) -> None:
    """Compare all fields of two configs of one model type."""
    mine, theirs = _in_one_form(fields.functional, other_fields.functional)
    unset, their_unset = fields.unset, other_fields.unset
    for name in mine.keys() | theirs.keys():
        stated, their_stated = mine.get(name), theirs.get(name)
        first = stated or _taken(name, unset, their_stated)
        second = their_stated or _taken(name, their_unset, stated)
        if first is None or second is None:
            if name in fields.values and name in other_fields.values:
                continue  # it counts in one of them alone, by a field that is compared itself
            notes.one_sided.add(name)
        elif same_value(first.value, second.value):
            notes.confirmed.add(name)
        elif not name.endswith("vocab_size") and fields.reads(name):
            notes.differs(first.place, f"{config.name} says {first}", f"{other_config.name} says {second}")


def _in_one_form(
    fields: Mapping[str, Stated], other: Mapping[str, Stated]
) -> tuple[Mapping[str, Stated], Mapping[str, Stated]]:
    """Return the fields of two configs, those of the language model among the others where one has them so.

    Earlier releases of transformers wrote no config for it.
    """
    both = fields, other
    if len({any(f.startswith(f"{TEXT}.") for f in each) for each in both}) == 1:
        return both
    first, second = ({f.removeprefix(f"{TEXT}."): s for f, s in each.items()} | _own(each) for each in both)
    return first, second


def _own(fields: Mapping[str, Stated]) -> dict[str, Stated]:
    return {f: s for f, s in fields.items() if not f.startswith(f"{TEXT}.")}


def _taken(name: str, unset: Mapping[str, Any], other: Stated | None) -> Stated | None:
    """Return what loaders take for a field that a config lacks, and the other one has; None if unknown."""
    is_null = other is not None and other.value is None
    if unset.get(name) is None and not (name in unset and is_null):
        return None
    return Stated(unset[name], f"{name} (unset, loaders take)")


def _types(config: Config, other_config: Config) -> Iterator[_Comparison]:
    """Yield the types of configs of two classes that are known, and neither of which has the other."""
    of = config.fields, other_config.fields
    kinds = [f"model_type = {f.model_type}" for f in of if f is not None and f.of_class is not None]
    if len(kinds) == 2:
        yield _Comparison((), False, "model_type", *kinds)


def _numbers(config: Config, other_config: Config) -> Iterator[_Comparison]:
    for number, (value, key) in config.numbers.items():
        if number in _NOT_COMPARED or number not in other_config.numbers:
            continue
        second, place = other_config.numbers[number]
        same = value == second or (number == _WINDOW and abs(value - second) == 1 and value and second)
        yield _Comparison(_names(config, key, number), bool(same), key, says(key, value), says(place, second))


def _terms(config: Config, other_config: Config) -> Iterator[_Comparison]:
    for name, (text, key) in config.terms.items():
        if name not in other_config.terms:
            continue
        second, place = other_config.terms[name]
        if " = " in place and is_untold(other_config.world, name, _type_of(config)):
            continue
        same = same_value(text, second)
        yield _Comparison(_names(config, key, name), same, key, says(key, text), says(place, second))


def _routing(config: Config, other_config: Config) -> Iterator[_Comparison]:
    """Yield whether the weights of a token's experts sum to 1."""
    sums, other_sums = config.sums_to_one, other_config.sums_to_one
    if sums is not None and other_sums is not None:
        yield _Comparison([_ROUTING], sums[0] == other_sums[0], _ROUTING, sums[1], other_sums[1])


def _sliding(config: Config, other_config: Config) -> Iterator[_Comparison]:
    """Yield which layers attend to a window of tokens."""
    if is_untold(other_config.world, "sliding_layers", _type_of(config)):
        return
    layers, other_layers = config.sliding_layers, other_config.sliding_layers
    if layers is not None and other_layers is not None:
        fields = ("layer_types", "max_window_layers")
        yield _Comparison(fields, layers[0] == other_layers[0], fields[0], layers[1], other_layers[1])


def _scaling(config: Config, other_config: Config) -> Iterator[_Comparison]:
    scaling, other_scaling = config.rope_scaling, other_config.rope_scaling
    if scaling is not None and other_scaling is not None:
        shared = scaling.parameters.keys() & other_scaling.parameters.keys()
        fields = (_ROPE_TYPE, *(f"rope_parameters.{k}" for k in shared))
        same = same_scaling(scaling, other_scaling)
        yield _Comparison(fields, same, _ROPE_TYPE, scaling.text, other_scaling.text)


def _type_of(config: Config) -> str:
    return config.fields.model_type if config.fields is not None else ""


def _compare_vocabulary(config: Config, other_config: Config, notes: _Notes) -> None:
    """Require that no vocabulary is smaller than the tokens of a trainer: later rows are no padding."""
    if config.fields is not None and other_config.fields is not None:
        return
    for vocab_config, tokens_config in ((config, other_config), (other_config, config)):
        vocab, tokens = vocab_config.numbers.get("vocab"), tokens_config.numbers.get("tokens")
        if vocab is not None and tokens is not None and vocab[0] < tokens[0]:
            vocab_text = f"{vocab_config.name} says {vocab[1]} = {vocab[0]}"
            notes.differs(
                vocab[1],
                vocab_text,
                f"and later rows are not padding: {tokens_config.name} says {tokens[1]} = {tokens[0]}",
            )


_BY_MEANING = (_types, _numbers, _terms, _routing, _sliding, _scaling)


def _names(config: Config, key: str, name: str) -> Iterator[str]:
    """Yield the fields of a config.json that a number or a word of it is in."""
    if config.fields is not None:
        place = field_of(key.partition(" ")[0])
        yield from (f for f in (place, *hub_places(name)) if f in config.fields.values)
