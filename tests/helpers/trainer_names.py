"""Small models under the names and layouts of trainers, made with torch from what the hub has.

Written from the trainers' own sources, and without ckptcore: Megatron-Bridge's param_mapping.py, torchtitan's
state_dict_adapter.py, OLMo-core's nn/hf/convert.py. The models are those of `families`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from families import FAMILIES, FORMS, model_class, tiny_config

State = dict[str, torch.Tensor]
# Drawn behind the others, so that a new family changes the numbers of no other.
_LATER = ("qwen2_5_vl",)


def tiny_model(family: str) -> Any:
    """A family's tiny model: all tensors are random, and differ; those of one dim are about one."""
    config = tiny_config(family)
    model = model_class(config).from_config(config).eval()
    model.config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(
        sorted(FAMILIES, key=lambda name: (name in _LATER, name)).index(family)
    )
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=generator)
                # Where a norm counts from 0, 1 is taken off: with few bits, none is rounded away.
                tensor.copy_((1 + drawn / 8).half() if tensor.dim() == 1 else drawn / 4)
    return model


def hub_model(family: str) -> tuple[dict[str, Any], State]:
    """(config, state dict as the hub has it) of a family's tiny model."""
    from transformers.core_model_loading import revert_weight_conversion

    model = tiny_model(family)
    state: State = dict(revert_weight_conversion(model, model.state_dict()))
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return model.config.to_dict(), {n: t.detach() for n, t in state.items()}


def megatron(config: Mapping[str, Any], hub: State, form: str) -> State:
    """As Megatron-Core names it. form: stacked, layers (experts in one tensor), grouped or sequential."""
    if config["model_type"] == "gpt2":
        return _megatron_gpt2(hub)
    if config["model_type"] == "nemotron_h":
        return _megatron_hybrid(config, hub, form)
    if config["model_type"] == "qwen2_5_vl":  # models/qwen_vl/modeling_qwen25_vl.py of Megatron-Bridge
        pictures = {n: t for n, t in hub.items() if n.startswith("visual.")}
        language = {n: t for n, t in hub.items() if n not in pictures}
        named = megatron(config["text_config"], language, form)
        return pictures | {f"language_model.{n}": t for n, t in named.items()}
    out: State = {}
    for name, tensor in hub.items():
        if name.startswith("model.layers."):
            continue
        new = {
            "model.embed_tokens.weight": "embedding.word_embeddings.weight",
            "model.norm.weight": "decoder.final_layernorm.weight",
            "lm_head.weight": "output_layer.weight",
        }[name]
        padded = torch.cat([tensor, tensor.new_full((8, *tensor.shape[1:]), 7)])
        out[new] = tensor if new == "decoder.final_layernorm.weight" else padded
    layers = [_megatron_layer(config, below(hub, n), form) for n in range(config["num_hidden_layers"])]
    for n, layer in enumerate(layers):
        if form != "stacked" or any(x.keys() != layer.keys() for x in layers):
            out |= {f"decoder.layers.{n}.{name}": tensor for name, tensor in layer.items()}
        elif n == 0:
            out |= {f"decoder.layers.{k}": torch.stack([x[k] for x in layers]) for k in layer}
    return out


def _megatron_gpt2(hub: State) -> State:
    names = {
        r"transformer\.wte": "embedding.word_embeddings",
        r"transformer\.wpe": "embedding.position_embeddings",
        r"transformer\.ln_f": "decoder.final_layernorm",
        r"transformer\.h\.(\d+)\.ln_1": r"decoder.layers.\1.self_attention.linear_qkv.layer_norm",
        r"transformer\.h\.(\d+)\.ln_2": r"decoder.layers.\1.mlp.linear_fc1.layer_norm",
        r"transformer\.h\.(\d+)\.attn\.c_attn": r"decoder.layers.\1.self_attention.linear_qkv",
        r"transformer\.h\.(\d+)\.attn\.c_proj": r"decoder.layers.\1.self_attention.linear_proj",
        r"transformer\.h\.(\d+)\.mlp\.c_fc": r"decoder.layers.\1.mlp.linear_fc1",
        r"transformer\.h\.(\d+)\.mlp\.c_proj": r"decoder.layers.\1.mlp.linear_fc2",
    }
    out: State = {}
    for name, tensor in hub.items():
        module, _, kind = name.rpartition(".")
        old, new = next((o, n) for o, n in names.items() if re.fullmatch(o, module))
        module = re.sub(old, new, module)
        value = tensor.T if "linear_" in module and tensor.dim() == 2 else tensor
        if module.endswith("linear_qkv"):  # heads before queries, keys and values
            value = value.reshape(3, 4, 4, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
        out[f"{module}_{kind}" if module.endswith("layer_norm") else f"{module}.{kind}"] = value
    return out


def _megatron_hybrid(config: Mapping[str, Any], hub: State, form: str) -> State:
    """As HybridModel (ssm/mamba_mixer.py) and Megatron-Bridge's models/nemotronh have it."""
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    groups = config["n_groups"] * config["ssm_state_size"]
    parts = {"z": inner, "x": inner, "B": groups, "C": groups, "dt": config["mamba_num_heads"]}
    cut = {"mixer.in_proj.weight": [*parts], "mixer.conv1d.weight": [*"xBC"], "mixer.conv1d.bias": [*"xBC"]}
    names = {
        "mixer.o_proj.weight": "self_attention.linear_proj.weight",
        "mixer.gate.weight": "mlp.router.weight",
        "mixer.gate.e_score_correction_bias": "mlp.router.expert_bias",
        "mixer.up_proj.weight": "mlp.linear_fc1.weight",
        "mixer.down_proj.weight": "mlp.linear_fc2.weight",
        "mixer.shared_experts.up_proj.weight": "mlp.shared_experts.linear_fc1.weight",
        "mixer.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    }
    norms = {
        "mixer.in_proj.weight": "mixer.in_proj.layer_norm_weight",
        "mixer.q_proj.weight": "self_attention.linear_qkv.layer_norm_weight",
        "mixer.up_proj.weight": "mlp.linear_fc1.layer_norm_weight",
        "mixer.gate.weight": "pre_mlp_layernorm.weight",
    }
    out: State = {"decoder.final_norm.weight": hub["backbone.norm_f.weight"]}
    for old, new in (("backbone.embeddings", "embedding.word_embeddings"), ("lm_head", "output_layer")):
        out[f"{new}.weight"] = torch.cat([hub[f"{old}.weight"], torch.full((8, 16), 7.0)])
    for n in range(len(config["layers_block_type"])):
        start, prefix = f"backbone.layers.{n}.", f"decoder.layers.{n}."
        left = {k.removeprefix(start): t for k, t in hub.items() if k.startswith(start)}
        kind = next(name for name in norms if name in left)
        out[prefix + norms[kind]] = left.pop("norm.weight")
        if "mixer.q_proj.weight" in left:
            q, k, v = (left.pop(f"mixer.{x}_proj.weight").unflatten(0, (2, -1)) for x in "qkv")
            out[f"{prefix}self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).flatten(0, 1)
        out |= {prefix + names[name]: left.pop(name) for name in list(left) if name in names}
        for old, new in (("up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            of_experts = [left.pop(f"mixer.experts.{e}.{old}.weight") for e in range(4) if "gate" in kind]
            if form == "grouped":
                named = {f"mlp.experts.{new}.weight{e}": t for e, t in enumerate(of_experts)}
            elif form == "sequential":
                named = {f"mlp.experts.local_experts.{e}.{new}.weight": t for e, t in enumerate(of_experts)}
            else:
                named = {f"mlp.experts.experts.{new}.weight": torch.stack(of_experts)} if of_experts else {}
            out |= {prefix + name: tensor for name, tensor in named.items()}
        for name, tensor in left.items():  # of a mixer: its own names
            labels = cut.get(name, []) if form in ("stacked", "layers") else []
            pieces = tensor.split([parts[x] for x in labels]) if labels else [tensor]
            ends = [f".{x}" for x in labels] or [""]
            out |= {f"{prefix}{name}{end}": piece for end, piece in zip(ends, pieces, strict=True)}
    return out


def below(hub: State, layer: int) -> State:
    """The tensors of a layer, by their names in it."""
    prefix = f"model.layers.{layer}."
    return {n.removeprefix(prefix): t for n, t in hub.items() if n.startswith(prefix)}


def _megatron_layer(config: Mapping[str, Any], hub: State, form: str) -> State:
    out: State = {}
    gemma = "pre_feedforward_layernorm.weight" in hub
    before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    names = {
        "input_layernorm.weight": "input_layernorm.weight",
        f"{before}.weight": "pre_mlp_layernorm.weight",
        "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
        "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
        "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
        "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
        "self_attn.sinks": "self_attention.core_attention.softmax_offset",
        "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
        "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
        "self_attn.q_a_layernorm.weight": "self_attention.q_layernorm.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
        "self_attn.kv_a_layernorm.weight": "self_attention.kv_layernorm.weight",
        "mlp.gate.weight": "mlp.router.weight",
        "mlp.router.weight": "mlp.router.weight",
        "mlp.router.bias": "mlp.router.bias",
        "block_sparse_moe.gate.weight": "mlp.router.weight",
        "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
        "block_sparse_moe.e_score_correction_bias": "mlp.router.expert_bias",
        "mlp.down_proj.weight": "mlp.linear_fc2.weight",
        "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    }
    if gemma:
        names |= {
            "post_attention_layernorm.weight": "self_attention.linear_proj.post_layernorm.weight",
            "post_feedforward_layernorm.weight": "mlp.linear_fc2.post_layernorm.weight",
        }
    indexer = "self_attention.core_attention.indexer"
    for old, new in (("wq_b", "linear_wq_b"), ("wk", "linear_wk"), ("weights_proj", "linear_weights_proj")):
        names[f"self_attn.indexer.{old}.weight"] = f"{indexer}.{new}.weight"
    for kind in ("weight", "bias"):
        names[f"self_attn.indexer.k_norm.{kind}"] = f"{indexer}.k_norm.{kind}"
    left = _apart(config, hub)
    for old, new in names.items():
        if old in left:
            out[new] = left.pop(old)
    if config["model_type"].startswith(("qwen3_next", "qwen3_5")):
        _megatron_delta_layer(config, left, out, form)
    if "self_attn.q_proj.weight" in left:
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        for kind in ("weight", "bias"):
            parts = [left.pop(f"self_attn.{x}_proj.{kind}", None) for x in "qkv"]
            if parts[0] is not None:
                rows = [
                    p.reshape(groups, n, -1, *p.shape[1:])
                    for p, n in zip(parts, (heads // groups, 1, 1), strict=True)
                ]
                out[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows, 1).reshape(-1, *parts[0].shape[1:])
    for prefix in ("mlp.", "mlp.shared_experts."):
        if f"{prefix}gate_proj.weight" in left:
            both = [left.pop(f"{prefix}{x}_proj.weight") for x in ("gate", "up")]
            out[f"{prefix}linear_fc1.weight"] = torch.cat(both)
    for kind, values in _experts(left).items():
        for at, part in values.items():
            if form in ("stacked", "layers"):
                out[f"mlp.experts.experts.{at}.{kind}"] = part
            for e in range(len(part)):
                if form == "grouped":
                    out[f"mlp.experts.{at}.{kind}{e}"] = part[e]
                elif form == "sequential":
                    out[f"mlp.experts.local_experts.{e}.{at}.{kind}"] = part[e]
    assert not left, sorted(left)
    return out


def _megatron_delta_layer(config: Mapping[str, Any], left: State, out: State, form: str) -> None:
    """What Qwen3-Next's layers have of their own: GDNLinearMapping, GDNConv1dMapping of Megatron-Bridge, and
    `get_query_key_value_tensors` and `_split_tensor_factory` of Megatron-Core; taken out of ``left``.
    """
    of_attention = "self_attn.q_proj.weight" in left
    before = "self_attention.linear_qkv" if of_attention else "self_attention.in_proj"
    out[f"{before}.layer_norm_weight"] = out.pop("input_layernorm.weight")
    if "mlp.router.weight" in out:
        out["mlp.shared_experts.gate_weight"] = left.pop("mlp.shared_expert_gate.weight")
    else:
        out["mlp.linear_fc1.layer_norm_weight"] = out.pop("pre_mlp_layernorm.weight")
    if of_attention:
        heads, groups, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        queries, gates = (
            left.pop("self_attn.q_proj.weight").view(groups, heads // groups, 2, dim, -1).unbind(2)
        )
        keys, values = (left.pop(f"self_attn.{x}_proj.weight").view(groups, 1, dim, -1) for x in "kv")
        both = torch.cat([queries, gates, keys, values], 1)
        out["self_attention.linear_qkv.weight"] = both.reshape(-1, both.shape[-1])
        return
    of_keys, of_values, key, value = (
        config[f"linear_{k}"] for k in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    wide, more = of_keys * key, of_values * value
    if "linear_attn.in_proj_qkvz.weight" in left:
        by_head = left.pop("linear_attn.in_proj_qkvz.weight").view(of_keys, -1, config["hidden_size"])
        parts = [*by_head.split([key, key, more // of_keys, more // of_keys], 1)]
        by_head = left.pop("linear_attn.in_proj_ba.weight").view(of_keys, -1, config["hidden_size"])
        parts = [p.reshape(-1, config["hidden_size"]) for p in (*parts, *by_head.chunk(2, 1))]
    else:
        parts = [*left.pop("linear_attn.in_proj_qkv.weight").split([wide, wide, more])]
        parts += [left.pop(f"linear_attn.in_proj_{x}.weight") for x in "zba"]
    pieces = {
        "in_proj.weight": dict(zip(("query", "key", "value", "z", "beta", "alpha"), parts, strict=True)),
        "conv1d.weight": dict(
            zip(
                ("query", "key", "value"),
                left.pop("linear_attn.conv1d.weight").split([wide, wide, more]),
                strict=True,
            )
        ),
    }
    for name, rows in pieces.items():
        if form in ("grouped", "sequential"):
            out[f"self_attention.{name}"] = torch.cat([*rows.values()])
        else:
            out |= {f"self_attention.{name}.{part}": value for part, value in rows.items()}
    out["self_attention.out_norm.weight"] = left.pop("linear_attn.norm.weight") - 1
    for name in ("A_log", "dt_bias", "out_proj.weight"):
        out[f"self_attention.{name}"] = left.pop(f"linear_attn.{name}")


def _apart(config: Mapping[str, Any], hub: State) -> State:
    """A layer with what Phi-3, Granite and Llama 4 join on the hub in parts, under the names of others."""
    out: State = {}
    heads, groups = config.get("num_attention_heads", 0), config.get("num_key_value_heads", 0)
    for name, tensor in hub.items():
        if name == "self_attn.qkv_proj.weight":
            rows = tensor.shape[0] // (heads + 2 * groups)
            parts = tensor.split([heads * rows, groups * rows, groups * rows])
            out |= {f"self_attn.{x}_proj.weight": p for x, p in zip("qkv", parts, strict=True)}
        elif name == "mlp.gate_up_proj.weight":
            gate, up = tensor.chunk(2)
            out |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                out |= {f"mlp.experts.{e}.gate_proj.weight": gate, f"mlp.experts.{e}.up_proj.weight": up}
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            out |= {f"mlp.experts.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
        elif name == "feed_forward.experts.gate_up_proj":
            for e, both in enumerate(tensor):
                gate, up = both.T.contiguous().chunk(2)
                out |= {f"mlp.experts.{e}.gate_proj.weight": gate, f"mlp.experts.{e}.up_proj.weight": up}
        elif name == "feed_forward.experts.down_proj":
            out |= {f"mlp.experts.{e}.down_proj.weight": down.T for e, down in enumerate(tensor)}
        else:
            for old, new in _SAME.items():
                name = name.replace(old, new)
            out[name] = tensor
    return out


_SAME = {
    "block_sparse_moe.router.layer.": "mlp.gate.",
    "feed_forward.router.": "mlp.gate.",
    "feed_forward.shared_expert.": "mlp.shared_experts.",
    "mlp.shared_expert.": "mlp.shared_experts.",
    "feed_forward.": "mlp.",
}


def _experts(left: State) -> dict[str, dict[str, torch.Tensor]]:
    """weight, bias -> linear_fc1 and linear_fc2 of all experts; taken out of ``left``."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    if "mlp.experts.gate_up_proj" in left:  # GPT-OSS: interleaved, and transposed
        for kind, name in (("weight", "gate_up_proj"), ("bias", "gate_up_proj_bias")):
            value = left.pop(f"mlp.experts.{name}")
            down = left.pop(f"mlp.experts.{name.replace('gate_up', 'down')}")
            both = torch.cat([value[..., ::2], value[..., 1::2]], -1)
            found[kind] = {
                "linear_fc1": both.transpose(1, 2) if kind == "weight" else both,
                "linear_fc2": down.transpose(1, 2) if kind == "weight" else down,
            }
        return found
    gate, up, down = (
        ("w1", "w3", "w2") if any(".w1." in n for n in left) else ("gate_proj", "up_proj", "down_proj")
    )
    count = len([n for n in left if re.fullmatch(rf".*experts\.\d+\.{gate}\.weight", n)])
    if not count:
        return {}
    root = next(n for n in left if f".experts.0.{gate}." in n).split("experts.")[0]
    take = lambda e, x: left.pop(f"{root}experts.{e}.{x}.weight")  # noqa: E731
    rows = [(torch.cat([take(e, gate), take(e, up)]), take(e, down)) for e in range(count)]
    return {
        "weight": {
            "linear_fc1": torch.stack([a for a, _ in rows]),
            "linear_fc2": torch.stack([b for _, b in rows]),
        }
    }


def torchtitan(config: Mapping[str, Any], hub: State, form: str) -> State:
    """As torchtitan names it. form: old, linear (qkv_linear and new experts), or fused (wqkv)."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    rotated = config["model_type"] in ("llama", "mistral", "mixtral")
    head = "output" if form == "old" else "lm_head"
    out = {
        "tok_embeddings.weight": hub["model.embed_tokens.weight"],
        "norm.weight": hub["model.norm.weight"],
        f"{head}.weight": hub["lm_head.weight"],
    }
    experts = "moe.experts." if form == "old" else "moe.routed_experts.inner_experts."
    dims = ("", "", "", "") if form == "old" else ("_EFD", "_EDF", "_EG", "_ED")
    names = {
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.o_proj.weight": "attention.wo.weight",
        "self_attn.o_proj.bias": "attention.wo.bias",
        "self_attn.q_norm.weight": "attention.q_norm.weight",
        "self_attn.k_norm.weight": "attention.k_norm.weight",
        "self_attn.sinks": "attention.sinks",
        "self_attn.q_a_proj.weight": "attention.wq_a.weight",
        "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
        "self_attn.q_b_proj.weight": "attention.wq_b.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
        "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
        "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
        "mlp.gate_proj.weight": "feed_forward.w1.weight",
        "mlp.up_proj.weight": "feed_forward.w3.weight",
        "mlp.down_proj.weight": "feed_forward.w2.weight",
        "mlp.gate.weight": "moe.router.gate.weight",
        "mlp.router.weight": "moe.router.gate.weight",
        "mlp.router.bias": "moe.router.gate.bias",
        "mlp.gate.e_score_correction_bias": "moe.expert_bias" + ("" if form == "old" else "_E"),
        "block_sparse_moe.gate.weight": "feed_forward.gate.weight",
        **{
            f"block_sparse_moe.experts.{e}.w{k}.weight": f"feed_forward.experts.{e}.w{k}.weight"
            for e in range(4)
            for k in (1, 2, 3)
        },
        "mlp.shared_experts.gate_proj.weight": "moe.shared_experts.w1.weight",
        "mlp.shared_experts.up_proj.weight": "moe.shared_experts.w3.weight",
        "mlp.shared_experts.down_proj.weight": "moe.shared_experts.w2.weight",
    }
    for n in range(config["num_hidden_layers"]):
        left, prefix = _apart(config, below(hub, n)), f"layers.{n}."
        if config["model_type"].startswith("qwen3_5"):
            _torchtitan_gated_layer(config, left, out, prefix)
        for old, new in names.items():
            if old in left:
                out[prefix + new] = left.pop(old)
        for kind in ("weight", "bias"):
            parts = [left.pop(f"self_attn.{x}_proj.{kind}", None) for x in "qkv"]
            if parts[0] is None:
                continue
            if rotated:
                parts = [_unrotated(parts[0], heads), _unrotated(parts[1], groups), parts[2]]
            linear = "" if form == "old" else "qkv_linear."
            if form == "fused":
                rows = [
                    p.reshape(groups, -1, p.shape[0] // (heads if i == 0 else groups), *p.shape[1:])
                    for i, p in enumerate(parts)
                ]
                out[f"{prefix}attention.qkv_linear.wqkv.{kind}"] = torch.cat(rows, 1).reshape(
                    -1, *parts[0].shape[1:]
                )
            else:
                out |= {
                    f"{prefix}attention.{linear}w{x}.{kind}": p for x, p in zip("qkv", parts, strict=True)
                }
        if "mlp.experts.gate_up_proj" in left:
            for at, (name, turn) in enumerate(
                (
                    ("gate_up_proj", True),
                    ("down_proj", True),
                    ("gate_up_proj_bias", False),
                    ("down_proj_bias", False),
                )
            ):
                value = left.pop(f"mlp.experts.{name}")
                new = ("mlp1_weight", "mlp2_weight", "mlp1_bias", "mlp2_bias")[at]
                suffix = "" if form == "old" else ("_EGD", "_EDF", "_EG", "_ED")[at]
                out[prefix + experts + new + suffix] = value.transpose(1, 2).contiguous() if turn else value
        for x, old, suffix in (
            ("w1", "gate_proj", dims[0]),
            ("w3", "up_proj", dims[0]),
            ("w2", "down_proj", dims[1]),
        ):
            each = [
                left.pop(f"mlp.experts.{e}.{old}.weight")
                for e in range(4)
                if f"mlp.experts.{e}.{old}.weight" in left
            ]
            if each:
                out[prefix + experts + x + suffix] = torch.stack(each)
        assert not left, sorted(left)
    return out


def _torchtitan_gated_layer(config: Mapping[str, Any], left: State, out: State, prefix: str) -> None:
    """The attention or delta net of Qwen3.5 (models/qwen3_5/state_dict_adapter.py), taken out of ``left``."""
    for module in ("self_attn.", "linear_attn."):
        for name in [n for n in left if n.startswith(module)]:
            value, own = left.pop(name), name.removeprefix(module)
            if own.startswith(("in_proj_qkv.", "conv1d.")):
                wide = config["linear_num_key_heads"] * config["linear_key_head_dim"]
                kind = "conv_" if own.startswith("conv") else "in_proj_"
                parts = value.split([wide, wide, len(value) - 2 * wide])
                out |= {f"{prefix}attn.{kind}{x}.weight": p for x, p in zip("qkv", parts, strict=True)}
            else:
                own = re.sub(r"^([qkvo])_proj", r"w\1", own)
                out[f"{prefix}attn.{own}"] = value
    if "mlp.shared_expert_gate.weight" in left:
        out[f"{prefix}moe.shared_experts.gate.weight"] = left.pop("mlp.shared_expert_gate.weight")


def _unrotated(w: torch.Tensor, heads: int) -> torch.Tensor:
    """torchtitan's `_reverse_permute`."""
    rows, columns = w.shape
    return w.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def olmo_core(config: Mapping[str, Any], hub: State, form: str) -> State:
    """As OLMo-core names it. form: one, or dropless, whose experts are not transposed."""
    behind = config["model_type"] in ("olmo2", "olmo3", "flex_olmo")
    out = {
        "embeddings.weight": torch.cat([hub["model.embed_tokens.weight"], torch.ones(8, 16)]),
        "lm_head.norm.weight": hub["model.norm.weight"],
        "lm_head.w_out.weight": torch.cat([hub["lm_head.weight"], torch.ones(8, 16)]),
    }
    names = {
        "self_attn.q_proj.weight": "attention.w_q.weight",
        "self_attn.k_proj.weight": "attention.w_k.weight",
        "self_attn.v_proj.weight": "attention.w_v.weight",
        "self_attn.o_proj.weight": "attention.w_out.weight",
        "self_attn.q_proj.bias": "attention.w_q.bias",
        "self_attn.k_proj.bias": "attention.w_k.bias",
        "self_attn.v_proj.bias": "attention.w_v.bias",
        "self_attn.q_norm.weight": "attention.q_norm.weight",
        "self_attn.k_norm.weight": "attention.k_norm.weight",
        "mlp.gate_proj.weight": "feed_forward.w1.weight",
        "mlp.down_proj.weight": "feed_forward.w2.weight",
        "mlp.up_proj.weight": "feed_forward.w3.weight",
        "post_attention_layernorm.weight" if behind else "input_layernorm.weight": "attention_norm.weight",
        "post_feedforward_layernorm.weight"
        if behind
        else "post_attention_layernorm.weight": "feed_forward_norm.weight",
    }
    around = config["model_type"] == "gemma3_text"
    if around:  # norms on all sides, which count from 1 here
        names |= {
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "pre_feedforward_layernorm.weight": "feed_forward_norm.weight",
            "post_feedforward_layernorm.weight": "post_feed_forward_norm.weight",
        }
        out["lm_head.norm.weight"] = out["lm_head.norm.weight"] + 1
    for n in range(config["num_hidden_layers"]):
        left, prefix = below(hub, n), f"blocks.{n}."
        for old, new in names.items():
            if old in left:
                out[prefix + new] = left.pop(old) + (around and "norm" in new)
        if f"{prefix}attention.w_q.bias" in out:  # all projections have one, or none
            out[f"{prefix}attention.w_out.bias"] = torch.zeros(config["hidden_size"])
        if "mlp.gate.weight" in left:
            out[f"{prefix}feed_forward_moe.router.weight"] = left.pop("mlp.gate.weight").reshape(-1)
            for x, old in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                each = [left.pop(f"mlp.experts.{e}.{old}.weight") for e in range(4)]
                if form == "one" or x == "w2":
                    each = [w.T for w in each]
                out[f"{prefix}feed_forward_moe.experts.mlp.{x}"] = torch.cat(each).contiguous()
        assert not left, sorted(left)
    return out


def olmo(config: Mapping[str, Any], hub: State, form: str) -> State:
    """As allenai/OLMo names it (scripts/convert_olmo2_to_hf.py): up before gate. form: of one name only."""
    out = {
        "transformer.wte.weight": hub["model.embed_tokens.weight"],
        "transformer.ff_out.weight": hub["lm_head.weight"],
    }
    if "model.norm.weight" in hub:  # the first OLMo's norms have no weights
        out["transformer.ln_f.weight"] = hub["model.norm.weight"]
    names = {
        "self_attn.o_proj.weight": "attn_out.weight",
        "self_attn.q_norm.weight": "q_norm.weight",
        "self_attn.k_norm.weight": "k_norm.weight",
        "mlp.down_proj.weight": "ff_out.weight",
        "post_attention_layernorm.weight": "attn_norm.weight",
        "post_feedforward_layernorm.weight": "ff_norm.weight",
    }
    for n in range(config["num_hidden_layers"]):
        left, prefix = below(hub, n), f"transformer.blocks.{n}."
        out[f"{prefix}att_proj.weight"] = torch.cat([left.pop(f"self_attn.{x}_proj.weight") for x in "qkv"])
        out[f"{prefix}ff_proj.weight"] = torch.cat(
            [left.pop("mlp.up_proj.weight"), left.pop("mlp.gate_proj.weight")]
        )
        for old, new in names.items():
            if old in left:
                out[prefix + new] = left.pop(old)
        assert not left, sorted(left)
    return out


def gpt_neox(config: Mapping[str, Any], hub: State, form: str) -> State:
    """As GPT-NeoX names it (convert_neox_to_hf.py). form: pipeline, or sequential for a job without one."""
    prefix, last = "sequential." if form == "sequential" else "", config["num_hidden_layers"]
    names = {
        "gpt_neox.embed_in.weight": "0.word_embeddings.weight",
        "embed_out.weight": f"{last + 4}.final_linear.weight",
        **{f"gpt_neox.final_layer_norm.{k}": f"{last + 3}.norm.{k}" for k in ("weight", "bias")},
    }
    out: State = {}
    for name, tensor in hub.items():
        layer = re.match(r"gpt_neox\.layers\.(\d+)\.(.+)", name)
        out[prefix + (f"{int(layer[1]) + 2}.{layer[2]}" if layer else names[name])] = tensor
    return out


def nanotron(config: Mapping[str, Any], hub: State, form: str) -> State:
    """As nanotron names it (convert_nanotron_to_hf.py). form: halves, or interleaved."""
    names = {
        "model.embed_tokens.weight": "model.token_position_embeddings.pp_block.token_embedding.weight",
        "model.norm.weight": "model.final_layer_norm.pp_block.weight",
        "lm_head.weight": "model.lm_head.pp_block.weight",
    }
    out = {new: hub[old] for old, new in names.items() if old in hub}
    for n in range(config["num_hidden_layers"]):
        left, prefix = below(hub, n), f"model.decoder.{n}.pp_block."
        for kind in ("weight", "bias"):
            parts = [left.pop(f"self_attn.{x}_proj.{kind}", None) for x in "qkv"]
            if parts[0] is not None:
                heads = config["num_attention_heads"], config["num_key_value_heads"]
                if form == "interleaved":
                    parts[:2] = [_neighbours(p, h) for p, h in zip(parts, heads, strict=False)]
                out[f"{prefix}attn.qkv_proj.{kind}"] = torch.cat(parts)
        gate_up = [left.pop(f"mlp.{x}_proj.weight") for x in ("gate", "up")]
        out[f"{prefix}mlp.gate_up_proj.weight"] = torch.cat(gate_up)
        out[f"{prefix}mlp.down_proj.weight"] = left.pop("mlp.down_proj.weight")
        out[f"{prefix}attn.o_proj.weight"] = left.pop("self_attn.o_proj.weight")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{prefix}{norm}.weight"] = left.pop(f"{norm}.weight")
        assert not left, sorted(left)
    return out


def nanotron_config(config: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Its model_config.json, without which nothing says how rotary pairs are stored."""
    keys = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps")
    return {key: config[key] for key in keys} | {"rope_interleaved": form == "interleaved"}


def _neighbours(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head with the dims of a rotary pair beside each other."""
    pairs = rows.shape[0] // heads // 2
    return rows.view(heads, 2, pairs, -1).transpose(1, 2).reshape(rows.shape)


# World -> (how it is made, its forms).
WORLDS: dict[str, tuple[Callable[[Mapping[str, Any], State, str], State], tuple[str, ...]]] = {
    "megatron": (megatron, FORMS["megatron"]),
    "torchtitan": (torchtitan, FORMS["torchtitan"]),
    "olmo_core": (olmo_core, FORMS["olmo_core"]),
    "olmo": (olmo, FORMS["olmo"]),
    "gpt_neox": (gpt_neox, FORMS["gpt_neox"]),
    "nanotron": (nanotron, FORMS["nanotron"]),
}
