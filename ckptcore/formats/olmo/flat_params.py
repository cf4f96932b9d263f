"""Find the parameters in one rank's flat parameters.

``{"modules": [{"name": ..., "handles": [{"flat_param.data": ..., "flat_param._fqns": ..., ...}]}]}``
(olmo/checkpoint.py, `LocalShardedCheckpointer._get_flat_param_state_to_save`); the attributes are
those of torch's FlatParameter (torch/distributed/fsdp/_flat_param.py). Up to torch 2.0
``_shard_indices`` and ``_shard_param_offsets`` give the positions, since then ``_shard_param_infos``;
both include the last element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptcore.core.object_tree import Named, RefusedTensor
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE, StoredView
from ckptcore.encodings.pickle.unpickler import Record, record
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats.olmo.common import plain_name
from ckptcore.utils.text import short_repr

# torch 2.1 has it in flat_param, later releases in _flat_param; a NamedTuple of five.
TABLE: dict[str, Any] = {
    **OBJECT_TABLE,
    **{
        f"torch.distributed.fsdp.{module}._ShardParamInfo": record("_ShardParamInfo")
        for module in ("flat_param", "_flat_param")
    },
}
_MAX_DIM = 1 << 50


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's elements ``[start, stop)`` of a parameter, row-major; none when the two are equal.

    Attributes:
        fqn: Name of the parameter.
        shape: Shape of the full parameter.
        start: First element of the parameter.
        stop: Last element of the parameter + 1.
        data: The rank's flat tensor, perhaps one that cannot be read.
        data_start: Position of the first element in it.
    """

    fqn: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: StoredView | RefusedTensor
    data_start: int


def slices(tree: Any, path: str) -> Iterator[Slice]:
    """Yield every parameter of a rank's file, including those without elements in it.

    Args:
        tree: The value of the file.
        path: The file, for messages.

    Raises:
        MalformedCheckpoint: The file has no flat parameters, or their numbers contradict each other.
    """
    try:
        for module in tree["modules"]:
            prefix = plain_name(module["name"]).removesuffix("_fsdp_wrapped_module")
            for handle in module["handles"]:
                for part in _of_handle(handle):
                    fqn = plain_name(f"{prefix.rstrip('.')}.{part.fqn}" if prefix else part.fqn)
                    yield _checked(
                        Slice(fqn, part.shape, part.start, part.stop, part.data, part.data_start), path
                    )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedCheckpoint(f"{path} must hold flat parameters: {short_repr(error, 160)}") from error


def _of_handle(handle: Any) -> Iterator[Slice]:
    data = handle["flat_param.data"]
    if type(data) is not RefusedTensor and (type(data) is not StoredView or len(data.shape) != 1):
        raise TypeError("flat_param.data is not a flat tensor")
    names, shapes = handle["flat_param._fqns"], [_checked_shape(s) for s in handle["flat_param._shapes"]]
    places = _by_indices(handle) if "flat_param._shard_indices" in handle else _by_infos(handle)
    by_number = dict(places)
    if len(names) != len(shapes) or (by_number and max(by_number) >= len(names)):
        raise ValueError("names, shapes and places of a flat parameter differ in number")
    for n, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        start, stop, data_start = by_number.get(n, (0, 0, 0))
        yield Slice(_checked_name(name), shape, start, stop, data, data_start)


def _by_indices(handle: Any) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield (parameter, (start, stop, first in the flat tensor)) of torch up to 2.0: back to back."""
    first, data_start = handle["flat_param._shard_indices"][0], 0
    for n, (start, last) in enumerate(handle["flat_param._shard_param_offsets"]):
        yield first + n, (start, last + 1, data_start)
        data_start += last + 1 - start


def _by_infos(handle: Any) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield the same for torch 2.1 and later, where each parameter has its position."""
    infos = handle["flat_param._shard_param_infos"]
    if len(infos) != len(handle["flat_param._fqns"]):
        raise ValueError("_shard_param_infos does not list every parameter")
    for n, info in enumerate(infos):
        fields = info.args if type(info) is Record else info
        inside, data_start, numel, start, last = fields
        if inside is True:
            if last + 1 - start != numel:
                raise ValueError(f"elements {start} to {last} are not {numel}")
            yield n, (start, last + 1, data_start)
        elif inside is not False:
            raise TypeError(f"{short_repr(fields)} is not a position")


def _checked(part: Slice, path: str) -> Slice:
    numbers = (part.start, part.stop, part.data_start)
    if any(type(n) is not int for n in numbers):
        raise TypeError(f"{short_repr(numbers)} are not integers")
    if not 0 <= part.start <= part.stop <= prod(part.shape):
        raise MalformedCheckpoint(
            f"{path}: elements [{part.start}, {part.stop}) are outside {part.fqn} {list(part.shape)}"
        )
    if isinstance(part.data, RefusedTensor):
        return part
    if not 0 <= part.data_start <= part.data.shape[0] - (part.stop - part.start):
        raise MalformedCheckpoint(
            f"{path}: {part.fqn} needs {part.stop - part.start} elements at {part.data_start} of a flat "
            f"parameter of {part.data.shape[0]}"
        )
    return part


def _checked_shape(value: Any) -> tuple[int, ...]:
    dims = value.value if type(value) is Named and value.kind == "size" else value
    if any(type(n) is not int or not 0 <= n < _MAX_DIM for n in dims) or len(dims) > 64:
        raise ValueError(f"{short_repr(dims)} is not a shape")
    return tuple(dims)


def _checked_name(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{short_repr(value, 40)} is not a name")
    return value
