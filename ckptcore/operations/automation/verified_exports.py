"""Verify what a sweep has exported, as the flow does: against its source, and against its config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckptcore.checking.export_proof import require_match
from ckptcore.conversion.export_verdict import find_source, record_verdict
from ckptcore.errors import CkptError
from ckptcore.planning.request import Request, Settings
from ckptcore.utils.isolation import attempt

Convert = Callable[[Request], Any]
ConvertEach = Callable[[Sequence[Request]], Sequence[Any]]


def verify(request: Request, settings: Settings, catalog_url: str | None) -> None:
    """Verify a published output, if it is an export, and store the verdict with its conversion.

    Args:
        request: What was asked for.
        settings: Memory and threads.
        catalog_url: The catalog in which it is recorded; None for the default one.

    Raises:
        CkptError: It does not match (`OutputMismatch`), or cannot be read.
    """
    if request.verb != "export":
        return
    # Late imports: a sweep that finds nothing to export needs neither.
    from ckptcore.comparison.verify_export import Wanted, verify_export

    export_source = find_source(request.destination, None, {}, catalog_url)
    proof = verify_export(
        request.destination,
        export_source.source,
        Wanted(),
        settings,
        missing=export_source.reason,
        record=export_source.record,
    )
    require_match(record_verdict(export_source, proof, catalog_url))


def verifying(convert: Convert, settings: Settings, catalog_url: str | None) -> Convert:
    """Return a conversion that ends with the error of its verification, if that fails."""

    def run(request: Request) -> Any:
        result = convert(request)
        verify(request, settings, catalog_url)
        return result

    return run


def verifying_each(convert_each: ConvertEach, settings: Settings, catalog_url: str | None) -> ConvertEach:
    """Return `verifying` for the conversion of a batch: each output that fails is an error of its own."""

    def run(requests: Sequence[Request]) -> list[Any]:
        return [
            result
            if isinstance(result, CkptError)
            else attempt(verify, request, settings, catalog_url) or result
            for request, result in zip(requests, convert_each(requests), strict=True)
        ]

    return run
