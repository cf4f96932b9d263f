"""Lay out a step of nanotron that a run begins from: a file for each tensor, and the model's config.

The files are those of one rank. Any other number loads them, too: each rank joins the files of a tensor by
the boxes in their headers, and takes its own part (nanotron/serialize/weights.py, `load_weights`).
checkpoint_metadata.json comes last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.core.object_tree import decode
from ckptcore.encodings.safetensors_header import HeaderText
from ckptcore.errors import UnsupportedDtype, UnsupportedFormat
from ckptcore.formats.base import Arrangement, FileLayout, Literal, Slot
from ckptcore.formats.common.rank_file_names import NANOTRON_METADATA, NANOTRON_MODEL

CONFIG = "model_config"  # the object that becomes model_config.json
_VERSION = "1.5"
# Modules whose tensors ranks share, whatever their number, and those that each rank has completely
# (nanotron/models/llama.py and qwen.py). The loader looks for the files of the former by their ranks.
_SHARED = re.compile(
    r"model\.(?:token_position_embeddings\.pp_block\.token_embedding|lm_head\.pp_block"
    r"|decoder\.\d{1,6}\.pp_block\.(?:attn\.(?:qkv|o)_proj|mlp\.(?:gate_up|down)_proj))\.(?:weight|bias)"
)
_COMPLETE = re.compile(
    r"model\.(?:final_layer_norm\.pp_block|decoder\.\d{1,6}\.pp_block\.(?:input|post_attention)_layernorm)"
    r"\.weight"
)
_ONE_RANK = "_pp-rank-0-of-1_tp-rank-0-of-1"
_ALL = "None,None,None"  # a slice as nanotron writes it
# What `TrainingMetadata` and `CheckpointMetadata` hold before a training's first step.
_BEFORE_TRAINING = {
    "version": _VERSION,
    "tp": 1,
    "dp": 1,
    "cp": 1,
    "custom_metas": None,
    "metas": {
        "consumed_train_samples": 0,
        "consumed_tokens_total": 0,
        "last_train_step": 0,
        "last_stage_idx": None,
        "data_stages": [],
    },
}


def arrange_step(request: Arrangement) -> Iterator[FileLayout]:
    """Lay out the files of a step.

    Raises:
        UnsupportedDtype: safetensors has no such dtype.
        UnsupportedFormat: Nothing says what the config is, or how ranks share a tensor.
    """
    if CONFIG not in request.objects:
        raise UnsupportedFormat(
            "cannot write a step of nanotron without the config of its model",
            hint="add --names nanotron, and --config with the model's config.json",
        )
    for number, spec in enumerate(request.tensors):
        yield _tensor_file(number, spec)
    yield _json_file(f"{CONFIG}.json", decode(request.objects[CONFIG]))
    yield _json_file(NANOTRON_METADATA, _BEFORE_TRAINING, commit=True)


def _tensor_file(number: int, spec: TensorSpec) -> FileLayout:
    shared = _SHARED.fullmatch(spec.fqn) is not None
    if not shared and not _COMPLETE.fullmatch(spec.fqn):
        raise UnsupportedFormat(
            f"cannot write {spec.fqn}: nothing says how ranks of nanotron share it",
            hint=f"leave it out with --exclude {spec.fqn}",
        )
    if BY_NAME[spec.dtype].safetensors is None:
        raise UnsupportedDtype(
            f"safetensors has no dtype {spec.dtype} ({spec.fqn})", fqn=spec.fqn, dtype=spec.dtype
        )
    texts = None
    if shared:
        box = "|".join([f"0,{spec.shape[0]},None", *[_ALL] * (len(spec.shape) - 1)])
        texts = {
            "version": _VERSION,
            "local_global_slices_pairs": f"{'|'.join([_ALL] * len(spec.shape))}#{box}",
            "unsharded_shape": str(tuple(spec.shape)),
        }
    header = HeaderText(texts)
    start = header.add("data", spec.dtype, spec.shape)
    prefix = header.packed(64)
    module, _, leaf = spec.fqn.rpartition(".")
    path = f"{NANOTRON_MODEL}{module.replace('.', '/')}/model_{leaf}{_ONE_RANK * shared}.safetensors"
    slots, literals = (Slot(0, len(prefix) + start),), (Literal(0, prefix),)
    return FileLayout(path, len(prefix) + header.end, (number,), slots, literals)


def _json_file(path: str, content: Any, *, commit: bool = False) -> FileLayout:
    data = canonical_json(content)
    return FileLayout(path, len(data), (), (), (Literal(0, data),), commit=commit)
