"""Limit failed logins from one address: after `MOST` within `SECONDS`, its logins are refused for a while.

Of its own because access decides who a request comes from, and this only counts. Kept in memory: several
receivers count apart, and a restart forgets. Tokens have 16 characters or more, so the limit is there to
stop noise and to make guessing visible in the log, not to make short tokens safe.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from ckptcore.utils.isolation import parsed_or_none

MOST = 10
SECONDS = 300.0
ADDRESSES = 10_000  # the addresses that failed the longest ago are forgotten first


class FailedLogins:
    """Failed logins by address. Safe for threads. clock: returns seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._turn = clock, threading.Lock()
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()

    def wait(self, address: str) -> float:
        """Return the seconds until an address may log in again; 0 if it may now."""
        with self._turn:
            times = self._failed.get(_network(address))
            if times is None or len(times) < MOST:
                return 0.0
            return max(0.0, times[0] + SECONDS - self._clock())

    def note(self, address: str) -> None:
        """Count a failed login."""
        with self._turn:
            # The deque keeps the last `MOST` failures: the first of them decides.
            self._failed.setdefault(_network(address), deque(maxlen=MOST)).append(self._clock())
            self._failed.move_to_end(_network(address))
            while len(self._failed) > ADDRESSES:
                self._failed.popitem(last=False)


def _network(address: str) -> str:
    """Return what counts as one client: an address, of IPv6 its /64 network.

    >>> _network("192.0.2.7"), _network("2001:db8::1"), _network("2001:db8::ffff"), _network("?")
    ('192.0.2.7', '2001:db8::/64', '2001:db8::/64', '')
    """
    client = parsed_or_none(ipaddress.ip_address, address)
    if client is None or client.version == 4:
        return "" if client is None else str(client)
    return str(ipaddress.ip_network((client, 64), strict=False))
