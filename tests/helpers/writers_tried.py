"""What each reader was tried with: a row for every format, for the table of `docs/reference/formats.md`."""

from __future__ import annotations

from typing import NamedTuple


class Tried(NamedTuple):
    """What proves a reader.

    writers: programs and versions that wrote samples. proven: what tests compare with the writer's own loader
    or with the model in memory. unproven: what no sample of a real writer shows.
    """

    writers: str
    proven: str
    unproven: str


DEEPSPEED = Tried(
    "DeepSpeed 0.19.8",
    "ZeRO 0 to 3, pipeline, experts, AutoTP: tensors and optimizer",
    "other releases; GPT-NeoX is made by form, and compared with its own converter",
)
UNIVERSAL = Tried(
    "DeepSpeed 0.19.8", "what its converter makes, and DeepSpeed's load of what is written", "other releases"
)
TRIED: dict[str, Tried] = {
    "dcp": Tried(
        "torch 2.13",
        "tensors of FSDP1, FSDP2 and other meshes; torch's load of what is written",
        "pickles of torch 2.1 to 2.12 are made by form",
    ),
    "torch_dist": Tried(
        "Megatron-Core 0.9.0, 0.12.3, 0.16.1, 0.19.2; Megatron-Bridge 0.3.1 (LoRA)",
        "tensors, optimizer, objects; logits of LoRA adapters, opened by peft",
        "other releases; adapters of NeMo 2 are made by form",
    ),
    "zarr": Tried("Megatron-Core 0.12.3", "tensors and objects", "other releases"),
    "fsdp_dtensor": Tried("Megatron-Core 0.19.2", "tensors", "other releases"),
    "torch_dcp": Tried("none of its own", "it is read as `fsdp_dtensor`", "a save of Megatron-LM with FSDP2"),
    "megatron_legacy": Tried(
        "Megatron-Core 0.15.3",
        "tensors of TP, PP and experts",
        "other releases; unpacked models of NeMo 1 are made by form, from its source",
    ),
    "deepspeed": DEEPSPEED,
    "deepspeed_universal": UNIVERSAL,
    "deepspeed_universal_zero3": UNIVERSAL,
    "olmo_core": Tried("OLMo-core 3.0", "tensors and optimizer", "releases between 0.1 and 3.0"),
    "olmo_local": Tried("OLMo, git 59a53e3f", "tensors and optimizer", "releases"),
    "olmo_unsharded": Tried("OLMo, git 59a53e3f", "tensors and optimizer", "releases"),
    "olmo_v01": Tried("OLMo-core 0.1.0", "tensors and optimizer", ""),
    "hf_shards": Tried("torch 2.13, transformers 5.23", "tensors of FSDP and TP", "other releases"),
    "nanotron": Tried(
        "nanotron, git 2411b02 (version 1.5)",
        "tensors of two tensor-parallel ranks; missing ranks, tensors and layers; the map to the hub by "
        "logits, of steps made by form",
        "pipelines, experts and version 1.2 are made by form; optimizer state is not read",
    ),
    "diffusers": Tried(
        "diffusers 0.42.1",
        "components of a pipeline, also of one that lacks a part; its load of exports: pipelines of Stable "
        "Diffusion and DDPM, and UNet, DiT, Flux, VAE alone",
        "other releases; other pipelines; quantised components",
    ),
    "hf_quantized": Tried("made by form", "values by transformers' formulas", "files of other libraries"),
    "safetensors": Tried(
        "transformers 4.57 and 5.23, torchtune 0.6.1", "tensors; loads of what is written", ""
    ),
    "lightning": Tried("Lightning 2.6.6", "tensors and optimizer; a resumed training", "other releases"),
    "meta": Tried(
        "made by form, from Meta's loader", "tensors of Llama 1 to 4", "Meta's own files; logits of Llama 4"
    ),
    "accelerate": Tried(
        "Accelerate 1.15.0",
        "tensors and optimizer; `load_state` of what is written, on 1 to 4 ranks",
        "folders of the Trainer are written by form",
    ),
    "torch_checkpointing": Tried(
        "torch_checkpointing 0.1.1", "both layouts of an FSDP2 job", "layouts of a user"
    ),
    "torch_ranks": Tried(
        "torch 2.13, verl", "tensors and optimizer", "pickles of torch 2.1 to 2.12 are made by form"
    ),
    "torch_save": Tried(
        "torch 2.13, transformers 4.57.6, torchtune 0.6.1, Composer 0.32.1",
        "tensors and values, also in Composer's tars and in the form before 1.6",
        "sharded saves of Composer; files of torch 0.1 to 0.4 and of Python 2 are made by form",
    ),
}
