"""Find quantised tensors, and what they only mean something with, by name and dtype: in any format.

A table of how libraries name them. The values of such a tensor are codes, and those beside it are factors,
zero points or tables: a cast of one of them alone changes the weights, and nothing shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.subset import select

_CODES = frozenset(
    {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8", "uint8", "int32"}
)
# End of the name of a tensor of codes -> ends, in its place, of what the codes mean something with.
_BESIDE: Mapping[str, tuple[str, ...]] = {
    # fp8 of transformers, ModelOpt, compressed-tensors, EETQ; bitsandbytes in 4 bits
    "": (
        "_scale_inv",
        "_scale",
        "_scale_2",
        "_scales",
        "_zero_point",
        "_offset",
        ".absmax",
        ".nested_absmax",
        ".quant_map",
        ".nested_quant_map",
    ),
    # DeepSeek, bitsandbytes in 8 bits, ComfyUI, ModelOpt
    ".weight": (".scale", ".SCB", ".scale_weight", ".pre_quant_scale"),
    "_blocks": ("_scales",),  # MXFP4
    "_packed": ("_scale", "_global_scale", "_zero_point"),  # pack-quantized, NVFP4 of compressed-tensors
    ".compressed": (".weight_scale",),  # sparse and quantised, of compressed-tensors
    ".qweight": (".scales", ".qzeros"),  # GPTQ, AWQ
    "._data": ("._scale", "._shift"),  # quanto
    "_qdata": ("_scale", "_zero_point"),  # torchao, and the next two where it pickled them
    ".qdata": (".scale", ".zero_point"),
    ".codes": (".scale", ".qmap"),
    ".state1": (".absmax1", ".qmap1"),  # optimizers of bitsandbytes
    ".state2": (".absmax2", ".qmap2"),
}
# End of the name of a tensor of packed codes -> that of the weight, which has another shape.
_PACKED: Mapping[str, str] = {"_blocks": "", "_packed": "", ".compressed": ".weight", ".qweight": ".weight"}
# What modules have beside: orders of groups, shapes, layouts.
_NOTES = ("weight_shape", "weight_format", "weight_g_idx", "g_idx", "bitmask", "row_offsets")
# Factors of what goes into a quantised module and comes out of it, or of caches of the module around it.
_OF_MODULE = ("input_scale", "input_scale_ub", "input_global_scale", "activation_scale", "output_scale")
_OF_CACHE = ("k_scale", "v_scale", "q_scale", "kv_scale")
_UNUSED = "scale of activations: the weights beside it are written as values"


def is_code(dtype: str) -> bool:
    """Report whether values of a dtype may be codes."""
    return dtype in _CODES


def companions(tensors: Iterable[TensorSpec]) -> dict[str, tuple[str, ...]]:
    """Return for each quantised tensor the names of what its values mean something with."""
    specs = {t.fqn: t for t in tensors}
    names_by_tensor: dict[str, tuple[str, ...]] = {}
    for name, spec in specs.items():
        if _may_be_codes(spec):
            beside = tuple(
                candidate
                for end, ends in _BESIDE.items()
                if name.endswith(end)
                for candidate in (name.removesuffix(end) + e for e in ends)
                if candidate in specs and not (_is_float8(spec) and _is_float8(specs[candidate]))
            )
            if beside:
                names_by_tensor[name] = beside
    return names_by_tensor


def _may_be_codes(spec: TensorSpec) -> bool:
    """Report whether a tensor has a code's dtype and dims: a scalar is a counter, a list of int32 indices."""
    return spec.dtype in _CODES and len(spec.shape) > (1 if spec.dtype == "int32" else 0)


def _is_float8(spec: TensorSpec) -> bool:
    """Report whether a tensor is of a float8 dtype. Both of a pair are where all of a model was cast."""
    return spec.dtype in _CODES and spec.dtype.startswith("float8")


def bound(tensors: Iterable[TensorSpec]) -> dict[str, str]:
    """Return for quantised tensors, and for all that belongs to them, another tensor of the same values."""
    specs = {t.fqn: t for t in tensors}
    partners: dict[str, str] = {}
    for name, beside in companions(specs.values()).items():
        partners[name] = beside[0]
        for companion in (*beside, *(n for n in _of_activations(name) if n in specs)):
            partners.setdefault(companion, name)
    return partners


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantised weight. name: without quantisation. packed: whether its shape is another. stored: names."""

    name: str
    packed: bool
    stored: tuple[str, ...]


def quantized_weights(tensors: Iterable[TensorSpec]) -> list[QuantizedWeight]:
    """Return the weights that several stored tensors describe, with all names that belong to each."""
    specs = {t.fqn: t for t in tensors}
    weights = []
    for name, beside in companions(specs.values()).items():
        end = next((e for e in _PACKED if name.endswith(e)), None)
        weight = name if end is None else name.removesuffix(end) + _PACKED[end]
        module = weight.rpartition(".")[0]
        related_names = (*_of_activations(weight), *(f"{module}.{n}" for n in _NOTES))
        stored = dict.fromkeys((name, *beside, *(n for n in related_names if n in specs)))
        weights.append(QuantizedWeight(weight, end is not None, tuple(stored)))
    return weights


def without_activations(manifest: Manifest) -> tuple[Manifest, tuple[tuple[str, str], ...]]:
    """Return the manifest without factors that modules of computed weights no longer use, and (name, rule).

    They have one element each. Tensors of more may be parameters of the model, which are called like that.
    Without its quantised weights a model computes with its activations as they are.
    """
    computed = [manifest.tensors[t].fqn for t in manifest.derived]
    names = {factor for name in computed for factor in _of_activations(name)}
    gone = {t.fqn: None for t in manifest.tensors if t.fqn in names and t.numel == 1}
    if not gone:
        return manifest, ()
    rows = [n for n, t in enumerate(manifest.tensors) if t.fqn not in gone]
    return select(manifest, rows), tuple((name, _UNUSED) for name in gone)


def _of_activations(weight: str) -> list[str]:
    """Return the names that factors of the activations around a weight may have."""
    module = weight.rpartition(".")[0]
    around = module.rpartition(".")[0]
    return [f"{module}.{n}" for n in (*_OF_MODULE, *_OF_CACHE)] + [f"{around}.{n}" for n in _OF_CACHE]
