"""Numbers of configs: one that no model has, or that cuts a vocabulary, is an error and not passed over."""

from __future__ import annotations

from typing import Any

import pytest

from ckptcore.errors import NameMismatch
from ckptcore.naming.maps.agreement import agreed
from ckptcore.naming.maps.hyperparameters import Config

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


def test_values_that_are_no_number_of_the_model_are_ignored() -> None:
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
    with pytest.raises(NameMismatch, match=r"vocab_size = 39, and later rows are not padding: .* = 40"):
        agreed([Config("hub", "hf-hub", {"vocab_size": 39}), of_trainer])


def test_a_share_of_the_heads_that_is_rotated() -> None:
    configs = [Config("hub", "hf-hub", {"partial_rotary_factor": 1.0})]
    configs += [Config("args", "megatron", {"rotary_percent": 0.5})]
    with pytest.raises(NameMismatch, match=r"partial_rotary_factor = 1, args says rotary_percent = 0\.5"):
        agreed(configs)


PARAMS = {"n_heads": 4, "norm_eps": 1e-05, "rope_theta": 500000.0, "sliding_window": None}


def test_params_of_meta_without_heads_of_keys() -> None:
    """Llama 1 and 2 leave them out where each head of queries has its own."""
    of_meta = Config("params.json", "params", PARAMS)
    assert agreed([of_meta])["kv_heads"][0] == 4
    with pytest.raises(NameMismatch, match=r"num_key_value_heads = 2, params.json says n_heads = 4"):
        agreed([Config("hub", "hf-hub", {"num_attention_heads": 4, "num_key_value_heads": 2}), of_meta])


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "sliding_window"])
def test_params_of_meta_and_a_config_of_another_model(key: str) -> None:
    with pytest.raises(NameMismatch, match=key):
        agreed([Config("hub", "hf-hub", {key: 4096}), Config("params.json", "params", PARAMS)])


ROUTER = {"num_experts": 8, "moe_router_topk": 2, "moe_router_topk_scaling_factor": 2.5}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
HUB_ROUTER = {"num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}


@pytest.mark.parametrize("key", sorted(HUB_ROUTER))
def test_how_tokens_choose_experts(key: str) -> None:
    """No tensor shows how many experts a token visits, and with which weight."""
    args = Config("args", "megatron", ROUTER | GROUPS)
    agreed([Config("hub", "hf-hub", HUB_ROUTER), args])
    with pytest.raises(NameMismatch, match=rf"hub says {key} = 1, args says moe_router_"):
        agreed([Config("hub", "hf-hub", HUB_ROUTER | {key: 1}), args])


def test_experts_of_a_token_in_other_trainers() -> None:
    hub = Config("hub", "hf-hub", {"num_experts_per_tok": 4})
    form = {"model": {"block": {"feed_forward_moe": {"router": {"top_k": 2}}}}}
    for trained in (
        Config("the trainer's", "olmo_core", form),
        Config("the trainer's", "torchtitan", {"moe_args": {"top_k": 2}}),
    ):
        with pytest.raises(NameMismatch, match=r"num_experts_per_tok = 4, the trainer's says .*top_k = 2"):
            agreed([hub, trained])


def test_arguments_of_a_model_without_experts_have_a_router() -> None:
    """Megatron stores the defaults of its router with every model."""
    args = Config("args", "megatron", {"moe_router_topk": 2, "num_experts": None, "num_layers": 2})
    agreed([Config("hub", "hf-hub", {"num_experts_per_tok": 8}), args])


ROPE = {"position_embedding_type": "rope", "rotary_base": 10_000}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}
LATENT = {"multi_latent_attention": True, "rope_type": "yarn", "rotary_scaling_factor": 40}
SAME = [
    (ROPE | {"use_rope_scaling": False}, {"rope_theta": 10_000, "rope_scaling": None}),
    (ROPE | {"use_rope_scaling": False}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
    (ROPE | {"use_rope_scaling": False}, {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}),
    (ROPE | {"use_rope_scaling": True}, {"rope_scaling": LLAMA3}),
    (
        ROPE | {"rope_scaling": True, "rope_scaling_factor": 32.0},
        {"rope_parameters": LLAMA3 | {"factor": 32}},
    ),
    (ROPE | {"rotary_seq_len_interpolation_factor": 2}, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    (ROPE | {"use_rope_scaling": True, "rope_scaling_factor": 1.0}, {"rope_theta": 1e4}),
    (LATENT, {"rope_scaling": YARN}),
    (LATENT | {"rotary_scaling_factor": 1.0}, {"rope_theta": 1e4}),
    # What says nothing contradicts nothing.
    (ROPE, {"rope_scaling": LLAMA3}),
    (ROPE | {"use_rope_scaling": False}, {"rope_parameters": {"full_attention": LLAMA3}}),
    (ROPE | {"use_rope_scaling": False}, {"rope_scaling": {"factor": 8}, "rope_local_base_freq": 1e4}),
    ({"position_embedding_type": "learned_absolute", "use_rope_scaling": False}, {"rope_scaling": LLAMA3}),
    (LATENT | {"rope_type": None}, {"rope_theta": 1e4}),
]
OTHER = [
    (ROPE | {"use_rope_scaling": False}, {"rope_scaling": LLAMA3}, "False", "llama3"),
    (ROPE | {"use_rope_scaling": False}, {"text_config": {"rope_scaling": LLAMA3}}, "False", "llama3"),
    (ROPE | {"use_rope_scaling": True}, {"rope_theta": 10_000, "rope_scaling": None}, "factor = 8", "None"),
    (
        ROPE | {"use_rope_scaling": True},
        {"rope_scaling": LLAMA3 | {"factor": 32}},
        "factor = 8",
        "factor = 32",
    ),
    (ROPE | {"use_rope_scaling": True}, {"rope_scaling": LLAMA3 | {"high_freq_factor": 2}}, "= 4", "= 2"),
    (ROPE | {"seq_len_interpolation_factor": 2}, {"rope_theta": 10_000}, "= 2", "None"),
    (LATENT, {"rope_scaling": YARN | {"factor": 20}}, "factor = 40", "factor = 20"),
    (LATENT | {"rope_type": "rope"}, {"rope_scaling": YARN}, "'rope'", "'yarn'"),
    (
        {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 32},
        {"rope_scaling": LLAMA3},
        "32",
        "llama3",
    ),
]


@pytest.mark.parametrize(("args", "hub"), SAME)
def test_scaling_of_rotary_embeddings_that_agrees(args: dict[str, Any], hub: dict[str, Any]) -> None:
    agreed([Config("hub", "hf-hub", hub), Config("args", "megatron", args)])


@pytest.mark.parametrize(("args", "hub", "mine", "theirs"), OTHER)
def test_another_scaling_of_rotary_embeddings_is_refused_with_both_values(
    args: dict[str, Any], hub: dict[str, Any], mine: str, theirs: str
) -> None:
    with pytest.raises(NameMismatch) as error:
        agreed([Config("hub", "hf-hub", hub), Config("args", "megatron", args)])
    first, _, second = error.value.message.partition(", args says ")
    assert theirs in first
    assert mine in second


def test_what_params_of_meta_and_mistral_say() -> None:
    """Llama 2 leaves the size of the vocabulary to its tokenizer, and says -1."""
    form = {"dim": 32, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5, "vocab_size": -1}
    numbers = {name: value for name, (value, _) in Config("params.json", "params", form).numbers.items()}
    assert numbers == {"hidden": 32, "layer": 2, "heads": 4, "kv_heads": 4, "norm_eps": 1e-5}
    form = {"vocab_size": 40, "moe": {"num_experts": 8, "num_experts_per_tok": 2}}
    numbers = {name: value for name, (value, _) in Config("params.json", "params", form).numbers.items()}
    assert numbers == {"vocab": 40, "experts": 8, "experts_of_token": 2}
