"""Permit the globals of torch's own pickles, and build a plain value for each.

Every entry names where torch (or the standard library) writes it. Nothing here is imported or
called by name: the builders below make plain values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptcore.core.dtype import BY_NAME, DTYPES, UNSUPPORTED, UNSUPPORTED_STORAGES
from ckptcore.core.manifest import CONJ, NEG
from ckptcore.core.named_values import QSCHEMES
from ckptcore.core.object_tree import SCALARS, Named, Refused, RefusedTensor
from ckptcore.encodings.pickle.library_globals import LIBRARY_TABLE, NUMPY_TABLE
from ckptcore.encodings.pickle.unpickler import Call, Record
from ckptcore.utils.text import short_repr

# Attributes with which libraries mark tensors: how they are cut over ranks, or what was done to them. A
# manifest has that itself, or it is of the process that saved.
MARKS = frozenset(
    {
        "_fsdp_flattened",  # torch/distributed/fsdp/_flat_param.py
        "_has_been_cloned",  # torch/distributed/fsdp/_state_dict_utils.py
        "allreduce",  # megatron/core/tensor_parallel/layers.py, and the next ones
        "is_embedding_or_output_parameter",
        "partition_dim",
        "partition_stride",
        "sequence_parallel",
        "shared",
        "shared_embedding",
        "tensor_model_parallel",
        "ds_id",  # deepspeed/runtime/zero/stage3.py
    }
)
_MAX_RANK = 64
_MAX_DIM = 1 << 50


@dataclass(frozen=True, slots=True)
class StoredView:
    """A pickled tensor: a view of a storage.

    Attributes:
        key: Key of the storage's record ``data/<key>``.
        storage_bytes: Length of the storage.
        dtype: Dtype of the elements.
        shape: Elements.
        offset: Elements.
        strides: Elements.
        flags: CONJ and NEG of `ckptcore.core.manifest`.
        attributes: Python attributes of the tensor that its user has set, or None.
    """

    key: str
    storage_bytes: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    flags: int = 0
    attributes: Mapping[str, Any] | None = field(default=None, compare=False)

    def in_messages(self) -> str:
        """Return what a message calls it."""
        return f"<a {self.dtype} tensor {list(self.shape)[:8]}>"


class StoredStorage(RefusedTensor):
    """A storage that a pickle names. In the tree itself it is refused: its elements belong to no tensor.

    One is made for each tensor, so that everything but the four attributes is computed when it is asked for.

    Attributes:
        key: Key of the storage's record ``data/<key>``.
        dtype: Of its elements; empty for bytes without one.
        numel: Elements.
        nbytes: Bytes of the record.
        first: Where it is a part of the record, as torch wrote until 0.4: its first element; else -1.
    """

    __slots__ = ("first", "key", "nbytes", "numel")
    key: str
    numel: int
    nbytes: int
    first: int

    def __init__(self, key: str, dtype: str, numel: int, nbytes: int, first: int = -1) -> None:
        put = object.__setattr__
        put(self, "first", first)
        put(self, "key", key)
        put(self, "dtype", dtype)
        put(self, "numel", numel)
        put(self, "nbytes", nbytes)

    @property
    def name(self) -> str:
        """The class of the storage."""
        dtype = BY_NAME.get(self.dtype)
        return f"torch.{dtype.storage}" if dtype is not None else "torch.storage.UntypedStorage"

    @property
    def reason(self) -> str:
        """The reason as a text."""
        return "a storage outside of a tensor"

    @property
    def foreign(self) -> bool:
        """Whether the reason is a class that is not on the allow-list."""
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        """All elements."""
        return (self.numel,)

    @property
    def storages(self) -> tuple[str, ...]:
        """Its own key."""
        return (self.key,)


def storages_in(tree: Any, *, refused: bool = False) -> set[str]:
    """Return the keys of the storages under a tree's tensors; ``refused`` adds those of refused tensors."""
    keys: set[str] = set()
    for value in tensors_in(tree):
        if isinstance(value, StoredView):
            keys.add(value.key)
        elif refused:
            keys.update(value.storages)
    return keys


def tensors_in(tree: Any) -> Iterator[StoredView | RefusedTensor]:
    """Yield the tensors of a tree, those of containers that are there several times once."""
    queue, visited = [tree], set[int]()
    while queue:
        value = queue.pop()
        if isinstance(value, (StoredView, RefusedTensor)):
            yield value
        elif isinstance(value, Named):
            queue.append(value.value)
        elif isinstance(value, Record) and id(value) not in visited:
            visited.add(id(value))
            queue += [value.args, value.state]
        elif isinstance(value, (dict, list, tuple)) and id(value) not in visited:
            visited.add(id(value))
            inside = value.values() if isinstance(value, dict) else value
            queue += [v for v in inside if type(v) not in SCALARS]


def _dims(values: Any, label: str) -> tuple[int, ...]:
    dims = tuple(values)
    if len(dims) > _MAX_RANK or any(type(n) is not int or not 0 <= n < _MAX_DIM for n in dims):
        raise ValueError(f"{label} {short_repr(dims)}")
    return dims


def _rebuild(
    storage: StoredStorage, offset: Any, size: Any, stride: Any, dtype: str, extra: Any
) -> StoredView | RefusedTensor:
    key = storage.key
    if dtype not in BY_NAME:
        return RefusedTensor(f"torch.{dtype}", "", False, dtype, _dims(size, "tensor shape"), (key,))
    shape, strides = _dims(size, "tensor shape"), _dims(stride, "tensor strides")
    if len(shape) != len(strides) or type(offset) is not int or not 0 <= offset < _MAX_DIM:
        raise ValueError(f"tensor of shape {shape} with strides {strides} at {short_repr(offset, 40)}")
    flags = 0
    if extra is not None:
        if type(extra) is not dict or not set(extra) <= {"conj", "neg"}:
            raise ValueError(f"tensor metadata {short_repr(extra)}")
        flags = (CONJ if extra.get("conj") else 0) | (NEG if extra.get("neg") else 0)
    if storage.first >= 0:
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if 0 not in shape and last >= storage.numel:
            raise ValueError(f"tensor of shape {shape} reaches outside its part of a storage")
        offset += storage.first
    return StoredView(key, storage.nbytes, dtype, shape, offset, strides, flags)


def _rebuild_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = None, extra: Any = None
) -> StoredView | RefusedTensor:
    if type(storage) is not StoredStorage or not storage.dtype:
        raise ValueError("tensor without a typed storage")
    return _rebuild(storage, offset, size, stride, storage.dtype, extra)


def _rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, extra: Any = None
) -> StoredView | RefusedTensor:
    if type(storage) is not StoredStorage or type(dtype) is not Named or dtype.kind != "dtype":
        raise ValueError("tensor without a storage or dtype")
    return _rebuild(storage, offset, size, stride, dtype.value, extra)


def _quantized(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> RefusedTensor:
    if type(storage) is not StoredStorage:
        raise ValueError("quantised tensor without a storage")
    keys = (storage.key, *sorted(storages_in(list(rest), refused=True)))  # scales and zero points as tensors
    return RefusedTensor(
        "torch._utils._rebuild_qtensor",
        "a quantised tensor",
        False,
        storage.dtype,
        _dims(size, "tensor shape"),
        keys,
    )


def _meta(dtype: Any, size: Any, *rest: Any) -> RefusedTensor:
    if type(dtype) is not Named or dtype.kind != "dtype":
        raise ValueError("meta tensor without a dtype")
    return RefusedTensor(
        "torch._utils._rebuild_meta_tensor_no_storage",
        "a meta tensor without values",
        False,
        dtype.value,
        _dims(size, "tensor shape"),
    )


def _sparse(layout: Any, data: Any) -> RefusedTensor:
    """Refuse a sparse tensor: (indices, values, size, ...), or with two kinds of indices.

    torch/_tensor.py, Tensor._reduce_ex_internal, pickles these.
    """
    parts = data if type(data) is tuple else ()
    tensors = [p for p in parts if isinstance(p, (StoredView, RefusedTensor))]
    size = next((p for p in parts if type(p) is Named and p.kind == "size"), None)
    shape = None if size is None else _dims(size.value, "tensor shape")
    kind = layout.value if type(layout) is Named else "sparse"
    return RefusedTensor(
        "torch._utils._rebuild_sparse_tensor",
        f"a tensor of layout {kind:.40}",
        False,
        tensors[-1].dtype if tensors else "",
        shape,
        tuple(sorted(storages_in(list(parts), refused=True))),
    )


def _nested_tensor(buffer: Any, *rest: Any) -> RefusedTensor:
    dtype = buffer.dtype if isinstance(buffer, (StoredView, RefusedTensor)) else ""
    return RefusedTensor(
        "torch._utils._rebuild_nested_tensor",
        "a nested tensor",
        False,
        dtype,
        None,
        tuple(sorted(storages_in([buffer, *rest], refused=True))),
    )


def of_class(kind: Refused, function: Any, args: Any, *state: Any) -> RefusedTensor:
    """Refuse a tensor of a class that may give its bytes another meaning.

    ``function`` makes it from ``args``. Its dtype and shape are those of the plain tensor that it wraps, or
    the first arguments of `_rebuild_wrapper_subclass`.
    """
    dtype, shape = "", None
    if type(function) is Call and any(function is call for call in REBUILDS.values()) and type(args) is tuple:
        args = function.build(*args)
        if isinstance(args, (StoredView, RefusedTensor)):
            dtype, shape = args.dtype, args.shape
    if type(args) is tuple and len(args) > 2 and type(args[1]) is Named and args[1].kind == "dtype":
        size = args[2].value if type(args[2]) is Named else args[2]
        dtype, shape = str(args[1].value), _dims(size, "tensor shape") if type(size) is tuple else None
    return RefusedTensor(
        kind.name,
        f"a tensor of class {kind.name}",
        True,
        dtype,
        shape,
        tuple(sorted(storages_in([args, *state], refused=True))),
    )


def with_attributes(tensor: Any, state: Any) -> Any:
    """Return a tensor with the attributes of its pickled state; a refused one as it is.

    torch/_utils.py, `_get_obj_state`: the state is a dict, or such a dict and one of slots.
    """
    if not state or type(tensor) is not StoredView:
        return tensor
    parts = state if type(state) is tuple else (state,)
    if any(part is not None and type(part) is not dict for part in parts):
        raise ValueError(f"a tensor with the state {short_repr(state)}")
    attributes = {str(name): value for part in parts if part for name, value in part.items()}
    attributes = {
        name: value for name, value in attributes.items() if name not in MARKS or type(value) not in SCALARS
    }
    return replace(tensor, attributes=attributes) if attributes else tensor


def attributes_in(tree: Any) -> dict[str, Any]:
    """Return dotted path -> attributes, for the tensors in a tree that have some; each tensor once."""
    attributes_by_path: dict[str, Any] = {}
    queue, visited = [("", tree)], set[int]()
    while queue:
        path, value = queue.pop()
        if isinstance(value, StoredView):
            if value.attributes:
                attributes_by_path.setdefault(path, value.attributes)
            continue
        if not isinstance(value, (dict, list, tuple, Named, Record)) or id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, Record):
            queue += [(path, value.args), (path, value.state)]
        elif isinstance(value, Named):
            queue.append((path, value.value))
        else:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            queue += [(f"{path}.{k}" if path else str(k), v) for k, v in items if type(v) not in SCALARS]
    return attributes_by_path


def _parameter(data: Any, grad: Any = True, hooks: Any = None, state: Any = None) -> Any:
    if isinstance(data, Refused):
        return data
    if type(data) is not StoredView:
        raise ValueError("parameter without a tensor")
    return with_attributes(data, state)


def _make_ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    """Return an empty dict, or one of [key, value] lists, as Python 2 pickles it."""
    if items == ():
        return OrderedDict()
    if type(items) is not list or any(
        type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str for pair in items
    ):
        raise ValueError("OrderedDict with arguments")
    return OrderedDict((name, value) for name, value in items)


def _size(values: Any = ()) -> Named:
    return Named("size", _dims(values, "torch.Size"))


def _layout(name: Any) -> Named:
    if type(name) is not str:
        raise ValueError(f"layout {short_repr(name, 40)}")
    return Named("layout", name)


def _device(*parts: Any) -> Named:
    if any(type(p) not in (str, int) for p in parts):
        raise ValueError(f"device {short_repr(parts, 40)}")
    return Named("device", [str(p) for p in parts])


# torch/storage.py: the legacy typed storages, and the untyped one of `_rebuild_tensor_v3`.
STORAGES = {f"torch.{d.storage}": Named("storage", d.storage) for d in DTYPES if d.storage} | {
    "torch.storage.UntypedStorage": Named("storage", "UntypedStorage"),
    **{f"torch.{name}": Named("storage", name) for name in UNSUPPORTED_STORAGES},
}
# torch.dtype.__reduce__ returns its name: a global of module torch.
DTYPE_GLOBALS = {f"torch.{name}": Named("dtype", name) for name in (*BY_NAME, *sorted(UNSUPPORTED))}
# torch/_utils.py; the first is of torch before 0.4.
REBUILDS = {
    "torch._utils._rebuild_tensor": Call("_rebuild_tensor", _rebuild_v2),
    "torch._utils._rebuild_tensor_v2": Call("_rebuild_tensor_v2", _rebuild_v2),
    "torch._utils._rebuild_tensor_v3": Call("_rebuild_tensor_v3", _rebuild_v3),
    "torch._utils._rebuild_parameter": Call("_rebuild_parameter", _parameter),
    "torch._utils._rebuild_parameter_with_state": Call("_rebuild_parameter_with_state", _parameter),
}
# torch/_utils.py: tensors of known kinds that are not read.
REFUSED_REBUILDS = {
    "torch._utils._rebuild_qtensor": Call("_rebuild_qtensor", _quantized),
    "torch._utils._rebuild_sparse_tensor": Call("_rebuild_sparse_tensor", _sparse),
    "torch._utils._rebuild_sparse_csr_tensor": Call(
        "_rebuild_sparse_csr_tensor", lambda data: _sparse(None, data)
    ),
    "torch._utils._rebuild_nested_tensor": Call("_rebuild_nested_tensor", _nested_tensor),
    "torch._utils._rebuild_meta_tensor_no_storage": Call("_rebuild_meta_tensor_no_storage", _meta),
}
# torch/ao: how values of a quantised tensor are scaled.
_QSCHEMES = {f"torch.{name}": Named("qscheme", name) for name in QSCHEMES}
COMMON: dict[str, Any] = {
    "collections.OrderedDict": Call("OrderedDict", _make_ordered_dict),
    "torch.Size": Call("torch.Size", _size),
    "torch.serialization._get_layout": Call("_get_layout", _layout),
    "torch.device": Call("torch.device", _device),
}
# Classes of plain tensors; only `_with_attributes` accepts them.
_PLAIN = {
    f"torch.{name}": Refused(f"torch.{name}")
    for name in ("Tensor", "_tensor.Tensor", "nn.parameter.Parameter", "nn.parameter.Buffer")
}


def _with_attributes(function: Any, kind: Any, args: Any, *state: Any) -> Any:
    # torch/_tensor.py, Tensor.__reduce_ex__: a tensor that has Python attributes. Another class may give its
    # bytes another meaning.
    if type(kind) is Refused and kind.name not in _PLAIN:
        return of_class(kind, function, args, *state)
    if type(function) is Refused:
        return function
    is_rebuild = type(function) is Call and any(function is call for call in REBUILDS.values())
    if type(kind) is not Refused or not is_rebuild or type(args) is not tuple:
        raise ValueError(f"a tensor of {short_repr(kind, 60)}")
    return with_attributes(function.build(*args), state[0] if state else None)


TENSOR_TABLE: dict[str, Any] = {
    **STORAGES,
    **DTYPE_GLOBALS,
    **REBUILDS,
    **REFUSED_REBUILDS,
    **_QSCHEMES,
    **COMMON,
    **_PLAIN,
    "torch._tensor._rebuild_from_type_v2": Call("_rebuild_from_type_v2", _with_attributes),
}
OBJECT_TABLE: dict[str, Any] = {**TENSOR_TABLE, **LIBRARY_TABLE, **NUMPY_TABLE}
