"""Decoder models in small, with the module names of Hugging Face's Llama and of torchtitan's.

Grouped-query attention with rotary positions and a gated MLP. Sizes are chosen to be hard on meshes: a
vocabulary that divides by none of 2, 3 and 8, a width that leaves the last of 8 ranks without a row, heads
that are not width / heads wide. ``plan_of`` gives each family's TP plan as its trainers have it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

VOCABULARY, WIDTH, INNER, HEADS, KV_HEADS, HEAD, LENGTH = 101, 20, 28, 4, 2, 6, 12
LAYERS = 3  # of two stages, the first has two
STEPS = 7  # what the first parameter's optimizer has made; the next one has made one more
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Names:
    """What a family calls its modules. kept: whether the rotary table is saved."""

    embed: str
    layers: str
    norm: str
    head: str
    before: str
    attention: str
    qkvo: tuple[str, str, str, str]
    behind: str
    mlp: str
    gate_down_up: tuple[str, str, str]
    kept: bool


HF = Names(
    "model.embed_tokens",
    "model.layers",
    "model.norm",
    "lm_head",
    "input_layernorm",
    "self_attn",
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    "post_attention_layernorm",
    "mlp",
    ("gate_proj", "down_proj", "up_proj"),
    kept=False,
)
TITAN = Names(
    "tok_embeddings",
    "layers",
    "norm",
    "output",
    "attention_norm",
    "attention",
    ("wq", "wk", "wv", "wo"),
    "ffn_norm",
    "feed_forward",
    ("w1", "w2", "w3"),
    kept=True,
)
FAMILIES = {"hf": HF, "torchtitan": TITAN}


class Attention(nn.Module):
    def __init__(self, names: Names) -> None:
        super().__init__()
        self.names = names.qkvo
        for name, heads in zip(self.names, (HEADS, KV_HEADS, KV_HEADS), strict=False):
            setattr(self, name, nn.Linear(WIDTH, heads * HEAD, bias=False))
        setattr(self, self.names[3], nn.Linear(HEADS * HEAD, WIDTH, bias=False))

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        q, k, v = (getattr(self, n)(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for n in self.names[:3])
        out = nn.functional.scaled_dot_product_attention(
            turned(q, freqs), turned(k, freqs), v, is_causal=True, enable_gqa=True
        )
        return getattr(self, self.names[3])(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, names: Names) -> None:
        super().__init__()
        self.names = names.gate_down_up
        for name, (wide, out) in zip(
            self.names, ((WIDTH, INNER), (INNER, WIDTH), (WIDTH, INNER)), strict=True
        ):
            setattr(self, name, nn.Linear(wide, out, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, down, up = (getattr(self, n) for n in self.names)
        return down(nn.functional.silu(gate(x)) * up(x))


class Layer(nn.Module):
    def __init__(self, names: Names) -> None:
        super().__init__()
        self.names = names
        setattr(self, names.before, nn.RMSNorm(WIDTH, eps=1e-5))
        setattr(self, names.attention, Attention(names))
        setattr(self, names.behind, nn.RMSNorm(WIDTH, eps=1e-5))
        setattr(self, names.mlp, Gated(names))

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        n = self.names
        x = x + getattr(self, n.attention)(getattr(self, n.before)(x), freqs)
        return x + getattr(self, n.mlp)(getattr(self, n.behind)(x))


class Decoder(nn.Module):
    """The model, or one of two stages of it. Every stage has the rotary table, as torchtitan's have."""

    def __init__(self, names: Names, stage: int | None = None) -> None:
        super().__init__()
        self.names, self.stage = names, stage
        if stage in (None, 0):
            put(self, names.embed, nn.Embedding(VOCABULARY, WIDTH))
        mine = [n for n in range(LAYERS) if stage in (None, int(n >= 2))]
        put(self, names.layers, nn.ModuleDict({str(n): Layer(names) for n in mine}))
        if stage in (None, 1):
            put(self, names.norm, nn.RMSNorm(WIDTH, eps=1e-5))
            put(self, names.head, nn.Linear(WIDTH, VOCABULARY, bias=False))
        angles = torch.outer(torch.arange(LENGTH).float(), 0.1 ** torch.arange(HEAD // 2))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=names.kept)

    def blocks(self) -> list[nn.Module]:
        return list(self.get_submodule(self.names.layers).children())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: tokens, or what the stage before gave; gives logits, or what the next stage takes."""
        if self.stage != 1:
            x = self.get_submodule(self.names.embed)(x)
        for layer in self.blocks():
            x = layer(x, self.freqs_cis)
        if self.stage == 0:
            return x
        return self.get_submodule(self.names.head)(self.get_submodule(self.names.norm)(x))


def plan_of(names: Names) -> dict[str, Any]:
    """torchtitan's plan shards the sequence between its modules (models/llama3/infra/parallelize.py); that of
    transformers' configurations is colwise and rowwise alone (base_model_tp_plan)."""
    sequence = names is TITAN
    between = Shard(1) if sequence else Replicate()
    found: dict[str, Any] = {
        names.embed: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        names.head: ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    layer = f"{names.layers}.*"
    *columns, row = (f"{layer}.{names.attention}.{n}" for n in names.qkvo)
    gate, down, up = (f"{layer}.{names.mlp}.{n}" for n in names.gate_down_up)
    found |= {n: ColwiseParallel() for n in (*columns, gate, up)}
    found |= {n: RowwiseParallel(output_layouts=between) for n in (row, down)}
    if sequence:
        found |= {
            n: SequenceParallel() for n in (names.norm, f"{layer}.{names.before}", f"{layer}.{names.behind}")
        }
        inputs = {"desired_input_layouts": (Replicate(), None), "input_layouts": (Shard(1), None)}
        found[f"{layer}.{names.attention}"] = PrepareModuleInput(**inputs)
        found[f"{layer}.{names.mlp}"] = PrepareModuleInput(**{k: v[:1] for k, v in inputs.items()})
    return found


def truth_of(names: Names, dtype: torch.dtype) -> tuple[Tensors, dict[str, Tensors]]:
    """(model, AdamW's state by parameter): every tensor from a seed of its own, so no rank needs a file."""
    model = Decoder(names)
    own, state = dict[str, torch.Tensor](), dict[str, Tensors]()
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict().items():
        near = 1.0 if "norm" in name else 0.0
        kind = dtype if name in parameters else tensor.dtype
        own[name] = (near + 0.2 * random(name, tensor)).to(kind)
    for n, (name, tensor) in enumerate(parameters.items()):
        state[name] = {
            "step": torch.tensor(float(STEPS + n)),
            "exp_avg": (1e-2 * random(f"{name}/1", tensor)).to(dtype),
            "exp_avg_sq": (1e-4 * random(f"{name}/2", tensor).square()).to(dtype),
        }
    return own, state


def random(seed: str, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(
        like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    )


def turned(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotary positions; x: [batch, heads, length, head]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs).flatten(-2).to(x.dtype)


def put(root: nn.Module, name: str, module: nn.Module) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            setattr(root, part, nn.Module())
        root = getattr(root, part)
    setattr(root, last, module)
