"""Tell a remote source which ranges the files of a plan will read, in the order of their use.

Boxes that cut a chunk's first dim read a range of its item; what is stored around the elements (headers of a
torch zip) is of unknown place, so the range is that much longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ckptcore.errors import BudgetTooSmall, UsageError
from ckptcore.execution.parts import FilePart
from ckptcore.execution.plan_run import PlanRun
from ckptcore.execution.source_order import (
    FilePieces,
    RowReads,
    SourceOrder,
    can_follow,
    cut_pieces,
    follow_source,
)
from ckptcore.planning.file_plan import COMPARE, FilePlan
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget
from ckptcore.reading.checksums import Records
from ckptcore.reading.expected_items import bare_files
from ckptcore.store.ahead import ExpectedReads, Floats, Ints, ReadsAhead, joined, merged
from ckptcore.store.objects.blocks import BLOCK, cut_into_blocks, fits, plan_blocks

MOST_ROWS = 4_000_000  # ranges that are declared at once, 60 bytes each
_MOST_AROUND = 64 << 10  # bytes of headers around the elements of one item
_LEAST_TILES, _MOST_TILES = 1 << 20, 64 << 20  # bytes of tiles of outputs that follow their source
_LEAST_BAND = 1 << 20
_WORTH = 0.8  # of the requests in file order: for less gain, files are made one after another


@dataclass(frozen=True, slots=True)
class ReadSchedule:
    """When an S3 source is read, and in which requests.

    Attributes:
        budget: Memory that is left for the tiles.
        reads: What is expected; None where memory is too small for that.
        window: Bytes of memory for what is read ahead.
        order: Pieces of output files in the order of their source; None for file order.
    """

    budget: Budget
    reads: ExpectedReads | None
    window: int
    order: SourceOrder | None = None


def schedule_reads(
    files: Iterable[FilePlan], settings: Settings, *, uploads: bool, part: FilePart | None = None
) -> ReadSchedule:
    """Choose the order in which output files are made, so that a source on S3 is read in few requests.

    That is file order, unless its blocks would be smaller than a block should be. Then outputs that are
    uploaded by handles follow their source.

    Args:
        files: Plans of the files, in the order of their numbers.
        settings: Memory, and whether copies are compared.
        uploads: Whether the files are uploaded by handles.
        part: The part of the one file that is written.
    """
    # Half for blocks that are read ahead, half for tiles.
    window = settings.memory // 2
    try:  # parts are cut for all of the memory
        rest = settings.memory - (window if part is None else 0)
        budget = Budget.of(settings.within(rest))
    except (BudgetTooSmall, UsageError):
        return ReadSchedule(Budget.of(settings), None, 0)
    parts, pieces, unordered_reads, rows = list[ExpectedReads](), list[FilePieces](), list[ExpectedReads](), 0
    for plan in files:
        file_reads = row_reads(plan, compares=settings.verify, part=part)
        rows += len(file_reads.file)
        if rows > MOST_ROWS:
            break  # the rest is read as it comes
        parts.append(_in_file_order(plan, file_reads))
        cut = cut_pieces(plan, file_reads) if uploads and part is None and can_follow(plan) else None
        if cut is not None and len(cut.tensor):
            pieces.append(cut)
        else:
            unordered_reads.append(parts[-1])
    reads = joined(parts)
    schedule = ReadSchedule(budget, reads, window)
    # Memory is enough for large blocks in file order: nothing would be gained.
    if not pieces or rows > MOST_ROWS or fits(cut_into_blocks(reads, BLOCK), window):
        return schedule
    followed = _following(pieces, unordered_reads, reads.bare, settings)
    if followed is None:
        return schedule
    # File order needs smaller blocks, so at least as many as these.
    worth = followed[1] <= _WORTH * len(cut_into_blocks(reads, BLOCK // 2))
    if worth or followed[1] <= _WORTH * len(plan_blocks(reads, window)):
        return followed[0]
    return schedule


def expect_files(
    run: PlanRun, indices: Sequence[int], settings: Settings, records: Records, part: FilePart | None = None
) -> tuple[Budget, SourceOrder | None]:
    """Declare the reads of output files.

    Args:
        run: The plan.
        indices: The files, in the order in which they are written.
        settings: Memory, and whether copies are compared.
        records: Gets the items that only the store can prove.
        part: The part of the one file that is written.

    Returns:
        The memory that is left for tiles, and the order of the files' pieces if it is not file order.
    """
    store = run.source
    if not isinstance(store, ReadsAhead):
        return Budget.of(settings), None

    def plans() -> Iterator[FilePlan]:
        for index in indices:
            plan = run.load(index)
            bare = bare_files(plan.items, plan.files)
            numbers = plan.number[[plan.files[f].path in bare for f in plan.items.file.tolist()]]
            yield plan
            # Who takes plans stops at the first with too many reads to declare: the store does not prove what
            # that one reads.
            records.await_proof(numbers.tolist())

    schedule = schedule_reads(plans(), settings, uploads=run.uploads is not None, part=part)
    if schedule.reads is not None:
        store.expect(schedule.reads, schedule.window)
    return schedule.budget, schedule.order


def _following(
    pieces: Sequence[FilePieces],
    unordered_reads: Sequence[ExpectedReads],
    bare: frozenset[str],
    settings: Settings,
) -> tuple[ReadSchedule, int] | None:
    """Return the schedule in which outputs follow their source, and its requests; None if none fits."""
    tiles = min(max(settings.memory // 8, _LEAST_TILES), _MOST_TILES)
    try:
        budget = Budget.of(settings.within(tiles))
    except (BudgetTooSmall, UsageError):
        return None
    # Halved until blocks of one band and open parts fit the memory together.
    band = BLOCK
    while band >= _LEAST_BAND:
        order, timed = follow_source(pieces, band)
        window = settings.memory - tiles - order.open_bytes
        if window > 0:
            rows = zip(pieces, timed.begins, timed.ends, timed.band, strict=True)
            piece_reads = merged([_at(p.reads, b.astype(float), e.astype(float), n) for p, b, e, n in rows])
            # Files that cannot follow come behind all bands.
            last = int(piece_reads.band.max(initial=0)) + 1 if piece_reads.band is not None else 1
            rest = [
                replace(file_reads, band=np.full(len(file_reads), last)) for file_reads in unordered_reads
            ]
            reads = replace(joined([piece_reads, *rest]), bare=bare)
            table = cut_into_blocks(reads, BLOCK)
            if fits(table, window):
                return ReadSchedule(budget, reads, window, order), len(table)
        band //= 2
    return None


def _at(reads: RowReads, begins: Floats, ends: Floats, band: Ints | None = None) -> ExpectedReads:
    return ExpectedReads(reads.paths, reads.file, reads.start, reads.end, begins, ends, band=band)


def prove_files(run: PlanRun, indices: Sequence[int], records: Records) -> None:
    """Compare what was read of a remote source with the store's checksums, and confirm the awaited records.

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
    records.confirm_awaited(numbers)


def row_reads(plan: FilePlan, *, compares: bool = True, part: FilePart | None = None) -> RowReads:
    """Return the ranges that a file plan reads, with the rows of the tensors that they are read for."""
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
    # What an item has beside the elements: headers of unknown place.
    around = length - nbytes
    # A codec, or too much beside the elements: then the complete item is read.
    plain_codec = items.codecs.index("") if "" in items.codecs else -1
    plain = (items.codec[reads.item] == plain_codec) & (around >= 0) & (around <= _MOST_AROUND)
    # A view has its own first byte, which only the item says.
    if reads.view is not None:
        plain &= reads.view[:, 0] < 0
    first_byte = start + np.where(plain, first, 0)
    last_byte = np.where(plain, start + around + last, start + length)
    if lo.shape[1]:
        top, bottom = begin[:, 0] - lo[of, 0], end[:, 0] - lo[of, 0]
    else:
        top, bottom = np.zeros(len(of), np.int64), np.ones(len(of), np.int64)
    return RowReads(
        tuple(f.path for f in plan.files),
        items.file[reads.item][keep],
        first_byte[keep],
        last_byte[keep],
        of[keep],
        top[keep],
        bottom[keep],
        (plan.op != COMPARE)[keep],
    )


def _in_file_order(plan: FilePlan, file_reads: RowReads) -> ExpectedReads:
    """Return reads with their times: the number of the tensor, and how far down its rows they are."""
    lo, hi, _ = plan.boxes
    place = np.arange(len(lo), dtype=np.float64)
    tensor_count = len(plan.columns)
    for number, node in plan.derived.items():  # inputs are read when what is computed from them is made
        for i in node.inputs:
            place[tensor_count + i] = number
    rows = np.maximum(hi[:, 0] - lo[:, 0], 1) if lo.shape[1] else np.ones(len(lo), np.int64)
    of = file_reads.tensor
    begins, ends = place[of] + file_reads.begin / rows[of], place[of] + file_reads.stop / rows[of]
    return replace(_at(file_reads, begins, ends), bare=bare_files(plan.items, plan.files))


def _flat(lo: Ints, shape: Ints, begin: Ints, end: Ints, width: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (first byte, byte behind the last, bytes) of boxes in their row-major chunks."""
    nbytes = np.prod(shape, axis=1) * width
    # Row-major strides of each chunk, from the last dim on.
    steps = np.ones_like(shape)
    if shape.shape[1] > 1:
        steps[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    first = ((begin - lo) * steps).sum(axis=1) * width
    last = (((end - 1 - lo) * steps).sum(axis=1) + 1) * width
    return first, last, nbytes


def _inside(plan: FilePlan, part: FilePart) -> npt.NDArray[np.bool_]:
    """Report which tensors have bytes in a part of the file; inputs of others are not known, so all."""
    inside = np.ones(len(plan.columns) + len(plan.inputs), bool)
    for number, tensor in enumerate(plan.tensors):
        inside[number] = tensor.start < part.end and tensor.start + tensor.nbytes > part.begin
    return inside
