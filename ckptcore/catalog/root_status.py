"""The state of watched roots: what sweeps saw there, what of it is converted, and what waits and why.

All of it is read from what sweeps, claims, conversions and the inbox record; no folder is opened. A root may
have any number of checkpoints, so its newest `NEWEST` complete ones are compared with what was made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from ckptcore.catalog import claims
from ckptcore.catalog.models import Claim, Conversion, Inbox, Sighting
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.queues import Stage
from ckptcore.catalog.row_values import sound
from ckptcore.catalog.sightings import Condition, SightingRow, is_below, sighting_row
from ckptcore.catalog.types import Outcome
from ckptcore.catalog.watched_roots import RootRow

if TYPE_CHECKING:
    from sqlalchemy import Connection

NEWEST = 200
MOST_WAITING = 100
_WHY = {
    Condition.WRITING: "its files changed lately: it is opened when they are at rest",
    Condition.BROKEN: "its files are at rest, and it is not complete",
    Condition.UNREAD: "it could not be read",
}


@dataclass(frozen=True, slots=True)
class RootCounts:
    """What sweeps saw below a root: the number of places by condition, and the newest step among them."""

    places: dict[str, int]
    newest_step: int | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A place that has no output, or not all.

    standing: writing, broken, unread, ready, converting, failed or announced. since: since when. step: None
    if unknown.
    """

    uri: str
    step: int | None
    standing: str
    why: str
    since: datetime
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class RootStatus:
    """The state of one root.

    Attributes:
        counts: What sweeps saw.
        newest: The newest complete checkpoint.
        converted: The newest one of which every output is made.
        lag: Complete checkpoints that are newer than it; all that were compared, if it is None.
        waiting: What waits, the newest first.
    """

    counts: RootCounts
    newest: SightingRow | None
    converted: SightingRow | None
    lag: int
    waiting: tuple[Waiting, ...]


def counts_of(conn: Connection, roots: Sequence[RootRow]) -> dict[str, RootCounts]:
    """Return what sweeps saw below roots, by name."""
    uris = {root.name: normal_uri(root.uri) for root in roots}
    columns = (Sighting.root, Sighting.state, func.count().label("n"), func.max(Sighting.step).label("step"))
    sightings = select(*columns).where(Sighting.root.in_(set(uris.values())))
    places: dict[str, dict[str, int]] = {}
    steps: dict[str, int] = {}
    for row in conn.execute(sightings.group_by(Sighting.root, Sighting.state)):
        places.setdefault(row.root, {})[str(row.state)] = row.n
        if isinstance(row.step, int):
            steps[row.root] = max(row.step, steps.get(row.root, row.step))
    return {name: RootCounts(places.get(uri, {}), steps.get(uri)) for name, uri in uris.items()}


def status(conn: Connection, root: RootRow) -> RootStatus:
    """Return the state of a root."""
    of_root = select(Sighting.__table__).where(Sighting.root == normal_uri(root.uri))
    finished = of_root.where(Sighting.state == Condition.COMPLETE.value)
    # The newest were seen first last: sweeps see lower steps first. By its step, each row would be read.
    newest = Sighting.id.desc()
    complete = [sighting_row(row) for row in conn.execute(finished.order_by(newest).limit(NEWEST))]
    complete.sort(key=_by_step, reverse=True)
    states = [state.value for state in Condition if state is not Condition.COMPLETE]
    not_complete = of_root.where(Sighting.state.in_(states)).order_by(newest).limit(MOST_WAITING)
    unfinished = [sighting_row(row) for row in conn.execute(not_complete)]
    waiting = [
        Waiting(row.uri, row.step, row.state, _why(row), row.changed_at, row.trouble) for row in unfinished
    ] + _announced(conn, root)
    outputs = _Made(conn, complete, 1 + len(root.also))
    lag, converted = 0, None
    for row in complete:
        lacking = outputs.lacks(row, root)
        if lacking is not None:
            waiting.append(lacking)
        elif converted is None:
            converted = row
        lag += converted is None
    waiting.sort(key=_by_step, reverse=True)
    return RootStatus(
        counts_of(conn, [root])[root.name],
        complete[0] if complete else None,
        converted,
        lag,
        tuple(waiting[:MOST_WAITING]),
    )


def _by_step(row: SightingRow | Waiting) -> tuple[int, str]:
    return (-1 if row.step is None else row.step, row.uri)


def _why(row: SightingRow) -> str:
    first = next(iter(row.findings), None)
    if first is not None:
        return f"{first.code}: {first.message}"
    return next((text for state, text in _WHY.items() if state == row.state), "")


class _Made:
    """What was made of complete checkpoints. outputs: how many each should have."""

    def __init__(self, conn: Connection, rows: Sequence[SightingRow], outputs: int) -> None:
        self._outputs = outputs
        self._claims: dict[str, list[Any]] = {}
        digests = [row.source_digest for row in rows if row.source_digest]
        for claim in conn.execute(
            select(Claim.__table__).where(Claim.source_digest.in_(digests)).order_by(Claim.id)
        ):
            self._claims.setdefault(claim.source_digest, []).append(claim)
        # What the command line converts has no claim.
        succeeded = Conversion.state == Outcome.SUCCEEDED.value
        self._destinations: dict[str, set[str]] = {}
        columns = (Conversion.source_uri, Conversion.destination_uri)
        of_these = Conversion.source_uri.in_([row.uri for row in rows])
        for uri, destination in conn.execute(select(*columns).where(of_these, succeeded)):
            self._destinations.setdefault(uri, set()).add(destination)

    def lacks(self, row: SightingRow, root: RootRow) -> Waiting | None:
        """Return why a complete checkpoint has not all its outputs; None if it has."""
        of_row = self._claims.get(row.source_digest or "", [])
        destinations = {claim.destination_uri for claim in of_row if claim.state == claims.DONE}
        outputs = destinations if of_row else self._destinations.get(row.uri, set())
        if len(outputs) >= self._outputs:
            return None
        last = of_row[-1] if of_row else None
        if last is not None and last.state == claims.FAILED:
            why = f"{last.error_code}: {last.error_message}"
            return _waiting(row.uri, row.step, "failed", why, last.ended_at or last.taken_at)
        if last is not None and last.state == claims.TAKEN:
            why = f"{last.owner.partition(' | ')[0]} converts it"
            return _waiting(row.uri, row.step, "converting", why, last.taken_at)
        part = f"{len(outputs)} of {self._outputs} outputs are made; " if outputs else ""
        next_step = "the next sweep converts it" if root.enabled else "the root is paused"
        return Waiting(row.uri, row.step, "ready", part + next_step, row.changed_at)


def _announced(conn: Connection, root: RootRow) -> list[Waiting]:
    """Return the events about places below a root that are not done."""
    open_events = (Inbox.state != Stage.DONE.value, is_below(Inbox.uri, normal_uri(root.uri)))
    newest = select(Inbox.__table__).where(*open_events).order_by(Inbox.id.desc()).limit(MOST_WAITING)
    return [
        _waiting(
            row.uri,
            row.step,
            "failed" if row.state == Stage.FAILED.value else "announced",
            row.error_message or "its event is processed",
            row.received_at,
        )
        for row in conn.execute(newest)
    ]


def _waiting(uri: Any, step: Any, standing: str, why: Any, since: Any) -> Waiting:
    return sound(Waiting, uri=uri, step=step, standing=standing, why=why, since=since)
