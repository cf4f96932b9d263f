"""The pages for who runs conversions and promotes exports: aliases, roots, both queues and the audit."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse

from ckptcore.catalog import aliases, audit, browse, queues, root_status
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.database import clock
from ckptcore.page.access import require_reader
from ckptcore.page.views import Name, Site

QUEUED = 200  # rows of a queue


def operator_pages(site: Site) -> APIRouter:
    """Return the routes of these pages."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    def reader(request: Request) -> str | None:
        return require_reader(request, site.access)

    @router.get("/aliases")
    def names(request: Request, part: Name = "", after: Name = "") -> Response:
        """List aliases, and what speaks against serving what they refer to."""
        user = reader(request)
        with site.catalog.reading() as conn:
            # One more than a page has, to tell whether another page follows.
            rows = aliases.every(conn, part=part, after=after or None, limit=browse.LIMIT + 1)
            page_rows = rows[: browse.LIMIT]
            objections = aliases.objections(conn, {row.checkpoint: row.checkpoint[:8] for row in page_rows})
        next = page_rows[-1].name if len(rows) > browse.LIMIT else None
        return site.page(
            request, "aliases.html", user, found=page_rows, objections=objections, part=part, next=next
        )

    @router.get("/aliases/{name:path}")
    def alias(request: Request, name: str) -> Response:
        """Show one alias with its history, and where a rollback would lead."""
        user = reader(request)
        with site.catalog.reading() as conn:
            history = aliases.history(conn, name)
            row = aliases.perhaps(conn, name)
            if row is None and not history:
                aliases.get(conn, name)  # raises: there is none, and never was
            before = None if row is None else aliases.perhaps_previous(conn, row)
            ids = {row.checkpoint} if row else set()
            ids |= {before} if before else set()
            checkpoints = {
                checkpoint.checkpoint.id: checkpoint for checkpoint in browse.listed(conn, sorted(ids))
            }
            objections = aliases.objections(conn, {id: id[:8] for id in ids})
        return site.page(
            request,
            "alias.html",
            user,
            name=name,
            row=row,
            before=before,
            checkpoints=checkpoints,
            history=history,
            objections=objections,
        )

    @router.get("/roots")
    def watched(request: Request) -> Response:
        """List watched roots, and what sweeps saw below them."""
        user = reader(request)
        with site.catalog.reading() as conn:
            root_rows = roots.every(conn)
            counts = root_status.counts_of(conn, root_rows)
        return site.page(request, "roots.html", user, found=root_rows, counts=counts)

    @router.get("/roots/{name:path}")
    def root(request: Request, name: str) -> Response:
        """Show one root: its settings, its last sweep, and what waits there and why."""
        user = reader(request)
        with site.catalog.reading() as conn:
            row = roots.get(conn, name)
            status = root_status.status(conn, row)
            now = clock(conn)
        return site.page(
            request, "root.html", user, row=row, found=status, now=now, newest=root_status.NEWEST
        )

    @router.get("/inbox")
    def inbox(request: Request) -> Response:
        """List events that are not done."""
        user = reader(request)
        with site.catalog.reading() as conn:
            events = queues.inbox.listed(conn, None, QUEUED)
            waiting = queues.inbox.postponed(conn, clock(conn))
        return site.page(request, "inbox.html", user, found=events, waiting=waiting)

    @router.get("/outbox")
    def outbox(request: Request, state: Name = "") -> Response:
        """List messages to endpoints; without a state, those that are not done."""
        user = reader(request)
        with site.catalog.reading() as conn:
            messages = queues.outbox.listed(conn, state or None, QUEUED)
            depth = queues.outbox.depth(conn)
        return site.page(request, "outbox.html", user, found=messages, depth=depth, state=state)

    @router.get("/audit")
    def changes(request: Request, before: Annotated[int | None, Query(ge=1, lt=1 << 63)] = None) -> Response:
        """List changes, newest first."""
        user = reader(request)
        with site.catalog.reading() as conn:
            audit_rows = audit.listed(conn, before=before, limit=100)
        return site.page(request, "audit.html", user, found=audit_rows)

    return router
