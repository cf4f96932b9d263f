"""List the folders of trainers' small files, and read configs there, as evidence of the architecture.

Every export uses them, so this module imports nothing that only maps of names need.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.naming.maps.hyperparameters import Config
from ckptcore.naming.worlds import HUB
from ckptcore.store import Store, open_source_store
from ckptcore.utils.foreign_text import InvalidText, load_json
from ckptcore.utils.plain_yaml import MAX_YAML, load_yaml


@dataclass(frozen=True, slots=True)
class TrainerFolder:
    """A folder in which a trainer leaves small files, below a checkpoint's folder or beside it.

    path: of the folder, "" for the checkpoint's own. by: the trainer. configs: name of a config in it -> (the
    world, or file, whose spelling it has, None where that follows from its content; the key below which a
    model's fields are, or "").
    """

    path: str
    by: str
    configs: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)


# Trainers, not formats, so it is no field of readers: Automodel and VeOmni have one format, and folders of
# their own. One trainer's folder is beside several formats, and folders above the tensors have no reader.
TRAINER_FOLDERS = (
    TrainerFolder("", "transformers, OLMo", {"config.json": (None, ""), "config.yaml": (None, "")}),
    TrainerFolder("", "Meta, Mistral", {"params.json": ("params", "")}),
    TrainerFolder("", "nanotron", {"model_config.json": ("nanotron", "")}),
    TrainerFolder("huggingface", "verl", {"config.json": (HUB, "")}),
    TrainerFolder("", "Megatron-Bridge", {"run_config.yaml": ("megatron", "model")}),
    TrainerFolder("tokenizer", "Megatron-Bridge"),
    TrainerFolder(".hf_metadata", "NeMo Automodel"),
    TrainerFolder(".hf_metadata/tokenizer", "NeMo Automodel"),
    TrainerFolder("context/nemo_tokenizer", "NeMo 2"),
    TrainerFolder("model_assets", "VeOmni"),
)
_CONFIGS = tuple(
    (posixpath.join(f.path, n), *spelling) for f in TRAINER_FOLDERS for n, spelling in f.configs.items()
)
_MOST = 4 << 20  # bytes of a config


def stored_configs(source: Manifest, world: str) -> Iterator[Config]:
    """Yield the configs of a checkpoint: arguments of its training, and files of trainers."""
    args = _megatron_arguments(source, world)
    if args is not None:
        yield Config("the checkpoint's `args`", "megatron", args)
    with closing(open_source_store(source.root)) as store:
        for path, spelled, key in _CONFIGS:
            content = _read_config(store, path)
            if content is None:
                continue
            below = content.get(key) if key else None
            content = below if isinstance(below, dict) else content
            kind = spelled or (HUB if isinstance(content.get("model_type"), str) else world)
            yield Config(path, kind, content)


def stored_section(source: Manifest, path: str, key: str) -> Mapping[str, Any]:
    """Return what a trainer's config says below a key; empty where it says nothing.

    Args:
        source: The checkpoint.
        path: Of the config, below the checkpoint's folder.
        key: At its top level.
    """
    with closing(open_source_store(source.root)) as store:
        content = _read_config(store, path) or {}
    section = content.get(key)
    return section if isinstance(section, dict) else {}


def _read_config(store: Store, path: str) -> Mapping[str, Any] | None:
    """Return a config's content; None where it cannot be read, is too large, or is no mapping."""
    try:
        size = store.size(path)
        most = _MOST if path.endswith(".json") else MAX_YAML
        data = store.read(path, 0, size) if size is not None and size <= most else None
    except CkptError:  # a folder, or not readable: no evidence
        return None
    try:
        content = None if data is None else load_json(data) if path.endswith(".json") else load_yaml(data)
    except InvalidText:
        return None
    return content if isinstance(content, dict) else None


def _megatron_arguments(source: Manifest, world: str) -> Mapping[str, Any] | None:
    """Return the arguments of Megatron's training: a namespace, or a dict, which DCP stores value by value.

    Both may be of any trainer: they count where names are Megatron's.
    """
    if world != "megatron":
        return None
    arguments: dict[str, Any] = {}
    for blob in source.blobs:
        if not blob.known:
            continue
        if blob.key == "args" and isinstance(blob.tree, dict):
            inside = blob.tree.get("value")
            if isinstance(inside, dict):
                return inside
            arguments |= blob.tree if "$" not in blob.tree else {}
        elif blob.key.startswith("args."):
            arguments[blob.key.removeprefix("args.")] = blob.tree
    return arguments or None
