"""Assemble the page: routes in HTML and JSON, files, errors, and the guard before them.

Changes are forms of the pages, and a JSON API for programs with a token. Only ``Authorization: Bearer TOKEN``
counts there: a browser adds neither that header nor a body of JSON to a request of another site, so these
routes need no token of a form. Who asks is checked before the body is read.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from ckptcore.catalog import as_dict
from ckptcore.catalog.catalog import Catalog
from ckptcore.errors import CatalogAway, CkptError, Conflict, UsageError
from ckptcore.page import changes
from ckptcore.page.access import (
    COOKIE,
    SESSION_S,
    Guard,
    PageRefused,
    address_of,
    body_of,
    form_of,
    require_patience,
    require_same_site,
    require_token,
    require_writer,
    user_of,
    uses_tls,
)
from ckptcore.page.access import session_of as new_session
from ckptcore.page.api import ERRORS, JsonError, api
from ckptcore.page.settings import PageAccess
from ckptcore.page.views import FOLDER, Ref, Site, pages

FILES = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
_MISSING = ("has no", "there is no", "no checkpoint")
_log = logging.getLogger("ckptcore.page")


def make_page(catalog: Catalog, access: PageAccess, root: str = "") -> FastAPI:
    """Return the application.

    Args:
        catalog: the open catalog.
        access: who may read and change what.
        root: the path below which it is mounted, or "".
    """
    site = Site(catalog, access, root)
    # No documentation pages: they load scripts from other servers.
    app = FastAPI(title="ckptcore catalog", docs_url=None, redoc_url=None, version="1")
    app.include_router(api(site))
    app.include_router(api_actions(site))
    app.include_router(actions(site))
    app.include_router(pages(site))

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> Response:
        """Return a file of the page."""
        if name not in FILES:
            raise HTTPException(404)
        return FileResponse(
            FOLDER / "static" / name, media_type=FILES[name], headers={"cache-control": "max-age=300"}
        )

    def answer(request: Request, status: int, code: str, message: str, hint: str = "") -> Response:
        if request.scope["path"].removeprefix(root).startswith("/api/"):
            return JSONResponse({"error": code, "message": message, "hint": hint}, status)
        values: dict[str, Any] = {"code": status, "message": message, "hint": hint}
        # Who guesses tokens must not see here that one was right.
        user = None if status == 429 else user_of(request, access)
        return site.page(request, "error.html", user, status, **values)

    @app.exception_handler(CkptError)
    async def failed(request: Request, error: CkptError) -> Response:
        return answer(request, _status(error), error.code, error.message, error.hint or "")

    @app.exception_handler(PageRefused)
    async def refused(request: Request, error: PageRefused) -> Response:
        _log.warning("%d %s: %s", error.status, request.scope["path"][:200], error.message)
        html = not request.scope["path"].removeprefix(root).startswith("/api/")
        if error.login and html and request.method == "GET":
            return site.page(request, "login.html", None, error.status, failed=False)
        response = answer(request, error.status, "refused", error.message)
        if error.wait:
            response.headers["retry-after"] = f"{math.ceil(error.wait)}"
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        what = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()[:5])
        return answer(request, 400, "usage", f"a value cannot be used: {what}")

    @app.exception_handler(HTTPException)
    async def missing(request: Request, error: HTTPException) -> Response:
        response = answer(request, error.status_code, "http", str(error.detail))
        response.headers.update(error.headers or {})
        return response

    app.add_middleware(Guard, access=access)
    return app


def _status(error: CkptError) -> int:
    if isinstance(error, CatalogAway):
        return 503
    if isinstance(error, Conflict):
        return 409
    if isinstance(error, UsageError):
        return 404 if any(text in error.message for text in _MISSING) else 400
    return 404 if error.code in ("source-unreadable", "not-a-checkpoint") else 422


def actions(site: Site) -> APIRouter:
    """Return the routes of actions and of the login."""
    router = APIRouter(include_in_schema=False)

    def back(*parts: str, done: str) -> Response:
        return RedirectResponse(site.link(*parts, done=done), 303)

    @router.post("/checkpoints/{ref}/alias")
    async def set_alias(request: Request, ref: Ref) -> Response:
        """Set an alias, if it still refers to the checkpoint that the user saw."""
        user, fields = await require_writer(request, site.access)
        name, expect = fields.get("name", ""), fields.get("expect")
        force = fields.get("force") == "yes"
        row = await asyncio.to_thread(changes.set_alias, site.catalog, user, ref, name, expect, force)
        return back("checkpoints", row.checkpoint, done="alias")

    @router.post("/checkpoints/{ref}/hold")
    async def place_hold(request: Request, ref: Ref) -> Response:
        """Place a hold in the user's name."""
        user, fields = await require_writer(request, site.access)
        reason, until = fields.get("reason", ""), changes.day(fields.get("until", ""))
        row = await asyncio.to_thread(changes.place_hold, site.catalog, user, ref, reason, until)
        return back("checkpoints", row.checkpoint, done="hold")

    @router.post("/holds/{hold}/release")
    async def release_hold(request: Request, hold: Ref) -> Response:
        """Release a hold."""
        user, _ = await require_writer(request, site.access)
        row = await asyncio.to_thread(changes.release_hold, site.catalog, user, hold)
        return back("checkpoints", row.checkpoint, done="release")

    @router.post("/inbox/{ref}/retry")
    async def retry(request: Request, ref: Ref) -> Response:
        """Make a failed event due again."""
        user, _ = await require_writer(request, site.access)
        await asyncio.to_thread(changes.retry_event, site.catalog, user, ref)
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
        require_patience(request, site.access)
        found = new_session(fields.get("token", ""), site.access)
        if found is None:
            site.access.failed.note(address_of(request, site.access))
            return site.page(request, "login.html", None, 401, failed=True)
        answer = RedirectResponse(site.link(), 303)
        answer.set_cookie(
            COOKIE,
            found[1],
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


class AliasChange(BaseModel):
    """An alias to set.

    Attributes:
        name: the alias.
        expect: the checkpoint that it must refer to now; "" for a new name; absent for any.
        force: set it though the checkpoint is damaged, a source, or unproven.
    """

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=200)]
    expect: Annotated[str, Field(max_length=1000)] | None = None
    force: bool = False


class NewHold(BaseModel):
    """A hold to place. until: the day on which it ends, ``YYYY-MM-DD``; absent for no end."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, Field(max_length=1000)]
    until: Annotated[str, Field(max_length=10)] | None = None


_Body = TypeVar("_Body", bound=BaseModel)
_CHANGES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    403: {"model": JsonError, "description": "the request comes from another site"},
    409: {"model": JsonError, "description": "the catalog has changed since"},
    413: {"model": JsonError, "description": "the body is too large"},
    415: {"model": JsonError, "description": "the body is not JSON"},
}


def api_actions(site: Site) -> APIRouter:
    """Return the routes that change something."""
    router = APIRouter(prefix="/api/v1", responses=_CHANGES, default_response_class=JSONResponse)

    @router.post(
        "/checkpoints/{ref}/aliases", response_model=dict[str, Any], openapi_extra=_described(AliasChange)
    )
    async def set_alias(request: Request, ref: Ref) -> Any:
        """Set an alias to a checkpoint; it is recorded with the token's user."""
        user = require_token(request, site.access)
        given = await _read(request, AliasChange)
        row = await asyncio.to_thread(
            changes.set_alias, site.catalog, user, ref, given.name, given.expect, given.force
        )
        return as_dict(row)

    @router.post("/checkpoints/{ref}/holds", response_model=dict[str, Any], openapi_extra=_described(NewHold))
    async def place_hold(request: Request, ref: Ref) -> Any:
        """Keep a checkpoint from being deleted."""
        user = require_token(request, site.access)
        given = await _read(request, NewHold)
        until = changes.day(given.until or "")
        return as_dict(
            await asyncio.to_thread(changes.place_hold, site.catalog, user, ref, given.reason, until)
        )

    @router.post("/holds/{hold}/release", response_model=dict[str, Any])
    async def release_hold(request: Request, hold: Ref) -> Any:
        """End a hold; returns it as it was."""
        user = require_token(request, site.access)
        return as_dict(await asyncio.to_thread(changes.release_hold, site.catalog, user, hold))

    @router.post("/inbox/{ref}/retry", response_model=dict[str, list[str]])
    async def retry(request: Request, ref: Ref) -> Any:
        """Make a failed event due again."""
        user = require_token(request, site.access)
        return {"events": list(await asyncio.to_thread(changes.retry_event, site.catalog, user, ref))}

    return router


async def _read(request: Request, kind: type[_Body]) -> _Body:
    """Return the body of a request. Raises `PageRefused`."""
    body = await body_of(request, "application/json")
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise PageRefused(
            400, f"the body cannot be used: {place}: {first['msg']}".replace(": :", ":")
        ) from error


def _described(kind: type[BaseModel]) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": kind.model_json_schema()}},
        }
    }
