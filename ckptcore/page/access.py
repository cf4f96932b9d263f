"""Decide who a request comes from, and keep other sites out.

The order of checks: the Host header (a page of another site cannot reach this one under its own name), the
user, and for changes the origin of the request and a token that only our pages contain.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fastapi import Request
from starlette.datastructures import Headers

from ckptcore.errors import CkptError, ended_by
from ckptcore.page.settings import PageAccess, plain_address
from ckptcore.utils.isolation import attempt, parsed_or_none

COOKIE = "ckptcore_page"
SESSION_S = 12 * 3600
MAX_FORM = 64 << 10
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
# What a proxy adds: a request with one of these does not come from this machine alone.
_FORWARDED = re.compile(r"x-forwarded-.*|forwarded|via|(x-real|x-client|true-client|cf-connecting)-ip")
_PORT = re.compile(r":[0-9]{1,5}$")
_HOP = re.compile(r"(?P<v4>[0-9.]+)(:[0-9]+)?|\[(?P<v6>[0-9A-Fa-f:.]+)\](:[0-9]+)?|(?P<bare>[0-9A-Fa-f:.]+)")
_USER = re.compile(r"[^\x00-\x1f\x7f]{1,200}")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_log = logging.getLogger("ckptcore.page")


class PageRefused(Exception):
    """A request that is refused.

    status: of HTTP. login: whether a login may help. wait: seconds until a retry may help, or 0.
    """

    def __init__(self, status: int, message: str, *, login: bool = False, wait: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.message, self.login, self.wait = status, message, login, wait


class Guard:
    """Check the host of every request, and add the headers that restrict pages."""

    def __init__(self, app: App, access: PageAccess) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        response_starts: list[bool] = []

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                response_starts.append(True)
                our_headers = {name.encode(): value.encode() for name, value in HEADERS.items()}
                page_headers = [
                    pair for pair in message.get("headers", []) if pair[0].lower() not in our_headers
                ]
                cached = [p for p in message.get("headers", []) if p[0].lower() == b"cache-control"]
                if cached:  # files that never change say so themselves
                    our_headers.pop(b"cache-control", None)
                    page_headers += cached
                message["headers"] = [*page_headers, *our_headers.items()]
            await send(message)

        if not self._known_host(scope):
            await _plain(guarded, 421, "this server has another name; add it to the allowed hosts")
            return
        try:
            await self.app(scope, receive, guarded)
        except Exception as error:
            # Whatever a page raises is the end of this request alone, with the headers of every answer.
            # The client has the status already: no other answer can follow it.
            if response_starts:
                raise
            _log.error("%s cannot be shown", scope["path"][:200], exc_info=error)
            await _plain(
                guarded, 500, f"{ended_by(error).code}: this cannot be shown; the log has the reason"
            )

    def _known_host(self, scope: Scope) -> bool:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1:
            return False
        name = _PORT.sub("", hosts[0].decode("latin-1").lower())
        return name in self.access.hosts


def user_of(request: Request, access: PageAccess) -> str | None:
    """Return the user that a request comes from, or None without a login."""
    headers, token = request.headers, _bearer(request)
    if token is not None:
        return _user_of_token(token, access)
    if _is_proxied(request, access):
        named = headers.getlist(access.user_header)
        if len(named) == 1 and _USER.fullmatch(named[0]):
            return named[0]
    session = _cookie(headers)
    return None if session is None else _user_of_session(session, access)


def require_reader(request: Request, access: PageAccess) -> str | None:
    """Return the user, or None for a reader on the same machine. Raises `PageRefused`."""
    user = _checked_user(request, access)
    if user is None and not (access.open_reading and _is_local(request)):
        raise PageRefused(401, "this page needs a login", login=True)
    return user


async def require_writer(request: Request, access: PageAccess) -> tuple[str, dict[str, str]]:
    """Return the user who changes something, and the fields of the form. Raises `PageRefused`."""
    fields = await form_of(request)
    require_same_site(request)
    user = _checked_user(request, access)
    if user is None:
        raise PageRefused(401, "changes need a login", login=True)
    with_token = _bearer(request) is not None
    # A browser sends cookies, and a proxy adds its header, to any request; neither sends our token.
    if not with_token and not hmac.compare_digest(
        fields.get("csrf", "").encode(), csrf_of(request, access, user).encode()
    ):
        raise PageRefused(403, "the form is too old, or comes from another site; open the page again")
    return user, fields


def require_token(request: Request, access: PageAccess) -> str:
    """Return the user of a bearer token; sessions and proxies do not count. Raises `PageRefused`."""
    require_same_site(request)
    user = _checked_user(request, access) if _bearer(request) is not None else None
    if user is None:
        raise PageRefused(401, "changes need a token: Authorization: Bearer TOKEN", login=True)
    return user


def require_patience(request: Request, access: PageAccess) -> None:
    """Raise `PageRefused` if too many logins from the client's address have failed."""
    wait = access.failed.wait(address_of(request, access))
    if wait > 0:
        raise PageRefused(429, f"too many failed logins; try again in {wait:.0f} s", wait=wait)


def address_of(request: Request, access: PageAccess) -> str:
    """Return the client's address, or "" if it has none.

    It is that of the connection. Only where that is a named proxy, it is the last address of X-Forwarded-For
    that is none: each proxy adds the one that it saw at the end, and a client can write what is before.
    """
    address = _peer(request)
    lines = ",".join(request.headers.getlist("x-forwarded-for")) if address in access.proxies else ""
    for hop in reversed(lines.split(",") if lines else []):
        if address not in access.proxies:
            break
        written = _HOP.fullmatch(hop.strip())
        before = "" if written is None else plain_address(written["v4"] or written["v6"] or written["bare"])
        if not before:  # the proxy saw no address: it is the last that is known
            break
        address = before
    return address


def uses_tls(request: Request, access: PageAccess) -> bool:
    """Return whether the request came by TLS, to this server or to a named proxy."""
    schemes = request.headers.getlist("x-forwarded-proto") if _is_proxied(request, access) else []
    return request.scope["scheme"] == "https" or schemes[-1:] == ["https"]


def require_same_site(request: Request) -> None:
    """Raise `PageRefused` if another site sent the request, as far as the browser reports it."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    host = request.headers.get("host", "").lower()
    sender = None if origin is None else parsed_or_none(urlsplit, origin)
    if site not in ("same-origin", "none") or (
        origin is not None and (sender is None or sender.netloc.lower() != host)
    ):
        raise PageRefused(403, "the request comes from another site")


def csrf_of(request: Request, access: PageAccess, user: str) -> str:
    """Return the token that our forms contain for this user and session."""
    session = _cookie(request.headers) or ""
    return _signature(access, f"csrf\n{user}\n{session}")


def session_of(token: str, access: PageAccess) -> tuple[str, str] | None:
    """Return the user and a new session for a token, or None if nobody has it."""
    user = _user_of_token(token, access)
    if user is None:
        return None
    body = f"{int(time.time()) + SESSION_S}\n{secrets.token_hex(8)}\n{user}"
    text = base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")
    return user, f"{text}.{_signature(access, 'session' + chr(10) + body)}"


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form, each once. Raises `PageRefused`."""
    body = await body_of(request, "application/x-www-form-urlencoded")
    pairs = attempt(_pairs, body)
    if isinstance(pairs, CkptError):
        raise PageRefused(400, "the form cannot be parsed") from pairs
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise PageRefused(400, "a field of the form is repeated")
    return fields


async def body_of(request: Request, media: str) -> bytearray:
    """Return the body of a request with this content type. Raises `PageRefused`."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != media:
        raise PageRefused(415, f"use {media}")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM:
            raise PageRefused(413, f"a request has at most {MAX_FORM} bytes")
    return body


def _pairs(form: bytearray) -> list[tuple[str, str]]:
    return parse_qsl(form.decode("ascii"), keep_blank_values=True, max_num_fields=50, errors="strict")


def _bearer(request: Request) -> str | None:
    """Return the bearer token of a request, or None if it has none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _checked_user(request: Request, access: PageAccess) -> str | None:
    """Return the user of a request; a wrong bearer token counts as a failed login."""
    if _bearer(request) is None:
        return user_of(request, access)
    require_patience(request, access)
    user = user_of(request, access)
    if user is None:
        access.failed.note(address_of(request, access))
    return user


def _user_of_token(sent_token: str, access: PageAccess) -> str | None:
    matching_user = None
    for token, user in access.tokens.items():  # all of them: the time must not tell how far it got
        if hmac.compare_digest(
            hashlib.sha256(token.encode()).digest(), hashlib.sha256(sent_token.encode()).digest()
        ):
            matching_user = user
    return matching_user


def _user_of_session(session: str, access: PageAccess) -> str | None:
    text, _, signature = session.partition(".")
    body = parsed_or_none(_decoded, text)
    if body is None or not hmac.compare_digest(
        signature.encode(), _signature(access, "session\n" + body).encode()
    ):
        return None
    until, _, user = body.split("\n", 2)
    # A user whose token was taken away has no session any more.
    return user if int(until) > time.time() and user in access.tokens.values() else None


def _decoded(text: str) -> str:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()


def _signature(access: PageAccess, text: str) -> str:
    return hmac.new(access.key, text.encode(), hashlib.sha256).hexdigest()


def _cookie(headers: Headers) -> str | None:
    cookies = parsed_or_none(SimpleCookie, "; ".join(headers.getlist("cookie")))
    return cookies[COOKIE].value if cookies and COOKIE in cookies else None


def _peer(request: Request) -> str:
    """Return the address at the other end of the connection, or ""."""
    return plain_address(request.client.host) if request.client else ""


def _is_proxied(request: Request, access: PageAccess) -> bool:
    """Return whether the connection comes from a named proxy, whose headers count."""
    return _peer(request) in access.proxies


def _is_local(request: Request) -> bool:
    """Return whether the client is on this machine, and no proxy is between."""
    peer = _peer(request)
    return (
        bool(peer)
        and ipaddress.ip_address(peer).is_loopback
        and not any(_FORWARDED.fullmatch(name) for name in request.headers)
    )


async def _plain(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
