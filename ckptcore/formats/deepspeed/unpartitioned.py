"""Read the optimizer of a checkpoint without ZeRO, which numbers its states.

``optimizer`` of ``mp_rank_NN_model_states.pt`` is a torch optimizer's state dict, or that of DeepSpeed's BF16
and FP16 wrappers, with fp32 copies of the parameters in ``fp32_groups`` (deepspeed/runtime/
bf16_optimizer.py, fp16/unfused_optimizer.py). Numbers follow the parameter groups, each in the model's order.
Names are given only where shapes, and the first values of weights and masters, leave one way to read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import row_major
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.formats.base import Source
from ckptcore.formats.common.optimizer_numbers import Numbered, Row, forced_places, numbered, prove
from ckptcore.formats.common.shard_pieces import ShardPlacement, same
from ckptcore.formats.deepspeed.assembly import Assembly, FileTensor
from ckptcore.formats.deepspeed.optimizer_states import STATE
from ckptcore.formats.deepspeed.rank_files import StatesFile

_COMPARED = 256  # elements of a tensor whose values are compared


def add_unpartitioned(
    assembly: Assembly,
    source: Source,
    file: StatesFile,
    weights: Mapping[str, StoredView],
    placements: Mapping[str, ShardPlacement | None],
    use_masters: bool,
    *,
    several: bool = False,
) -> None:
    """Add the optimizer of one model-parallel rank.

    Args:
        assembly: Where tensors are added.
        source: The folder; the first elements of masters and weights are read where shapes do not decide.
        file: The model-state file.
        weights: FQN -> stored weight, in the module's order; buffers are left out.
        placements: FQN -> where this rank's shard is, or None for one that nothing says how to join.
        use_masters: Whether masters are the model, and stored weights the low-precision copies.
        several: Whether other model-parallel ranks have optimizers of their own.
    """
    state = file.tree["optimizer"]
    inner = state.get("optimizer_state_dict", state)
    masters = state.get("fp32_groups")
    optimizer = numbered(inner)
    flat = [v for group in masters for v in group] if _is_groups(masters) else []
    fits = optimizer is None or not flat or len(flat) == len(optimizer.ids)
    names = None if optimizer is None or not fits else _names(source, file, optimizer, weights, flat)
    tree = assembly.tree(file)
    if optimizer is None or names is None:
        assembly.builder.report(
            "unnamed-states",
            "files",
            f"nothing proves which parameters the optimizer of {file.path} numbers",
            file=file.path,
        )
        stem = file.path.removesuffix(".pt")
        tree.add(f"optimizer/{stem}" if several else "optimizer", state)
        return

    def add(target: str, name: str, value: StoredView) -> None:
        placement = placements[name]
        if placement is None:
            assembly.place(FileTensor(file, value), target)
            assembly.unread(target, f"its shards cannot be joined: nothing says how {name} is cut", file.path)
        elif value.shape == placement.shard:
            assembly.tensor(target, FileTensor(file, value), placement)
        elif value.shape == () or placement == same(placement.shard):
            assembly.tensor(target, FileTensor(file, value))
        else:
            stem = file.path.removesuffix(".pt")
            assembly.tensor(f"{target}/{stem}", FileTensor(file, value))

    for number, values in optimizer.state.items():
        if not isinstance(values, dict):
            tree.add(f"{STATE}.{names[number]}", values)
            continue
        for key, value in values.items():
            name = f"{STATE}.{names[number]}.{key}"
            if isinstance(value, StoredView):
                add(name, names[number], value)
            else:
                assembly.value(name, value, file, per_file=several)
    # Without masters `flat` is empty, and the numbers have none to be paired with.
    for number, value in zip(optimizer.ids, flat, strict=bool(flat)):
        target = f"module.{names[number]}" if use_masters else f"{STATE}.{names[number]}.fp32"
        add(target, names[number], value)
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in optimizer.groups]
    assembly.value("optimizer.param_groups", groups, file, per_file=True)
    for key, value in state.items():
        if key not in ("optimizer_state_dict", "fp32_groups", "state", "param_groups"):
            assembly.value(f"optimizer.{key}", value, file, per_file=several)


def has_masters(file: StatesFile) -> bool:
    """Return whether a model-state file keeps fp32 copies of its parameters."""
    state = file.tree.get("optimizer")
    return isinstance(state, dict) and _is_groups(state.get("fp32_groups"))


def _is_groups(masters: Any) -> bool:
    return (
        isinstance(masters, list)
        and bool(masters)
        and all(isinstance(g, (list, tuple)) and all(isinstance(v, StoredView) for v in g) for g in masters)
    )


def _names(
    source: Source,
    file: StatesFile,
    optimizer: Numbered,
    weights: Mapping[str, StoredView],
    masters: Sequence[StoredView],
) -> dict[int, str] | None:
    """Return number -> name of the parameters, proven by shapes or values; None without a proof."""
    params = [(name, value.shape) for name, value in _once(weights).items()]
    proof = prove(params, [optimizer], lambda v: v.shape if isinstance(v, StoredView) else None)[0]
    if proof.names is not None and len(proof.names) == len(optimizer.ids):
        return proof.names
    if len(masters) != len(optimizer.ids):
        return None
    # A weight is its master, rounded: values tell apart what has one shape.
    weight_keys = [
        (value.shape, _start(source, file, value, value.dtype)) for _, value in _once(weights).items()
    ]
    dtype = {value.shape: value.dtype for value in weights.values()}
    by_number = dict(zip(optimizer.ids, masters, strict=True))
    chains = [
        [
            (v.shape, _start(source, file, v, dtype.get(v.shape, "")))
            for v in (by_number[i] for i in g["params"])
        ]
        for g in optimizer.groups
    ]
    group_places = forced_places(Row(weight_keys), chains)  # type: ignore[arg-type]  # any hashable key serves
    if group_places is None:
        return None
    names: dict[int, str] = {}
    for group, places in zip(optimizer.groups, group_places, strict=True):
        for number, place in zip(group["params"], places, strict=True):
            if place is None:
                return None
            names[number] = params[place][0]
    return names


def _once(weights: Mapping[str, StoredView]) -> dict[str, StoredView]:
    """Return weights without tied copies: of several names of one view the first."""
    first_names: dict[Any, str] = {}
    for name, value in weights.items():
        first_names.setdefault((value.key, value.offset, value.shape), name)
    return {name: weights[name] for name in first_names.values()}


def _start(source: Source, file: StatesFile, value: StoredView, dtype: str) -> bytes:
    """Return the first elements of a tensor as ``dtype`` has them; b"" where that is not comparable."""
    count = min(_COMPARED, int(np.prod(value.shape, dtype=np.int64)))
    if value.strides != row_major(value.shape) or value.flags or value.key not in file.objects.storages:
        return b""
    width = BY_NAME[value.dtype].itemsize
    start = file.objects.storages[value.key][0] + value.offset * width
    raw = source.store.read(file.path, start, count * width)
    if value.dtype == dtype:
        return raw
    if value.dtype != "float32" or dtype not in ("bfloat16", "float16"):
        return b""
    numbers = np.frombuffer(raw, "<f4")
    if dtype == "float16":
        return numbers.astype("<f2").tobytes()
    bits = numbers.view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()  # to nearest even
