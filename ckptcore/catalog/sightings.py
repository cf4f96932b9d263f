"""Record what sweeps saw at each URI: its files' stamp, its condition, and when it changed.

Every function runs inside the given transaction. Functions that change something need a writer's transaction.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, or_, select, union, update

from ckptcore.catalog.models import Checkpoint, Conversion, Sighting
from ckptcore.catalog.normalize import clean_json, normal_uri, same_places
from ckptcore.catalog.row_values import parsed, read_row, sound_finding
from ckptcore.catalog.types import Kind
from ckptcore.errors import Finding

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection


class Condition(StrEnum):
    """How a sweep classified a URI.

    complete: nothing of the checkpoint is missing, and its files are at rest. writing: files changed
    recently. broken: its files are at rest, but it is not complete. unread: it could not be read.
    """

    COMPLETE = "complete"
    WRITING = "writing"
    BROKEN = "broken"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class SightingRow:
    """One URI. stamp: of its files and of the rules that classified them.

    source_digest, manifest_digest: of the complete checkpoint that was there.
    trouble: what is odd in the row.
    """

    uri: str
    root: str
    step: int | None
    state: str
    stamp: str
    source_digest: str | None
    manifest_digest: str | None
    findings: tuple[Finding, ...]
    first_seen_at: datetime
    last_seen_at: datetime
    changed_at: datetime
    trouble: str = ""


def note(conn: Connection, sighting: SightingRow) -> None:
    """Record a sighting. It replaces the last one of its URI, except for the time of the first."""
    columns = asdict(sighting)
    del columns["trouble"]
    uri, first_seen_at = normal_uri(columns.pop("uri")), columns.pop("first_seen_at")
    columns |= {"root": normal_uri(sighting.root), "findings": clean_json(columns["findings"])}
    if conn.execute(update(Sighting).where(Sighting.uri == uri).values(columns)).rowcount == 0:
        conn.execute(insert(Sighting).values(uri=uri, first_seen_at=first_seen_at, **columns))


def below(conn: Connection, root: str) -> dict[str, SightingRow]:
    """Return the sightings below a root, by URI."""
    query = select(Sighting.__table__).where(is_below(Sighting.uri, normal_uri(root)))
    # An odd row counts as none: what is there is looked at, and recorded anew.
    return {r.uri: sighting for r in conn.execute(query) if not (sighting := sighting_row(r)).trouble}


_IS_ELSEWHERE = Conversion.destination_uri != Conversion.source_uri


def outputs_below(conn: Connection, root: str) -> frozenset[str]:
    """Return the URIs below a root where conversions write, or have written, in the root's spelling.

    A step that is thinned, which is its own source, stays a source.
    """
    outputs = set[str]()
    top, *spellings = same_places(root)
    for spelling in (top, *spellings):
        destinations = select(Conversion.destination_uri).where(
            is_below(Conversion.destination_uri, spelling), _IS_ELSEWHERE
        )
        derived = select(Checkpoint.uri).where(
            is_below(Checkpoint.uri, spelling), Checkpoint.kind == Kind.DERIVED.value
        )
        uris = (*conn.execute(destinations).scalars(), *conn.execute(derived).scalars())
        outputs.update(f"{top}{uri.removeprefix(spelling)}" for uri in uris)
    return frozenset(outputs)


def outputs(conn: Connection) -> tuple[str, ...]:
    """Return the URIs where conversions write, or have written."""
    derived = select(Checkpoint.uri).where(Checkpoint.kind == Kind.DERIVED.value)
    destinations = select(Conversion.destination_uri).where(_IS_ELSEWHERE)
    return tuple(conn.execute(union(destinations, derived)).scalars())


def is_below(column: Any, root: str) -> ColumnElement[bool]:
    """Return the condition that a URI in a column is a root, or below it."""
    above = root.rstrip("/") + "/"
    return or_(column == root, column.startswith(above, autoescape=True))


def sighting_row(row: Any) -> SightingRow:
    """Convert a row of ``select(Sighting.__table__)``."""
    sighting = read_row(SightingRow, row, findings=_findings(parsed(row.findings)))
    is_recognised = sighting.state in list(Condition)
    return sighting if is_recognised else replace(sighting, trouble=f"state holds {row.state!r}")


def _findings(forms: Any) -> Any:
    """Return findings by their JSON forms; the forms if they are none, which `sound` reports."""
    try:
        return tuple(sound_finding(**form) for form in forms)
    except TypeError:
        return forms
