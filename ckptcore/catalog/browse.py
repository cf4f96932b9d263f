"""Read the catalog page by page, for people who look through it.

Every list is read by its key: a page costs the same at the beginning and at the end of 100,000 rows. A cursor
names the last row; the database compares its values, which may be odd (`ckptcore.catalog.row_values`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy import and_, case, func, or_, select

from ckptcore.catalog.models import (
    Alias,
    Checkpoint,
    CheckpointFile,
    Conversion,
    FindingRecord,
    Tensor,
    TrainingRun,
)
from ckptcore.catalog.query import (
    checkpoint_row,
    checkpoint_rows,
    conversion_row,
    file_row,
    loadable,
    newest_checkpoints,
    newest_conversions,
    part_of,
    resolve_checkpoint,
    sum_of,
    tensor_row,
)
from ckptcore.catalog.row_values import as_integer, checked, is_integer
from ckptcore.catalog.training import Measured
from ckptcore.catalog.training_rows import metrics_of
from ckptcore.catalog.types import CheckpointRow, ConversionRow, FileRow, Kind, State, TensorRow
from ckptcore.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

LIMIT = 50
MOST = 500  # rows of one page
NOT_CURRENT = (State.REPLACED.value, State.GONE.value, State.RETIRED.value, State.DELETED.value)
_CURSOR = re.compile(r"[0-9]{1,18}")
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[_Row]):
    """Rows, and the cursor of the next page; None for the last one."""

    rows: tuple[_Row, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A training run with what the catalog has of it. Counts leave out what was replaced or deleted.

    trouble: what is odd in a row of its checkpoints, without which its numbers are.
    """

    name: str
    sources: int
    outputs: int
    damaged: int
    nbytes: int
    first_step: int | None
    last_step: int | None
    last_at: datetime | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint in a list.

    Attributes:
        checkpoint: the checkpoint.
        errors: its open errors.
        warnings: its open warnings.
        metrics: its metrics by name.
        aliases: its names.
        loadable: ``yes``, ``no`` or ``unproven`` for an export, otherwise None.
    """

    checkpoint: CheckpointRow
    errors: int = 0
    warnings: int = 0
    metrics: dict[str, Measured] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    loadable: str | None = None


@dataclass(frozen=True, slots=True)
class TensorCounts:
    """How a checkpoint's tensors are distributed.

    dtypes: (dtype, tensors, bytes), most bytes first. sizes: (power of two, tensors, bytes) of
    the tensors with at least as many bytes, and fewer than twice as many.
    """

    dtypes: tuple[tuple[str, int, int], ...]
    sizes: tuple[tuple[int, int, int], ...]


def runs(
    conn: Connection, *, name: str = "", part: str = "", after: str | None = None, limit: int = LIMIT
) -> Page[RunSummary]:
    """Return training runs by name.

    Args:
        conn: a transaction.
        name: the beginning of their names.
        part: any part of their names.
        after: the last name of a page.
        limit: the most runs.
    """
    # One row more than the page: it tells whether there is a next page.
    query = (
        select(TrainingRun.id, TrainingRun.name).order_by(TrainingRun.name).limit(_require_limit(limit) + 1)
    )
    if name:
        query = query.where(TrainingRun.name >= name, TrainingRun.name.startswith(name, autoescape=True))
    if part:
        query = query.where(part_of(conn, TrainingRun.name, part))
    if after:
        query = query.where(TrainingRun.name > after)
    named = {row.id: str(row.name) for row in conn.execute(query)}
    has_next_page = len(named) > limit
    ids = list(named)[:limit]
    damaged = Checkpoint.state.in_((State.DAMAGED.value, State.INCOMPLETE.value))
    counted = conn.execute(
        select(
            Checkpoint.run_id,
            func.sum(case((Checkpoint.kind == Kind.SOURCE.value, 1), else_=0)).label("sources"),
            func.sum(case((Checkpoint.kind == Kind.DERIVED.value, 1), else_=0)).label("outputs"),
            func.sum(case((damaged, 1), else_=0)).label("damaged"),
            sum_of(conn, Checkpoint.total_bytes).label("nbytes"),
            func.min(Checkpoint.step).label("first_step"),
            func.max(Checkpoint.step).label("last_step"),
            func.max(Checkpoint.created_at).label("last_at"),
        )
        .where(Checkpoint.run_id.in_(ids), Checkpoint.state.not_in(NOT_CURRENT))
        .group_by(Checkpoint.run_id)
    )
    summaries = {row.run_id: _summary(named[row.run_id], row) for row in counted}
    empty = (0, 0, 0, 0, None, None, None)
    rows = tuple(summaries.get(i) or RunSummary(named[i], *empty) for i in ids)
    return Page(rows, _last_name(rows[-1].name, after) if has_next_page else None)


def _summary(name: str, row: Any) -> RunSummary:
    values = {f.name: as_integer(getattr(row, f.name)) for f in fields(RunSummary) if f.name in row._fields}
    columns, trouble = checked(RunSummary, values)
    note = f"a checkpoint of the run has an odd row: {trouble}" if trouble else ""
    return RunSummary(name, **columns, trouble=note)


def checkpoints(
    conn: Connection,
    *,
    kind: str | None = None,
    state: str | None = None,
    before: str | None = None,
    limit: int = LIMIT,
) -> Page[Listed]:
    """Return checkpoints of all runs, newest first. before: the cursor of the page before."""
    query = newest_checkpoints(kind or None, state or None)
    if before:
        query = query.where(_behind(conn, Checkpoint.created_at, Checkpoint.id, before))
    rows = conn.execute(query.limit(_require_limit(limit) + 1)).all()
    return Page(_list_rows(conn, rows[:limit]), _last_id(rows, limit))


def steps_of(conn: Connection, run: str, *, before: str | None = None, limit: int = LIMIT) -> Page[Listed]:
    """Return the current checkpoints of a run, the newest step first; those without a step come last.

    Raises:
        UsageError: the catalog has no such run.
    """
    run_id = conn.execute(select(TrainingRun.id).where(TrainingRun.name == run)).scalar()
    if run_id is None:
        raise UsageError(f"the catalog has no training run {run!r}", hint="the page of runs lists them")
    of_run = checkpoint_rows().where(Checkpoint.run_id == run_id, Checkpoint.state.not_in(NOT_CURRENT))
    limit = _require_limit(limit)
    rows: list[Any] = []
    step = None if before is None else _cursor(conn, Checkpoint.step, Checkpoint.id, before)
    if before is None or step is not None:
        # NULL is first on one database and last on the other: two statements have one order on both.
        stepped = of_run.where(Checkpoint.step.is_not(None))
        if before is not None:
            stepped = stepped.where(_behind(conn, Checkpoint.step, Checkpoint.id, before))
            before = None
        order = (Checkpoint.step.desc(), Checkpoint.id.desc())
        rows += conn.execute(stepped.order_by(*order).limit(limit + 1)).all()
    if len(rows) <= limit:
        bare = of_run.where(Checkpoint.step.is_(None))
        if before is not None:
            bare = bare.where(Checkpoint.id < int(before))
        rows += conn.execute(bare.order_by(Checkpoint.id.desc()).limit(limit + 1 - len(rows))).all()
    return Page(_list_rows(conn, rows[:limit]), _last_id(rows, limit))


def conversions(
    conn: Connection, *, state: str | None = None, before: str | None = None, limit: int = LIMIT
) -> Page[ConversionRow]:
    """Return conversions, newest first, also failed and running ones."""
    query = newest_conversions(state or None)
    if before:
        query = query.where(_behind(conn, Conversion.started_at, Conversion.id, before))
    rows = conn.execute(query.limit(_require_limit(limit) + 1)).all()
    return Page(tuple(conversion_row(r) for r in rows[:limit]), _last_id(rows, limit))


def tensors(
    conn: Connection, ref: str, *, search: str = "", after: str | None = None, limit: int = LIMIT
) -> Page[TensorRow]:
    """Return tensors of a checkpoint by name. search: text that their names contain."""
    row = resolve_checkpoint(conn, ref)
    query = (
        select(Tensor)
        .where(Tensor.checkpoint_id == row)
        .order_by(Tensor.fqn)
        .limit(_require_limit(limit) + 1)
    )
    if search:
        query = query.where(Tensor.fqn.contains(search, autoescape=True))
    if after:
        query = query.where(Tensor.fqn > after)
    rows = [tensor_row(r) for r in conn.execute(query)]
    return Page(tuple(rows[:limit]), _last_name(rows[limit - 1].fqn, after) if len(rows) > limit else None)


def files(conn: Connection, ref: str, *, after: str | None = None, limit: int = LIMIT) -> Page[FileRow]:
    """Return files of a checkpoint by path."""
    row = resolve_checkpoint(conn, ref)
    query = (
        select(CheckpointFile)
        .where(CheckpointFile.checkpoint_id == row)
        .order_by(CheckpointFile.path)
        .limit(_require_limit(limit) + 1)
    )
    if after:
        query = query.where(CheckpointFile.path > after)
    rows = [file_row(r) for r in conn.execute(query)]
    return Page(tuple(rows[:limit]), _last_name(rows[limit - 1].path, after) if len(rows) > limit else None)


def tensor_counts(conn: Connection, ref: str) -> TensorCounts:
    """Return how many tensors and bytes a checkpoint has by dtype and by size."""
    row = resolve_checkpoint(conn, ref)
    counted = conn.execute(
        select(Tensor.dtype, Tensor.nbytes, func.count().label("tensors"))
        .where(Tensor.checkpoint_id == row)
        .group_by(Tensor.dtype, Tensor.nbytes)
    ).all()
    dtypes: dict[str, list[int]] = {}
    sizes: dict[int, list[int]] = {}
    for dtype, stored, number in counted:
        nbytes = stored if is_integer(stored) else 0  # the list of tensors names the row
        for group in (
            dtypes.setdefault(str(dtype), [0, 0]),
            # An empty tensor is in the group of one byte: zero has no power of two.
            sizes.setdefault(max(nbytes, 1).bit_length() - 1, [0, 0]),
        ):
            group[0] += number
            group[1] += number * nbytes
    by_bytes = sorted(dtypes.items(), key=lambda dtype_group: (-dtype_group[1][1], dtype_group[0]))
    return TensorCounts(
        tuple((name, n, total) for name, (n, total) in by_bytes),
        tuple((power, n, total) for power, (n, total) in sorted(sizes.items())),
    )


def earlier_step(conn: Connection, row: CheckpointRow) -> CheckpointRow | None:
    """Return the current checkpoint of the same run and kind with the next lower step, or None."""
    if row.run is None or row.step is None:
        return None
    run = select(TrainingRun.id).where(TrainingRun.name == row.run).scalar_subquery()
    earlier = (Checkpoint.run_id == run, Checkpoint.step < row.step, Checkpoint.kind == row.kind)
    query = checkpoint_rows().where(*earlier, Checkpoint.state.not_in(NOT_CURRENT))
    nearest_row = conn.execute(query.order_by(Checkpoint.step.desc(), Checkpoint.id.desc()).limit(1)).first()
    return None if nearest_row is None else checkpoint_row(nearest_row)


def newest_steps(conn: Connection, run: str) -> tuple[CheckpointRow, CheckpointRow] | None:
    """Return the two newest steps of a run, the newer one last; None if it has fewer."""
    of_run = select(TrainingRun.id).where(TrainingRun.name == run).scalar_subquery()
    sources = checkpoint_rows().where(Checkpoint.run_id == of_run, Checkpoint.kind == Kind.SOURCE.value)
    current = sources.where(Checkpoint.step.is_not(None), Checkpoint.state.not_in(NOT_CURRENT))
    newest = conn.execute(current.order_by(Checkpoint.step.desc(), Checkpoint.id.desc()).limit(1)).first()
    row = None if newest is None else checkpoint_row(newest)
    before = None if row is None else earlier_step(conn, row)
    return None if row is None or before is None else (before, row)


def listed(conn: Connection, refs: Sequence[str]) -> tuple[Listed, ...]:
    """Return checkpoints by their public ids, as in lists, in the order of the ids."""
    rows = conn.execute(checkpoint_rows().where(Checkpoint.uuid.in_(list(refs)))).all()
    by_public_id = {listed_row.checkpoint.id: listed_row for listed_row in _list_rows(conn, rows)}
    return tuple(by_public_id[ref] for ref in refs if ref in by_public_id)


def _list_rows(conn: Connection, rows: Sequence[Any]) -> tuple[Listed, ...]:
    """Return checkpoints with their open findings, aliases and metrics, in a fixed number of queries."""
    ids = [row.id for row in rows]
    if not ids:
        return ()
    counted = conn.execute(
        select(FindingRecord.checkpoint_id, FindingRecord.severity, func.count().label("n"))
        .where(FindingRecord.checkpoint_id.in_(ids), FindingRecord.resolved_at.is_(None))
        .group_by(FindingRecord.checkpoint_id, FindingRecord.severity)
    )
    open_findings = {(row.checkpoint_id, row.severity): int(row.n) for row in counted}
    names: dict[int, list[str]] = {}
    for alias in conn.execute(
        select(Alias.checkpoint_id, Alias.name).where(Alias.checkpoint_id.in_(ids)).order_by(Alias.name)
    ):
        names.setdefault(alias.checkpoint_id, []).append(alias.name)
    metrics = metrics_of(conn, ids)
    opens = loadable(conn, [row.id for row in rows if row.kind == Kind.DERIVED.value])
    return tuple(
        Listed(
            checkpoint := checkpoint_row(row),
            open_findings.get((row.id, "error"), 0) + bool(checkpoint.trouble),
            open_findings.get((row.id, "warning"), 0),
            metrics.get(row.id, {}),
            tuple(names.get(row.id, ())),
            opens.get(row.id),
        )
        for row in rows
    )


def _behind(conn: Connection, key: Any, id: Any, before: str) -> ColumnElement[bool]:
    """Return the condition of descending order behind a row. The first part lets an index be used."""
    _cursor(conn, key, id, before)
    row = int(before)
    last = select(key).where(id == row).scalar_subquery()
    return and_(key <= last, or_(key < last, id < row))


def _cursor(conn: Connection, key: Any, id: Any, before: str) -> Any:
    """Return the value of the row that a cursor names. Raises `UsageError`."""
    row = conn.execute(select(key).where(id == int(before))).first() if _CURSOR.fullmatch(before) else None
    if row is None:
        raise UsageError(f"{before[:40]!r} is not a cursor of this list", hint="begin at the first page")
    return row[0]


def _last_id(rows: Sequence[Any], limit: int) -> str | None:
    """Return the cursor of a page of rows, of which one more than its limit was read."""
    return str(rows[limit - 1].id) if len(rows) > limit else None


def _last_name(name: str, after: str | None) -> str | None:
    """Return the cursor behind a name; None behind an odd one, where a list of names cannot go on."""
    return name if name and name != after else None


def _require_limit(limit: int) -> int:
    if not 1 <= limit <= MOST:
        raise UsageError(f"the limit must be from 1 to {MOST} (got {limit})")
    return limit
