"""Fingerprint the tensors of a running program, each rank its own boxes, where they are.

A fingerprint is a sum over elements (`ckptcore.fingerprints.sums`), so each rank sums its boxes on their
device, and ranks exchange sums alone. Equal boxes of several ranks count once, and must have equal sums: a
bit that changed in one replica is found, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptcore.core.box import Box
from ckptcore.core.coverage import is_tiled
from ckptcore.core.dtype import BY_NAME
from ckptcore.errors import CkptError, DamagedCheckpoint, NameMismatch, UnsupportedDtype, UsageError, finding
from ckptcore.fingerprints.device_sums import DeviceSums
from ckptcore.fingerprints.result import Fingerprints
from ckptcore.fingerprints.sums import (
    ZERO,
    Sum,
    add,
    box_sum,
    checkpoint_fingerprint,
    map_digest,
    tensor_fingerprint,
)
from ckptcore.loading.live_tensors import SUM, pieces
from ckptcore.loading.load_into import live_state
from ckptcore.reading.fill_memory import PIECE, threads_for
from ckptcore.reading.gather import index_of
from ckptcore.utils.isolation import error_of
from ckptcore.utils.workers import run_jobs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class BoxSum(NamedTuple):
    """The sum of one box, and the first rank that holds it."""

    box: Box
    total: Sum
    rank: int


@dataclass(slots=True)
class SummedTensor:
    """What is known of a tensor: its boxes on this rank, or on all ranks that were merged."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[BoxSum]


Summed = dict[str, SummedTensor]  # by FQN


def fingerprint_state(state_dict: Any, mesh: DeviceMesh | None, *, alone: bool = False) -> Fingerprints:
    """Fingerprint a live state dict; see `ckptcore.fingerprint_state`."""
    own_parts = partial(_parts_of_state, state_dict)
    return _fingerprints(_summed(own_parts(0))) if alone else fingerprint_parts(own_parts, mesh)


def fingerprint_parts(own_parts: Callable[[int], LiveParts], mesh: DeviceMesh | None) -> Fingerprints:
    """Sum the parts of each rank, and exchange the sums.

    Args:
        own_parts: Called with the number of this rank; returns what it holds.
        mesh: The ranks; None: all of the default process group, or this process alone where there is none.

    Raises:
        CkptError: What `own_parts` raises on any rank, or what `fingerprint_state` raises.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return _fingerprints(_merged([_summed(own_parts(0))]))
    if mesh is not None and mesh.get_coordinate() is None:
        raise UsageError(
            "cannot fingerprint: this rank is not in the mesh", hint="call it on ranks of the mesh"
        )
    rank = dist.get_rank()
    try:
        outcome: Summed | CkptError = _summed(own_parts(rank))
    except Exception as error:  # the other ranks wait for this one
        outcome = error_of(error)
    # A mesh has groups of single axes: along one after another, sums reach every rank.
    for group in [None] if mesh is None else mesh.get_all_groups():
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, outcome, group)
        outcome = _merged_or_error(gathered)
    if isinstance(outcome, CkptError):
        raise outcome
    return _fingerprints(outcome)


def _merged_or_error(gathered: list[Summed | CkptError]) -> Summed | CkptError:
    """Merge what ranks know. An error is handed on, so that every rank of a mesh raises it."""
    summed: list[Summed] = []
    for outcome in gathered:
        if isinstance(outcome, CkptError):
            return outcome
        summed.append(outcome)
    try:
        return _merged(summed)
    except CkptError as error:
        return error


def _merged(parts: Iterable[Summed]) -> Summed:
    """Merge what several ranks know.

    Raises:
        NameMismatch: Ranks have different tensors of one name.
        DamagedCheckpoint: Ranks have different values in equal boxes.
    """
    merged: Summed = {}
    totals: dict[tuple[str, Box], BoxSum] = {}
    for part in parts:
        for fqn, tensor in part.items():
            merged_tensor = merged.setdefault(fqn, SummedTensor(tensor.dtype, tensor.shape, []))
            if (merged_tensor.dtype, merged_tensor.shape) != (tensor.dtype, tensor.shape):
                raise NameMismatch(
                    f"cannot fingerprint {fqn}: it is {tensor.dtype} {list(tensor.shape)} on one rank, and "
                    f"{merged_tensor.dtype} {list(merged_tensor.shape)} on another",
                    hint="try a state dict of equal names for equal tensors, or leave it out",
                )
            for summed_box in tensor.boxes:
                copy = totals.setdefault((fqn, summed_box.box), summed_box)
                if copy is summed_box:
                    merged_tensor.boxes.append(summed_box)
                elif copy.total != summed_box.total:
                    message = (
                        f"cannot fingerprint {fqn}: ranks {copy.rank} and {summed_box.rank} have different "
                        f"values of its box at {list(summed_box.box.offset)} with "
                        f"{list(summed_box.box.shape)} elements"
                    )
                    raise DamagedCheckpoint(
                        message,
                        hint="leave it out where ranks have values of their own; otherwise replicas diverged",
                        findings=(finding("replica-mismatch", "bytes", message, fqn=fqn),),
                    )
    return merged


def _fingerprints(summed: Summed) -> Fingerprints:
    """Add the boxes of each tensor up.

    Raises:
        UsageError: The boxes of a tensor are not exactly its elements.
    """
    tensors = []
    for fqn, tensor in summed.items():
        if not is_tiled(tensor.shape, [summed_box.box for summed_box in tensor.boxes]):
            raise UsageError(
                f"cannot fingerprint {fqn}: {len(tensor.boxes)} parts on these ranks do not hold each "
                f"element of {list(tensor.shape)} exactly once",
                hint="name a mesh of all ranks that hold a part, or leave it out",
            )
        total = ZERO
        for summed_box in tensor.boxes:
            total = add(total, summed_box.total)
        tensors.append(
            (fqn, tensor.dtype, tensor.shape, tensor_fingerprint(tensor.dtype, tensor.shape, total))
        )
    tensors.sort()
    return Fingerprints(checkpoint_fingerprint(tensors), map_digest((), (), ()), tuple(tensors), (), 0)


class _Part(NamedTuple):
    """A box of a tensor in memory of this rank."""

    fqn: str
    number: int
    memory: Any


class LiveParts:
    """The tensors that a rank holds, or parts of them, and their memory. rank: its number."""

    def __init__(self, rank: int) -> None:
        self.summed: Summed = {}
        self.parts: list[_Part] = []
        self._rank = rank

    def add_tensor(self, fqn: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Add a tensor, of which this rank may hold nothing.

        Raises:
            UnsupportedDtype: No checkpoint has tensors of this dtype.
        """
        if dtype not in BY_NAME:
            raise UnsupportedDtype(
                f"cannot fingerprint {fqn}: it is {dtype}", hint="leave it out of the state dict"
            )
        self.summed[fqn] = SummedTensor(dtype, shape, [])

    def add_part(self, fqn: str, box: Box, memory: Any) -> None:
        """Add a box of a tensor. memory: a torch tensor of its shape."""
        if box.numel:
            boxes = self.summed[fqn].boxes
            self.parts.append(_Part(fqn, len(boxes), memory.detach()))
            boxes.append(BoxSum(box, ZERO, self._rank))


def _parts_of_state(state_dict: Any, rank: int) -> LiveParts:
    """Return what this rank holds of a state dict."""
    import torch

    own = LiveParts(rank)
    for leaf in live_state(state_dict, SUM).leaves:
        if not isinstance(leaf.value, torch.Tensor):
            continue
        dtype = str(leaf.value.dtype).removeprefix("torch.")
        own.add_tensor(leaf.fqn, dtype, tuple(leaf.value.size()))
        for memory, box in pieces(leaf.fqn, leaf.value, SUM):
            own.add_part(leaf.fqn, box, memory)
    return own


def _summed(own: LiveParts) -> Summed:
    """Sum the parts of this rank, where they are."""
    import torch

    summed, parts = own.summed, own.parts
    for device in {part.memory.device for part in parts if part.memory.device.type == "cuda"}:
        torch.cuda.synchronize(device)  # what the caller has begun with this memory
    lock = threading.Lock()

    def prepare() -> Callable[[tuple[_Part, Box]], None]:
        sums = _Summing()

        def do(job: tuple[_Part, Box]) -> None:
            (fqn, number, memory), tile = job
            tensor = summed[fqn]
            box = tensor.boxes[number].box
            total = sums.box_sum(tensor, tile, memory[index_of(tile, box)])
            with lock:
                summed_box = tensor.boxes[number]
                tensor.boxes[number] = summed_box._replace(total=add(summed_box.total, total))

        return do

    run_jobs(_tiles(summed, parts), prepare, threads=threads_for(part.memory for part in parts))
    return summed


def _tiles(summed: Summed, parts: Iterable[_Part]) -> Iterator[tuple[_Part, Box]]:
    """Cut parts for several threads, and where their elements are copied beside each other."""
    for part in parts:
        tensor = summed[part.fqn]
        box = tensor.boxes[part.number].box
        if part.memory.device.type != "cpu" and part.memory.is_contiguous():
            yield part, box
        else:
            for tile in box.tiles(PIECE // BY_NAME[tensor.dtype].itemsize):
                yield part, tile


class _Summing:
    """Sums in one thread, on any device."""

    def __init__(self) -> None:
        self._on_device: dict[Any, DeviceSums] = {}

    def box_sum(self, tensor: SummedTensor, box: Box, values: Any) -> Sum:
        """Return what a box adds to the sum of its tensor. values: its elements, a torch tensor."""
        import torch

        flat = values.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        if flat.device.type == "cpu":
            return box_sum(tensor.dtype, tensor.shape, box, flat.numpy())
        sums = self._on_device.get(flat.device)
        if sums is None:
            sums = self._on_device[flat.device] = DeviceSums(torch, str(flat.device))
        return sums.box_sum(tensor.dtype, tensor.shape, box, flat)
