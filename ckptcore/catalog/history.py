"""Record statistics of steps, and read the history of a run: its steps, their tensors and their alarms.

An alarm is a finding of the level `LEVEL`, which no check of files resolves: it follows from what the catalog
knows of a step and of other steps of its run, and is settled when one of them is measured again. It does not
make a checkpoint damaged; `ckptcore.catalog.aliases` refuses to promote what was made from it.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, delete, func, insert, select, update

from ckptcore.catalog.models import (
    Checkpoint,
    FindingRecord,
    StepStatistics,
    Tensor,
    TrainingFactsRow,
    TrainingRun,
)
from ckptcore.catalog.normalize import storable, storable_finding
from ckptcore.catalog.query import edges_of, in_parts, resolve_checkpoint
from ckptcore.catalog.row_values import checked
from ckptcore.catalog.types import Direction, Kind, State, StatisticsRow
from ckptcore.errors import Finding
from ckptcore.utils.foreign_text import InvalidText, load_json_object

if TYPE_CHECKING:
    from sqlalchemy import Connection

LEVEL = "history"
FROZEN = "frozen"  # the fact of a training that names, by globs, what is not trained
MOST_STEPS = 1000
_CLOSE = 1e-6  # relative: norms of the same weights in other boxes
_TWINS = 8  # steps that have the same norm


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured checkpoint of a run.

    Attributes:
        checkpoint: its public id.
        run: the name of the run; None for a checkpoint of no run.
        step: the training step.
        uri: its place.
        state: its latest known state.
        fingerprint: of all its tensors, if known.
        statistics: sums over its tensors, and the packed columns where they were asked for.
        alarms: open alarms: code -> how many.
        trouble: values of its row that are not of their columns' types; "" for none.
    """

    checkpoint: str
    run: str | None
    step: int | None
    uri: str
    state: str
    fingerprint: str | None
    statistics: StatisticsRow
    alarms: Mapping[str, int]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An open alarm about a step.

    Attributes:
        run: the name of the run.
        step: the training step.
        code: of the finding.
        message: what is wrong.
        fqn: the tensor concerned, or None.
        checkpoint: public id of the step.
    """

    run: str | None
    step: int | None
    code: str
    message: str
    fqn: str | None
    checkpoint: str


def put(conn: Connection, now: datetime, checkpoint: int, statistics: StatisticsRow) -> None:
    """Record the statistics of a checkpoint, unless those of more tensors are known.

    checkpoint: its row id.
    """
    mine = StepStatistics.checkpoint_id == checkpoint
    tensors = conn.execute(select(StepStatistics.tensors).where(mine)).scalar()
    if tensors is not None and tensors > statistics.tensors:
        return
    conn.execute(delete(StepStatistics).where(mine))
    values = asdict(statistics) | {"checkpoint_id": checkpoint, "updated_at": now}
    conn.execute(insert(StepStatistics).values(values))


def carry(conn: Connection, source: int, derived: int) -> None:
    """Let a step that was thinned keep its statistics. source, derived: row ids before and after."""
    row = conn.execute(select(StepStatistics).where(StepStatistics.checkpoint_id == source)).first()
    if row is not None:
        conn.execute(delete(StepStatistics).where(StepStatistics.checkpoint_id == derived))
        conn.execute(insert(StepStatistics).values({**row._mapping, "checkpoint_id": derived}))


def steps(
    conn: Connection, run: str, *, columns: bool = False, limit: int = MOST_STEPS, before: int | None = None
) -> tuple[MeasuredStep, ...]:
    """Return the measured steps of a run, the lowest first.

    Of a step with several measured checkpoints, the newest source counts, or else the newest output.

    Args:
        conn: the transaction.
        run: the name of the run.
        columns: with the packed columns of their tensors.
        limit: the most steps; the highest ones.
        before: those below this step.
    """
    # Chosen without the columns, which are large: of a run with more steps, the others' are not read.
    foremost = func.row_number().over(
        partition_by=Checkpoint.step, order_by=(Checkpoint.kind != Kind.SOURCE.value, Checkpoint.id.desc())
    )
    ranked = (
        _steps(False)
        .with_only_columns(Checkpoint.id, Checkpoint.step, foremost.label("place"))
        .where(TrainingRun.name == storable(run), Checkpoint.step.is_not(None))
        .where(*(() if before is None else (Checkpoint.step < before,)))
        .subquery()
    )
    chosen = select(ranked.c.id).where(ranked.c.place == 1).order_by(ranked.c.step.desc()).limit(limit)
    rows = conn.execute(_steps(columns).where(Checkpoint.id.in_(chosen)).order_by(Checkpoint.step)).all()
    return _with_alarms(conn, rows)


def at(conn: Connection, ref: str) -> MeasuredStep | None:
    """Return a checkpoint with its columns; None if it was not measured."""
    row = conn.execute(_steps(True).where(Checkpoint.id == resolve_checkpoint(conn, ref))).first()
    return None if row is None else _with_alarms(conn, [row])[0]


def beside(
    conn: Connection, step: MeasuredStep, count: int
) -> tuple[tuple[MeasuredStep, ...], tuple[MeasuredStep, ...]]:
    """Return the measured steps of a run before and behind one, nearest first, with their columns.

    Of a step with several checkpoints of this one's kind, the newest counts.
    """
    if step.run is None or step.step is None:
        return (), ()
    sides = []
    for is_there, order in (
        (Checkpoint.step < step.step, Checkpoint.step.desc()),
        (Checkpoint.step > step.step, Checkpoint.step.asc()),
    ):
        numbers = _of_its_run(conn, step, Checkpoint.step).where(is_there).order_by(order).distinct()
        nearest = conn.execute(numbers.limit(count)).scalars().all()
        query = _of_its_run(conn, step).where(Checkpoint.step.in_(nearest))
        by_step: dict[int, Row[Any]] = {}
        for row in conn.execute(query.order_by(order, Checkpoint.id.desc())):
            by_step.setdefault(row.step, row)
        sides.append(_with_alarms(conn, list(by_step.values())))
    return sides[0], sides[1]


def like(conn: Connection, step: MeasuredStep) -> tuple[MeasuredStep, ...]:
    """Return other steps of a run whose weights have the norm of a step's, with their columns."""
    norm = step.statistics.norm
    if step.run is None or step.step is None or not norm:
        return ()
    query = _of_its_run(conn, step).where(
        StepStatistics.norm.between(norm * (1 - _CLOSE), norm * (1 + _CLOSE)), Checkpoint.step != step.step
    )
    closest = func.abs(StepStatistics.norm - norm)
    return _with_alarms(conn, conn.execute(query.order_by(closest, Checkpoint.step).limit(_TWINS)).all())


def prints(conn: Connection, checkpoint: str) -> dict[str, str]:
    """Return FQN -> fingerprint of the tensors of a checkpoint (public id) where it is known."""
    query = select(Tensor.fqn, Tensor.fingerprint).join(Checkpoint, Checkpoint.id == Tensor.checkpoint_id)
    rows = conn.execute(query.where(Checkpoint.uuid == checkpoint, Tensor.fingerprint.is_not(None)))
    return {row.fqn: row.fingerprint for row in rows}


def frozen_globs(conn: Connection, run: str) -> tuple[str, ...]:
    """Return the globs that facts of a run's checkpoints name as frozen."""
    query = (
        select(TrainingFactsRow.extra)
        .join(Checkpoint, Checkpoint.id == TrainingFactsRow.checkpoint_id)
        .join(TrainingRun, TrainingRun.id == Checkpoint.run_id)
        .where(TrainingRun.name == run, TrainingFactsRow.extra.contains(f'"{FROZEN}"', autoescape=True))
    )
    globs: dict[str, None] = {}
    for extra in conn.execute(query.distinct()).scalars():
        try:
            value = load_json_object(extra.encode()).get(FROZEN)
        except InvalidText:  # an edited row names nothing
            continue
        texts = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
        globs |= dict.fromkeys(map(str, texts))
    return tuple(globs)


def settle_alarms(conn: Connection, now: datetime, ref: str, alarms: Iterable[Finding]) -> None:
    """Record what speaks against a checkpoint by its history, and resolve what does not any more."""
    checkpoint = resolve_checkpoint(conn, ref)
    new = {(row["code"], row["fqn"]): row for row in map(storable_finding, alarms)}
    mine = (
        FindingRecord.checkpoint_id == checkpoint,
        FindingRecord.level == LEVEL,
        FindingRecord.resolved_at.is_(None),
    )
    ended = []
    for row in conn.execute(select(FindingRecord).where(*mine)).all():
        alarm = new.get((row.code, row.fqn))
        if alarm is not None and alarm["message"] == row.message:
            del new[row.code, row.fqn]
        else:
            ended.append(row.id)
    for part in in_parts(ended):
        conn.execute(update(FindingRecord).where(FindingRecord.id.in_(part)).values(resolved_at=now))
    columns = {"checkpoint_id": checkpoint, "level": LEVEL, "found_at": now}
    if new:
        conn.execute(insert(FindingRecord), [alarm | columns for alarm in new.values()])


def alarms_of(conn: Connection, run: str) -> tuple[Alarm, ...]:
    """Return the open alarms of a run, by step."""
    query = _alarms().where(TrainingRun.name == storable(run))
    return tuple(map(_alarm, conn.execute(query.order_by(Checkpoint.step, FindingRecord.id))))


def alarms_behind(conn: Connection, rows: Collection[int]) -> dict[int, tuple[Alarm, ...]]:
    """Return the open alarms about checkpoints (row ids) and about all that they were made from."""
    parents: dict[int, set[int]] = {}
    level = set(rows)
    while level:
        parents |= {row: set() for row in level}
        edges = edges_of(conn, level, Direction.OUT, Direction.IN)
        for edge in edges:
            parents[edge.near].add(edge.far)
        level = {edge.far for edge in edges} - parents.keys()
    alarms: dict[int, list[Alarm]] = {}
    for part in in_parts(sorted(parents)):
        query = _alarms().where(FindingRecord.checkpoint_id.in_(part))
        for row in conn.execute(query.order_by(FindingRecord.id)):
            alarms.setdefault(row.checkpoint_id, []).append(_alarm(row))
    if not alarms:
        return {}
    return {
        row: tuple(a for ancestor in _ancestors(row, parents) for a in alarms.get(ancestor, ()))
        for row in rows
    }


def _ancestors(row: int, parents: Mapping[int, Collection[int]]) -> list[int]:
    """Return a row and all that it was made from."""
    ancestors, queue = {row: None}, [row]
    while queue:
        for source in sorted(parents[queue.pop()]):
            if source not in ancestors:
                ancestors[source] = None
                queue.append(source)
    return list(ancestors)


def _of_its_run(conn: Connection, step: MeasuredStep, *only: Any) -> Any:
    """Return the query for the steps of a step's run and kind. only: these columns."""
    kind = select(Checkpoint.kind).where(Checkpoint.uuid == step.checkpoint).scalar_subquery()
    query = _steps(True).where(TrainingRun.name == step.run, Checkpoint.kind == kind)
    return query.with_only_columns(*only) if only else query


def _steps(columns: bool) -> Any:
    """Return the query whose rows `_with_alarms` reads; without the columns, which are large, if so asked."""
    statistics = [c for c in StepStatistics.__table__.columns if columns or c.name != "columns"]
    named = (Checkpoint.id, Checkpoint.uuid, Checkpoint.step, Checkpoint.uri, Checkpoint.state)
    return (
        select(*named, Checkpoint.fingerprint, TrainingRun.name.label("run"), *statistics)
        .join(StepStatistics, StepStatistics.checkpoint_id == Checkpoint.id)
        .outerjoin(TrainingRun, TrainingRun.id == Checkpoint.run_id)
        .where(Checkpoint.state != State.REPLACED.value)
    )


def _with_alarms(conn: Connection, rows: Collection[Any]) -> tuple[MeasuredStep, ...]:
    counts: dict[int, dict[str, int]] = {}
    query = select(FindingRecord.checkpoint_id, FindingRecord.code, func.count().label("number")).where(
        FindingRecord.level == LEVEL,
        FindingRecord.resolved_at.is_(None),
        FindingRecord.checkpoint_id.in_([row.id for row in rows]),
    )
    for row in conn.execute(query.group_by(FindingRecord.checkpoint_id, FindingRecord.code)) if rows else ():
        counts.setdefault(row.checkpoint_id, {})[row.code] = row.number
    names = ("tensors", "norm", "absmax", "nan", "inf", "zeros", "change", "against")
    measured = []
    for row in rows:
        values = {name: getattr(row, name) for name in names} | {"columns": getattr(row, "columns", b"")}
        values, trouble = checked(StatisticsRow, values)
        mine = StatisticsRow(**values), counts.get(row.id, {})
        place = row.uuid, row.run, row.step, row.uri, row.state, row.fingerprint
        measured.append(MeasuredStep(*place, *mine, trouble))
    return tuple(measured)


def _alarms() -> Any:
    """Return the query whose rows `_alarm` reads."""
    columns = (FindingRecord.checkpoint_id, FindingRecord.code, FindingRecord.message, FindingRecord.fqn)
    return (
        select(*columns, TrainingRun.name.label("run"), Checkpoint.step, Checkpoint.uuid)
        .join(Checkpoint, Checkpoint.id == FindingRecord.checkpoint_id)
        .outerjoin(TrainingRun, TrainingRun.id == Checkpoint.run_id)
        .where(FindingRecord.level == LEVEL, FindingRecord.resolved_at.is_(None))
    )


def _alarm(row: Any) -> Alarm:
    return Alarm(row.run, row.step, row.code, row.message, row.fqn, row.uuid)
