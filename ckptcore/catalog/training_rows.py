"""Record and read facts about trainings, and find checkpoints by their metrics.

A checkpoint has at most one row of facts. Facts of several origins are merged column by column: what a user
states replaces what was announced, that replaces what the checkpoint stores, and that what is inherited from
the source of a conversion. Outputs inherit the facts of their source, also those that arrive later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, insert, select, update

from ckptcore.catalog.models import Checkpoint, FindingRecord, Metric, TrainingFactsRow, TrainingRun
from ckptcore.catalog.normalize import clean_json, storable
from ckptcore.catalog.query import checkpoint_row, checkpoint_rows, edges_of
from ckptcore.catalog.row_values import checked, parsed, read_row, sound
from ckptcore.catalog.training import (
    EQUAL,
    INHERITED,
    MAX_METRICS,
    PRECEDENCE,
    LiveVerdict,
    Measured,
    Training,
    TrainingFacts,
    bounded,
)
from ckptcore.catalog.types import CheckpointRow, Direction, State
from ckptcore.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

GOALS = ("min", "max")
MOST_STEPS, MOST_SERIES = 500, 6  # of metrics over steps
_LARGEST = 1.7976931348623157e308  # SQLite sorts texts behind all numbers
_JSON = ("config", "extra")
# field -> column
_COLUMNS = {
    f.name: "user_name" if f.name == "user" else f.name for f in fields(TrainingFacts) if f.name != "metrics"
}


@dataclass(frozen=True, slots=True)
class Ranked:
    """A checkpoint with its value of one metric.

    value: None if the row is odd. step: when it was measured. trouble: what is odd in the row of the metric.
    """

    metric: str
    value: float | None
    step: int | None
    checkpoint: CheckpointRow
    trouble: str = ""


def put(conn: Connection, now: datetime, checkpoint: int, facts: TrainingFacts, source: str) -> None:
    """Merge facts into those of a checkpoint (row id), and pass them on to what was made from it.

    Args:
        conn: a writer's transaction.
        now: the time to record.
        checkpoint: the row id.
        facts: the new facts.
        source: their origin, one of `PRECEDENCE`.
    """
    if not facts:
        return
    _put_one(conn, now, checkpoint, facts, source)
    # Outputs inherit, directly or over several conversions: facts may arrive after them.
    for derived in _made_from(conn, checkpoint):
        _put_one(conn, now, derived, facts, INHERITED)


def inherit(conn: Connection, now: datetime, source: int, derived: int) -> None:
    """Pass the facts of a source on to an output."""
    source_facts = read(conn, source)
    if source_facts is not None:
        _put_one(conn, now, derived, source_facts.facts, INHERITED)


def put_live(conn: Connection, now: datetime, checkpoint: int, live: LiveVerdict) -> None:
    """Record whether a checkpoint (row id) has what its job had in memory; it has facts already.

    A difference that was found earlier, before the files were restored, is resolved by equality alone.
    """
    values = {"live_verdict": live.verdict, "live_compared": live.compared}
    conn.execute(update(TrainingFactsRow).where(TrainingFactsRow.checkpoint_id == checkpoint).values(values))
    if live.verdict == EQUAL:
        open_ones = (FindingRecord.checkpoint_id == checkpoint, FindingRecord.resolved_at.is_(None))
        mismatch = FindingRecord.code == "live-mismatch"
        conn.execute(update(FindingRecord).where(*open_ones, mismatch).values(resolved_at=now))


def read(conn: Connection, checkpoint: int) -> Training | None:
    """Return the facts of a checkpoint (row id), or None if there are none."""
    row = conn.execute(select(TrainingFactsRow).where(TrainingFactsRow.checkpoint_id == checkpoint)).first()
    metric_rows = conn.execute(
        select(Metric).where(Metric.checkpoint_id == checkpoint).order_by(Metric.name)
    ).all()
    if row is None and not metric_rows:
        return None
    columns = {} if row is None else {f: _stored(f, getattr(row, c)) for f, c in _COLUMNS.items()}
    facts, odd = checked(TrainingFacts, columns)
    times = [*(m.updated_at for m in metric_rows), *([] if row is None else [row.updated_at])]
    stored = {
        "sources": {} if row is None else parsed(row.sources),
        "updated_at": max((time for time in times if isinstance(time, datetime)), default=None),
        "live_verdict": None if row is None else _live_verdict(row),
    }
    right, odd_sources = checked(Training, stored)
    return Training(
        TrainingFacts(**facts, metrics={m.name: _measured_row(m) for m in metric_rows}),
        right["sources"] | {f"metrics.{m.name}": str(m.source) for m in metric_rows},
        right["updated_at"],
        right["live_verdict"],
        "; ".join(filter(None, (odd, odd_sources))),
    )


def _live_verdict(row: Any) -> Any:
    """Return the verdict of a row, if it is about a fingerprint that is still the recorded one."""
    current = (row.live_fingerprint, row.live_model_fingerprint)
    return row.live_verdict if row.live_compared in current else None


def metrics_of(conn: Connection, checkpoints: Sequence[int]) -> dict[int, dict[str, Measured]]:
    """Return metrics by row id of checkpoint and by name."""
    if not checkpoints:
        return {}
    query = select(Metric).where(Metric.checkpoint_id.in_(checkpoints)).order_by(Metric.name)
    by_checkpoint: dict[int, dict[str, Measured]] = {}
    for m in conn.execute(query):
        by_checkpoint.setdefault(m.checkpoint_id, {})[m.name] = _measured_row(m)
    return by_checkpoint


def _measured_row(row: Any) -> Measured:
    return read_row(Measured, row)


def names_of_metrics(conn: Connection, limit: int = 200) -> tuple[str, ...]:
    """Return the names of recorded metrics, of all checkpoints."""
    # One probe of the index for each name; DISTINCT would read every row.
    names: list[str] = []
    last = ""
    # Each name is larger than the last one, so the loop ends.
    while len(names) < limit:
        next_name = conn.execute(
            select(Metric.name).where(Metric.name > last).order_by(Metric.name).limit(1)
        ).scalar()
        if next_name is None:
            break
        names.append(next_name)
        last = next_name
    return tuple(names)


def over_steps(
    conn: Connection, run: str, names: Sequence[str] = (), limit: int = MOST_STEPS
) -> dict[str, tuple[tuple[int, float | None], ...]]:
    """Return metrics over the steps of a run: name -> (step, value), the lowest step first.

    A value is None if it is not finite. Of a step with several checkpoints, the oldest one counts: what is
    made of it inherits its metrics.

    Args:
        conn: a transaction.
        run: the name of the run.
        names: only these metrics; () means the first `MOST_SERIES` by name.
        limit: the most checkpoints, of the newest steps.
    """
    of_run = select(TrainingRun.id).where(TrainingRun.name == storable(run)).scalar_subquery()
    newest = (
        select(Checkpoint.id, Checkpoint.step)
        .where(Checkpoint.run_id == of_run, Checkpoint.step.is_not(None))
        .order_by(Checkpoint.step.desc(), Checkpoint.id.desc())
        .limit(limit)
        .subquery()
    )
    columns = (Metric.name, Metric.value, Metric.step, newest.c.step.label("of_step"))
    query = select(*columns).join(newest, newest.c.id == Metric.checkpoint_id)
    if names:
        query = query.where(Metric.name.in_([storable(name) for name in names]))
    # Rows come by id, so the oldest checkpoint of a step sets its value.
    series: dict[str, dict[int, float | None]] = {}
    for name, value, own_step, of_step in conn.execute(query.order_by(Metric.checkpoint_id)):
        step = of_step if own_step is None else own_step
        if isinstance(step, int) and isinstance(value, float | None):  # lists name odd rows
            series.setdefault(name, {}).setdefault(step, value)
    chosen = sorted(series)[: len(names) or MOST_SERIES]
    return {name: tuple(sorted(series[name].items())) for name in chosen}


def best(
    conn: Connection,
    metric: str,
    goal: str = "min",
    *,
    run: str | None = None,
    kind: str | None = None,
    limit: int = 10,
) -> tuple[Ranked, ...]:
    """Return the present checkpoints with the best finite values of a metric, the best first.

    What is made from a checkpoint inherits its metrics: of a step of a run there is one row, unless a kind is
    asked for. Those whose value is odd come last: they may be the best.

    Args:
        conn: a transaction.
        metric: its name.
        goal: ``min`` or ``max``.
        run: only this training run.
        kind: only ``source`` or ``derived``.
        limit: the most checkpoints.

    Raises:
        UsageError: the goal is unknown, or no checkpoint has such a metric.
    """
    if goal not in GOALS:
        raise UsageError(f"the goal must be min or max (got {goal!r})")
    of_these: list[ColumnElement[bool]] = [Metric.name == metric, Checkpoint.state == State.PRESENT.value]
    if run is not None:
        of_run = select(TrainingRun.id).where(TrainingRun.name == run).scalar_subquery()
        of_these.append(Checkpoint.run_id == of_run)
    if kind is not None:
        of_these.append(Checkpoint.kind == kind)
    number = limit
    while True:
        rows = _best_rows(conn, metric, goal, of_these, number, of_run=run is not None)
        ranked = rows if kind is not None else _one_of_each_step(rows)
        # Fewer rows than asked for: there are no more.
        if len(ranked) >= limit or len(rows) < number:
            break
        # Outputs inherit metrics: many of the best rows may be of one step. Read until enough steps differ.
        number *= 4
    if not ranked and conn.execute(select(Metric.name).where(Metric.name == metric).limit(1)).first() is None:
        metric_names = ", ".join(names_of_metrics(conn, limit=10)) or "none"
        raise UsageError(f"no checkpoint has the metric {metric!r}", hint=f"recorded metrics: {metric_names}")
    return ranked[:limit] if kind is None else ranked


def _one_of_each_step(rows: Iterable[Ranked]) -> tuple[Ranked, ...]:
    """Return the first row of each step of a run; an odd row, or one without a step, is one by itself."""
    first: dict[Any, Ranked] = {}
    for row in rows:
        run, step = row.checkpoint.run, row.step
        alone = row.trouble or run is None or step is None
        first.setdefault(row.checkpoint.id if alone else (run, step), row)
    return tuple(first.values())


def _best_rows(
    conn: Connection,
    metric: str,
    goal: str,
    of_these: Sequence[ColumnElement[bool]],
    limit: int,
    *,
    of_run: bool,
) -> tuple[Ranked, ...]:
    """Return the best rows of checkpoints, then those with an odd value, at most ``limit`` of each."""
    # Infinite values are stored as the largest numbers, and belong to no order of quality.
    order = Metric.value if goal == "min" else Metric.value.desc()
    conditions = [*of_these, Metric.value >= -_LARGEST, Metric.value <= _LARGEST]
    if not of_run:
        # First the last value of the list, along the index of values; then only the rows up to it are sorted.
        # The rows of one run are few, and found by their run.
        values = select(Metric.value).join(Checkpoint, Checkpoint.id == Metric.checkpoint_id)
        last = conn.execute(values.where(*conditions).order_by(order).offset(limit - 1).limit(1)).scalar()
        if last is not None:
            conditions.append(Metric.value <= last if goal == "min" else Metric.value >= last)
    # Each end by itself: for one or the other, SQLite would read every value of the metric.
    ends = (Metric.value < -_LARGEST, Metric.value > _LARGEST)
    odd = [
        row
        for end in (ends if goal == "min" else ends[::-1])
        for row in _ranked(conn, metric, [*of_these, end], order, limit)
    ]
    return *_ranked(conn, metric, conditions, order, limit), *odd[:limit]


def _ranked(
    conn: Connection, metric: str, conditions: Sequence[ColumnElement[bool]], order: Any, limit: int
) -> tuple[Ranked, ...]:
    query = (
        checkpoint_rows()
        .add_columns(Metric.value.label("metric_value"), Metric.step.label("metric_step"))
        .join(Metric, Metric.checkpoint_id == Checkpoint.id)
        .where(*conditions)
        .order_by(order, func.coalesce(Checkpoint.step, -1), Checkpoint.id)
        .limit(limit)
    )
    rows = []
    for row in conn.execute(query):
        checkpoint = checkpoint_row(row)
        step = checkpoint.step if row.metric_step is None else row.metric_step
        rows.append(sound(Ranked, metric=metric, value=row.metric_value, step=step, checkpoint=checkpoint))
    return tuple(rows)


def _put_one(conn: Connection, now: datetime, checkpoint: int, facts: TrainingFacts, source: str) -> None:
    facts_by_name = {f: v for f in _COLUMNS if (v := getattr(facts, f)) not in (None, {})}
    if facts_by_name:
        _put_columns(conn, now, checkpoint, facts_by_name, source)
    if facts.metrics:
        _put_metrics(conn, now, checkpoint, facts.metrics, source)


def _put_columns(
    conn: Connection, now: datetime, checkpoint: int, facts_by_name: Mapping[str, Any], source: str
) -> None:
    of_checkpoint = TrainingFactsRow.checkpoint_id == checkpoint
    row = conn.execute(select(TrainingFactsRow).where(of_checkpoint)).first()
    stored = {} if row is None else {"sources": parsed(row.sources)}
    sources: dict[str, str] = checked(Training, stored)[0].get("sources", {})
    changes: dict[str, Any] = {}
    for name, value in facts_by_name.items():
        column = _COLUMNS[name]
        wins = _rank(source) <= _rank(sources.get(name))
        old = None if row is None else _value(name, getattr(row, column))
        if name in _JSON:
            # The new value wins key by key; keys of the other one stay.
            merged = {**(old or {}), **value} if wins else {**value, **(old or {})}
            changes[column] = clean_json(bounded(name, merged, []))
        elif wins or old is None:
            changes[column] = value
        else:
            continue
        if wins:
            sources[name] = source
    if not changes:
        return
    changes |= {"sources": clean_json(sources), "updated_at": now}
    if row is None:
        conn.execute(
            insert(TrainingFactsRow).values(
                {"config": "{}", "extra": "{}", **changes, "checkpoint_id": checkpoint}
            )
        )
    else:
        conn.execute(update(TrainingFactsRow).where(of_checkpoint).values(changes))


def _put_metrics(
    conn: Connection, now: datetime, checkpoint: int, metrics: Mapping[str, Measured], source: str
) -> None:
    of_checkpoint = Metric.checkpoint_id == checkpoint
    stored_sources = {
        r.name: r.source for r in conn.execute(select(Metric.name, Metric.source).where(of_checkpoint))
    }
    accepted = {n: m for n, m in metrics.items() if _rank(source) <= _rank(stored_sources.get(n))}
    # Bounded for each checkpoint: a log of metrics may name any number.
    free = MAX_METRICS - len(stored_sources)
    new = [n for n in accepted if n not in stored_sources]
    for name in new[max(free, 0) :]:
        del accepted[name]
    if not accepted:
        return
    # Replaced as a whole: a metric has one value, with its step and origin.
    conn.execute(delete(Metric).where(of_checkpoint, Metric.name.in_(list(accepted))))
    conn.execute(
        insert(Metric),
        [
            {
                "checkpoint_id": checkpoint,
                "name": name,
                "value": m.value,
                "nonfinite": m.nonfinite,
                "step": m.step,
                "source": source,
                "updated_at": now,
            }
            for name, m in accepted.items()
        ],
    )


def _made_from(conn: Connection, checkpoint: int) -> list[int]:
    """Return the row ids of everything that was made from a checkpoint, directly or indirectly."""
    reached = level = {checkpoint}
    while level:
        level = {edge.far for edge in edges_of(conn, level, Direction.IN, Direction.OUT)} - reached
        reached = reached | level
    return sorted(reached - {checkpoint})


def _rank(source: str | None) -> int:
    return PRECEDENCE.index(source) if source in PRECEDENCE else len(PRECEDENCE)


def _value(name: str, stored: Any) -> Any:
    """Return a fact; an odd one is unknown, so that a new one replaces it."""
    return checked(TrainingFacts, {name: _stored(name, stored)})[0][name]


def _stored(name: str, stored: Any) -> Any:
    return parsed(stored) if name in _JSON else stored
