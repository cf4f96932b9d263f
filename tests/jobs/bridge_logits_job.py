"""What Megatron-Bridge's own Qwen2.5-VL computes from a checkpoint, beside transformers, on one CPU.

python bridge_logits_job.py HUB ANSWER FOLDER...

HUB is the model's folder, FOLDER a release of torch_dist: Bridge builds the model from its run_config.yaml,
and Megatron-Core's own loader reads it strictly.
ANSWER will hold how far the logits of each are from those of transformers, of text and of a picture in one,
and how far those of transformers are from its own without the picture.

Megatron-Bridge means to run on GPUs and Python 3.12. Replaced here: Transformer Engine by modules of empty
classes, of which none is built (the layers are Megatron's own); the rest as in megatron_logits_job.py.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
import types
import typing
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
import yaml
from mcore_job import stand_in
from megatron_logits_job import stand_in_for_gpus

Tensor = torch.Tensor


class _Empty(type):
    """The type of classes whose attributes are such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(_Empty("module", (), {}), name)


class _Engine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A replacement for Transformer Engine, once Megatron-Core has found none."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.split(".")[0] != "transformer_engine":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__version__ = "2.9"


def _provider(folder: str) -> Any:
    """Bridge's own, as the run_config.yaml of a checkpoint says it, but for what no CPU has."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not any(isinstance(finder, _Engine) for finder in sys.meta_path):
        sys.meta_path.append(_Engine())
    library: Any = importlib.import_module("megatron.bridge.utils.instantiate_utils")
    with open(f"{folder}/run_config.yaml", encoding="utf-8") as file:
        out = library.instantiate(yaml.safe_load(file)["model"])
    fused = ("bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm", "apply_rope_fusion")
    for name in (*fused, "gradient_accumulation_fusion"):
        setattr(out, name, False)
    out.tensor_model_parallel_size = out.pipeline_model_parallel_size = 1
    out.hidden_dropout = out.attention_dropout = 0.0
    out.use_cpu_initialization = True
    out.transformer_layer_spec = lambda built: get_gpt_decoder_block_spec(
        built, use_transformer_engine=False, normalization="RMSNorm"
    )
    out.finalize()
    out._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return out


def _questions(config: Any) -> dict[str, dict[str, Tensor]]:
    """Text, and text with a picture of 4 x 4 patches, which are 4 tokens."""
    picture = config.image_token_id
    ids = torch.tensor([[1, 2, config.vision_start_token_id, *[picture] * 4, 3, 4, 5]])
    patches = torch.randn(16, 3 * 2 * config.vision_config.patch_size**2)
    picture_inputs = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return {
        "text": {"input_ids": torch.arange(24).reshape(3, 8)},
        "picture": {"input_ids": ids, "mm_token_type_ids": (ids == picture).int(), **picture_inputs},
    }


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other[..., : one.shape[-1]]).abs().max())


@torch.no_grad()
def _answers(hub: str, folders: Sequence[str]) -> dict[str, Any]:
    import transformers
    from megatron.core import dist_checkpointing

    library: Any = transformers
    read = library.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        hub, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    questions = _questions(read.config)
    right = {name: read(**asked).logits for name, asked in questions.items()}
    blind = read(input_ids=questions["picture"]["input_ids"]).logits
    out: dict[str, Any] = {"picture counts": _apart(right["picture"], blind), "folders": []}
    for folder in folders:
        model = _provider(folder).provide(pre_process=True, post_process=True).float().eval()
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)
        model.load_state_dict(loaded["model"])
        made = {name: model(**asked, attention_mask=None) for name, asked in questions.items()}
        out["folders"].append({name: _apart(right[name], made[name]) for name in questions})
    return out


def main() -> None:
    """Writes the answer."""
    hub, answer, *folders = sys.argv[1:]
    python: Any = typing
    python.override = typing_extensions.override  # of Python 3.12
    stand_in()
    stand_in_for_gpus()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    softmax: Any = importlib.import_module("megatron.core.fusions.fused_softmax")
    softmax.get_default_causal_mask = lambda size: torch.ones(size, size).triu(1).bool()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        torch.manual_seed(0)
        found = _answers(hub, folders)
        dist.destroy_process_group()
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
