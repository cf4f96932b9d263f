"""What the page may do, and for whom.

After `MOST` failed logins of one address within `SECONDS`, its logins are refused for a while. Kept in
memory: several receivers count apart, and a restart forgets. Tokens have 16 characters or more, so the limit
is there to stop noise and to make guessing visible in the log, not to make short tokens safe.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

from ckptcore.errors import UsageError
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


MIN_TOKEN = 16  # characters: shorter tokens could be guessed
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?|\[[0-9a-f:.]{2,45}\]")
_WEB = re.compile(r"^https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?$")
_HEADER = re.compile(r"[a-z][a-z0-9-]{0,60}")


class PageTable(BaseModel):
    """The table ``[page]`` of the receiver's file.

    Attributes:
        path: Where the page is below the receiver, such as ``/catalog``.
        hosts: Host names under which browsers reach it; others are refused.
        tokens: User -> the environment variable with the user's token.
        proxies: Addresses of proxies that authenticate users themselves.
        user_header: The header in which these proxies name the user.
        secret: The environment variable with the key of sessions, if several receivers share them; by default
            it is derived from the tokens.
        prefect_ui: The address of Prefect's pages, to which flow runs are links; by default that of the
            environment variable PREFECT_UI_URL.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(default="/catalog", pattern=r"^(/[a-z0-9-]+)+$")
    hosts: list[str] = Field(min_length=1)
    tokens: dict[str, str] = {}
    proxies: list[str] = []
    user_header: str = "x-forwarded-user"
    secret: str | None = None
    prefect_ui: str | None = Field(default=None, pattern=_WEB.pattern)


@dataclass(frozen=True, slots=True)
class PageAccess:
    """Who may read and change what.

    Attributes:
        hosts: Allowed host names, without ports.
        tokens: Token -> user.
        open_reading: Whether clients on the same machine read without a login.
        proxies: Addresses of proxies that name the user.
        user_header: The header in which they do.
        key: The key of sessions and of tokens against cross-site requests.
        failed: Failed logins by address.
    """

    hosts: frozenset[str]
    tokens: Mapping[str, str] = field(repr=False)
    open_reading: bool = False
    proxies: frozenset[str] = frozenset()
    user_header: str = "x-forwarded-user"
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    failed: FailedLogins = field(default_factory=FailedLogins, repr=False, compare=False)


def access_of(table: PageTable, env: Mapping[str, str] = os.environ) -> PageAccess:
    """Return the access that the receiver's file grants. Raises `UsageError` with every error in it."""
    wrong = [f"host {host!r} is no host name" for host in table.hosts if not _HOST.fullmatch(host.lower())]
    tokens: dict[str, str] = {}
    for user, variable in table.tokens.items():
        token = env.get(variable, "")
        if len(token) < MIN_TOKEN:
            state = "not set" if not token else f"shorter than {MIN_TOKEN} characters"
            wrong.append(f"the token of {user}: {variable} is {state}")
        elif token in tokens:
            wrong.append(f"{user} and {tokens[token]} have the same token")
        tokens[token] = user
    wrong += [f"proxy {text!r} is no IP address" for text in table.proxies if not plain_address(text)]
    if not _HEADER.fullmatch(table.user_header.lower()):
        wrong.append(f"user_header {table.user_header!r} is no name of a header")
    if not table.tokens and not table.proxies:
        wrong.append("nobody can log in; set `tokens`, or `proxies`")
    secret = env.get(table.secret, "") if table.secret else "".join(sorted(tokens))
    if table.secret and len(secret) < MIN_TOKEN:
        wrong.append(f"secret: {table.secret} is not set, or shorter than {MIN_TOKEN} characters")
    if wrong:
        raise UsageError(
            "cannot use the table [page]: " + "; ".join(wrong), hint="see docs/how-to/catalog-page.md"
        )
    return PageAccess(
        frozenset(host.lower() for host in table.hosts),
        tokens,
        False,
        frozenset(map(plain_address, table.proxies)),
        table.user_header.lower(),
        session_key(secret) if secret else secrets.token_bytes(32),
    )


def prefect_address(stated: str | None = None, env: Mapping[str, str] = os.environ) -> str:
    """Return the address of Prefect's pages: as stated, else that of the environment, else "".

    What is no plain web address is no link: it counts as none.

    >>> prefect_address(None, {"PREFECT_UI_URL": "http://prefect.example:4200"})
    'http://prefect.example:4200'
    >>> prefect_address(None, {"PREFECT_UI_URL": "javascript:alert(1)"})
    ''
    """
    address = stated or env.get("PREFECT_UI_URL", "")
    return address if _WEB.fullmatch(address) else ""


def plain_address(text: str) -> str:
    """Return the one spelling of an IP address, or "" for anything else.

    >>> plain_address("::ffff:10.0.0.5"), plain_address("2001:DB8:0::1"), plain_address("10.0.0.5:80")
    ('10.0.0.5', '2001:db8::1', '')
    """
    address = parsed_or_none(ipaddress.ip_address, text)
    return "" if address is None else str(getattr(address, "ipv4_mapped", None) or address)


def session_key(secret: str) -> bytes:
    """Return the key of sessions that belongs to a secret."""
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"ckptcore-page").digest()
