"""Compare flat buckets of models with experts, ties and several stages with states split by hand.

Registration orders are those of megatron-core 0.16.1's modules (`GPTModel.named_parameters`), the ranks'
tensors those of `legacy_ranks`, so the order under test is defined twice.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from legacy_ranks import Case, Tensors, expected, full_model, rank_models

import ckptcore
from ckptcore.core.manifest import Item, Manifest, TensorSpec, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.formats.megatron.flat_buffers import map_buckets

KINDS = ("param", "exp_avg", "exp_avg_sq")
# What megatron-core 0.16.1 makes first in a layer (`GPTModel.named_parameters`); all experts are one entry.
ORDER = (
    "input_layernorm.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.kv_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.experts.",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
)
NAME = (
    "optimizer.distributed.dp_group_idx_{}.gbuf_idx_{}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{}.{}"
)


def states(case: Case, kind: str) -> tuple[Tensors, list[Tensors]]:
    """Return optimizer values for a full model, in the shapes and the order of the weights."""
    torch.manual_seed(len(kind))
    around, layers = full_model(case)
    filled = [{k: torch.randn(v.shape) for k, v in group.items()} for group in (around, *layers)]
    return filled[0], filled[1:]


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def registered(name: str) -> tuple[int, int]:
    """Return the sort key of a name in a chunk: its module's position; sorting keeps the order of experts."""
    if name.startswith("embedding."):
        return -1, 0
    if not name.startswith("decoder.layers."):
        return 1 << 20, int(name.startswith("output_layer"))
    number, rest = name.removeprefix("decoder.layers.").split(".", 1)
    return int(number), ORDER.index("mlp.experts." if rest.startswith("mlp.experts.") else rest)


def buckets(case: Case, chunk: Tensors, experts: bool | None, cut: int | None) -> list[list[tuple[str, int]]]:
    """Return (parameter, first element) by bucket, last parameter first; cut: elements that fill a bucket.

    Tied embeddings on two stages have their own buckets (param_and_grad_buffer.py).
    """
    names = [n for n in sorted(chunk, key=registered) if experts is None or is_expert(n) == experts]
    out: list[list[tuple[str, int]]] = [[]]
    end = 0
    for name in reversed(names):
        alone = (
            case.tied and case.pp > 1 and name in {"embedding.word_embeddings.weight", "output_layer.weight"}
        )
        if out[-1] and (alone or (cut is not None and end >= cut)):
            out.append([])
            end = 0
        at = -(-end // 64) * 64
        out[-1].append((name, at))
        end = at + chunk[name].numel()
        if alone:
            out.append([])
            end = 0
    return [b for b in out if b]


def flat(case: Case, root: Path, cut: int | None = None, *more: TensorSpec) -> Manifest:
    """A torch_dist manifest with weights as specs and the optimizer's buckets as bytes (`dp_reshardable`)."""
    apart = case.ep > 1
    builder = Builder()
    for spec in more:
        builder.tensor(spec)
    for name, value in expected(case).items():
        builder.tensor(TensorSpec(name, "bfloat16", tuple(value.shape)))
    data = bytearray()
    by_kind = {kind: states(case, kind) for kind in KINDS}
    etp = case.tp if case.etp is None else case.etp
    jobs: list[tuple[str, bool | None, int, tuple[int, int, int]]] = []
    for pp in range(case.pp):
        for tp in range(case.tp):
            lead = "chained_0." if apart else ""
            jobs.append((lead, False if apart else None, pp * case.tp + tp, (tp, pp, 0)))
        for ep in range(case.ep if apart else 0):
            group = (pp * case.ep + ep) * etp
            jobs += [("chained_1.", True, group + tp, (tp, pp, ep)) for tp in range(etp)]
    for lead, experts, group, rank in jobs:
        for v in range(case.vpp):
            for kind in KINDS:
                chunk = rank_models(case, *by_kind[kind], *rank)[v]
                for number, rows in enumerate(buckets(case, chunk, experts, cut)):
                    last, start = rows[-1]
                    values = torch.full((start + chunk[last].numel(),), float("nan"))
                    for name, at in rows:
                        values[at : at + chunk[name].numel()] = chunk[name].reshape(-1)
                    at = builder.tensor(
                        TensorSpec(lead + NAME.format(group, v, number, kind), "float32", tuple(values.shape))
                    )
                    # Each parameter was written on its own; gaps belong to the previous one.
                    edges = [s for _, s in rows] + [len(values)]
                    for a, b in pairwise(edges):
                        item = builder.item(Item(0, len(data) + a * 4, (b - a) * 4))
                        builder.chunk(at, (a,), (b - a,), item, View())
                    data += values.numpy().tobytes()
    builder.file("buffers", len(data))
    root.mkdir(exist_ok=True)
    (root / "buffers").write_bytes(data)
    return builder.build("torch_dist", str(root), {})


def args(case: Case, **more: Any) -> dict[str, Any]:
    grouped = case.experts in ("te", "grouped")
    impl = "transformer_engine" if case.norms == "fused" or case.experts == "te" else "local"
    return {**vars(case.args), "transformer_impl": impl, "moe_grouped_gemm": grouped, **more}


def require_states(case: Case, manifest: Manifest) -> None:
    assert [f.message for f in manifest.findings if f.severity != "info"] == []
    assert not [t.fqn for t in manifest.tensors if "gbuf_idx" in t.fqn]
    for kind in KINDS:
        want = expected(case, *states(case, kind))
        for name, value in want.items():
            fqn = f"optimizer.state.{kind}.{name}"
            assert torch.equal(ckptcore.read(manifest, fqn), value), fqn


CASES = {
    "sequential": Case(ep=2, experts="sequential"),
    "sequential, stages and tensor ranks": Case(tp=2, pp=2, ep=2, experts="sequential"),
    "te grouped": Case(tp=2, ep=4, experts="te", norms="fused"),
    "te grouped, chunks": Case(pp=2, vpp=2, ep=2, experts="te", norms="fused"),
    "te grouped, experts uncut": Case(tp=2, ep=2, experts="te", norms="fused", etp=1),
    "grouped, in columns": Case(tp=2, ep=2, experts="grouped"),
    "grouped, ungated": Case(ep=2, experts="grouped", gated=False),
    "tied": Case(tp=2, pp=2, tied=True),
    "tied experts": Case(pp=2, ep=2, experts="sequential", tied=True),
    "latent": Case(tp=2, latent=True),
    "biases": Case(tp=2, bias=True, gated=False),
    "uneven": Case(
        pp=3,
        layers=5,
        counts=[[1, 3, 1]],
        extra={"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1},
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize("cut", [None, 1500], ids=["one bucket", "buckets"])
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_its_state(name: str, cut: int | None, tmp_path: Path) -> None:
    case = CASES[name]
    require_states(case, map_buckets(flat(case, tmp_path / "b", cut), args(case)))


@pytest.mark.parametrize("experts", ["sequential", "te"])
def test_experts_of_one_rank_share_the_buffers(experts: str, tmp_path: Path) -> None:
    """Without expert parallelism there is one optimizer, and one buffer for all."""
    case = Case(tp=2, experts=experts, norms="fused" if experts == "te" else "own")
    require_states(case, map_buckets(flat(case, tmp_path / "b"), args(case)))


def test_transformer_engine_with_legacy_grouped_experts(tmp_path: Path) -> None:
    case = Case(ep=2, experts="grouped", norms="fused")
    arguments = args(case, moe_use_legacy_grouped_gemm=True)
    require_states(case, map_buckets(flat(case, tmp_path / "b"), arguments))


REFUSED = {
    "multi-token prediction": ({}, "mtp.layers.0.enorm.weight", "multi-token"),
    "another rule for experts": ({"moe_extended_tp": True}, None, "another rule"),
    "interleaved": ({"moe_mlp_glu_interleave_size": 32}, None, "another rule"),
    "a size that is none": (
        {"pipeline_model_parallel_size": "2"},
        None,
        "pipeline_model_parallel_size is '2'",
    ),
    "no size at all": ({"tensor_model_parallel_size": 0}, None, "tensor_model_parallel_size is 0"),
    "experts that are none": ({"num_experts": "4"}, None, "num_experts is '4'"),
    "experts that do not divide": ({"num_experts": 3}, None, "3 experts do not divide into 2 ranks"),
    "a layer of another kind": ({}, "decoder.layers.mixer.in_proj.weight", "a layer has mixer.in_proj"),
    "experts of another kind": ({}, "decoder.layers.mlp.experts.experts.linear_fc3.weight", "experts have"),
    "tensor ranks that do not divide": ({"expert_tensor_parallel_size": 5}, None, "over 5 tensor ranks"),
    "order": ({"transformer_impl": "inference_optimized"}, None, "inference_optimized"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_of_unknown_order(name: str, tmp_path: Path) -> None:
    changed, extra, reason = REFUSED[name]
    case = Case(ep=2, experts="sequential")
    shape = (case.layers, 4, 8, 16) if extra and "experts" in extra else (case.layers, 8, 16)
    more = () if extra is None else (TensorSpec(extra, "bfloat16", shape),)
    manifest = flat(case, tmp_path / "b", None, *more)
    mapped = map_buckets(manifest, args(case, **changed))
    assert mapped.findings[-1].code == "flat-buffers"
    assert reason in mapped.findings[-1].message
    assert (mapped.tensors, mapped.chunks) == (manifest.tensors, manifest.chunks)


def test_layers_with_and_without_gates(tmp_path: Path) -> None:
    case = Case(ep=1, experts="sequential")
    manifest = flat(case, tmp_path / "b")
    odd = tuple(
        TensorSpec(t.fqn, t.dtype, (*t.shape[:-2], t.shape[-2] // 2, t.shape[-1]))
        if t.fqn.endswith("mlp.experts.experts.linear_fc1.weight")
        else t
        for t in manifest.tensors
    )
    mapped = map_buckets(replace(manifest, tensors=odd), args(case))
    assert mapped.findings[-1].code == "flat-buffers"
    assert "only some are gated" in mapped.findings[-1].message
