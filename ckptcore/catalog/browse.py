"""Read the catalog page by page, for people who look through it.

Every list is read by its key: a page costs the same at the beginning and at the end of 100,000 rows. A cursor
is a short text, made of the key of the last row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import field
from datetime import UTC, datetime
from decimal import Decimal
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
    resolve_checkpoint,
    tensor_row,
    unloadable,
)
from ckptcore.catalog.row_values import is_integer
from ckptcore.catalog.training import Measured
from ckptcore.catalog.training_rows import metrics_of
from ckptcore.catalog.types import CheckpointRow, ConversionRow, FileRow, Kind, Outcome, State, TensorRow
from ckptcore.errors import UsageError
from ckptcore.utils.dataclass import dataclass

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

LIMIT = 50
MOST = 500  # rows of one page
_NOT_CURRENT = (State.REPLACED.value, State.GONE.value, State.DELETED.value)
_LAST_SECOND, _LAST_STEP = 99_999_999_999, (1 << 63) - 1  # behind them are texts in columns of numbers
_CURSOR = re.compile(r"[0-9A-Za-z.:+_-]{1,100}")
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[_Row]):
    """Rows, and the cursor of the next page; None for the last one."""

    rows: tuple[_Row, ...]
    next: str | None = None


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
    counted = conn.execute(
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
    found = {
        row.run_id: RunSummary(
            named[row.run_id],
            int(row.sources),
            int(row.outputs),
            int(row.damaged),
            _integer(row.nbytes) or 0,
            _integer(row.first_step),
            _integer(row.last_step),
            row.last_at if isinstance(row.last_at, datetime) else None,
        )
        for row in counted
    }
    empty = (0, 0, 0, 0, None, None, None)
    rows = tuple(found.get(i) or RunSummary(named[i], *empty) for i in ids)
    return Page(rows, rows[-1].name if more else None)


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
    rows = conn.execute(wanted.limit(_checked(limit) + 1)).all()
    last = rows[limit - 1] if len(rows) > limit else None
    cursor = _time_cursor(last.created_at, last.id) if last is not None else None
    return Page(_listed(conn, rows[:limit]), cursor)


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
    rows: list[Any] = []
    part, *key = _cursor(before, 2, 3) if before else ["s"]
    if part == "s":
        stepped = here.where(Checkpoint.step.is_not(None))
        if key:
            stepped = stepped.where(
                _before(Checkpoint.step, _number(key[0]), Checkpoint.id, _number(key[-1]))
            )
        order = (Checkpoint.step.desc(), Checkpoint.id.desc())
        rows += conn.execute(stepped.order_by(*order).limit(limit + 1)).all()
        key = []
    if len(rows) <= limit:
        bare = here.where(Checkpoint.step.is_(None))
        if key:
            bare = bare.where(Checkpoint.id < _number(key[-1]))
        rows += conn.execute(bare.order_by(Checkpoint.id.desc()).limit(limit + 1 - len(rows))).all()
    last = rows[limit - 1] if len(rows) > limit else None
    cursor = None
    if last is not None:
        # An odd step, a text, is behind every number: SQLite sorts texts above numbers.
        step = last.step if last.step is None or is_integer(last.step) else _LAST_STEP
        cursor = f"n:{last.id}" if step is None else f"s:{step}:{last.id}"
    return Page(_listed(conn, rows[:limit]), cursor)


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
    rows = conn.execute(wanted.limit(_checked(limit) + 1)).all()
    last = rows[limit - 1] if len(rows) > limit else None
    cursor = _time_cursor(last.started_at, last.id) if last is not None else None
    return Page(tuple(conversion_row(r) for r in rows[:limit]), cursor)


def tensors(
    conn: Connection, ref: str, *, search: str = "", after: str | None = None, limit: int = LIMIT
) -> Page[TensorRow]:
    """Return tensors of a checkpoint by name. search: text that their names contain."""
    row = resolve_checkpoint(conn, ref)
    wanted = select(Tensor).where(Tensor.checkpoint_id == row).order_by(Tensor.fqn).limit(_checked(limit) + 1)
    if search:
        wanted = wanted.where(Tensor.fqn.contains(search, autoescape=True))
    if after:
        wanted = wanted.where(Tensor.fqn > after)
    rows = [tensor_row(r) for r in conn.execute(wanted)]
    return Page(tuple(rows[:limit]), rows[limit - 1].fqn if len(rows) > limit else None)


def files(conn: Connection, ref: str, *, after: str | None = None, limit: int = LIMIT) -> Page[FileRow]:
    """Return files of a checkpoint by path."""
    row = resolve_checkpoint(conn, ref)
    wanted = (
        select(CheckpointFile)
        .where(CheckpointFile.checkpoint_id == row)
        .order_by(CheckpointFile.path)
        .limit(_checked(limit) + 1)
    )
    if after:
        wanted = wanted.where(CheckpointFile.path > after)
    rows = [file_row(r) for r in conn.execute(wanted)]
    return Page(tuple(rows[:limit]), rows[limit - 1].path if len(rows) > limit else None)


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
        nbytes = _integer(stored) or 0
        for group in (
            dtypes.setdefault(dtype, [0, 0]),
            sizes.setdefault(max(nbytes, 1).bit_length() - 1, [0, 0]),
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
            for t in [tensor_row(r)]
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
    found = {each.checkpoint.id: each for each in _listed(conn, rows)}
    return tuple(found[ref] for ref in refs if ref in found)


def _difference(a: TensorRow | None, b: TensorRow | None) -> str | None:
    if a is None or b is None:
        return "added" if a is None else "removed"
    if a.trouble or b.trouble:
        return "unknown"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    if a.fingerprint is None or b.fingerprint is None:
        return "unknown"
    return None if a.fingerprint == b.fingerprint else "values"


def _listed(conn: Connection, rows: Sequence[Any]) -> tuple[Listed, ...]:
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
    lost = unloadable(conn, [row.id for row in rows if row.kind == Kind.DERIVED.value])
    return tuple(
        Listed(
            checkpoint := checkpoint_row(row),
            open_findings.get((row.id, "error"), 0) + bool(checkpoint.trouble),
            open_findings.get((row.id, "warning"), 0),
            metrics.get(row.id, {}),
            tuple(names.get(row.id, ())),
            row.id in lost,
        )
        for row in rows
    )


def _integer(value: Any) -> int | None:
    """Return an integer of the database, also of a sum; None for what is none."""
    whole = int(value) if isinstance(value, int | float | Decimal) and math.isfinite(value) else None
    return whole if whole is None or is_integer(whole) else None


def _time_cursor(time: Any, row: int) -> str:
    """Return the cursor behind a row; a text that is no time comes before every time, newest first."""
    seconds = time.timestamp() if isinstance(time, datetime) else _LAST_SECOND
    return f"{seconds:.6f}:{row}"


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
