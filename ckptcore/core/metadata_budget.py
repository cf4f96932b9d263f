"""Bound the memory that reading a checkpoint's metadata takes.

A few bytes of metadata can expand to gigabytes of values. Readers therefore count what they build, and
refuse a checkpoint whose metadata would take more than a budget. Costs are upper estimates of all stages
together (the parsed value, its form in the manifest, its text). They bound the time of those stages as well:
metadata within the default budget is read in seconds.

The budget is `DEFAULT`, or the value of the environment variable `VARIABLE`. It is separate from
``--memory``, the budget for moving tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ckptcore.errors import MetadataTooLarge, UsageError
from ckptcore.utils.units import parse_size, show_size

VARIABLE = "CKPTCORE_METADATA_MEMORY"
DEFAULT = 2 << 30  # 3.5 million chunks of a job of 1024 ranks take 1.5 GiB of it
# Cost of a value, bytes. An empty container takes as much as a small one.
CONTAINER, SLOT, SCALAR = 1024, 40, 32
TENSOR, CHUNK, FINDING = 640, 150, 640


class Meter:
    """The part of its budget that one reading has used, bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.taken, self.kept = limit, 0, 0

    def take(self, nbytes: int, subject: str) -> None:
        """Count memory that is in use until the reading, or the `passing` around it, ends.

        Args:
            nbytes: Bytes.
            subject: What is read, for the message.

        Raises:
            MetadataTooLarge: The budget is exceeded.
        """
        # Asked before it is counted: a value that is refused is not built.
        self.require(nbytes, subject)
        self.taken += nbytes

    def keep(self, nbytes: int, subject: str) -> None:
        """Count memory that is in use until the reading ends, inside `passing` too. Raises as `take`."""
        self.require(nbytes, subject)
        self.kept += nbytes

    def require(self, nbytes: int, subject: str) -> None:
        """Raise `MetadataTooLarge` unless so much is left; for memory that is freed soon."""
        got = self.taken + self.kept + nbytes
        if got > self.limit:
            raise MetadataTooLarge(
                f"cannot read {subject}: metadata would take more than its budget of {show_size(self.limit)} "
                f"(got {show_size(got)} so far)",
                hint=f"if the checkpoint is what you expect, try {VARIABLE}={_larger(got)}",
                budget=self.limit,
                needed=got,
            )


def meter() -> Meter:
    """Return the meter of the current reading, or a fresh one.

    The meter is in the context and not a parameter: every reader and every shared encoding counts on it.
    """
    # Outside of a reading (a test, a call of one encoding) there is no meter to
    # share, and a fresh one still bounds the call.
    return _current.get() or Meter(budget())


def budget() -> int:
    """Return the budget, bytes; raises `UsageError` when the environment variable is not a size."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return DEFAULT
    try:
        nbytes = parse_size(text)
    except UsageError as error:
        raise UsageError(f"{VARIABLE}: {error.message}", hint=error.hint) from None
    if nbytes < 1 << 20:
        raise UsageError(f"{VARIABLE} must be at least 1 MiB (got {text!r})", hint="try 512MiB or 4GiB")
    return nbytes


@contextmanager
def metered() -> Iterator[Meter]:
    """Count everything inside on one meter; inside another reading, on that one's."""
    outer = _current.get()
    # A reader that opens other checkpoints (of an average, of ranks) must not get a budget for each of them.
    if outer is not None:
        yield outer
        return
    token = _current.set(Meter(budget()))
    try:
        yield meter()
    finally:
        _current.reset(token)


@contextmanager
def passing() -> Iterator[None]:
    """Free at the end what is taken inside, not what is kept: for one of many files read in turn."""
    current = _current.get()
    taken = 0 if current is None else current.taken
    try:
        yield
    finally:
        if current is not None:
            # Set, not subtracted: an error in between leaves `taken` at any value.
            current.taken = taken


def _larger(nbytes: int) -> str:
    """Return a budget to try, twice as large.

    >>> _larger(3 << 30)
    '6GiB'
    """
    return f"{-(-2 * nbytes // (1 << 30))}GiB"


_current: ContextVar[Meter | None] = ContextVar("metadata meter", default=None)
