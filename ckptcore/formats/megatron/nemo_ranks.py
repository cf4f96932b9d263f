"""Read a rank of an unpacked NeMo 1 model as a rank of a legacy Megatron-LM checkpoint.

An archive of NeMo 1 has ``model_config.yaml``, and of a model of several ranks each one's
``model_weights.ckpt``, in ``mp_rank_TT``, or in ``tp_rank_TT_pp_rank_PPP`` with several stages
(nemo/collections/nlp/parts/nlp_overrides.py, NLPSaveRestoreConnector.save_to). A file is the state dict of a
Lightning module, whose GPT is ``model``. Layers are numbered in their stage, and rows of QKV are by head,
or with ``megatron_legacy`` in the order of version 0 (modules/common/megatron/attention.py).

Nothing in a file states how the model is cut: the config does, and each rank's shapes must agree with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ckptcore.core.object_tree import Named
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import Objects
from ckptcore.errors import CkptError, Finding, MalformedCheckpoint, UnsupportedFormat, finding
from ckptcore.formats.base import Source
from ckptcore.formats.megatron.pickle_globals import read_megatron
from ckptcore.store.subfolder import FileRange, unrecorded
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.plain_yaml import MAX_YAML, load_yaml
from ckptcore.utils.text import short_repr

CONFIG = "model_config.yaml"
STATED = frozenset({"args", "checkpoint_version"})  # what `nemo_opener` adds to the content of a file
_MODEL = re.compile(r"^model\.(?:module\.)?")  # with `megatron_amp_O2`, a Float16Module is around the model
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
)
_OTHER_SIZES = ("ffn_hidden_size", "num_query_groups", "kv_channels")
_UNNAMED = ("virtual_pipeline_model_parallel_size", "expert_model_parallel_size")  # in no name of a folder
# Matrices that are cut in columns only -> the argument with the full number of them, `_columns` of it.
_CUT = (
    (re.compile(r"\.self_attention\.(?:linear_proj|dense|proj)\.weight$"), "projection_size"),
    (re.compile(r"\.(?:mlp\.(?:linear_fc2|dense_4h_to_h)\.|layernorm_mlp\.fc2_)weight$"), "ffn_hidden_size"),
)
# What every GPT has outside of its layers; output weights of its own only where they are not shared.
_ENDS = (
    (re.compile(r"(?:^|\.)embedding\.word_embeddings\.weight$"), "embedding.word_embeddings.weight"),
    (re.compile(r"\.final_(?:layer)?norm\.weight$"), "decoder.final_layernorm.weight"),
)
_OUTPUT = (re.compile(r"(?:^|\.)output_layer\.weight$"), "output_layer.weight")
_UNTIED = "untie_embeddings_and_output_weights"
_SAVE_ANEW = "save it with the NeMo that wrote it, as a distributed checkpoint"


def nemo_path(tp: int, pp: int, ep: int, stages: int, expert_ranks: int) -> str:
    """Return the file of a tensor rank ``tp`` and stage ``pp``; there is one expert rank.

    >>> nemo_path(1, 0, 0, 1, 1), nemo_path(0, 2, 0, 4, 1)
    ('mp_rank_01/model_weights.ckpt', 'tp_rank_00_pp_rank_002/model_weights.ckpt')
    """
    folder = f"mp_rank_{tp:02d}" if stages == 1 else f"tp_rank_{tp:02d}_pp_rank_{pp:03d}"
    return f"{folder}/model_weights.ckpt"


def nemo_opener(source: Source) -> Callable[[str], Objects]:
    """Return a function that reads a rank's file, with the arguments of the config beside it.

    Raises:
        MalformedCheckpoint: The config does not state how the model is cut, or a file contradicts it.
        UnsupportedFormat: The model is no GPT, or has virtual stages.
    """
    config = _config(source)

    def read(path: str) -> Objects:
        objects = read_megatron(FileRange(source.store, path, 0, source.listing[path]), path)
        state = _model_state(objects.tree, path)
        arguments = _arguments(config)
        _require_shapes(state, arguments, path)
        version = 0 if config.get("megatron_legacy") is True else 3.0
        tree = {"args": Named("namespace", arguments), "checkpoint_version": version, "model": state}
        return replace(objects, tree=tree)

    return read


def lacking_ends(names: Iterable[str], arguments: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each tensor outside of the layers that a GPT has, and that no rank has.

    Args:
        names: Tensors of all ranks, by the model's own names.
        arguments: From `nemo_opener`.
    """
    names = list(names)
    for pattern, fqn in (*_ENDS, *([_OUTPUT] if arguments[_UNTIED] else [])):
        if not any(pattern.search(name) for name in names):
            yield finding("hole", "coverage", f"{fqn} is in no rank's file, and every GPT has it", fqn=fqn)


def stated_ranks(source: Source) -> int:
    """Return how many ranks the config beside a file states; 1 where it states nothing."""
    config = _config_beside(source) or {}
    sizes = [config.get(key) for key in _SIZES[:2]]
    return prod(n for n in sizes if type(n) is int and n > 0)


def _config(source: Source) -> Mapping[str, Any]:
    config = _config_beside(source)
    if config is None:
        raise _untold(f"{CONFIG}, which states it, is not beside them, or is no YAML object")
    return config


def _config_beside(source: Source) -> Mapping[str, Any] | None:
    store = unrecorded(source.store)
    size = source.listing.get(CONFIG)
    if source.name is not None:
        try:
            size = store.size(CONFIG)
        except CkptError:  # without the right to list, a store denies what is not there
            return None
    if size is None or size > MAX_YAML:
        return None
    try:
        content = load_yaml(store.read(CONFIG, 0, size))
    except InvalidText:
        return None
    return content if isinstance(content, dict) else None


def _model_state(tree: Any, path: str) -> dict[str, Any]:
    """Return the state dict of the GPT in a file, by its own names."""
    if not isinstance(tree, dict) or any(type(name) is not str for name in tree):
        raise MalformedCheckpoint(f"{path} must hold a state dict", file=path)
    foreign_key = next((name for name in tree if not _MODEL.match(name)), None)
    if foreign_key is not None:
        raise UnsupportedFormat(
            "cannot merge the ranks of a NeMo model that is no GPT: "
            f"{path} has {foreign_key!r}, outside of model.",
            hint=_SAVE_ANEW,
        )
    return {_MODEL.sub("", name): value for name, value in tree.items()}


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Megatron-LM that say what the config says."""
    for key in _SIZES:
        if type(config.get(key)) is not int or config[key] < 1:
            raise _untold(f"{key} of {CONFIG} must be a positive integer (got {config.get(key)!r:.40})")
    for key in _UNNAMED:
        if config.get(key) not in (None, 1):
            raise UnsupportedFormat(
                f"cannot merge the ranks of a NeMo model with {key} {short_repr(config[key], 20)}: "
                "the names of their folders do not have that rank",
                hint=_SAVE_ANEW,
            )
    sizes = {key: config[key] for key in (*_SIZES, *_OTHER_SIZES) if type(config.get(key)) is int}
    sizes.setdefault("kv_channels", sizes["hidden_size"] // sizes["num_attention_heads"])
    return {
        **sizes,
        "projection_size": sizes["kv_channels"] * sizes["num_attention_heads"],
        "num_experts": config.get("num_moe_experts"),
        _UNTIED: config.get("share_embeddings_and_output_weights") is False,
    }


def _require_shapes(state: Mapping[str, Any], arguments: Mapping[str, Any], path: str) -> None:
    """Require the shapes that the config states, of what it states fully.

    Raises:
        MalformedCheckpoint: A matrix has another shape: the config is another model's, or was edited.
    """
    for name, value in state.items():
        columns = next((arguments.get(key) for pattern, key in _CUT if pattern.search(name)), None)
        if columns is None or not isinstance(value, StoredView):
            continue
        tp = arguments["tensor_model_parallel_size"]
        if value.shape != (arguments["hidden_size"], columns // tp) or columns % tp:
            raise MalformedCheckpoint(
                f"{name} of {path} is {list(value.shape)}, and {CONFIG} states "
                f"{arguments['hidden_size']} rows, and {columns} columns over {tp} tensor ranks",
                file=path,
                hint=f"use the {CONFIG} of the archive that the ranks are from",
            )


def _untold(why: str) -> MalformedCheckpoint:
    hint = f"copy {CONFIG} from the archive to where the folders of the ranks are"
    return MalformedCheckpoint(f"cannot merge the ranks of a NeMo model: {why}", file=CONFIG, hint=hint)
