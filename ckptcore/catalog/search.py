"""Find what a text means: a checkpoint by any part of its name, place, alias or step, and a training run.

Only the catalog is searched: no file of this machine is opened, whatever the text names. What a text names
exactly (an id, an alias, a place, a digest) comes first; then what has all its words somewhere, a step that
is meant and what is current first. The words are compared in one pass over the checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import case, or_, select

from ckptcore.catalog import lineage
from ckptcore.catalog.browse import NOT_CURRENT, RunSummary, runs
from ckptcore.catalog.models import Alias, Checkpoint, TrainingRun
from ckptcore.catalog.normalize import storable
from ckptcore.catalog.query import checkpoint_row, checkpoint_rows, part_of, show
from ckptcore.catalog.types import CheckpointDetail, CheckpointRow, FileRow, Origin
from ckptcore.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

MOST = 50  # places of one answer
MOST_RUNS = 20
MOST_TERMS = 4  # the last one is the rest of the text
# As trainers and people write a step: step-20, global_step20, iter_0000020, checkpoint-20, 20.
_STEP = re.compile(r"(?:[a-z_]*(?:step|iter|iteration|checkpoint|ckpt))?[-_=:]?0*([0-9]{1,18})")
_STEP_BY_NAME = re.compile(r"\b(step|iter|iteration|checkpoint)\s+(?=[0-9])")


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A checkpoint that a text finds. file: its file with the digest of the text. why: what matched."""

    row: CheckpointRow
    file: FileRow | None
    why: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a text finds. more: whether there are more places than these."""

    places: tuple[SearchHit, ...] = ()
    runs: tuple[RunSummary, ...] = ()
    more: bool = False


def search(conn: Connection, text: str) -> SearchResult:
    """Return the checkpoints and training runs that a text finds; none for an empty text."""
    text = storable(text.strip())
    if not text:
        return SearchResult()
    places = {place.row.id: place for place in _exact(conn, text)}
    if not (places and lineage.is_digest(text.replace("-", ""))):  # digests and ids are part of no name
        for row in _by_parts(conn, text, MOST + 1):
            places.setdefault(row.id, SearchHit(row, None, "part of a name, place, alias or step"))
    named = runs(conn, part=text, limit=MOST_RUNS)
    return SearchResult(tuple(places.values())[:MOST], named.rows, len(places) > MOST)


def _exact(conn: Connection, text: str) -> list[SearchHit]:
    """Return what a text names as a whole."""
    hits: list[SearchHit] = []

    def add(look: Callable[[Any, str], Sequence[Origin]], why: Callable[[Origin], str]) -> None:
        try:
            origins = look(conn, text)
        except UsageError:  # no id, alias or place: the words are looked for
            return
        hits.extend(SearchHit(origin.checkpoint, origin.file, why(origin)) for origin in origins[:MOST])

    if lineage.is_digest(text):
        add(lineage.with_fingerprint, lambda _: "fingerprint")
        add(lineage.which, lambda origin: "digest of a file" if origin.file else "place")
    elif "/" in text:
        add(lineage.which, lambda origin: "file" if origin.file else "place")
    add(_by_reference, lambda _: "id, alias or place")
    # Of several reasons for one checkpoint the first one stays: a dict keeps the last that it is given.
    return list({place.row.id: place for place in reversed(hits)}.values())[::-1]


def _by_reference(conn: Connection, text: str) -> list[Origin]:
    detail = show(conn, text, tensors=False)
    return [Origin(detail.checkpoint, None, None, ())] if isinstance(detail, CheckpointDetail) else []


def _by_parts(conn: Connection, text: str, limit: int) -> tuple[CheckpointRow, ...]:
    """Return checkpoints that have every word of a text, in one pass over them."""
    terms = _STEP_BY_NAME.sub(r"\1-", text.lower()).split(maxsplit=MOST_TERMS - 1)
    meant = [step for step in map(_step, terms) if step is not None]
    later: ColumnElement[int] = case((Checkpoint.state.in_(NOT_CURRENT), 1), else_=0)
    if meant:
        later += case((Checkpoint.step.in_(meant), 0), else_=2)
    chosen = (
        select(Checkpoint.id, later.label("later"))
        .where(*(_has(conn, term) for term in terms))
        .order_by(later, Checkpoint.id.desc())
        .limit(limit)
        .subquery()
    )
    rows = checkpoint_rows().join(chosen, chosen.c.id == Checkpoint.id)
    ordered = rows.order_by(chosen.c.later, Checkpoint.id.desc())
    return tuple(checkpoint_row(row) for row in conn.execute(ordered))


def _has(conn: Connection, word: str) -> ColumnElement[bool]:
    """Return the condition that a word is a part of a checkpoint's place, run or alias, or is its step."""
    runs_with = select(TrainingRun.id).where(part_of(conn, TrainingRun.name, word))
    aliases_with = select(Alias.checkpoint_id).where(part_of(conn, Alias.name, word))
    conditions = [
        part_of(conn, Checkpoint.uri, word),
        Checkpoint.run_id.in_(runs_with),
        Checkpoint.id.in_(aliases_with),
    ]
    step = _step(word)
    if step is not None:
        conditions.append(Checkpoint.step == step)
    return or_(*conditions)


def _step(word: str) -> int | None:
    named = _STEP.fullmatch(word)
    return int(named[1]) if named else None
