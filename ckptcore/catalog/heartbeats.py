"""Show that the conversions of this process run, as long as it does.

A conversion of another machine that is silent for `ckptcore.catalog.conversions.LEASE` has ended: what it
reads may be deleted, and what it was about to replace may be relied on. So a thread renews the row of each
conversion that this process began, and a conversion that lost its row publishes nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection

from ckptcore.catalog import conversions
from ckptcore.errors import CkptError, Interrupted
from ckptcore.utils import host

Renew = Callable[[Collection[str]], Collection[str]]  # renews rows of conversions, returns those that ended
PERIOD_S = 30.0
# Without a renewal for this long, a row is looked at before something is published: less than the lease.
_SURE_S = conversions.LEASE.total_seconds() / 2
_log = logging.getLogger("ckptcore")


class Heartbeats:
    """The conversions of this process that run, and the thread that renews their rows."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._renewed: dict[str, tuple[Renew, float]] = {}  # conversion -> how, when (`host.uptime`)
        self._thread: threading.Thread | None = None

    def add(self, renew: Renew, conversions: Collection[str]) -> None:
        """Renew these conversions, which were recorded as begun a moment ago, until `drop`."""
        with self._lock:
            self._renewed |= {conversion: (renew, host.uptime()) for conversion in conversions}
            if self._thread is None and conversions:
                self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
                self._thread.start()

    def drop(self, ended: Collection[str]) -> None:
        """Stop renewing these conversions; without any, the thread ends at its next turn."""
        with self._lock:
            for conversion in ended:
                self._renewed.pop(conversion, None)

    def require(self, renew: Renew, conversion: str) -> None:
        """Check that a conversion of this process may publish.

        Raises:
            Interrupted: The catalog counts it as ended, because this process was stopped for too long.
            CatalogError: The catalog cannot be asked.
        """
        with self._lock:
            _, renewed = self._renewed.get(conversion, (renew, float("-inf")))
        if host.uptime() - renewed < _SURE_S:
            return
        if conversion in renew([conversion]):
            raise Interrupted(
                f"conversion {conversion} was silent for too long, and counts as ended",
                hint="run the same command again: written files are kept",
            )

    def _run(self) -> None:
        """Renew the rows of all conversions, once a period, until none is left."""
        while True:
            host.sleep(PERIOD_S)
            with self._lock:
                if not self._renewed:
                    self._thread = None
                    return
                rows: dict[Renew, list[str]] = {}
                for conversion, (renew, _) in self._renewed.items():
                    rows.setdefault(renew, []).append(conversion)
            for renew, row_ids in rows.items():
                self._renew(renew, row_ids)

    def _renew(self, renew: Renew, row_ids: Collection[str]) -> None:
        began = host.uptime()
        try:
            lost = renew(row_ids)
        except CkptError as error:  # more tries fit into the lease; `require` looks at what was not renewed
            _log.warning("cannot renew the row of a running conversion: %s", error.message)
            return
        with self._lock:
            for conversion in set(row_ids).difference(lost):
                if conversion in self._renewed:
                    self._renewed[conversion] = renew, began


RUNNING = Heartbeats()
