"""The pages in HTML. Each reads one snapshot of the catalog, and shows what the command line would."""

from __future__ import annotations

import re
from dataclasses import field
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ckptcore.catalog import aliases, audit, browse, holds, lineage, tensor_differences, training_rows
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.database import clock
from ckptcore.catalog.row_values import row_findings
from ckptcore.catalog.search import search as find
from ckptcore.catalog.types import CheckpointDetail, CheckpointRow, ConversionDetail
from ckptcore.errors import UsageError
from ckptcore.operations.options import RetireOptions
from ckptcore.page import display, pictures
from ckptcore.page.access import csrf_of, require_reader
from ckptcore.page.explained import next_step, stated
from ckptcore.page.mapped_names import mapping_between
from ckptcore.page.retiring import Retiring, command, number
from ckptcore.page.settings import PageAccess
from ckptcore.page.shards import Manifests, shard_map
from ckptcore.utils.dataclass import dataclass

FOLDER = FilePath(__file__).parent
FILES = 200
RUNS_TO_COMPARE = 20
_FLOW_RUN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
Ref = Annotated[str, Path(pattern=r"^[0-9a-f-]{4,36}$")]
Cursor = Annotated[str | None, Query(max_length=100)]
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
    environment.globals |= {"next_step": next_step, "stated": stated}
    return environment


ENVIRONMENT = _environment()


def pages(site: Site) -> APIRouter:
    """Return the routes of the pages."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    def reader(request: Request) -> str | None:
        return require_reader(request, site.access)

    @router.get("/")
    def runs(request: Request, name: Name = "", after: Name = "") -> Response:
        """List training runs."""
        user = reader(request)
        with site.catalog.reading() as conn:
            page = browse.runs(conn, name=name, after=after or None)
        return site.page(request, "runs.html", user, found=page)

    @router.get("/runs/{run:path}")
    def run(request: Request, run: str, before: Cursor = None) -> Response:
        """Show the steps of a run."""
        user = reader(request)
        with site.catalog.reading() as conn:
            page = browse.steps_of(conn, run, before=before)
            names = _metric_names(page.rows, training_rows.MOST_SERIES)
            series = training_rows.over_steps(conn, run, names) if names and before is None else {}
            pair = browse.newest_steps(conn, run)
        drawn = ((name, pictures.chart(name, points)) for name, points in series.items())
        charts = [(name, picture) for name, picture in drawn if picture]
        columns = _metric_names(page.rows)
        return site.page(
            request, "run.html", user, run=run, found=page, names=columns, charts=charts, pair=pair
        )

    @router.get("/checkpoints")
    def checkpoints(request: Request, kind: Name = "", state: Name = "", before: Cursor = None) -> Response:
        """List checkpoints of all runs."""
        user = reader(request)
        with site.catalog.reading() as conn:
            page = browse.checkpoints(conn, kind=kind or None, state=state or None, before=before)
        return site.page(request, "checkpoints.html", user, found=page, names=_metric_names(page.rows))

    @router.get("/checkpoints/{ref}")
    def checkpoint(request: Request, ref: Ref, search: Name = "", after: Name = "") -> Response:
        """Show one checkpoint."""
        user = reader(request)
        detail = site.catalog.show(ref, tensors=False)
        if isinstance(detail, ConversionDetail):
            return site.page(request, "conversion.html", user, detail=detail)
        with site.catalog.reading() as conn:
            tensors = browse.tensors(conn, detail.checkpoint.id, search=search, after=after or None)
            counts = browse.tensor_counts(conn, detail.checkpoint.id)
            steps = lineage.lineage(conn, detail.checkpoint.id, up=True, down=True)
            active_holds = holds.active(conn, clock(conn), detail.checkpoint.id)
            named = aliases.of_checkpoint(conn, detail.checkpoint.id)
            changes = audit.listed(conn, subject=detail.checkpoint.id, limit=20)
            earlier = browse.earlier_step(conn, detail.checkpoint)
            objection = aliases.objections(conn, {detail.checkpoint.id: detail.checkpoint.id[:8]})
        return site.page(
            request,
            "checkpoint.html",
            user,
            detail=detail,
            files=detail.files[:FILES],
            tensors=tensors,
            dtypes=pictures.bars(counts.dtypes),
            sizes=pictures.bars([(_range(p), n, total) for p, n, total in counts.sizes]),
            graph=pictures.lineage(steps, site.of),
            holds=active_holds,
            aliases=named,
            changes=changes,
            objection=objection.get(detail.checkpoint.id),
            earlier=earlier,
            origins=[step.source for step in steps.ancestors if step.depth == 1],
            search=search,
        )

    @router.get("/checkpoints/{ref}/shards")
    def shards(request: Request, ref: Ref, tensor: Name = "") -> Response:
        """Draw which rank holds which box of a tensor."""
        user = reader(request)
        detail = _checkpoint(site, ref)
        row = detail.checkpoint
        manifest = site.manifests.read(row.uri, row.manifest_digest)
        name = tensor or next((t.fqn for t in manifest.tensors if len(t.shape) > 1), "")
        name = name or (manifest.tensors[0].fqn if manifest.tensors else "")
        tensor_map = shard_map(manifest, name)
        mesh = manifest.origin.get("mesh")
        return site.page(
            request,
            "shards.html",
            user,
            row=row,
            found=tensor_map,
            mesh=mesh,
            picture=pictures.shards(tensor_map),
            findings=[f for f in detail.findings if f.fqn == name],
            colours=pictures.COLOURS,
        )

    @router.get("/compare")
    def compare(request: Request, left: Name = "", right: Name = "") -> Response:
        """Show two checkpoints side by side."""
        user = reader(request)
        if not left or not right:
            return _choices_to_compare(site, request, user, left or right)
        sides = [_checkpoint(site, side) for side in (left, right)]
        mapping = mapping_between(site.manifests, sides)
        with site.catalog.reading() as conn:
            ids = (sides[0].checkpoint.id, sides[1].checkpoint.id)
            differences = tensor_differences.compare(conn, *ids, mapping=mapping)
        values: dict[str, Any] = {"sides": sides, "found": differences, "facts": _facts(sides)}
        return site.page(request, "compare.html", user, **values)

    @router.get("/conversions")
    def conversions(request: Request, state: Name = "", before: Cursor = None) -> Response:
        """List conversions."""
        user = reader(request)
        with site.catalog.reading() as conn:
            page = browse.conversions(conn, state=state or None, before=before)
        return site.page(request, "conversions.html", user, found=page)

    @router.get("/conversions/{ref}")
    def conversion(request: Request, ref: Ref) -> Response:
        """Show one conversion."""
        user = reader(request)
        detail = site.catalog.show(ref, tensors=False)
        if not isinstance(detail, ConversionDetail):
            raise UsageError(f"{ref} is a checkpoint, not a conversion")
        return site.page(request, "conversion.html", user, detail=detail)

    @router.get("/search")
    def search(request: Request, q: Name = "") -> Response:
        """Find checkpoints by any part of their names, fingerprint, and digest or name of a file."""
        user = reader(request)
        with site.catalog.reading() as conn:
            hits = find(conn, q)
        return site.page(request, "search.html", user, q=q, found=hits)

    @router.get("/best")
    def best(request: Request, metric: Name = "", goal: Name = "min", run: Name = "") -> Response:
        """Rank checkpoints by a metric."""
        user = reader(request)
        with site.catalog.reading() as conn:
            names = training_rows.names_of_metrics(conn)
            some = browse.runs(conn).rows
            best = training_rows.best(conn, metric, goal, run=run or None, limit=50) if metric else ()
        values: dict[str, Any] = {"metric": metric, "goal": goal, "run": run, "runs": some}
        return site.page(request, "best.html", user, names=names, found=best, **values)

    @router.get("/retire")
    def retire(
        request: Request,
        scope: Name = "",
        keep_last: Name = "",
        keep_every: Name = "",
        rest: Name = "",
        accept_loss: Name = "",
        after: Cursor = None,
    ) -> Response:
        """Show what a policy would keep and free, in parts. Nothing is deleted here."""
        user = reader(request)
        asked = RetireOptions(
            keep_last=number("keep_last", keep_last),
            keep_every=number("keep_every", keep_every),
            rest=rest or None,
            accept_loss=tuple(accept_loss.split()) or None,
        )
        with site.catalog.reading() as conn:
            watched_roots = roots.every(conn)
            some = () if scope else browse.runs(conn).rows
        part = site.retiring.part(site.catalog, asked, scope, after=after) if scope else None
        form = {
            "scope": scope,
            "keep_last": keep_last,
            "keep_every": keep_every,
            "rest": rest,
            "accept_loss": accept_loss,
        }
        next_page = site.link("retire", **form, after=part.next) if part and part.next else None
        values: dict[str, Any] = {
            "scopes": [root.name for root in watched_roots],
            "roots": watched_roots,
            "runs": some,
            "own": next((root.retention for root in watched_roots if root.name == scope), {}),
            "options": asked,
            "command": command(scope, asked),
            "first": site.link("retire", **form),
            "more": next_page,
        }
        return site.page(
            request, "retire.html", user, scope=scope, accept_loss=accept_loss, part=part, **values
        )

    return router


def _choices_to_compare(site: Site, request: Request, user: str | None, side: str) -> Response:
    """Return the page that offers what can be compared: steps of runs, or what is near one checkpoint."""
    pairs: list[tuple[str, CheckpointRow, CheckpointRow]] = []
    with site.catalog.reading() as conn:
        if side:
            row = _checkpoint(site, side).checkpoint
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
    return site.page(request, "compare_choices.html", user, **values)


def _checkpoint(site: Site, ref: str) -> CheckpointDetail:
    detail = site.catalog.show(ref, tensors=False)
    if isinstance(detail, ConversionDetail):
        raise UsageError(f"{ref} is a conversion, not a checkpoint")
    return detail


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
