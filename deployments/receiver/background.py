"""Background: starting, following, notifying and looking for watched roots, in threads beside the requests.

What waits for strangers has a thread of its own: starts wait for nobody but Prefect and the database.
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

IDLE = 2.0  # seconds between rounds when nothing is new; another receiver's rows are seen then
STOP_SECONDS = 15.0
ROOTS_SECONDS = 15.0  # between two looks into the catalog for watched roots

_log = logging.getLogger("deployments.receiver")


class Loop:
    """Rounds of steps until it is stopped. A step that fails is told, and tried again in the next round."""

    def __init__(
        self, steps: Mapping[str, Callable[[], int]], idle: float = IDLE, beside: Loop | None = None
    ) -> None:
        # beside: another one, that begins and ends with this one, and whose troubles are told with its own.
        self._steps, self._idle, self._beside = steps, idle, beside
        self._news, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"receiver-{'-'.join(steps)}", daemon=True)
        self._trouble: dict[str, str] = {}

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        if self._beside is not None:
            self._beside.start()

    def wake(self) -> None:
        """Do a round now."""
        self._news.set()

    def stop(self) -> None:
        """End after the step that runs. What is not done then is done by the next process."""
        until = time.monotonic() + STOP_SECONDS
        loops = [self] if self._beside is None else [self, self._beside]
        for loop in loops:
            loop._end.set()
            loop._news.set()
        for loop in loops:
            if loop._thread.is_alive():
                loop._thread.join(max(0.0, until - time.monotonic()))

    def trouble(self) -> str:
        """The steps that failed in their last round, or ""."""
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
                except Exception as error:  # the thread must outlive whatever the database or Prefect do
                    if name not in self._trouble:
                        # That the database or Prefect is away needs no traceback.
                        known = isinstance(error, CkptError | Away)
                        _log.error("%s failed, it is tried again: %s", name, error, exc_info=not known)
                    self._trouble[name] = beginning(f"{type(error).__name__}: {error}", 300)
                    failed = True
            if failed:  # news does not mend it
                self._end.wait(self._idle)
            elif not busy:
                self._news.wait(self._idle)


class Watched:
    """Keeps the senders' roots as the catalog has them, where the configuration says so.

    For one thread; senders are read by another.
    """

    def __init__(self, box: Mailbox, senders: Mapping[str, Sender]) -> None:
        self._box, self._next = box, 0.0
        self._senders = [sender for sender in senders.values() if sender.watches]

    def refresh(self) -> int:
        """Look again, when it is time; raises `CatalogError`. What was allowed stays so until then."""
        if self._senders and time.monotonic() >= self._next:
            found = self._box.watched()
            odd = [root for root in found if not is_plain(root)]
            if odd:
                _log.warning("watched, but not allowed to be named by events: %s", ", ".join(odd))
            for sender in self._senders:
                sender.watched = tuple(root for root in found if root not in odd)
            self._next = time.monotonic() + ROOTS_SECONDS
        return 0
