"""Compute the elements of a box from stored values, with a closed table of functions.

A function names the boxes of its inputs that a box of its output needs, and fills the output from them.
Every element depends on a few input elements near it. Any box can therefore be computed separately, and the
cut into boxes changes no bit.

- ``fp8_block``: inputs weight [R, C] of a dtype of one byte, scale [ceil(R / r), ceil(C / c)]; params
  (r, c), the block. out[i, j] = weight[i, j] * scale[i // r, j // c] in float32
  (torch/distributed/checkpoint/quantized_hf_storage.py, `_dequantize_tensor`; DeepSeek-V3's
  ``weight_scale_inv``). A weight [E, R, C] of E experts has a scale [E, ceil(R / r), ceil(C / c)].
- ``scaled_experts``: inputs weight [E, R, C] as above, scale [E], or with three dims, each the weight's or 1;
  params: for each dim of the scale 1 where it is the weight's, else 0. out = weight * scale in float32
  (`Llama4TextExperts` with fbgemm_fp8: one scale per column of each expert).
- ``scaled``, ``scaled_rows``: inputs weight [R, C] as above, scale with one element, or one per row ([R] or
  [R, 1]); params (n,), the scale's number of dims. out = weight * scale in float32 (compressed-tensors,
  `quantization/lifecycle/forward_helpers.py`, `_dequantize`; FbgemmFp8Linear of transformers).
- ``mxfp4``: inputs blocks uint8 [..., G, 16], two 4-bit floats per byte, low nibble first; scales uint8
  [..., G]; out [..., 32 G] = value * 2 ** (scale - 127) in float32 (the same file,
  `_dequantize_tensor_mxfp4`; gpt-oss's ``*_blocks`` and ``*_scales``).
- ``affine_block``: inputs weight int8 [R, C], scale and zero point [R / r, C / c]; params (r, c).
  out[i, j] = (weight[i, j] - zero[i // r, j // c]) * scale[i // r, j // c] in float32 (torchao,
  quantization/quant_primitives.py, `_dequantize_affine_no_dtype_check`).
- ``flat_scaled``, ``flat_mapped``, ``flat_mapped_4bit``: states of torchao's optimizers, in which a run of
  ``n`` elements in row-major order shares a scale [N / n]; params (n, *shape). Inputs: codes, scale, and the
  values [256] or [16] that codes of 8 or 4 bits index. out.flat[i] = value(codes.flat[i]) * scale[i // n] in
  float32; two codes of 4 bits are in a byte, the high one first (torchao/optim/quant_utils.py,
  `dequant_with_qmap`; subclass_4bit.py and subclass_fp8.py, `dequantize`).
- ``add_DTYPE``: one input of that dtype, or a narrower one; params (c,). out = input + c, computed in float32
  (float64 for float64) and rounded once to the dtype, like torch's ``weight + c``.
- ``sum_DTYPE``, ``mean_DTYPE``: n inputs of that dtype and of one shape; params (n,). out = ((a + b) + c)
  and so on, each sum rounded to the dtype, and divided by n for the mean (convert_neox_to_hf.py of GPT-NeoX).
- ``weighted_DTYPE``: see `ckptcore.core.weighted_sums`.
- ``adapted_DTYPE``: see `ckptcore.core.adapted_weights`.
- ``zeros_float32``: no input; params: the shape. Biases that a trainer begins with.
- ``padded_DTYPE``: one input [R, ...] of that dtype; params (R, *shape), where shape has more rows. out has
  the rows of the input, and zeros behind them: a vocabulary that a trainer pads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from ckptcore.core.adapted_weights import adapted_needs, adapted_shape, fill_adapted, most_adapted
from ckptcore.core.box import Box, flat_start
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import ADAPTED, SUM, Derived, TensorSpec
from ckptcore.core.weighted_sums import SUMMED, fill_sum, pieces_at_once, sum_shape

Shape = tuple[int, ...]
# The 4-bit floats E2M1, indexed by their bits.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GROUP = 32  # values of MXFP4 that share a scale
_PIECE = 4096  # groups decoded per step, which keeps temporaries within 1 or 2 MiB


def _width_of_all(dtypes: Sequence[str]) -> int:
    return sum(BY_NAME[dtype].itemsize for dtype in dtypes)


@dataclass(frozen=True, slots=True)
class Function:
    """One way to compute a tensor.

    Attributes:
        title: What it computes, for people.
        dtype: Dtype of the output.
        shape: Shape of the output for inputs that fit, else None.
        needs: Boxes of the inputs that a box of the output needs.
        fill: Called as (torch, box, inputs over the needed boxes, params, out). Fills ``out``, a contiguous
            tensor over the box.
        width: Most bytes of those boxes per element of the output; an element of each input by default.
        most: Called as (bytes, shape of a box, bytes of an element of the output, dtypes of the inputs,
            params). Returns the most elements of a tile of the box (`Box.tiles`) that fit, with their inputs;
            None where ``width`` says it.
    """

    title: str
    dtype: str
    shape: Callable[[Sequence[TensorSpec], Shape], Shape | None]
    needs: Callable[[Box, Shape], tuple[Box, ...]]
    fill: Callable[[Any, Box, Sequence[Any], Shape, Any], None]
    width: Callable[[Sequence[str]], int] = _width_of_all
    most: Callable[[int, Shape, int, Sequence[str], Shape], int] | None = None


def _block_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    weight, scale = inputs
    rank = len(weight.shape)
    if rank not in (2, 3) or len(params) != 2 or min(params) < 1 or not _are_codes_and_factors(weight, scale):
        return None
    scale_shape = tuple(-(-n // b) for n, b in zip(weight.shape, _block_of(rank, params), strict=True))
    return weight.shape if scale.shape == scale_shape else None


def _block_of(rank: int, params: Shape) -> Shape:
    """Return the sizes of a block of a weight: of one expert, where it has several."""
    return (1,) * (rank - 2) + params


def _are_codes_and_factors(weight: TensorSpec, scale: TensorSpec) -> bool:
    """Report whether these are one-byte values, and floats."""
    code, factor = BY_NAME.get(weight.dtype), BY_NAME.get(scale.dtype)
    plain = code is not None and code.itemsize == 1 and weight.dtype not in ("uint8", "bool")
    return plain and factor is not None and factor.is_float


def _block_needs(box: Box, params: Shape) -> tuple[Box, ...]:
    block = _block_of(len(box.shape), params)
    first = tuple(o // b for o, b in zip(box.offset, block, strict=True))
    end = tuple(-(-e // b) for e, b in zip(box.end, block, strict=True))
    return box, Box(first, tuple(b - a for a, b in zip(first, end, strict=True)))


def _fill_block(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    weight, scale = inputs
    if len(box.shape) == 3:
        expert = Box(box.offset[1:], box.shape[1:])
        for n in range(box.shape[0]):
            _fill_block(torch, expert, (weight[n], scale[n]), params, out[n])
        return
    out.copy_(weight)
    (row, column), (rows, columns) = box.offset, params
    skipped = column % columns
    columns = min(columns, skipped + box.shape[1])  # a config's block may be larger than all memory
    for n, line in enumerate(scale.to(out.dtype)):
        # One row of blocks at a time: one factor per column.
        begin = max((row // rows + n) * rows - row, 0)
        end = (row // rows + n + 1) * rows - row
        factors = line.repeat_interleave(columns)[skipped : skipped + box.shape[1]]
        out[begin:end].mul_(factors)


def _scaled_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    weight, scale = inputs
    fits = _are_codes_and_factors(weight, scale) and params == (len(scale.shape),) and scale.numel == 1
    return weight.shape if fits and len(weight.shape) in (2, 3) else None


def _rows_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    weight, scale = inputs
    if not _are_codes_and_factors(weight, scale) or params != (len(scale.shape),) or len(weight.shape) != 2:
        return None
    return weight.shape if scale.shape in ((weight.shape[0],), (weight.shape[0], 1)) else None


def _fill_scaled(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    # The scale has one element, or one per row of the box.
    out.copy_(inputs[0]).mul_(inputs[1].to(out.dtype).reshape(-1, 1))


def _experts_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    weight, scale = inputs
    if not _are_codes_and_factors(weight, scale) or len(weight.shape) != 3 or len(params) not in (1, 3):
        return None
    scale_shape = tuple(n if varies else 1 for n, varies in zip(weight.shape, params, strict=False))
    return weight.shape if params[0] and scale.shape == scale_shape else None


def _experts_needs(box: Box, params: Shape) -> tuple[Box, ...]:
    dims = [*zip(box.offset, box.shape, params, strict=False)]
    return box, Box(tuple(o if p else 0 for o, _, p in dims), tuple(n if p else 1 for _, n, p in dims))


def _fill_experts(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    weight, scale = inputs
    factors = scale.to(out.dtype)
    out.copy_(weight).mul_(factors if len(params) == 3 else factors.reshape(-1, 1, 1))


def _fp4_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    blocks, scales = inputs
    if (blocks.dtype, scales.dtype) != ("uint8", "uint8") or len(blocks.shape) < 2:
        return None
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] * 2 != GROUP or params:
        return None
    return (*scales.shape[:-1], scales.shape[-1] * GROUP)


def _fp4_needs(box: Box, params: Shape) -> tuple[Box, ...]:
    first, end = box.offset[-1] // GROUP, -(-box.end[-1] // GROUP)
    scales = Box((*box.offset[:-1], first), (*box.shape[:-1], end - first))
    return Box((*scales.offset, 0), (*scales.shape, GROUP // 2)), scales


def _fill_fp4(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    groups = inputs[1].shape[-1]
    blocks, scales = inputs[0].reshape(-1, groups, GROUP // 2), inputs[1].reshape(-1, groups)
    lines = out.view(-1, box.shape[-1])
    # Made there: a copy from here would make the host wait for what the device has begun.
    values = torch.stack([torch.full((), value, dtype=out.dtype, device=out.device) for value in FP4])
    byte = torch.arange(256, device=out.device)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1)  # of every byte value
    skipped = box.offset[-1] % GROUP
    most = _PIECE * pieces_at_once(out, 8)
    step, wide = max(1, most // max(groups, 1)), min(groups, most)
    for a in range(0, len(lines), step):
        for g in range(0, groups, wide):
            part = blocks[a : a + step, g : g + wide]
            decoded = pairs[part.reshape(-1).to(torch.int64)].reshape(-1, GROUP)
            exponent = scales[a : a + step, g : g + wide].reshape(-1, 1).to(torch.int32) - 127
            torch.ldexp(decoded, exponent, out=decoded)
            decoded = decoded.reshape(part.shape[0], -1)
            # Negative for the first group of a box that begins inside of it.
            column = g * GROUP - skipped
            target = lines[a : a + step, max(column, 0) : column + decoded.shape[1]]
            target.copy_(decoded[:, max(-column, 0) :][:, : target.shape[1]])


def _affine_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    weight, scale, zero = inputs
    if zero.shape != scale.shape or zero.dtype != "int8" or weight.dtype != "int8" or len(weight.shape) != 2:
        return None
    return _block_shape((weight, scale), params)


def _fill_affine(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    weight, scale, zero = inputs
    row, column = (first % size for first, size in zip(box.offset, params, strict=True))
    of_column = torch.div(
        torch.arange(column, column + box.shape[1], device=out.device), params[1], rounding_mode="floor"
    )
    out.copy_(weight)
    for n in range(len(scale)):
        begin, end = max(n * params[0] - row, 0), (n + 1) * params[0] - row
        out[begin:end].sub_(zero[n].to(out.dtype)[of_column]).mul_(scale[n].to(out.dtype)[of_column])


def _flat_span(box: Box, params: Shape, step: int) -> Box:
    """Return the box of a flat input that has one element per ``step`` elements of the output."""
    if 0 in box.shape:
        return Box((0,), (0,))
    first = flat_start(params[1:], box.offset) // step
    last = flat_start(params[1:], tuple(e - 1 for e in box.end)) // step
    return Box((first,), (last + 1 - first,))


def _flat_shape(bits: int, values: int, inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    """Check codes of some bits that index a table of values, or are values: 0."""
    codes, scale, *table = inputs
    run, shape = params[0] if params else 0, params[1:]
    if run < _RUN or prod(shape) % run or scale.shape != (prod(shape) // run,):
        return None
    if codes.shape != (shape if bits == 8 else (prod(shape) // 2,)) or (bits == 4 and prod(shape) % 2):
        return None
    if scale.dtype != "float32" or len(table) != bool(values):
        return None
    if not values:
        return shape if _are_codes_and_factors(codes, scale) else None
    is_table = (table[0].dtype, table[0].shape) == ("float32", (values,))
    return shape if is_table and codes.dtype == "uint8" else None


def _flat_needs(bits: int, values: int, box: Box, params: Shape) -> tuple[Box, ...]:
    codes = box if bits == 8 else _flat_span(box, params, 2)
    table = (Box((0,), (values,)),) if values else ()
    return codes, _flat_span(box, params, params[0]), *table


def _fill_flat(
    bits: int, values: int, torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any
) -> None:
    codes, scale, *table = inputs
    run, shape = params[0], params[1:]
    lines, codes, width = out.view(-1), codes.reshape(-1), _contiguous(box, shape)
    most = _LINE * pieces_at_once(out, 32)
    first, packed = (_flat_span(box, params, step).offset[0] for step in (run, 2))
    for number, begin in enumerate(range(0, lines.numel(), width)):
        index = _line_start(box, width, number)
        start = flat_start(shape, index)
        # In pieces: the positions of a complete line would take 8 bytes an element.
        for a in range(0, width, most):
            place = torch.arange(start + a, start + min(a + most, width), device=out.device)
            if bits == 8:
                code = codes[begin + a : begin + a + len(place)]
            else:
                code = codes[place // 2 - packed] >> (4 * (1 - place % 2)).to(codes.dtype) & 15
            part = table[0][code.to(torch.int64)] if values else code.to(out.dtype)
            lines[begin + a : begin + a + len(place)] = part * scale[place // run - first]


def _contiguous(box: Box, shape: Shape) -> int:
    """Return how many elements of a box follow each other in the tensor: those of its last dims."""
    width = 1
    for extent, size in zip(reversed(box.shape), reversed(shape), strict=True):
        width *= extent
        if extent != size:
            break
    return max(width, 1)


def _line_start(box: Box, width: int, number: int) -> Shape:
    """Return the index of the first element of the ``number``-th line of ``width`` elements of a box."""
    place, index = number * width, []
    for offset, extent in zip(reversed(box.offset), reversed(box.shape), strict=True):
        index.append(offset + place % extent)
        place //= extent
    return tuple(reversed(index))


def _flat_function(title: str, bits: int, values: int) -> Function:
    return Function(
        title,
        "float32",
        partial(_flat_shape, bits, values),
        partial(_flat_needs, bits, values),
        partial(_fill_flat, bits, values),
        # A scale has `_RUN` elements of the output or more. A box of some columns needs those of all between.
        lambda dtypes: _width_of_all(dtypes[:2]),
    )


def _parts_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    """Return the shape of tensors that are added; None where they differ, or there is one."""
    alike = len({(t.dtype, t.shape) for t in inputs}) == 1
    return inputs[0].shape if alike and params == (len(inputs),) and len(inputs) > 1 else None


def _fill_parts(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    out.copy_(inputs[0])
    for part in inputs[1:]:
        out.add_(part)


def _fill_mean(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    _fill_parts(torch, box, inputs, params, out)
    out.div_(params[0])


def _padded_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    if len(inputs) != 1 or len(params) < 2 or inputs[0].shape != (params[0], *params[2:]):
        return None
    return params[1:] if params[1] > params[0] else None


def _padded_needs(box: Box, params: Shape) -> tuple[Box, ...]:
    first, end = (min(row, params[0]) for row in (box.offset[0], box.end[0]))
    return (Box((first, *box.offset[1:]), (end - first, *box.shape[1:])),)


def _fill_padded(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    rows = inputs[0].shape[0]
    out[:rows].copy_(inputs[0])
    out[rows:].zero_()


_RUN = 64  # fewest elements that share a scale in a flat state
_LINE = 1 << 14  # elements of it decoded per step, which keeps temporaries within 1 MiB
ADDED = ("float16", "bfloat16", "float32", "float64")  # dtypes with an add_DTYPE function
FUNCTIONS: dict[str, Function] = {
    "fp8_block": Function(
        "weights times the scale of their block", "float32", _block_shape, _block_needs, _fill_block
    ),
    "scaled": Function(
        "weights times one scale",
        "float32",
        _scaled_shape,
        lambda box, params: (box, Box((0,) * params[0], (1,) * params[0])),
        _fill_scaled,
    ),
    "scaled_rows": Function(
        "weights times the scale of their row",
        "float32",
        _rows_shape,
        lambda box, params: (box, Box((box.offset[0], 0)[: params[0]], (box.shape[0], 1)[: params[0]])),
        _fill_scaled,
    ),
    "scaled_experts": Function(
        "weights of experts times their scales", "float32", _experts_shape, _experts_needs, _fill_experts
    ),
    "mxfp4": Function(
        "4-bit floats times the power of two of their group",
        "float32",
        _fp4_shape,
        _fp4_needs,
        _fill_fp4,
        lambda dtypes: GROUP // 2 + 1,  # one element needs its complete group
    ),
    "affine_block": Function(
        "weights less the zero point, times the scale of their block",
        "float32",
        _affine_shape,
        lambda box, params: (*_block_needs(box, params), _block_needs(box, params)[1]),
        _fill_affine,
    ),
    "flat_scaled": _flat_function("values times the scale of their run", 8, 0),
    "flat_mapped": _flat_function("values of 8-bit codes times the scale of their run", 8, 256),
    "flat_mapped_4bit": _flat_function("values of 4-bit codes times the scale of their run", 4, 16),
    "zeros_float32": Function(
        "zeros, of no stored tensor",
        "float32",
        lambda inputs, params: None if inputs else params,
        lambda box, params: (),
        lambda torch, box, inputs, params, out: out.zero_(),
    ),
    **{
        f"add_{dtype}": Function(
            "weights and a constant",
            dtype,
            lambda inputs, params: inputs[0].shape if len(params) == 1 else None,
            lambda box, params: (box,),
            lambda torch, box, inputs, params, out: out.copy_(inputs[0]).add_(params[0]),
        )
        for dtype in ADDED
    },
    **{
        f"{SUM}{dtype}": Function(
            "weighted sums of several checkpoints",
            dtype,
            sum_shape,
            lambda box, params: (box,) * len(params),
            fill_sum,
        )
        for dtype in sorted(set(SUMMED.values()))
    },
    **{
        f"{ADAPTED}{dtype}": Function(
            "weights with an adapter", dtype, adapted_shape, adapted_needs, fill_adapted, most=most_adapted
        )
        for dtype in sorted(set(SUMMED.values()))
    },
    **{
        f"padded_{dtype}": Function(
            "rows, and zeros behind them", dtype, _padded_shape, _padded_needs, _fill_padded
        )
        for dtype in ADDED
    },
    **{
        f"{name}_{dtype}": Function(title, dtype, _parts_shape, lambda box, params: (box,) * params[0], fill)
        for name, title, fill in (
            ("sum", "sums of the ranks' parts", _fill_parts),
            ("mean", "means of the ranks' copies", _fill_mean),
        )
        for dtype in ADDED
    },
}


def most_elements(node: Derived, room: int, shape: Shape, itemsize: int, dtypes: Sequence[str]) -> int:
    """Return the most elements of a tile of a box that fit so many bytes, with their inputs.

    Args:
        node: How they are computed.
        room: The bytes.
        shape: Shape of the box.
        itemsize: Bytes of an element of the output.
        dtypes: Of the inputs.
    """
    function = FUNCTIONS[node.fn]
    if function.most is not None:
        return function.most(room, shape, itemsize, dtypes, node.params)
    return room // (itemsize + function.width(dtypes))
