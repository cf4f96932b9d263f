"""Batches: which files go into one task?"""

from __future__ import annotations

from collections.abc import Sequence

MAX_TASKS = 200  # a task costs 3-50 ms and 20 kB of Prefect's database
BATCH_BYTES = 1 << 30  # seconds of work, so that the cost of a task disappears


def batches(sizes: Sequence[int], nbytes: int = BATCH_BYTES, most: int = MAX_TASKS) -> list[range]:
    """Consecutive files, each batch about ``nbytes`` and never more than ``most`` batches.

    sizes: bytes of each file. A file larger than a batch is a batch of its own.

    >>> batches([4, 4, 4, 9, 1], nbytes=8)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    >>> len(batches([1] * 10_000, nbytes=1)) <= MAX_TASKS
    True
    """
    # Two neighbours together hold more than the limit, so n batches hold more than n // 2 limits.
    limit = max(nbytes, -(-2 * sum(sizes) // (most - 1))) if len(sizes) > most else nbytes
    found: list[range] = []
    first, held = 0, 0
    for index, size in enumerate(sizes):
        if index > first and held + size > limit:
            found.append(range(first, index))
            first, held = index, 0
        held += size
    return [*found, range(first, len(sizes))] if sizes else []
