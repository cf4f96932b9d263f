"""Maintain recorded checkpoints: find those due for a check, record results, mark deletions.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, func, or_, select, union, update

from ckptcore.catalog.checkpoints import note_findings
from ckptcore.catalog.claims import TAKEN, read_owner
from ckptcore.catalog.conversions import Running, running
from ckptcore.catalog.holds import in_force
from ckptcore.catalog.models import Alias, Checkpoint, Claim, Conversion, ConversionIO, Hold, Tag, TrainingRun
from ckptcore.catalog.normalize import parents, same_places
from ckptcore.catalog.query import (
    checkpoint_row,
    checkpoint_rows,
    conversion_row,
    edges_of,
    in_parts,
    resolve_checkpoint,
)
from ckptcore.catalog.types import CheckpointRow, ConversionRow, Direction, Kind, Outcome, State
from ckptcore.errors import Finding, UsageError
from ckptcore.utils import processes
from ckptcore.utils.merged_url import is_merged, roots_of

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

_ALIVE = (State.PRESENT.value, State.DAMAGED.value, State.INCOMPLETE.value, State.GONE.value)


@dataclass(frozen=True, slots=True)
class Ties:
    """Why a checkpoint must stay: tag keys, alias names, reasons of holds, ids or owners of readers."""

    tags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()

    def with_those(self, added: Ties, note: str = "") -> Ties:
        """Return these reasons and others, each of those once and with a note behind it."""
        mine = (self.tags, self.aliases, self.holds, self.readers)
        theirs = (added.tags, added.aliases, added.holds, added.readers)
        new = [(set(a), b) for a, b in zip(mine, theirs, strict=True)]
        with_notes = [tuple(f"{x}{note}" for x in b if x not in present) for present, b in new]
        return Ties(*((*a, *b) for a, b in zip(mine, with_notes, strict=True)))


def due(conn: Connection) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints that should exist, the longest unverified first."""
    # Never checked comes first: NULL is sorted by the first term.
    last = func.coalesce(Checkpoint.checked_at, Checkpoint.verified_at)
    alive = checkpoint_rows().where(Checkpoint.state.in_(_ALIVE))
    ordered = alive.order_by(last.is_not(None), last, Checkpoint.id)
    return tuple(checkpoint_row(row) for row in conn.execute(ordered))


def checked(conn: Connection, now: datetime, public: str, level: str, findings: Iterable[Finding]) -> None:
    """Record the findings of a check of `level`, and derive the checkpoint's state from them."""
    row = resolve_checkpoint(conn, public)
    note_findings(conn, now, findings, checkpoint=row, conversion=None, level=level)
    looked(conn, now, public)


def gone(conn: Connection, now: datetime, public: str) -> None:
    """Record that nothing is at the checkpoint's URI any more. The row stays."""
    changes = {"state": State.GONE.value, "verified_at": None, "verified_level": None, "checked_at": now}
    # Only rows that should exist: what was deleted on purpose stays deleted.
    still_alive = (Checkpoint.uuid == public, Checkpoint.state.in_(_ALIVE))
    conn.execute(update(Checkpoint).where(*still_alive).values(changes))


def looked(conn: Connection, now: datetime, public: str) -> None:
    """Record the time of a check, whatever its result."""
    conn.execute(update(Checkpoint).where(Checkpoint.uuid == public).values(checked_at=now))


def run_names(conn: Connection, limit: int = 2000) -> list[str]:
    """Return names of training runs, the newest first."""
    query = select(TrainingRun.name).order_by(TrainingRun.id.desc()).limit(limit)
    return list(conn.execute(query).scalars())


def sources(
    conn: Connection,
    roots: Sequence[str] = (),
    run: str | None = None,
    *,
    after: str | None = None,
    limit: int | None = None,
) -> tuple[CheckpointRow, ...]:
    """Return the present sources.

    Args:
        conn: The transaction.
        roots: Only those below one of these folders; none means all.
        run: Only those of this training run.
        after: Only those behind the one with this public id, in the order of a limited list.
        limit: Return as many at most, ordered by URI; otherwise all, ordered by when they were recorded.

    Raises:
        UsageError: There is no checkpoint ``after``.
    """
    query = checkpoint_rows().where(
        Checkpoint.kind == Kind.SOURCE.value, Checkpoint.state == State.PRESENT.value
    )
    if roots:
        query = query.where(or_(*(_below(conn, root) for root in roots)))
    if run is not None:
        query = query.where(TrainingRun.name == run)
    if after is not None:
        row = resolve_checkpoint(conn, after)
        uri = conn.execute(select(Checkpoint.uri).where(Checkpoint.id == row)).scalar_one()
        # By URI, then by id, as the list is ordered: several rows may have one URI.
        behind = or_(Checkpoint.uri > uri, Checkpoint.id > row)
        query = query.where(Checkpoint.uri >= uri, behind)
    order = (Checkpoint.id,) if limit is None else (Checkpoint.uri, Checkpoint.id)
    rows = conn.execute(query.order_by(*order).limit(limit))
    return tuple(checkpoint_row(row) for row in rows)


def newest_steps(
    conn: Connection, keys: Mapping[str, int], roots: Sequence[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Return the newest steps of present sources.

    Args:
        conn: The transaction.
        keys: Run -> how many. A source without a run belongs to the run that its folder names.
        roots: Only sources below one of these folders; none means all.

    Returns:
        Run -> its newest steps.
    """
    present_sources = [
        Checkpoint.kind == Kind.SOURCE.value,
        Checkpoint.state == State.PRESENT.value,
        Checkpoint.step.between(-(1 << 63), (1 << 63) - 1),  # not NULL, and no odd text
    ]
    if roots:
        present_sources.append(or_(*(_below(conn, root) for root in roots)))
    steps_by_run = {}
    for key, count in keys.items():
        run = select(TrainingRun.id).where(TrainingRun.name == key).scalar_subquery()
        named = select(Checkpoint.step).where(Checkpoint.run_id == run, *present_sources)
        newest = named.distinct().order_by(Checkpoint.step.desc()).limit(count)
        steps = {step for step in conn.execute(newest).scalars() if step is not None}
        # A run of a folder's path: sources that no run names belong to it by their place.
        if "/" in key:
            bare = select(Checkpoint.uri, Checkpoint.step).where(
                Checkpoint.run_id.is_(None), *present_sources
            )
            for uri, step in conn.execute(bare.where(_below(conn, key))):
                # Directly in the folder: one in a deeper folder is of another run.
                if step is not None and uri.rpartition("/")[0] == key.rstrip("/"):
                    steps.add(step)
        # Both kinds together may be more than were asked for.
        steps_by_run[key] = tuple(sorted(steps)[-count:])
    return steps_by_run


def _below(conn: Connection, folder: str) -> ColumnElement[bool]:
    """Return the condition that a URI is below a folder, in a form for which the database has an index."""
    prefix = folder.rstrip("/") + "/"
    if conn.dialect.name == "sqlite":  # its LIKE uses no index, and matches /runs/A for /runs/a
        return and_(Checkpoint.uri >= prefix, Checkpoint.uri < prefix[:-1] + chr(ord("/") + 1))
    return Checkpoint.uri.startswith(prefix, autoescape=True)


def children(conn: Connection, public: str) -> tuple[tuple[ConversionRow, CheckpointRow], ...]:
    """Return the present checkpoints made from one, each with the conversion that made it."""
    row = resolve_checkpoint(conn, public)
    read = select(ConversionIO.conversion_id).where(
        ConversionIO.checkpoint_id == row, ConversionIO.direction == Direction.IN.value
    )
    conversions = {
        c.id: conversion_row(c)
        for c in conn.execute(
            select(Conversion).where(Conversion.id.in_(read), Conversion.state == Outcome.SUCCEEDED.value)
        )
    }
    wrote = (
        checkpoint_rows()
        .add_columns(ConversionIO.conversion_id.label("made_by"))
        .join(ConversionIO, ConversionIO.checkpoint_id == Checkpoint.id)
        .where(
            ConversionIO.conversion_id.in_(list(conversions)),
            ConversionIO.direction == Direction.OUT.value,
            Checkpoint.state == State.PRESENT.value,
            # A checkpoint that was converted onto itself is no copy of itself.
            Checkpoint.id != row,
        )
        .order_by(Checkpoint.id.desc())
    )
    return tuple((conversions[r.made_by], checkpoint_row(r)) for r in conn.execute(wrote))


def ties(conn: Connection, now: datetime, publics: Sequence[str]) -> dict[str, Ties]:
    """Return why each of these checkpoints must stay at this moment.

    Raises:
        UsageError: One of them is not in the catalog.
    """
    ties_by_id: dict[str, Ties] = {}
    reading = _by_source(running(conn))
    for part in in_parts(publics):
        ties_by_id |= _ties(conn, now, part, reading)
    return ties_by_id


def _ties(
    conn: Connection, now: datetime, publics: Sequence[str], reading: Mapping[str, Sequence[str]]
) -> dict[str, Ties]:
    these = Checkpoint.uuid.in_(publics)

    def grouped(value: Any, of: ColumnElement[bool], order: Any, *conditions: Any) -> dict[str, list[str]]:
        query = select(Checkpoint.uuid, value).join(value.class_, of).where(these, *conditions)
        by_checkpoint: dict[str, list[str]] = {}
        for public, each in conn.execute(query.order_by(order)):
            by_checkpoint.setdefault(public, []).append(each)
        return by_checkpoint

    uri_of = {row.uuid: row.uri for row in conn.execute(select(Checkpoint.uuid, Checkpoint.uri).where(these))}
    if missing := sorted(set(publics) - uri_of.keys()):
        raise UsageError(f"the catalog has no checkpoint {missing[0]}")
    tags = grouped(Tag.key, Tag.checkpoint_id == Checkpoint.id, Tag.key)
    names = grouped(Alias.name, Alias.checkpoint_id == Checkpoint.id, Alias.name)
    on_hold = grouped(Hold.reason, Hold.checkpoint_id == Checkpoint.id, Hold.id, *in_force(now))
    claimed = grouped(Claim.owner, Claim.source_uri == Checkpoint.uri, Claim.id, *_claimed(now))
    return {
        public_id: Ties(
            tuple(tags.get(public_id, ())),
            tuple(names.get(public_id, ())),
            tuple(on_hold.get(public_id, ())),
            (*reading.get(uri_of[public_id], ()), *_at_work(claimed.get(public_id, ()))),
        )
        for public_id in publics
    }


def aliases_below(conn: Connection, publics: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the aliases of what was made from checkpoints, directly or in several steps, by public id."""
    level: dict[int, set[str]] = {}  # row id -> the checkpoints that it was made from
    for public_ids in in_parts(publics):
        rows = conn.execute(select(Checkpoint.id, Checkpoint.uuid).where(Checkpoint.uuid.in_(public_ids)))
        level |= {row.id: {row.uuid} for row in rows}
    below: dict[int, set[str]] = {}
    while level:
        new: dict[int, set[str]] = {}
        for parent, _, child in edges_of(conn, level, Direction.IN, Direction.OUT):
            # Only what is new for a child is passed on, so that loops in the lineage end.
            if sources := level[parent] - below.get(child, set()):
                new.setdefault(child, set()).update(sources)
        for child, sources in new.items():
            below.setdefault(child, set()).update(sources)
        level = new
    alias_names: dict[str, set[str]] = {}
    for child_ids in in_parts(below):
        named = select(Alias.checkpoint_id, Alias.name).where(Alias.checkpoint_id.in_(child_ids))
        for child, name in conn.execute(named):
            for public in below[child]:
                alias_names.setdefault(public, set()).add(name)
    return {public: tuple(sorted(names)) for public, names in alias_names.items()}


def tied(conn: Connection, now: datetime) -> tuple[str, ...]:
    """Return the URIs of everything that may have to stay at this moment: `ties_at` says why."""
    on_hold = select(Hold.checkpoint_id).where(*in_force(now))
    reserved_rows = union(on_hold, select(Tag.checkpoint_id), select(Alias.checkpoint_id))
    places = union(
        select(Checkpoint.uri).where(Checkpoint.id.in_(reserved_rows), Checkpoint.state.in_(_ALIVE)),
        select(Claim.source_uri).where(*_claimed(now)),
    )
    return tuple(sorted({*conn.execute(places).scalars(), *_by_source(running(conn))}))


def ties_at(conn: Connection, now: datetime, uris: Sequence[str]) -> dict[str, Ties]:
    """Return why these URIs must stay at this moment, without those that need not."""
    if not uris:
        return {}
    reading, joined = _by_source(running(conn)), dict[str, Ties]()
    for batch in in_parts(uris):
        alive_here = Checkpoint.uri.in_(batch), Checkpoint.state.in_(_ALIVE)
        rows = conn.execute(
            # Several rows may be at one URI: all of their ties count.
            select(Checkpoint.uuid, Checkpoint.uri).where(*alive_here).order_by(Checkpoint.id)
        )
        uri_of = {row.uuid: row.uri for row in rows}
        reasons = [(uri_of[public], of_row) for public, of_row in ties(conn, now, list(uri_of)).items()]
        reasons += [(uri, Ties(readers=reading[uri])) for uri in batch if uri in reading]
        claimed = select(Claim.source_uri, Claim.owner).where(*_claimed(now), Claim.source_uri.in_(batch))
        reasons += [(uri, Ties(readers=tuple(_at_work([owner])))) for uri, owner in conn.execute(claimed)]
        for uri, reason in reasons:
            joined[uri] = joined.get(uri, Ties()).with_those(reason)
    return {uri: of_uri for uri, of_uri in joined.items() if of_uri != Ties()}


def _by_source(conversions: Iterable[Running]) -> dict[str, tuple[str, ...]]:
    """Return source -> ids of the conversions that read it."""
    readers: dict[str, tuple[str, ...]] = {}
    for conversion in conversions:
        readers[conversion.source_uri] = (*readers.get(conversion.source_uri, ()), conversion.id)
    return readers


def _claimed(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return Claim.state == TAKEN, Claim.due_at > now


def _at_work(owners: Iterable[str]) -> Iterator[str]:
    """Yield the owners of claims, without those whose process is known to have ended."""
    for owner, process in map(read_owner, owners):
        if not processes.has_ended(process):
            yield owner


def replacing(conn: Connection, uri: str) -> tuple[str, ...]:
    """Return the ids of conversions that are now writing to a URI, or to a folder around it."""
    # A conversion to a folder around it replaces it as well.
    targets = {place for spelling in same_places(uri) for place in (spelling, *parents(spelling))}
    return tuple(conversion.id for conversion in running(conn) if conversion.destination_uri in targets)


def destinations(conn: Connection) -> dict[str, str]:
    """Return the URIs to which conversions are now writing, each with the id of one of them."""
    return {conversion.destination_uri: conversion.id for conversion in running(conn)}


def inside(conn: Connection, uri: str) -> tuple[str, ...]:
    """Return the URIs of other existing checkpoints with files inside this one's folder."""
    top = uri.rstrip("/") + "/"
    # Merged sources have their folders inside of their URL: the database cannot compare those.
    below, merged = _below(conn, uri), _below(conn, "merged:")
    rows = conn.execute(
        select(Checkpoint.uri).where(or_(below, merged), Checkpoint.uri != uri, Checkpoint.state.in_(_ALIVE))
    )
    return tuple(
        place
        for place in rows.scalars()
        if not is_merged(place)
        or any(f"{root}/".startswith(top) or top.startswith(f"{root}/") for root in roots_of(place))
    )


def existing(conn: Connection) -> tuple[str, ...]:
    """Return the URIs of all checkpoints that should exist."""
    query = select(Checkpoint.uri).where(Checkpoint.state.in_(_ALIVE))
    return tuple(conn.execute(query.distinct().order_by(Checkpoint.uri)).scalars())


def merged_incomplete(conn: Connection) -> tuple[str, ...]:
    """Return the URIs of merged checkpoints that were incomplete when they were last read."""
    is_incomplete = Checkpoint.state == State.INCOMPLETE.value
    return tuple(conn.execute(select(Checkpoint.uri).where(_below(conn, "merged:"), is_incomplete)).scalars())


def row_of(conn: Connection, public: str) -> CheckpointRow | None:
    """Return the row of a checkpoint, or None if this catalog does not know it."""
    row = conn.execute(checkpoint_rows().where(Checkpoint.uuid == public)).first()
    return None if row is None else checkpoint_row(row)


def state_of(conn: Connection, public: str) -> str | None:
    """Return the state of a checkpoint, or None if this catalog does not know it."""
    return conn.execute(select(Checkpoint.state).where(Checkpoint.uuid == public)).scalar()


def known_below(conn: Connection, root: str) -> tuple[str, ...]:
    """Return the URIs below a root where sources are or were."""
    above = root.rstrip("/") + "/"
    below = Checkpoint.uri.startswith(above, autoescape=True)
    # SQLite's LIKE ignores case: Python compares the URIs once more.
    query = select(Checkpoint.uri).where(below, Checkpoint.kind == Kind.SOURCE.value).distinct()
    return tuple(uri for uri in conn.execute(query).scalars() if uri.startswith(above))
