"""Cut one large file into parts that several machines write.

In a local folder a part is a range of complete jobs of a file. Its worker writes it at its place in a file
that all of them share, and writes a receipt. `ckptcore.execution.join_parts` verifies the parts, and makes
them one file. On a store with upload handles a part is a range of complete parts of an upload: workers
compute the jobs at its ends, and send what is inside. Files with checksums behind their data are one task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptcore.errors import UsageError
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.tiles import Budget, Job, jobs


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
        budget: (tile, threads) that the jobs of an upload are cut with; None for parts of complete jobs.
    """

    index: int
    begin: int
    end: int
    number: int = 1
    of: int = 1
    budget: tuple[int, int] | None = None

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


def cut_upload(plan: FilePlan, nbytes: int, part: int, budget: Budget) -> tuple[FilePart, ...]:
    """Return the parts of an upload, each of complete parts of ``part`` bytes, about ``nbytes`` together.

    Empty for a file with checksums behind its data, which only one writer of the file knows.
    """
    if any(literal.crc_at for literal in plan.literals):
        return ()
    step = max(nbytes // part, 1) * part
    begins = range(0, max(plan.nbytes, 1), step)
    of = (budget.tile, budget.threads)
    return tuple(
        FilePart(plan.index, begin, min(begin + step, plan.nbytes), n, len(begins), of)
        for n, begin in enumerate(begins, 1)
    )


def jobs_of(part: FilePart, plan: FilePlan, budget: Budget) -> Iterator[Job]:
    """Yield the jobs of one part, counted from 0. Raises `UsageError` when its bounds are not theirs."""
    if part.budget is not None:
        yield from _jobs_over(part, plan, budget)
        return
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


def _jobs_over(part: FilePart, plan: FilePlan, budget: Budget) -> Iterator[Job]:
    """Yield the jobs with bytes in a part of an upload; the first and the last may reach beyond it."""
    if part.budget != (budget.tile, budget.threads):
        # Each job counts for the fingerprint in the part where it begins: other jobs would count twice.
        raise UsageError(
            f"part {part.number} of {plan.path} was cut with tiles of {part.budget} (got {budget})",
            hint="write the parts of a file with the memory and workers that they were cut with",
        )
    sequence = 0
    for job in jobs(plan, budget):
        if job.start >= part.end:
            break
        if job.start + job.nbytes > part.begin:
            yield replace(job, sequence=sequence)
            sequence += 1
