"""Stages and experts: only their ranks have a tensor at all."""

from __future__ import annotations

import pytest
from topologies import described, hf, layer_of, manifest_of, stages_of, with_adam

from ckptcore.core.box import Box
from ckptcore.errors import UsageError
from ckptcore.planning.rank_layout import lay_out

LAYER = "model.layers.{}.mlp.up_proj.weight"


def layers_at(mesh: str, layers: int, rules: str | None = None, tied: bool = False) -> list[tuple[int, ...]]:
    topology = lay_out(manifest_of(hf(layers, tied)), mesh, rules)
    return list(stages_of(topology, [LAYER.format(n) for n in range(layers)]).values())


def test_layers_are_split_evenly_and_the_first_stages_have_more() -> None:
    assert layers_at("pp=2", 4) == [(0,), (0,), (1,), (1,)]
    assert layers_at("pp=3", 7) == [(0,), (0,), (0,), (1,), (1,), (2,), (2,)]
    assert layers_at("pp=4", 4) == [(0,), (1,), (2,), (3,)]


def titan_at(mesh: str, layers: int, rules: str | None = None) -> list[tuple[int, ...]]:
    names = [f"layers.{n}.attention.wq.weight" for n in range(layers)]
    ends = {"tok_embeddings.weight": (16, 8), "output.weight": (16, 8)}
    topology = lay_out(manifest_of(dict.fromkeys(names, (8, 8)) | ends), mesh, rules)
    return list(stages_of(topology, names).values())


def test_torchtitan_counts_embeddings_and_head_as_layers() -> None:
    counts = [[titan_at("pp=4", n).count((s,)) for s in range(4)] for n in (4, 5, 6, 27, 32)]
    assert counts == [[1, 2, 1, 0], [1, 2, 2, 0], [1, 2, 2, 1], [7, 7, 7, 6], [8, 9, 8, 7]]
    even = 'family = "torchtitan"\n[stages]\nlayers = "layers.{n}."\nfirst = "tok_*"\nlast = "output.*"\n'
    assert [titan_at("pp=4", 5, even).count((s,)) for s in range(4)] == [2, 1, 1, 1]
    with pytest.raises(
        UsageError, match=r"weights \[9, 0\] are more than a stage's share of 5 layers on 4 stages"
    ):
        titan_at("pp=4", 5, even + "weights = [9, 0]")


def test_the_ends_of_the_model() -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    topology = lay_out(manifest_of(hf()), "pp=2,fsdp=2")
    assert list(stages_of(topology, names).values()) == [(0,), (1,), (1,)]
    boxes = topology.boxes("lm_head.weight", (16, 8))
    assert boxes[:2] == (None, None)
    assert [box.offset for box in boxes[2:] if box] == [(0, 0), (8, 0)]
    assert [rank for rank, _ in topology.owners("lm_head.weight", (16, 8))] == [2, 3]


def test_tied_embeddings_are_on_both_ends() -> None:
    topology = lay_out(manifest_of(with_adam(hf(tied=True))), "pp=3")
    assert described(topology, "model.model.embed_tokens.weight") == "@pp[0, 2]"
    assert described(topology, "optim.state.model.embed_tokens.weight.exp_avg") == "@pp[0, 2]"
    assert [rank for rank, _ in topology.owners("model.model.embed_tokens.weight", (16, 8))] == [0]
    untied = lay_out(manifest_of(hf()), "pp=3")
    assert described(untied, "model.embed_tokens.weight") == "@pp[0]"


def test_rotary_tables_are_on_every_stage() -> None:
    table = {
        "freqs_cis": (64, 4),
        "layers.0.attention.wq.weight": (8, 8),
        "layers.1.attention.wq.weight": (8, 8),
    }
    titan = table | {"tok_embeddings.weight": (16, 8), "output.weight": (16, 8)}
    topology = lay_out(manifest_of(titan), "pp=2,fsdp=2")
    assert topology.boxes("freqs_cis", (64, 4)) == (Box.full((64, 4)),) * 4
    assert [rank for rank, _ in topology.owners("freqs_cis", (64, 4))] == [0]
    names = hf() | {"model.rotary_emb.inv_freq": (4,)}
    assert (
        lay_out(manifest_of(names), "pp=2").boxes("model.rotary_emb.inv_freq", (4,)) == (Box.full((4,)),) * 2
    )
    with pytest.raises(UsageError, match="no pipeline stage") as caught:
        lay_out(manifest_of(names), "pp=2", STAGES)
    assert "every" in str(caught.value.hint)
    assert lay_out(manifest_of(names), "pp=2", STAGES + 'every = "*rotary_emb.*"')


STAGES = """
family = "hf"
[stages]
layers = "model.layers.{n}."
first = ["model.embed_tokens.*"]
last = ["model.norm.*", "lm_head.*"]
"""


def test_splits_and_virtual_stages() -> None:
    assert layers_at("pp=2", 4, STAGES + "split = [[0, 1], [1, 4]]") == [(0,), (1,), (1,), (1,)]
    # Stage s is on rank s % pp: layers 0 and 2, as interleaved schedules have them.
    assert layers_at("pp=2", 4, STAGES + "virtual = 2") == [(0,), (1,), (0,), (1,)]
    assert layers_at("pp=2", 5, STAGES + "virtual = 2\nsplit = [[0, 1], [1, 2], [2, 3], [3, 5]]") == [
        (0,),
        (1,),
        (0,),
        (1,),
        (1,),
    ]
    topology = lay_out(manifest_of(hf()), "pp=2", STAGES + "virtual = 2")
    assert described(topology, "lm_head.weight") == "@pp[1]"


@pytest.mark.parametrize(
    ("mesh", "more", "message"),
    [
        ("pp=5", "", r"4 layers into 5 pipeline stages \(pp=5\)"),
        ("pp=2", "virtual = 3", r"4 layers into 6 pipeline stages \(pp=2, virtual=3\)"),
        ("pp=2", "split = [[0, 4]]", r"split must cut 4 layers into 2 stages \(got \[\[0, 4\]\]\)"),
        ("pp=2", "split = [[0, 2], [3, 4]]", "must cut 4 layers"),
        ("pp=2", "split = [[0, 2], [2, 3]]", "must cut 4 layers"),
        ("pp=2", "split = [[0, 4], [4, 4]]", "must cut 4 layers"),
    ],
)
def test_stages_that_cannot_be(mesh: str, more: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lay_out(manifest_of(hf()), mesh, STAGES + more)


def test_names_without_a_stage() -> None:
    with pytest.raises(UsageError, match=r"no pipeline stage for odd\.weight"):
        lay_out(manifest_of(hf() | {"odd.weight": (2, 2)}), "pp=2")
    with pytest.raises(UsageError, match=r"no pipeline stages for pp=2 in --sharding"):
        lay_out(manifest_of({"a": (2,)}), "pp=2", '[[rule]]\nfqn = "*"')
    with pytest.raises(UsageError, match=r"must have one \{n\} \(got 'layers\.'\)"):
        lay_out(manifest_of({"layers.0": (2,)}), "pp=2", '[stages]\nlayers = "layers."')


MEGATRON = {
    "embedding.word_embeddings.weight": (16, 8),
    "decoder.layers.self_attention.linear_qkv.weight": (4, 16, 8),
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (4, 4, 24, 8),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (16, 8),
}


def test_layers_in_one_tensor_are_cut_by_pp() -> None:
    topology = lay_out(manifest_of(MEGATRON), "pp=2,dp_replicate=2,tp=2")
    name = "decoder.layers.self_attention.linear_qkv.weight"
    assert described(topology, name) == "pp:S(0) tp:S(1)"
    assert len(list(topology.owners(name, MEGATRON[name]))) == 4
    assert described(topology, "output_layer.weight") == "tp:S(0) @pp[1]"
    experts = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert described(lay_out(manifest_of(MEGATRON), "pp=2,ep=2,tp=2"), experts) == "pp:S(0) ep:S(1) tp:S(2)"
    with pytest.raises(UsageError, match=r"4 layers into 5 pipeline stages \(pp=5\)"):
        lay_out(manifest_of(MEGATRON), "pp=5")
    with pytest.raises(
        UsageError, match=r"'decoder\.layers\..*': layers in one tensor must be a multiple of pp=3 \(got 4\)"
    ):
        lay_out(manifest_of(MEGATRON), "pp=3")
    rules = 'family = "megatron"\n[stages]\nstacked = "decoder.layers.*"\nfirst = "*"\nvirtual = 2'
    with pytest.raises(UsageError, match="cannot split layers in one tensor unevenly"):
        lay_out(manifest_of(MEGATRON), "pp=2", rules)


EXPERT = {"w1.weight": (6, 4), "w2.weight": (4, 6), "w3.weight": (6, 4)}


def mixtral(experts: int) -> dict[str, tuple[int, ...]]:
    moe = layer_of("block_sparse_moe.experts.", EXPERT, experts) | {
        "block_sparse_moe.gate.weight": (experts, 4)
    }
    return hf(2) | layer_of("model.layers.", moe, 2)


def test_experts_by_name_are_on_neighbouring_ranks() -> None:
    topology = lay_out(manifest_of(with_adam(mixtral(4))), "fsdp=2,ep=2,tp=2")
    name = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
    layouts = [described(topology, "model." + name.format(n)) for n in range(4)]
    assert layouts == [f"fsdp:S2(0) tp:S(0) @ep[{n // 2}]" for n in range(4)]
    assert described(topology, f"optim.state.{name.format(3)}.exp_avg") == layouts[3]
    assert described(topology, f"optim.state.{name.format(3)}.step") == "@ep[1]"
    # Along ep, what is no expert is sharded as by further ranks of fsdp.
    assert described(topology, "model.model.norm.weight") == "fsdp+ep:S(0)"
    assert described(topology, "model.lm_head.weight") == "fsdp+ep:S2(0) tp:S(0)"
    offsets = [box.offset[0] for box in topology.boxes("model.model.norm.weight", (8,)) if box]
    assert offsets == [0, 0, 2, 2, 4, 4, 6, 6]


def test_stacked_experts_are_cut_by_ep_then_fsdp() -> None:
    shapes = {"layers.0.moe.experts.w1": (4, 6, 4), "layers.0.attention.wq.weight": (4, 4)}
    few = lay_out(manifest_of(shapes), "fsdp=2,ep=2")
    assert described(few, "layers.0.moe.experts.w1") == "fsdp:S2(0) ep:S(0)"
    # As many shards as there are experts would be empty: torchtitan cuts dim 1.
    many = lay_out(manifest_of(shapes), "fsdp=2,ep=4")
    assert described(many, "layers.0.moe.experts.w1") == "fsdp:S(1) ep:S(0)"
    assert described(lay_out(manifest_of(shapes), "ep=2"), "layers.0.moe.experts.w1") == "ep:S(0)"


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(
        UsageError,
        match=r"'model\.layers\.0\.block_sparse_moe\.experts\.': the number of experts "
        r"must be a multiple of ep=4 \(got 6\)",
    ):
        lay_out(manifest_of(mixtral(6)), "ep=4")
    with pytest.raises(UsageError, match=r"experts must be a multiple of ep=4 \(got 6\)"):
        lay_out(
            manifest_of({"layers.0.moe.experts.w1": (6, 4, 4), "layers.0.attention.wq.weight": (4, 4)}),
            "ep=4",
        )
    with pytest.raises(UsageError, match="ep=2 needs experts"):
        lay_out(manifest_of(hf()), "ep=2")


def test_a_glob_of_layers_that_matches_nothing_is_named() -> None:
    rules = STAGES.replace("model.layers.{n}.", "modle.layers.{n}.")
    assert rules != STAGES
    with pytest.raises(UsageError, match=r"\[stages\] layers, modle.layers.\{n\}., matches none of"):
        lay_out(manifest_of(hf()), "pp=2", rules)
