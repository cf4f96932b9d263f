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
- ``add_DTYPE``: one input of that dtype; params (c,). out = input + c, computed in float32 (float64 for
  float64) and rounded once to the dtype, like torch's ``weight + c``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import TensorSpec
from ckptcore.utils.dataclass import dataclass

Shape = tuple[int, ...]
# The 4-bit floats E2M1, indexed by their bits.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GROUP = 32  # values of MXFP4 that share a scale
_PIECE = 4096  # groups decoded per step, which keeps temporaries within 1 or 2 MiB


@dataclass(frozen=True, slots=True)
class Function:
    """One way to compute a tensor.

    Attributes:
        title: What it computes, for people.
        dtype: Dtype of the output.
        shape: Shape of the output for inputs that fit, else None.
        needs: Boxes of the inputs that a box of the output needs.
        width: Most bytes of those boxes per element of the output.
        fill: Called as (torch, box, inputs over the needed boxes, params, out). Fills ``out``, a contiguous
            tensor over the box.
    """

    title: str
    dtype: str
    shape: Callable[[Sequence[TensorSpec], Shape], Shape | None]
    needs: Callable[[Box, Shape], tuple[Box, ...]]
    width: Callable[[Sequence[str]], int]
    fill: Callable[[Any, Box, Sequence[Any], Shape, Any], None]


def _block_shape(inputs: Sequence[TensorSpec], params: Shape) -> Shape | None:
    weight, scale = inputs
    rank = len(weight.shape)
    if rank not in (2, 3) or len(params) != 2 or min(params) < 1 or not _are_codes_and_factors(weight, scale):
        return None
    wanted = tuple(-(-n // b) for n, b in zip(weight.shape, _block_of(rank, params), strict=True))
    return weight.shape if scale.shape == wanted else None


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
    wanted = tuple(n if own else 1 for n, own in zip(weight.shape, params, strict=False))
    return weight.shape if params[0] and scale.shape == wanted else None


def _experts_needs(box: Box, params: Shape) -> tuple[Box, ...]:
    own = [*zip(box.offset, box.shape, params, strict=False)]
    return box, Box(tuple(o if p else 0 for o, _, p in own), tuple(n if p else 1 for _, n, p in own))


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
    values = torch.tensor(FP4, dtype=out.dtype, device=out.device)
    byte = torch.arange(256, device=out.device)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1)  # of every byte value
    skipped = box.offset[-1] % GROUP
    step, wide = max(1, _PIECE // max(groups, 1)), min(groups, _PIECE)
    for a in range(0, len(lines), step):
        for g in range(0, groups, wide):
            part = blocks[a : a + step, g : g + wide]
            decoded = pairs[part.reshape(-1).to(torch.int64)].reshape(-1, GROUP)
            exponent = scales[a : a + step, g : g + wide].reshape(-1, 1).to(torch.int32) - 127
            torch.ldexp(decoded, exponent, out=decoded)
            decoded = decoded.reshape(part.shape[0], -1)
            at = g * GROUP - skipped
            target = lines[a : a + step, max(at, 0) : at + decoded.shape[1]]
            target.copy_(decoded[:, max(-at, 0) :][:, : target.shape[1]])


def _fill_sum(torch: Any, box: Box, inputs: Sequence[Any], params: Shape, out: Any) -> None:
    out.copy_(inputs[0]).add_(params[0])


ADDED = ("float16", "bfloat16", "float32", "float64")  # dtypes with an add_DTYPE function
FUNCTIONS: dict[str, Function] = {
    "fp8_block": Function(
        "weights times the scale of their block",
        "float32",
        _block_shape,
        _block_needs,
        # A box has at most as many scales as elements.
        lambda dtypes: sum(BY_NAME[d].itemsize for d in dtypes),
        _fill_block,
    ),
    "scaled": Function(
        "weights times one scale",
        "float32",
        _scaled_shape,
        lambda box, params: (box, Box((0,) * params[0], (1,) * params[0])),
        lambda dtypes: sum(BY_NAME[d].itemsize for d in dtypes),
        _fill_scaled,
    ),
    "scaled_rows": Function(
        "weights times the scale of their row",
        "float32",
        _rows_shape,
        lambda box, params: (box, Box((box.offset[0], 0)[: params[0]], (box.shape[0], 1)[: params[0]])),
        lambda dtypes: sum(BY_NAME[d].itemsize for d in dtypes),
        _fill_scaled,
    ),
    "scaled_experts": Function(
        "weights of experts times their scales",
        "float32",
        _experts_shape,
        _experts_needs,
        lambda dtypes: sum(BY_NAME[d].itemsize for d in dtypes),
        _fill_experts,
    ),
    "mxfp4": Function(
        "4-bit floats times the power of two of their group",
        "float32",
        _fp4_shape,
        _fp4_needs,
        # One element needs its complete group.
        lambda dtypes: GROUP // 2 + 1,
        _fill_fp4,
    ),
    **{
        f"add_{dtype}": Function(
            "weights and a constant",
            dtype,
            lambda inputs, params: inputs[0].shape if len(params) == 1 else None,
            lambda box, params: (box,),
            lambda dtypes: BY_NAME[dtypes[0]].itemsize,
            _fill_sum,
        )
        for dtype in ADDED
    },
}
