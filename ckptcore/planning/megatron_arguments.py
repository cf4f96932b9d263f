"""Make the common state that Megatron's loader reads beside the weights of a model that it begins from.

``load_checkpoint`` takes the version of the layout of queries, keys and values from ``checkpoint_version``,
and compares ``args`` with those of the job; ``--use-checkpoint-args`` takes them
(megatron/training/checkpointing.py, ``load_args_from_checkpoint``). They are made from the model's config by
the tables that compare both (`ckptcore.naming.maps.hyperparameters`), from what the map requires of
Megatron's config, and from the tensors; then they are compared like those of a training.

Megatron-Bridge builds the model of an iteration by run_config.yaml: ``load_model_config`` instantiates its
section ``model``, and a load reads ``checkpoint`` (megatron/bridge/training/model_load_save.py,
checkpointing.py; 0.3.1 and git 067f987). The class is the provider of most bridges (models/gpt_provider.py,
mla_provider.py); fields are those of Megatron's TransformerConfig, which most arguments are called like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import Named, encode
from ckptcore.errors import Finding, UsageError, finding
from ckptcore.naming.maps.agreement import agreed
from ckptcore.naming.maps.hyperparameters import Config, stated_in
from ckptcore.naming.maps.rope_scaling import megatron_rope_arguments
from ckptcore.planning.name_maps import VOCABULARY_STEP, NameMap
from ckptcore.planning.stated_arguments import unstated
from ckptcore.utils.text import listed

_WORLD = "megatron"
_LATENT = "multi_latent_attention"
_VERSION = 3.0  # of the layout of queries, keys and values; an older one is permuted when it is loaded
# Argument -> names of tensors that only a model with it has.
_BY_TENSOR: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        _LATENT: r".*\.self_attention\.linear_kv_up_proj\.weight",
        "qk_layernorm": r".*\.self_attention\.((q|k|kv)_layernorm|linear_kv_up_proj\.layer_norm)[._].*",
        "add_qkv_bias": r".*\.self_attention\.linear_qkv\.bias",
        "add_bias_linear": r".*\.linear_(proj|fc[12])\.bias",
        "untie_embeddings_and_output_weights": r"(.*\.)?output_layer\.weight",
        "moe_router_enable_expert_bias": r".*\.mlp\.router\.expert_bias",
    }.items()
}
# Argument -> tensors whose last dim it is.
_WIDTHS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "ffn_hidden_size": r".*\.mlp\.linear_fc2\.weight",
        "moe_ffn_hidden_size": r".*\.mlp\.experts\.(.*\.)?linear_fc2\.weight\d*",
        "moe_shared_expert_intermediate_size": r".*\.mlp\.shared_experts\.linear_fc2\.weight",
        "moe_latent_size": r".*\.mlp\.fc2_latent_proj\.weight",
    }.items()
}
_DELTA_NET = re.compile(r"(?:.*\.)?decoder\.layers\.(\d+)\.self_attention\.A_log")
_ROUTER = re.compile(r"(?:.*\.)?decoder\.layers\.(\d+)\.mlp\.router\.weight")
# Symbol in a hybrid model's pattern -> a tensor of such a layer (models/hybrid/hybrid_layer_allocation.py).
_HYBRID_LAYERS: Mapping[str, re.Pattern[str]] = {
    symbol: re.compile(rf"(?:.*\.)?decoder\.layers\.(\d+)\.{name}")
    for symbol, name in {
        "M": r"mixer\.A_log",
        "*": r"self_attention\.linear_proj\.weight",
        "E": r"mlp\.router\.weight",
        "-": r"mlp\.linear_fc2\.weight",
    }.items()
}
_EMBEDDING = "embedding.word_embeddings.weight"
_MESH = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
}
_BRIDGE_PROVIDERS = {
    False: "megatron.bridge.models.gpt_provider.GPTModelProvider",
    True: "megatron.bridge.models.mla_provider.MLAModelProvider",
}


@dataclass(frozen=True, slots=True)
class BridgeModel:
    """A model of several modules, of which Megatron's arguments say the language model's alone.

    Attributes:
        provider: Its class in Megatron-Bridge.
        fields: Field of the provider -> place in the hub's config.
        configs: Field of the provider -> (place of a part of the hub's config, its class in transformers).
    """

    provider: str
    fields: Mapping[str, str]
    configs: Mapping[str, tuple[str, str]]

    @property
    def places(self) -> tuple[str, ...]:
        """Places in the hub's config that its provider has as they are."""
        return (*self.fields.values(), *(place for place, _ in self.configs.values()))

    def fields_of(self, hub: Config) -> dict[str, Any]:
        """Return the fields of its provider for a config of the hub."""
        fields = {field: hub.at(place) for field, place in self.fields.items()}
        parts = {
            # As Bridge writes a config of transformers (training/config/yaml_utils.py of Megatron-Core).
            field: {"_target_": f"{name}.from_dict", "_call_": True, "config_dict": hub.at(place)}
            for field, (place, name) in self.configs.items()
        }
        stated = {field: value for field, value in fields.items() if value is not None}
        return {"_target_": self.provider, **stated, **parts}


# Model type -> what its bridge makes of the hub's config (models/qwen_vl/qwen25_vl_bridge.py).
_BRIDGE_MODELS = {
    "qwen2_5_vl": BridgeModel(
        "megatron.bridge.models.qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider",
        {
            "mrope_section": "text_config.rope_parameters.mrope_section",
            "seq_length": "text_config.max_position_embeddings",
            "bos_token_id": "text_config.bos_token_id",
            "eos_token_id": "text_config.eos_token_id",
            "image_token_id": "image_token_id",
            "video_token_id": "video_token_id",
            "vision_start_token_id": "vision_start_token_id",
            "vision_end_token_id": "vision_end_token_id",
        },
        {
            "vision_config": (
                "vision_config",
                "transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig",
            )
        },
    )
}
# Argument -> field, where both differ (megatron/training/arguments.py, core_transformer_config_from_args).
_BRIDGE_RENAMED = {
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}
_BRIDGE_SAME = frozenset(
    {
        "add_bias_linear",
        "add_qkv_bias",
        "beta_fast",
        "beta_slow",
        "expert_model_parallel_size",
        "ffn_hidden_size",
        "gated_linear_unit",
        "hidden_size",
        "kv_channels",
        "kv_lora_rank",
        "layernorm_zero_centered_gamma",
        "make_vocab_size_divisible_by",
        "moe_apply_probs_on_input",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_router_enable_expert_bias",
        "moe_router_group_topk",
        "moe_router_num_groups",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_intermediate_size",
        "mscale",
        "mscale_all_dim",
        "mtp_num_layers",
        _LATENT,
        "no_rope_freq",
        "normalization",
        "num_attention_heads",
        "num_layers",
        "num_query_groups",
        "original_max_position_embeddings",
        "pipeline_model_parallel_size",
        "position_embedding_type",
        "q_lora_rank",
        "qk_head_dim",
        "qk_layernorm",
        "qk_pos_emb_head_dim",
        "rope_scaling_factor",
        "rope_type",
        "rotary_base",
        "rotary_interleaved",
        "rotary_percent",
        "rotary_scaling_factor",
        "softmax_scale",
        "softmax_type",
        "tensor_model_parallel_size",
        "v_head_dim",
        "vocab_size",
    }
)
_ACTIVATIONS = {
    "swiglu": "torch.nn.functional.silu",
    "squared_relu": "megatron.core.activations.squared_relu",
    "openai_gelu": "megatron.core.activations.fast_gelu",
    "quick_geglu": "megatron.core.activations.quick_gelu",
}
_SWITCHES = {"bfloat16": "bf16", "float16": "fp16"}  # dtype -> the field that says it; neither is float32
_PLAIN_GELU = "torch.nn.functional.gelu"
_LENGTH, _UNTIED = "max_position_embeddings", "untie_embeddings_and_output_weights"
# Arguments of a job, and those that other fields say.
_OF_JOB = frozenset(
    {"ckpt_format", "group_query_attention", "no_save_optim", "no_save_rng", "padded_vocab_size"}
)
# Values of arguments without a field with which a model is as if it had none.
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1)


def common_state(
    naming: NameMap, tensors: Sequence[TensorSpec], mesh: Mapping[str, int]
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return key -> JSON form of the common state, and findings about what it does not say.

    Args:
        naming: How the tensors got Megatron's names.
        tensors: Under these names.
        mesh: Axis -> ranks.

    Raises:
        NameMismatch: No arguments of Megatron's say what the config does.
        UsageError: Its tensor parallel ranks do not divide the feed-forward network.
    """
    arguments = _of_config(naming) | _of_tensors(naming, tensors)
    tp = mesh.get("tp", 1)
    if uneven := next((name for name in _WIDTHS if arguments.get(name, 0) % tp), ""):
        raise UsageError(
            f"cannot cut {arguments[uneven]} rows of the feed-forward network with tp={tp}: {uneven}",
            hint="use a tp that divides them",
        )
    arguments |= {name: mesh.get(axis, 1) for name, axis in _MESH.items()}
    arguments |= {"no_save_optim": True, "no_save_rng": True, "ckpt_format": "torch_dist"}
    args = Named("namespace", dict(sorted(arguments.items())))
    state: dict[str, Any] = {"args": args, "checkpoint_version": _VERSION, "iteration": 0}
    hub = next((c for c in naming.configs if c.fields is not None), None)
    modules = _BRIDGE_MODELS.get(hub.fields.model_type) if hub is not None and hub.fields else None
    written = Config("the arguments for Megatron", _WORLD, arguments)
    # No command line has the other modules: only a provider of Bridge does.
    findings = () if modules else tuple(unstated(naming, written, "args in common.pt"))
    if lacking := without_field(arguments):
        message = (
            "run_config.yaml for Megatron-Bridge is not written: no field of its providers says "
            f"{listed(lacking, 12)}"
        )
        findings += (finding("unstated-arguments", "coverage", message),)
    elif not findings:  # a provider of Bridge is the model, and no command line completes it
        dtype = next((t.dtype for t in tensors if t.fqn.endswith(_EMBEDDING)), "")
        content = run_config(arguments, dtype)
        if modules is not None and hub is not None:
            content["model"] |= modules.fields_of(hub)
        bridge = Config("run_config.yaml for Megatron-Bridge", _WORLD, content["model"])
        stated_places = modules.places if modules is not None else ()
        findings += tuple(unstated(naming, bridge, "run_config.yaml", stated_places))
        state |= {} if findings else {"run_config": content}
    return {k: encode(v) for k, v in state.items()}, findings


def _of_config(naming: NameMap) -> dict[str, Any]:
    """Return the arguments for a config's numbers and terms, and for what the map requires."""
    configs = naming.configs
    terms: dict[str, str] = {}
    for config in configs:
        terms = {name: text for name, (text, _) in config.terms.items()} | terms
    hub = next((c for c in configs if c.fields is not None), None)
    kind = hub.fields.model_type if hub is not None and hub.fields is not None else ""
    # Sizes that no config states are those of the tensors.
    numbers = {name: value for name, (value, _) in {**naming.numbers, **agreed(configs)}.items()}
    required = naming.rules.target_requires if naming.rules is not None else {}
    out: dict[str, Any] = {k: values[0] for k, values in required.items() if values and "." not in k}
    out |= stated_in(_WORLD, numbers, terms, kind)
    if "rotary_base" in out:
        out.setdefault("position_embedding_type", "rope")
    if {"num_attention_heads", "num_query_groups"} <= out.keys():
        out["group_query_attention"] = out["num_query_groups"] < out["num_attention_heads"]
    if hub is not None:
        length = hub.at("max_position_embeddings")
        out |= {"max_position_embeddings": length} if isinstance(length, int) else {}
        sums = hub.sums_to_one
        if "num_experts" in out and sums is not None and out.get("moe_router_score_function") != "sigmoid":
            out["moe_router_pre_softmax"] = not sums[0]
    return out


def _of_tensors(naming: NameMap, tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    """Return the arguments that names and shapes of tensors state, and the scaling of their attention."""
    names = [t.fqn for t in tensors]
    out: dict[str, Any] = {k: any(map(pattern.fullmatch, names)) for k, pattern in _BY_TENSOR.items()}
    for argument, pattern in _WIDTHS.items():
        widths = {t.shape[-1] for t in tensors if pattern.fullmatch(t.fqn)}
        out |= {argument: widths.pop()} if len(widths) == 1 else {}
    rows = next((t.shape[0] for t in tensors if t.fqn.endswith(_EMBEDDING)), None)
    if rows is not None:
        out |= {"padded_vocab_size": rows, "make_vocab_size_divisible_by": VOCABULARY_STEP[_WORLD]}
    if kinds := _hybrid_pattern(names):
        return out | {"hybrid_layer_pattern": kinds, "num_layers": len(kinds)}
    numbers = agreed(naming.configs)
    for argument, pattern in (("moe_layer_freq", _ROUTER), ("linear_attention_freq", _DELTA_NET)):
        layers = {int(m[1]) for m in map(pattern.fullmatch, names) if m is not None}
        if "layer" in numbers and layers:
            out[argument] = [int(n in layers) for n in range(int(numbers["layer"][0]))]
    scaling = next((s for c in naming.configs if (s := c.rope_scaling) is not None), None)
    return out | ({} if scaling is None else megatron_rope_arguments(scaling, latent=out[_LATENT]))


def _hybrid_pattern(names: Sequence[str]) -> str:
    """Return the symbols of the layers of a model with Mamba layers, "" for another model.

    Megatron's loader takes a checkpoint whose arguments lack them for GPTModel's (training/checkpointing.py).
    """
    kinds = {
        int(match[1]): symbol
        for symbol, pattern in _HYBRID_LAYERS.items()
        for match in map(pattern.fullmatch, names)
        if match is not None
    }
    return "".join(kinds[n] for n in sorted(kinds)) if "M" in kinds.values() else ""


def run_config(arguments: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the content of run_config.yaml for Megatron's arguments, each of which has a field.

    Args:
        arguments: As common.pt has them.
        dtype: Of the embeddings, which a provider gives its parameters.
    """
    model = {name: value for name, value in arguments.items() if name in _BRIDGE_SAME}
    model |= {field: arguments[name] for name, field in _BRIDGE_RENAMED.items() if name in arguments}
    flag = next((name for name in _ACTIVATIONS if arguments.get(name)), "")
    model |= {
        "_target_": _BRIDGE_PROVIDERS[bool(arguments.get(_LATENT))],
        "activation_func": {"_target_": _ACTIVATIONS.get(flag, _PLAIN_GELU), "_call_": False},
        "share_embeddings_and_output_weights": not arguments[_UNTIED],
        "should_pad_vocab": True,
    }
    if dtype in _SWITCHES:
        model |= {_SWITCHES[dtype]: True, "params_dtype": {"_target_": f"torch.{dtype}", "_call_": False}}
    if _LENGTH in arguments:
        model["seq_length"] = arguments[_LENGTH]
    checkpoint = {
        "_target_": "megatron.bridge.training.config.CheckpointConfig",
        "ckpt_format": arguments["ckpt_format"],
        "fully_parallel_save": False,
        "save_optim": False,
        "save_rng": False,
    }
    return {"checkpoint": checkpoint, "model": dict(sorted(model.items()))}


def without_field(arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments that change the model, and that no field of a provider says."""
    with_field = _BRIDGE_SAME | _BRIDGE_RENAMED.keys() | _ACTIVATIONS.keys() | _OF_JOB | {_LENGTH, _UNTIED}
    return sorted(
        name for name, value in arguments.items() if name not in with_field and value not in _NEUTRAL
    )
