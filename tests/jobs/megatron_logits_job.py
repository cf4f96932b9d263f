"""What Megatron-Core's own GPTModel makes of weights: its names, and its logits, on one CPU.

python megatron_logits_job.py ASKED ANSWER

ASKED is a file of torch with a list of questions: ``config``, of TransformerConfig (MLATransformerConfig
where it has ``multi_latent_attention``); ``model``, of GPTModel; ``ids``; ``state``, the weights by the names
of Megatron, or None for random ones, which all differ; or ``folder``, of torch_dist, which Megatron-Core's
own loader reads into its ``sharded_state_dict``, strictly; and ``transformer_engine``, whether the layers are
those that Megatron-Core builds with Transformer Engine. ANSWER will hold a list of ``state`` and ``logits``.

Megatron-Core means to run on GPUs. Replaced here: for `torch.cuda.current_device` the CPU, for
`torch.cuda.Stream` nothing, for Triton, where it is not installed, a module that defines kernels and runs
none (mcore_job.py), and for the tracker of random states of GPUs none, as nothing is dropped out.
Megatron's own attention of plain torch is given to latent attention, which hands it sizes of keys and values
that it does not ask for; sparse attention, which is only built with Transformer Engine, is built with
Megatron's own modules, and a plain linear layer where they have none. So are gated delta nets, with its
own torch form of the delta rule, and layers of Transformer Engine, whose norms are plain torch, by themselves
or in the linear layer behind them as it has them. Nothing else of the model is changed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from mcore_job import stand_in
from megatron_hybrid import hybrid_model


class _NoStream:
    """A replacement for torch.cuda.Stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def stand_in_for_gpus() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = _NoStream
    cuda.current_stream = lambda *_: _NoStream()


def built(asked: dict[str, Any], **stage: Any) -> Any:
    """GPTModel of a question, or HybridModel. stage: more of its arguments, for a stage of a pipeline."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    form = dict(asked["config"])
    kind = MLATransformerConfig if form.get("multi_latent_attention") else TransformerConfig
    if "activation_func" in form:
        form["activation_func"] = _activation(form["activation_func"])
    config = kind(use_cpu_initialization=True, **form)
    if form.get("is_hybrid_model"):
        return hybrid_model(config, _engine_backend(config), **asked["model"], **stage).float().eval()
    engine = _engine_backend(config) if asked.get("transformer_engine") else None
    with _in_place_of_engine(engine) if engine else nullcontext():
        spec = _layers(config, asked["config"], engine, **{k: v for k, v in stage.items() if k == "vp_stage"})
        mtp = get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers else None
        for layer in spec.layer_specs if config.multi_latent_attention else ():
            attention = layer.submodules.self_attention.submodules
            if not asked["config"].get("experimental_attention_variant"):
                attention.core_attention = _latent_attention()
        return GPTModel(config, spec, mtp_block_spec=mtp, **asked["model"], **stage).float().eval()


def _layers(config: Any, form: dict[str, Any], engine: Any, **stage: int) -> Any:
    """Megatron-Core's own specification of a model's layers. engine: for Transformer Engine, or None."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if form.get("experimental_attention_variant") == "gated_delta_net":
        return _delta_spec(config)
    if not form.get("experimental_attention_variant"):
        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=engine is not None,
            normalization=config.normalization,
            qk_l2_norm=form.get("qk_l2_norm", False),
            **stage,
        )
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    backend = engine or LocalSpecProvider()
    backend.linear = backend.column_parallel_linear
    asked_of: Any = variants
    asked_of._get_backend_spec_provider = lambda config: backend
    spec = variants.get_transformer_block_with_experimental_attention_variant_spec(config=config)
    for layer in spec.layer_specs:
        indexer = layer.submodules.self_attention.submodules.core_attention.submodules.indexer.submodules
        indexer.linear_wq_b = indexer.linear_wk = indexer.linear_weights_proj = _Linear
    return spec


@contextmanager
def _in_place_of_engine(backend: Any) -> Iterator[None]:
    """Let Megatron-Core find a backend where it looks for Transformer Engine."""
    from megatron.core.models.gpt import gpt_layer_specs

    latent = "megatron.core.transformer.mla_qk_norm_config"
    with ExitStack() as stack:
        # 0.15 does not define the names without Transformer Engine.
        for name, value in {"TESpecProvider": lambda: backend, "TENorm": backend.layer_norm()}.items():
            stack.enter_context(patch.object(gpt_layer_specs, name, value, create=True))
        if find_spec(latent):  # of 0.19
            stack.enter_context(patch.object(import_module(latent), "get_backend", lambda _: backend))
        yield


def _engine_backend(config: Any) -> Any:
    """Megatron's own modules, with norms of plain torch where Transformer Engine has its own."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def normed(config: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(given.square().mean(-1, keepdim=True) + config.layernorm_epsilon)
        return given * scale * (weight + config.layernorm_zero_centered_gamma)

    class Norm(torch.nn.Module):
        """A replacement for Transformer Engine's norm, whose weight counts from 0."""

        def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
            super().__init__()
            self.weight, self.config = torch.nn.Parameter(torch.zeros(hidden_size)), config

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return normed(self.config, given, self.weight)

    class NormLinear(ColumnParallelLinear):
        """A replacement for Transformer Engine's linear layer with a norm in front."""

        def __init__(self, input_size: int, *sizes: Any, **options: Any) -> None:
            super().__init__(input_size, *sizes, **options)
            first = 1.0 - self.config.layernorm_zero_centered_gamma
            self.layer_norm_weight = torch.nn.Parameter(torch.full((input_size,), first))

        def forward(self, given: torch.Tensor, *rest: Any, **more: Any) -> Any:
            return super().forward(normed(self.config, given, self.layer_norm_weight), *rest, **more)

    class Backend(LocalSpecProvider):
        """Megatron's own modules, but for norms."""

        def linear(self) -> type:
            return self.column_parallel_linear()

        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return NormLinear

        def layer_norm(self, *_: Any, **__: Any) -> Any:
            return Norm if config.layernorm_zero_centered_gamma else WrappedTorchNorm

    return Backend()


def _delta_spec(config: Any) -> Any:
    """The layers of a model with gated delta nets."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    backend = _engine_backend(config)
    norm_linear = backend.column_parallel_layer_norm_linear()
    parts = SelfAttentionSubmodules(
        linear_qkv=norm_linear,
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=backend.layer_norm(),
        k_layernorm=backend.layer_norm(),
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=parts,
        metainfo={"fuse_input_layernorm": True},
    )
    asked_of: Any = variants
    asked_of._get_backend_spec_provider = lambda config: backend
    asked_of._get_self_attention_module_spec = lambda config, backend: attention
    kernels: Any = common
    kernels.HAVE_FLA = True  # of which no kernel is called: `deterministic_mode`
    kernels.l2norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return variants.get_transformer_block_with_experimental_attention_variant_spec(config=config)


class _Linear(torch.nn.Linear):
    """A replacement for Transformer Engine's linear layer, where it is not parallel."""

    def __init__(self, wide: int, narrow: int, *, bias: bool = False, **_: Any) -> None:
        super().__init__(wide, narrow, bias=bias)

    def forward(self, given: torch.Tensor) -> Any:
        return super().forward(given), None


def _latent_attention() -> type:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentAttention(DotProductAttention):
        """Megatron-Core's own, whose output is as wide as `kv_channels` says."""

        def __init__(self, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            assert v_channels in (None, self.config.kv_channels)

    return LatentAttention


def _activation(name: str) -> Any:
    if name == "quick_gelu":
        from megatron.core.activations import quick_gelu

        return quick_gelu
    return {
        "silu": torch.nn.functional.silu,
        "relu2": lambda x: torch.nn.functional.relu(x).square(),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }[name]


def main() -> None:
    """Writes the answers."""
    every = torch.load(sys.argv[1], weights_only=True)
    stand_in()
    stand_in_for_gpus()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    moe_utils: Any = import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.15 asks for it without Transformer Engine, too
        moe_utils.te_general_gemm = None
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        torch.save([_answer_or_lack(asked) for asked in every], sys.argv[2])
        dist.destroy_process_group()


def _answer_or_lack(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer, or what an older release does not know."""
    try:
        return _answer(asked)
    except (TypeError, ModuleNotFoundError) as error:
        if not any(text in str(error) for text in ("unexpected keyword argument", "megatron.core.models.")):
            raise
        return {"lacks": str(error)}


@torch.no_grad()
def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = built(asked)
    own = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    if asked.get("folder"):
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, asked["folder"])
        model.load_state_dict(loaded["model"])
        own = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
        given = {n: t.clone() for n, t in own.items()}
    else:
        given = asked["state"] or {n: _random(n, t) for n, t in own.items()}
    assert given.keys() == own.keys(), sorted(given.keys() ^ own.keys())
    for name, tensor in own.items():
        tensor.copy_(given[name])
    ids = asked["ids"]
    position = torch.arange(ids.shape[1])[None].expand_as(ids)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()  # true: not seen
    return {"state": given, "logits": model(ids, position, mask).float()}


def _random(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Values of a trained model's size, so that every tensor counts in the logits."""
    if not tensor.is_floating_point():
        return tensor.clone()
    values = torch.randn(tensor.shape)
    return 1 + values / 8 if "norm" in name and name.endswith("weight") else values / 4


if __name__ == "__main__":
    main()
