"""Estimate the requests of a conversion to object stores, and what they cost.

Reads are counted by the order and the blocks that a run uses (`ckptcore.execution.expected_reads`). Prices
are US dollars for 1,000 requests, from ``CKPTCORE_REQUEST_PRICES``; bytes between a store and its region are
free.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from ckptcore.conversion.staging.s3_staging import beside_uploads, is_uploaded
from ckptcore.errors import UsageError
from ckptcore.execution.expected_reads import schedule_reads
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.plan import Plan, PlannedFile
from ckptcore.planning.request import Settings
from ckptcore.store import is_s3, reads_s3
from ckptcore.store.ahead import ExpectedReads
from ckptcore.store.merged import MergedAhead, open_merged
from ckptcore.store.objects.blocks import plan_blocks
from ckptcore.store.objects.part_plan import plan_parts
from ckptcore.utils.distinct_values import unique

PRICES_VARIABLE = "CKPTCORE_REQUEST_PRICES"
_PRICES = {"get": 0.0004, "put": 0.005}  # of S3 Standard in us-east-1
_PAGE = 1000  # objects of one listing


@dataclass(frozen=True, slots=True)
class RequestCosts:
    """Requests of a conversion; 0 for a side that is on no S3 store.

    Attributes:
        get: For bytes of tensors.
        get_bytes: Bytes of these.
        over_read: Bytes of these that no tensor needs.
        list: Listings of the source.
        put: Uploads of small files and of parts, with what begins and completes them.
        put_bytes: Bytes of these.
        dollars: At the prices of the environment.
    """

    get: int
    get_bytes: int
    over_read: int
    list: int
    put: int
    put_bytes: int
    dollars: float

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def request_costs(
    plan: Plan, files: Iterable[FilePlan], source: str, destination: str, settings: Settings
) -> RequestCosts | None:
    """Return the requests of a plan; None if neither side is on an S3 store.

    Args:
        plan: The plan.
        files: Plans of its files.
        source: URL.
        destination: URL.
        settings: Memory, which decides how large the requests are.

    Raises:
        UsageError: The prices in the environment are wrong.
    """
    uploads = is_s3(destination)
    if not (reads_s3(source) or uploads):
        return None
    prices = _prices()
    get = get_bytes = over = listings = put = put_bytes = 0
    if reads_s3(source):
        means = beside_uploads(plan.files, settings) if uploads else settings
        schedule = schedule_reads(files, means, uploads=uploads)
        parts = [] if schedule.reads is None else _by_store(schedule.reads, plan.source, schedule.window)
        for part, memory in parts:
            table = plan_blocks(part, memory)
            get += len(table)
            get_bytes += int((table.end - table.start).sum())
            over += table.over_read
            listings += 4 * max(1, -(-len(unique(part.file)) // _PAGE))
    if uploads:
        put = sum(_parts(f) for f in plan.files) + len(plan.extra)
        put_bytes = plan.bytes_out
    dollars = (get * prices["get"] + (put + listings) * prices["put"]) / 1000
    return RequestCosts(get, get_bytes, over, listings, put, put_bytes, round(dollars, 6))


def _by_store(reads: ExpectedReads, source: str, memory: int) -> list[tuple[ExpectedReads, int]]:
    """Return what is read of each S3 store, and the memory for its blocks."""
    if is_s3(source):
        return [(reads, memory)]
    with closing(open_merged(source)) as store:
        return store.split(reads, memory) if isinstance(store, MergedAhead) else []


def _parts(file: PlannedFile) -> int:
    """Count the requests that upload a file: begin, parts, complete; or one for a file without tensors."""
    return 2 + plan_parts(file.nbytes, file.path).count if is_uploaded(file) else 1


def _prices() -> dict[str, float]:
    prices, text = dict(_PRICES), os.environ.get(PRICES_VARIABLE, "")
    for assignment in filter(None, text.split(",")):
        name, _, value = assignment.strip().partition("=")
        try:
            prices[name] = float(value)
        except ValueError:
            prices["?"] = 0.0
    if prices.keys() != _PRICES.keys() or not all(0 <= price < 1e6 for price in prices.values()):
        raise UsageError(f"{PRICES_VARIABLE} must be like get=0.0004,put=0.005 (got {text!r})")
    return prices
