"""A small model cut over ranks by hand, written as legacy Megatron-LM folders, and its truth."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ckptcore

H, HEADS, GROUPS, HEAD, F, V, E = 16, 4, 2, 4, 24, 64, 4
Q, KV, ROPE = 12, 8, 2  # latent sizes
Tensors = dict[str, torch.Tensor]


@dataclass
class Case:
    """A model and how it is cut. counts: layers of each (chunk, stage)."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    layers: int = 4
    etp: int | None = None
    counts: list[list[int]] | None = None
    experts: str = ""  # sequential, te, grouped
    norms: str = "own"  # own, fused
    latent: bool = False
    copied: bool = False  # latent down projections are a copy on every rank
    bias: bool = False
    gated: bool = True
    tied: bool = False
    groups: int = GROUPS
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def per_chunk(self) -> list[list[int]]:
        n = self.layers // self.pp // self.vpp
        return self.counts or [[n] * self.pp for _ in range(self.vpp)]

    @property
    def args(self) -> argparse.Namespace:
        options = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "num_layers": self.layers,
            "hidden_size": H,
            "num_attention_heads": HEADS,
            "num_query_groups": self.groups,
            "kv_channels": HEAD,
            "group_query_attention": True,
            "padded_vocab_size": V,
            "swiglu": self.gated,
            "num_experts": E if self.experts else None,
            "multi_latent_attention": self.latent,
            "untie_embeddings_and_output_weights": not self.tied,
            "params_dtype": torch.bfloat16,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
        }
        if self.latent:
            options |= {"q_lora_rank": Q, "kv_lora_rank": KV, "qk_pos_emb_head_dim": ROPE}
        if self.etp is not None:
            options["expert_tensor_parallel_size"] = self.etp
        return argparse.Namespace(**{**options, **self.extra})


def full_layer(case: Case) -> Tensors:
    """One layer's whole tensors, by the names of Megatron's own modules, in order of registration."""
    rows = 2 * F if case.gated else F
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (H,)}
    a = "self_attention."
    shapes[a + "linear_proj.weight"] = (H, HEADS * HEAD)
    if case.latent:
        shapes |= {
            a + "linear_q_down_proj.weight": (Q, H),
            a + "linear_q_up_proj.weight": (HEADS * 6, Q),
            a + "linear_kv_down_proj.weight": (KV + ROPE, H),
            a + "linear_kv_up_proj.weight": (HEADS * 8, KV),
            a + "q_layernorm.weight": (Q,),
            a + "kv_layernorm.weight": (KV,),
        }
    else:
        shapes[a + "linear_qkv.weight"] = ((HEADS + 2 * case.groups) * HEAD, H)
    if case.bias:
        shapes |= {a + "linear_proj.bias": (H,), a + "linear_qkv.bias": ((HEADS + 2 * case.groups) * HEAD,)}
    shapes["pre_mlp_layernorm.weight"] = (H,)
    if case.experts:
        shapes["mlp.router.weight"] = (E, H)
        for e in range(E):
            shapes[f"mlp.experts.{e}.linear_fc1.weight"] = (rows, H)
            shapes[f"mlp.experts.{e}.linear_fc2.weight"] = (H, F)
        shapes["mlp.shared_experts.linear_fc1.weight"] = (rows, H)
        shapes["mlp.shared_experts.linear_fc2.weight"] = (H, F)
    else:
        shapes |= {"mlp.linear_fc1.weight": (rows, H), "mlp.linear_fc2.weight": (H, F)}
        if case.bias:
            shapes |= {"mlp.linear_fc1.bias": (rows,), "mlp.linear_fc2.bias": (H,)}
    return {k: torch.randn(s).bfloat16() for k, s in shapes.items()}


def full_model(case: Case) -> tuple[Tensors, list[Tensors]]:
    torch.manual_seed(5)
    around = {
        "embedding.word_embeddings.weight": torch.randn(V, H).bfloat16(),
        "decoder.final_layernorm.weight": torch.randn(H).bfloat16(),
        "output_layer.weight": torch.randn(V, H).bfloat16(),
    }
    return around, [full_layer(case) for _ in range(case.layers)]


def piece(case: Case, name: str, value: torch.Tensor, tp: int) -> torch.Tensor:
    """What tensor rank ``tp`` holds of a whole tensor."""
    ranks, at = case.tp, tp
    if ".experts." in name and "shared" not in name and case.etp is not None:
        ranks, at = case.etp, tp % case.etp
    if "linear_fc1" in name and case.gated:
        return torch.cat([half.chunk(ranks, 0)[at] for half in value.chunk(2, 0)])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return value.chunk(ranks, 1)[at]
    down = name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight"))
    if down:
        return value if case.copied else value.chunk(ranks, 0)[at]
    rows = (
        "linear_qkv.weight",
        "linear_qkv.bias",
        "linear_fc1.weight",
        "linear_fc1.bias",
        "_up_proj.weight",
        "word_embeddings.weight",
        "output_layer.weight",
    )
    return value.chunk(ranks, 0)[at] if name.endswith(rows) else value


def local_layer(case: Case, layer: Tensors, tp: int, ep: int) -> Tensors:
    """One layer of one rank, as its modules name it."""
    cut = {k: piece(case, k, v, tp).clone() for k, v in layer.items()}
    here = range(ep * E // case.ep, (ep + 1) * E // case.ep)
    out: Tensors = {}
    done = False
    for name, value in cut.items():
        if name.startswith("mlp.experts."):
            if not done:
                out |= _experts(case, cut, here)
            done = True
            continue
        if case.norms == "fused":
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            if not case.experts:
                name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        out[name] = value
    return out


def _experts(case: Case, cut: Tensors, here: range) -> Tensors:
    one = [cut[f"mlp.experts.{e}.linear_fc1.weight"] for e in here]
    two = [cut[f"mlp.experts.{e}.linear_fc2.weight"] for e in here]
    if case.experts == "grouped":
        first, second = torch.stack([w.t() for w in one]), torch.stack([w.t() for w in two])
        return {
            "mlp.experts.weight1": first.contiguous().view(H, -1),
            "mlp.experts.weight2": second.contiguous().view(-1, H),
        }
    if case.experts == "te":
        return {f"mlp.experts.linear_fc1.weight{n}": w for n, w in enumerate(one)} | {
            f"mlp.experts.linear_fc2.weight{n}": w for n, w in enumerate(two)
        }
    out: Tensors = {}
    for n in range(len(one)):
        out[f"mlp.experts.local_experts.{n}.linear_fc1.weight"] = one[n]
        out[f"mlp.experts.local_experts.{n}.linear_fc2.weight"] = two[n]
    return out


def rank_models(
    case: Case, around: Tensors, layers: list[Tensors], tp: int, pp: int, ep: int
) -> list[Tensors]:
    """A rank's model chunks."""
    counts, number, out = case.per_chunk, 0, []
    for v in range(case.vpp):
        for p in range(case.pp):
            own_layers = layers[number : number + counts[v][p]]
            number += counts[v][p]
            if p != pp:
                continue
            model: Tensors = {}
            if (v, p) == (0, 0):
                name = "embedding.word_embeddings.weight"
                model[name] = piece(case, name, around[name], tp).clone()
            for n, layer in enumerate(own_layers):
                model |= {f"decoder.layers.{n}.{k}": t for k, t in local_layer(case, layer, tp, ep).items()}
            if (v, p) == (case.vpp - 1, case.pp - 1):
                last = dict(around)
                if case.tied:
                    last["output_layer.weight"] = around["embedding.word_embeddings.weight"]
                for name in ("decoder.final_layernorm.weight", "output_layer.weight"):
                    if name.startswith("output") and case.tied and case.pp == 1:
                        continue
                    model[name] = piece(case, name, last[name], tp).clone()
            out.append(model)
    return out


def ranks_of(case: Case) -> Iterator[tuple[int, int, int]]:
    for tp in range(case.tp):
        for pp in range(case.pp):
            yield from ((tp, pp, ep) for ep in range(case.ep))


def folder(case: Case, tp: int, pp: int, ep: int) -> str:
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if case.pp > 1 else "") + (f"_{ep:03d}" if case.ep > 1 else "")


def save(
    case: Case, root: Path, edit: Callable[[dict[str, Any], tuple[int, int, int]], None] | None = None
) -> Path:
    """Writes the checkpoint; gives the iteration's folder."""
    around, layers = full_model(case)
    base = root / "iter_0000100"
    for rank in ranks_of(case):
        models = rank_models(case, around, layers, *rank)
        tree: dict[str, Any] = {"args": case.args, "checkpoint_version": 3.0, "iteration": 100}
        for n, model in enumerate(models):
            # Megatron's modules leave an entry for the state of fp8 layers, without content.
            tree["model" if case.vpp == 1 else f"model{n}"] = {**model, "output_layer._extra_state": None}
        tree["rng_state"] = [{"torch_rng_state": torch.arange(8, dtype=torch.uint8)}]
        if edit is not None:
            edit(tree, rank)
        path = base / folder(case, *rank)
        path.mkdir(parents=True)
        torch.save(tree, path / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return base


def expected(case: Case, around: Tensors | None = None, layers: list[Tensors] | None = None) -> Tensors:
    """The whole model (or what is given in its place) by the names of distributed checkpoints."""
    if around is None or layers is None:
        around, layers = full_model(case)
    out = dict(around)
    if case.tied:
        out.pop("output_layer.weight")
    fuse_first = not case.latent
    fuse_second = (case.norms == "fused" and not case.experts) or (case.norms == "own" and not case.latent)
    for name in layers[0]:
        if name.startswith("mlp.experts."):
            continue
        new = name
        if fuse_first:
            new = new.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if fuse_second:
            new = new.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        out[f"decoder.layers.{new}"] = torch.stack([layer[name] for layer in layers])
    for kind in ("linear_fc1", "linear_fc2") if case.experts else ():
        out[f"decoder.layers.mlp.experts.experts.{kind}.weight"] = torch.stack(
            [torch.stack([layer[f"mlp.experts.{e}.{kind}.weight"] for e in range(E)]) for layer in layers]
        )
    return out


def require_equal(url: Path, want: Tensors, prefix: str = "") -> ckptcore.Manifest:
    """Reads every tensor and compares bits; replicas are compared by the check."""
    manifest = ckptcore.open(str(url))
    names = {t.fqn for t in manifest.tensors if not t.fqn.startswith(("rng_state", "optimizer"))}
    if not prefix:
        assert names == want.keys()
    for name, value in want.items():
        found = ckptcore.read(manifest, prefix + name)
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        assert torch.equal(found, value), name
    report = ckptcore.check(manifest, level="bytes")
    assert [f for f in report.findings if f.severity == "error"] == []
    return manifest
