"""Map dtypes to their names, widths and spellings in one table.

The canonical name is torch's (``bfloat16``, ``float8_e4m3fn``). Each other format's spelling of
the same element type is a column. A writer refuses a dtype without a spelling in its format.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptcore.errors import UnsupportedDtype


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: torch's name, without ``torch.``.
        itemsize: Bytes per element.
        kind: ``f`` float, ``i`` signed, ``u`` unsigned, ``b`` bool, ``c`` complex, ``p`` several packed
            values, which torch moves and does not cast.
        safetensors: The spelling in a safetensors header (safetensors 0.8 `Dtype`), or None.
        storage: The legacy torch storage class that a pickle names (torch/storage.py), or None for
            those that are pickled as `UntypedStorage` with `_rebuild_tensor_v3`.
        zarr: The zarr v2 dtype string, little-endian, or None.
        packed: Values in one element, which safetensors counts in the last dim of a shape.
    """

    name: str
    itemsize: int
    kind: str
    safetensors: str | None = None
    storage: str | None = None
    zarr: str | None = None
    packed: int = 1

    @property
    def is_float(self) -> bool:
        """Report whether the elements are floats."""
        return self.kind == "f"


DTYPES: tuple[DType, ...] = (
    DType("float64", 8, "f", "F64", "DoubleStorage", "<f8"),
    DType("float32", 4, "f", "F32", "FloatStorage", "<f4"),
    DType("float16", 2, "f", "F16", "HalfStorage", "<f2"),
    DType("bfloat16", 2, "f", "BF16", "BFloat16Storage", "bfloat16"),
    DType("float8_e4m3fn", 1, "f", "F8_E4M3"),
    DType("float8_e5m2", 1, "f", "F8_E5M2"),
    DType("float8_e4m3fnuz", 1, "f", "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 1, "f", "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, "f", "F8_E8M0"),
    DType("float4_e2m1fn_x2", 1, "p", "F4", packed=2),
    DType("int64", 8, "i", "I64", "LongStorage", "<i8"),
    DType("int32", 4, "i", "I32", "IntStorage", "<i4"),
    DType("int16", 2, "i", "I16", "ShortStorage", "<i2"),
    DType("int8", 1, "i", "I8", "CharStorage", "|i1"),
    DType("uint64", 8, "u", "U64", None, "<u8"),
    DType("uint32", 4, "u", "U32", None, "<u4"),
    DType("uint16", 2, "u", "U16", None, "<u2"),
    DType("uint8", 1, "u", "U8", "ByteStorage", "|u1"),
    DType("bool", 1, "b", "BOOL", "BoolStorage", "|b1"),
    DType("complex128", 16, "c", None, "ComplexDoubleStorage", "<c16"),
    DType("complex64", 8, "c", "C64", "ComplexFloatStorage", "<c8"),
    DType("complex32", 4, "c"),
)
BY_NAME = {d.name: d for d in DTYPES}
BY_SAFETENSORS = {d.safetensors: d for d in DTYPES if d.safetensors}
BY_STORAGE = {d.storage: d for d in DTYPES if d.storage}
BY_ZARR = {d.zarr: d for d in DTYPES if d.zarr}

# torch's dtypes that no row supports: several elements in a byte, or numbers whose scale is kept elsewhere.
# Storage classes are those of torch/storage.py.
UNSUPPORTED = frozenset(
    {
        "qint8",
        "quint8",
        "qint32",
        "quint4x2",
        "quint2x4",
        "bits1x8",
        "bits2x4",
        "bits4x2",
        "bits8",
        "bits16",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "bcomplex32",
        *(f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)),
        "int128",
        "uint128",
    }
)
UNSUPPORTED_STORAGES = {
    "QInt8Storage": ("qint8", 1),
    "QUInt8Storage": ("quint8", 1),
    "QInt32Storage": ("qint32", 4),
    "QUInt4x2Storage": ("quint4x2", 1),
    "QUInt2x4Storage": ("quint2x4", 1),
}

_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "long": "int64",
}


def get(name: str) -> DType:
    """Return the dtype of a name as people write it: ``bf16``, ``bfloat16``, ``torch.bfloat16``.

    >>> get("bf16").itemsize
    2

    Raises:
        UnsupportedDtype: No row of the table has this name.
    """
    plain = name.removeprefix("torch.")
    dtype = BY_NAME.get(_SHORT.get(plain, plain))
    if dtype is None:
        from ckptcore.utils.near_names import did_you_mean  # for an error alone

        hint = did_you_mean(name, [*_SHORT, *BY_NAME], f"use one of {', '.join(BY_NAME)}")
        raise UnsupportedDtype(f"unknown dtype {name!r}", hint=hint, dtype=name)
    return dtype
