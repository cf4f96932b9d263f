"""The forms of the pages: the changes, and the login."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from ckptcore.page import changes
from ckptcore.page.access import (
    COOKIE,
    SESSION_S,
    address_of,
    form_of,
    require_patience,
    require_same_site,
    require_writer,
    uses_tls,
)
from ckptcore.page.access import session_of as new_session
from ckptcore.page.views import QueueName, Ref, Site


def actions(site: Site) -> APIRouter:
    """Return the routes of actions and of the login."""
    router = APIRouter(include_in_schema=False)

    def back(*parts: str, action: str) -> Response:
        return RedirectResponse(site.link(*parts, done=action), 303)

    @router.post("/checkpoints/{ref}/alias")
    async def set_alias(request: Request, ref: Ref) -> Response:
        """Set an alias, if it still refers to the checkpoint that the user saw."""
        user, fields = await require_writer(request, site.access)
        name, expect = fields.get("name", ""), fields.get("expect")
        force = fields.get("force") == "yes"
        row = await asyncio.to_thread(changes.set_alias, site.catalog, user, ref, name, expect, force)
        return back("checkpoints", row.checkpoint, action="alias")

    @router.post("/checkpoints/{ref}/hold")
    async def place_hold(request: Request, ref: Ref) -> Response:
        """Place a hold in the user's name."""
        user, fields = await require_writer(request, site.access)
        reason, until = fields.get("reason", ""), changes.day(fields.get("until", ""))
        row = await asyncio.to_thread(changes.place_hold, site.catalog, user, ref, reason, until)
        return back("checkpoints", row.checkpoint, action="hold")

    @router.post("/holds/{hold}/release")
    async def release_hold(request: Request, hold: Ref) -> Response:
        """Release a hold."""
        user, _ = await require_writer(request, site.access)
        row = await asyncio.to_thread(changes.release_hold, site.catalog, user, hold)
        return back("checkpoints", row.checkpoint, action="release")

    @router.post("/aliases/rollback")
    async def roll_back(request: Request) -> Response:
        """Let an alias refer to what it referred to before, if it still is what the user saw."""
        user, fields = await require_writer(request, site.access)
        name, force = fields.get("name", ""), fields.get("force") == "yes"
        await asyncio.to_thread(changes.roll_back, site.catalog, user, name, fields.get("expect"), force)
        return back("aliases", name, action="rollback")

    @router.post("/{queue}/{ref}/retry")
    async def retry(request: Request, queue: QueueName, ref: Ref) -> Response:
        """Make a failed event or message due again."""
        user, _ = await require_writer(request, site.access)
        await asyncio.to_thread(changes.retry, site.catalog, user, queue, ref)
        return back(queue, action="retry")

    @router.get("/login")
    def login(request: Request) -> Response:
        """Show the form for a token."""
        return site.page(request, "login.html", None, failed=False)

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        """Begin a session."""
        require_same_site(request)
        fields = await form_of(request)
        require_patience(request, site.access)
        user_and_session = new_session(fields.get("token", ""), site.access)
        if user_and_session is None:
            site.access.failed.note(address_of(request, site.access))
            return site.page(request, "login.html", None, 401, failed=True)
        answer = RedirectResponse(site.link(), 303)
        answer.set_cookie(
            COOKIE,
            user_and_session[1],
            max_age=SESSION_S,
            path=site.root or "/",
            secure=uses_tls(request, site.access),
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
