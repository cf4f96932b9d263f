"""Jobs of Megatron-Core's own GPTModel and distributed optimizer on a CPU: train, save, resume, train on.

    PYTHONPATH=RELEASE:tests/helpers python megatron_train_job.py ASKED OUT

ASKED is JSON: ``runs``, a list of runs, each of which is started on ranks of its own. A run has ``mesh``
(`Ranks`) and ``model`` (a name in `MODELS`). One that saves has ``save``: folders to save to after `STEPS`
steps -> ``layout``, how the optimizer's state is saved there; None is a job without `DistributedOptimizer`.
One that resumes has ``load``: name -> folder of torch_dist and layout. Each trains `MORE` steps from there.

OUT gets, for each run, by rank: name -> ``tensors`` (digests of weights, masters and moments right behind the
load), ``losses``, and ``after``, digests behind the last step. "" is the name of what a run saves.

Saving and loading is what Megatron-LM does (megatron/training/checkpointing.py): `sharded_state_dict` of
chunks and optimizer, `dist_checkpointing.save` and `load`. Replaced is what needs CUDA: see mcore_job.py,
megatron_logits_job.py, `stand_in_for_tensor_types`, and `FusedAdam`, because no release can resume with the
optimizer of torch that it takes where neither Transformer Engine nor Apex is installed: the `state_dict` of a
fresh optimizer fails (``assert len(steps) == 1``), and behind a step `load_state_dict` does (``KeyError:
'step'`` in `_set_main_param_and_optimizer_states`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import start_ranks
from mcore_job import stand_in
from megatron_logits_job import stand_in_for_gpus
from megatron_resume_job import digest
from megatron_training import GATHERED, LAYERS, MODEL_SPACE, Ranks
from torch.distributed.checkpoint.filesystem import SerializationFormat

warnings.filterwarnings("ignore")
STEPS, MORE, BATCH, LENGTH, VOCABULARY = 2, 3, 4, 8, 96
_CPU_TYPES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


_DENSE: dict[str, Any] = {"tied": False, "vocabulary": VOCABULARY}
_MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "tied": {**_DENSE, "tied": True},
    "moe": {**_DENSE, "config": _MOE},
    "padded": {**_DENSE, "vocabulary": 91, "config": {"num_query_groups": 4}},
    "float32": {**_DENSE, "bf16": False},
}
CONFIG: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
}


def stand_in_for_tensor_types() -> None:
    """Give tensors of a CPU the type names of CUDA's, by which optimizers choose, and for CUDA a CPU."""
    own: Any = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        return _CPU_TYPES.get(found, found) if isinstance(found, str) else found

    torch.Tensor.type = named  # type: ignore[assignment,method-assign]
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, partial(_on_cpu, getattr(torch, name)))
    cuda: Any = torch.cuda
    cuda.FloatTensor, cuda.IntTensor = torch.FloatTensor, torch.IntTensor
    cuda.stream = lambda *_: nullcontext()
    cuda.default_stream = cuda.current_stream
    cuda.set_device = lambda *_: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None


def _on_cpu(make: Any, *args: Any, **kwargs: Any) -> Any:
    if str(kwargs.get("device", "")).startswith("cuda"):
        kwargs["device"] = "cpu"
    return make(*args, **kwargs)


def _quantize_nothing(parameters: Any, *_: Any) -> None:
    """Replace a step for parameters in FP8, which 0.12 refuses without Transformer Engine, for none, too."""
    if parameters:
        raise ValueError(f"these models have no parameters in FP8 (got {len(parameters)})")


def known(function: Any, **fields: Any) -> dict[str, Any]:
    """Return the fields that a function of this release takes."""
    takes = inspect.signature(function).parameters
    return {name: value for name, value in fields.items() if name in takes}


def content_of(layout: str | None) -> dict[str, Any]:
    """Return the metadata that Megatron-LM's `_build_sharded_state_dict_metadata` makes."""
    asked = {} if layout is None else {"distrib_optim_sharding_type": layout}
    return {**asked, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}


class FusedAdam(torch.optim.Optimizer):
    """Apex's optimizer in plain torch: the number of steps is of a group, a parameter has two moments."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                for kind in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(kind, torch.zeros_like(parameter))
                state["exp_avg"].mul_(first).add_(parameter.grad, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                mean = state["exp_avg"] / (1 - first ** group["step"])
                root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                update = mean.div_(root).add_(parameter, alpha=group["weight_decay"])
                parameter.sub_(update, alpha=group["lr"])


def stand_in_for_apex() -> None:
    """Let Megatron-Core's optimizers take `FusedAdam`, as they do where Apex is installed."""
    import megatron.core.optimizer
    from megatron.core.optimizer import distrib_optimizer

    for module in (megatron.core.optimizer, distrib_optimizer):
        module.Adam = FusedAdam
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


class Job:
    """The model chunks and the optimizer of a rank."""

    def __init__(self, asked: dict[str, Any], layout: str | None, seed: int) -> None:
        from megatron.core import parallel_state as groups
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.mesh, self.asked, self.layout = Ranks(**asked["mesh"]), MODELS[asked["model"]], layout
        self.bf16 = self.asked.get("bf16", True)
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        self.config = TransformerConfig(
            **{**CONFIG, **self.asked.get("config", {})},
            **({"num_layers_in_first_pipeline_stage": self.mesh.first} if self.mesh.first else {}),
            use_cpu_initialization=True,
            activation_func=torch.nn.functional.silu,
            bf16=self.bf16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            tensor_model_parallel_size=self.mesh.tp,
            pipeline_model_parallel_size=self.mesh.pp,
            virtual_pipeline_model_parallel_size=self.mesh.vpp,
            expert_model_parallel_size=self.mesh.ep,
            expert_tensor_parallel_size=1,
            batch_p2p_comm=False,
        )
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=self.layout is not None)
        self.chunks = []
        for n in range(self.mesh.vpp or 1):
            torch.manual_seed(seed + dist.get_rank() + 1000 * n)
            model = self._gpt(groups, n)
            model = Float16Module(self.config, model) if self.bf16 else model
            self.chunks.append(
                DistributedDataParallel(
                    config=self.config, ddp_config=ddp, module=model, disable_bucketing=n > 0
                )
            )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                weight_decay=0.1,
                clip_grad=1.0,
                bf16=self.bf16,
                params_dtype=dtype,
                use_distributed_optimizer=self.layout is not None,
            ),
            self.chunks,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def _gpt(self, groups: Any, n: int) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        virtual: dict[str, Any] = {"vp_stage": n} if self.mesh.vpp else {}
        self._set_stage(n)
        spec = get_gpt_decoder_block_spec(
            self.config,
            use_transformer_engine=False,
            **known(get_gpt_decoder_block_spec, normalization="RMSNorm", **virtual),
        )
        stage, last = groups.get_pipeline_model_parallel_rank(), (self.mesh.vpp or 1) - 1
        rows = self.asked["vocabulary"]
        return GPTModel(
            self.config,
            spec,
            vocab_size=rows + -rows % self.mesh.tp,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=self.asked["tied"],
            pre_process=stage == 0 and n == 0,
            post_process=stage == self.mesh.pp - 1 and n == last,
            **known(GPTModel.__init__, **virtual),
        )

    def _set_stage(self, n: int) -> None:
        """Set the virtual stage of what is built or asked next, as Megatron-LM does before 0.15."""
        from megatron.core import parallel_state as groups

        if self.mesh.vpp:
            groups.set_virtual_pipeline_model_parallel_rank(n)

    def train(self, first: int, steps: int) -> list[str]:
        """Return the losses of steps, the mean over all tokens of each."""
        from megatron.core import parallel_state as groups
        from megatron.core.pipeline_parallel import get_forward_backward_func

        copies, found = groups.get_data_parallel_world_size(), []
        for step in range(first, first + steps):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            tokens = torch.randint(
                91, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step)
            ).chunk(copies)[groups.get_data_parallel_rank()]
            losses = get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=[iter(tokens.split(1)) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(tokens),
                seq_length=LENGTH,
                micro_batch_size=1,
                forward_only=False,
            )
            self.optimizer.step()
            mean = torch.zeros(2, dtype=torch.float64)
            for one in losses:
                mean += torch.tensor([float(one["loss"]), 1.0], dtype=torch.float64)
            dist.all_reduce(mean)
            found.append(float(mean[0] / mean[1]).hex())
        return found

    def state(self, content: dict[str, Any], *, loading: bool) -> dict[str, Any]:
        """Return the sharded state dict of a checkpoint, as Megatron-LM's `generate_state_dict` makes it."""
        metadata, layout = content, content.get("distrib_optim_sharding_type")
        out: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": STEPS}
        for n, chunk in enumerate(self.chunks):
            self._set_stage(n)
            model = chunk.module.module if self.bf16 else chunk.module
            key = f"model{n}" if len(self.chunks) > 1 else "model"
            out[key] = model.sharded_state_dict(metadata=metadata)
        parts = {k: v for k, v in out.items() if k.startswith("model")}
        first, *_ = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        more = known(first.sharded_state_dict, metadata=metadata, sharding_type=layout)
        if "metadata" in more:
            more.pop("sharding_type", None)
        weights = parts if len(parts) > 1 else out["model"]
        out["optimizer"] = self.optimizer.sharded_state_dict(weights, is_loading=loading, **more)
        return out

    def save(self, folder: str, layout: str | None) -> None:
        from megatron.core import dist_checkpointing

        Path(folder).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        content = content_of(layout)
        state = self.state(content, loading=False)
        # Releases without content_metadata ask for the layout that this argument implies.
        state["args"] = Namespace(**self._args(), ckpt_fully_parallel_save=layout != GATHERED)
        dist_checkpointing.save(state, folder, **known(dist_checkpointing.save, content_metadata=content))

    def _args(self) -> dict[str, Any]:
        plain = {k: v for k, v in CONFIG.items() if k != "gated_linear_unit"}
        return {
            **plain,
            **self.asked.get("config", {}),
            "num_experts": self.asked.get("config", {}).get("num_moe_experts"),
            "swiglu": True,
            "group_query_attention": True,
            "transformer_impl": "local",
            "untie_embeddings_and_output_weights": not self.asked["tied"],
            "position_embedding_type": "rope",
            "padded_vocab_size": self.asked["vocabulary"] + -self.asked["vocabulary"] % self.mesh.tp,
            "tensor_model_parallel_size": self.mesh.tp,
            "pipeline_model_parallel_size": self.mesh.pp,
            "virtual_pipeline_model_parallel_size": self.mesh.vpp,
            "expert_model_parallel_size": self.mesh.ep,
            "expert_tensor_parallel_size": 1,
            "data_parallel_size": self.mesh.ranks // (self.mesh.tp * self.mesh.pp),
            "use_distributed_optimizer": self.layout is not None,
            "bf16": self.bf16,
            "overlap_grad_reduce": False,
        }

    def load(self, folder: str) -> None:
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self.state(self._content(folder), loading=True), folder)
        for n, chunk in enumerate(self.chunks):
            model = chunk.module.module if self.bf16 else chunk.module
            model.load_state_dict(state[f"model{n}" if len(self.chunks) > 1 else "model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _content(self, folder: str) -> dict[str, Any]:
        """Return what a checkpoint is asked for, as Megatron-LM's `load_checkpoint` finds it."""
        from megatron.core import dist_checkpointing

        if hasattr(dist_checkpointing, "load_content_metadata"):
            found: dict[str, Any] = dist_checkpointing.load_content_metadata(folder)
            return found
        args = dist_checkpointing.load_common_state_dict(folder)["args"]
        by_parameter = MODEL_SPACE if args.ckpt_fully_parallel_save else GATHERED
        return content_of(by_parameter if self.layout else None)

    def digests(self) -> dict[str, str]:
        """Return digests of the rank's weights, and of the masters and moments of its optimizer."""
        found = {
            f"{n}.{name}": digest(tensor)
            for n, chunk in enumerate(self.chunks)
            for name, tensor in chunk.module.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }
        for c, one in enumerate(getattr(self.optimizer, "chained_optimizers", [self.optimizer])):
            inner = getattr(one, "optimizer", None)
            for g, group in enumerate(inner.param_groups if inner is not None else ()):
                found[f"optimizer.{c}.{g}"] = repr(
                    {k: v for k, v in sorted(group.items()) if isinstance(v, (int, float, bool, tuple))}
                )
                for p, master in enumerate(group["params"]):
                    name = f"optimizer.{c}.{g}.{p}"
                    found[name] = digest(master)
                    for kind, value in inner.state[master].items():
                        found[f"{name}.{kind}"] = digest(torch.as_tensor(value))
        return found

    def outcome(self) -> dict[str, Any]:
        tensors = self.digests()
        return {"tensors": tensors, "losses": self.train(STEPS, MORE), "after": self.digests()}


def _forward(tokens: Any, model: Any, *_: Any) -> Any:
    ids = next(tokens)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    length = inputs.shape[1]
    mask = torch.ones(1, 1, length, length).triu(1).bool()  # true: not seen
    out = model(inputs, torch.arange(length)[None], mask, labels=labels)
    return out, _loss


def _loss(output: torch.Tensor) -> Any:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def rank_main(rank: int, meet: str, out: str, asked: dict[str, Any]) -> None:
    """Carry out one run on one rank."""
    from megatron.core import parallel_state as groups

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh = Ranks(**asked["mesh"])
    dist.init_process_group("gloo", init_method=f"file://{meet}/r", rank=rank, world_size=mesh.ranks)
    groups.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=mesh.vpp,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=1,
    )
    found = {}
    if "save" in asked:
        job = Job(asked, next(iter(asked["save"].values())), seed=7)
        job.train(0, STEPS)
        for folder, layout in asked["save"].items():
            job.save(folder, layout)
        found[""] = job.outcome()
    for name, (folder, layout) in asked.get("load", {}).items():
        job = Job(asked, layout, seed=len(found) * 100 + 107)
        job.load(folder)
        found[name] = job.outcome()
    results: list[Any] = [None] * mesh.ranks
    dist.all_gather_object(results, found)
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    for child in multiprocessing.active_children():  # the manager of the queue to Megatron-Core's writers
        child.terminate()
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def main(file: str, out: str) -> None:
    stand_in()
    stand_in_for_gpus()
    stand_in_for_tensor_types()
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs

    stand_in_for_apex()
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    optimizers: Any = megatron.core.optimizer.distrib_optimizer
    optimizers.quantize_param_shard = _quantize_nothing
    routers: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(routers, "te_general_gemm"):
        routers.te_general_gemm = None  # 0.15 looks for it without Transformer Engine, too
    files: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if "serialization_format" not in inspect.getsource(files):  # torch 2.7 and later require it
        files._write_item = partial(files._write_item, serialization_format=SerializationFormat.TORCH_SAVE)
    del sys.modules["__main__"].__file__  # a spawned manager of queues would import all of this again
    found = []
    for asked in json.loads(Path(file).read_text())["runs"]:
        with tempfile.TemporaryDirectory() as meet:
            start_ranks(rank_main, (meet, f"{meet}/out", asked), Ranks(**asked["mesh"]).ranks)
            found.append(json.loads(Path(f"{meet}/out").read_text()))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
