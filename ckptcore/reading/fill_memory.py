"""Fill the memory of live tensors from a checkpoint, with a thread for each core of this process.

Memory of the stored dtype on the CPU is read into directly, in large reads. Anything else goes through reused
buffers: each thread casts into one of them, and hands it over. For a device, buffers are pinned, and each
thread has two: one is transferred while the other is filled.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptcore.core.box import Box
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Manifest
from ckptcore.reading.box_reader import BoxReader, walk
from ckptcore.reading.checksums import Records
from ckptcore.reading.gather import Bytes, index_of, stored_order, tile_view
from ckptcore.reading.rereading import rereading
from ckptcore.store import Store
from ckptcore.utils.workers import usable_cores

PIECE = 16 << 20  # bytes of a read, and of a buffer
_MOST_THREADS = 16


class Fill(NamedTuple):
    """Box ``want`` of tensor ``row``, and the memory ``out``, a torch tensor of its shape, that gets it."""

    row: int
    want: Box
    out: Any


def fill_memory(
    manifest: Manifest,
    store: Store,
    fills: Sequence[Fill],
    *,
    verify: bool,
    copies: bool = False,
    records: Records | None = None,
) -> None:
    """Fill memory, casting and moving as needed; several threads share large tensors.

    Args:
        manifest: The checkpoint.
        store: Where its files are.
        fills: What to fill. Where memory overlaps, the last one wins, as if they were filled in order.
        verify: Whether stored checksums are verified: those of the records of whose tensors everything is
            filled, and of those that are read completely.
        copies: Whether to compare copies, as `validate` does.
        records: The checkpoint's records, where it is read in several calls; then ``verify`` is theirs, and
            the caller finishes them.

    Raises:
        DamagedCheckpoint: A checksum fails, or copies differ; memory is partly filled.
    """
    fills = [fill for fill in fills if fill.want.numel]
    own_records = records is None
    if records is None:
        records = Records(store, len(manifest.items), verify)
    apart, shared = _apart(fills)
    # Memory that overlaps is filled by one thread, in order: the last fill of it must win.
    for group, threads in ((apart, threads_for(fill.out for fill in apart)), (shared, 1)):
        if group:
            _run(manifest, store, records, group, threads, copies)
    if own_records:
        records.finish(threads_for(fill.out for fill in fills), _completely_wanted(manifest, records, fills))


def _completely_wanted(manifest: Manifest, records: Records, fills: Sequence[Fill]) -> list[int]:
    """Return the partly read records of whose tensors everything was filled: slices, gaps, padding remain.

    Of a record whose tensors were filled in part, such as the rows of one rank, the rest is not read.
    """
    chunks, partly = manifest.chunks, np.array(records.partly, np.int64)
    if not len(partly):
        return []
    filled = Counter[int]()
    for row, want in {(fill.row, fill.want) for fill in fills}:
        filled[row] += want.numel
    rows_of_partly = np.isin(chunks.item, partly)
    rows = chunks.tensor[rows_of_partly].tolist()
    in_part = {row for row in set(rows) if filled[row] < prod(manifest.tensors[row].shape)}
    left_out = {
        item for item, row in zip(chunks.item[rows_of_partly].tolist(), rows, strict=True) if row in in_part
    }
    return [number for number in partly.tolist() if number not in left_out]


def threads_for(tensors: Iterable[Any]) -> int:
    """Return the number of threads for some memory: the cores, shared by the processes of a job here."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # as torchrun has it
    cores = usable_cores() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
    nbytes: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return max(1, min(cores, _MOST_THREADS, nbytes // PIECE))


def _apart(fills: Sequence[Fill]) -> tuple[list[Fill], list[Fill]]:
    """Return the fills whose memory is their own, and the others, each in order."""
    spans = []
    for number, fill in enumerate(fills):
        out = fill.out
        reach = sum((n - 1) * abs(s) for n, s in zip(out.shape, out.stride(), strict=True))
        begin = out.data_ptr()
        spans.append((str(out.device), begin, begin + (reach + 1) * out.element_size(), number))
    spans.sort()
    shared, end, last = set[int](), 0, -1
    device = ""
    for where, begin, stop, number in spans:
        if where == device and begin < end:
            shared |= {last, number}
        if where != device or stop > end:
            device, end, last = where, stop, number
    numbered = list(enumerate(fills))
    return [f for n, f in numbered if n not in shared], [f for n, f in numbered if n in shared]


class _Open:
    """One fill while threads read its boxes; its reader is there from the first to the last box."""

    def __init__(self, manifest: Manifest, records: Records, fill: Fill, copies: bool) -> None:
        self.fill, self.dtype = fill, manifest.tensors[fill.row].dtype
        self.reader = BoxReader(manifest, fill.row, records, once=False, copies=copies)


def _run(
    manifest: Manifest, store: Store, records: Records, fills: Sequence[Fill], threads: int, copies: bool
) -> None:
    """Fill all memory with several threads, and close each tensor's reader after its last box."""
    import torch

    # What came altered over a network is read again with its whole tensor.
    cuts = store.local is not None
    inference = torch.is_inference_mode_enabled()  # of this thread alone
    devices = {fill.out.device for fill in fills if fill.out.device.type == "cuda"}
    for device in devices:
        torch.cuda.synchronize(device)  # what the caller has begun with this memory
    all_buffers: list[_ThreadBuffers] = []

    def prepare() -> Callable[[_Open, Box], None]:
        all_buffers.append(buffers := _ThreadBuffers())

        def read(open_fill: _Open, box: Box) -> None:
            with torch.inference_mode() if inference else torch.no_grad():
                buffers.fill(open_fill, box)

        return read

    try:
        walk(
            (_Open(manifest, records, fill, copies) for fill in fills),
            lambda open_fill: _boxes(manifest, open_fill) if cuts else (open_fill.fill.want,),
            lambda open_fill: open_fill.reader.close(),
            prepare,
            threads,
        )
    finally:
        for buffers in all_buffers:
            buffers.wait_until_complete()


def _boxes(manifest: Manifest, open_fill: _Open) -> Iterator[Box]:
    """Yield the boxes that a fill is cut into: large reads, and one where rows do not follow in storage."""
    row, want, out = open_fill.fill
    order = stored_order(manifest.chunks, row, len(want.shape), open_fill.reader.strides)
    if order.strides is not None:
        return iter((want,))
    # Elements fit a buffer before and after a cast: more than that would be new memory for every box.
    return want.tiles(PIECE // max(BY_NAME[open_fill.dtype].itemsize, out.element_size()))


class _ThreadBuffers:
    """The buffers of one thread."""

    def __init__(self) -> None:
        self._scratch, self._plain = _untouched(PIECE), _untouched(PIECE)
        self._rings: dict[Any, _Ring] = {}

    @rereading
    def fill(self, open_fill: _Open, box: Box) -> None:
        """Read a box into its part of the memory."""
        import torch

        _, want, memory = open_fill.fill
        out, kind = memory[index_of(box, want)], getattr(torch, open_fill.dtype)
        if out.device.type == "cpu" and out.dtype == kind and out.is_contiguous() and _holds_its_values(out):
            open_fill.reader.read(box, integers_of(out, open_fill.dtype), self._scratch)
            return
        ring = self._rings.get(out.device)
        if ring is None:
            ring = self._rings[out.device] = _Ring(out.device)
        staged = ring.next(box.shape, out.dtype)
        # Values of another dtype are cast here, as `Tensor.copy_` does it for memory of a device.
        values = staged if out.dtype == kind else _tensor(self._plain, box.shape, kind)
        open_fill.reader.read(box, integers_of(values, open_fill.dtype), self._scratch)
        if values is not staged:
            staged.copy_(values)
        ring.send(staged, out)

    def wait_until_complete(self) -> None:
        """Wait until everything has arrived."""
        for ring in self._rings.values():
            ring.wait_until_complete()


class _Ring:
    """Two buffers for memory of one device, each handed over while the other is filled.

    On the CPU, and on devices without streams of torch.cuda, a copy has ended when it returns.

    Args:
        device: A `torch.device`.
    """

    def __init__(self, device: Any) -> None:
        import torch

        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: list[Any] = [None, None]
        self._handed: list[Any] = [None, None]  # events behind the last copy from each
        self._turn = 0

    def next(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a tensor over the next buffer, once its last copy has ended."""
        import torch

        self._turn = turn = 1 - self._turn
        if self._handed[turn] is not None:
            self._handed[turn].synchronize()
        if self._buffers[turn] is None:
            pinned = self._stream is not None
            self._buffers[turn] = torch.empty(
                PIECE, dtype=torch.uint8, device="cpu", pin_memory=pinned
            ).numpy()
        return _tensor(self._buffers[turn], shape, dtype)

    def send(self, staged: Any, out: Any) -> None:
        """Copy a tensor of `next` to its memory."""
        import torch

        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            out.copy_(staged, non_blocking=self._stream is not None)
            if self._stream is not None:
                self._handed[self._turn] = self._stream.record_event()

    def wait_until_complete(self) -> None:
        """Wait for every copy."""
        if self._stream is not None:
            self._stream.synchronize()


def _untouched(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def _tensor(buffer: Bytes, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a tensor over the first bytes of a buffer, or over new memory where that is too small."""
    import torch

    nbytes = prod(shape) * dtype.itemsize
    flat = torch.from_numpy(buffer if nbytes <= len(buffer) else _untouched(nbytes))
    return flat[:nbytes].view(dtype).reshape(shape)


def _holds_its_values(tensor: Any) -> bool:
    """Report whether the bytes are the values: torch may keep a conjugation or a sign as a flag."""
    return not (tensor.is_conj() or tensor.is_neg())


def integers_of(tensor: Any, dtype: str) -> npt.NDArray[Any]:
    """Return a numpy view of a contiguous CPU tensor's memory, as integers of the element's width."""
    import torch

    if not tensor.numel():
        return np.empty(tuple(tensor.shape), np.uint8)
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    assert BY_NAME[dtype].itemsize * tensor.numel() == flat.nbytes
    return tile_view(flat, tuple(tensor.shape), dtype)
