"""Permit the globals of numpy's pickles: arrays of plain numbers, scalars and dtypes, as plain values.

An array is pickled as ``_reconstruct(ndarray, (0,), b"b")`` with the state (version, shape, dtype,
fortran, bytes) (numpy/_core/src/multiarray/methods.c, array_reduce), or with protocol 5 as
``_frombuffer(bytes, dtype, shape, order)`` (numpy/_core/numeric.py). A dtype is
``dtype("f8", False, True)`` with the state (version, byte order, ...) (descriptor.c,
arraydescr_reduce). Before numpy 2 the package was called ``numpy.core``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptcore.core.named_values import NUMPY_CLASSES, NUMPY_CODE, normal
from ckptcore.core.object_tree import Named, Refused
from ckptcore.encodings.pickle.unpickler import Call
from ckptcore.utils.text import short_repr

_MAX_ITEMS = 1 << 40
_SCALAR = "numpy._core.multiarray.scalar"


def array_value(dtype: str, shape: tuple[int, ...], data: bytes, order: str = "C") -> dict[str, Any]:
    """Return the value of ``Named("ndarray", ...)``.

    Args:
        dtype: As numpy spells it, with its byte order.
        shape: Elements.
        data: The elements' bytes.
        order: Order of the bytes, which is recorded if it is not C.
    """
    form: dict[str, Any] = {"dtype": dtype, "shape": list(shape), "data": data}
    return form if order == "C" else {**form, "order": order}


def _dtype(spelled: Any = "", align: Any = False, copy: Any = True) -> Named | Refused:
    if type(spelled) is not str or not NUMPY_CODE.fullmatch(spelled):
        return Refused(f"numpy.dtype({short_repr(spelled, 40)})")
    return Named("npdtype", [spelled, "="])


def _set_dtype(target: Named, state: Any) -> None:
    # (version, byte order, subdtype, names, fields, itemsize, alignment, flags[, metadata])
    if type(state) is not tuple or len(state) < 5 or any(state[2:5]) or state[1] not in ("<", ">", "=", "|"):
        raise ValueError(f"numpy dtype {target.value[0]} with the state {short_repr(state)}")
    if target.value[1] != "=":  # values may have been made with it
        raise ValueError(f"numpy dtype {target.value[0]} whose state is set twice")
    target.value[1] = state[1]


def _dtype_string(dtype: Any) -> str:
    if type(dtype) is not Named or dtype.kind != "npdtype":
        raise ValueError(f"numpy value without a dtype: {short_repr(dtype)}")
    kind, order = dtype.value
    return str(np.dtype(kind if order == "|" else order + kind).str)


def _fits(shape: Any, dtype: str, data: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or len(shape) > 64 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"numpy array of shape {short_repr(shape)}")
    count = 1
    for n in shape:
        count *= n
        if count > _MAX_ITEMS:
            raise ValueError(f"numpy array of shape {short_repr(shape)}")
    if type(data) is not bytes or len(data) != count * np.dtype(dtype).itemsize:
        raise ValueError(f"numpy array of shape {short_repr(shape)} and dtype {dtype} with the wrong bytes")
    return shape


def _reconstruct(subtype: Any, shape: Any, kind: Any) -> Named | Refused:
    if isinstance(subtype, Refused):  # a subclass of ndarray
        return subtype
    if subtype != Named("npclass", "ndarray") or shape != (0,):
        raise ValueError(f"numpy array made from {short_repr(subtype)}")
    return Named("ndarray", array_value("|i1", (0,), b""))


def _set_array(target: Named, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5:
        raise ValueError(f"numpy array with the state {short_repr(state)}")
    _, shape, dtype, fortran, data = state
    target.value.clear()
    if isinstance(dtype, Refused):  # an array of objects, dates or records: nothing is kept
        target.value["refused"] = dtype.name
        return
    spelled = _dtype_string(dtype)
    order = "F" if fortran and len(shape) > 1 else "C"
    target.value.update(array_value(spelled, _fits(shape, spelled, data), data, order))


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any) -> Named | Refused:
    if isinstance(dtype, Refused):
        return dtype
    if type(data) is Named and data.kind == "bytearray":  # of protocol 5, for an array that can be written to
        data = data.value
    if order not in ("C", "F"):
        raise ValueError(f"numpy array in order {short_repr(order, 20)}")
    spelled = _dtype_string(dtype)
    return Named("ndarray", array_value(spelled, _fits(shape, spelled, data), data, order))


def _scalar(dtype: Any, data: Any = None) -> Named | Refused:
    """Return a scalar as the spelling of its dtype and its bytes."""
    if isinstance(dtype, Refused):
        return Refused(f"{_SCALAR} of {dtype.name}")
    spelled = _dtype_string(dtype)
    _fits((), spelled, data)
    return Named("npscalar", normal("npscalar", (spelled, data)))


# The key of a state setter has no dot, so that no pickle can name it.
NUMPY_TABLE: dict[str, Any] = {
    **{f"numpy.{name}": Named("npclass", name) for name in sorted(NUMPY_CLASSES)},
    "numpy.dtype": Call("numpy.dtype", _dtype),
    **{
        f"numpy.{core}.{name}": Call(name, build)
        for core in ("_core", "core")
        for name, build in (
            ("multiarray._reconstruct", _reconstruct),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _frombuffer),
        )
    },
    "BUILD npdtype": _set_dtype,
    "BUILD ndarray": _set_array,
}
