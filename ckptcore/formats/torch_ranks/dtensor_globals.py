"""List the permitted globals of pickled distributed tensors: DTensor and ShardedTensor, as plain records.

Both are wrapper subclasses of torch.Tensor: ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, type,
(type, dtype, size, stride, offset, layout, device, grad), state)`` (torch/_tensor.py). A DTensor's
state has ``_local_tensor`` and ``_spec``; a ShardedTensor's is the tuple of its `__getstate__`
(torch/distributed/_shard/sharded_tensor/api.py). Classes moved between releases: each row names the
module under which a release pickled them. No class is imported, and no instance is made.
"""

from __future__ import annotations

from typing import Any

from ckptcore.core.object_tree import Refused
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE, REBUILDS, of_class, with_attributes
from ckptcore.encodings.pickle.unpickler import Call, Record, record
from ckptcore.errors import UnsafeContent
from ckptcore.utils.text import short_repr

DTENSOR, SHARDED = "DTensor", "ShardedTensor"
_SHARD = "torch.distributed._shard"
# module -> class -> kind of its records.
_CLASSES: dict[str, dict[str, str]] = {
    # torch >= 2.5
    "torch.distributed.tensor": {"DTensor": DTENSOR},
    "torch.distributed.tensor._api": {"DTensor": DTENSOR},
    "torch.distributed.tensor._dtensor_spec": {
        "DTensorSpec": "DTensorSpec",
        "TensorMeta": "TensorMeta",
        "ShardOrderEntry": "ShardOrderEntry",  # torch >= 2.10
    },
    "torch.distributed.tensor.placement_types": {
        "Shard": "Shard",
        "_StridedShard": "_StridedShard",
        "Replicate": "Replicate",
        "Partial": "Partial",
        "MaskPartial": "Partial",
        "_MaskPartial": "Partial",
    },
    "torch.distributed.tensor._ops._embedding_ops": {"_MaskPartial": "Partial"},
    "torch.distributed.tensor._ops._math_ops": {"_NormPartial": "Partial"},
    # torch 2.0 to 2.4
    "torch.distributed._tensor": {"DTensor": DTENSOR},
    "torch.distributed._tensor.api": {"DTensor": DTENSOR},
    "torch.distributed._tensor.placement_types": {
        "DTensorSpec": "DTensorSpec",
        "TensorMeta": "TensorMeta",
        "Shard": "Shard",
        "_StridedShard": "_StridedShard",
        "Replicate": "Replicate",
        "Partial": "Partial",
        "_Partial": "Partial",
    },
    "torch.fx.passes.shape_prop": {"TensorMetadata": "TensorMeta"},
    # DeviceMesh: torch.distributed since 2.2, beside DTensor before.
    "torch.distributed._tensor.device_mesh": {"DeviceMesh": "DeviceMesh"},
    "torch.distributed.device_mesh": {"DeviceMesh": "DeviceMesh"},
    "torch.distributed._mesh_layout": {"_MeshLayout": "_MeshLayout", "_FlatLayout": "_FlatLayout"},
    # ShardedTensor
    f"{_SHARD}.sharded_tensor.api": {"ShardedTensor": SHARDED},
    f"{_SHARD}.sharded_tensor.shard": {"Shard": "LocalShard"},
    f"{_SHARD}.sharded_tensor.metadata": {
        "ShardedTensorMetadata": "ShardedTensorMetadata",
        "TensorProperties": "TensorProperties",
        "MEM_FORMAT_ENCODING": "MEM_FORMAT_ENCODING",
    },
    f"{_SHARD}.metadata": {"ShardMetadata": "ShardMetadata"},
    f"{_SHARD}.sharding_spec.chunk_sharding_spec": {"ChunkShardingSpec": "ShardingSpec"},
    f"{_SHARD}.sharding_spec.api": {
        "EnumerableShardingSpec": "ShardingSpec",
        "ChunkShardingSpec": "ShardingSpec",
    },
    "torch.distributed.remote_device": {"_remote_device": "_remote_device"},
}
# Subclasses with the same bytes as the tensor that they are made from.
_DTENSOR_FIELDS = frozenset({"_local_tensor", "_spec"})  # torch/distributed/tensor/_api.py
_PLAIN = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def fields(value: Any, kind: str) -> dict[str, Any]:
    """Return the named fields of a record of this kind; raise ValueError for any other value.

    A class with ``__slots__`` pickles (dict or None, dict of slots), any other its ``__dict__``.
    """
    if type(value) is Record and value.kind == kind:
        parts = value.state if type(value.state) is tuple and len(value.state) == 2 else (value.state,)
        if all(p is None or type(p) is dict for p in parts):
            return {k: v for p in parts if p for k, v in p.items()}
    raise ValueError(f"expected a {kind} (got {short_repr(value)})")


def _wrapper(*args: Any) -> Any:
    raise ValueError("a wrapper subclass without its type")


def _typed(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Replace ``_rebuild_from_type_v2(function, type, args, state)``."""
    if isinstance(kind, Refused):
        return of_class(kind, function, args, state)
    if type(function) is not Call or type(kind) is not Call or type(args) is not tuple:
        raise ValueError(f"a tensor of {short_repr(kind)}")
    if function is _WRAPPER:
        if kind.name not in (DTENSOR, SHARDED) or len(args) < 3:
            raise ValueError(f"a wrapper subclass of type {kind.name}")
        tensor = Record(kind.name, args)
        tensor.state = _with_own_fields(state) if kind.name == DTENSOR else state
        return tensor
    if function.name not in _REBUILT or kind.name != "Tensor":
        raise ValueError(f"a {kind.name} that {function.name} makes")
    return with_attributes(function.build(*args), state)


def _with_own_fields(state: Any) -> Any:
    """Return the state of a DTensor with other attributes on the tensor that it wraps."""
    parts = state if type(state) is tuple else (state,)
    if any(part is not None and type(part) is not dict for part in parts):
        return state  # its placement is reported
    attributes = {k: v for part in parts if part for k, v in part.items()}
    extra = {k: v for k, v in attributes.items() if k not in _DTENSOR_FIELDS}
    if not extra or "_local_tensor" not in attributes:
        return state
    dtensor_fields = {k: v for k, v in attributes.items() if k in _DTENSOR_FIELDS}
    return dtensor_fields | {"_local_tensor": with_attributes(attributes["_local_tensor"], extra)}


def _nested_class(owner: Any, name: Any) -> Any:
    """Resolve ``getattr(ShardedTensor, "ProcessGroupState")``, protocol 2's form of a nested class."""
    if owner is not _SHARDED_CLASS or name != "ProcessGroupState":
        owner_name = owner.name if type(owner) is Call else type(owner).__name__
        raise UnsafeContent(
            f"a pickle requests attribute {short_repr(name, 60)} of {owner_name:.60}", **{"global": "getattr"}
        )
    return _GROUP


_WRAPPER = Call("_rebuild_wrapper_subclass", _wrapper)
_REBUILT = frozenset(call.name for call in REBUILDS.values())
_GROUP = record("ProcessGroupState")
_TABLE: dict[str, Any] = {
    f"{module}.{name}": record(kind) for module, names in _CLASSES.items() for name, kind in names.items()
}
_SHARDED_CLASS = _TABLE[f"{_SHARD}.sharded_tensor.api.ShardedTensor"]
DIST_TABLE: dict[str, Any] = {
    **OBJECT_TABLE,
    **_TABLE,
    **{name: Call("Tensor", _wrapper) for name in _PLAIN},
    "torch._tensor._rebuild_from_type_v2": Call("_rebuild_from_type_v2", _typed),
    "torch._utils._rebuild_wrapper_subclass": _WRAPPER,
    "builtins.getattr": Call("getattr", _nested_class),
    "__builtin__.getattr": Call("getattr", _nested_class),
    # Python 3.11 pickles a nested class by its qualified name from protocol 4 on.
    f"{_SHARD}.sharded_tensor.api.ShardedTensor.ProcessGroupState": _GROUP,
}
