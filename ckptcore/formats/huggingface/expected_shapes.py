"""Find the expected shapes of sharded tensors in files beside the shards: an index, a model's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.encodings.json_text import parse
from ckptcore.errors import CkptError
from ckptcore.formats.base import Source
from ckptcore.formats.huggingface.shard_headers import FolderShards, Shape, extent
from ckptcore.utils.foreign_text import InvalidText

INDEX, CONFIG = "model.safetensors.index.json", "config.json"
_MAX_INDEX, _MAX_CONFIG = 256 << 20, 1 << 20
# Ends of names in transformers' models whose shape is given by sizes in config.json. Only embeddings: no
# option of a model changes their shape.
_EMBEDDINGS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "embed_out.weight",
)
_VOCABULARY, _WIDTH = ("vocab_size",), ("hidden_size", "n_embd", "d_model")


def proves_all(source: Source, shards: FolderShards) -> bool:
    """Return whether an index lists exactly these tensors, and records as many bytes as they have."""
    form = _json(source, INDEX, _MAX_INDEX)
    listed, metadata = form.get("weight_map"), form.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(listed, dict) or type(total) is not int or listed.keys() != shards.parts.keys():
        return False
    size = 0
    for fqn, parts in shards.parts.items():
        if parts[0].dtype not in BY_NAME:
            return False
        size += TensorSpec(fqn, parts[0].dtype, extent(parts)).nbytes
    return size == total


def known_shapes(sources: Sequence[Source], shards: FolderShards) -> Mapping[str, Shape]:
    """Return the shapes of embeddings by the model's configuration; none if any tensor contradicts it."""
    for source in sources:
        config = _json(source, CONFIG, _MAX_CONFIG)
        rows, width = _number(config, _VOCABULARY), _number(config, _WIDTH)
        names = [n for n in shards.parts if n.endswith(_EMBEDDINGS)]
        if rows and width and names:
            agree = all(extent(shards.parts[n]) == (rows, width) for n in names)
            return dict.fromkeys(names, (rows, width)) if agree else {}
    return {}


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the size with one of these names, in the configuration or in that of its text model."""
    for part in (config, config.get("text_config")):
        sizes = [part[n] for n in names if n in part] if isinstance(part, dict) else []
        if len(sizes) == 1 and type(sizes[0]) is int and sizes[0] > 0:
            return sizes[0]
    return None


def _json(source: Source, path: str, most: int) -> dict[str, Any]:
    """Return a file's JSON object; {} if there is none, because an unreadable file proves nothing."""
    if not 0 < source.listing.get(path, 0) <= most:
        return {}
    try:
        form = parse(source.store.read(path, 0, source.listing[path]), path)
    except (CkptError, InvalidText):
        return {}
    return form if isinstance(form, dict) else {}
