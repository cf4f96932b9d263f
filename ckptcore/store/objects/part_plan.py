"""Plan the parts of an upload: sizes that object stores accept, within a memory budget.

Stores limit an upload to 10,000 parts and an object to 5 TiB; some reject parts of unequal size. So all parts
of a file are equally long, but the last, and there are at most 9,000. The sizes follow from the file's size
alone: every worker, and every later run, cuts a file in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptcore.errors import BudgetTooSmall, UsageError

PART = 16 << 20  # bytes of a part of files up to 140 GiB
MOST_PARTS = 9_000
LARGEST = 5 << 40  # bytes of an object: the limit of S3
IN_FLIGHT = 4  # parts on their way at once; more does not help on one connection pool
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PartPlan:
    """How one file is cut into parts, numbered from 1.

    Attributes:
        nbytes: Bytes of the file.
        part: Bytes of each part but the last.
    """

    nbytes: int
    part: int

    @property
    def count(self) -> int:
        """Number of parts; an empty file has one empty part."""
        return max(-(-self.nbytes // self.part), 1)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return (first byte, behind the last byte) of a part."""
        begin = (number - 1) * self.part
        return begin, min(begin + self.part, self.nbytes)

    def number_at(self, offset: int) -> int:
        """Return the number of the part with byte ``offset``."""
        return offset // self.part + 1

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yield (number, first byte, behind the last byte) of every part."""
        return ((n, *self.bounds(n)) for n in range(1, self.count + 1))


def plan_parts(nbytes: int, path: str = "the file") -> PartPlan:
    """Return the parts of a file of ``nbytes``.

    Args:
        nbytes: Bytes of the file.
        path: Its name, for the message.

    Raises:
        UsageError: No object can be that large.
    """
    if nbytes > LARGEST:
        raise UsageError(
            f"cannot upload {path}: an object has at most {LARGEST} bytes (5 TiB) (got {nbytes})",
            hint="set --max-file-size",
            nbytes=nbytes,
            limit=LARGEST,
        )
    least = -(-nbytes // MOST_PARTS)
    return PartPlan(nbytes, PART if least <= PART else -(-least // _MIB) * _MIB)


@dataclass(frozen=True, slots=True)
class UploadBudget:
    """What uploads take of a memory budget.

    Attributes:
        nbytes: Bytes of all part buffers together.
        in_flight: Parts on their way at once; with 0, the worker that fills a part also sends it.
    """

    nbytes: int
    in_flight: int

    @classmethod
    def of(cls, sizes: Iterable[int], memory: int, rest: int) -> UploadBudget:
        """Return the buffers for files of these sizes: one that is filled, and those on their way.

        They take at most half of the memory, if one part does not need more.

        Args:
            sizes: Bytes of the files.
            memory: The budget in bytes.
            rest: Bytes that everything else needs at least.

        Raises:
            BudgetTooSmall: One part and the rest do not fit.
            UsageError: A file is larger than an object can be.
        """
        largest = max((min(p.part, p.nbytes) for p in map(plan_parts, sizes)), default=0)
        if not largest:
            return cls(0, 0)
        if largest + rest > memory:
            raise BudgetTooSmall(
                f"memory must be at least {largest + rest} bytes: the largest file is uploaded in parts of "
                f"{largest} bytes, and everything else needs {rest} (got {memory})",
                hint="set a larger --memory, or a smaller --max-file-size",
                part=largest,
                needed=largest + rest,
                memory=memory,
            )
        buffers = min(max(memory // 2 // largest, 1), 1 + IN_FLIGHT)
        return cls(buffers * largest, buffers - 1)
