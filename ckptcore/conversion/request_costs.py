"""Estimate the requests of a conversion to object stores, and what they cost.

Reads are counted by the very blocks that will be fetched (`ckptcore.store.objects.blocks`). Prices are US
dollars for 1,000 requests, from ``CKPTCORE_REQUEST_PRICES``; bytes between a store and its region are free.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ckptcore.errors import UsageError
from ckptcore.execution.expected_reads import planned_reads
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.plan import Plan
from ckptcore.planning.request import Settings
from ckptcore.store import is_s3
from ckptcore.store.ahead import joined
from ckptcore.store.objects.blocks import plan_blocks

PRICES_VARIABLE = "CKPTCORE_REQUEST_PRICES"
_PRICES = {"get": 0.0004, "put": 0.005}  # of S3 Standard in us-east-1
_PAGE = 1000  # objects of one listing
_PART, _MOST_PARTS = 16 << 20, 9000


@dataclass(frozen=True, slots=True)
class RequestCosts:
    """Requests of a conversion; 0 for a side that is on no S3 store.

    Attributes:
        get: For bytes of tensors.
        get_bytes: Bytes of these.
        over_read: Bytes of these that no tensor needs.
        list: Listings of the source.
        put: Uploads of small files and of parts.
        dollars: At the prices of the environment.
    """

    get: int
    get_bytes: int
    over_read: int
    list: int
    put: int
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
    if not (is_s3(source) or is_s3(destination)):
        return None
    prices = _prices()
    get = get_bytes = over = listings = put = 0
    if is_s3(source):
        reads = joined([planned_reads(each, compares=settings.verify) for each in files])
        table = plan_blocks(reads, settings.memory // 2)
        get, get_bytes, over = len(table), int((table.end - table.start).sum()), table.over_read
        listings = 4 * -(-len(reads.paths) // _PAGE)
    if is_s3(destination):
        put = sum(_parts(f.nbytes) for f in plan.files) + len(plan.extra)
    dollars = (get * prices["get"] + (put + listings) * prices["put"]) / 1000
    return RequestCosts(get, get_bytes, over, listings, put, round(dollars, 6))


def _parts(nbytes: int) -> int:
    """Count the requests that upload a file: begin, parts, complete; or one for a small file."""
    part = max(_PART, -(-nbytes // _MOST_PARTS) + (1 << 20) - 1 & ~((1 << 20) - 1))
    return 1 if nbytes <= part else 2 + -(-nbytes // part)


def _prices() -> dict[str, float]:
    found, text = dict(_PRICES), os.environ.get(PRICES_VARIABLE, "")
    for each in filter(None, text.split(",")):
        name, _, value = each.strip().partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found["?"] = 0.0
    if found.keys() != _PRICES.keys() or not all(0 <= price < 1e6 for price in found.values()):
        raise UsageError(f"{PRICES_VARIABLE} must be like get=0.0004,put=0.005 (got {text!r})")
    return found
