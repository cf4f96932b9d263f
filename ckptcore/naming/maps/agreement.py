"""Compare the configs of one model: a config.json with the trainer's, the source's and the reference's.

Nothing else would catch a wrong config: no tensor shows rotary angles, an epsilon or an activation. A config
of the hub is compared with another one field by field, all but the neutral ones (`hub_config`), and with a
trainer's by the numbers and terms that both have (`hyperparameters`). What no other config says is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        for compare in _BY_MEANING:
            compare(config, other_config, notes)
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


def _compare_types(config: Config, other_config: Config, notes: _Notes) -> None:
    """Require that two configs of classes that are known, and neither of which has the other, are of one."""
    fields, other_fields = config.fields, other_config.fields
    if (
        fields is not None
        and other_fields is not None
        and None not in (fields.of_class, other_fields.of_class)
    ):
        says = [
            f"{c.name} says model_type = {of.model_type}"
            for c, of in ((config, fields), (other_config, other_fields))
        ]
        notes.differs("model_type", *says)


def _compare_numbers(config: Config, other_config: Config, notes: _Notes) -> None:
    for number, (value, key) in config.numbers.items():
        if number in _NOT_COMPARED or number not in other_config.numbers:
            continue
        second, place = other_config.numbers[number]
        if value == second or (number == _WINDOW and abs(value - second) == 1 and value and second):
            notes.confirmed.update(_names(config, key, number))
        else:
            notes.differs(
                key,
                f"{config.name} says {says(key, value)}",
                f"{other_config.name} says {says(place, second)}",
            )


def _compare_terms(config: Config, other_config: Config, notes: _Notes) -> None:
    for name, (text, key) in config.terms.items():
        if name not in other_config.terms:
            continue
        second, place = other_config.terms[name]
        kind = config.fields.model_type if config.fields is not None else ""
        if " = " in place and is_untold(other_config.world, name, kind):
            continue
        if same_value(text, second):
            notes.confirmed.update(_names(config, key, name))
        else:
            notes.differs(
                key,
                f"{config.name} says {says(key, text)}",
                f"{other_config.name} says {says(place, second)}",
            )


def _compare_routing(config: Config, other_config: Config, notes: _Notes) -> None:
    """Compare whether the weights of a token's experts sum to 1."""
    sums, other_sums = config.sums_to_one, other_config.sums_to_one
    if sums is None or other_sums is None:
        return
    if sums[0] == other_sums[0]:
        notes.confirmed.add(_ROUTING)
    else:
        notes.differs(_ROUTING, f"{config.name} says {sums[1]}", f"{other_config.name} says {other_sums[1]}")


def _compare_sliding(config: Config, other_config: Config, notes: _Notes) -> None:
    """Compare which layers attend to a window of tokens."""
    kind = config.fields.model_type if config.fields is not None else ""
    if is_untold(other_config.world, "sliding_layers", kind):
        return
    layers, other_layers = config.sliding_layers, other_config.sliding_layers
    if layers is None or other_layers is None:
        return
    if layers[0] == other_layers[0]:
        notes.confirmed.update(("layer_types", "max_window_layers"))
    else:
        notes.differs(
            "layer_types", f"{config.name} says {layers[1]}", f"{other_config.name} says {other_layers[1]}"
        )


def _compare_scaling(config: Config, other_config: Config, notes: _Notes) -> None:
    scaling, other_scaling = config.rope_scaling, other_config.rope_scaling
    if scaling is None or other_scaling is None:
        return
    if same_scaling(scaling, other_scaling):
        shared = scaling.parameters.keys() & other_scaling.parameters.keys()
        notes.confirmed |= {_ROPE_TYPE, *(f"rope_parameters.{k}" for k in shared)}
    else:
        notes.differs(_ROPE_TYPE, scaling.text, other_scaling.text)


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
