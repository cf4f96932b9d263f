"""Find which memory of this rank holds, or gets, which boxes of a tensor.

Every kind of tensor is either supported here or refused before anything is filled: kinds that torch writes to
in another way (sparse, quantised, fake, expanded), or that have no memory. A tensor, or the local part of a
DTensor, may list its own chunks, as it does for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ckptcore.core.box import Box
from ckptcore.errors import NameMismatch, UnsupportedDtype, UsageError
from ckptcore.topology.layout import local_parts

if TYPE_CHECKING:
    import torch

Piece = tuple["torch.Tensor", Box]


class MemoryUse(NamedTuple):
    """What is done with memory: the verb of its errors, and whether it is written."""

    verb: str
    writes: bool


FILL, SUM = MemoryUse("load into", True), MemoryUse("fingerprint", False)


def pieces(fqn: str, tensor: Any, use: MemoryUse = FILL) -> list[Piece]:
    """Return this rank's memory of a tensor, in pieces, each with its box of the full tensor.

    The list is empty for a rank that holds nothing of it.

    Args:
        fqn: Name of the tensor.
        tensor: The global tensor.
        use: What is done with its memory.

    Raises:
        UsageError: This kind of tensor cannot be used so.
        NameMismatch: The tensor contradicts its own metadata.
    """
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, ShardedTensor):
        return _shards(fqn, tensor, use)
    local = tensor
    if isinstance(tensor, DTensor):
        local = tensor.to_local() if tensor.device_mesh.get_coordinate() is not None else None
    if hasattr(local, "__create_chunk_list__"):
        return _own_chunks(fqn, tensor, local, use)
    require_kind(fqn, local, use)
    try:
        return local_parts(tensor)
    except (UsageError, NameMismatch) as error:
        raise type(error)(
            f"cannot {use.verb} {fqn}: {error.message}",
            hint="try a tensor with memory of its own for this rank's part",
        ) from error


def require_cast(fqn: str, stored: str, tensor: Any) -> None:
    """Raise `UnsupportedDtype` where torch does not copy values of a stored dtype into this tensor."""
    import torch

    source = getattr(torch, stored, None)
    if source == tensor.dtype:
        return
    try:
        torch.empty(1, dtype=tensor.dtype).copy_(torch.ones(1).to(source))
    except (RuntimeError, TypeError) as error:
        raise UnsupportedDtype(
            f"cannot load {fqn}: torch does not cast {stored} to {tensor.dtype} ({error})",
            hint=f"try a tensor of torch.{stored} there",
        ) from error


def on_meta(tensor: Any) -> bool:
    """Report whether a tensor must be replaced; for a ShardedTensor, `pieces` checks the shards."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return not isinstance(tensor, ShardedTensor) and bool(tensor.is_meta)


def on_memory(tensor: Any) -> Any:
    """Return an empty tensor like a meta one, where `torch.distributed.checkpoint` would put it."""
    import torch
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=_current_device())
    local = torch.empty_like(tensor.to_local(), device=tensor.device_mesh.device_type)
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _current_device() -> torch.device:
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()
    if dist.is_available() and dist.is_initialized():
        backends = dist.get_backend_config()  # "cpu:gloo,cuda:nccl"
        if "cpu:" in backends or accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def _shards(fqn: str, tensor: Any, use: MemoryUse) -> list[Piece]:
    """Return one piece per local shard; the offsets of a shard within a shard add up."""
    shard_pieces: list[Piece] = []
    for shard in tensor.local_shards():
        offset, sizes = tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
        if tuple(shard.tensor.shape) != sizes or not Box.full(tuple(tensor.size())).contains(
            Box(offset, sizes)
        ):
            raise NameMismatch(
                f"cannot {use.verb} {fqn}: its shard at {list(offset)} of {list(tensor.size())} must be "
                f"{list(sizes)} (got {list(shard.tensor.shape)})",
                hint="try a ShardedTensor whose shards match its metadata",
            )
        shard_pieces += [
            (local, Box(_sum(offset, box.offset), box.shape)) for local, box in pieces(fqn, shard.tensor, use)
        ]
    return shard_pieces


def _own_chunks(fqn: str, tensor: Any, local: Any, use: MemoryUse) -> list[Piece]:
    """Return one piece per chunk that a tensor lists itself, as torch/distributed/_checkpointable.py says.

    local: the tensor, or its local part: whichever lists chunks, such as torch's `LocalShardsWrapper`.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    if getattr(tensor, "placements", None) and any(p.is_partial() for p in tensor.placements):
        raise UsageError(
            f"cannot {use.verb} {fqn}: it holds a summand (Partial), not its values",
            hint="try a Shard or Replicate placement",
        )
    chunk_pieces: list[Piece] = []
    for number, chunk in enumerate(local.__create_chunk_list__()):
        offset, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if 0 in sizes:
            continue
        memory = local.__get_tensor_shard__(MetadataIndex(fqn, chunk.offsets, number))
        inside = len(offset) == tensor.dim() and Box.full(tuple(tensor.size())).contains(Box(offset, sizes))
        if tuple(memory.shape) != sizes or not inside:
            raise NameMismatch(
                f"cannot {use.verb} {fqn}: its chunk at {list(offset)} of {list(tensor.size())} must be "
                f"{list(sizes)} (got {list(memory.shape)})",
                hint="try a tensor whose chunks match what it lists",
            )
        chunk_pieces += [
            (part, Box(_sum(offset, box.offset), box.shape)) for part, box in pieces(fqn, memory, use)
        ]
    return chunk_pieces


def require_kind(fqn: str, tensor: Any, use: MemoryUse = FILL) -> None:
    """Raise `UsageError` for a tensor whose memory cannot be used so; None passes."""
    import torch
    from torch._subclasses import FakeTensor

    if tensor is None:
        return
    reason = ""
    if isinstance(tensor, FakeTensor):
        reason = "it is a FakeTensor, which has no memory"
    elif torch.nn.parameter.is_lazy(tensor):
        reason = "its parameter has no shape yet"
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        reason = f"the memory layout of {type(tensor).__name__} is unknown"
    elif tensor.is_quantized:
        reason = f"it is quantised ({tensor.dtype})"
    elif tensor.is_nested or tensor.layout != torch.strided:
        reason = f"its layout is {'nested' if tensor.is_nested else tensor.layout}"
    elif use.writes and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        reason = "several of its elements share one place in memory (an expanded tensor)"
    elif use.writes and tensor.is_inference() and not torch.is_inference_mode_enabled():
        reason = "it was made in inference mode, and cannot be changed outside"
    if reason:
        raise UsageError(
            f"cannot {use.verb} {fqn}: {reason}",
            hint="try a tensor with memory of its own, or leave it out of the state dict",
        )


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
