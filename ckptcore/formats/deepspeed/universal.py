"""Read the parameters of a universal checkpoint folder.

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`` (deepspeed/checkpoint/ds_to_universal.py). Of stages
up to 2 each file is a dict with the logical tensor as ``param``. Of stage 3 it is a flat tensor, and only
``param_shapes`` of the model-state files gives its shape. Parameters without moments (frozen and tied ones,
buffers) are copies of the module's, cast to float32: they are taken only where the module has none. Those
with moments are trained, and model-state files list them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from ckptcore.core.manifest import row_major
from ckptcore.core.object_tree import Refused
from ckptcore.encodings.pickle.torch_globals import StoredView, storages_in
from ckptcore.encodings.torchzip.reader import read_objects
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.base import Source, natural
from ckptcore.formats.common.shard_pieces import same
from ckptcore.formats.deepspeed.assembly import Assembly, FileTensor
from ckptcore.formats.deepspeed.file_names import CheckpointFiles
from ckptcore.formats.deepspeed.optimizer_states import LAYOUT, MASTER, STATE
from ckptcore.formats.deepspeed.rank_files import TABLE, StatesFile, config_value, read_file
from ckptcore.store.subfolder import FileRange
from ckptcore.utils.text import short_repr

Shape = tuple[int, ...]
_OPTIMIZER = "zero/optimizer_state.pt"
_STEP = "step"
_MAX_REPORTED = 20
_OF_OPTIMIZER = frozenset({"optimizer_state_dict", "param_groups", "ds_version", "clip_grad", "loss_scaler"})
# What a parameter's file may hold: the tensor, and how it is cut (deepspeed/checkpoint/constants.py).
_PARAMETER = frozenset({"param", "cat_dim", "param_n_sub_params", "sub_param_shape", "vocab_tensor"})
_READ_THE_OTHER = (
    "read the save that it was made of, whose flat buffers are right, or make another folder of it: "
    "ckptcore consolidate SAVE DST --to deepspeed_universal"
)


def add_universal(
    source: Source,
    files: CheckpointFiles,
    assembly: Assembly,
    shapes: Mapping[str, Shape],
    trained: Collection[str],
    master: Mapping[str, str],
) -> None:
    """Add every parameter's files.

    Args:
        source: The folder.
        files: Its files.
        assembly: Where tensors are added.
        shapes: Parameter -> shape, by the model-state files.
        trained: Parameters that have a master weight, by the model-state files.
        master: Parameter -> name that its master weight gets.
    """
    if _mixed_up(source, files):
        message = (
            "zero/ was made from round-robin gradients: DeepSpeed's converter (through 0.19.8) stores "
            "parameters under the names of others"
        )
        assembly.builder.report("lost-at-save", "files", message, hint=_READ_THE_OTHER)
    expected = set().union(*(files.universal[n] for n in trained if n in files.universal))
    for name in sorted(trained, key=natural):
        for key in sorted({MASTER, *expected} - files.universal.get(name, {}).keys()):
            path = f"zero/{name}/{key}.pt"
            target = master.get(name, f"{STATE}.{name}.{key}") if key == MASTER else f"{STATE}.{name}.{key}"
            assembly.builder.report("missing-file", "files", f"{path} is missing", fqn=target, file=path)
            assembly.unread(target, f"{path} is missing", path)
    surplus = 0
    for name, states in sorted(files.universal.items(), key=lambda row: natural(row[0])):
        moments = any(key not in (MASTER, _STEP) for key in states)
        listed = name in trained or (name in shapes and not moments and _STEP not in states)
        if trained and not listed and surplus < _MAX_REPORTED:
            surplus += 1
            path = states.get(MASTER, min(states.values()))
            message = (
                f"{path} is of a parameter that no *_model_states.pt lists: one of them is of another save"
            )
            hint = "move away what is of another save, or copy the model-state files again"
            assembly.builder.report("mixed-saves", "files", message, file=path, hint=hint)
        for key, path in states.items():
            target = f"{STATE}.{name}.{key}"
            if key == MASTER:
                if not moments and name in shapes and name not in master:
                    continue
                target = master.get(name, target)
            file, value = _read(source, path)
            if isinstance(value, dict):
                extra = {f"{name}.{key}.{k}": v for k, v in value.items() if k not in _PARAMETER}
                source.carry(path, "zero", extra)
                value = value.get("param")
            if not isinstance(value, StoredView):
                if not isinstance(value, Refused):
                    raise MalformedCheckpoint(f"{path} holds no tensor", file=path)
                assembly.odd(target, value, path)
                continue
            _add(assembly, target, name, key, FileTensor(file, value), shapes)
            assembly.tree(file).require_all()
    if _OPTIMIZER in source.listing:
        _add_optimizer(source, assembly)
    elif expected:
        message = f"{_OPTIMIZER} is missing: the options of parameter groups and the loss scale are lost"
        assembly.builder.report("missing-part", "files", message, file=_OPTIMIZER)


def _mixed_up(source: Source, files: CheckpointFiles) -> bool:
    """Return whether the converter that made the folder got names wrong, as far as the configuration says.

    `ds_to_universal` follows ``param_slice_mappings``, whose order is not the buffers' under
    ``round_robin_gradients`` of stages 1 and 2 with several ranks. Weights in float32 prove it either way:
    they are compared with the masters.
    """
    file = read_file(source, next(iter(files.model.values())))
    zero = config_value(file.tree, "zero_optimization") or {}
    weights = file.tree.get("module")
    low = isinstance(weights, dict) and any(
        isinstance(v, StoredView) and v.dtype in ("bfloat16", "float16") for v in weights.values()
    )
    several = file.tree.get("dp_world_size") != 1
    robin = (
        isinstance(zero, dict) and zero.get("round_robin_gradients") is True and zero.get("stage") in (1, 2)
    )
    return low and robin and several


def _add(
    assembly: Assembly, target: str, name: str, key: str, stored: FileTensor, shapes: Mapping[str, Shape]
) -> None:
    value, shape = stored.value, shapes.get(name)
    if key == _STEP and value.shape not in ((), (1,)):
        assembly.misfit(target, stored, "a step count has none", "it is no step count")
    elif shape is None or key == _STEP or value.shape == shape:
        assembly.tensor(target, stored)
    elif len(value.shape) == 1 and value.shape[0] == prod(shape) and value.strides == row_major(value.shape):
        assembly.run(target, assembly.place(stored, target), 0, shape, 0, prod(shape), same(shape))
    else:
        other = f"{name} has {list(shape)}"
        assembly.misfit(target, stored, other, "its shape is not that of the model-state files")


def _read(source: Source, path: str) -> tuple[StatesFile, Any]:
    size = source.listing[path]
    objects = read_objects(FileRange(source.store, path, 0, size), path, TABLE)
    return StatesFile(path, size, objects), objects.tree


def _add_optimizer(source: Source, assembly: Assembly) -> None:
    """Add parameter groups and scalars of rank 0; its buffers (stage 3) are those of parameters' files."""
    file = read_file(source, _OPTIMIZER)
    if not file.tree.keys() & _OF_OPTIMIZER or "module" in file.tree:
        raise MalformedCheckpoint(
            f"{_OPTIMIZER} must hold an optimizer's state (got a dict with {short_repr([*file.tree], 80)})",
            file=_OPTIMIZER,
        )
    assembly.builder.file(file.path, file.size)
    inner: Any = file.tree
    while isinstance(inner.get("optimizer_state_dict"), dict):
        values, inner = inner, inner["optimizer_state_dict"]
        _add_scalars({k: v for k, v in values.items() if k != "optimizer_state_dict"}, file, assembly)
    _add_scalars(inner, file, assembly)
    content = FileRange(source.store, file.path, 0, file.size)
    for start, length, _ in file.objects.storages.values():
        content.add_unused(
            start, start + length, "buffer of one rank, whose values the parameters' files have"
        )


def _add_scalars(values: Mapping[Any, Any], file: StatesFile, assembly: Assembly) -> None:
    for key, value in values.items():
        if key not in LAYOUT and key != "state" and not storages_in(value, refused=True):
            assembly.object(f"optimizer.{key}", value, file.path)
