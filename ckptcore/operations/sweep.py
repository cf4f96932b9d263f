"""Convert the checkpoints below the watched roots that are complete and not yet converted.

1. `look_through` lists a root and determines the state of each of its checkpoints; nothing is converted.
2. `work` converts one that is ready, under a claim, so that no other process does.

`sweep` does both for every root. States are recorded: a place that has not changed is not opened again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import claims, queues, sightings
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.claims import DONE, FAILED, ClaimRow
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.sightings import Condition, SightingRow
from ckptcore.catalog.watched_roots import RootRow
from ckptcore.conversion.pipeline import tidy
from ckptcore.conversion.registration import facts
from ckptcore.errors import Busy, CkptError, Finding
from ckptcore.operations.claims import claimed, key_of, made_from, owner, rewritten
from ckptcore.operations.discover import Candidate, discover
from ckptcore.operations.export_target import ExportTarget, TemplateFields, colliding, targets_of
from ckptcore.operations.readiness import SETTLE_S, Look, look
from ckptcore.planning.request import Request
from ckptcore.utils.dataclass import dataclass

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_log = logging.getLogger("ckptcore")
_PATIENCE = (timedelta(minutes=5), timedelta(days=1))  # before a failure is retried: the first, and the most


class Standing(StrEnum):
    """The state of a checkpoint, or of its conversion."""

    READY = "ready"  # complete and not yet converted
    MADE = "made"  # converted by this sweep
    CONVERTED = "converted"  # had been converted before
    CLAIMED = "claimed"  # another process is converting it
    OUTDATED = "outdated"  # converted, and rewritten since
    FAILED = "failed"  # the conversion failed; retried later
    WRITING = "writing"  # not yet complete
    BROKEN = "broken"  # no longer changes, and is not complete
    UNREAD = "unread"  # could not be read
    REFUSED = "refused"  # the target cannot be used for it


_WRONG = {Standing.FAILED, Standing.UNREAD, Standing.REFUSED, Standing.OUTDATED}


@dataclass(frozen=True)
class SweepItem:
    """One checkpoint. why: the reason of its standing. request, digests: only of a complete one."""

    root: str
    source: str
    step: int | None
    standing: Standing
    why: str = ""
    destination: str = ""
    findings: tuple[Finding, ...] = ()
    request: Request | None = field(default=None, repr=False)
    source_digest: str = ""
    manifest_digest: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "root": self.root,
            "source": self.source,
            "step": self.step,
            "standing": self.standing.value,
            "why": self.why,
            "destination": self.destination,
            "findings": [f.as_dict() for f in self.findings],
        }


@dataclass(frozen=True)
class Swept:
    """The result of a sweep.

    Attributes:
        items: Every checkpoint, by root, the lowest step first.
        dry_run: Whether nothing was converted.
        strict: Whether checkpoints that are broken for good count as an error.
    """

    items: tuple[SweepItem, ...]
    dry_run: bool = False
    strict: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """Standing -> number of checkpoints."""
        return dict(Counter(i.standing.value for i in self.items))

    @property
    def exit_code(self) -> int:
        """1 if a conversion failed or cannot be made; with `strict`, also if a checkpoint is broken; else 0.

        A sweep runs by a schedule: what is still being written is converted by a later one, and a step that a
        killed job left broken stays broken.
        """
        wrong = _WRONG | ({Standing.BROKEN} if self.strict else set())
        return int(any(i.standing in wrong for i in self.items))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"dry_run": self.dry_run, "counts": self.counts, "items": [i.as_dict() for i in self.items]}


Convert = Callable[[Request], Any]
OnItem = Callable[[SweepItem], None]


def sweep(
    catalog: Catalog,
    convert: Convert,
    names: Sequence[str] = (),
    *,
    dry_run: bool = False,
    settle_s: float = SETTLE_S,
    retry_failed: bool = False,
    who: str | None = None,
    on_item: OnItem | None = None,
    strict: bool = False,
) -> Swept:
    """Search the watched roots, and convert the checkpoints that are ready.

    Args:
        catalog: The catalog.
        convert: Carries out one request; a `CkptError` does not stop the sweep.
        names: Of roots, also paused ones; none means all that are not paused.
        dry_run: Convert and record nothing.
        settle_s: Seconds without a change before a checkpoint is opened.
        retry_failed: Include checkpoints that failed recently or were broken.
        who: The worker; it takes its own claims again at once.
        on_item: Called for each checkpoint.
        strict: See `Swept`.
    """
    found: list[SweepItem] = []
    who = who or owner()
    for root in watched(catalog, names):
        here = []
        for item in look_through(
            catalog, root, dry_run=dry_run, settle_s=settle_s, retry_failed=retry_failed
        ):
            done = (
                item if dry_run or item.standing is not Standing.READY else work(catalog, item, convert, who)
            )
            here.append(done)
            if on_item is not None:
                on_item(done)
        found += here
        if not dry_run:
            note_swept(catalog, root, here)
    if not dry_run:
        forget_events(catalog)
    return Swept(tuple(found), dry_run, strict)


def watched(catalog: Catalog, names: Sequence[str] = ()) -> tuple[RootRow, ...]:
    """Return the roots of these names, or all that are not paused. Raise `UsageError` for unknown names."""
    with catalog.reading() as conn:
        return tuple(roots.get(conn, n) for n in names) if names else roots.every(conn, enabled=True)


def forget_events(catalog: Catalog) -> None:
    """Delete events and messages that ended longer ago than `queues.KEEP`."""
    with catalog.queueing() as conn:
        gone = queues.forget(conn, datetime.now(UTC))
    if gone:
        _log.info("deleted %d events and messages that ended %d days ago", gone, queues.KEEP.days)


def note_swept(catalog: Catalog, root: RootRow, items: Sequence[SweepItem]) -> None:
    """Record that a root was swept, and the number of checkpoints by standing."""
    counts = Counter(i.standing.value for i in items)
    with catalog.writing() as conn:
        if any(r.name == root.name for r in roots.every(conn)):  # it may have been removed meanwhile
            note = ", ".join(f"{n} {s}" for s, n in sorted(counts.items())) or "nothing there"
            roots.swept(conn, datetime.now(UTC), root.name, note)


def look_through(
    catalog: Catalog,
    root: RootRow,
    *,
    dry_run: bool = False,
    settle_s: float = SETTLE_S,
    retry_failed: bool = False,
) -> tuple[SweepItem, ...]:
    """Determine the standing of every checkpoint below a root, and record it unless this is a dry run.

    The arguments are those of `sweep`.
    """
    now = datetime.now(UTC)
    try:
        targets = targets_of(root)
        with catalog.reading() as conn:
            before, outputs = sightings.below(conn, root.uri), sightings.outputs_below(conn, root.uri)
        candidates = discover(root.uri, include=root.include, skip=outputs)
    except CkptError as error:
        standing = Standing.UNREAD if error.transient or error.exit_code != 2 else Standing.REFUSED
        return (SweepItem(root.name, root.uri, None, standing, error.message),)
    planned = [(c, *_planned(target, c)) for c in candidates for target in targets]
    destinations = {normal_uri(r.destination) for _, r, _ in planned if r is not None}
    planned = [p for p in planned if normal_uri(p[0].uri) not in destinations]
    doubled = colliding(r.destination for _, r, _ in planned if r is not None)
    items = []
    looked: dict[tuple[str, bool], Look] = {}
    for candidate, request, why in planned:
        if request is not None and request.destination in doubled:
            why, request = f"two checkpoints would both go to {request.destination}", None
        uri = normal_uri(candidate.uri)
        recover = request is not None and request.recover
        if (uri, recover) not in looked:  # once, whatever is made of it
            looked[uri, recover] = look(
                uri,
                candidate.files,
                before.get(uri),
                now,
                settle_s=settle_s,
                recover=recover,
                retry_failed=retry_failed,
            )
            if not dry_run:
                _note(catalog, root, candidate, looked[uri, recover], now)
        seen = looked[uri, recover]
        item = _item(root, candidate, request, why, seen)
        items.append(
            _compared_with_target(catalog, item, request, now, retry_failed)
            if request is not None and item.standing is Standing.READY
            else item
        )
    return tuple(items)


def work(catalog: Catalog, item: SweepItem, convert: Convert, who: str, *, redo: bool = False) -> SweepItem:
    """Convert a checkpoint that is ready, unless another process does or did.

    Args:
        catalog: The catalog.
        item: A checkpoint of `look_through` that is ready.
        convert: Carries out one request.
        who: The worker; it takes its own claim again at once.
        redo: Convert again what is done.

    Returns:
        The checkpoint with its new standing.
    """
    assert item.request is not None  # it is ready
    request = item.request
    try:
        with claimed(catalog, key_of(request, item.source_digest), item.source, who, redo=redo) as claim:
            if not claim.mine:
                return _with_claim(item, claim)
            if not _outdated(catalog, item) and made_from(
                catalog, request.destination, item.source, item.manifest_digest
            ):
                tidy(request.destination, catalog)
                return replace(item, standing=Standing.CONVERTED, why="made from this checkpoint before")
            convert(request)
    except CkptError as error:
        standing = Standing.CLAIMED if isinstance(error, Busy) else Standing.FAILED
        return replace(item, standing=standing, why=f"{error.code}: {error.message}")
    return replace(item, standing=Standing.MADE, why="")


def _planned(target: ExportTarget, candidate: Candidate) -> tuple[Request | None, str]:
    place = TemplateFields(candidate.root, candidate.run, candidate.step, candidate.name, candidate.path)
    try:
        return target.request(candidate.uri, place), ""
    except CkptError as error:
        return None, error.message


def _item(root: RootRow, candidate: Candidate, request: Request | None, why: str, seen: Look) -> SweepItem:
    """Return a checkpoint with the standing of its state. why: the reason if there is no request for it."""
    item = SweepItem(
        root.name,
        normal_uri(candidate.uri),
        candidate.step,
        Standing.READY,
        "",
        request.destination if request else "",
        seen.findings,
        request,
        seen.source_digest or "",
        seen.manifest_digest or "",
    )
    if seen.state is not Condition.COMPLETE:
        return replace(item, standing=Standing(seen.state.value), why=seen.message)
    return item if request is not None else replace(item, standing=Standing.REFUSED, why=why)


def _compared_with_target(
    catalog: Catalog, item: SweepItem, request: Request, now: datetime, retry_failed: bool
) -> SweepItem:
    """Return a complete checkpoint with the standing of its conversion."""
    with catalog.reading() as conn:
        claim = claims.current(conn, key_of(request, item.source_digest))
    if claim is not None:
        if claim.state == DONE or (claim.state != FAILED and claim.due_at > now):
            return _with_claim(item, claim)
        if claim.state == FAILED and not retry_failed and (due := _due(claim)) > now:
            why = f"{claim.error_code}: {claim.error}; retried after {due:%Y-%m-%d %H:%M} UTC"
            return replace(item, standing=Standing.FAILED, why=why)
        return item
    if _outdated(catalog, item) and not request.overwrite:
        return replace(
            item,
            standing=Standing.OUTDATED,
            why=f"{request.destination} was made from an earlier checkpoint here; remove it, or set "
            '"overwrite": true in the target',
        )
    if not _outdated(catalog, item) and made_from(
        catalog, request.destination, item.source, item.manifest_digest
    ):
        return replace(item, standing=Standing.CONVERTED, why="made from this checkpoint before")
    return item


def _outdated(catalog: Catalog, item: SweepItem) -> bool:
    assert item.request is not None
    return rewritten(catalog, key_of(item.request, item.source_digest), item.source)


def _with_claim(item: SweepItem, claim: ClaimRow) -> SweepItem:
    """Return a checkpoint with the standing of its claim."""
    if claim.state == DONE:
        when = claim.ended_at or claim.taken_at
        return replace(item, standing=Standing.CONVERTED, why=f"made on {when:%Y-%m-%d %H:%M} UTC")
    return replace(item, standing=Standing.CLAIMED, why=f"{claim.owner} is converting it")


def _due(claim: ClaimRow) -> datetime:
    first, most = _PATIENCE
    return (claim.ended_at or claim.taken_at) + min(first * (1 << min(claim.attempts - 1, 20)), most)


def _note(catalog: Catalog, root: RootRow, candidate: Candidate, seen: Look, now: datetime) -> None:
    uri = normal_uri(candidate.uri)
    row = SightingRow(
        uri,
        root.uri,
        candidate.step,
        seen.state.value,
        seen.stamp,
        seen.source_digest,
        seen.manifest_digest,
        seen.findings,
        first_seen_at=now,
        last_seen_at=now,
        changed_at=seen.changed_at,
    )
    with catalog.writing() as conn:
        sightings.note(conn, row)
    if seen.manifest is not None and seen.state is Condition.BROKEN:
        # Recorded like the findings of conversions, where users search for damaged checkpoints.
        catalog.record_validation(facts(seen.manifest, uri), seen.findings, level="coverage")
