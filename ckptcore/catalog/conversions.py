"""Record conversions: their start, success or failure, and the results of checks.

Every function runs inside the given writer's transaction. Nobody else writes meanwhile, so reading a row and
then changing it is safe.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, delete, false, func, insert, select, update

from ckptcore.catalog import history, training_rows
from ckptcore.catalog.checkpoints import note_findings, put_checkpoint
from ckptcore.catalog.database import clock
from ckptcore.catalog.holdings import put_stamp
from ckptcore.catalog.models import Checkpoint, Conversion, ConversionIO, ConversionProcess
from ckptcore.catalog.normalize import clean, clean_json, hex_digest, normal_uri, same_places
from ckptcore.catalog.query import at, current_first, in_parts, resolve_checkpoint
from ckptcore.catalog.row_values import parsed
from ckptcore.catalog.types import (
    Begun,
    CheckpointFacts,
    CheckpointRow,
    ConversionFacts,
    ConversionStart,
    Direction,
    Kind,
    Outcome,
    State,
)
from ckptcore.errors import CatalogError, Finding, UsageError
from ckptcore.utils import processes

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

# Codes of findings about the output, not the source.
_OF_OUTPUT = frozenset({"found-files", "left-beside", "not-loadable"})

FAILED, NOT_DONE, UNPROVEN, OK = "failed", "not-done", "unproven", "ok"  # verdicts on exports
LEASE = timedelta(minutes=5)  # silence after which a conversion of another machine does not run any more


def begin(conn: Connection, now: datetime, start: ConversionStart, process: Sequence[str]) -> Begun:
    """Insert a running conversion, and read what is known of its source."""
    new, source = begin_conversion(conn, now, start, process), at(conn, start.source_uri)
    if source is None:
        return Begun(new)
    return Begun(new, source, training_rows.read(conn, resolve_checkpoint(conn, source[0].id)))


def begin_conversion(
    conn: Connection, now: datetime, start: ConversionStart, process: Sequence[str] = ()
) -> str:
    """Insert a running conversion and return its id. process: that runs it, () if it ends at once."""
    new = str(uuid.uuid4())
    row = conn.execute(
        insert(Conversion)
        .values(
            uuid=new,
            verb=start.verb,
            state=Outcome.RUNNING.value,
            source_uri=normal_uri(start.source_uri),
            destination_uri=normal_uri(start.destination_uri),
            request=clean_json(start.request),
            tool_version=start.tool_version,
            flow_run_id=start.flow_run_id,
            started_at=now,
            timings="{}",
        )
        .returning(Conversion.id)
    ).scalar_one()
    if process:
        # Without its mark, another process could be mistaken for it: then only its silence counts.
        identity = " ".join(process) if all(process) else ""
        alive = {"conversion_id": row, "process": identity, "renewed_at": clock(conn)}
        conn.execute(insert(ConversionProcess).values(alive))
    return new


def of_machine(process: Sequence[str]) -> tuple[ColumnElement[bool]]:
    """Return the condition that a conversion runs on the machine of a process, since its last boot."""
    # The boot id is in the process's mark: numbers of processes begin anew with each boot.
    boot = process[3].partition(":")[0]
    return (ConversionProcess.process.contains(f" {boot}:", autoescape=True) if boot else false(),)


def end_interrupted(conn: Connection, now: datetime, *conditions: ColumnElement[bool]) -> tuple[str, ...]:
    """End the conversions that show no sign of life (`interrupted`); return their ids.

    Args:
        conn: The transaction.
        now: The time to record.
        conditions: Conditions on the conversions, and on their processes.
    """
    ended = interrupted(conn, *conditions)
    for part in in_parts(ended):
        _end(conn, now, Conversion.uuid.in_(part), "the process ended unexpectedly")
    return ended


def interrupted(conn: Connection, *conditions: ColumnElement[bool]) -> tuple[str, ...]:
    """Return the ids of conversions that are recorded as running, but do not run any more.

    Their process is known to have ended, or it is of another machine and was silent for `LEASE`.

    Args:
        conn: The transaction.
        conditions: Conditions on the conversions.
    """
    rows = _recorded(conn, *conditions)
    dead = _dead({(row.process, row.silent) for row in rows})
    return tuple(row.uuid for row in rows if (row.process, row.silent) in dead)


@dataclass(frozen=True, slots=True)
class Running:
    """A conversion that runs: its id, what it reads and where it writes."""

    id: str
    source_uri: str
    destination_uri: str


def running(conn: Connection) -> tuple[Running, ...]:
    """Return the conversions that run now."""
    rows = _recorded(conn)
    dead = _dead({(row.process, row.silent) for row in rows})
    return tuple(
        Running(row.uuid, row.source_uri, row.destination_uri)
        for row in rows
        if (row.process, row.silent) not in dead
    )


def renew(conn: Connection, conversions: Sequence[str]) -> frozenset[str]:
    """Record that conversions still run; return those that do not count as running any more.

    One that was silent for `LEASE` does not come back: what it was about to replace may be counted on by now.
    """
    now = clock(conn)
    mine = (
        select(Conversion.uuid, Conversion.id)
        .outerjoin(ConversionProcess, ConversionProcess.conversion_id == Conversion.id)
        .where(Conversion.uuid.in_(conversions), Conversion.state == Outcome.RUNNING.value)
        # By the database's clock on both sides: clocks of machines differ.
        .where(func.coalesce(ConversionProcess.renewed_at, Conversion.started_at) >= now - LEASE)
    )
    rows = conn.execute(mine).all()
    alive = ConversionProcess.conversion_id.in_([row.id for row in rows])
    conn.execute(update(ConversionProcess).where(alive).values(renewed_at=now))
    return frozenset(conversions) - {row.uuid for row in rows}


def unfinished_requests(conn: Connection, verb: str, destination: str) -> tuple[dict[str, Any], ...]:
    """Return the requests of conversions to a place that did not succeed, running ones too."""
    rows = conn.execute(
        select(Conversion.request).where(
            Conversion.verb == verb,
            Conversion.destination_uri == normal_uri(destination),
            Conversion.state != Outcome.SUCCEEDED.value,
        )
    ).scalars()
    return tuple(request for request in map(parsed, rows) if isinstance(request, dict))


def _recorded(conn: Connection, *conditions: ColumnElement[bool]) -> Sequence[Any]:
    """Return the conversions that are recorded as running: ids, places, process and whether it was silent."""
    # One that never renewed counts from its start.
    last = func.coalesce(ConversionProcess.renewed_at, Conversion.started_at)
    rows = conn.execute(
        select(
            Conversion.id,
            Conversion.uuid,
            Conversion.source_uri,
            Conversion.destination_uri,
            func.coalesce(ConversionProcess.process, "").label("process"),
            (last < clock(conn) - LEASE).label("silent"),
        )
        .outerjoin(ConversionProcess, ConversionProcess.conversion_id == Conversion.id)
        .where(Conversion.state == Outcome.RUNNING.value, *conditions)
    ).all()
    return sorted(rows, key=lambda row: row.id)


def _dead(signs: Iterable[tuple[str, bool]]) -> frozenset[tuple[str, bool]]:
    """Return which (process, whether it was silent) do not run any more. A process is looked at once."""
    return frozenset(
        (process, silent)
        for process, silent in signs
        if processes.has_ended(process.split(" "))
        or (silent and not processes.is_running(process.split(" ")))
    )


def succeed(
    conn: Connection,
    now: datetime,
    conversion: str,
    facts: ConversionFacts,
    source: CheckpointFacts,
    derived: CheckpointFacts,
) -> str:
    """Record the success of a conversion: both checkpoints, the edge between them, and the end.

    A second call (a retried task) changes nothing.

    Returns:
        The public id of the derived checkpoint.
    """
    row = _conversion(conn, conversion)
    # A task that is repeated after the commit must not record the conversion a second time.
    if row.state == Outcome.SUCCEEDED:
        return _output_of(conn, row.id)
    source_id, _ = put_checkpoint(conn, now, source, Kind.SOURCE)
    derived_id, derived_uuid = put_checkpoint(
        conn, now, _of_the_same_run(conn, source_id, derived), Kind.DERIVED
    )
    # The stamp is of the folder as it was published, and so only of the output.
    put_stamp(conn, derived_id, derived.stamp)
    _link(conn, row.id, {(source_id, Direction.IN), (derived_id, Direction.OUT)})
    # What is wrong with the output is no defect of its source, and the other way round.
    of_source = [f for f in facts.findings if f.code not in _OF_OUTPUT]
    of_output = [f for f in facts.findings if f.code in _OF_OUTPUT]
    note_findings(conn, now, of_source, checkpoint=source_id, conversion=row.id, level=source.verified)
    note_findings(conn, now, of_output, checkpoint=derived_id, conversion=row.id, level=derived.verified)
    _inherit(conn, now, source_id, derived_id)
    if source.live is not None:  # compared in this conversion: its output was written from these tensors
        training_rows.put_live(conn, now, derived_id, source.live)
    if facts.inputs:
        _record_average(conn, now, row.id, source_id, facts.inputs)
    _ended(
        conn,
        now,
        row.id,
        plan_digest=facts.plan_digest,
        bytes_in=facts.bytes_in,
        bytes_out=facts.bytes_out,
        peak_memory=facts.peak_memory,
        timings=clean_json(facts.timings),
        map_digest=facts.map_digest,
        fingerprint=facts.fingerprint,
        source_stamp=facts.source_stamp,
        source_ctime=facts.source_ctime,
        error_code=None,
        error_message=None,
    )
    # Killed runs leave no record. Only one conversion can have a destination at a time, and this one has just
    # published there: an earlier one that still "runs" is gone, unless its process is seen to run. That one
    # reads its source, and its turn is yet to come.
    same_destination = Conversion.destination_uri.in_(same_places(row.destination_uri))
    # Earlier ones only: a later one has not begun to publish while this one had the destination.
    gone = [
        earlier.id
        for earlier in _recorded(conn, same_destination, Conversion.id < row.id)
        if not processes.is_running(earlier.process.split(" "))
    ]
    for part in in_parts(gone):
        why = f"the process ended unexpectedly; {conversion} wrote the destination"
        _end(conn, now, Conversion.id.in_(part), why)
    return derived_uuid


def thinned(
    conn: Connection,
    now: datetime,
    conversion: str,
    before: CheckpointRow,
    facts: CheckpointFacts,
    findings: Iterable[Finding],
) -> str:
    """Record that a conversion left a checkpoint at its place without a part of it.

    What is there now is of the same kind, run and step, and has the same training.

    Args:
        conn: The transaction.
        now: The time to record.
        conversion: The conversion.
        before: The checkpoint until now.
        facts: What is there now.
        findings: Warnings about it.

    Returns:
        The public id of what is there now.
    """
    row, source = _conversion(conn, conversion), resolve_checkpoint(conn, before.id)
    facts = replace(facts, run=before.run, step=before.step)
    derived, public = put_checkpoint(conn, now, facts, Kind(before.kind))
    put_stamp(conn, derived, facts.stamp)
    # Nothing changed if the thinned content was recorded before.
    if derived != source:
        _link(conn, row.id, {(source, Direction.IN), (derived, Direction.OUT)})
        _inherit(conn, now, source, derived)
        history.carry(conn, source, derived)
    note_findings(conn, now, findings, checkpoint=derived, conversion=row.id, level=facts.verified)
    _ended(conn, now, row.id)
    return public


def pushed(
    conn: Connection,
    now: datetime,
    conversion: str,
    checkpoint: str,
    commit: str,
    *,
    bytes_in: int,
    bytes_out: int,
) -> None:
    """Record that a conversion sent a checkpoint to a repository; its request has the commit from now on.

    What is there is no checkpoint of the catalog: nothing here scrubs it, or counts on it.
    """
    row = _conversion(conn, conversion)
    request = conn.execute(select(Conversion.request).where(Conversion.id == row.id)).scalar_one()
    _link(conn, row.id, {(resolve_checkpoint(conn, checkpoint), Direction.IN)})
    request = clean_json({**parsed(request), "commit": commit})
    _ended(conn, now, row.id, request=request, bytes_in=bytes_in, bytes_out=bytes_out)


def fail(
    conn: Connection,
    now: datetime,
    conversion: str,
    *,
    code: str,
    message: str,
    findings: Iterable[Finding],
    source: CheckpointFacts | None,
) -> None:
    """Record the end of a conversion that published nothing."""
    row = _conversion(conn, conversion)
    # The output is published: a failure that arrives late must not take it back.
    if row.state == Outcome.SUCCEEDED:
        raise CatalogError(
            f"cannot fail conversion {conversion}: it is recorded as succeeded",
            hint="begin a new conversion for a new attempt",
        )
    source_id = None
    if source is not None:
        source_id, _ = put_checkpoint(conn, now, source, Kind.SOURCE)
        _link(conn, row.id, {(source_id, Direction.IN)})
    level = source.verified if source else None
    note_findings(conn, now, findings, checkpoint=source_id, conversion=row.id, level=level)
    failed = {"state": Outcome.FAILED.value, "error_code": code, "error_message": clean(message)}
    _ended(conn, now, row.id, **failed)


def record_validation(
    conn: Connection,
    now: datetime,
    facts: CheckpointFacts,
    findings: Iterable[Finding],
    level: str,
    kind: Kind = Kind.SOURCE,
) -> str:
    """Record a check of `level`, resolve what it no longer finds, and return the checkpoint's id."""
    checkpoint, public = put_checkpoint(conn, now, facts, kind)
    note_findings(conn, now, findings, checkpoint=checkpoint, conversion=None, level=level)
    return public


def adopt(
    conn: Connection, now: datetime, derived: str, *, source_uri: str, source_digest: str, tool_version: str
) -> str | None:
    """Record the conversion that an output's own metadata names, without times and sizes.

    Returns:
        The URI of the source. None, with nothing changed, if a conversion of that output is known or no
        checkpoint has that manifest.
    """
    output = conn.execute(select(Checkpoint.id, Checkpoint.uri).where(Checkpoint.uuid == derived)).one()
    same = Checkpoint.manifest_digest == hex_digest(source_digest)
    at_source_uri = Checkpoint.uri.in_(same_places(source_uri))
    source = conn.execute(
        # The same content may be recorded at several places: the named one comes first.
        select(Checkpoint.id, Checkpoint.uri)
        .where(same, Checkpoint.id != output.id)
        .order_by(at_source_uri.desc(), *current_first())
    ).first()
    return None if source is None else _adopt(conn, now, output, source, "export", tool_version)


def adopt_equal(conn: Connection, now: datetime, derived: str, *, tool_version: str) -> str | None:
    """Record the conversion of an output whose metadata names no source, by its fingerprint.

    The source is the only present one with the same fingerprint. If there are several, it is the only one of
    the same step, which comes from the output's name. The verb is unknown and recorded as ``rebuilt``.

    Returns:
        As `adopt`.
    """
    columns = select(Checkpoint.id, Checkpoint.uri, Checkpoint.step, Checkpoint.fingerprint)
    output = conn.execute(columns.where(Checkpoint.uuid == derived)).one()
    sources = (Checkpoint.kind == Kind.SOURCE.value, Checkpoint.state == State.PRESENT.value)
    same = Checkpoint.fingerprint == output.fingerprint  # never true of an unknown one
    candidates = conn.execute(columns.where(same, Checkpoint.id != output.id, *sources)).all()
    # Equal content under several steps: only the step of the output's name can decide.
    if len(candidates) > 1:
        candidates = [row for row in candidates if row.step is not None and row.step == output.step]
    if len(candidates) != 1:
        return None
    return _adopt(conn, now, output, candidates[0], "rebuilt", tool_version)


def record_verdict(
    conn: Connection, now: datetime, conversion: str, checks: Iterable[tuple[str, str, str]]
) -> str:
    """Record the results of checks and return the verdict over all checks recorded so far.

    Args:
        conn: a writer's transaction.
        now: the time to record.
        conversion: the public id of the conversion that wrote the export.
        checks: (check, verdict, summary) each; the verdict is ``ok``, ``failed`` or ``not-done``.

    Raises:
        UsageError: the catalog has no such conversion.
    """
    row = _conversion(conn, conversion)
    check_results: dict[str, dict[str, str]] = json.loads(row.export_checks or "{}")
    for name, verdict, summary in checks:
        if verdict != NOT_DONE or check_results.get(name, {}).get("verdict", NOT_DONE) == NOT_DONE:
            check_results[name] = {"verdict": verdict, "summary": clean(summary), "at": now.isoformat()}
    verdicts = {check["verdict"] for check in check_results.values()}
    verdict = FAILED if FAILED in verdicts else UNPROVEN if NOT_DONE in verdicts else OK
    conn.execute(
        update(Conversion)
        .where(Conversion.id == row.id)
        .values(export_verdict=verdict, export_checks=clean_json(check_results), export_verified_at=now)
    )
    return verdict


def _record_average(
    conn: Connection,
    now: datetime,
    conversion: int,
    average: int,
    inputs: Sequence[tuple[float, CheckpointFacts]],
) -> None:
    """Record what an average was computed of, as a conversion that wrote it: K edges of lineage.

    An average has no files of its own and is at no place, so its row ends as one of replaced content: no
    check, sum of bytes or retirement counts it.
    """
    ended: dict[str, Any] = {"state": State.REPLACED.value, "replaced_at": now}
    conn.execute(update(Checkpoint).where(Checkpoint.id == average).values(ended))
    # A second conversion of the same average adds no second origin.
    if _has_origin(conn, average):
        return
    uri = conn.execute(select(Checkpoint.uri).where(Checkpoint.id == average)).scalar_one()
    version = select(Conversion.tool_version).where(Conversion.id == conversion)
    request = {"inputs": [[facts.uri, weight] for weight, facts in inputs]}
    start = ConversionStart(request, uri, uri, "average", conn.execute(version).scalar_one())
    _put_ended(
        conn, now, start, [put_checkpoint(conn, now, facts, Kind.SOURCE)[0] for _, facts in inputs], average
    )


def _adopt(conn: Connection, now: datetime, output: Any, source: Any, verb: str, version: str) -> str | None:
    # An output has one origin; one that is known is not guessed again.
    if _has_origin(conn, output.id):
        return None
    start = ConversionStart({"rebuilt": True}, source.uri, output.uri, verb, version)
    _put_ended(conn, now, start, [source.id], output.id)
    run = select(Checkpoint.run_id).where(Checkpoint.id == source.id)
    changes: dict[str, Any] = {"kind": Kind.DERIVED.value}
    if conn.execute(run).scalar() is not None:  # the run in a destination's name is only a guess
        changes |= {"run_id": None, "step": None}
    conn.execute(update(Checkpoint).where(Checkpoint.id == output.id).values(changes))
    _inherit(conn, now, source.id, output.id)
    return str(source.uri)


def _has_origin(conn: Connection, checkpoint: int) -> bool:
    wrote = ConversionIO.checkpoint_id == checkpoint, ConversionIO.direction == Direction.OUT.value
    return conn.execute(select(ConversionIO.conversion_id).where(*wrote)).first() is not None


def _put_ended(
    conn: Connection, now: datetime, start: ConversionStart, sources: Iterable[int], output: int
) -> None:
    """Record a conversion that is over, with the row ids of what it read and wrote."""
    row = _conversion(conn, begin_conversion(conn, now, start))
    _link(conn, row.id, {*((source, Direction.IN) for source in sources), (output, Direction.OUT)})
    _ended(conn, now, row.id)


def _ended(conn: Connection, now: datetime, conversion: int, **columns: Any) -> None:
    """Record that a conversion is over, and has succeeded unless the columns say otherwise."""
    values = {"state": Outcome.SUCCEEDED.value, "ended_at": now, **columns}
    conn.execute(update(Conversion).where(Conversion.id == conversion).values(values))
    _forget_process(conn, Conversion.id == conversion)


def _end(conn: Connection, now: datetime, which: ColumnElement[bool], why: str) -> None:
    """End conversions that run, as interrupted."""
    running = and_(which, Conversion.state == Outcome.RUNNING.value)
    # Before the state changes: the condition is about conversions that run.
    _forget_process(conn, running)
    values = {"state": Outcome.FAILED.value, "ended_at": now}
    conn.execute(
        update(Conversion).where(running).values(values | {"error_code": "interrupted", "error_message": why})
    )


def withdraw(conn: Connection, conversion: str) -> None:
    """Remove the record of a conversion that runs: what was asked for is none, and nothing came of it."""
    row = _conversion(conn, conversion)
    withdrawn = and_(Conversion.id == row.id, Conversion.state == Outcome.RUNNING.value)
    _forget_process(conn, withdrawn)
    conn.execute(delete(Conversion).where(withdrawn))


def _forget_process(conn: Connection, which: ColumnElement[bool]) -> None:
    ended = select(Conversion.id).where(which)
    conn.execute(delete(ConversionProcess).where(ConversionProcess.conversion_id.in_(ended)))


def _conversion(conn: Connection, conversion: str) -> Any:
    row = conn.execute(
        select(Conversion.id, Conversion.state, Conversion.destination_uri, Conversion.export_checks)
        .where(Conversion.uuid == conversion)
        .with_for_update()
    ).first()
    if row is None:
        raise UsageError(f"the catalog has no conversion {conversion}", hint="record its start first")
    return row


def _output_of(conn: Connection, conversion: int) -> str:
    return conn.execute(
        select(Checkpoint.uuid)
        .join(ConversionIO, ConversionIO.checkpoint_id == Checkpoint.id)
        .where(ConversionIO.conversion_id == conversion, ConversionIO.direction == Direction.OUT.value)
    ).scalar_one()


def _of_the_same_run(conn: Connection, source: int, derived: CheckpointFacts) -> CheckpointFacts:
    """Drop the run that a destination's name suggests if the source's run is known."""
    source_run = conn.execute(select(Checkpoint.run_id).where(Checkpoint.id == source)).scalar()
    return derived if source_run is None else replace(derived, run=None, step=None)


def _inherit(conn: Connection, now: datetime, source: int, derived: int) -> None:
    """Copy the run, the step and the training facts of the source to a derived checkpoint that has none."""
    made_from = select(Checkpoint).where(Checkpoint.id == source).subquery()
    conn.execute(
        update(Checkpoint)
        .where(Checkpoint.id == derived)
        .values(
            run_id=func.coalesce(Checkpoint.run_id, select(made_from.c.run_id).scalar_subquery()),
            step=func.coalesce(Checkpoint.step, select(made_from.c.step).scalar_subquery()),
        )
    )
    training_rows.inherit(conn, now, source, derived)


def _link(conn: Connection, conversion: int, ends: set[tuple[int, Direction]]) -> None:
    linked = conn.execute(
        select(ConversionIO.checkpoint_id, ConversionIO.direction).where(
            ConversionIO.conversion_id == conversion
        )
    ).all()
    rows = [
        {"conversion_id": conversion, "checkpoint_id": checkpoint, "direction": direction.value}
        for checkpoint, direction in sorted(ends)
        if (checkpoint, direction.value) not in {tuple(row) for row in linked}
    ]
    if rows:
        conn.execute(insert(ConversionIO), rows)
