"""What `retire` would free, in parts: each takes little time, however many sources a root has."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckptcore.catalog.retirements import totals
from ckptcore.errors import UsageError
from ckptcore.operations.options import RetireOptions
from ckptcore.operations.retention.retire import Fate, RetireDecision, plan
from ckptcore.operations.retention.root_retention import rules

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

LIMIT = 50
# A part ends with the source that is looked at then. The time of this thread: a busy machine has the same
# parts; and of the clock: slow storage has short ones.
CPU_SECONDS, SECONDS = 0.12, 1.0
WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class RetirePart:
    """A part of a plan. next: the public id of its last source, if more follow."""

    items: tuple[RetireDecision, ...]
    next: str | None = None

    @property
    def count(self) -> int:
        """The number of sources that would be deleted."""
        return sum(item.fate is Fate.TO_RETIRE for item in self.items)

    @property
    def freed(self) -> int:
        """Bytes of files that would be freed."""
        return sum(item.freed for item in self.items)

    @property
    def given_up(self) -> dict[str, dict[str, int]]:
        """Kind -> names and bytes that would be lost, as it is allowed."""
        return totals(loss for item in self.items if item.fate is Fate.TO_RETIRE for loss in item.given_up)


@dataclass
class Retiring:
    """Plans of one process: one at a time, because each reads folders of checkpoints."""

    turn: threading.Lock = field(default_factory=threading.Lock)

    def part(
        self,
        catalog: Catalog,
        asked: RetireOptions,
        scope: str,
        *,
        after: str | None = None,
        limit: int = LIMIT,
    ) -> RetirePart:
        """Return the part of a plan behind a source, with the retention that each root has of its own.

        Raises:
            UsageError: There is no such root or run, a value is invalid, or another plan takes long.
        """
        rules(asked)  # what is invalid is an error before anything is read
        if not self.turn.acquire(timeout=WAIT_SECONDS):
            raise UsageError("another plan is being made", hint="try again in a minute")
        try:
            decisions = plan(catalog, scope, partial(rules, asked), after=after, limit=limit + 1)
            # The plan has one source more than a part: that one tells whether another part follows.
            return _part(decisions, limit)
        finally:
            self.turn.release()


def _part(decisions: Iterable[RetireDecision], limit: int) -> RetirePart:
    items: list[RetireDecision] = []
    cpu, clock = time.thread_time() + CPU_SECONDS, time.monotonic() + SECONDS
    for item in decisions:
        late = time.thread_time() > cpu or time.monotonic() > clock
        if len(items) == limit or (items and late):
            return RetirePart(tuple(items), items[-1].source.id)
        items.append(item)
    return RetirePart(tuple(items))


def command(scope: str, asked: RetireOptions) -> str:
    """Return the command line that deletes what a plan shows."""
    terms = ["ckptcore", "retire", scope]
    for option, value in (
        ("--keep-last", asked.keep_last),
        ("--keep-every", asked.keep_every),
        ("--rest", asked.rest),
        *(("--accept-loss", glob) for glob in asked.accept_loss or ()),
    ):
        if value is not None:
            terms += [option, str(value)]
    return shlex.join([*terms, "--yes"])


def number(name: str, text: str) -> int | None:
    """Return the number in a field of a form, which is empty for none. Raises `UsageError`."""
    if not text.strip():
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text.strip()):
        raise UsageError(f"{name} must be a number (got {text[:40]!r})")
    return int(text)
