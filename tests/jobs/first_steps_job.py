"""A trainer's own model begins from what was written for its mesh, and makes steps, on forked gloo ranks.

    python first_steps_job.py ASKED OUT

ASKED is a file of torch: ``trainer``, a name of `TRAINERS`; ``config``, as the hub has it; ``ids``, the
batch of all ranks; ``steps`` and ``rate`` of SGD; and ``starts``, mesh -> (FSDP, TP, folder). For each start
the trainer builds its model, shards it, and loads the folder, all by its own code. A data-parallel rank has
its share of the batch. OUT: the JSON of, by mesh, the losses of the steps: those of the whole batch, from
each rank.

The replacements are those of torchtitan_logits_job.py, and one for attention, which has no gradient on CPUs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import start_ranks
from torch.distributed.device_mesh import init_device_mesh

T = torch.Tensor
# A model, its logits, and whether it averages gradients over data-parallel ranks: others add them.
Begun = tuple[Any, Callable[[T], T], bool]


def transformers_model(asked: dict[str, Any], fsdp: int, tp: int, folder: str) -> Begun:
    """transformers' model under FSDP2 and torch's tensor parallelism, by DCP."""
    import torch.distributed.checkpoint as dcp
    from hf_mesh_job import sharded
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[asked["config"]["model_type"]].from_dict(asked["config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    model = sharded(model, init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp")))
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return model, lambda ids: model(ids).logits, True


def torchtitan_model(asked: dict[str, Any], fsdp: int, tp: int, folder: str) -> Begun:
    """torchtitan's model, its parallelization, and its manager of checkpoints with ``initial_load_path``."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models import llama3, qwen3
    from torchtitan_logits_job import built, with_norms_of

    parallel_dims.device_type = "cpu"
    own = ParallelismConfig(tensor_parallel_degree=tp, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(own, dist.get_world_size())
    dims.build_mesh()
    model = with_norms_of(asked["config"], built(asked["config"]).float())
    parallelize = llama3.parallelize_llama if "llama" in type(model).__module__ else qwen3.parallelize_qwen3
    model = parallelize(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=own,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo adds, but does not scale in the same call
            module.set_force_sum_reduction_for_comms(True)
    nothing: dict[str, Any] = {"dataloader": None, "optimizers": None, "lr_schedulers": None}
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, folder="none", initial_load_path=folder),
        model_parts=[model],
        states={},
        sd_adapter=None,
        base_folder=f"{folder}.none",
        **nothing,
    )
    assert manager.load()

    def logits(ids: T) -> T:
        positions = torch.arange(ids.shape[1])[None].expand_as(ids).contiguous()
        return torch.as_tensor(model(ids, positions, model.get_attention_masks(positions)))

    return model, logits, False


def olmo_core_model(asked: dict[str, Any], fsdp: int, tp: int, folder: str) -> Begun:
    """OLMo-core's model by the step's own config, its FSDP, and its loader."""
    from olmo_core.distributed.checkpoint import load_model_and_optim_state
    from olmo_core.nn.transformer import TransformerConfig

    written = json.loads((Path(folder) / "config.json").read_text())["model"]
    model: Any = TransformerConfig.from_dict(written).build(init_device="cpu")
    mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        model.apply_tp(mesh["tp"])
    model.apply_fsdp(dp_mesh=mesh["dp"])
    load_model_and_optim_state(f"{folder}/model_and_optim", model)
    return model, lambda ids: model(ids), True


def transformers_prepared() -> None:
    import transformers  # noqa: F401


def torchtitan_prepared() -> None:
    from torchtitan_logits_job import masked_attention, stand_in

    stand_in(masked_attention)


def olmo_core_prepared() -> None:
    import olmo_core.nn.transformer  # noqa: F401


# Name -> (imports before its ranks are forked, its model).
TRAINERS: dict[str, tuple[Callable[[], None], Callable[[dict[str, Any], int, int, str], Begun]]] = {
    "transformers": (transformers_prepared, transformers_model),
    "torchtitan": (torchtitan_prepared, torchtitan_model),
    "olmo_core": (olmo_core_prepared, olmo_core_model),
}


def losses(begun: Begun, asked: dict[str, Any], share: int, shares: int) -> list[float]:
    """The losses of the whole batch, of which this rank has one of ``shares``."""
    model, logits, averaged = begun
    optimizer, step_losses = torch.optim.SGD(model.parameters(), lr=asked["rate"]), []
    ids = asked["ids"].chunk(shares)[share]
    tokens = asked["ids"][:, 1:].numel()
    for _ in range(asked["steps"]):
        optimizer.zero_grad()
        answer = logits(ids[:, :-1].contiguous())
        every_logit = answer.full_tensor() if hasattr(answer, "full_tensor") else answer
        part = torch.nn.functional.cross_entropy(
            every_logit.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        (part / tokens * (shares if averaged else 1)).backward()
        optimizer.step()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, float(part.detach().double()))
        step_losses.append(sum(parts) / len(parts) * shares / tokens)
    return step_losses


def rank_main(rank: int, asked: dict[str, Any], start: tuple[int, int, str], out: str, meet: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fsdp, tp, folder = start
    dist.init_process_group("gloo", init_method=f"file://{meet}/r", rank=rank, world_size=fsdp * tp)
    torch.manual_seed(rank)
    begun = TRAINERS[asked["trainer"]][1](asked, fsdp, tp, folder)
    mine = losses(begun, asked, rank // tp, fsdp)
    results: list[Any] = [None] * (fsdp * tp)
    dist.all_gather_object(results, mine)
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()  # gloo aborts a rank whose peer has gone
    os._exit(0)  # and its threads can abort an interpreter that is taken down


def main(file: str, out: str) -> None:
    asked = torch.load(file, weights_only=True)
    TRAINERS[asked["trainer"]][0]()
    losses_by_mesh = {}
    for mesh, (fsdp, tp, folder) in asked["starts"].items():
        with tempfile.TemporaryDirectory() as meet:
            start_ranks(rank_main, (asked, (fsdp, tp, folder), f"{meet}/out", meet), fsdp * tp)
            losses_by_mesh[mesh] = json.loads(Path(f"{meet}/out").read_text())
    Path(out).write_text(json.dumps(losses_by_mesh))


if __name__ == "__main__":
    main(*sys.argv[1:])
