"""The data of the pages as JSON, described by OpenAPI at ``/openapi.json``.

Lists have the form ``{"rows": [...], "next": cursor}``; the cursor is the parameter of the next request, and
null at the end. Values are those of ``ckptcore catalog ... --output json``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from ckptcore.catalog import (
    aliases,
    as_dict,
    audit,
    browse,
    lineage,
    queues,
    root_status,
    tensor_differences,
    training_rows,
)
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.search import search as find
from ckptcore.operations.options import RetireOptions
from ckptcore.page.display import finite
from ckptcore.page.mapped_names import mapping_between
from ckptcore.page.shards import shard_map
from ckptcore.page.views import Caller, Ref

Limit = Annotated[int, Query(ge=1, le=browse.MOST)]
Cursor = Annotated[str | None, Query(max_length=100)]
Text = Annotated[str, Query(max_length=1000)]
QueueState = Literal["waiting", "taken", "done", "failed"] | None


class JsonError(BaseModel):
    """An error. error: a stable code. hint: the next step."""

    error: str
    message: str
    hint: str = ""


class JsonRows(BaseModel):
    """One page of a list. next: the cursor of the next page, or null. An odd row has ``trouble``."""

    rows: list[dict[str, Any]]
    next: str | None = None


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": JsonError, "description": "a value cannot be used"},
    401: {"model": JsonError, "description": "a login is needed"},
    404: {"model": JsonError, "description": "there is no such thing"},
    421: {"description": "the Host header names another server", "content": {"text/plain": {}}},
    429: {"model": JsonError, "description": "too many failed logins from this address"},
    503: {"model": JsonError, "description": "the catalog does not answer"},
}

ROUTER = APIRouter(prefix="/api/v1", responses=ERRORS, default_response_class=JSONResponse)


def _rows(page: browse.Page[Any]) -> dict[str, Any]:
    return {"rows": [finite(as_dict(row)) for row in page.rows], "next": page.next}


@ROUTER.get("/runs", response_model=JsonRows)
def runs(visit: Caller, name: Text = "", after: Text = "", limit: Limit = browse.LIMIT) -> Any:
    """List training runs by name; `name` is the beginning of it, `after` the cursor."""
    with visit.catalog.reading() as conn:
        return _rows(browse.runs(conn, name=name, after=after or None, limit=limit))


@ROUTER.get("/steps", response_model=JsonRows)
def steps(visit: Caller, run: Text, before: Cursor = None, limit: Limit = browse.LIMIT) -> Any:
    """List the current checkpoints of a run, the newest step first."""
    with visit.catalog.reading() as conn:
        return _rows(browse.steps_of(conn, run, before=before, limit=limit))


@ROUTER.get("/checkpoints", response_model=JsonRows)
def checkpoints(
    visit: Caller,
    kind: Literal["source", "derived"] | None = None,
    state: Literal["present", "damaged", "incomplete", "replaced", "gone", "retired", "deleted"]
    | None = None,
    before: Cursor = None,
    limit: Limit = browse.LIMIT,
) -> Any:
    """List checkpoints, newest first."""
    with visit.catalog.reading() as conn:
        return _rows(browse.checkpoints(conn, kind=kind, state=state, before=before, limit=limit))


@ROUTER.get("/checkpoints/{ref}", response_model=dict[str, Any])
def checkpoint(visit: Caller, ref: Ref) -> Any:
    """Return one checkpoint, without its tensors; up to 500 of its files."""
    form = as_dict(visit.checkpoint(ref))
    del form["tensors"]
    form["files"] = form["files"][: browse.MOST]
    return finite(form)


@ROUTER.get("/checkpoints/{ref}/tensors", response_model=JsonRows)
def tensors(visit: Caller, ref: Ref, search: Text = "", after: Text = "", limit: Limit = browse.LIMIT) -> Any:
    """List tensors by name."""
    with visit.catalog.reading() as conn:
        return _rows(browse.tensors(conn, ref, search=search, after=after or None, limit=limit))


@ROUTER.get("/checkpoints/{ref}/files", response_model=JsonRows)
def files(visit: Caller, ref: Ref, after: Text = "", limit: Limit = browse.LIMIT) -> Any:
    """List files by path."""
    with visit.catalog.reading() as conn:
        return _rows(browse.files(conn, ref, after=after or None, limit=limit))


@ROUTER.get("/checkpoints/{ref}/counts", response_model=dict[str, Any])
def counts(visit: Caller, ref: Ref) -> Any:
    """Return tensors and bytes by dtype and by size."""
    with visit.catalog.reading() as conn:
        return as_dict(browse.tensor_counts(conn, ref))


@ROUTER.get("/checkpoints/{ref}/lineage", response_model=dict[str, Any])
def lineages(visit: Caller, ref: Ref) -> Any:
    """Return what a checkpoint was made from, and what was made from it."""
    with visit.catalog.reading() as conn:
        return finite(as_dict(lineage.lineage(conn, ref, up=True, down=True)))


@ROUTER.get("/checkpoints/{ref}/shards", response_model=dict[str, Any])
def shards(visit: Caller, ref: Ref, tensor: Text) -> Any:
    """Return which file and rank holds which box of a tensor. The checkpoint itself is read."""
    row = visit.checkpoint(ref).checkpoint
    return as_dict(shard_map(visit.site.manifests.read(row.uri, row.manifest_digest), tensor))


@ROUTER.get("/conversions", response_model=JsonRows)
def conversions(
    visit: Caller,
    state: Literal["running", "succeeded", "failed"] | None = None,
    before: Cursor = None,
    limit: Limit = browse.LIMIT,
) -> Any:
    """List conversions, newest first."""
    with visit.catalog.reading() as conn:
        return _rows(browse.conversions(conn, state=state, before=before, limit=limit))


@ROUTER.get("/conversions/{ref}", response_model=dict[str, Any])
def conversion(visit: Caller, ref: Ref) -> Any:
    """Return one conversion."""
    return finite(as_dict(visit.conversion(ref)))


@ROUTER.get("/compare", response_model=dict[str, Any])
def compare(visit: Caller, left: Text, right: Text) -> Any:
    """Compare the tensors of two checkpoints, by what the catalog knows.

    If one was exported from the other, tensors are compared under the names that the export gives them.
    `unmapped` says why that was not possible.
    """
    sides = [visit.checkpoint(side) for side in (left, right)]
    mapping = mapping_between(visit.site.manifests, sides)
    with visit.catalog.reading() as conn:
        ids = (sides[0].checkpoint.id, sides[1].checkpoint.id)
        return as_dict(tensor_differences.compare(conn, *ids, mapping=mapping))


@ROUTER.get("/metrics", response_model=dict[str, Any])
def metrics(visit: Caller, run: Text, name: Annotated[list[str] | None, Query()] = None) -> Any:
    """Return metrics over the steps of a run: `series` has [step, value] by name, of the newest steps."""
    with visit.catalog.reading() as conn:
        return {"series": finite(as_dict(training_rows.over_steps(conn, run, name or ())))}


@ROUTER.get("/best", response_model=JsonRows)
def best(
    visit: Caller,
    metric: Text,
    goal: Literal["min", "max"] = "min",
    run: Text = "",
    kind: Literal["source", "derived"] | None = None,
    limit: Limit = 10,
) -> Any:
    """Return the checkpoints with the best values of a metric, the best first."""
    with visit.catalog.reading() as conn:
        ranked = training_rows.best(conn, metric, goal, run=run or None, kind=kind, limit=limit)
    return _rows(browse.Page(ranked))


@ROUTER.get("/search", response_model=dict[str, Any])
def search(visit: Caller, q: Text) -> Any:
    """Find checkpoints by id, fingerprint, digest of a file, or any part of a name, place, alias or step.

    Training runs are found by any part of their names. `more`: there are more checkpoints than these.
    """
    with visit.catalog.reading() as conn:
        hits = find(conn, q)
    return finite(
        {
            "checkpoints": [as_dict(row) for row in hits.places],
            "runs": [as_dict(row) for row in hits.runs],
            "more": hits.more,
        }
    )


async def _retire_options(
    keep_last: Annotated[int | None, Query(ge=1, le=10**12)] = None,
    keep_every: Annotated[int | None, Query(ge=1, le=10**12)] = None,
    rest: Literal["full", "weights"] | None = None,
    accept_loss: Annotated[list[str] | None, Query(max_length=100)] = None,
) -> RetireOptions:
    allowed = tuple(accept_loss or ()) or None
    return RetireOptions(keep_last=keep_last, keep_every=keep_every, rest=rest, accept_loss=allowed)


@ROUTER.get("/retire", response_model=JsonRows)
def retire(
    visit: Caller,
    scope: Text,
    asked: Annotated[RetireOptions, Depends(_retire_options)],
    after: Cursor = None,
    limit: Limit = browse.LIMIT,
) -> Any:
    """Return what `retire` would do with the sources of a watched root or a run; it deletes nothing.

    What is not given is taken from the retention of the root. A page ends early if its sources take long.
    """
    part = visit.site.retiring.part(visit.catalog, asked, scope, after=after, limit=limit)
    forms = []
    for item in part.items:
        row = item.as_dict()
        for name in ("given_up", "unproven"):
            row[name] = row[name][: browse.MOST]
        forms.append(finite(row))
    return {"rows": forms, "next": part.next}


@ROUTER.get("/inbox", response_model=JsonRows)
def inbox(visit: Caller, state: QueueState = None, limit: Limit = browse.LIMIT) -> Any:
    """List the newest events of a state; without one, those that are not done. Bodies are left out."""
    with visit.catalog.reading() as conn:
        events = queues.inbox.listed(conn, state, limit)
    page = _rows(browse.Page(events))
    return page | {"rows": [{k: v for k, v in row.items() if k != "body"} for row in page["rows"]]}


@ROUTER.get("/outbox", response_model=JsonRows)
def outbox(visit: Caller, state: QueueState = None, limit: Limit = browse.LIMIT) -> Any:
    """List the newest messages to endpoints of a state; without one, those that are not done."""
    with visit.catalog.reading() as conn:
        return _rows(browse.Page(queues.outbox.listed(conn, state, limit)))


@ROUTER.get("/aliases", response_model=JsonRows)
def names(visit: Caller, part: Text = "", after: Text = "", limit: Limit = browse.MOST) -> Any:
    """List aliases by name; `part` is any part of it, `after` the cursor."""
    with visit.catalog.reading() as conn:
        alias_rows = aliases.every(conn, part=part, after=after or None, limit=limit + 1)
    return _rows(
        browse.Page(alias_rows[:limit], alias_rows[limit - 1].name if len(alias_rows) > limit else None)
    )


@ROUTER.get("/aliases/{name:path}", response_model=dict[str, Any])
def alias(visit: Caller, name: str) -> Any:
    """Return an alias, its changes, and what speaks against serving what it refers to."""
    with visit.catalog.reading() as conn:
        row = aliases.get(conn, name)
        objection = aliases.objections(conn, {row.checkpoint: row.checkpoint}).get(row.checkpoint)
        history = aliases.history(conn, name)
        before = aliases.perhaps_previous(conn, row)
    return finite(
        {
            "alias": as_dict(row),
            "before": before,
            "objection": None if objection is None else as_dict(objection),
            "history": [as_dict(change) for change in history],
        }
    )


@ROUTER.get("/roots", response_model=JsonRows)
def watched(visit: Caller) -> Any:
    """List watched roots with what sweeps saw below them."""
    with visit.catalog.reading() as conn:
        root_rows = roots.every(conn)
        counts = root_status.counts_of(conn, root_rows)
    page = [as_dict(root) | {"counts": as_dict(counts[root.name])} for root in root_rows]
    return {"rows": [finite(row) for row in page], "next": None}


@ROUTER.get("/roots/{name:path}", response_model=dict[str, Any])
def root(visit: Caller, name: str) -> Any:
    """Return a watched root: its settings, its last sweep, its lag, and what waits there and why."""
    with visit.catalog.reading() as conn:
        row = roots.get(conn, name)
        status = root_status.status(conn, row)
    return finite({"root": as_dict(row), "status": as_dict(status)})


@ROUTER.get("/audit", response_model=JsonRows)
def changes(
    visit: Caller, before: Annotated[int | None, Query(ge=1, lt=1 << 63)] = None, limit: Limit = browse.LIMIT
) -> Any:
    """List changes of aliases, holds and queues, newest first."""
    with visit.catalog.reading() as conn:
        audit_rows = audit.listed(conn, before=before, limit=limit + 1)
    return _rows(
        browse.Page(audit_rows[:limit], str(audit_rows[limit - 1].id) if len(audit_rows) > limit else None)
    )
