"""Cut one large file into parts that several machines write.

A part is a range of whole jobs of a file. Its worker writes it at its place in a file that all of them
share, and leaves a receipt; `ckptcore.execution.join_parts` proves the parts against what lies there, and
makes them one file. Only stores that write in any order can do that: on an object store a file is one task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptcore.errors import UsageError
from ckptcore.execution.tiles import Budget, Job, jobs
from ckptcore.planning.file_plan import FilePlan


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes [begin, end) of output file ``index``. Its bounds are those of jobs under one `Budget`: whoever
    writes parts of a file must have the same `Settings`.

    number, of: for people: which part it is, counted from 1, and how many there are.
    """

    index: int
    begin: int
    end: int
    number: int = 1
    of: int = 1

    @property
    def nbytes(self) -> int:
        """How much it is."""
        return self.end - self.begin


def cut(plan: FilePlan, nbytes: int, budget: Budget) -> tuple[FilePart, ...]:
    """The parts of a file, each of about ``nbytes``, in order; one part when the file is hardly larger."""
    bounds: list[tuple[int, int]] = []
    begin = end = 0
    for job in jobs(plan, budget):
        if end > begin and end - begin + job.nbytes > nbytes:
            bounds.append((begin, end))
            begin = end
        end = job.start + job.nbytes
    bounds.append((begin, end))
    return tuple(FilePart(plan.index, b, e, n, len(bounds)) for n, (b, e) in enumerate(bounds, 1))


def jobs_of(part: FilePart, plan: FilePlan, budget: Budget) -> Iterator[Job]:
    """The jobs of one part, counted from 0. Raises `UsageError` when its bounds are not theirs."""
    reached, sequence = part.begin, 0
    for job in jobs(plan, budget):
        end = job.start + job.nbytes
        if end <= part.begin:
            continue
        if job.start != reached or end > part.end:
            break
        yield replace(job, sequence=sequence)
        reached, sequence = end, sequence + 1
    if reached != part.end:
        raise UsageError(
            f"bytes {part.begin} to {part.end} of {plan.path} are no part under these settings",
            hint="write the parts of a file with the memory and workers that they were cut with",
        )
