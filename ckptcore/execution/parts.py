"""Cut one large file into parts that several machines write.

A part is a range of complete jobs of a file. Its worker writes it at its place in a file that all of them
share, and writes a receipt. `ckptcore.execution.join_parts` verifies the parts, and makes them one file. This
needs a store that writes in any order: on an object store a file is one task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptcore.errors import UsageError
from ckptcore.execution.tiles import Budget, Job, jobs
from ckptcore.planning.file_plan import FilePlan


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes [begin, end) of output file ``index``.

    The bounds are those of jobs under one `Budget`: all writers of a file's parts need the same `Settings`.

    Attributes:
        index: Index of the file in the plan.
        begin: First byte.
        end: Behind the last byte.
        number: Number of the part, counted from 1, for people.
        of: Number of parts, for people.
    """

    index: int
    begin: int
    end: int
    number: int = 1
    of: int = 1

    @property
    def nbytes(self) -> int:
        """Count its bytes."""
        return self.end - self.begin


def cut(plan: FilePlan, nbytes: int, budget: Budget) -> tuple[FilePart, ...]:
    """Return the parts of a file, each of about ``nbytes``, in order; a hardly larger file is one part."""
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
    """Yield the jobs of one part, counted from 0. Raises `UsageError` when its bounds are not theirs."""
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
            f"bytes {part.begin} to {part.end} of {plan.path} are not a part under these settings",
            hint="write the parts of a file with the memory and workers that they were cut with",
        )
