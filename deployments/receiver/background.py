"""Background threads: start and follow runs, send notifications, reload watched roots.

Notifications have a thread of their own, because they wait for other servers. Starts wait only for Prefect
and the database.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from ckptcore.errors import CkptError
from ckptcore.redaction import beginning
from deployments.receiver.dispatch import Away
from deployments.receiver.inbox import Mailbox
from deployments.receiver.settings import Sender, is_plain

IDLE = 2.0  # seconds between rounds without news; rows of other receivers are noticed then
STOP_SECONDS = 15.0
ROOTS_SECONDS = 15.0  # between two reads of the watched roots from the catalog

_log = logging.getLogger("deployments.receiver")


class Loop:
    """A thread that repeats steps until it is stopped. A failed step is reported and repeated later."""

    def __init__(
        self, steps: Mapping[str, Callable[[], int]], idle: float = IDLE, beside: Loop | None = None
    ) -> None:
        # beside: another loop that starts and stops with this one; `trouble` reports both.
        self._steps, self._idle, self._beside = steps, idle, beside
        self._news, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"receiver-{'-'.join(steps)}", daemon=True)
        self._trouble: dict[str, str] = {}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        if self._beside is not None:
            self._beside.start()

    def wake(self) -> None:
        """Run the steps now."""
        self._news.set()

    def stop(self) -> None:
        """Stop after the current step. The next process continues from the rows."""
        until = time.monotonic() + STOP_SECONDS
        loops = [self] if self._beside is None else [self, self._beside]
        for loop in loops:
            loop._end.set()
            loop._news.set()
        for loop in loops:
            if loop._thread.is_alive():
                loop._thread.join(max(0.0, until - time.monotonic()))

    def trouble(self) -> str:
        """Return the steps that failed in their last round with their errors, or ""."""
        own = [f"{name}: {why}" for name, why in sorted(self._trouble.items())]
        other = self._beside.trouble() if self._beside is not None else ""
        return "; ".join([*own, other] if other else own)

    def _run(self) -> None:
        while not self._end.is_set():
            self._news.clear()
            busy = failed = False
            for name, step in self._steps.items():
                if self._end.is_set():
                    return
                try:
                    busy = step() > 0 or busy
                    self._trouble.pop(name, None)
                except Exception as error:  # the thread must survive any error of the database or Prefect
                    if name not in self._trouble:
                        # An unreachable database or Prefect server needs no traceback.
                        known = isinstance(error, CkptError | Away)
                        _log.error("%s failed and is retried: %s", name, error, exc_info=not known)
                    self._trouble[name] = beginning(f"{type(error).__name__}: {error}", 300)
                    failed = True
            if failed:  # a new event does not repair it
                self._end.wait(self._idle)
            elif not busy:
                self._news.wait(self._idle)


class Watched:
    """Updates the senders' watched roots from the catalog, if the configuration wants that.

    One thread calls `refresh`; another one reads the senders.
    """

    def __init__(self, box: Mailbox, senders: Mapping[str, Sender]) -> None:
        self._box, self._next = box, 0.0
        self._senders = [sender for sender in senders.values() if sender.watches]

    def refresh(self) -> int:
        """Read the roots if it is time. Raises `CatalogError`; the earlier roots then stay allowed."""
        if self._senders and time.monotonic() >= self._next:
            found = self._box.watched()
            odd = [root for root in found if not is_plain(root)]
            if odd:
                _log.warning("watched roots that events cannot name: %s", ", ".join(odd))
            for sender in self._senders:
                sender.watched = tuple(root for root in found if root not in odd)
            self._next = time.monotonic() + ROOTS_SECONDS
        return 0
