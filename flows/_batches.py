"""Group the files of a plan into batches, one for each write task."""

from __future__ import annotations

from collections.abc import Sequence

MAX_TASKS = 200  # a task costs 3-50 ms and 20 KiB of Prefect's database
BATCH_BYTES = 1 << 30  # seconds of work, so that the cost of a task is negligible


def batches(sizes: Sequence[int], nbytes: int = BATCH_BYTES, most: int = MAX_TASKS) -> list[range]:
    """Return ranges of consecutive files, each of about `nbytes`, and at most `most` ranges.

    sizes: bytes of each file. A file larger than a batch is a batch of its own.

    >>> batches([4, 4, 4, 9, 1], nbytes=8)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    >>> len(batches([1] * 10_000, nbytes=1)) <= MAX_TASKS
    True
    """
    # Two neighbours together exceed the limit, so n batches exceed n // 2 limits.
    limit = max(nbytes, -(-2 * sum(sizes) // (most - 1))) if len(sizes) > most else nbytes
    found: list[range] = []
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            found.append(range(first, index))
            first, total = index, 0
        total += size
    return [*found, range(first, len(sizes))] if sizes else []
