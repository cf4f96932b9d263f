"""Average checkpoints of a run: choose the window, its weights, and what is made of it.

An average is a source like any other (`ckptcore.formats.average`), so the conversions write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ckptcore.custody.gate import existing_catalog
from ckptcore.errors import UsageError
from ckptcore.planning.options import Options
from ckptcore.planning.request import Request
from ckptcore.utils.average_url import is_average, sum_url


def numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of a list with commas.

    >>> numbers("1, 0.5")
    (1.0, 0.5)

    Raises:
        UsageError: One of them is no number.
    """
    try:
        return tuple(float(each) for each in text.split(","))
    except ValueError:
        raise UsageError(
            f"--weights must be numbers with commas between them (got {text!r})",
            hint="such as --weights 1,2,3",
        ) from None


def merge_request(
    options: Options,
    sources: Sequence[str],
    destination: str,
    weights: Sequence[float] | None = None,
    decay: float | None = None,
    verb: str = "",
    adapter: str | None = None,
) -> Request:
    """Return the request for an average, or for a model with an adapter merged into it.

    Args:
        options: How it is written.
        sources: The inputs, in the order of the sum.
        destination: Where it is written.
        weights: Of the inputs.
        decay: Of an exponential moving average, instead of weights.
        verb: ``consolidate``, ``export`` or ``reshard``; empty: as the options need it.
        adapter: The adapter; then there is one input, its base.

    Raises:
        UsageError: There are fewer than two inputs, weights do not fit, or options contradict each other.
    """
    if nested := next((source for source in (*sources, adapter or "") if is_average(source)), None):
        raise UsageError(
            f"cannot average {nested}: it is an average", hint="write it first, or name its checkpoints"
        )
    for_hub = options.config is not None or options.tokenizer is not None
    usual = "reshard" if options.mesh else "export" if for_hub else "consolidate"
    return options.request(verb or usual, sum_url(sources, weights, decay, adapter), destination)


def window(catalog: str | Literal[False] | None, run: str, *, last: int, every: int = 1) -> list[str]:
    """Return the places of the last steps of a run, the oldest first.

    Args:
        catalog: Its URL; None for the default one, False for none.
        run: Name of the run.
        last: How many steps.
        every: Only steps that are multiples of this count.

    Raises:
        UsageError: There is no catalog, no such run, or not as many steps.
    """
    from ckptcore.catalog.browse import steps_of
    from ckptcore.catalog.types import Kind, State

    steps: dict[int, str] = {}
    with existing_catalog(catalog) as opened:
        if opened is None:
            raise UsageError(
                "--run asks the catalog, and there is none", hint="name every SRC, or --catalog URL"
            )
        cursor: str | None = None
        with opened.reading() as conn:
            while len(steps) < last:
                page = steps_of(conn, run, before=cursor)
                for row in (listed.checkpoint for listed in page.rows):
                    is_source = row.kind == Kind.SOURCE and row.state == State.PRESENT
                    if is_source and row.step is not None and row.step % every == 0 and len(steps) < last:
                        steps.setdefault(row.step, row.uri)
                cursor = page.next
                if cursor is None:
                    break
    if len(steps) < last:
        multiples = f" that are multiples of {every}" if every > 1 else ""
        raise UsageError(
            f"run {run} has {len(steps)} present steps{multiples} in the catalog, and --last asks for {last}",
            hint="ask for fewer, or record the others first: `ckptcore validate STEP` does",
        )
    return [uri for _, uri in sorted(steps.items())]
