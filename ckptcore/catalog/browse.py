"""Read the catalog page by page, for people who look through it.

Every list is read by its key: a page costs the same at the beginning and at the end of 100,000 rows. A cursor
is a short text, made of the key of the last row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime
from functools import partial
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
    resolve_checkpoint,
    unloadable,
)
from ckptcore.catalog.readable_rows import BrokenRow, ReadRows, read_rows
from ckptcore.catalog.training import Measured
from ckptcore.catalog.training_rows import metrics_of
from ckptcore.catalog.types import CheckpointRow, ConversionRow, FileRow, Kind, Outcome, State, TensorRow
from ckptcore.errors import UsageError
from ckptcore.utils.dataclass import dataclass

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

LIMIT = 50
MOST = 500  # rows of one page
_NOT_CURRENT = (State.REPLACED.value, State.GONE.value, State.RETIRED.value, State.DELETED.value)
_CURSOR = re.compile(r"[0-9A-Za-z.:+_-]{1,100}")
_Row = TypeVar("_Row")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Page(Generic[_Row]):
    """Rows, the cursor of the next page, None for the last one, and the rows that cannot be read."""

    rows: tuple[_Row, ...]
    next: str | None = None
    broken: tuple[BrokenRow, ...] = ()


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A training run with what the catalog has of it. Counts leave out what was replaced or deleted."""

    name: str
    sources: int
    outputs: int
    damaged: int
    nbytes: int
    first_step: int | None
    last_step: int | None
    last_at: datetime | None


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint in a list.

    Attributes:
        checkpoint: the checkpoint.
        errors: its open errors.
        warnings: its open warnings.
        metrics: its metrics by name.
        aliases: its names.
        unloadable: whether it is an export that no engine can open.
    """

    checkpoint: CheckpointRow
    errors: int = 0
    warnings: int = 0
    metrics: dict[str, Measured] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    unloadable: bool = False


@dataclass(frozen=True, slots=True)
class TensorCounts:
    """How a checkpoint's tensors are distributed.

    dtypes: (dtype, tensors, bytes), most bytes first. sizes: (power of two, tensors, bytes) of
    the tensors with at least as many bytes, and fewer than twice as many.
    """

    dtypes: tuple[tuple[str, int, int], ...]
    sizes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that differs between two checkpoints, or cannot be compared.

    what: added, removed, dtype, shape, values or unknown (a side has no fingerprint). left, right: None where
    it is missing.
    """

    fqn: str
    what: str
    left: TensorRow | None
    right: TensorRow | None


@dataclass(frozen=True, slots=True)
class CatalogComparison:
    """Two checkpoints side by side, by what the catalog knows. equal: tensors with equal fingerprints."""

    counts: dict[str, int]
    equal: int
    changes: tuple[TensorChange, ...]


def runs(
    conn: Connection, *, name: str = "", after: str | None = None, limit: int = LIMIT
) -> Page[RunSummary]:
    """Return training runs by name. name: the beginning of their names. after: the last name of a page."""
    wanted = select(TrainingRun.id, TrainingRun.name).order_by(TrainingRun.name).limit(_checked(limit) + 1)
    if name:
        wanted = wanted.where(TrainingRun.name >= name, TrainingRun.name.startswith(name, autoescape=True))
    if after:
        wanted = wanted.where(TrainingRun.name > after)
    named = {row.id: row.name for row in conn.execute(wanted)}
    more = len(named) > limit
    ids = list(named)[:limit]
    damaged = Checkpoint.state.in_((State.DAMAGED.value, State.INCOMPLETE.value))
    counted = (
        select(
            Checkpoint.run_id,
            func.sum(case((Checkpoint.kind == Kind.SOURCE.value, 1), else_=0)).label("sources"),
            func.sum(case((Checkpoint.kind == Kind.DERIVED.value, 1), else_=0)).label("outputs"),
            func.sum(case((damaged, 1), else_=0)).label("damaged"),
            func.sum(Checkpoint.total_bytes).label("nbytes"),
            func.min(Checkpoint.step).label("first_step"),
            func.max(Checkpoint.step).label("last_step"),
            func.max(Checkpoint.created_at).label("last_at"),
        )
        .where(Checkpoint.run_id.in_(ids), Checkpoint.state.not_in(_NOT_CURRENT))
        .group_by(Checkpoint.run_id)
    )

    def summary(row: Any) -> RunSummary:
        numbers = (int(row.sources), int(row.outputs), int(row.damaged), int(row.nbytes))
        return RunSummary(named[row.run_id], *numbers, row.first_step, row.last_step, row.last_at)

    summaries = read_rows(conn, counted, Checkpoint.run_id, summary)
    rows = dict(summaries.rows)
    unreadable = {int(row.row) for row in summaries.broken}
    empty = (0, 0, 0, 0, None, None, None)
    listed = tuple(rows.get(i) or RunSummary(named[i], *empty) for i in ids if i not in unreadable)
    broken = tuple(_of_run(row, named[int(row.row)]) for row in summaries.broken)
    return Page(listed, named[ids[-1]] if more else None, broken)


def _of_run(broken: BrokenRow, name: str) -> BrokenRow:
    """Return what is wrong with the checkpoints of a run, whose numbers it prevents."""
    message = f"a checkpoint of the run {name} cannot be read: {broken.message.partition(': ')[2]}"
    return replace(broken, row=name, message=message)


def checkpoints(
    conn: Connection,
    *,
    kind: str | None = None,
    state: str | None = None,
    before: str | None = None,
    limit: int = LIMIT,
) -> Page[Listed]:
    """Return checkpoints of all runs, newest first. before: the cursor of the page before."""
    wanted = checkpoint_rows().order_by(Checkpoint.created_at.desc(), Checkpoint.id.desc())
    if kind:
        wanted = wanted.where(Checkpoint.kind == _one_of(Kind, kind))
    if state:
        wanted = wanted.where(Checkpoint.state == _one_of(State, state))
    if before:
        at, row = _cursor(before, 2)
        wanted = wanted.where(_before(Checkpoint.created_at, _time(at), Checkpoint.id, _number(row)))
    rows = read_rows(conn, wanted, Checkpoint.id, checkpoint_row, _checked(limit) + 1)
    return _page(rows, limit, lambda id, row: _behind(row.created_at, id), partial(_listed, conn))


def steps_of(conn: Connection, run: str, *, before: str | None = None, limit: int = LIMIT) -> Page[Listed]:
    """Return the current checkpoints of a run, the newest step first; those without a step come last.

    Raises:
        UsageError: the catalog has no such run.
    """
    run_id = conn.execute(select(TrainingRun.id).where(TrainingRun.name == run)).scalar()
    if run_id is None:
        raise UsageError(f"the catalog has no training run {run!r}", hint="the page of runs lists them")
    here = checkpoint_rows().where(Checkpoint.run_id == run_id, Checkpoint.state.not_in(_NOT_CURRENT))
    limit = _checked(limit)
    stepped = bare = ReadRows[CheckpointRow](())
    part, *key = _cursor(before, 2, 3) if before else ["s"]
    if part == "s":
        wanted = here.where(Checkpoint.step.is_not(None))
        if key:
            wanted = wanted.where(_before(Checkpoint.step, _number(key[0]), Checkpoint.id, _number(key[-1])))
        wanted = wanted.order_by(Checkpoint.step.desc(), Checkpoint.id.desc())
        stepped = read_rows(conn, wanted, Checkpoint.id, checkpoint_row, limit + 1)
        key = []
    if len(stepped.rows) <= limit:
        wanted = here.where(Checkpoint.step.is_(None))
        if key:
            wanted = wanted.where(Checkpoint.id < _number(key[-1]))
        wanted = wanted.order_by(Checkpoint.id.desc())
        bare = read_rows(conn, wanted, Checkpoint.id, checkpoint_row, limit + 1 - len(stepped.rows))
    return _page(
        ReadRows(stepped.rows + bare.rows, stepped.broken + bare.broken),
        limit,
        lambda id, row: f"n:{id}" if row.step is None else f"s:{row.step}:{id}",
        partial(_listed, conn),
    )


def conversions(
    conn: Connection, *, state: str | None = None, before: str | None = None, limit: int = LIMIT
) -> Page[ConversionRow]:
    """Return conversions, newest first, also failed and running ones."""
    wanted = select(Conversion).order_by(Conversion.started_at.desc(), Conversion.id.desc())
    if state:
        wanted = wanted.where(Conversion.state == _one_of(Outcome, state))
    if before:
        at, row = _cursor(before, 2)
        wanted = wanted.where(_before(Conversion.started_at, _time(at), Conversion.id, _number(row)))
    rows = read_rows(conn, wanted, Conversion.id, conversion_row, _checked(limit) + 1)
    return _page(rows, limit, lambda id, row: _behind(row.started_at, id), _values)


def tensors(
    conn: Connection, ref: str, *, search: str = "", after: str | None = None, limit: int = LIMIT
) -> Page[TensorRow]:
    """Return tensors of a checkpoint by name. search: text that their names contain."""
    row = resolve_checkpoint(conn, ref)
    wanted = select(Tensor).where(Tensor.checkpoint_id == row).order_by(Tensor.fqn)
    if search:
        wanted = wanted.where(Tensor.fqn.contains(search, autoescape=True))
    if after:
        wanted = wanted.where(Tensor.fqn > after)
    rows = read_rows(conn, wanted, Tensor.fqn, _tensor, _checked(limit) + 1)
    return _page(rows, limit, lambda name, _: str(name), _values)


def files(conn: Connection, ref: str, *, after: str | None = None, limit: int = LIMIT) -> Page[FileRow]:
    """Return files of a checkpoint by path."""
    row = resolve_checkpoint(conn, ref)
    wanted = select(CheckpointFile).where(CheckpointFile.checkpoint_id == row).order_by(CheckpointFile.path)
    if after:
        wanted = wanted.where(CheckpointFile.path > after)
    rows = read_rows(conn, wanted, CheckpointFile.path, _file, _checked(limit) + 1)
    return _page(rows, limit, lambda name, _: str(name), _values)


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
    for dtype, nbytes, number in counted:
        if not isinstance(nbytes, int):  # the list of tensors names the row
            continue
        for group in (
            dtypes.setdefault(dtype, [0, 0]),
            sizes.setdefault(max(int(nbytes), 1).bit_length() - 1, [0, 0]),
        ):
            group[0] += number
            group[1] += number * nbytes
    by_bytes = sorted(dtypes.items(), key=lambda each: (-each[1][1], each[0]))
    return TensorCounts(
        tuple((name, n, total) for name, (n, total) in by_bytes),
        tuple((power, n, total) for power, (n, total) in sorted(sizes.items())),
    )


def compare(conn: Connection, left: str, right: str, limit: int = MOST) -> CatalogComparison:
    """Compare two checkpoints by the names, dtypes, shapes and fingerprints of their tensors.

    No tensor is read: where a side has no fingerprint, the comparison is unknown.
    """
    sides = [
        {
            t.fqn: t
            for r in conn.execute(select(Tensor).where(Tensor.checkpoint_id == row))
            for t in [_tensor(r)]
        }
        for row in (resolve_checkpoint(conn, left), resolve_checkpoint(conn, right))
    ]
    counts: dict[str, int] = {}
    changes: list[TensorChange] = []
    equal = 0
    for fqn in sorted(sides[0].keys() | sides[1].keys()):
        a, b = sides[0].get(fqn), sides[1].get(fqn)
        what = _difference(a, b)
        if what is None:
            equal += 1
            continue
        counts[what] = counts.get(what, 0) + 1
        if len(changes) < limit:
            changes.append(TensorChange(fqn, what, a, b))
    return CatalogComparison(counts, equal, tuple(changes))


def listed(conn: Connection, refs: Sequence[str]) -> tuple[Listed, ...]:
    """Return checkpoints by their public ids, as in lists, in the order of the ids."""
    rows = conn.execute(checkpoint_rows().where(Checkpoint.uuid.in_(list(refs)))).all()
    found = {each.checkpoint.id: each for each in _listed(conn, [(r.id, checkpoint_row(r)) for r in rows])}
    return tuple(found[ref] for ref in refs if ref in found)


def _difference(a: TensorRow | None, b: TensorRow | None) -> str | None:
    if a is None or b is None:
        return "added" if a is None else "removed"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    if a.fingerprint is None or b.fingerprint is None:
        return "unknown"
    return None if a.fingerprint == b.fingerprint else "values"


def _page(
    rows: ReadRows[_Value],
    limit: int,
    cursor: Callable[[Any, _Value], str],
    values_of: Callable[[Sequence[tuple[Any, _Value]]], tuple[_Row, ...]],
) -> Page[_Row]:
    """Return a page of rows, of which one more than its limit was read; the cursor names its last one."""
    first = rows.rows[:limit]
    return Page(values_of(first), cursor(*first[-1]) if len(rows.rows) > limit else None, rows.broken)


def _behind(time: datetime, id: int) -> str:
    return f"{time.timestamp():.6f}:{id}"


def _values(rows: Sequence[tuple[Any, _Row]]) -> tuple[_Row, ...]:
    return tuple(value for _, value in rows)


def _listed(conn: Connection, rows: Sequence[tuple[int, CheckpointRow]]) -> tuple[Listed, ...]:
    ids = [id for id, _ in rows]
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
    lost = unloadable(conn, [id for id, row in rows if row.kind == Kind.DERIVED.value])
    return tuple(
        Listed(
            row,
            open_findings.get((id, "error"), 0),
            open_findings.get((id, "warning"), 0),
            metrics.get(id, {}),
            tuple(names.get(id, ())),
            id in lost,
        )
        for id, row in rows
    )


def _file(row: Any) -> FileRow:
    return FileRow(row.path, row.nbytes, row.digest, row.role)


def _tensor(row: Any) -> TensorRow:
    return TensorRow(row.fqn, row.dtype, tuple(json.loads(row.shape)), row.nbytes, row.fingerprint)


def _before(first: Any, key: Any, second: Any, tie: int) -> ColumnElement[bool]:
    """Return the condition of descending order behind (key, tie). The first part lets an index be used."""
    return and_(first <= key, or_(first < key, second < tie))


def _cursor(text: str, *lengths: int) -> list[str]:
    parts = text.split(":")
    if not _CURSOR.fullmatch(text) or len(parts) not in lengths:
        raise _bad_cursor(text)
    return parts


def _number(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,19}", text) or abs(int(text)) >= 1 << 63:
        raise _bad_cursor(text)
    return int(text)


def _time(text: str) -> datetime:
    if not re.fullmatch(r"[0-9]{1,11}\.[0-9]{6}", text):
        raise _bad_cursor(text)
    seconds, _, micro = text.partition(".")
    return datetime.fromtimestamp(int(seconds), UTC).replace(microsecond=int(micro))


def _bad_cursor(text: str) -> UsageError:
    return UsageError(f"{text[:40]!r} is not a cursor of this list", hint="begin at the first page")


def _checked(limit: int) -> int:
    if not 1 <= limit <= MOST:
        raise UsageError(f"the limit must be from 1 to {MOST} (got {limit})")
    return limit


def _one_of(kind: type[Kind | State | Outcome], value: str) -> str:
    names = [member.value for member in kind]
    if value not in names:
        raise UsageError(f"the value must be one of {', '.join(names)} (got {value!r})")
    return value
