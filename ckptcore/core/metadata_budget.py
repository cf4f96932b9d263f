"""Meters: how much memory may it take to learn what a checkpoint is?

A few bytes of metadata can stand for gigabytes of values, so what readers build is counted while they build
it, and a checkpoint whose metadata would take more than a budget is refused. Costs are estimates from above
of all stages together (the parsed value, its form in the manifest, its text), and cover the time of those
stages as well: what is within the default budget is read in seconds.

The budget is `DEFAULT`, or what the environment variable `VARIABLE` says. It is not the budget of
``--memory``, which is for moving tensors.
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
# What a value costs, bytes. A container that holds nothing takes as much as one that holds a little.
CONTAINER, SLOT, SCALAR = 1024, 40, 32
TENSOR, CHUNK, FINDING = 640, 150, 640


class Meter:
    """What one reading has taken of its budget, bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.taken, self.kept = limit, 0, 0

    def take(self, nbytes: int, what: str) -> None:
        """Counts what is there until the reading, or the `passing` around it, ends.

        what: the file, for the message. Raises `MetadataTooLarge`.
        """
        self.require(nbytes, what)
        self.taken += nbytes

    def keep(self, nbytes: int, what: str) -> None:
        """Counts what is there until the reading ends, whatever it was read in. Raises as `take`."""
        self.require(nbytes, what)
        self.kept += nbytes

    def require(self, nbytes: int, what: str) -> None:
        """Raises `MetadataTooLarge` unless so much is left; for what is gone again soon."""
        got = self.taken + self.kept + nbytes
        if got > self.limit:
            raise MetadataTooLarge(
                f"cannot read {what}: metadata would take more than its budget of {show_size(self.limit)} "
                f"(got {show_size(got)} so far)",
                hint=f"is it what you expect? Try {VARIABLE}={_larger(got)} if it is",
                budget=self.limit,
                needed=got,
            )


def meter() -> Meter:
    """The meter of the reading under way, or a fresh one.

    It is found in the context, not passed: every reader, and every encoding that readers share, counts on it.
    """
    return _current.get() or Meter(budget())


def budget() -> int:
    """The budget, bytes; raises `UsageError` when the environment says no size."""
    told = os.environ.get(VARIABLE, "").strip()
    if not told:
        return DEFAULT
    try:
        found = parse_size(told)
    except UsageError as error:
        raise UsageError(f"{VARIABLE}: {error.message}", hint=error.hint) from None
    if found < 1 << 20:
        raise UsageError(f"{VARIABLE} is {told}, less than 1 MiB", hint="write 512MiB or 4GiB")
    return found


@contextmanager
def metered() -> Iterator[Meter]:
    """One reading: everything inside counts on one meter. Inside another reading, on that one's."""
    outer = _current.get()
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
    """What is taken inside is gone behind it, what is kept is not: one of many files read in turn, say."""
    current = _current.get()
    taken = 0 if current is None else current.taken
    try:
        yield
    finally:
        if current is not None:
            current.taken = taken


def _larger(nbytes: int) -> str:
    """
    >>> _larger(3 << 30)
    '6GiB'
    """
    return f"{-(-2 * nbytes // (1 << 30))}GiB"


_current: ContextVar[Meter | None] = ContextVar("metadata meter", default=None)
