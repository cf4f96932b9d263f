"""Read a model's numbers from the configs of all trainers, and compare these configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from math import isclose, isfinite
from typing import Any

from ckptcore.errors import NameMismatch
from ckptcore.naming.maps.rope_scaling import (
    RopeScaling,
    require_same_scaling,
    rope_scaling_of_hub,
    rope_scaling_of_megatron,
)
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.text import short_repr

Number = int | float
# Numbers that shapes do not give: nothing else would catch a wrong config. A vocabulary may be padded in one
# config and not in the other.
COMPARED = (
    "layer",
    "hidden",
    "heads",
    "kv_heads",
    "experts",
    "experts_of_token",
    "expert_scale",
    "expert_groups",
    "groups_of_token",
    "rope_dim",
    "nope_dim",
    "v_dim",
    "rope_theta",
    "rope_part",
    "norm_eps",
    "embedding_scale",
    "attention_scale",
    "query_scalar",
    "attention_softcap",
    "final_softcap",
    "mscale",
    "mscale_all_dim",
)
# Numbers that no model has 0 of: a map would drop every element.
_POSITIVE = frozenset({"layer", "hidden", "heads", "kv_heads", "head_dim", "vocab"})

# Megatron stores these, with their defaults, for models without experts, too.
_OF_ROUTERS = ("experts_of_token", "expert_scale", "expert_groups", "groups_of_token")

_SCALE = "softmax_scale"  # Megatron's, for None: 1 / sqrt(kv_channels)

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

    @property
    def numbers(self) -> dict[str, tuple[Number, str]]:
        """Number -> (value, key of the config).

        Raises:
            NameMismatch: A value is impossible, as -1 layers.
        """
        found: dict[str, tuple[Number, str]] = {}
        below = self.content.get("text_config") if self.world == "hf-hub" else None
        roots = [self.content, *([below] if isinstance(below, Mapping) else [])]
        for number, places in _config_keys()[self.world].items():
            for place in places:
                if place.startswith("|"):
                    other = found.get(place[1:])
                    if other is not None:
                        found[number] = other
                    break
                value = next((v for root in roots if (v := _at(root, place)) is not None), None)
                if value is not None:
                    found[number] = self._number(number, place, value), place
                    break
        if self.world == "megatron":
            _of_megatron(self.content, found)
        return found

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
        read = {"megatron": rope_scaling_of_megatron, "hf-hub": rope_scaling_of_hub}.get(self.world)
        return None if read is None else read(self.name, self.content)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Model type and class names in a config of transformers; none for other configs."""
        if self.world != "hf-hub":
            return ()
        kind, classes = self.content.get("model_type"), self.content.get("architectures")
        names = [kind, *(classes if isinstance(classes, Sequence) else [])]
        return tuple(n for n in names if isinstance(n, str))

    def at(self, place: str) -> Any:
        """Return the value at a dotted path, or None, as for a scale that is what it is without one."""
        value = _below(self.content, place)
        if self.world == "megatron" and place == _SCALE and isinstance(value, float):
            usual = _usual_scale(self.content)
            return None if usual and isclose(value, usual, rel_tol=1e-6) else value
        return value


def agreed(configs: Sequence[Config]) -> dict[str, tuple[Number, str]]:
    """Return number -> (value, config and key that give it); the first config with a number counts.

    Raises:
        NameMismatch: Two configs differ in a number that shapes do not give, or a vocabulary is smaller than
            the trainer's tokens. The message has both values.
    """
    require_same_scaling(config.rope_scaling for config in configs)
    _require_same_routing(configs)
    found: dict[str, tuple[Number, str]] = {}
    for config in configs:
        for number, (value, key) in config.numbers.items():
            source = f"{config.name} says {key} = {value:.15g}"
            first = found.setdefault(number, (value, source))
            if number in COMPARED and first[0] != value:
                raise NameMismatch(
                    f"two configs contradict each other: {first[1]}, {source}",
                    hint="try the config of the model that was trained",
                )
    vocab, tokens = found.get("vocab"), found.get("tokens")
    if vocab is not None and tokens is not None and vocab[0] < tokens[0]:
        raise NameMismatch(
            f"two configs contradict each other: {vocab[1]}, and later rows are not padding: {tokens[1]}",
            hint="try the config of the model that was trained",
        )
    return found


def _require_same_routing(configs: Sequence[Config]) -> None:
    """Require that configs agree whether the weights of a token's experts sum to 1.

    Megatron's do with sigmoid scores of several experts, or if the softmax is taken after the choice
    (moe_utils.py, `topk_routing_with_score_function`).
    """
    found: dict[bool, str] = {}
    for config in configs:
        found |= _sums_to_one(config)
    if len(found) > 1:
        raise NameMismatch(
            f"two configs contradict each other: {found[True]}, {found[False]}",
            hint="try the config of the model that was trained",
        )


def _sums_to_one(config: Config) -> dict[bool, str]:
    """Return (whether the weights of a token's experts sum to 1: the field that says so), or nothing."""
    if config.world == "hf-hub":
        key, below = "norm_topk_prob", config.content.get("text_config")
        roots = [config.content, *([below] if isinstance(below, Mapping) else [])]
        value = next((root[key] for root in roots if isinstance(root.get(key), bool)), None)
        one = value
    elif config.world == "megatron":
        key, score = "moe_router_pre_softmax", config.content.get("moe_router_score_function")
        value = config.content.get(key)
        one = not value if isinstance(value, bool) else None
        if score == "sigmoid":
            key, value, one = "moe_router_score_function", score, config.content.get("moe_router_topk") != 1
    else:
        return {}
    return {} if one is None else {one: f"{config.name} says {key} = {value}"}


def _of_megatron(content: Mapping[str, Any], found: dict[str, tuple[Number, str]]) -> None:
    """Set query groups and scales as Megatron does without the options; leave unused routers out."""
    if "heads" in found and ("kv_heads" not in found or content.get("group_query_attention") is False):
        found["kv_heads"] = found["heads"]
    usual = _usual_scale(content)
    if _SCALE in content and "attention_scale" not in found and usual:
        found["attention_scale"] = (usual, "1 / sqrt(kv_channels)")
    if "experts" not in found:
        for number in _OF_ROUTERS:
            found.pop(number, None)


def _usual_scale(content: Mapping[str, Any]) -> float:
    """Return what Megatron multiplies scores of attention with unless a scale is given, or 0.0."""
    channels = content.get("kv_channels")
    return channels**-0.5 if isinstance(channels, int) and channels > 0 else 0.0


def _at(root: Mapping[str, Any], place: str) -> Number | str | None:
    """Return the number or text at a place; None for anything else, as a list of one value a layer."""
    value = _below(root, place)
    return None if isinstance(value, bool) or not isinstance(value, (int, float, str)) else value


def _below(root: Mapping[str, Any], place: str) -> Any:
    value: Any = root
    for key in place.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@cache
def _config_keys() -> Mapping[str, Mapping[str, Sequence[str]]]:
    import tomllib  # every export imports this module, and few have a config to read

    return tomllib.loads((resources.files(__package__) / "numbers.toml").read_text("utf-8"))
