"""Configs of one model: a field of which two say different things is found, whatever place a loader reads."""

from __future__ import annotations

from typing import Any

import pytest

from ckptcore.naming.maps.agreement import agreement
from ckptcore.naming.maps.hub_config import hub_fields
from ckptcore.naming.maps.hyperparameters import Config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "dtype": "bfloat16",
    "use_cache": True,
    "attention_dropout": 0.0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 500_000.0}
ARGS = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "rotary_base": 500_000,
    "position_embedding_type": "rope",
    "use_rope_scaling": False,
    "swiglu": True,
    "squared_relu": False,
    "quick_geglu": False,
    "norm_epsilon": 1e-5,
    "window_size": None,
}
MOE_ARGS = ARGS | {"num_experts": 4, "moe_router_topk": 2, "moe_router_topk_scaling_factor": None}


def hub(**changed: Any) -> Config:
    form = {k: v for k, v in (LLAMA | changed).items() if v is not ...}
    return Config("config.json", "hf-hub", form)


def texts(config: Config, *others: Config) -> str:
    return "; ".join(c.text for c in agreement(config, others).contradictions)


OWN = [
    ({"rope_theta": 10_000.0}, "rope_parameters.rope_theta = 500000", "rope_theta = 10000"),
    ({"rope_scaling": YARN}, "'default'", "rope_scaling.rope_type = 'yarn'"),
    ({"rope_scaling": None, "rope_parameters": YARN}, "rope_scaling = None", "'yarn'"),
    (
        {
            "rope_parameters": {"type": "linear", "factor": 2.0},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        "2",
        "4",
    ),
    (
        {
            "rope_theta": 1e6,
            "rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}},
        },
        "rope_theta = 1000000",
        "rope_parameters.full_attention.rope_theta = 10000",
    ),
    (
        {"rope_local_base_freq": 1e4, "rope_parameters": {"sliding_attention": {"rope_theta": 1e5}}},
        "rope_local_base_freq = 10000",
        "rope_parameters.sliding_attention.rope_theta = 100000",
    ),
    (
        {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        "partial_rotary_factor = 0.5",
        "= 1",
    ),
    (
        {"text_config": {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}},
        "text_config.rope_theta = 10000",
        "text_config.rope_parameters.rope_theta = 1000000",
    ),
]


@pytest.mark.parametrize(("changed", "says", "besides"), OWN)
def test_two_places_of_one_config_that_differ(changed: dict[str, Any], says: str, besides: str) -> None:
    (found,) = agreement(hub(**changed), ()).contradictions
    assert "config.json contradicts itself" in found.text
    assert says in found.text
    assert besides in found.text


def test_two_places_that_say_the_same() -> None:
    assert not texts(hub(rope_theta=500_000, rope_scaling=None))
    assert not texts(hub(rope_scaling={"type": "mrope", "rope_type": "default", "mrope_section": [1, 1]}))


# Every field that changes the function, in the spelling of either transformers.
CHANGED: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    {"rope_parameters": ..., "rope_theta": 10_000.0},
    {"rope_parameters": LINEAR},
    {"rope_parameters": YARN},
    {"rope_parameters": ..., "rope_theta": 500_000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rms_norm_eps": 1e-6},
    {"rms_norm_eps": ...},  # the class has 1e-6
    {"hidden_act": "gelu"},
    {"num_attention_heads": 2, "head_dim": 16},
    {"num_key_value_heads": 1},
    {"model_type": "mistral"},
    {"sliding_window": 8},
    {"a_field_of_tomorrow": 3},
    {"tie_word_embeddings": True},
]


@pytest.mark.parametrize("changed", CHANGED)
def test_a_field_that_changes_the_function(changed: dict[str, Any]) -> None:
    found = agreement(hub(**changed), [Config("the source's", "hf-hub", LLAMA)])
    assert found.contradictions or found.one_sided


def test_a_field_that_its_class_does_not_read_is_named() -> None:
    own, other = LLAMA | {"note": 1}, Config("the source's", "hf-hub", LLAMA | {"note": 2})
    named = agreement(hub(note=1), [other])
    assert not named.contradictions
    assert named.unconfirmed == ("note",)
    read = agreement(hub(sliding_window=8), [Config("the source's", "hf-hub", LLAMA | {"sliding_window": 4})])
    assert read.contradictions, "other classes read it, so this one may"
    code = {"auto_map": {"AutoModelForCausalLM": "code.Model"}}
    of_code = Config("config.json", "hf-hub", own | code)
    assert agreement(of_code, [Config("the source's", "hf-hub", own | code | {"note": 2})]).contradictions


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dtype": "float32", "torch_dtype": "float32", "use_cache": False, "attention_dropout": 0.1},
        {"pad_token_id": 3, "eos_token_id": [1, 2], "transformers_version": "4.57.6", "_name_or_path": "x"},
        {"rope_parameters": ..., "rope_theta": 500_000, "rope_scaling": None},
        {"rope_parameters": LINEAR | {"factor": 1}},
        {"hidden_act": "swish", "hidden_size": 16.0},
        {"max_position_embeddings": 4096, "vocab_size": 64},
    ],
)
def test_what_changes_no_function(changed: dict[str, Any]) -> None:
    found = agreement(hub(**changed), [Config("the source's", "hf-hub", LLAMA)])
    assert not found.contradictions
    assert not {f for f in found.one_sided if f != "rope_parameters.factor"}
    assert not found.unconfirmed or found.unconfirmed == ("rope_parameters.factor",)


def test_a_length_counts_where_frequencies_depend_on_it() -> None:
    yarn = hub(rope_parameters=YARN)
    assert "max_position_embeddings = 4096" in texts(
        hub(rope_parameters=YARN, max_position_embeddings=4096), yarn
    )


@pytest.mark.parametrize(
    ("name", "changed", "same"), [("beta_fast", 16, 32), ("beta_slow", 2, 1.0), ("truncate", False, True)]
)
def test_a_parameter_that_only_one_scaling_has(name: str, changed: Any, same: Any) -> None:
    """Loaders take one value for it where it is not said, whatever the class has with other parameters."""
    yarn = hub(rope_parameters=YARN)
    for named, unset in ((yarn, YARN | {name: changed}), (hub(rope_parameters=YARN | {name: changed}), YARN)):
        assert f"rope_parameters.{name} (unset, loaders take)" in texts(named, hub(rope_parameters=unset))
    found = agreement(hub(rope_parameters=YARN | {name: same}), [yarn])
    assert not found.contradictions
    assert not found.one_sided
    oss = [hub(model_type="gpt_oss", rope_parameters=YARN | more) for more in ({}, {"truncate": False})]
    assert "truncate" in texts(*oss)


def test_a_padding_token_counts_for_a_classifier() -> None:
    """It says which token's output is the sequence's."""
    head = {"architectures": ["LlamaForSequenceClassification"]}
    one, other = hub(**head, pad_token_id=1), hub(**head, pad_token_id=2)
    assert "pad_token_id = 1" in texts(one, other)


VISION_MODEL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0]},
    },
    "vision_config": {"depth": 2},
}


def test_the_fields_of_a_language_model_are_in_its_config_or_among_the_others() -> None:
    """Those that transformers wrote before it nested them."""
    text = VISION_MODEL["text_config"]
    flat = {k: v for k, v in text.items() if k != "rope_parameters"}
    flat |= {k: v for k, v in VISION_MODEL.items() if k != "text_config"}
    flat |= {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}}
    nested, older = (Config(name, "hf-hub", form) for name, form in (("new", VISION_MODEL), ("old", flat)))
    assert texts(nested, older) == texts(older, nested) == ""
    for config in (nested, older):
        assert {n: config.numbers[n][0] for n in ("heads", "norm_eps", "rope_theta")} == {
            "heads": 4,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
        }
    other = Config("old", "hf-hub", flat | {"rms_norm_eps": 1e-6})
    assert "new says text_config.rms_norm_eps = 1e-05, old says rms_norm_eps = 1e-06" in texts(nested, other)


@pytest.mark.parametrize(
    ("own", "of_language_model", "tied"),
    [(True, False, True), (True, None, True), (False, True, True), (False, False, False), (None, True, True)],
)
def test_embeddings_are_tied_where_the_model_or_its_language_model_says_so(
    own: bool | None, of_language_model: bool | None, tied: bool
) -> None:
    """As transformers ties them (models/qwen2_5_vl/configuration_qwen2_5_vl.py)."""
    text = {} if of_language_model is None else {"tie_word_embeddings": of_language_model}
    form = {"model_type": "qwen2_5_vl", "text_config": text, "tie_word_embeddings": own}
    fields = hub_fields({k: v for k, v in form.items() if v is not None})
    stated = fields.get("tie_word_embeddings")
    assert stated is not None
    assert stated.value is tied


def test_a_language_model_in_a_larger_one() -> None:
    larger = Config(
        "the source's", "hf-hub", {"model_type": "llava", "text_config": LLAMA, "vision_config": {}}
    )
    assert not texts(hub(), larger)
    assert "rms_norm_eps = 0.001" in texts(hub(rms_norm_eps=1e-3), larger)
    assert "text_config.rms_norm_eps" not in agreement(hub(), [larger]).unconfirmed


TERMS_AND_NULLS = [
    (ARGS, {"hidden_act": "gelu"}, "hidden_act = 'gelu'", "swiglu = True"),
    (ARGS, {"hidden_act": "relu"}, "hidden_act = 'relu'", "swiglu = True"),
    (ARGS | {"swiglu": False, "squared_relu": True}, {}, "hidden_act = 'silu'", "squared_relu = True"),
    (ARGS | {"swiglu": False}, {}, "hidden_act = 'silu'", "swiglu = False"),
    (
        ARGS,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "= 10000",
        "rotary_base = 500000",
    ),
    (ARGS, {"rope_parameters": LINEAR}, "linear", "use_rope_scaling = False"),
    (ARGS, {"rope_parameters": YARN}, "yarn", "use_rope_scaling = False"),
    (
        {k: v for k, v in ARGS.items() if k != "use_rope_scaling"}
        | {"rotary_seq_len_interpolation_factor": None},
        {"rope_parameters": LINEAR},
        "linear",
        "rotary_seq_len_interpolation_factor = None",
    ),
    (ARGS, {"rms_norm_eps": ...}, "1e-06", "norm_epsilon = 1e-05"),
    (ARGS, {"model_type": "mistral"}, "sliding_window", "window_size = None"),
    (ARGS, {"model_type": "mistral", "sliding_window": 8}, "sliding_window = 8", "window_size = None"),
    (
        ARGS | {"window_size": [4, 0]},
        {"model_type": "mistral", "sliding_window": 8},
        "= 8",
        "window_size.0 = 4",
    ),
    (
        MOE_ARGS,
        {"model_type": "deepseek_v3", "routed_scaling_factor": 2.5},
        "= 2.5",
        "topk_scaling_factor = None",
    ),
    (MOE_ARGS, {"model_type": "deepseek_v3"}, "routed_scaling_factor", "topk_scaling_factor = None"),
    (MOE_ARGS, {"model_type": "qwen3_moe"}, "num_experts_per_tok", "moe_router_topk = 2"),
    (
        MOE_ARGS | {"moe_router_pre_softmax": False},
        {"model_type": "qwen3_moe", "num_experts_per_tok": 2},
        "norm_topk_prob = False",
        "moe_router_pre_softmax = False",
    ),
    (
        ARGS | {"activation_func": {"_target_": "torch.nn.functional.silu"}},
        {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"},
        "hidden_activation = 'gelu_pytorch_tanh'",
        "activation_func._target_ = 'torch.nn.functional.silu'",
    ),
    (
        ARGS | {"attn_logit_softcapping": None},
        {"model_type": "gemma2", "hidden_activation": "silu", "sliding_window": None},
        "attn_logit_softcapping (unset, the class has) = 50",
        "attn_logit_softcapping = None",
    ),
]


@pytest.mark.parametrize(("args", "changed", "mine", "theirs"), TERMS_AND_NULLS)
def test_what_the_trainer_s_arguments_contradict(
    args: dict[str, Any], changed: dict[str, Any], mine: str, theirs: str
) -> None:
    found = texts(hub(**changed), Config("args", "megatron", args))
    assert mine in found
    assert theirs in found


@pytest.mark.parametrize(
    ("args", "changed"),
    [
        (ARGS, {}),
        (ARGS | {"window_size": [7, 0]}, {"model_type": "mistral", "sliding_window": 8}),
        (ARGS | {"window_size": [8, 0]}, {"model_type": "mistral", "sliding_window": 8}),
        (ARGS, {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}),
        (ARGS, {"model_type": "qwen2", "sliding_window": 8}),  # the class does not use it, by default
        (ARGS | {"swiglu": False}, {"hidden_act": "gelu"}),
        (ARGS | {"swiglu": False}, {"hidden_act": "gelu_new"}),
        (ARGS | {"quick_geglu": True, "swiglu": False}, {"model_type": "gpt_oss", "sliding_window": None}),
        (ARGS, {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": None}),
        (ARGS | {"layer_norm_eps": 1e-3}, {"layer_norm_eps": 1e-3}),  # of a class that reads rms_norm_eps
    ],
)
def test_arguments_that_say_the_same(args: dict[str, Any], changed: dict[str, Any]) -> None:
    assert not texts(hub(**changed), Config("args", "megatron", args))


def test_which_layers_slide() -> None:
    """Of Megatron's layers, each of a number does not, or those that a list has 0 of."""
    two = {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}
    args = ARGS | {"window_size": [7, 0]}
    mixed = hub(**two, layer_types=["sliding_attention", "full_attention"])
    for skipped in (2, [1, 0]):
        found = agreement(mixed, [Config("args", "megatron", args | {"window_attn_skip_freq": skipped})])
        assert not found.contradictions
        assert "layer_types" not in found.unconfirmed
    for skipped in (None, 1, 3, [0, 1]):
        found = agreement(mixed, [Config("args", "megatron", args | {"window_attn_skip_freq": skipped})])
        assert [c.field for c in found.contradictions] == ["layer_types"], skipped
    every = hub(model_type="mistral", sliding_window=8)
    assert "window_attn_skip_freq = 2" in texts(
        every, Config("args", "megatron", args | {"window_attn_skip_freq": 2})
    )
    assert not texts(every, Config("args", "megatron", args | {"window_attn_skip_freq": None}))
    of_odd_types = hub(**two, layer_types=[{}, ["sliding_attention"]])
    of_many = hub(model_type="mistral", sliding_window=8, num_hidden_layers=2_000_000_000)
    for odd in (of_odd_types, of_many):
        assert odd.sliding_layers is None
    other = agreement(mixed, [Config("args", "megatron", args)])
    assert not other.contradictions
    assert "layer_types" in other.unconfirmed


def olmo_core(scaling: dict[str, Any] | None, **rope: Any) -> Config:
    mixer = {"n_heads": 4, "n_kv_heads": 2, "rope": {"theta": 500_000, "scaling": scaling} | rope}
    return Config("olmo", "olmo_core", {"model": {"block": {"sequence_mixer": mixer}}})


def titan(**of_model: Any) -> Config:
    return Config("titan", "torchtitan", {"model": {"n_layers": 2} | of_model})


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
STEPWISE = {"factor": 32.0, "low_freq_proportion": 0.0, "high_freq_proportion": 0.25, "old_context_len": 8192}
OF_YARN = {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "old_context_len": 4096}
TITAN_LLAMA = {"scaling": "llama", "scaling_factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OF_TRAINERS = [
    (olmo_core(None), {}),
    (olmo_core({"factor": 2.0, "attention_rescale_factor": 1.0}), {"rope_parameters": LINEAR}),
    (olmo_core(STEPWISE), {"rope_parameters": LLAMA3}),
    (olmo_core(OF_YARN), {"rope_parameters": YARN}),
    (olmo_core({"new_theta": 500_000}, theta=10_000), {}),
    (Config("olmo", "olmo", {"model": {"rope": True, "rope_theta": 500_000}}), {}),
    (titan(rope_theta=500_000, rope_scaling_args=None), {}),
    (
        titan(rope_scaling_args={"scaling_factor": 32.0, "original_max_position_embeddings": 8192}),
        {"rope_parameters": LLAMA3},
    ),
    (titan(rope={"theta": 500_000, "scaling": "none", "scaling_factor": 8.0}), {}),
    (titan(rope=TITAN_LLAMA), {"rope_parameters": LLAMA3}),
    (
        titan(rope={"scaling": "yarn", "rope_factor": 4.0, "original_seq_len": 4096}),
        {"rope_parameters": YARN},
    ),
]


@pytest.mark.parametrize(("trainer", "changed"), OF_TRAINERS)
def test_rotary_scaling_of_other_trainers(trainer: Config, changed: dict[str, Any]) -> None:
    found = agreement(hub(**changed), [trainer])
    assert not found.contradictions
    assert "rope_parameters.rope_type" in found.confirmed
    for other in ({}, *(c for _, c in OF_TRAINERS)):
        if other != changed:
            assert texts(hub(**other), trainer)
    wide = (changed.get("rope_parameters") or {}).get("factor")
    if wide:
        factor = changed["rope_parameters"] | {"factor": wide * 2}
        assert texts(hub(rope_parameters=factor), trainer)


def test_rotary_scaling_that_layers_have_of_their_own_is_not_compared() -> None:
    of_layers = {"model": {"block": olmo_core(None).content["model"]["block"], "block_overrides": {"1": {}}}}
    assert Config("olmo", "olmo_core", of_layers).rope_scaling is None
    odd = (titan(rope={"scaling": ["yarn"]}), titan(rope_scaling_args=3), olmo_core({"note": 1}))
    assert [config.rope_scaling for config in odd] == [None, None, None]
    wide = STEPWISE | {"low_freq_proportion": -(10**400), "high_freq_proportion": 10**400}
    scaling = olmo_core(wide).rope_scaling
    assert scaling is not None
    assert "low_freq_factor" not in scaling.parameters
    assert "new_theta = 8000000" in texts(hub(), olmo_core({"new_theta": 8_000_000}))


def test_what_nothing_confirms_is_named() -> None:
    assert agreement(hub(), ()).unconfirmed == (
        "head_dim",
        "hidden_act",
        "model_type",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters.rope_theta",
        "rope_parameters.rope_type",
    )
    found = agreement(hub(), [Config("args", "megatron", ARGS)])
    assert found.unconfirmed == ("head_dim", "model_type")
    assert not agreement(hub(), [Config("the source's", "hf-hub", LLAMA)]).unconfirmed


@pytest.mark.parametrize("odd", [[1], [["yarn"]], [{"a": 1}]])
def test_a_type_of_scaling_that_is_no_text_is_a_value_like_any_other(odd: object) -> None:
    config = {"model_type": "llama", "rope_scaling": {"rope_type": odd, "factor": 1}}
    assert hub_fields(config).values["rope_parameters.rope_type"].value == odd
