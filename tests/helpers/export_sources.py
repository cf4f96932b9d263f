"""Checkpoints of tiny models as every source of an export leaves them: names, layouts, and folders.

Everything is made of one folder that `save_pretrained` wrote, without ckptcore: by transformers and peft
themselves, or by `trainer_names` in the names and layouts of trainers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from families import model_class
from safetensors.torch import load_file, save_file
from trainer_names import WORLDS, State, nanotron_config, tiny_model

RANKS = 2  # of a verl checkpoint


@dataclass(frozen=True)
class Tiny:
    """A family's tiny model. hub: the folder that `save_pretrained` wrote."""

    family: str
    hub: Path

    @classmethod
    def make(cls, family: str, folder: Path) -> Tiny:
        """Builds it with the installed transformers."""
        tiny_model(family).save_pretrained(folder / "hub")
        return cls(family, folder / "hub")

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        config: dict[str, Any] = json.loads((self.hub / "config.json").read_text())
        return config

    @property
    def state(self) -> State:
        """Its tensors, as the hub has them."""
        return weights(self.hub)

    @cached_property
    def live(self) -> Any:
        """Its module in the installed transformers."""
        return opened(self.hub)


def opened(folder: Path) -> Any:
    """A folder's module in the installed transformers."""
    import transformers

    library: Any = transformers
    config = library.AutoConfig.from_pretrained(folder)
    return model_class(config).from_pretrained(folder, dtype="auto").eval()


def weights(folder: Path) -> State:
    """Every tensor of a folder's safetensors files."""
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def _hub(tiny: Tiny, form: str, folder: Path) -> Path:
    tiny.live.save_pretrained(folder, max_shard_size="16KB")
    shutil.copy(tiny.hub / "config.json", folder)  # of the transformers that the model is from
    return folder


def _live(tiny: Tiny, form: str, folder: Path) -> Path:
    dcp.save({"model": tiny.live.state_dict(), "step": torch.tensor(3)}, checkpoint_id=folder, no_dist=True)
    return folder


def _verl(tiny: Tiny, form: str, folder: Path) -> Path:
    """One file a rank, rows cut over the ranks (verl/utils/checkpoint/fsdp_checkpoint_manager.py)."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder.mkdir()
    for rank in range(RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        try:
            mesh = DeviceMesh("cpu", range(RANKS), mesh_dim_names=("fsdp",))
            mine: dict[str, Any] = {}
            for name, tensor in tiny.live.state_dict().items():
                parts = tensor.chunk(RANKS)  # rank 1 has nothing of a single row
                mine[name] = DTensor.from_local(
                    (parts[rank] if rank < len(parts) else tensor[:0]).clone(),
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
            torch.save(mine, folder / f"model_world_size_{RANKS}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))
    (folder / "huggingface").mkdir()
    (folder / "huggingface/config.json").write_bytes((tiny.hub / "config.json").read_bytes())
    return folder


def _peft(tiny: Tiny, form: str, folder: Path) -> Path:
    """A module with a LoRA on every linear layer, its adapter's config beside; see `adapted`."""
    model = adapted(tiny)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    model.peft_config["default"].save_pretrained(folder / "lora_adapter")
    return folder


def adapted(tiny: Tiny) -> Any:
    """The module with a LoRA, whose tensors are all random."""
    import peft
    import transformers

    library: Any = transformers
    base = opened(tiny.hub)
    linear = (torch.nn.Linear, library.pytorch_utils.Conv1D)
    head, modules = base.get_output_embeddings(), base.named_modules()
    names = {name.rpartition(".")[2] for name, m in modules if isinstance(m, linear) and m is not head}
    # peft puts none on the output of a Mamba layer, which does not call it as a module. Numbers name layers.
    without = {"out_proj", "router", "0", "2"}
    lora: Any = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=sorted(names - without), task_type="CAUSAL_LM"
    )
    model: Any = peft.get_peft_model(base, lora)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model.eval()


def _megatron(tiny: Tiny, form: str, folder: Path) -> Path:
    """A torch_dist folder, with the arguments of its training in common.pt."""
    dcp.save(_named(tiny, "megatron", form), checkpoint_id=folder, no_dist=True)
    config, args = tiny.config.get("text_config", tiny.config), argparse.Namespace(iteration=3)
    from_zero = ("gemma", "qwen3_next", "qwen3_5")  # models whose norms count from 0
    args.layernorm_zero_centered_gamma = config["model_type"].startswith(from_zero)
    args.swiglu = args.gated_linear_unit = config["model_type"] not in ("gpt2", "nemotron_h")
    if config["model_type"] == "nemotron_h":
        args.squared_relu, args.position_embedding_type = True, "none"
        config = config | {"num_hidden_layers": len(config["layers_block_type"])}
    for ours, theirs in (
        ("num_layers", ("num_hidden_layers", "n_layer")),
        ("hidden_size", ("hidden_size", "n_embd")),
        ("num_attention_heads", ("num_attention_heads", "n_head")),
        ("num_query_groups", ("num_key_value_heads", "n_head")),
        ("norm_epsilon", ("rms_norm_eps", "layer_norm_epsilon")),
        ("vocab_size", ("vocab_size",)),
    ):
        setattr(args, ours, next(config[t] for t in theirs if t in config))
    torch.save({"args": args, "iteration": 3, "checkpoint_version": 3.0}, folder / "common.pt")
    form_ = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(form_ | {"common_backend_version": 1}))
    return folder


def _torchtitan(tiny: Tiny, form: str, folder: Path) -> Path:
    dcp.save(_named(tiny, "torchtitan", form), checkpoint_id=folder, no_dist=True)
    return folder


# What OLMo-core calls the blocks of a model (olmo_core/nn/transformer/config.py).
_BLOCKS = {
    "llama": "default",
    "qwen2": "default",
    "qwen3": "default",
    "olmo2": "reordered_norm",
    "olmo3": "reordered_norm",
    "olmoe": "moe",
    "flex_olmo": "moe_reordered_norm",
    "gemma3_text": "peri_norm",
}


def _olmo_core(tiny: Tiny, form: str, folder: Path) -> Path:
    """A step of OLMo-core's trainer: model, with padded rows, and config."""
    state, config = _named(tiny, "olmo_core", form), tiny.config
    dcp.save({"model": state}, checkpoint_id=folder / "model_and_optim", no_dist=True)
    heads = {"n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"]}
    model = {
        "d_model": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "vocab_size": state["embeddings.weight"].shape[0],
        "block": {"name": _BLOCKS[config["model_type"]], "sequence_mixer": heads},
    }
    if config["model_type"] == "gemma3_text":  # layers with a window are blocks of their own
        kinds = ["local" if kind == "sliding_attention" else "global" for kind in config["layer_types"]]
        model |= {"block": dict.fromkeys(("local", "global"), model["block"]), "block_pattern": kinds}
    data = {"tokenizer": {"vocab_size": config["vocab_size"]}}
    (folder / "config.json").write_text(json.dumps({"model": model, "dataset": data}))
    (folder / ".metadata.json").write_text('{"ephemeral": false, "version": "3.0.0"}')
    return folder


def _olmo(tiny: Tiny, form: str, folder: Path) -> Path:
    """An unsharded checkpoint of allenai/OLMo."""
    folder.mkdir()
    torch.save(_named(tiny, "olmo", form), folder / "model.pt")
    torch.save({"state": {}, "param_groups": []}, folder / "optim.pt")
    torch.save({"global_step": 3}, folder / "train.pt")
    config = tiny.config
    model = {
        "d_model": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "embedding_size": config["vocab_size"],
        "norm_after": json.dumps(config["model_type"] == "olmo2"),
    }
    (folder / "config.yaml").write_text("model:\n" + "".join(f"  {k}: {v}\n" for k, v in model.items()))
    return folder


def _gpt_neox(tiny: Tiny, form: str, folder: Path) -> Path:
    """A step of GPT-NeoX on two tensor-parallel ranks, of which each has summands of the biases of rows."""
    (folder / "configs").mkdir(parents=True)
    (folder / "configs/run.yml").write_text("gpt-j-residual: true\n")
    state = _named(tiny, "gpt_neox", form)
    for rank in range(2):
        part = {}
        for name, tensor in state.items():
            rows = name.rpartition(".")[0].endswith(("attention.dense", "dense_4h_to_h"))
            if "norm" in name:
                part[name] = tensor
            elif rows and name.endswith("bias"):
                part[name] = tensor if rank else torch.zeros_like(tensor)
            else:
                part[name] = tensor.chunk(2, int(rows))[rank].clone()
        model = {"mp_world_size": 2, "dp_world_size": 1, "global_steps": 3}
        module = part if form == "sequential" else None
        torch.save({**model, "module": module}, folder / f"mp_rank_{rank:02d}_model_states.pt")
        for layer in {n.partition(".")[0] for n in part} if module is None else ():
            own = {n.partition(".")[2]: t for n, t in part.items() if n.startswith(f"{layer}.")}
            torch.save(own, folder / f"layer_{int(layer):02d}-model_{rank:02d}-model_states.pt")
    return folder


def _nanotron(tiny: Tiny, form: str, folder: Path) -> Path:
    """A step of nanotron on two tensor-parallel ranks, with boxes in the headers of what is cut."""
    state, config = _named(tiny, "nanotron", form), tiny.config
    heads = [config["num_attention_heads"], config["num_key_value_heads"], config["num_key_value_heads"]]
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        path = folder / "model" / module.replace(".", "/")
        path.mkdir(parents=True, exist_ok=True)
        if "norm" in module:
            save_file({"data": tensor}, path / f"model_{leaf}.safetensors")
            continue
        dim = int(module.endswith(("o_proj", "down_proj")))
        shares = heads if "qkv" in module else [1, 1] if "gate_up" in module else [1]
        parts = tensor.split([tensor.shape[dim] * n // sum(shares) for n in shares], dim)
        for rank in range(2):
            pairs, here, there = [], 0, 0
            for part in parts:
                size = part.shape[dim] // 2
                bounds = ((here, here + size), (there + rank * size, there + (rank + 1) * size))
                pairs.append("#".join(_slices(tensor.dim(), dim, *b) for b in bounds))
                here, there = here + size, there + part.shape[dim]
            mine = torch.cat([p.chunk(2, dim)[rank] for p in parts], dim).contiguous()
            about = {
                "version": "1.5",
                "local_global_slices_pairs": ";".join(pairs),
                "unsharded_shape": str(tuple(tensor.shape)),
            }
            ranks = f"pp-rank-0-of-1_tp-rank-{rank}-of-2"
            save_file({"data": mine}, path / f"model_{leaf}_{ranks}.safetensors", about)
    (folder / "model_config.json").write_text(json.dumps(nanotron_config(config, form)))
    recorded = {"version": "1.5", "tp": 2, "dp": 1, "metas": {"last_train_step": 3}}
    (folder / "checkpoint_metadata.json").write_text(json.dumps(recorded))
    (folder / "config.yaml").write_text("general:\n  step: 3\n")
    return folder


def _slices(dims: int, dim: int, start: int, stop: int) -> str:
    return "|".join(f"{start},{stop},None" if n == dim else "None,None,None" for n in range(dims))


def _named(tiny: Tiny, world: str, form: str) -> State:
    state = WORLDS[world][0](tiny.config, tiny.state, form)
    return {n: t.contiguous() for n, t in state.items()}


# Source of an export -> what puts a checkpoint of a form into a folder, and gives the path to export.
WRITERS: Mapping[str, Callable[[Tiny, str, Path], Path]] = {
    "hf-hub": _hub,
    "hf-live": _live,
    "verl": _verl,
    "peft": _peft,
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "olmo_core": _olmo_core,
    "olmo": _olmo,
    "gpt_neox": _gpt_neox,
    "nanotron": _nanotron,
}
