"""The forms of the pages: the changes, and the login."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
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
from ckptcore.page.views import Caller, QueueName, Ref, Visit

ROUTER = APIRouter(include_in_schema=False)


def _back(visit: Visit, *parts: str, action: str) -> Response:
    return RedirectResponse(visit.site.link(*parts, done=action), 303)


@ROUTER.post("/checkpoints/{ref}/alias")
async def set_alias(visit: Caller, ref: Ref) -> Response:
    """Set an alias, if it still refers to the checkpoint that the user saw."""
    user, fields = await require_writer(visit.request, visit.site.access)
    name, expect = fields.get("name", ""), fields.get("expect")
    force = fields.get("force") == "yes"
    row = await asyncio.to_thread(changes.set_alias, visit.site.catalog, user, ref, name, expect, force)
    return _back(visit, "checkpoints", row.checkpoint, action="alias")


@ROUTER.post("/checkpoints/{ref}/hold")
async def place_hold(visit: Caller, ref: Ref) -> Response:
    """Place a hold in the user's name."""
    user, fields = await require_writer(visit.request, visit.site.access)
    reason, until = fields.get("reason", ""), changes.day(fields.get("until", ""))
    row = await asyncio.to_thread(changes.place_hold, visit.site.catalog, user, ref, reason, until)
    return _back(visit, "checkpoints", row.checkpoint, action="hold")


@ROUTER.post("/holds/{hold}/release")
async def release_hold(visit: Caller, hold: Ref) -> Response:
    """Release a hold."""
    user, _ = await require_writer(visit.request, visit.site.access)
    row = await asyncio.to_thread(changes.release_hold, visit.site.catalog, user, hold)
    return _back(visit, "checkpoints", row.checkpoint, action="release")


@ROUTER.post("/aliases/rollback")
async def roll_back(visit: Caller) -> Response:
    """Let an alias refer to what it referred to before, if it still is what the user saw."""
    user, fields = await require_writer(visit.request, visit.site.access)
    name, force = fields.get("name", ""), fields.get("force") == "yes"
    await asyncio.to_thread(changes.roll_back, visit.site.catalog, user, name, fields.get("expect"), force)
    return _back(visit, "aliases", name, action="rollback")


@ROUTER.post("/{queue}/{ref}/retry")
async def retry(visit: Caller, queue: QueueName, ref: Ref) -> Response:
    """Make a failed event or message due again."""
    user, _ = await require_writer(visit.request, visit.site.access)
    await asyncio.to_thread(changes.retry, visit.site.catalog, user, queue, ref)
    return _back(visit, queue, action="retry")


@ROUTER.get("/login")
def login(visit: Caller) -> Response:
    """Show the form for a token."""
    return visit.site.page(visit.request, "login.html", None, failed=False)


@ROUTER.post("/login")
async def log_in(visit: Caller) -> Response:
    """Begin a session."""
    require_same_site(visit.request)
    fields = await form_of(visit.request)
    require_patience(visit.request, visit.site.access)
    user_and_session = new_session(fields.get("token", ""), visit.site.access)
    if user_and_session is None:
        visit.site.access.failed.note(address_of(visit.request, visit.site.access))
        return visit.site.page(visit.request, "login.html", None, 401, failed=True)
    answer = RedirectResponse(visit.site.link(), 303)
    answer.set_cookie(
        COOKIE,
        user_and_session[1],
        max_age=SESSION_S,
        path=visit.site.root or "/",
        secure=uses_tls(visit.request, visit.site.access),
        httponly=True,
        samesite="strict",
    )
    return answer


@ROUTER.post("/logout")
async def log_out(visit: Caller) -> Response:
    """End the session of this browser."""
    await require_writer(visit.request, visit.site.access)
    answer = RedirectResponse(visit.site.link(), 303)
    answer.delete_cookie(COOKIE, path=visit.site.root or "/")
    return answer
