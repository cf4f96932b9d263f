"""Inverse maps: what the hub has comes out as each trainer has it, and back, bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.naming.maps.declaration import built_in_maps
from ckptcore.naming.rename import Mapped, remap
from ckptcore.naming.worlds import GENERATIONS, parse_world
from ckptcore.planning.model_card import is_untouched
from ckptcore.planning.name_maps import MappedNames, NameRequest, map_names

pytest.importorskip("transformers", minversion="5.0")

import grids
import trainer_names
from families import FAMILIES, forms
from samples import FIXTURES, unpack
from trainer_names import WORLDS, State

hub_model = cache(trainer_names.hub_model)

# Form of a trainer's checkpoint in `trainer_names` -> generation of its names.
GENERATION_OF = {
    "torchtitan": {"old": "wq", "linear": "qkv_linear", "fused": "wqkv"},
    "olmo_core": {"one": "default", "dropless": "dropless"},
    "olmo": {"one": ""},
}
PADDED = {
    "megatron": ("embedding.word_embeddings.weight", "output_layer.weight"),
    "olmo_core": ("embeddings.weight", "lm_head.w_out.weight"),
}
# In torch_dist, norms are called like the linear layers behind them.
FUSED_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
# Layers that are not alike have no first dim of their own: each stacked tensor would lack layers.
MIXED = {"glm4_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "llama4"}
DELTA = (
    "qwen3_next",
    "qwen3_5",
    "nemotron_h",
)  # which only one builder of layers has: its norms have one name


def pairs() -> Iterator[tuple[str, str, str]]:
    for family, (_, _, worlds) in FAMILIES.items():
        yield from ((family, world, form) for world in worlds for form in forms(family, world))


def generation(family: str, world: str, form: str) -> str:
    if family == "gpt2" or (form == "layers" and family.startswith(DELTA)):
        return "fused"
    return GENERATION_OF.get(world, {}).get(form, form)


def hub_manifest(folder: Path, family: str, state: State | None = None) -> Manifest:
    config, hub = hub_model(family)
    folder.mkdir(exist_ok=True)
    tensors = {n: t.contiguous() for n, t in (hub if state is None else state).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return ckptcore.open(str(folder))


def to_trainer(mapped: Mapped, source: Manifest, to: str, **options: Any) -> MappedNames:
    world, of = parse_world(to)
    options = {"untried": True, "generation": of} | options
    return map_names(mapped, "hf-hub", NameRequest(to=world, source=source, **options))


def equal(manifest: Manifest, state: State) -> None:
    assert {t.fqn: t.shape for t in manifest.tensors} == {n: tuple(t.shape) for n, t in state.items()}
    for name, tensor in state.items():
        assert torch.equal(ckptcore.read(manifest, name), tensor), name


def trainer_state(family: str, world: str, form: str) -> State:
    """What a trainer has of the hub's model: no rows pad its vocabulary, and biases of experts are zero."""
    config, hub = hub_model(family)
    state = WORLDS[world][0](config, dict(hub), form)
    vocabulary = config.get("text_config", config)["vocab_size"]
    for name in (n for n in state if n.endswith(PADDED.get(world, ()))):
        state[name] = state[name][:vocabulary]
    if form == "stacked":
        for old, new in FUSED_NORMS.items():
            state = {n.replace(old, new): t for n, t in state.items()}
    return state


@pytest.mark.parametrize(
    ("family", "world", "form"), grids.sliced(list(pairs()), lambda row: (row[0], row[1:]))
)
def test_comes_out_as_the_trainer_has_it_and_back(tmp_path: Path, family: str, world: str, form: str) -> None:
    source = hub_manifest(tmp_path / "hub", family)
    bare = remap(source)
    if form == "stacked" and (family in MIXED or family.startswith(DELTA)):
        with pytest.raises(NameMismatch, match=f"no map takes hf-hub names of {FAMILIES[family][0]}"):
            to_trainer(bare, source, f"{world}:{form}")
        return
    found = to_trainer(bare, source, f"{world}:{generation(family, world, form)}".rstrip(":"))
    names = {t.fqn for t in found.mapped.manifest.tensors}
    state = trainer_state(family, world, form)
    for name, _, _ in found.conversion.zeros:  # routers of the hub have none
        state.setdefault(name, torch.zeros(4))
    equal(found.mapped.manifest, state)
    assert names == state.keys()
    if world == "nanotron":  # whose step says how it stores rotary pairs
        own = trainer_names.nanotron_config(hub_model(family)[0], form)
        (tmp_path / "hub/model_config.json").write_text(json.dumps(own))
    stored = found.mapped
    if any(node.fn.startswith("add_") for node in stored.manifest.derived.values()):  # a sum is not cut again
        save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "stored.safetensors")
        stored = remap(ckptcore.open(str(tmp_path / "stored.safetensors")))
    back = map_names(stored, world, NameRequest(arch=found.map.arch, to="hf-hub", source=source))
    equal(back.mapped.manifest, hub_model(family)[1])


def generations() -> Iterator[tuple[str, str, str]]:
    for rules in built_in_maps():
        if not rules.refused and rules.to == "hf-hub":
            written = GENERATIONS.get(rules.world, ("",))  # others are only read
            yield from ((rules.arch, rules.world, of) for of in rules.generations or ("",) if of in written)


@pytest.mark.parametrize(
    ("family", "world", "of"), grids.sliced(list(generations()), lambda row: (row[0], row[1:]))
)
def test_every_generation_comes_back(tmp_path: Path, family: str, world: str, of: str) -> None:
    source = hub_manifest(tmp_path / "hub", family)
    found = to_trainer(remap(source), source, f"{world}:{of}".rstrip(":")).mapped.manifest
    state = {t.fqn: ckptcore.read(found, t.fqn).contiguous() for t in found.tensors}
    save_file(state, tmp_path / "stored.safetensors")
    if world == "nanotron":
        own = trainer_names.nanotron_config(hub_model(family)[0], of)
        (tmp_path / "hub/model_config.json").write_text(json.dumps(own))
    stored = remap(ckptcore.open(str(tmp_path / "stored.safetensors")))
    back = map_names(stored, world, NameRequest(arch=family, to="hf-hub", source=source))
    equal(back.mapped.manifest, hub_model(family)[1])


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_a_layer_of_multi_token_prediction_that_the_hub_counts_apart(tmp_path: Path, family: str) -> None:
    """It is built as a layer of attention is, whatever the others are."""
    hub = dict(hub_model(family)[1])
    of_layer = {n: torch.randn_like(t) for n, t in trainer_names.below(hub, 1).items()}
    beside = {"fc": (16, 32), "norm": (16,), "pre_fc_norm_embedding": (16,), "pre_fc_norm_hidden": (16,)}
    hub |= {f"mtp.layers.0.{n}": t for n, t in of_layer.items()}
    hub |= {f"mtp.{n}.weight": torch.randn(shape) for n, shape in beside.items()}
    source = hub_manifest(tmp_path / "hub", family, hub)
    found = to_trainer(remap(source), source, "megatron:fused").mapped.manifest
    state = {t.fqn: ckptcore.read(found, t.fqn) for t in found.tensors}
    assert torch.equal(state["mtp.layers.0.eh_proj.weight"], hub["mtp.fc.weight"])
    before = "decoder.layers.1.", "mtp.layers.0.mtp_model_layer."
    shapes = [{n.removeprefix(b): t.shape for n, t in state.items() if n.startswith(b)} for b in before]
    assert shapes[0] == shapes[1]
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "stored.safetensors")
    stored = remap(ckptcore.open(str(tmp_path / "stored.safetensors")))
    back = map_names(stored, "megatron", NameRequest(arch=family, to="hf-hub", source=source))
    equal(back.mapped.manifest, hub)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "gpt_oss"])
def test_names_of_jobs_with_transformer_engine(tmp_path: Path, family: str) -> None:
    """Norms before experts are modules of their own; those before dense layers are in these."""
    source = hub_manifest(tmp_path / "hub", family)
    found = to_trainer(remap(source), source, "megatron:transformer-engine")
    for name, _, _ in found.conversion.zeros:
        assert name.endswith(".expert_bias")
    state = trainer_state(family, "megatron", "stacked")
    fused = ".mlp.linear_fc1.layer_norm_"
    if family != "llama":
        assert any(fused in name for name in state)
        state = {n.replace(fused, ".pre_mlp_layernorm."): t for n, t in state.items()}
    equal(found.mapped.manifest, state)
    back = map_names(found.mapped, "megatron", NameRequest(arch=family, to="hf-hub", source=source))
    equal(back.mapped.manifest, hub_model(family)[1])


# Norm -> the linear layer that Transformer Engine has it in, in layers with this one.
FUSED_BY_ENGINE = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}


def engine_names(state: State) -> State:
    """Names of a model with norms of their own, as layers of Transformer Engine have them."""
    out: State = {}
    for name, tensor in state.items():
        layer = ".".join(name.split(".")[:3])
        module = name.removeprefix(f"{layer}.").rpartition(".")[0]
        behind = FUSED_BY_ENGINE.get(module, "")
        sparse = f"{layer}.self_attention.core_attention.indexer.linear_wk.weight" in state
        if f"{layer}.{behind}.weight" in state and not (sparse and "self_attention" in module):
            name = f"{layer}.{behind}.layer_norm_weight"
        out[name] = tensor
    return out


@pytest.mark.parametrize("family", sorted(MIXED))
def test_names_of_transformer_engine_where_dense_layers_and_experts_mix(tmp_path: Path, family: str) -> None:
    source = hub_manifest(tmp_path / "hub", family)
    found = to_trainer(remap(source), source, "megatron:transformer-engine")
    state = trainer_state(family, "megatron", "layers")
    for name, _, _ in found.conversion.zeros:
        state.setdefault(name, torch.zeros(4))
    named = engine_names(state)
    of_mlp = [name for name in named if name.endswith((".pre_mlp_layernorm.weight", "fc1.layer_norm_weight"))]
    assert len({name.split(".", 3)[3] for name in of_mlp}) == 2  # a layer of each kind
    equal(found.mapped.manifest, named)
    back = map_names(found.mapped, "megatron", NameRequest(arch=family, to="hf-hub", source=source))
    equal(back.mapped.manifest, hub_model(family)[1])


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_names_of_transformer_engine_for_multi_token_prediction(tmp_path: Path, family: str) -> None:
    """The hub counts its layer, which has experts, behind the others."""
    config, hub = hub_model(family)
    hub = dict(hub) | {f"model.layers.2.{n}": t + 1 for n, t in trainer_names.below(hub, 1).items()}
    beside = {"eh_proj": (16, 32), "enorm": (16,), "hnorm": (16,), "shared_head.norm": (16,)}
    hub |= {f"model.layers.2.{n}.weight": torch.randn(shape) for n, shape in beside.items()}
    source = hub_manifest(tmp_path / "hub", family, hub)
    (tmp_path / "hub/config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    found = to_trainer(remap(source), source, "megatron:transformer-engine").mapped
    shapes = {t.fqn: t.shape for t in found.manifest.tensors}
    before = "decoder.layers.1.", "mtp.layers.0.mtp_model_layer."
    of_layers = [{n.removeprefix(b): s for n, s in shapes.items() if n.startswith(b)} for b in before]
    assert of_layers[0] == of_layers[1]
    back = map_names(found, "megatron", NameRequest(arch=family, to="hf-hub", source=source))
    equal(back.mapped.manifest, hub)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_norm_that_no_layer_of_its_kind_has_is_missed(tmp_path: Path, layer: int) -> None:
    gone = f"model.layers.{layer}.post_attention_layernorm.weight"
    hub = {n: t for n, t in hub_model("glm4_moe")[1].items() if n != gone}
    source = hub_manifest(tmp_path / "hub", "glm4_moe", hub)
    with pytest.raises(NameMismatch, match=rf"nothing makes decoder\.layers\.{layer}\."):
        to_trainer(remap(source), source, "megatron:transformer-engine")


@pytest.mark.alike(1)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "nemotron_h"])
def test_no_tensor_may_be_missing_where_layers_are_of_kinds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    """Of two layers of each kind one lacks a tensor; or the last layer is gone."""
    model_type, config, worlds = FAMILIES[family]
    kinds = config.get("layer_types", ["linear_attention", "moe", "full_attention", "mlp"]) * 2
    place = "layer_types" if "layer_types" in config else "layers_block_type"
    fields = {**config, place: kinds, "num_hidden_layers": len(kinds)}
    monkeypatch.setitem(FAMILIES, family, (model_type, fields, worlds))
    form, hub = trainer_names.hub_model(family)
    by_pattern = {re.sub(r"\.\d+\.", ".N.", name): name for name in hub}
    last = f".layers.{len(kinds) - 1}."
    for missing in (*by_pattern.values(), last):
        folder = tmp_path / missing
        folder.mkdir()
        left = {n: t.contiguous() for n, t in hub.items() if missing not in n}
        save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(form))
        source = ckptcore.open(str(folder))
        with pytest.raises(NameMismatch, match=r"does not fit the map of|no lm_head"):
            to_trainer(remap(source), source, "megatron:fused")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "glm4_moe"])
def test_no_router_or_norm_of_one_layer_may_be_missing(tmp_path: Path, family: str) -> None:
    _, hub = hub_model(family)
    for missing in (
        n for n in hub if n.endswith(("gate.weight", "router.weight", "layer.weight", "norm.weight"))
    ):
        source = hub_manifest(tmp_path / missing, family, {n: t for n, t in hub.items() if n != missing})
        with pytest.raises(NameMismatch, match="does not fit the map of"):
            to_trainer(remap(source), source, "megatron:fused")


def tensors(folder: Path) -> State:
    manifest = ckptcore.open(str(folder))
    return {t.fqn: ckptcore.read(manifest, t.fqn) for t in manifest.tensors}


def converted(source: Path, target: Path, names: str, **options: Any) -> ckptcore.Result:
    options = {"verb": "consolidate", "to": "dcp", "allow_untried": True, "catalog": False} | options
    return ckptcore.convert(str(source), str(target), names=names, **options)


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("qwen3_moe", "torchtitan", "megatron"),
        ("llama", "torchtitan:wqkv", "olmo_core"),
        ("olmoe", "olmo_core:dropless", "megatron:grouped"),
        ("olmo2", "olmo", "olmo_core"),
    ],
)
def test_from_one_trainer_to_another_and_back(tmp_path: Path, family: str, first: str, second: str) -> None:
    """In one plan each way: the files between them are the trainers' alone."""
    hub_manifest(tmp_path / "hub", family)
    options = {"arch": family, "config": str(tmp_path / "hub")}
    converted(tmp_path / "hub", tmp_path / "one", first)
    done = converted(tmp_path / "one", tmp_path / "other", second, **options)
    converted(tmp_path / "other", tmp_path / "back", first, **options)
    before, after = tensors(tmp_path / "one"), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[n]) for n, t in before.items())
    codes = {w.code for w in done.warnings}
    assert "no-optimizer" in codes
    assert ("untried-map" in codes) == (second == "megatron:grouped")


def test_the_ranks_of_a_mesh_begin_from_the_hub(tmp_path: Path) -> None:
    hub_manifest(tmp_path / "hub", "qwen3_moe")
    converted(tmp_path / "hub", tmp_path / "out", "torchtitan", verb="reshard", mesh="fsdp=2,ep=2,tp=2")
    state = trainer_state("qwen3_moe", "torchtitan", "linear")
    state |= {f"layers.{n}.moe.expert_bias_E": torch.zeros(4) for n in range(2)}
    found = tensors(tmp_path / "out")
    assert found.keys() == state.keys()
    assert all(torch.equal(t, found[n]) for n, t in state.items())


@pytest.mark.parametrize(
    ("hub", "trained"),
    [
        ("hf_llama", "gpt_llama_tp2pp2_0.19.2"),
        ("hf_qwen2", "gpt_qwen2_tied_bias_tp2pp2_0.19.2"),
        ("hf_deepseekv3", "gpt_deepseekv3_tp2pp2_0.19.2"),
    ],
)
def test_the_newest_names_are_those_that_megatron_wrote(
    request: pytest.FixtureRequest, hub: str, trained: str
) -> None:
    """Of the same model, but for rows that pad its vocabulary, and states of generators."""
    truths = unpack(request.config.rootpath / ".pytest_cache/samples", FIXTURES / "maps/truths.tar.zst")
    source = ckptcore.open(str(truths / hub))
    found = to_trainer(remap(source), source, "megatron").mapped.manifest
    wrote = {n: t for n, t in tensors(truths / trained / "ckpt").items() if not n.startswith("rng_state")}
    assert {t.fqn for t in found.tensors} == wrote.keys()
    for name, tensor in wrote.items():
        own = ckptcore.read(found, name)
        assert torch.equal(own, tensor[: len(own)] if name in PADDED["megatron"] else tensor), name


def _refused(folder: Path, match: str, names: str = "torchtitan", **options: Any) -> None:
    with pytest.raises((NameMismatch, UsageError), match=match):
        converted(folder, folder.parent / "out", names, **options)
    assert not (folder.parent / "out").exists()


def test_what_cannot_be_mapped_is_refused_by_name(tmp_path: Path) -> None:
    config, hub = hub_model("llama")
    folder = tmp_path / "hub"

    def write(state: State = hub, **more: Any) -> None:
        hub_manifest(folder, "llama", state)
        form = {k: v for k, v in (config | more).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(form))

    write()
    _refused(folder, "is untried: no code of megatron", "megatron:layers", allow_untried=False)
    _refused(folder, "is untried", "torchtitan:wq", allow_untried=False)
    _refused(folder, "has no generation 'newer'", "torchtitan:newer")
    _refused(folder, "no map takes hf-hub names of llama to olmo", "olmo")
    mesh = {"verb": "reshard", "mesh": "tp=3"}
    _refused(folder, "cannot run 4 attention heads with tp=3", **mesh)
    write(num_attention_heads=None, num_key_value_heads=None)
    _refused(folder, r"q_proj.weight \[16, 16\] does not fit torchtitan/rotary-pairs/qkv")  # the class has 32
    write(num_key_value_heads=3)
    _refused(folder, "does not fit the numbers: 4 is not a multiple of 3")
    write(architectures=["CohereForCausalLM"], model_type="cohere")
    _refused(folder, "no map takes hf-hub names of cohere")
    write(tie_word_embeddings=True)
    _refused(folder, "tie_word_embeddings = true, and there is lm_head.weight")
    headless = {n: t for n, t in hub.items() if n != "lm_head.weight"}
    write(headless)
    _refused(folder, r"tie_word_embeddings = false, and there is no lm_head\.weight")
    write(headless, tie_word_embeddings=True)
    mesh = {"verb": "reshard", "mesh": "pp=2"}
    _refused(folder, "cannot cut tied embeddings into pp=2 stages: config.json says", **mesh)
    write({n: t for n, t in hub.items() if n != "model.layers.1.self_attn.k_proj.weight"})
    _refused(folder, "nothing makes layers.1.attention.qkv_linear.wk.weight")
    write()
    (folder / "config.json").unlink()
    _refused(folder, "nothing says which architecture this is")


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("names", "head", "embeddings"),
    [
        ("torchtitan", "lm_head", "tok_embeddings"),
        ("torchtitan:wq", "output", "tok_embeddings"),
        ("olmo_core", "lm_head.w_out", "embeddings"),
    ],
)
def test_trainers_find_a_tied_head_twice_and_the_hub_once(
    tmp_path: Path, names: str, head: str, embeddings: str
) -> None:
    config, hub = hub_model("qwen3")
    state = {n: t for n, t in hub.items() if n != "lm_head.weight"}
    hub_manifest(tmp_path / "hub", "qwen3", state)
    (tmp_path / "hub/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    converted(tmp_path / "hub", tmp_path / "out", names, verb="reshard", mesh="fsdp=2")
    found = tensors(tmp_path / "out")
    assert torch.equal(found[f"{head}.weight"], state["model.embed_tokens.weight"])
    assert torch.equal(found[f"{embeddings}.weight"], state["model.embed_tokens.weight"])
    options = {"verb": "export", "config": str(tmp_path / "hub"), "catalog": False}
    ckptcore.convert(str(tmp_path / "out"), str(tmp_path / "back"), **options)
    back = tensors(tmp_path / "back")
    assert back.keys() == state.keys()
    assert all(torch.equal(t, back[n]) for n, t in state.items())


@pytest.mark.parametrize(
    ("names", "mesh", "match"),
    [
        ("torchtitan", "ep=3", "the number of experts must be a multiple of ep=3"),
        ("torchtitan", "tp=4", r"cannot run 2 query groups \(key-value heads\) with tp=4"),
        ("torchtitan", "pp=3", "cannot split 2 layers into 3 pipeline stages"),
        ("megatron", "ep=3", "the number of experts must be a multiple of ep=3"),
        ("megatron", "tp=8", "cannot cut 12 rows of the feed-forward network with tp=8"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(tmp_path: Path, names: str, mesh: str, match: str) -> None:
    hub_manifest(tmp_path / "hub", "qwen3_moe")
    to = "torch_dist" if names == "megatron" else "dcp"
    _refused(tmp_path / "hub", match, names, verb="reshard", mesh=mesh, to=to)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config, hub = hub_model("qwen3")
    state = dict(hub)
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = hub[name].to(torch.float8_e4m3fn)
    state[f"{name}_scale_inv"] = torch.ones(1, 1)
    hub_manifest(tmp_path / "hub", "qwen3", state)
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    form = config | {"quantization_config": how}
    (tmp_path / "hub/config.json").write_text(json.dumps(form))
    _refused(tmp_path / "hub", f"cannot map quantised weights to torchtitan .{name}")
    _refused(
        tmp_path / "hub", f"cannot map quantised weights to megatron .{name}", "megatron", to="torch_dist"
    )
    _refused(tmp_path / "hub", "no rule for .*scale_inv", keep_quantized=True)


@pytest.mark.parametrize(
    "fields",
    [{"time_step_limit": [0.0, 10.0]}, {"use_conv_bias": False}, {"mlp_hidden_act": "silu"}],
    ids=lambda fields: next(iter(fields)),
)
def test_a_hybrid_model_that_megatron_has_not_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    config, _ = hub_model("nemotron_h")
    hub_manifest(tmp_path / "hub", "nemotron_h")
    (tmp_path / "hub/config.json").write_text(json.dumps(config | fields))
    _refused(tmp_path / "hub", rf"{next(iter(fields))}.* = .*, the map is for", "megatron", to="torch_dist")


@pytest.mark.parametrize("names", ["torchtitan:wq", "megatron"])
def test_the_card_of_an_export_says_how_its_names_were_mapped(tmp_path: Path, names: str) -> None:
    """So that it is compared with its source where no catalog knows it, and what was changed is named."""
    hub_manifest(tmp_path / "hub", "qwen3")
    named = tmp_path / "config"  # of the same model, elsewhere
    named.mkdir()
    (tmp_path / "hub/config.json").rename(named / "config.json")
    options: dict[str, Any] = {"verb": "export", "to": "safetensors", "config": str(named)}
    converted(tmp_path / "hub", tmp_path / "out", names, **options)
    card = (tmp_path / "out/README.md").read_text()
    assert f"- names: `{names}`, by the map of `qwen3`\n" in card
    assert is_untouched(card.encode(), "out")
    checks = {c.name: c for c in ckptcore.verify_export(str(tmp_path / "out"), catalog=False).checks}
    assert (checks["elements"].verdict, checks["fingerprints"].verdict) == ("ok", "ok")
    assert checks["names"].summary == "there is no config.json"  # of a class that transformers has
    state = {n: t.clone() for n, t in tensors(tmp_path / "out").items()}
    last = max(state)
    state[last].view(-1)[0] += 1
    save_file(state, tmp_path / "out/model.safetensors")
    proof = ckptcore.verify_export(str(tmp_path / "out"), catalog=False)
    assert proof.verdict == "failed"
    assert any(last in str(p) for c in proof.checks for p in c.problems)
    (tmp_path / "out/README.md").write_text(card.replace(f"`{names}`", "`trainer-of-tomorrow`"))
    proof = ckptcore.verify_export(str(tmp_path / "out"), catalog=False)
    assert proof.verdict == "unproven"
    assert "trainer-of-tomorrow" in proof.checks[0].summary


@pytest.mark.parametrize("to", ["megatron", "torchtitan", "olmo_core"])
def test_a_head_that_the_config_has_and_the_folder_has_not(tmp_path: Path, to: str) -> None:
    """A trainer would tie its embeddings, and train another model."""
    state = {n: t for n, t in hub_model("llama")[1].items() if n != "lm_head.weight"}
    source = hub_manifest(tmp_path / "hub", "llama", state)
    with pytest.raises(NameMismatch, match=r"tie_word_embeddings = false, and there is no lm_head\.weight"):
        to_trainer(remap(source), source, to)
