"""Read a model's numbers from configs, whoever wrote them, and hold configs against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import isfinite
from typing import Any

from ckptcore.errors import NameMismatch
from ckptcore.utils.text import short_repr

Number = int | float
# What shapes do not tell, so that a wrong config would go unnoticed. A vocabulary may be padded in one config
# and not in the other.
HELD_AGAINST = (
    "layer",
    "hidden",
    "heads",
    "kv_heads",
    "experts",
    "rope_dim",
    "nope_dim",
    "v_dim",
    "rope_theta",
    "rope_part",
    "norm_eps",
    "embedding_scale",
)
# What no model has none of: a config that says 0 would make a map drop every element.
_POSITIVE = frozenset({"layer", "hidden", "heads", "kv_heads", "head_dim", "vocab"})

# Sizes that are called the same in every map.
NUMBERS = frozenset({"layer", "hidden", "heads", "kv_heads", "head_dim", "vocab", "experts"})


@dataclass(frozen=True)
class Config:
    """What one config says of a model.

    Attributes:
        name: Where it is, for messages.
        world: Whose spelling it has.
        content: The config.
    """

    name: str
    world: str
    content: Mapping[str, Any]

    @property
    def numbers(self) -> dict[str, tuple[Number, str]]:
        """Number -> (its value, the key that says it).

        Raises:
            NameMismatch: For a value that no model can have, as -1 layers.
        """
        found: dict[str, tuple[Number, str]] = {}
        below = self.content.get("text_config") if self.world == "hf-hub" else None
        roots = [self.content, *([below] if isinstance(below, Mapping) else [])]
        for number, places in _config_keys()[self.world].items():
            for place in places:
                if place.startswith("|"):
                    held = found.get(place[1:])
                    if held is not None:
                        found[number] = held
                    break
                said = next((v for root in roots if (v := _at(root, place)) is not None), None)
                if said is not None:
                    found[number] = self._number(number, place, said), place
                    break
        if self.world == "megatron":
            _of_megatron(self.content, found)
        return found

    def _number(self, number: str, place: str, said: Any) -> Number:
        """What a place says, as a number of a model."""
        able = not isinstance(said, str) and (
            isfinite(said) if isinstance(said, float) else 0 <= said < 1 << 31
        )  # no model has more of anything
        if not able or (number in _POSITIVE and said <= 0):
            raise NameMismatch(
                f"{self.name} says {place} = {short_repr(said)}, which no model has",
                hint="Try the config of the model that was trained",
            )
        return said  # type: ignore[no-any-return]  # no text: that is not able

    @property
    def architectures(self) -> tuple[str, ...]:
        """What the config calls its architecture: model type and class names; none but of transformers."""
        if self.world != "hf-hub":
            return ()
        kind, classes = self.content.get("model_type"), self.content.get("architectures")
        names = [kind, *(classes if isinstance(classes, Sequence) else [])]
        return tuple(n for n in names if isinstance(n, str))

    def at(self, place: str) -> Any:
        """The value at a dotted path, None where there is none."""
        return _below(self.content, place)


def agreed(configs: Sequence[Config]) -> dict[str, tuple[Number, str]]:
    """Number -> (value, config and key that say it); the first config that says one counts.

    Raises:
        NameMismatch: With both values, where two configs differ in what shapes do not tell, and where a
            vocabulary is smaller than what the trainer had tokens for.
    """
    found: dict[str, tuple[Number, str]] = {}
    for config in configs:
        for number, (value, key) in config.numbers.items():
            said = f"{config.name} says {key} = {value:.15g}"
            first = found.setdefault(number, (value, said))
            if number in HELD_AGAINST and first[0] != value:
                raise NameMismatch(
                    f"two configs contradict each other: {first[1]}, {said}",
                    hint="Try the config of the model that was trained",
                )
    vocab, tokens = found.get("vocab"), found.get("tokens")
    if vocab is not None and tokens is not None and vocab[0] < tokens[0]:
        raise NameMismatch(
            f"two configs contradict each other: {vocab[1]}, and the rows behind are no padding: {tokens[1]}",
            hint="Try the config of the model that was trained",
        )
    return found


def _of_megatron(content: Mapping[str, Any], found: dict[str, tuple[Number, str]]) -> None:
    """Megatron has as many query groups as heads, whatever ``num_query_groups`` says, without the option."""
    if "heads" in found and ("kv_heads" not in found or content.get("group_query_attention") is False):
        found["kv_heads"] = found["heads"]


def _at(root: Mapping[str, Any], place: str) -> Number | str | None:
    """The number or text at a place; None for anything else, which may be one value for each layer."""
    held = _below(root, place)
    return None if isinstance(held, bool) or not isinstance(held, (int, float, str)) else held


def _below(root: Mapping[str, Any], place: str) -> Any:
    held: Any = root
    for key in place.split("."):
        held = held.get(key) if isinstance(held, Mapping) else None
    return held


@cache
def _config_keys() -> Mapping[str, Mapping[str, Sequence[str]]]:
    import tomllib  # every export imports this module, and few have a config to read

    return tomllib.loads((resources.files(__package__) / "numbers.toml").read_text("utf-8"))
