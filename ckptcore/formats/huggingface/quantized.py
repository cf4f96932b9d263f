"""Read Hugging Face folders with quantised weights (hf_quantized) as the values of the weights.

Two pairs are recognised by name, dtype and shape, as by torch's QuantizedHuggingFaceStorageReader
(torch/distributed/checkpoint/quantized_hf_storage.py):

- ``X.weight`` of a float8 dtype [R, C] and ``X.weight_scale_inv``, a scale per block. The block is
  ``quantization_config.weight_block_size`` of config.json, else 128 x 128.
- ``X_blocks`` uint8 [..., G, 16] and ``X_scales`` uint8 [..., G]: MXFP4.

The weight is read as the float32 tensor that the formula gives, under its own name, and the scale is no
longer a tensor (see `ckptcore.core.dequantize`). With ``--keep-quantized`` such a folder is read as plain
safetensors: stored weights and scales. A pair that does not fit its formula is an error, because its stored
values alone are not the weights; so is a weight without a scale where others have one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ckptcore.core.dequantize import FUNCTIONS
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.subset import derive
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.safetensors_header import read_header
from ckptcore.errors import CkptError, Finding, MalformedCheckpoint, finding
from ckptcore.formats.base import Evidence, Format, Reader, Source
from ckptcore.formats.huggingface.folder import INDEX, read_folder, recognised, unindexed, weight_map
from ckptcore.utils.text import short_repr

CONFIG = "config.json"
_BLOCK = (128, 128)
_MAX_CONFIG = 16 << 20
# Suffix of a scale -> (suffix of its weight, function).
_PAIRS = {".weight_scale_inv": (".weight", "fp8_block"), "_scales": ("_blocks", "mxfp4")}
_KEEP = "carry the stored values with --keep-quantized"


def detect(source: Source) -> Evidence | None:
    """Recognise a safetensors file or folder with a quantised weight and its scale."""
    if source.keep_quantized or recognised(source) is None:
        return None
    try:
        files = _file_of_tensor(source)
        for weight, scale, fn in _weights_with_scales(files):
            # Names ending in _blocks and _scales mean MXFP4 only if their dtype is uint8.
            if fn != "mxfp4" or _header_dtype(source, files[weight], weight) == "uint8":
                because = f"found {weight} and its {scale}; dequantised unless --keep-quantized"
                return Evidence("hf_quantized", (because,), ("safetensors",))
    except CkptError:
        return None  # the reader of plain safetensors reports what is wrong
    return None


def read(source: Source) -> Manifest:
    """Read the manifest with quantised weights as float32; raise `MalformedCheckpoint` as `read_folder`."""
    stored = read_folder(source, "hf_quantized")
    specs = {t.fqn: t for t in stored.tensors}
    block = _block(source)
    made: dict[str, tuple[TensorSpec, str, Sequence[str], tuple[int, ...]]] = {}
    unfit: list[Finding] = []
    for weight, scale, fn in _weights_with_scales(specs):
        inputs = specs[weight], specs[scale]
        if fn == "mxfp4" and inputs[0].dtype != "uint8":
            continue
        params = block if fn == "fp8_block" else ()
        shape = FUNCTIONS[fn].shape(inputs, params)
        if shape is None:
            unfit.append(_unfit(inputs, fn, params))
            continue
        made[weight] = TensorSpec(weight, FUNCTIONS[fn].dtype, shape), fn, (weight, scale), params
    unfit += (_scaleless(t) for t in stored.tensors if t.fqn not in made and _needs_scale(t, specs))
    origin = {**stored.origin, "dequantised": len(made)}
    if block != _BLOCK:
        origin["weight_block_size"] = list(block)
    return derive(replace(stored, findings=(*stored.findings, *unfit), origin=origin), made)


def _file_of_tensor(source: Source) -> dict[str, str]:
    """Return tensor -> file, from the index or from the files' headers."""
    if source.name is None and INDEX in source.listing:
        return weight_map(source)
    there = [p for p in unindexed(source) if p in source.listing]
    return {name: p for p in there for name in read_header(source.store, p, source.listing[p])[0]}


def _weights_with_scales(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return (weight, scale, function) of every pair, found by name."""
    here = set(names)
    found = []
    for name in sorted(here):
        for suffix, (other, fn) in _PAIRS.items():
            weight = name.removesuffix(suffix) + other
            if name.endswith(suffix) and weight in here:
                found.append((weight, name, fn))
    return found


def _header_dtype(source: Source, path: str, name: str) -> str:
    if path not in source.listing:
        return ""
    tensors, _, _ = read_header(source.store, path, source.listing[path])
    return str(tensors[name][0]) if name in tensors else ""


def _block(source: Source) -> tuple[int, ...]:
    """Return rows and columns of a block of weights that share a scale."""
    size = source.listing.get(CONFIG) if source.name is None else None
    if size is None:
        return _BLOCK
    if size > _MAX_CONFIG:
        raise MalformedCheckpoint(
            f"{CONFIG} must have at most {_MAX_CONFIG} bytes (got {size})", file=CONFIG, hint=_KEEP
        )
    try:
        config = parse(source.store.read(CONFIG, 0, size), CONFIG)
        block = (config.get("quantization_config") or {}).get("weight_block_size")
    except (ValueError, AttributeError, RecursionError) as error:
        raise MalformedCheckpoint(f"cannot read {CONFIG}: {error}", file=CONFIG, hint=_KEEP) from error
    if block is None:
        return _BLOCK
    if type(block) is not list or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        raise MalformedCheckpoint(
            f"{CONFIG}: weight_block_size must be two positive integers (got {short_repr(block, 60)})",
            file=CONFIG,
            hint=_KEEP,
        )
    return tuple(block)


def _unfit(inputs: Sequence[TensorSpec], fn: str, params: tuple[int, ...]) -> Finding:
    weight, scale = inputs
    per = f" per block of {params[0]} x {params[1]}" if params else ""
    return finding(
        "unfit-quantization",
        "coverage",
        f"{weight.fqn} is {weight.dtype} {list(weight.shape)}, and "
        f"{scale.fqn} is {scale.dtype} {list(scale.shape)}: they do not fit {fn} with one scale{per}",
        fqn=weight.fqn,
    )


def _needs_scale(tensor: TensorSpec, names: Collection[str]) -> bool:
    """Report whether a tensor looks like the weights here that have a scale, and no tensor is its scale.

    A lost scale leaves no other trace: the weight alone is complete, and wrong by its factors.
    """
    alike = tensor.fqn.endswith(".weight") and tensor.dtype.startswith("float8") and len(tensor.shape) == 2
    return alike and not any(f"{tensor.fqn}_{kind}" in names for kind in ("scale_inv", "scale"))


def _scaleless(weight: TensorSpec) -> Finding:
    return finding(
        "unfit-quantization",
        "coverage",
        f"{weight.fqn} is {weight.dtype} {list(weight.shape)}, and unlike others it has no scale "
        f"{weight.fqn}_scale_inv",
        fqn=weight.fqn,
    )


FORMAT = Format(
    name="hf_quantized",
    title="Hugging Face folder with quantised weights (fp8 blocks, MXFP4), read as float32",
    recognised_by="`X.weight` with `X.weight_scale_inv`, or `X_blocks` with `X_scales`, in safetensors",
    detect=detect,
    reader=Reader(read, objects=True),
)
