"""Name the optimizer state of a legacy Megatron-LM checkpoint by parameter.

A plain optimizer numbers its states by parameter group (megatron/core/optimizer/__init__.py,
_get_param_groups: weight decay or none, expert or not), in the model's parameter order; master copies
are in ``fp32_from_fp16_params``. The distributed optimizer keeps flat buffers in ``distrib_optim.pt``
(distrib_optimizer.py, get_parameter_state_dp_zero). A rank's state dict has the parameters in the same
order, so positions give the names, and every size must fit. What does not add up stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import View
from ckptcore.core.object_tree import Named, Refused, RefusedTensor
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.megatron.flat_boxes import flat_boxes
from ckptcore.formats.megatron.flat_buffers import lay_out, lay_out_buffer
from ckptcore.formats.megatron.legacy_merge import EMBEDDING, EXTRA_STATE, Merger, Model, ModelChunk
from ckptcore.formats.megatron.parameter_order import Parameter, Unregistered
from ckptcore.formats.megatron.partition_rules import place
from ckptcore.formats.torch_save.tree import TorchTree
from ckptcore.utils.text import short_repr

PREFIX = "optimizer.state"
MASTER = "fp32_from_fp16_params"
_HALF = ("bfloat16", "float16")
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq")


def parameters_of(chunk: ModelChunk, model: Model) -> list[Parameter]:
    """Return a state dict's parameters, in order.

    Raises:
        Unregistered: The shape of a parameter is unknown, or no rule places it.
    """
    out = []
    for name, value in chunk.state.items():
        if not isinstance(value, (StoredView, Refused)) or name.endswith((EXTRA_STATE, *_BUFFERS)):
            continue
        shape = value.shape if isinstance(value, (StoredView, RefusedTensor)) else None
        if shape is None or not isinstance(value, (StoredView, RefusedTensor)):
            raise Unregistered(f"the shape of {name} is not known")
        untied_name = EMBEDDING if model.tied and name == "output_layer.weight" else name
        placement = place(untied_name, shape, model.rank(chunk), model.world)
        if placement is None:
            raise Unregistered(f"no rule for how {name} is split")
        out.append(Parameter(name, shape, value.dtype, placement, ".mlp.experts." in name))
    return out


def add_numbered(optimizer: Any, chunks: Sequence[ModelChunk], merger: Merger, tree: TorchTree) -> Any:
    """Add the states of a plain optimizer under their parameters; return the rest of its tree.

    Args:
        optimizer: The value of ``optimizer`` in a rank's file.
        chunks: The rank's model chunks.
        merger: Gets the states.
        tree: The rank's file.

    Raises:
        Unregistered: Groups and parameters do not fit. Nothing has been added then.
    """
    if isinstance(optimizer, dict) and optimizer and all(type(k) is int for k in optimizer):
        optimizer = [optimizer[k] for k in sorted(optimizer)]
    several = isinstance(optimizer, list)
    apart = any(_of_experts(g) for g in _all_groups(optimizer if several else [optimizer]))
    parameters = [p for c in chunks for p in parameters_of(c, merger.model)]
    named_states: list[tuple[str, Parameter, StoredView | Refused]] = []
    rest = []
    for part in optimizer if several else [optimizer]:
        inner = part.get("optimizer", part) if isinstance(part, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
            raise Unregistered("an optimizer without parameter groups")
        groups = list(_groups(inner["param_groups"], parameters, apart))
        states = dict(inner.get("state", {}))
        for members in groups:
            for number, parameter in members:
                state = states.get(number)
                if isinstance(state, dict):
                    taken = {k: v for k, v in state.items() if _fits(v, parameter)}
                    named_states += [(kind, parameter, v) for kind, v in taken.items()]
                    states[number] = {k: v for k, v in state.items() if k not in taken}
        remaining = {**inner, "state": {k: v for k, v in states.items() if v}} if "state" in inner else inner
        left = {**part, "optimizer": remaining} if inner is not part else remaining
        if MASTER in part:
            named_states += _masters(part[MASTER], groups)
            left.pop(MASTER)
        rest.append(left)
    for kind, parameter, value in named_states:
        if isinstance(value, Refused):
            merger.lose(f"{PREFIX}.{kind}.{parameter.placement.fqn}", value, chunks[0].file.path)
        else:
            merger.put(parameter.placement, value, tree, f"{PREFIX}.{kind}.")
    return rest if several else rest[0]


def add_buffers(state: Any, chunks: Sequence[ModelChunk], merger: Merger, tree: TorchTree) -> None:
    """Add the flat buffers of ``distrib_optim.pt`` under their parameters.

    Args:
        state: The value of the file.
        chunks: The rank's model chunks.
        merger: Gets the states.
        tree: The file.

    Raises:
        Unregistered: Sizes do not add up. Nothing has been added then.
    """
    parts = state if isinstance(state, list) else [state]
    if len(parts) > 2:
        raise Unregistered(f"{len(parts)} distributed optimizers")
    rows: list[tuple[str, Parameter, StoredView, int]] = []
    for n, part in enumerate(parts):
        if part is None:  # another rank of this group keeps it
            continue
        expert = None if len(parts) == 1 else n == 1  # the experts' own optimizer is the second
        buffers = list(_buffers(chunks, merger.model, expert))
        for number, dtypes, tensors in _stored_buffers(part):
            if number >= len(buffers) or buffers[number][0] != dtypes[0]:
                raise Unregistered(f"buffer {number} of {' '.join(dtypes)}")
            parameters = buffers[number][1]
            own_bucket = [
                merger.model.tied and merger.model.world.pp > 1 and p.placement.fqn == EMBEDDING
                for p in parameters
            ]
            for kind, stored in tensors.items():
                rows += _ranges(kind, stored, parameters, own_bucket, merger.model.bucket_size)
    for kind, parameter, value, start in rows:
        _put_range(kind, parameter, value, start, merger, tree)


# --- numbers --------------------------------------------------------------------------------------


def _all_groups(optimizers: Sequence[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        yield from groups if isinstance(groups, list) else ()


def _of_experts(group: Any) -> bool:
    return isinstance(group, dict) and bool(group.get("is_expert_parallel", group.get("is_expert", False)))


def _groups(
    groups: Sequence[Any], parameters: Sequence[Parameter], apart: bool
) -> Iterator[list[tuple[int, Parameter]]]:
    """Yield (number, parameter) pairs of each group; the group's fields select its parameters.

    Args:
        groups: The optimizer's parameter groups.
        parameters: In the model's order.
        apart: Whether experts have their own groups, as they do when they are spread over ranks.

    Raises:
        Unregistered: Groups and parameters do not fit.
    """
    keyed: dict[tuple[bool, bool], list[Parameter]] = {}
    for p in parameters:
        no_decay = p.name.endswith(".bias") or len(p.shape) == 1
        keyed.setdefault((no_decay, p.expert and apart), []).append(p)
    for group in groups:
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list):
            raise Unregistered("a parameter group without numbers")
        if not numbers:
            yield []
            continue
        if group.get("lr_mult", 1.0) != 1.0 or group.get("is_decoupled_lr") or "wd_mult" not in group:
            raise Unregistered("parameter groups have different learning rates")
        members = keyed.pop((group["wd_mult"] == 0.0, _of_experts(group)), [])
        if len(members) != len(numbers):
            raise Unregistered(f"a group has {len(numbers)} numbers for {len(members)} parameters")
        yield list(zip(numbers, members, strict=True))


def _fits(value: Any, parameter: Parameter) -> bool:
    if isinstance(value, Refused):  # unreadable, but it belongs to that parameter
        return True
    if not isinstance(value, StoredView) or value.shape == ():
        return False
    if value.shape != parameter.shape:
        raise Unregistered(f"a state of {list(value.shape)} for {parameter.name} {list(parameter.shape)}")
    return True


def _masters(
    masters: Any, groups: Sequence[Sequence[tuple[int, Parameter]]]
) -> Iterator[tuple[str, Parameter, StoredView | Refused]]:
    """Yield master copies: a list per group, of its parameters in half precision."""
    if not isinstance(masters, list) or len(masters) != len(groups):
        raise Unregistered("master copies and states have different groups")
    for values, members in zip(masters, groups, strict=True):
        half = [p for _, p in members if p.dtype in _HALF]
        if not isinstance(values, list) or len(values) != len(half):
            raise Unregistered("master copies and states have different parameters")
        for value, parameter in zip(values, half, strict=True):
            if not _fits(value, parameter):
                raise Unregistered(f"the master copy of {parameter.name} is not a tensor")
            yield "fp32_param", parameter, value


# --- flat buffers ---------------------------------------------------------------------------------


def _buffers(
    chunks: Sequence[ModelChunk], model: Model, expert: bool | None
) -> Iterator[tuple[str, list[Parameter]]]:
    """Yield (dtype, parameters) of each buffer: one per model chunk and dtype, in order of first use."""
    for chunk in chunks:
        by_dtype: dict[str, list[Parameter]] = {}
        for p in parameters_of(chunk, model):
            if expert is None or p.expert == expert:
                by_dtype.setdefault(p.dtype, []).append(p)
        yield from by_dtype.items()


def _stored_buffers(part: Any) -> Iterator[tuple[int, tuple[str, ...], Mapping[str, Any]]]:
    """Yield (number, dtypes, kind -> tensor or its buckets) of every buffer in a part."""
    if not isinstance(part, dict):
        raise Unregistered(f"distributed optimizer state is a {kind_of(part)}, not a dict")
    for number, by_dtype in part.items():
        if type(number) is not int:
            continue  # buckets_coalesced
        if not isinstance(by_dtype, dict):
            raise Unregistered(f"buffer {number} is a {kind_of(by_dtype)}, not a dict")
        for dtypes, kinds in by_dtype.items():
            names = (
                tuple(d.value for d in dtypes if isinstance(d, Named)) if isinstance(dtypes, tuple) else ()
            )
            if len(names) != 2 or not isinstance(kinds, dict):
                raise Unregistered(f"buffer {number} has unknown dtypes {short_repr(dtypes, 60)}")
            if any(isinstance(v, Refused) for v in kinds.values()):
                raise Unregistered(f"a tensor of buffer {number} cannot be read")
            yield number, names, {k: v for k, v in kinds.items() if isinstance(v, (StoredView, list))}


def _ranges(
    kind: str, stored: Any, parameters: Sequence[Parameter], own_bucket: Sequence[bool], bucket: int | None
) -> Iterator[tuple[str, Parameter, StoredView, int]]:
    """Yield (kind, parameter, flat tensor, first element in it)."""
    if isinstance(stored, StoredView):
        _require_flat([stored])
        for s in lay_out_buffer(parameters, stored.shape[0], own_bucket, bucket):
            yield kind, s.parameter, stored, s.start
        return
    _require_flat(stored)  # before buckets were coalesced: one padded tensor each
    for s in lay_out(parameters, [v.shape[0] for v in stored], padded=True, own_bucket=own_bucket):
        yield kind, s.parameter, stored[s.bucket], s.start


def _require_flat(tensors: Sequence[Any]) -> None:
    if any(not isinstance(v, StoredView) or len(v.shape) != 1 or v.strides != (1,) for v in tensors):
        raise Unregistered("a buffer is not a flat tensor")


def _put_range(
    kind: str, parameter: Parameter, value: StoredView, start: int, merger: Merger, tree: TorchTree
) -> None:
    fqn = f"{PREFIX}.{kind}.{parameter.placement.fqn}"
    item, view = tree.place(value, fqn)
    itemsize = BY_NAME[value.dtype].itemsize
    for offset, shape, begin, steps in flat_boxes(parameter.placement, 0, prod(parameter.shape)):
        box_view = View(view.start + (start + begin) * itemsize, steps, view.flags)
        merger.chunk(fqn, value.dtype, parameter.placement.shape, offset, shape, item, box_view)
