"""Tell a remote source which ranges the files of a plan will read, in the order of their use.

Boxes that cut a chunk's first dim read a range of its item; what is stored around the elements (headers of a
torch zip) is of unknown place, so the range is that much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ckptcore.core.manifest import Items
from ckptcore.errors import BudgetTooSmall, UsageError
from ckptcore.execution.parts import FilePart
from ckptcore.execution.plan_run import PlanRun
from ckptcore.execution.tiles import Budget
from ckptcore.planning.file_plan import COMPARE, FilePlan
from ckptcore.planning.request import Settings
from ckptcore.reading.checksums import Records
from ckptcore.reading.expected_items import bare_files
from ckptcore.store.ahead import ExpectedReads, Floats, Ints, ReadsAhead, joined

_MOST_ROWS = 4_000_000  # ranges that are declared at once, 60 bytes each
_MOST_AROUND = 64 << 10  # bytes of headers around the elements of one item


def expect_files(
    run: PlanRun, indices: Sequence[int], settings: Settings, records: Records, part: FilePart | None = None
) -> Budget:
    """Declare the reads of output files, and return the budget that is left for their tiles.

    Args:
        run: The plan.
        indices: The files, in the order in which they are written.
        settings: Memory, and whether copies are compared.
        records: Gets the items that only the store can prove.
        part: The part of the one file that is written.
    """
    budget, store = Budget.of(settings), run.source
    if not isinstance(store, ReadsAhead):
        return budget
    window = settings.memory // 2
    if part is None:  # parts are cut for all of the memory
        try:
            budget = Budget.of(replace(settings, memory=settings.memory - window))
        except (BudgetTooSmall, UsageError):
            return budget
    parts, rows = [], 0
    for index in indices:
        plan = run.load(index)
        reads = planned_reads(plan, compares=settings.verify, part=part)
        rows += len(reads)
        if rows > _MOST_ROWS:
            break  # the rest is read as it comes
        parts.append(reads)
        bare = reads.bare
        numbers = plan.number[[plan.files[f].path in bare for f in plan.items.file.tolist()]]
        records.await_proof(numbers.tolist())
    store.expect(joined(parts), window)
    return budget


def prove_files(run: PlanRun, indices: Sequence[int], records: Records) -> None:
    """Compare what was read of a remote source with the store's checksums, and settle the records.

    Raises:
        StorageTrouble: Bytes were altered on the way here.
        DamagedCheckpoint: The store's bytes do not match its checksum.
    """
    store = run.source
    if not isinstance(store, ReadsAhead):
        return
    proven = store.prove().proven
    numbers: set[int] = set()
    for index in indices if proven else ():
        plan = run.load(index)
        good = [plan.files[f].path in proven for f in plan.items.file.tolist()]
        numbers.update(plan.number[good].tolist())
    records.settle(numbers)


def planned_reads(plan: FilePlan, *, compares: bool = True, part: FilePart | None = None) -> ExpectedReads:
    """Return the ranges that a file plan reads; their unit of time is a tensor."""
    reads, items = plan.reads, plan.items
    of = reads.tensor
    lo, hi, width = plan.boxes
    begin, end = np.maximum(reads.lo, lo[of]), np.minimum(reads.lo + reads.shape, hi[of])
    keep = (end > begin).all(axis=1)
    if not compares:
        keep &= plan.op != COMPARE
    if part is not None:
        keep &= _inside(plan, part)[of]
    start, length = items.start[reads.item], items.length[reads.item]
    first, last, nbytes = _flat(reads.lo, reads.shape, begin, end, width[of])
    around = length - nbytes
    plain = (items.codec[reads.item] == _plain_codec(items)) & (around >= 0) & (around <= _MOST_AROUND)
    if reads.view is not None:
        plain &= reads.view[:, 0] < 0
    first_byte = start + np.where(plain, first, 0)
    last_byte = np.where(plain, start + around + last, start + length)
    begins, ends = _times(plan, of, lo, hi, begin, end)
    return ExpectedReads(
        tuple(f.path for f in plan.files),
        items.file[reads.item][keep],
        first_byte[keep],
        last_byte[keep],
        begins[keep],
        ends[keep],
        bare_files(items, plan.files),
    )


def _flat(lo: Ints, shape: Ints, begin: Ints, end: Ints, width: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (first byte, byte behind the last, bytes) of boxes in their row-major chunks."""
    nbytes = np.prod(shape, axis=1) * width
    steps = np.ones_like(shape)
    if shape.shape[1] > 1:
        steps[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    first = ((begin - lo) * steps).sum(axis=1) * width
    last = (((end - 1 - lo) * steps).sum(axis=1) + 1) * width
    return first, last, nbytes


def _times(plan: FilePlan, of: Ints, lo: Ints, hi: Ints, begin: Ints, end: Ints) -> tuple[Floats, Floats]:
    """Return when each read begins and ends: the number of its tensor, and how far down its rows it is."""
    place = np.arange(len(lo), dtype=np.float64)
    own = len(plan.columns)
    for number, node in plan.derived.items():  # inputs are read when what is computed from them is made
        for i in node.inputs:
            place[own + i] = number
    if not lo.shape[1]:
        return place[of], place[of] + 1
    rows = np.maximum(hi[of, 0] - lo[of, 0], 1)
    first: npt.NDArray[np.float64] = place[of] + (begin[:, 0] - lo[of, 0]) / rows
    last: npt.NDArray[np.float64] = place[of] + (end[:, 0] - lo[of, 0]) / rows
    return first, last


def _inside(plan: FilePlan, part: FilePart) -> npt.NDArray[np.bool_]:
    """Report which tensors have bytes in a part of the file; inputs of others are not known, so all."""
    found = np.ones(len(plan.columns) + len(plan.inputs), bool)
    for number, tensor in enumerate(plan.tensors):
        found[number] = tensor.start < part.end and tensor.start + tensor.nbytes > part.begin
    return found


def _plain_codec(items: Items) -> int:
    return items.codecs.index("") if "" in items.codecs else -1
