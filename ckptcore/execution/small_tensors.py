"""Read small tensors many at a time.

A tensor of a few KiB costs more in Python than its bytes do. Many of them are torch zips that are equal but
for their payloads: these are read side by side into one buffer, compared with a template in a few array
operations, and verified. Everything else, and everything that does not match, is left to the reader of single
chunks, which also reports what is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckptcore.core.manifest import Envelope, Ints
from ckptcore.encodings.torchzip.templates import AlikeZips
from ckptcore.errors import CkptError
from ckptcore.planning.file_plan import PLACE, FilePlan
from ckptcore.planning.tiles import LiteralPart, TensorPart
from ckptcore.reading.checksums import Records
from ckptcore.reading.gather import Bytes
from ckptcore.store import Store

_LARGEST = 32 << 10  # bytes of an item; larger ones are worth a call of their own
_FEWEST = 8  # items of one length: for less, array operations cost more than they save


class SmallTensors:
    """The tensors of an output file that are complete small items, first rows to last. Safe for threads."""

    def __init__(self, plan: FilePlan, source: Store, records: Records) -> None:
        self._plan, self._source, self._records = plan, source, records
        self._place, self._fits = _suitable(plan)
        self._nbytes: list[int] = np.where(self._fits, plan.columns.nbytes, -1).tolist()
        # Over a network, blocks are read ahead, and what came altered is asked for once more.
        self.any = source.local is not None and bool(self._fits.any())

    def read(
        self, parts: Sequence[tuple[int, LiteralPart | TensorPart]], buffer: Bytes, scratch: Bytes
    ) -> frozenset[int]:
        """Fill the parts of a job that are small tensors.

        Args:
            parts: Parts with their first bytes in ``buffer``.
            buffer: Of the job.
            scratch: Working memory.

        Returns:
            The tensors that are filled and verified.
        """
        nbytes = self._nbytes
        small_parts = [
            (part.tensor, first_byte)
            for first_byte, part in parts
            if isinstance(part, TensorPart) and nbytes[part.tensor] == part.nbytes
        ]
        if len(small_parts) < _FEWEST:
            return frozenset()
        tensors, begins = np.array(small_parts, np.int64).T
        first = self._plan.reads.first
        counts = first[tensors + 1] - first[tensors]
        owner = np.repeat(np.arange(len(tensors)), counts)
        ends = np.cumsum(counts)
        rows = np.arange(len(owner)) + (first[tensors] - ends + counts)[owner]
        places = begins[owner] + self._place[rows]
        good = np.zeros(len(rows), np.bool_)
        for group in self._groups(rows, len(scratch)):
            good[group] = self._read_alike(rows[group], places[group], buffer, scratch)
        self._records.prove(self._plan.number[self._plan.reads.item[rows[good]]].tolist())
        missing = np.bincount(owner[~good], minlength=len(tensors)) > 0
        return frozenset(tensors[~missing].tolist())

    def _groups(self, rows: Ints, room: int) -> Iterator[Ints]:
        """Yield positions of rows whose items have one length and shape, as many as fit ``room``."""
        plan = self._plan
        items = plan.reads.item[rows]
        length, shape = plan.items.length[items], plan.reads.shape[rows]
        dtype = plan.columns.source_dtype[plan.reads.tensor[rows]]
        # Within a group in the order of the source: neighbours are read at once.
        order = np.lexsort((plan.items.start[items], plan.items.file[items], *shape.T, dtype, length))
        key = np.column_stack((length, dtype, shape))[order]
        bounds = np.flatnonzero((key[1:] != key[:-1]).any(axis=1)) + 1
        for group in np.split(order, bounds):
            step = room // int(length[group[0]])
            for start in range(0, len(group), max(step, 1)):
                batch = group[start : start + step]
                if len(batch) >= _FEWEST:
                    yield batch

    def _read_alike(self, rows: Ints, places: Ints, buffer: Bytes, scratch: Bytes) -> npt.NDArray[np.bool_]:
        """Read items of one length, in file order, into their places; report which ones are verified."""
        plan = self._plan
        items = plan.reads.item[rows]
        length = int(plan.items.length[items[0]])
        content = scratch.data[: len(rows) * length]
        first, columns = int(plan.reads.tensor[rows[0]]), plan.columns
        dtype = columns.dtypes[columns.source_dtype[first]]
        shape = tuple(plan.reads.shape[rows[0], : columns.rank[first]].tolist())
        try:
            self._read_runs(plan.items.file[items], plan.items.start[items], length, content)
            begin, good = AlikeZips(content, length).payloads(dtype, shape, columns.names[first])
        except CkptError:  # reading one by one finds which item it is, and reports it
            return np.zeros(len(rows), np.bool_)
        if good.any():
            nbytes = _nbytes(plan, rows[:1])
            target = buffer.data
            for n, place in zip(np.flatnonzero(good).tolist(), places[good].tolist(), strict=True):
                start = n * length + begin
                target[place : place + nbytes] = content[start : start + nbytes]
        return good

    def _read_runs(self, files: Ints, starts: Ints, length: int, content: memoryview) -> None:
        """Read items, each run of adjacent ones at once."""
        apart = (files[1:] != files[:-1]) | (starts[1:] != starts[:-1] + length)
        bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(files)]
        for first, last in pairwise(bounds):
            path = self._plan.files[int(files[first])].path
            self._source.read_into(path, int(starts[first]), content[first * length : last * length])


def _nbytes(plan: FilePlan, rows: Ints) -> int:
    width = plan.boxes[2][plan.reads.tensor[rows]]
    return int((plan.reads.shape[rows].prod(axis=1) * width)[0])


def _suitable(plan: FilePlan) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return (first byte of each read in its tensor, which tensors are small items from end to end)."""
    reads, items = plan.reads, plan.items
    tensor_count = len(plan.columns)
    fits = np.zeros(tensor_count, np.bool_)
    if not len(reads) or "" not in items.codecs:
        return np.zeros(len(reads), np.int64), fits
    of, (lo, hi, width) = reads.tensor, plan.boxes
    extent = hi - lo
    # A chunk is one run of its tensor where it is complete in every dim but the first.
    entire = (reads.lo == lo[of]) & (reads.shape == extent[of])
    inside = (reads.lo >= lo[of]) & (reads.lo + reads.shape <= hi[of])
    good = entire[:, 1:].all(axis=1) & inside.all(axis=1) & (plan.op == PLACE)
    good &= (items.envelope[reads.item] == Envelope.TORCHZIP) & (items.length[reads.item] <= _LARGEST)
    good &= items.codec[reads.item] == items.codecs.index("")
    if reads.view is not None:
        good &= reads.view[:, 0] < 0
    numel = reads.shape.prod(axis=1)
    place = (reads.lo - lo[of])[:, :1].sum(axis=1) * reads.shape[:, 1:].prod(axis=1) * width[of]
    count = len(lo)
    read = np.bincount(of, weights=np.where(good, numel, 0), minlength=count)[:tensor_count]
    bad = np.bincount(of[~good], minlength=count)[:tensor_count] > 0
    fits = ~bad & (read == extent[:tensor_count].prod(axis=1)) & (read > 0)
    fits &= plan.columns.dtype == plan.columns.source_dtype
    fits[list(plan.derived)] = False
    return place, fits
