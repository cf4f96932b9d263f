"""Read the folder of a Hugging Face Trainer that ran with DeepSpeed: the save of DeepSpeed, and its copy.

The Trainer writes ``model.safetensors`` (of a LoRA, ``adapter_model.safetensors``) beside ``latest`` and
``global_stepN/`` (transformers/trainer.py, `_save_checkpoint`). DeepSpeed's masters are the model, and the
Trainer's file is a copy of the 16-bit weights: the two are compared, neither is stray, and a copy that lacks
trained weights is reported.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from ckptcore.core.manifest import Manifest
from ckptcore.formats.base import Format, Reader, Source, natural
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.deepspeed.file_names import is_checkpoint
from ckptcore.formats.deepspeed.format import FORMAT as DEEPSPEED
from ckptcore.formats.deepspeed.format import read
from ckptcore.formats.huggingface.shards import with_consolidated_folder

COPIES = ("safetensors", "hf_quantized")  # formats of the Trainer's own file
_16_BIT, _MASTERS, _STATE = "lp/", "module.", "optimizer.state."  # of DeepSpeed's names
# PEFT leaves out the adapter's name, and with it the wrapper of a module that is trained beside adapters
# (peft/utils/save_and_load.py, `get_peft_model_state_dict`).
_ADAPTER = re.compile(r"\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)(?=\.|$)")
_WRAPPER = re.compile(r"\.modules_to_save\.default(?=\.)")


def with_copy(folder: str, source: Source) -> Format | None:
    """Return the format that reads a folder with a save of DeepSpeed below it; None without one."""
    if DEEPSPEED.reader is None or not is_checkpoint(source.below(folder).listing):
        return None
    reader = Reader(partial(_read, folder=folder), DEEPSPEED.reader.checksums, DEEPSPEED.reader.objects)
    return replace(DEEPSPEED, reader=reader)


def _read(source: Source, /, *, folder: str) -> Manifest:
    """Read the manifest of DeepSpeed's save, with the tensors of the Trainer's file as copies."""
    save = read(source.below(folder))
    names = {t.fqn for t in save.tensors}
    wrapped = {_WRAPPER.sub("", name): name for name in names if _WRAPPER.search(name)}

    def name_of(name: str) -> str:
        for inner in (name, _ADAPTER.sub(r".\1.default", name)):
            for start in (_16_BIT, _MASTERS):
                stored = wrapped.get(start + inner, start + inner)
                if stored in names:
                    return stored
        return _MASTERS + name

    joined = join(save.format, source.store.url, [Part(save, folder)], save.origin)
    # What was trained has optimizer state; frozen weights are in no file of an adapter.
    trained = {n.removeprefix(_STATE).rpartition(".")[0]: None for n in names if n.startswith(_STATE)}
    required = [name_of(name) for name in sorted(trained, key=natural) if _MASTERS + name in names]
    return with_consolidated_folder(replace(joined, order=save.order), source, "", name_of, required)
