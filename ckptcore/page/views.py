"""The pages in HTML. Each reads one snapshot of the catalog, and shows what the command line would.

The last ones are for who runs conversions and promotes exports: aliases, roots, both queues and the audit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ckptcore.catalog import (
    aliases,
    audit,
    browse,
    holds,
    lineage,
    queues,
    root_status,
    tensor_differences,
    training_rows,
)
from ckptcore.catalog import history as step_history
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.database import clock
from ckptcore.catalog.row_values import row_findings
from ckptcore.catalog.search import search as find
from ckptcore.catalog.types import CheckpointDetail, CheckpointRow, ConversionDetail
from ckptcore.comparison.step_history import read_history
from ckptcore.errors import UsageError
from ckptcore.operations.options import RetireOptions
from ckptcore.page import display, pictures
from ckptcore.page.access import csrf_of, require_reader
from ckptcore.page.mapped_names import mapping_between
from ckptcore.page.retiring import Retiring, command, number
from ckptcore.page.settings import PageAccess
from ckptcore.page.shards import Manifests, shard_map

FOLDER = FilePath(__file__).parent
FILES = 200
QUEUED = 200  # rows of a queue
RUNS_TO_COMPARE = 20
ALARMS, CHARTS, STEPS = 200, 200, 300  # of a history
_FLOW_RUN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
Ref = Annotated[str, Path(pattern=r"^[0-9a-f-]{4,36}$")]
Cursor = Annotated[str | None, Query(max_length=100)]
Step = Annotated[int | None, Query(ge=-(1 << 63), lt=1 << 63)]
Name = Annotated[str, Query(max_length=1000)]
QueueName = Literal["inbox", "outbox"]

# The result of an action, by the parameter `done` of the page behind it.
DONE = {
    "alias": "The alias was set.",
    "hold": "The hold was placed.",
    "release": "The hold was released.",
    "rollback": "The alias was rolled back.",
    "retry": "It is due again.",
}


@dataclass(frozen=True)
class Site:
    """What all pages share.

    root: the path below which they are. prefect_ui: the address of Prefect's pages, or "".
    """

    catalog: Catalog
    access: PageAccess
    root: str = ""
    manifests: Manifests = field(default_factory=Manifests)
    retiring: Retiring = field(default_factory=Retiring)
    prefect_ui: str = ""

    def link(self, *parts: str, **query: Any) -> str:
        """Return the address of a page."""
        parameters = {k: v for k, v in query.items() if v not in (None, "")}
        path = "/".join(quote(part, safe="") for part in parts)
        return f"{self.root}/{path}" + (f"?{urlencode(parameters)}" if parameters else "")

    def of(self, row: CheckpointRow) -> str:
        """Return the address of a checkpoint."""
        return self.link("checkpoints", row.id)

    def flow_run(self, id: str | None) -> str:
        """Return the address of a flow run in Prefect, or "" if that or the run is unknown."""
        has_page = self.prefect_ui and id is not None and _FLOW_RUN.fullmatch(id)
        return f"{self.prefect_ui}/runs/flow-run/{id}" if has_page else ""

    def page(
        self, request: Request, template: str, user: str | None, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """Return a rendered page."""
        outcome_text = DONE.get(request.query_params.get("done", ""))
        text = ENVIRONMENT.get_template(template).render(
            site=self,
            user=user,
            csrf="" if user is None else csrf_of(request, self.access, user),
            done=outcome_text,
            path=request.scope["path"],
            asked=dict(request.query_params),
            **values,
        )
        return HTMLResponse(text, status)


class Visit:
    """A request to one of the pages. Only who may read gets the catalog, or a rendered page."""

    def __init__(self, site: Site, request: Request) -> None:
        self.site, self.request = site, request

    @cached_property
    def _reader(self) -> tuple[str | None, Catalog]:
        return require_reader(self.request, self.site.access), self.site.catalog

    @property
    def catalog(self) -> Catalog:
        """The catalog. Raises `PageRefused` if a login is needed."""
        return self._reader[1]

    def page(self, template: str, **values: Any) -> HTMLResponse:
        """Return a rendered page. Raises `PageRefused` if a login is needed."""
        return self.site.page(self.request, template, self._reader[0], **values)

    def checkpoint(self, ref: str) -> CheckpointDetail:
        """Return a checkpoint without its tensors. Raises `UsageError` for a conversion."""
        detail = self.catalog.show(ref, tensors=False)
        if isinstance(detail, ConversionDetail):
            raise UsageError(f"{ref} is a conversion, not a checkpoint")
        return detail

    def conversion(self, ref: str) -> ConversionDetail:
        """Return a conversion. Raises `UsageError` for a checkpoint."""
        detail = self.catalog.show(ref, tensors=False)
        if isinstance(detail, CheckpointDetail):
            raise UsageError(f"{ref} is a checkpoint, not a conversion")
        return detail


async def _visit(request: Request) -> Visit:
    return Visit(request.app.state.site, request)


# The parameter of every route. `make_page` stores the site in the application's state.
Caller = Annotated[Visit, Depends(_visit)]


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plain": display.plain,
        "size": display.size,
        "when": display.when,
        "broken": display.broken,
        "shell": display.shell,
        "pretty": display.pretty,
    }
    environment.globals |= {"took": display.took, "bar": pictures.bar, "odd_rows": row_findings}
    environment.globals |= {"next_step": display.next_step, "stated": display.stated}
    return environment


ENVIRONMENT = _environment()
ROUTER = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@ROUTER.get("/")
def runs(visit: Caller, name: Name = "", after: Name = "") -> Response:
    """List training runs."""
    with visit.catalog.reading() as conn:
        page = browse.runs(conn, name=name, after=after or None)
    return visit.page("runs.html", found=page)


@ROUTER.get("/runs/{run:path}")
def run(visit: Caller, run: str, before: Cursor = None) -> Response:
    """Show the steps of a run."""
    with visit.catalog.reading() as conn:
        page = browse.steps_of(conn, run, before=before)
        names = _metric_names(page.rows, training_rows.MOST_SERIES)
        series = training_rows.over_steps(conn, run, names) if names and before is None else {}
        pair = browse.newest_steps(conn, run)
        measured = step_history.steps(conn, run, limit=1)
        alarms = step_history.alarms_of(conn, run)
    drawn = ((name, pictures.chart(name, points)) for name, points in series.items())
    charts = [(name, picture) for name, picture in drawn if picture]
    columns = _metric_names(page.rows)
    values: dict[str, Any] = {"measured": bool(measured), "alarms": len(alarms)}
    return visit.page("run.html", run=run, found=page, names=columns, charts=charts, pair=pair, **values)


@ROUTER.get("/history/{run:path}")
def history(visit: Caller, run: str, before: Step = None) -> Response:
    """Show norms, changes and alarms of the measured steps of a run."""
    run_history = read_history(visit.catalog, run, tensors=True, limit=STEPS, before=before)
    drawn = ((name, pictures.chart(name, points)) for name, points in run_history.layers().items())
    steps = [step.step or 0 for step in run_history.steps]
    alarmed = {alarm.step for alarm in run_history.alarms if alarm.step is not None}
    values: dict[str, Any] = {
        "steps": list(reversed(run_history.steps)),
        "next": steps[0] if len(steps) == STEPS else None,
        "alarms": run_history.alarms[:ALARMS],
        "hidden": max(len(run_history.alarms) - ALARMS, 0),
        "charts": [(name, picture) for name, picture in drawn if picture][:CHARTS],
        "damaged": run_history.damaged,
        "picture": pictures.change_map(steps, run_history.moves(), alarmed),
    }
    return visit.page("history.html", run=run, **values)


@ROUTER.get("/checkpoints")
def checkpoints(visit: Caller, kind: Name = "", state: Name = "", before: Cursor = None) -> Response:
    """List checkpoints of all runs."""
    with visit.catalog.reading() as conn:
        page = browse.checkpoints(conn, kind=kind or None, state=state or None, before=before)
    return visit.page("checkpoints.html", found=page, names=_metric_names(page.rows))


@ROUTER.get("/checkpoints/{ref}")
def checkpoint(visit: Caller, ref: Ref, search: Name = "", after: Name = "") -> Response:
    """Show one checkpoint."""
    detail = visit.catalog.show(ref, tensors=False)
    if isinstance(detail, ConversionDetail):
        return visit.page("conversion.html", detail=detail)
    with visit.catalog.reading() as conn:
        tensors = browse.tensors(conn, detail.checkpoint.id, search=search, after=after or None)
        counts = browse.tensor_counts(conn, detail.checkpoint.id)
        steps = lineage.lineage(conn, detail.checkpoint.id, up=True, down=True)
        active_holds = holds.active(conn, clock(conn), detail.checkpoint.id)
        named = aliases.of_checkpoint(conn, detail.checkpoint.id)
        changes = audit.listed(conn, subject=detail.checkpoint.id, limit=20)
        earlier = browse.earlier_step(conn, detail.checkpoint)
        objection = aliases.objections(conn, {detail.checkpoint.id: detail.checkpoint.id[:8]})
    return visit.page(
        "checkpoint.html",
        detail=detail,
        files=detail.files[:FILES],
        tensors=tensors,
        dtypes=pictures.bars(counts.dtypes),
        sizes=pictures.bars([(_range(p), n, total) for p, n, total in counts.sizes]),
        graph=pictures.lineage(steps, visit.site.of),
        holds=active_holds,
        aliases=named,
        changes=changes,
        objection=objection.get(detail.checkpoint.id),
        earlier=earlier,
        origins=[step.source for step in steps.ancestors if step.depth == 1],
        search=search,
    )


@ROUTER.get("/checkpoints/{ref}/shards")
def shards(visit: Caller, ref: Ref, tensor: Name = "") -> Response:
    """Draw which rank holds which box of a tensor."""
    detail = visit.checkpoint(ref)
    row = detail.checkpoint
    manifest = visit.site.manifests.read(row.uri, row.manifest_digest)
    name = tensor or next((t.fqn for t in manifest.tensors if len(t.shape) > 1), "")
    name = name or (manifest.tensors[0].fqn if manifest.tensors else "")
    tensor_map = shard_map(manifest, name)
    mesh = manifest.origin.get("mesh")
    return visit.page(
        "shards.html",
        row=row,
        found=tensor_map,
        mesh=mesh,
        picture=pictures.shards(tensor_map),
        findings=[f for f in detail.findings if f.fqn == name],
        colours=pictures.COLOURS,
    )


@ROUTER.get("/compare")
def compare(visit: Caller, left: Name = "", right: Name = "") -> Response:
    """Show two checkpoints side by side."""
    if not left or not right:
        return _choices_to_compare(visit, left or right)
    sides = [visit.checkpoint(side) for side in (left, right)]
    mapping = mapping_between(visit.site.manifests, sides)
    with visit.catalog.reading() as conn:
        ids = (sides[0].checkpoint.id, sides[1].checkpoint.id)
        differences = tensor_differences.compare(conn, *ids, mapping=mapping)
    values: dict[str, Any] = {"sides": sides, "found": differences, "facts": _facts(sides)}
    return visit.page("compare.html", **values)


@ROUTER.get("/conversions")
def conversions(visit: Caller, state: Name = "", before: Cursor = None) -> Response:
    """List conversions."""
    with visit.catalog.reading() as conn:
        page = browse.conversions(conn, state=state or None, before=before)
    return visit.page("conversions.html", found=page)


@ROUTER.get("/conversions/{ref}")
def conversion(visit: Caller, ref: Ref) -> Response:
    """Show one conversion."""
    return visit.page("conversion.html", detail=visit.conversion(ref))


@ROUTER.get("/search")
def search(visit: Caller, q: Name = "") -> Response:
    """Find checkpoints by any part of their names, fingerprint, and digest or name of a file."""
    with visit.catalog.reading() as conn:
        hits = find(conn, q)
    return visit.page("search.html", q=q, found=hits)


@ROUTER.get("/best")
def best(visit: Caller, metric: Name = "", goal: Name = "min", run: Name = "") -> Response:
    """Rank checkpoints by a metric."""
    with visit.catalog.reading() as conn:
        names = training_rows.names_of_metrics(conn)
        some = browse.runs(conn).rows
        best = training_rows.best(conn, metric, goal, run=run or None, limit=50) if metric else ()
    values: dict[str, Any] = {"metric": metric, "goal": goal, "run": run, "runs": some}
    return visit.page("best.html", names=names, found=best, **values)


@ROUTER.get("/retire")
def retire(
    visit: Caller,
    scope: Name = "",
    keep_last: Name = "",
    keep_every: Name = "",
    rest: Name = "",
    accept_loss: Name = "",
    after: Cursor = None,
) -> Response:
    """Show what a policy would keep and free, in parts. Nothing is deleted here."""
    with visit.catalog.reading() as conn:
        watched_roots = roots.every(conn)
        some = () if scope else browse.runs(conn).rows
    asked = RetireOptions(
        keep_last=number("keep_last", keep_last),
        keep_every=number("keep_every", keep_every),
        rest=rest or None,
        accept_loss=tuple(accept_loss.split()) or None,
    )
    part = visit.site.retiring.part(visit.catalog, asked, scope, after=after) if scope else None
    form = {
        "scope": scope,
        "keep_last": keep_last,
        "keep_every": keep_every,
        "rest": rest,
        "accept_loss": accept_loss,
    }
    next_page = visit.site.link("retire", **form, after=part.next) if part and part.next else None
    values: dict[str, Any] = {
        "scopes": [root.name for root in watched_roots],
        "roots": watched_roots,
        "runs": some,
        "own": next((root.retention for root in watched_roots if root.name == scope), {}),
        "options": asked,
        "command": command(scope, asked),
        "first": visit.site.link("retire", **form),
        "more": next_page,
    }
    return visit.page("retire.html", scope=scope, accept_loss=accept_loss, part=part, **values)


@ROUTER.get("/aliases")
def names(visit: Caller, part: Name = "", after: Name = "") -> Response:
    """List aliases, and what speaks against serving what they refer to."""
    with visit.catalog.reading() as conn:
        # One more than a page has, to tell whether another page follows.
        rows = aliases.every(conn, part=part, after=after or None, limit=browse.LIMIT + 1)
        page_rows = rows[: browse.LIMIT]
        objections = aliases.objections(conn, {row.checkpoint: row.checkpoint[:8] for row in page_rows})
    next = page_rows[-1].name if len(rows) > browse.LIMIT else None
    return visit.page("aliases.html", found=page_rows, objections=objections, part=part, next=next)


@ROUTER.get("/aliases/{name:path}")
def alias(visit: Caller, name: str) -> Response:
    """Show one alias with its history, and where a rollback would lead."""
    with visit.catalog.reading() as conn:
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
    return visit.page(
        "alias.html",
        name=name,
        row=row,
        before=before,
        checkpoints=checkpoints,
        history=history,
        objections=objections,
    )


@ROUTER.get("/roots")
def watched(visit: Caller) -> Response:
    """List watched roots, and what sweeps saw below them."""
    with visit.catalog.reading() as conn:
        root_rows = roots.every(conn)
        counts = root_status.counts_of(conn, root_rows)
    return visit.page("roots.html", found=root_rows, counts=counts)


@ROUTER.get("/roots/{name:path}")
def root(visit: Caller, name: str) -> Response:
    """Show one root: its settings, its last sweep, and what waits there and why."""
    with visit.catalog.reading() as conn:
        row = roots.get(conn, name)
        status = root_status.status(conn, row)
        now = clock(conn)
    return visit.page("root.html", row=row, found=status, now=now, newest=root_status.NEWEST)


@ROUTER.get("/inbox")
def inbox(visit: Caller) -> Response:
    """List events that are not done."""
    with visit.catalog.reading() as conn:
        events = queues.inbox.listed(conn, None, QUEUED)
        waiting = queues.inbox.postponed(conn, clock(conn))
    return visit.page("inbox.html", found=events, waiting=waiting)


@ROUTER.get("/outbox")
def outbox(visit: Caller, state: Name = "") -> Response:
    """List messages to endpoints; without a state, those that are not done."""
    with visit.catalog.reading() as conn:
        messages = queues.outbox.listed(conn, state or None, QUEUED)
        depth = queues.outbox.depth(conn)
    return visit.page("outbox.html", found=messages, depth=depth, state=state)


@ROUTER.get("/audit")
def changes(visit: Caller, before: Annotated[int | None, Query(ge=1, lt=1 << 63)] = None) -> Response:
    """List changes, newest first."""
    with visit.catalog.reading() as conn:
        audit_rows = audit.listed(conn, before=before, limit=100)
    return visit.page("audit.html", found=audit_rows)


def _choices_to_compare(visit: Visit, side: str) -> Response:
    """Return the page that offers what can be compared: steps of runs, or what is near one checkpoint."""
    pairs: list[tuple[str, CheckpointRow, CheckpointRow]] = []
    with visit.catalog.reading() as conn:
        if side:
            row = visit.checkpoint(side).checkpoint
            earlier = browse.earlier_step(conn, row)
            pairs += [("the step before", earlier, row)] if earlier is not None else []
            steps = lineage.lineage(conn, row.id, up=True, down=True)
            near = [step for step in (*steps.ancestors, *steps.descendants) if step.depth == 1]
            pairs += [(step.conversion.made_for, step.source, step.derived) for step in near]
        else:
            for run in browse.runs(conn, limit=RUNS_TO_COMPARE).rows:
                newest = browse.newest_steps(conn, run.name)
                pairs += [(run.name, *newest)] if newest is not None else []
        named = aliases.every(conn, limit=browse.LIMIT)
    values: dict[str, Any] = {"side": side, "pairs": pairs[: browse.LIMIT], "names": named}
    return visit.page("compare_choices.html", **values)


def _metric_names(rows: tuple[browse.Listed, ...], most: int = 3) -> list[str]:
    """Return the metrics that a list shows: those that most of its rows have."""
    count_by_name: dict[str, int] = {}
    for row in rows:
        for name in row.metrics:
            count_by_name[name] = count_by_name.get(name, 0) + 1
    return sorted(sorted(count_by_name, key=lambda n: (-count_by_name[n], len(n), n))[:most])


def _facts(sides: list[CheckpointDetail]) -> list[tuple[str, list[Any]]]:
    """Return (fact, value of each side) for a comparison."""
    rows = [side.checkpoint for side in sides]
    facts: list[tuple[str, list[Any]]] = [
        ("place", [r.uri for r in rows]),
        ("kind", [r.kind for r in rows]),
        ("format", [r.format for r in rows]),
        ("state", [r.state for r in rows]),
        ("run", [r.run or "-" for r in rows]),
        ("step", ["-" if r.step is None else r.step for r in rows]),
        ("size", [display.size(r.nbytes) for r in rows]),
        ("tensors", [r.num_tensors for r in rows]),
        ("dtypes", [", ".join(r.dtypes) for r in rows]),
        ("fingerprint", [r.fingerprint or "-" for r in rows]),
    ]
    names = sorted({n for s in sides if s.training for n in s.training.facts.metrics})
    for name in names[:20]:
        values = [s.training.facts.metrics.get(name) if s.training else None for s in sides]
        facts.append((f"metric {name}", ["-" if m is None else m.text for m in values]))
    return facts


def _range(power: int) -> str:
    return f"{display.size(1 << power)} to {display.size(1 << (power + 1))}"
