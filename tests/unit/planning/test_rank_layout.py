"""Topologies: every family, mesh and file of rules leads to where trainers put a tensor."""

from __future__ import annotations

import time

import pytest
from topologies import described, hf, manifest_of, with_adam

from ckptcore.core.box import Box
from ckptcore.errors import AmbiguousModel, UsageError
from ckptcore.planning.rank_layout import Balance, balance, lay_out
from ckptcore.topology.layout import Mesh
from ckptcore.topology.mesh_spec import parse_mesh

FAMILIES = {
    "hf": {
        "model.embed_tokens.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
        "model.layers.0.self_attn.q_proj.weight": ((8, 8), "fsdp:S2(0) tp:S(0)"),
        "model.layers.0.self_attn.q_proj.bias": ((8,), "fsdp:S2(0) tp:S(0)"),
        "model.layers.0.self_attn.o_proj.weight": ((8, 8), "fsdp:S(0) tp:S(1)"),
        "model.layers.0.self_attn.o_proj.bias": ((8,), "fsdp:S(0)"),
        "model.layers.0.self_attn.qkv_proj.weight": ((24, 8), "fsdp:S2(0) tp:S(0)"),
        "model.layers.0.input_layernorm.weight": ((8,), "fsdp:S(0)"),
        "model.layers.0.mlp.gate.weight": ((4, 8), "fsdp:S(0)"),
        "model.layers.0.mlp.experts.gate_up_proj": ((4, 24, 8), "fsdp:S(0) tp:S(1)"),
        "model.layers.0.mlp.experts.down_proj": ((4, 8, 12), "fsdp:S(0) tp:S(2)"),
        "model.layers.0.mlp.experts.3.down_proj.weight": ((8, 12), "fsdp:S(0) tp:S(1)"),
        "model.layers.0.mlp.gate.e_score_correction_bias": ((4,), "fsdp:R"),
        "model.layers.0.self_attn.o_proj.lora_A.default.weight": ((2, 8), "fsdp:S(0)"),
        "model.visual.blocks.0.attn.qkv.weight": ((24, 8), "fsdp:S(0)"),
        "lm_head.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
    },
    "gpt2": {
        "transformer.wte.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
        "transformer.wpe.weight": ((16, 8), "fsdp:S(0)"),
        "transformer.h.0.attn.c_attn.weight": ((8, 24), "fsdp:S(0) tp:S(1)"),
        "transformer.h.0.attn.c_attn.bias": ((24,), "fsdp:S2(0) tp:S(0)"),
        "transformer.h.0.attn.c_proj.weight": ((8, 8), "fsdp:S2(0) tp:S(0)"),
        "transformer.h.0.attn.c_proj.bias": ((8,), "fsdp:S(0)"),
        "transformer.h.0.ln_1.bias": ((8,), "fsdp:S(0)"),
    },
    "torchtitan": {
        "tok_embeddings.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
        "layers.0.attention.wq.weight": ((8, 8), "fsdp:S2(0) tp:S(0)"),
        "layers.0.attention.wo.weight": ((8, 8), "fsdp:S(0) tp:S(1)"),
        "layers.0.attention.wkv_a.weight": ((8, 8), "fsdp:S(0)"),
        "layers.0.attention_norm.weight": ((8,), "fsdp:S(0) tp:R"),
        "layers.0.feed_forward.w2.weight": ((8, 12), "fsdp:S(0) tp:S(1)"),
        "layers.0.moe.experts.w1": ((4, 12, 8), "fsdp:S(0) tp:S(1)"),
        "layers.0.moe.shared_experts.w3.weight": ((12, 8), "fsdp:S2(0) tp:S(0)"),
        "layers.0.moe.router.gate.weight": ((4, 8), "fsdp:S(0)"),
        "layers.0.moe.expert_bias": ((4,), "fsdp:R"),
        "norm.weight": ((8,), "fsdp:S(0) tp:R"),
        "output.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
    },
    "olmo": {
        "embeddings.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
        "blocks.0.attention.w_q.weight": ((8, 8), "fsdp:S2(0) tp:S(0)"),
        "blocks.0.attention.w_out.weight": ((8, 8), "fsdp:S(0) tp:S(1)"),
        "blocks.0.attention.k_norm.weight": ((8,), "fsdp:S(0) tp:R"),
        "blocks.0.feed_forward.w2.weight": ((8, 12), "fsdp:S(0) tp:S(1)"),
        "blocks.0.feed_forward_moe.experts.mlp.w1": ((48, 8), "fsdp:S(0)"),
        "blocks.0.feed_forward_moe.router.weight": ((32,), "fsdp:S(0)"),
        "lm_head.norm.weight": ((8,), "fsdp:S(0) tp:R"),
        "lm_head.w_out.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
    },
    "olmo, older": {
        "transformer.wte.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
        "transformer.blocks.0.att_proj.weight": ((24, 8), "fsdp:S2(0) tp:S(0)"),
        "transformer.blocks.0.ff_out.weight": ((8, 12), "fsdp:S(0) tp:S(1)"),
        "transformer.blocks.0.attn_norm.bias": ((8,), "fsdp:S(0) tp:R"),
        "transformer.ff_out.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
    },
    "megatron": {
        "embedding.word_embeddings.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
        "decoder.layers.self_attention.linear_qkv.weight": ((4, 16, 8), "fsdp:S(0) tp:S(1)"),
        "decoder.layers.self_attention.linear_qkv.bias": ((4, 16), "fsdp:S(0) tp:S(1)"),
        "decoder.layers.self_attention.linear_proj.weight": ((4, 8, 8), "fsdp:S(0) tp:S(2)"),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": ((4, 8), "fsdp:S(0)"),
        "decoder.layers.mlp.linear_fc2.bias": ((4, 8), "fsdp:S(0)"),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": ((4, 4, 24, 8), "fsdp:S(0) tp:S(2)"),
        "decoder.final_layernorm.weight": ((8,), "fsdp:S(0)"),
        "output_layer.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
    },
    "megatron, layers by name": {
        "decoder.layers.0.self_attention.linear_qkv.weight": ((16, 8), "fsdp:S2(0) tp:S(0)"),
        "decoder.layers.0.self_attention.linear_proj.weight": ((8, 8), "fsdp:S(0) tp:S(1)"),
        "decoder.layers.0.mlp.linear_fc1.weight_w": ((12, 8), "fsdp:S2(0) tp:S(0)"),
        "decoder.layers.0.mlp.experts.experts.0.linear_fc2.weight": ((8, 12), "fsdp:S(0) tp:S(1)"),
        "mtp.layers.0.eh_proj.weight": ((8, 16), "fsdp:S2(0) tp:S(0)"),
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    rows = FAMILIES[family]
    topology = lay_out(manifest_of({n: shape for n, (shape, _) in rows.items()}), "fsdp=2,tp=2")
    assert {n: described(topology, n) for n in rows} == {n: layout for n, (_, layout) in rows.items()}


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ("fsdp=4,tp=2", {"fsdp": 4, "tp": 2}),
        ("tp=2,pp=3,dp_replicate=2,fsdp=4", {"pp": 3, "dp_replicate": 2, "fsdp": 4, "tp": 2}),
        ("dp=4", {"fsdp": 4}),
        ("dp_shard=4,ddp=2", {"dp_replicate": 2, "fsdp": 4}),
        ("fsdp=2,cp=3", {"fsdp": 6}),
        ("cp=2", {"fsdp": 2}),
        (" ep = 2 , fsdp = 1", {"fsdp": 1, "ep": 2}),
    ],
)
def test_mesh_texts(mesh: str, axes: dict[str, int]) -> None:
    assert parse_mesh(mesh) == Mesh(tuple(axes.items()))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("", r"must be AXIS=SIZE \(got ''\)"),
        ("fsdp", "must be AXIS=SIZE"),
        ("fsdp=-1", "must be AXIS=SIZE"),
        ("fsdp=2x", "must be AXIS=SIZE"),
        ("fsdp=0", "must have 1 rank or more"),
        ("sdp=2", "unknown axis 'sdp'"),
        ("fsdp=2,dp=2", "fsdp is given twice"),
        ("fsdp=999999", "at most 131072 ranks"),
        ("fsdp=99999999999", r"must have at most 131072 ranks \(got 99999999999\)"),
    ],
)
def test_meshes_that_are_none(mesh: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_mesh(mesh)
    assert "pp, dp_replicate, fsdp, cp, ep, tp" in caught.value.hint or message != "unknown axis 'sdp'"


def test_state_is_where_its_parameter_is() -> None:
    shapes = with_adam(hf(layers=2))
    factor = "optim.state.lm_head.weight.exp_avg_sq_row"  # Adafactor's
    topology = lay_out(manifest_of(shapes | {factor: (16,), "rng": (7,)}), "pp=2,fsdp=2,tp=2")
    row = "model.layers.1.self_attn.o_proj.weight"
    for fqn in (f"model.{row}", f"optim.state.{row}.exp_avg", f"optim.state.{row}.exp_avg_sq"):
        assert described(topology, fqn) == "fsdp:S(0) tp:S(1) @pp[1]"
    assert described(topology, f"optim.state.{row}.step") == "@pp[1]"
    assert described(topology, factor) == "@pp[1]"
    assert described(topology, "rng") == ""


@pytest.mark.parametrize(
    ("parameter", "state"),
    [
        ("state_dict.net._orig_mod.layers.0.wq.weight", "optimizer_0.state.net.layers.0.wq.weight.exp_avg"),
        ("layers.0.wq.weight", "optimizer.state.layers.0.wq.weight.exp_avg"),
        ("layers.0.wq.weight", "chained_0.optimizer.state.exp_avg.layers.0.wq.weight"),
        ("model.module.layers.0.wq.weight", "optimizer.state.module.module.layers.0.wq.weight.exp_avg"),
        ("a.layers.0.wq.weight", "b.a.layers.0.wq.weight.momentum"),
        ("layers.0.wq.weight", "optimizer.layers.0.wq.weight.exp_avg"),
    ],
)
def test_names_of_state(parameter: str, state: str) -> None:
    rules = '[[rule]]\nfqn = "*layers.*.wq.weight"\ntp = "shard(1)"'
    manifest = manifest_of({parameter: (4, 6), state: (4, 6)})
    topology = lay_out(manifest, "fsdp=2,tp=3", rules)
    assert described(topology, parameter) == described(topology, state) == "fsdp:S(0) tp:S(1)"


def test_without_tensor_parallel_no_rules_are_needed() -> None:
    shapes = {"w": (5, 3), "deep.b": (7,), "scalar": (), "empty": (0, 4)}
    topology = lay_out(manifest_of(shapes), "dp_replicate=2,fsdp=4")
    assert described(topology, "deep.b") == "dp_replicate:R fsdp:S(0)"
    assert topology.boxes("w", (5, 3))[:4] == (
        Box((0, 0), (2, 3)),
        Box((2, 0), (2, 3)),
        Box((4, 0), (1, 3)),
        Box((0, 0), (0, 3)),
    )
    assert topology.boxes("scalar", ()) == (Box((), ()),) * 8
    assert [rank for rank, _ in topology.owners("empty", (0, 4))] == [0]
    assert described(lay_out(manifest_of(shapes), "dp_replicate=2"), "w") == ""


def test_parameters_without_a_rule_are_named() -> None:
    shapes = hf() | {"model.layers.0.odd.weight": (4, 4), "model.layers.0.scale": ()}
    with pytest.raises(
        UsageError,
        match=r"no rule in the rules for hf names for 1 of 49 parameters: "
        r"model\.layers\.0\.odd\.weight",
    ):
        lay_out(manifest_of(shapes), "fsdp=2,tp=2")
    one = 'family = "hf"\n[[rule]]\nfqn = "*.odd.weight"\n'
    assert (
        described(lay_out(manifest_of(shapes), "fsdp=2,tp=2", one), "model.layers.0.odd.weight")
        == "fsdp:S(0)"
    )
    assert lay_out(manifest_of(shapes), "fsdp=2").mesh.size == 2


def test_names_of_no_family_and_of_two() -> None:
    with pytest.raises(
        UsageError, match=r"the names of 1 parameter fit none of: hf, torchtitan, olmo, .*\(got a.weight\)"
    ):
        lay_out(manifest_of({"a.weight": (4, 4)}), "tp=2")
    two = {**hf(), "tok_embeddings.weight": (16, 8)}
    with pytest.raises(UsageError, match="several families: hf, torchtitan") as caught:
        lay_out(manifest_of(two), "tp=2")
    assert 'family = "NAME"' in caught.value.hint
    topology = lay_out(manifest_of(two), "tp=2", 'family = "hf"\n[[rule]]\nfqn = "tok_*"')
    assert described(topology, "tok_embeddings.weight") == ""


def test_the_first_rule_counts() -> None:
    rules = """
[[rule]]
fqn = ["*.0.*", "b"]
tp = "shard(-1)"
fsdp = "replicate"
[[rule]]
fqn = "*"
tp = "shard(0)"
fsdp = "shard(1)"
"""
    topology = lay_out(manifest_of({"l.0.w": (4, 4), "l.1.w": (4, 4), "b": (4,)}), "fsdp=2,tp=2", rules)
    assert described(topology, "l.0.w") == "fsdp:R tp:S(1)"
    assert described(topology, "b") == "fsdp:R tp:S(0)"
    assert described(topology, "l.1.w") == "fsdp:S(1) tp:S(0)"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("[[rule]\n", "cannot read --sharding as TOML"),
        ("[[rule]]\ntp = 'shard(0)'", "rule 1, fqn: Field required"),
        ("[[rule]]\nfqn = 'a'\n[[rule]]\nfqn = 'b'\ntp = 'rows'", "rule 2, tp: .*placement must be .*'rows'"),
        ("[[rule]]\nfqn = 'a'\ncp = 'shard(0)'", "rule 1, cp: Extra inputs"),
        ("[[rules]]\nfqn = 'a'", "rules: Extra inputs"),
        ("[stages]\nlayers = 'l.{n}.'\nvirtual = 0", "stages, virtual: "),
        ("family = 'gpt'", "unknown family 'gpt'"),
        ("family = 'hf'\n[mesh]\nfsdp = 4", r"must equal the \[mesh\]"),
        ("family = 'hf'\n[mesh]\nfsdp = 0", "must have 1 rank or more"),
        ("[[rule]]\nfqn = '*'\ntp = 'shard(3)'", r"'a.w' \[4, 4\]: it has no dim 3"),
        ("#" * 2_000_000, "at most 1048576 characters"),
        ("a = " + "[" * 100_000, "recursion|nested"),
    ],
)
def test_files_that_are_wrong(rules: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lay_out(manifest_of({"a.w": (4, 4)}), "fsdp=2,tp=2", rules)


def test_a_file_may_name_the_mesh() -> None:
    topology = lay_out(manifest_of(hf()), "fsdp=2,tp=2", 'family = "hf"\n[mesh]\ntp = 2\ndp = 2\n')
    assert dict(topology.mesh.axes) == {"fsdp": 2, "tp": 2}


def test_shards_that_torch_contradicts_are_refused_with_numbers() -> None:
    # torch.chunk by tp: 4 and 3 rows; by fsdp: 2, 2, 0 of the first. Its offsets say otherwise.
    with pytest.raises(UsageError, match=r"'lm_head.weight': .* 7 elements for 3 and 2 ranks"):
        lay_out(manifest_of({"lm_head.weight": (7, 4), "embed_tokens.weight": (6, 4)}), "fsdp=3,tp=2")
    assert lay_out(manifest_of({"embed_tokens.weight": (7, 4)}), "fsdp=2,tp=2").mesh.size == 4


def test_fsdp_cuts_other_dims_evenly_only() -> None:
    rules = '[[rule]]\nfqn = "*"\nfsdp = "shard(1)"'
    with pytest.raises(UsageError, match="6 is not a multiple of 4"):
        lay_out(manifest_of({"w": (4, 6)}), "fsdp=4", rules)


def test_the_prefix_of_the_model() -> None:
    shapes = {"actor.embed_tokens.weight": (8, 4), "critic.embed_tokens.weight": (8, 4)}
    topology = lay_out(manifest_of(shapes), "tp=2", None, "actor")
    assert described(topology, "actor.embed_tokens.weight") == "tp:S(0)"
    with pytest.raises(AmbiguousModel, match=r"no tensor's name starts with other\."):
        lay_out(manifest_of(shapes), "tp=2", None, "other")


def test_bytes_per_rank() -> None:
    shapes = {"w": (5, 3), "b": (2,), "step": ()}
    manifest = manifest_of(shapes)
    topology = lay_out(manifest, "dp_replicate=2,fsdp=2")
    assert list(balance(topology, manifest.tensors).per_rank) == [(9 + 1 + 1) * 4, (6 + 1 + 1) * 4] * 2
    found = balance(topology, manifest.tensors)
    assert (found.total, round(found.ratio, 4)) == ((15 + 2 + 1) * 4, round(11 / 9.5, 4))
    assert found.as_dict()["bytes_max"] == 44
    assert Balance((0, 0), 0).ratio == 1.0


def test_hundreds_of_ranks_take_seconds() -> None:
    """Llama 3.1 405B with AdamW on 512 ranks; its vocabulary does not divide by 512."""
    wide, inner, kv, vocabulary = 16384, 53248, 1024, 128256
    layer = {
        "self_attn.q_proj.weight": (wide, wide),
        "self_attn.k_proj.weight": (kv, wide),
        "self_attn.v_proj.weight": (kv, wide),
        "self_attn.o_proj.weight": (wide, wide),
        "mlp.gate_proj.weight": (inner, wide),
        "mlp.up_proj.weight": (inner, wide),
        "mlp.down_proj.weight": (wide, inner),
        "input_layernorm.weight": (wide,),
        "post_attention_layernorm.weight": (wide,),
    }
    model = {f"model.layers.{n}.{k}": s for n in range(126) for k, s in layer.items()}
    model |= {"model.embed_tokens.weight": (vocabulary, wide), "lm_head.weight": (vocabulary, wide)}
    manifest = manifest_of(with_adam(model | {"model.norm.weight": (wide,)}))
    import torch.distributed.tensor  # noqa: F401

    began = time.process_time()
    for mesh in ("fsdp=64,tp=8", "pp=16,dp_replicate=2,fsdp=2,tp=8", "fsdp=512"):
        topology = lay_out(manifest, mesh)
        for spec in manifest.tensors:
            assert len(topology.boxes(spec.fqn, spec.shape)) == 512
    assert time.process_time() - began < 8  # three meshes; half a second each when nothing else runs
