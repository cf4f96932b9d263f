"""Serve the page of one catalog, by default to this machine only."""

from __future__ import annotations

import secrets

from ckptcore.catalog import audit, default_url, open_catalog
from ckptcore.errors import UsageError
from ckptcore.page import http_server
from ckptcore.page.app import make_page
from ckptcore.page.settings import LOOPBACK, MIN_TOKEN, PageAccess, prefect_address, session_key

ADDRESSES = ("127.0.0.1", "::1", "localhost")
CONNECTIONS = 200  # open at a time
GRACE = 5  # seconds for open requests after a signal


def serve(catalog: str | None, host: str, port: int, token: str | None, hosts: tuple[str, ...]) -> None:
    """Serve until SIGTERM or SIGINT. Prints the address, and the token for changes, on stdout.

    Args:
        catalog: the URL of the catalog; None for the default.
        host: the address to listen on. Elsewhere than on loopback, reading needs the token, too.
        port: 0 picks a free one.
        token: the token of a login; None makes one.
        hosts: further names under which browsers reach this server.
    """
    local = host in ADDRESSES
    if not local and not hosts:
        raise UsageError(
            f"cannot serve at {host} without a name", hint="name it with --allow-host, as in pages.example"
        )
    if token is not None and len(token) < MIN_TOKEN:
        raise UsageError(f"the token must have {MIN_TOKEN} characters or more (got {len(token)})")
    login_token = token or secrets.token_urlsafe(24)
    names = frozenset([*LOOPBACK, *hosts] if local else hosts)
    access = PageAccess(
        frozenset(name.lower() for name in names),
        {login_token: audit.operating_user()},
        open_reading=local,
        key=session_key(login_token),
    )
    with (
        open_catalog(catalog or default_url(), create=False) as opened,
        http_server.listening(host, port) as listener,
    ):
        app = make_page(opened, access, prefect_ui=prefect_address())
        number = listener.getsockname()[1]
        lines = [f"the catalog page is at http://{f'[{host}]' if ':' in host else host}:{number}/"]
        if token is None:
            locked_pages = "changes" if local else "every page"
            lines.append(f"{locked_pages} need a login with this token: {login_token}")
        http_server.serve(app, listener, connections=CONNECTIONS, grace=GRACE, lines=lines)
