"""Change aliases, holds and queues. Each change is recorded with its user, in one transaction."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from ckptcore.catalog import aliases, audit, holds, queues
from ckptcore.catalog.holds import HoldRow
from ckptcore.errors import UsageError
from deployments.page.access import COOKIE, SESSION_S, PageRefused, form_of, require_same_site, require_writer
from deployments.page.access import session_of as new_session
from deployments.page.views import Ref, Site


def actions(site: Site) -> APIRouter:
    """Return the routes of actions and of the login."""
    router = APIRouter(include_in_schema=False)

    def back(*parts: str, done: str) -> Response:
        return RedirectResponse(site.link(*parts, done=done), 303)

    @router.post("/checkpoints/{ref}/alias")
    async def set_alias(request: Request, ref: Ref) -> Response:
        """Set an alias, if it still refers to the checkpoint that the user saw."""
        user, fields = await require_writer(request, site.access)
        now = datetime.now(UTC)
        name, expect = fields.get("name", ""), fields.get("expect")

        def change() -> str:
            with site.catalog.writing() as conn:
                before = next((a.checkpoint for a in aliases.every(conn) if a.name == name), None)
                row = aliases.set_alias(conn, now, name, ref, expect)
                detail = {"alias": name, "before": before}
                audit.note(conn, now, "alias.set", row.checkpoint, detail, actor=user, via=audit.PAGE)
            return row.checkpoint

        return back("checkpoints", await asyncio.to_thread(change), done="alias")

    @router.post("/checkpoints/{ref}/hold")
    async def place_hold(request: Request, ref: Ref) -> Response:
        """Place a hold in the user's name."""
        user, fields = await require_writer(request, site.access)
        now = datetime.now(UTC)
        reason, until = fields.get("reason", ""), _day(fields.get("until", ""))

        def change() -> str:
            with site.catalog.writing() as conn:
                hold = holds.place(conn, now, ref, reason, owner=user, until=until)
                checkpoint = _active(holds.active(conn, now, ref), hold).checkpoint
                detail = {"hold": hold, "reason": reason, "until": fields.get("until", "")}
                audit.note(conn, now, "hold.place", checkpoint, detail, actor=user, via=audit.PAGE)
            return checkpoint

        return back("checkpoints", await asyncio.to_thread(change), done="hold")

    @router.post("/holds/{hold}/release")
    async def release_hold(request: Request, hold: Ref) -> Response:
        """Release a hold."""
        user, _ = await require_writer(request, site.access)
        now = datetime.now(UTC)

        def change() -> str:
            with site.catalog.writing() as conn:
                row = _active(holds.active(conn, now), hold)
                holds.release(conn, now, hold)
                detail = {"hold": hold, "reason": row.reason, "owner": row.owner}
                audit.note(conn, now, "hold.release", row.checkpoint, detail, actor=user, via=audit.PAGE)
            return row.checkpoint

        return back("checkpoints", await asyncio.to_thread(change), done="release")

    @router.post("/inbox/{ref}/retry")
    async def retry(request: Request, ref: Ref) -> Response:
        """Make a failed event due again."""
        user, _ = await require_writer(request, site.access)
        now = datetime.now(UTC)

        def change() -> None:
            with site.catalog.writing() as conn:
                for each in queues.inbox.retry(conn, now, ref):
                    audit.note(conn, now, "inbox.retry", each, {}, actor=user, via=audit.PAGE)

        await asyncio.to_thread(change)
        return back("inbox", done="retry")

    @router.get("/login")
    def login(request: Request) -> Response:
        """Show the form for a token."""
        return site.page(request, "login.html", None, failed=False)

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        """Begin a session."""
        require_same_site(request)
        fields = await form_of(request)
        found = new_session(fields.get("token", ""), site.access)
        if found is None:
            return site.page(request, "login.html", None, 401, failed=True)
        answer = RedirectResponse(site.link(), 303)
        answer.set_cookie(
            COOKIE,
            found[1],
            max_age=SESSION_S,
            path=site.root or "/",
            secure=request.url.scheme == "https" or _tls_before(request, site),
            httponly=True,
            samesite="strict",
        )
        return answer

    @router.post("/logout")
    async def log_out(request: Request) -> Response:
        """End the session of this browser."""
        await require_writer(request, site.access)
        answer = RedirectResponse(site.link(), 303)
        answer.delete_cookie(COOKIE, path=site.root or "/")
        return answer

    return router


def _tls_before(request: Request, site: Site) -> bool:
    """Return whether a named proxy received the request by TLS."""
    client = request.client.host if request.client else ""
    return client in site.access.proxies and request.headers.get("x-forwarded-proto") == "https"


def _active(active: tuple[HoldRow, ...], hold: str) -> HoldRow:
    for row in active:
        if row.id == hold:
            return row
    raise UsageError(
        f"there is no hold {hold} in force", hint="it may have been released; open the page again"
    )


def _day(text: str) -> datetime | None:
    if not text:
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as error:
        raise PageRefused(400, "the end of a hold is a date, as in 2027-01-31") from error
