"""Megatron-Core's own HybridModel on one CPU, for megatron_logits_job.py.

Its layers are those of `hybrid_stack_spec`, with Megatron's own modules where Transformer Engine's are not
installed. Kernels of mamba_ssm, which run on GPUs, are plain torch here: the scan of a state, and the norm of
its output behind its gate. Nothing else of the model is changed.
"""

from __future__ import annotations

import sys
import types
from contextlib import ExitStack
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import silu, softplus

T = torch.Tensor
_ENGINE = "megatron.core.extensions.transformer_engine"


class _GatedNorm(torch.nn.Module):
    """A replacement for mamba_ssm's RMSNorm, of groups of rows, behind the gate."""

    def __init__(self, size: int, *, eps: float, group_size: int, norm_before_gate: bool, **_: Any) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps, self.group = eps, group_size

    def forward(self, given: T, gate: T) -> T:
        rows = (given * silu(gate)).unflatten(-1, (-1, self.group))
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps)
        return rows.flatten(-2) * self.weight


def _scanned(
    x: T, dt: T, a: T, b: T, c: T, chunk: int, *, D: T, z: None, dt_bias: T, dt_softplus: bool, **_: Any
) -> T:
    """A replacement for mamba_chunk_scan_combined: a state after another."""
    assert dt_softplus
    dt = softplus(dt + dt_bias)
    groups = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(groups, 2), c.repeat_interleave(groups, 2)
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1])
    out = []
    for n in range(x.shape[1]):
        grown = (dt[:, n, :, None] * x[:, n])[..., None] * b[:, n, :, None]
        state = state * torch.exp(dt[:, n] * a)[..., None, None] + grown
        out.append((state * c[:, n, :, None]).sum(-1) + D[:, None] * x[:, n])
    return torch.stack(out, 1)


def stand_in_for_mamba() -> None:
    """Modules that Megatron-Core imports from mamba_ssm."""
    kernels = dict.fromkeys(("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"), _scanned)
    parts: dict[str, dict[str, Any]] = {"layernorm_gated": {"RMSNorm": _GatedNorm}, "ssd_combined": kernels}
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        sys.modules[name] = types.ModuleType(name)
    for name, values in parts.items():
        module = types.ModuleType(f"mamba_ssm.ops.triton.{name}")
        vars(module).update(values)
        sys.modules[module.__name__] = module


def hybrid_model(config: Any, backend: Any, **model: Any) -> Any:
    """HybridModel. backend: a provider of modules for Transformer Engine's; model: its own arguments."""
    stand_in_for_mamba()
    library: Any = import_module("megatron.core.models.hybrid.hybrid_model")
    norm = backend.layer_norm()
    modules = {
        "TELayerNormColumnParallelLinear": backend.column_parallel_layer_norm_linear(),
        "TEColumnParallelLinear": backend.column_parallel_linear(),
        "TERowParallelLinear": backend.row_parallel_linear(),
        "TEDotProductAttention": backend.core_attention(),
        "TENorm": norm,
    }
    engine, experts = import_module(_ENGINE), import_module("megatron.core.models.gpt.moe_module_specs")
    with ExitStack() as stack:
        for name, value in modules.items():
            stack.enter_context(patch.object(engine, name, value))
        stack.enter_context(patch.object(experts, "TESpecProvider", lambda: backend))
        block: Any = import_module("megatron.core.models.hybrid.hybrid_block")
        stack.enter_context(patch.object(block, "TENorm", norm))
        specs: Any = import_module("megatron.core.models.hybrid.hybrid_layer_specs")
        return library.HybridModel(config, specs.hybrid_stack_spec, **model)
