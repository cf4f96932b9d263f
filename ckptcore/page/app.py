"""Assemble the page: routes in HTML and JSON, files, errors, and the guard before them."""

from __future__ import annotations

import logging
import math
import secrets
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.exceptions import HTTPException

from ckptcore.catalog import audit, default_url, open_catalog
from ckptcore.catalog.catalog import Catalog
from ckptcore.errors import CatalogUnavailable, CkptError, Conflict, UsageError
from ckptcore.page import actions, api, api_actions, http_server, views
from ckptcore.page.access import Guard, PageRefused, user_of
from ckptcore.page.settings import MIN_TOKEN, PageAccess, prefect_address, session_key
from ckptcore.page.views import FOLDER, Site

FILES = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
_MISSING = ("has no", "there is no", "no checkpoint")
_log = logging.getLogger("ckptcore.page")


def make_page(catalog: Catalog, access: PageAccess, root: str = "", prefect_ui: str = "") -> FastAPI:
    """Return the application.

    Args:
        catalog: the open catalog.
        access: who may read and change what.
        root: the path below which it is mounted, or "".
        prefect_ui: the address of Prefect's pages, to which flow runs are links; "" if unknown.
    """
    site = Site(catalog, access, root, prefect_ui=prefect_ui.rstrip("/"))
    # No documentation pages: they load scripts from other servers.
    app = FastAPI(title="ckptcore catalog", docs_url=None, redoc_url=None, version="1")
    app.state.site = site
    for routes in (api, api_actions, actions, views):
        app.include_router(routes.ROUTER)

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
        problems = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()[:5])
        return answer(request, 400, "usage", f"a value cannot be used: {problems}")

    @app.exception_handler(HTTPException)
    async def missing(request: Request, error: HTTPException) -> Response:
        response = answer(request, error.status_code, "http", str(error.detail))
        response.headers.update(error.headers or {})
        return response

    app.add_middleware(Guard, access=access)
    return app


def _status(error: CkptError) -> int:
    if isinstance(error, CatalogUnavailable):
        return 503
    if isinstance(error, Conflict):
        return 409
    if isinstance(error, UsageError):
        return 404 if any(text in error.message for text in _MISSING) else 400
    return 404 if error.code in ("source-unreadable", "not-a-checkpoint") else 422


CONNECTIONS = 200  # open at a time


def serve(catalog: str | None, host: str, port: int, token: str | None, hosts: tuple[str, ...]) -> None:
    """Serve until SIGTERM or SIGINT. Prints the address, and the token for changes, on stdout.

    Args:
        catalog: the URL of the catalog; None for the default.
        host: the address to listen on. Elsewhere than on loopback, reading needs the token, too.
        port: 0 picks a free one.
        token: the token of a login; None makes one.
        hosts: further names under which browsers reach this server.
    """
    local = http_server.is_local(host, hosts, "pages.example")
    if token is not None and len(token) < MIN_TOKEN:
        raise UsageError(f"the token must have {MIN_TOKEN} characters or more (got {len(token)})")
    login_token = token or secrets.token_urlsafe(24)
    names = frozenset([*http_server.LOOPBACK, *hosts] if local else hosts)
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
        lines = [f"the catalog page is at {http_server.address_of(host, listener)}"]
        if token is None:
            locked_pages = "changes" if local else "every page"
            lines.append(f"{locked_pages} need a login with this token: {login_token}")
        http_server.serve(app, listener, connections=CONNECTIONS, grace=http_server.GRACE, lines=lines)
