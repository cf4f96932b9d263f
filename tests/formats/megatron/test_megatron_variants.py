"""Read variants of legacy Megatron-LM folders, and refuse ranks that contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from legacy_ranks import Case, E, F, H, expected, require_equal, save

import ckptcore
from ckptcore.core.object_tree import decode
from ckptcore.errors import CkptError

Edit = Callable[[dict[str, Any], tuple[int, int, int]], object]
FC1, FC2 = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"


def refused(case: Case, root: Path, edit: Edit) -> CkptError:
    with pytest.raises(CkptError) as caught:
        ckptcore.open(str(save(case, root, lambda tree, rank: edit(tree, rank) and None)))
    assert caught.value.hint or caught.value.code == "malformed"
    return caught.value


# --- variants -------------------------------------------------------------------------------------


def test_layers_of_different_widths_are_separate_tensors(tmp_path: Path) -> None:
    """Block-wise pruned models: distributed checkpoints store one tensor per layer for them."""
    case = Case(tp=2, layers=2)
    want = {}
    for name, value in expected(case).items():
        if name.startswith("decoder.layers."):
            want |= {f"decoder.layers.{n}.{name[15:]}": value[n] for n in range(2)}
        else:
            want[name] = value
    gate, up = want[FC1].chunk(2)
    want[FC1], want[FC2] = torch.cat([gate[:16], up[:16]]), want[FC2][:, :16].contiguous()

    def narrow(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        # 8 gate and 8 up rows on each tensor rank.
        half = slice(rank[0] * 8, rank[0] * 8 + 8)
        tree["model"][FC1] = torch.cat([want[FC1][:16][half], want[FC1][16:][half]])
        tree["model"][FC2] = want[FC2][:, half].contiguous()

    require_equal(save(case, tmp_path, narrow), want)


def test_state_of_fp8_layers_is_kept_by_rank(tmp_path: Path) -> None:
    """With delayed scaling it is not empty; it differs by rank, under its layer's global number."""
    name = "decoder.layers.1.mlp.linear_fc1._extra_state"
    case = Case(tp=2, pp=2, layers=4)

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["model"][name] = torch.full((3,), 10 * rank[0] + rank[1], dtype=torch.uint8)
        tree["model"]["decoder.layers.0.mlp.linear_fc2._extra_state"] = torch.empty(0, dtype=torch.uint8)
        tree["model"]["output_layer._extra_state"] = b""

    manifest = ckptcore.open(str(save(case, tmp_path, edit)))
    for tp in range(2):
        for pp in range(2):
            fqn = f"decoder.layers.{2 * pp + 1}.mlp.linear_fc1._extra_state/mp_rank_0{tp}_00{pp}"
            assert ckptcore.read(manifest, fqn).tolist() == [10 * tp + pp] * 3
    assert manifest.origin["empty_extra_states"] == 8
    assert sum("_extra_state" in t.fqn for t in manifest.tensors) == 4


def test_a_non_tensor_value_stays_with_its_rank(tmp_path: Path) -> None:
    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["model"]["decoder.layers.0.counter"] = {"seen": 7 + rank[0]}

    manifest = ckptcore.open(str(save(Case(tp=2), tmp_path, edit)))
    trees = {b.key: decode(b.tree) for b in manifest.blobs}
    assert [trees[f"decoder.layers.0.counter/mp_rank_0{n}"] for n in (0, 1)] == [{"seen": 7}, {"seen": 8}]


def test_grouped_experts_that_are_not_contiguous_are_refused(tmp_path: Path) -> None:
    """Splitting needs row-major elements; a view of another order would be read wrong."""
    name = "decoder.layers.0.mlp.experts.weight1"
    case = Case(experts="grouped")

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        tree["model"][name] = tree["model"][name].t().contiguous().t()

    assert "not contiguous" in refused(case, tmp_path, edit).message


# --- contradictions -------------------------------------------------------------------------------


def put(shapes: dict[str, tuple[int, ...]], layers: int = 1) -> Edit:
    """Put tensors of these shapes into each of the first layers of a rank's model."""
    return lambda tree, rank: tree["model"].update(
        {f"decoder.layers.{n}.{k}": torch.ones(shape) for n in range(layers) for k, shape in shapes.items()}
    )


def arguments(**values: Any) -> Edit:
    """Change the arguments; None removes one."""
    return lambda tree, rank: [
        delattr(tree["args"], k) if v is None else setattr(tree["args"], k, v) for k, v in values.items()
    ]


def model(tree: Any, version: float = 3.0) -> Edit:
    """Replace the file's model."""
    return lambda file, rank: file.update(model=tree, checkpoint_version=version)


def old(layers: dict[Any, Any], block: str = "encoder") -> Edit:
    """Replace the model by one from before Megatron-Core."""
    return model({"language_model": {block: layers}}, 0)


ONE = torch.ones(H)
CONTRADICTIONS: dict[str, tuple[Case, Edit, str]] = {
    "a chunk is missing": (
        Case(pp=2, vpp=2),
        lambda tree, rank: tree.update(model7=tree.pop("model1")),
        "without gaps (got [0, 7])",
    ),
    "no model": (Case(), lambda tree, rank: tree.pop("model"), "has no model"),
    "a model that is none": (Case(), model([1]), "must be a state dict"),
    "names that are none": (Case(), model({3: 4}), "must be a state dict"),
    "no dict at all": (Case(), lambda tree, rank: [tree.clear(), tree.update({5: 1})], "must hold a dict"),
    "encoder and decoder": (
        Case(),
        lambda tree, rank: tree["model"].update({"encoder.layers.0.input_layernorm.weight": ONE}),
        "encoder-decoder",
    ),
    "a count that is none": (
        Case(experts="te"),
        arguments(num_experts="4"),
        "num_experts must be a count (got '4')",
    ),
    "experts that do not divide": (
        Case(ep=2, experts="te"),
        arguments(num_experts=3),
        "3 experts do not divide into 2",
    ),
    "one expert too many": (
        Case(experts="te"),
        put({f"mlp.experts.linear_fc2.weight{E}": (H, F)}),
        f"must be below {E}",
    ),
    "experts in one tensor that do not divide": (
        Case(experts="grouped"),
        put({"mlp.experts.weight1": (H, 190), "mlp.experts.weight2": (95, H)}, 4),
        "into 4 experts",
    ),
    "fc1 and fc2 of different inputs": (Case(), put({"mlp.linear_fc1.weight": (2 * F, H + 1)}), "linear_fc2"),
    "fc1 of no multiple of fc2": (Case(), put({"mlp.linear_fc1.weight": (3 * F, H)}), "linear_fc2"),
    "gates in some layers": (Case(), put({"mlp.linear_fc1.weight": (F, H)}), "only some layers have gated"),
    "half a gate": (Case(bias=True), put({"mlp.linear_fc1.bias": (7,)}, 4), "even number of gate and up"),
    "a column that is none": (Case(tp=2), put({"self_attention.linear_proj.weight": (H,)}), "along dim 1"),
    "a layer too many": (
        Case(layers=2, extra={"num_layers": 2}),
        put({"input_layernorm.weight": (H,)}, 3),
        "is in layer 2, the model has 2",
    ),
    "latent sizes are unknown": (
        Case(tp=2, latent=True),
        arguments(q_lora_rank=None, kv_lora_rank=None),
        "sizes of the latent",
    ),
    "heads that do not divide": (
        Case(tp=2, extra={"num_attention_heads": 3, "kv_channels": None, "num_query_groups": None}),
        old({"layers.0.self_attention.query_key_value.weight": torch.ones(12, H)}),
        "3 heads on 2 ranks",
    ),
    "a size of tensor ranks that is none": (
        Case(),
        arguments(tensor_model_parallel_size="1"),
        "tensor_model_parallel_size must be 1 to 1048576 (got '1')",
    ),
    "an old decoder": (Case(), old({"layers.0.x": ONE}, "decoder"), "before Megatron-Core"),
    "an old name twice": (
        Case(),
        old({"final_norm.weight": ONE, "final_layernorm.weight": ONE}),
        "two tensors with the name decoder.final_layernorm.weight",
    ),
    "an old tree with numbers": (Case(), old({1: ONE}), "nested state dict"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused(name: str, tmp_path: Path) -> None:
    case, edit, message = CONTRADICTIONS[name]
    found = refused(case, tmp_path, edit)
    assert found.code in {"malformed", "unsupported-format"}
    assert message in found.message


def test_a_dtype_that_differs_between_ranks_is_reported(tmp_path: Path) -> None:
    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        if rank[0] == 1:
            tree["model"][FC2] = tree["model"][FC2].float()

    found = ckptcore.check(ckptcore.open(str(save(Case(tp=2), tmp_path, edit))), "coverage").findings
    assert {"item-mismatch", "hole"} <= {f.code for f in found if f.severity == "error"}
    message = next(f.message for f in found if f.code == "item-mismatch")
    assert "float32" in message
    assert "bfloat16" in message
