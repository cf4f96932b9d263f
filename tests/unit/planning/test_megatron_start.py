"""What Megatron's loader wants beside weights of the hub: release, tracker, arguments, padding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import ckptcore
from ckptcore.core.box import Box
from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.object_tree import decode
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.formats.megatron.writer import extra_states
from ckptcore.naming.rename import remap
from ckptcore.planning.name_maps import NameRequest, map_names

pytest.importorskip("transformers", minversion="5.0")

import megatron_models
import trainer_names
from samples import FIXTURES, unpack

# Fields of Megatron's TransformerConfig -> their arguments (megatron/training/arguments.py,
# core_transformer_config_from_args).
ARGUMENT = {"layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts"}
# What only a program of these tests needs, and what no argument is.
NOT_STATED = {
    "hidden_dropout",
    "attention_dropout",
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
    "moe_router_load_balancing_type",
    "moe_token_dispatcher_type",
    "activation_func",
    "is_hybrid_model",
    "use_mamba_mem_eff_path",
}


def hub(folder: Path, family: str, **more: Any) -> Path:
    config, state = trainer_names.hub_model(family)
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def start(source: Path, target: Path, **options: Any) -> ckptcore.Result:
    options = {"verb": "consolidate", "allow_untried": True, "catalog": False} | options
    return ckptcore.convert(str(source), str(target), to="torch_dist", names="megatron", **options)


def arguments(folder: Path) -> Mapping[str, Any]:
    blobs = {b.key: decode(b.tree) for b in ckptcore.open(str(folder)).blobs if "/shard_" not in b.key}
    assert (blobs["checkpoint_version"], blobs["iteration"]) == (3.0, 0)
    value = blobs["args"].value
    assert isinstance(value, Mapping)
    return value


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3", "gpt2", "nemotron_h"])
def test_arguments_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    """As the table of tests builds Megatron's own model, which computes the hub's logits."""
    source = hub(tmp_path / "hub", family)
    result = start(source, tmp_path / "out")
    if family.startswith("qwen"):  # arguments say all that their configs do
        assert "unstated-arguments" not in {w.code for w in result.warnings}
    config = json.loads((source / "config.json").read_text())
    stated = arguments(tmp_path / "out")
    wanted = megatron_models.megatron_config(config, megatron_models.FAMILIES[family])
    own = ("rotary", "hybrid")
    wanted |= {k: v for k, v in megatron_models.gpt_model(config, 128).items() if k.startswith(own)}
    if "kv_lora_rank" in config:
        # Of the attention that tests use, and of scores by softmax.
        del wanted["kv_channels"], wanted["moe_router_pre_softmax"]
    if "moe_ffn_hidden_size" in wanted and "first_k_dense_replace" not in config:
        del wanted["ffn_hidden_size"]  # no layer is dense
    if wanted.get("moe_router_topk_scaling_factor") == 1.0:
        del wanted["moe_router_topk_scaling_factor"]  # without one, nothing is scaled
    wanted = {ARGUMENT.get(k, k): v for k, v in wanted.items() if k not in NOT_STATED}
    defaults = {"rotary_percent": 1.0}
    assert {k: stated.get(k, defaults.get(k)) for k in wanted} == wanted
    assert stated["untie_embeddings_and_output_weights"] is not config["tie_word_embeddings"]
    assert (stated["vocab_size"], stated["padded_vocab_size"]) == (config["vocab_size"], 128)


@pytest.mark.parametrize(("options", "rows"), [({}, 128), ({"verb": "reshard", "mesh": "pp=2,tp=2"}, 256)])
def test_a_job_finds_its_release_and_the_hub_its_model_back(
    tmp_path: Path, options: dict[str, Any], rows: int
) -> None:
    source = hub(tmp_path / "hub", "qwen3")
    result = start(source, tmp_path / "out", **options)
    assert {w.code for w in result.warnings} >= {"no-optimizer"}
    assert not [w for w in result.warnings if w.code == "unstated-arguments"]
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "release"
    assert {f.split("/")[0] for f in files} == {"latest_checkpointed_iteration.txt", "release"}
    assert {"release/common.pt", "release/.metadata", "release/metadata.json"} <= files
    manifest = ckptcore.open(str(tmp_path / "out"))
    original = trainer_names.hub_model("qwen3")[1]
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
    }
    for name, of_hub in names.items():
        tensor = ckptcore.read(manifest, name)
        assert tensor.shape[0] == rows
        assert torch.equal(tensor[:40], original[of_hub])
        assert not tensor[40:].any()
    stated = arguments(tmp_path / "out")
    mesh = ("pipeline_model_parallel_size", "tensor_model_parallel_size")
    assert [stated[k] for k in mesh] == ([2, 2] if options else [1, 1])
    # Arguments of the checkpoint say how many rows are the vocabulary's: no config is named.
    back: dict[str, Any] = {"verb": "export", "arch": "qwen3", "config": "none", "catalog": False}
    ckptcore.convert(str(tmp_path / "out"), str(tmp_path / "back"), **back)
    restored = ckptcore.open(str(tmp_path / "back"))
    assert {t.fqn for t in restored.tensors} == original.keys()
    assert all(torch.equal(ckptcore.read(restored, n), t) for n, t in original.items())


def test_rows_of_zeros_are_made_in_the_plan(tmp_path: Path) -> None:
    source = ckptcore.open(str(hub(tmp_path / "hub", "llama")))
    mapped = map_names(remap(source), "hf-hub", NameRequest(to="megatron", source=source, tp=3, untried=True))
    made = {m.name: m for m in mapped.mapped.made}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert mapped.map.as_dict()["padding"][name] == 384 - 40
        assert made[name].rule.endswith(", and 344 rows of zeros")
        assert not made[name].same
    assert {t.fqn: t.shape[0] for t in mapped.mapped.manifest.tensors}["output_layer.weight"] == 384


@pytest.mark.parametrize("box", [((0, 1), (5, 2)), ((2, 0), (1, 3)), ((2, 1), (3, 1)), ((3, 0), (2, 3))])
def test_any_box_of_padded_rows_is_the_same(box: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    stored, shape = torch.arange(9.0).reshape(3, 3), (5, 3)
    function, params = FUNCTIONS["padded_float32"], (3, *shape)
    complete = torch.cat([stored, torch.zeros(2, 3)])
    part = Box(*box)
    (needed,) = function.needs(part, params)
    (rows, columns) = (slice(o, e) for o, e in zip(needed.offset, needed.end, strict=True))
    out = torch.full(part.shape, 7.0)
    function.fill(torch, part, [stored[rows, columns]], params, out)
    (rows, columns) = (slice(o, e) for o, e in zip(part.offset, part.end, strict=True))
    assert torch.equal(out, complete[rows, columns])


@pytest.mark.parametrize(
    ("of_hub", "trained"),
    [("hf_qwen2", "gpt_qwen2_tied_bias_tp2pp2_0.19.2"), ("hf_deepseekv3", "gpt_deepseekv3_tp2pp2_0.19.2")],
)
def test_extra_states_are_those_that_megatron_wrote(
    request: pytest.FixtureRequest, of_hub: str, trained: str
) -> None:
    """And those of modules that only Transformer Engine's layers have."""
    truths = unpack(request.config.rootpath / ".pytest_cache/samples", FIXTURES / "maps/truths.tar.zst")
    source = ckptcore.open(str(truths / of_hub))
    mapped = map_names(
        remap(source), "hf-hub", NameRequest(to="megatron", source=source, untried=True)
    ).mapped
    wrote = {b.key for b in ckptcore.open(str(truths / trained / "ckpt")).blobs if "._extra_state/" in b.key}
    made = set(extra_states(mapped.manifest.tensors))
    assert wrote
    assert wrote <= made
    others = {key.split("._extra_state")[0].split(".")[-1] for key in made - wrote}
    assert others <= {"core_attention", "final_layernorm"} | {
        f"{n}_layernorm" for n in ("input", "pre_mlp", "q", "k", "kv")
    }


def test_every_tensor_of_sparse_and_expert_layers_is_cut(tmp_path: Path) -> None:
    """Of attention with a sink for each head, and experts with biases, by the rules for Megatron's names."""
    start(hub(tmp_path / "hub", "gpt_oss"), tmp_path / "out", verb="reshard", mesh="ep=2,tp=2")
    manifest = ckptcore.open(str(tmp_path / "out"))
    cuts = {t.fqn: {c.box.shape for c in manifest.chunks_of(n)} for n, t in enumerate(manifest.tensors)}
    shapes = {t.fqn: t.shape for t in manifest.tensors}
    experts = "decoder.layers.mlp.experts.experts.linear_fc1.bias"
    assert cuts[experts] == {(*shapes[experts][:1], shapes[experts][1] // 2, shapes[experts][2] // 2)}
    sinks = "decoder.layers.self_attention.core_attention.softmax_offset"
    assert {heads for _, heads in cuts[sinks]} == {shapes[sinks][1] // 2}


def test_ranks_that_do_not_divide_the_feed_forward_network_are_refused(tmp_path: Path) -> None:
    state = dict(trainer_names.hub_model("llama")[1])
    for name, tensor in state.items():  # 23 of its 24 rows
        if ".mlp." in name:
            state[name] = tensor[:, :23] if "down_proj" in name else tensor[:23]
    source = hub(tmp_path / "hub", "llama", intermediate_size=23)
    save_file({n: t.contiguous() for n, t in state.items()}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="cannot cut 23 rows of the feed-forward network with tp=2"):
        start(source, tmp_path / "out", verb="reshard", mesh="tp=2")
    assert not (tmp_path / "out").exists()


def test_what_no_arguments_say_is_refused_or_named(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 2.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    source = hub(tmp_path / "llama", "llama", rope_parameters=rope)
    with pytest.raises(NameMismatch, match=r"nothing in args in common.pt says .*low_freq"):
        start(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (source / "config.json").unlink()
    source.joinpath("config.json").write_text(
        json.dumps(trainer_names.hub_model("llama")[0] | {"rope_parameters": rope | {"low_freq_factor": 1.0}})
    )
    start(source, tmp_path / "out")
    stated = arguments(tmp_path / "out")
    assert (stated["use_rope_scaling"], stated["rope_scaling_factor"]) == (True, 8.0)
    result = start(hub(tmp_path / "granite", "granitemoe"), tmp_path / "moe")
    (named,) = [w for w in result.warnings if w.code == "unstated-arguments"]
    assert "logits_scaling, residual_multiplier" in named.message


def bridge(folder: Path) -> dict[str, Any]:
    text = (folder / "release/run_config.yaml").read_text()
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_the_config_of_megatron_bridge_says_what_the_arguments_do(tmp_path: Path, family: str) -> None:
    start(hub(tmp_path / "hub", family), tmp_path / "out", verb="reshard", mesh="tp=2")
    content, stated = bridge(tmp_path / "out"), arguments(tmp_path / "out")
    model = content["model"]
    assert model["_target_"] == "megatron.bridge.models.gpt_provider.GPTModelProvider"
    assert model["activation_func"] == {"_target_": "torch.nn.functional.silu", "_call_": False}
    assert model["share_embeddings_and_output_weights"] is not stated["untie_embeddings_and_output_weights"]
    assert (model["tensor_model_parallel_size"], model["should_pad_vocab"]) == (2, True)
    renamed = {"layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts"}
    compared = {name: renamed.get(name, name) for name in model}
    shared = {name: argument for name, argument in compared.items() if argument in stated}
    assert {name: model[name] for name in shared} == {
        name: stated[argument] for name, argument in shared.items()
    }
    assert {"num_layers", "hidden_size", "layernorm_epsilon", "rotary_base"} <= shared.keys()
    # What a load of Bridge asks: there is neither an optimizer nor a random state.
    assert (content["checkpoint"]["save_optim"], content["checkpoint"]["save_rng"]) == (False, False)
    # Arguments and this config are both read on the way back, and must not contradict each other.
    options = {"verb": "consolidate", "names": "hf-hub", "arch": family, "catalog": False}
    ckptcore.convert(str(tmp_path / "out"), str(tmp_path / "back.safetensors"), **options)
    manifest = ckptcore.open(str(tmp_path / "back.safetensors"))
    state = trainer_names.hub_model(family)[1]
    assert {t.fqn for t in manifest.tensors} == state.keys()
    assert all(torch.equal(ckptcore.read(manifest, name), tensor) for name, tensor in state.items())


def test_the_parameters_of_megatron_bridge_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub", "llama")
    state = {n: t.bfloat16().contiguous() for n, t in trainer_names.hub_model("llama")[1].items()}
    save_file(state, source / "model.safetensors", {"format": "pt"})
    start(source, tmp_path / "out")
    model = bridge(tmp_path / "out")["model"]
    assert (model["bf16"], model["params_dtype"]["_target_"]) == (True, "torch.bfloat16")


@pytest.mark.parametrize(
    ("family", "lacking"), [("gemma2", "attn_logit_softcapping"), ("llama4", "attention_chunk_size")]
)
def test_no_config_of_megatron_bridge_where_it_would_build_another_model(
    tmp_path: Path, family: str, lacking: str
) -> None:
    """No command line completes it, so it is not written where the arguments do not say all."""
    result = start(hub(tmp_path / "hub", family), tmp_path / "out")
    assert not (tmp_path / "out/release/run_config.yaml").exists()
    assert any(lacking in w.message for w in result.warnings if w.code == "unstated-arguments")


def test_no_rank_has_a_part_of_a_head_or_group_of_mamba_layers(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub", "nemotron_h")
    with pytest.raises(UsageError, match="cannot run 2 groups of Mamba layers with tp=4"):
        start(source, tmp_path / "out", verb="reshard", mesh="tp=4")
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
@pytest.mark.usefixtures("asked_here")
def test_the_config_of_megatron_bridge_has_the_other_modules_of_a_model(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub", "qwen2_5_vl")
    config = json.loads((source / "config.json").read_text())
    result = start(source, tmp_path / "out")
    assert "unstated-arguments" not in {w.code for w in result.warnings}
    model = bridge(tmp_path / "out")["model"]
    assert model["_target_"] == "megatron.bridge.models.qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider"
    assert model["vision_config"]["config_dict"] == config["vision_config"]
    assert model["mrope_section"] == config["text_config"]["rope_parameters"]["mrope_section"]
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    assert {name: model[name] for name in ids} == {name: config[name] for name in ids}
    back = tmp_path / "back"
    ckptcore.convert(str(tmp_path / "out"), str(back), verb="export", config=str(source), catalog=False)
    state = trainer_names.hub_model("qwen2_5_vl")[1]
    exported = ckptcore.open(str(back))
    assert {t.fqn for t in exported.tensors} == state.keys()
    assert all(torch.equal(ckptcore.read(exported, name), tensor) for name, tensor in state.items())


def test_fields_that_no_provider_of_a_model_of_several_modules_has_are_named(tmp_path: Path) -> None:
    """The window of its language model is none of Bridge's fields."""
    windows = ["sliding_attention", "full_attention"]
    text = trainer_names.hub_model("qwen2_5_vl")[0]["text_config"]
    text |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": windows}
    result = start(hub(tmp_path / "hub", "qwen2_5_vl", text_config=text), tmp_path / "out")
    (named,) = [w for w in result.warnings if w.code == "unstated-arguments"]
    assert "run_config.yaml does not say" in named.message
    assert "sliding_window" in named.message
    assert not (tmp_path / "out/release/run_config.yaml").exists()
