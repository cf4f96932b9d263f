"""Numbers of configs: one that no model has, or that cuts a vocabulary, is an error and not passed over."""

from __future__ import annotations

from typing import Any

import pytest

from ckptcore.errors import NameMismatch
from ckptcore.naming.maps.numbers import Config, agreed

ARGS = {"num_layers": 2, "num_attention_heads": 4, "rotary_base": 10_000, "vocab_size": 40}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", 10**12),
        ("num_layers", -1),
        ("num_layers", 0),
        ("num_layers", "2"),
        ("num_attention_heads", float("nan")),
        ("rotary_base", float("inf")),
        ("vocab_size", 0),
        ("vocab_size", 1 << 20_000),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_a_number_that_no_model_has(key: str, value: Any) -> None:
    with pytest.raises(NameMismatch, match=f"^args says {key} = .*, which no model has$"):
        agreed([Config("args", "megatron", ARGS | {key: value})])


def test_what_is_no_number_of_the_whole_model_says_nothing() -> None:
    form = {"num_key_value_heads": [1, 2], "num_attention_heads": None, "hidden_size": True}
    assert Config("config.json", "hf-hub", form).numbers == {}


@pytest.mark.parametrize(
    ("world", "trained"), [("megatron", ARGS), ("olmo_core", {"dataset": {"tokenizer": {"vocab_size": 40}}})]
)
def test_a_vocabulary_without_some_of_the_trainer_s_tokens(world: str, trained: dict[str, Any]) -> None:
    """Rows behind the vocabulary are left out as padding."""
    of_trainer = Config("the trainer's", world, trained)
    for padded in (40, 64):
        assert agreed([Config("hub", "hf-hub", {"vocab_size": padded}), of_trainer])["vocab"][0] == padded
    with pytest.raises(NameMismatch, match=r"vocab_size = 39, and the rows behind are no padding: .* = 40"):
        agreed([Config("hub", "hf-hub", {"vocab_size": 39}), of_trainer])


def test_a_share_of_the_heads_that_is_rotated() -> None:
    configs = [Config("hub", "hf-hub", {"partial_rotary_factor": 1.0})]
    configs += [Config("args", "megatron", {"rotary_percent": 0.5})]
    with pytest.raises(NameMismatch, match=r"partial_rotary_factor = 1, args says rotary_percent = 0\.5"):
        agreed(configs)
