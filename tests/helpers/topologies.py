"""Manifests for topologies: models of every family in small, with the state of their optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.topology.layout import Topology

Shapes = Mapping[str, tuple[int, ...]]


def manifest_of(shapes: Shapes) -> Manifest:
    """A manifest that names tensors and has no bytes."""
    builder = Builder()
    for fqn, shape in shapes.items():
        builder.tensor(TensorSpec(fqn, "float32", shape))
    return builder.build("test", "nowhere", {})


def layer_of(root: str, inside: Shapes, layers: int) -> dict[str, tuple[int, ...]]:
    return {f"{root}{n}.{name}": shape for n in range(layers) for name, shape in inside.items()}


HF_LAYER = {
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.q_proj.bias": (8,),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
    "self_attn.o_proj.bias": (8,),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
}


def hf(layers: int = 4, tied: bool = False) -> dict[str, tuple[int, ...]]:
    found = {
        "model.embed_tokens.weight": (16, 8),
        **layer_of("model.layers.", HF_LAYER, layers),
        "model.norm.weight": (8,),
        "lm_head.weight": (16, 8),
    }
    if tied:
        del found["lm_head.weight"]
    return found


def with_adam(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Model and optimizer, as `get_state_dict` names them."""
    found = {f"model.{n}": s for n, s in shapes.items()}
    for key in ("exp_avg", "exp_avg_sq"):
        found |= {f"optim.state.{n}.{key}": s for n, s in shapes.items()}
    return found | {f"optim.state.{n}.step": () for n in shapes}


def described(topology: Topology, fqn: str) -> str:
    """``fsdp:S(0) tp:S(1) @pp(0,)``: the layout of a tensor in short."""
    layout = topology.layout(fqn)
    cuts = [
        f"{a}:{f'{_letter(p)}({p.dim})' if hasattr(p, 'dim') else 'R'}"
        for a, p in zip(layout.axes, layout.placements, strict=True)
    ]
    return " ".join([*cuts, *(f"@{axis}{list(c)}" for axis, c in layout.coordinates)])


def stages_of(topology: Topology, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    return {n: dict(topology.layout(n).coordinates)["pp"] for n in names}


def _letter(placement: object) -> str:
    factor = getattr(placement, "split_factor", 1)
    return f"S{factor}" if factor > 1 else "S"
