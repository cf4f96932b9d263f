"""Watched: the roots that the catalog watches are allowed too, where the configuration says so."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from deployments.receiver.inbox import Mailbox
from deployments.receiver.settings import Sender, is_plain

SECONDS = 15.0  # between two looks into the catalog

_log = logging.getLogger("deployments.receiver")


class Watched:
    """Keeps the senders' roots as the catalog has them. For one thread; senders are read by another."""

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
            self._next = time.monotonic() + SECONDS
        return 0
