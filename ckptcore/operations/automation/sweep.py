"""Convert the checkpoints below the watched roots that are complete and not yet converted.

1. `look_through` lists a root and determines the state of each of its checkpoints; nothing is converted.
2. `work` converts one that is ready, under a claim, so that no other process does.
3. `thin_swept` thins what is converted, where the root's retention asks for it.

`sweep` does all for every root. States are recorded: a place that has not changed is not opened again. On an
object store, what is complete and needs no conversion is listed again once a day only.

Small checkpoints are converted in batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from ckptcore.catalog import claims, queues, set_aside, sightings
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.claims import DONE, FAILED, ClaimRow
from ckptcore.catalog.database import clock
from ckptcore.catalog.normalize import normal_uri, storable
from ckptcore.catalog.sightings import Condition, SightingRow
from ckptcore.catalog.watched_roots import RootRow
from ckptcore.conversion.batch import MOST
from ckptcore.conversion.pipeline import remove_leftover_staging
from ckptcore.conversion.registration import facts
from ckptcore.errors import Busy, CatalogUnavailable, CkptError, Interrupted
from ckptcore.operations.automation.sweep_items import SweepItem, SweepState, Swept
from ckptcore.operations.automation.sweep_thin import thin_swept
from ckptcore.operations.claims import claimed, claimed_each, key_of, made_from, owner, rewritten
from ckptcore.operations.discover import Candidate, discover
from ckptcore.operations.export_target import (
    ExportTarget,
    TemplateFields,
    colliding,
    sources_among,
    targets_of,
)
from ckptcore.operations.options import SweepOptions
from ckptcore.operations.readiness import SETTLE_S, Readiness, look, recalled
from ckptcore.planning.request import Request, Settings
from ckptcore.store import local_path
from ckptcore.store.listing import survey
from ckptcore.store.place import Relation, Spellings, perhaps_within
from ckptcore.utils.average_url import is_average
from ckptcore.utils.isolation import error_of
from ckptcore.utils.units import parse_duration

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

SMALL = 256 << 20  # bytes of a checkpoint; a larger one keeps disks and processors busy alone
_log = logging.getLogger("ckptcore")
_REMEMBERED = timedelta(days=1)  # a complete checkpoint on an object store is listed again after that
_NOTED = 64  # checkpoints whose states are recorded in one transaction
_PATIENCE = (timedelta(minutes=5), timedelta(days=1))  # before a failure is retried: the first, and the most

Convert = Callable[[Request], Any]
Wanted = Sequence[tuple[Request | None, str]]  # a request for each target, or why there is none
_BACK: tuple[None, str] = (None, "the target leads back to the sources: it would write over one of them")
ConvertEach = Callable[[Sequence[Request]], Sequence[Any]]
OnItem = Callable[[SweepItem], None]


_READING = Settings()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """What a sweep looks at, and how strict it is.

    Attributes:
        dry_run: Convert and record nothing.
        settle_s: Seconds without a change before a checkpoint is opened.
        retry_failed: Include checkpoints that failed recently or were broken.
        relist: List every checkpoint on object stores, also those that are complete and converted.
        strict: See `Swept`.
        reading: Memory and threads for the proof of what is thinned.
    """

    dry_run: bool = False
    settle_s: float = SETTLE_S
    retry_failed: bool = False
    relist: bool = False
    strict: bool = False
    reading: Settings = _READING

    @classmethod
    def of(cls, options: SweepOptions, reading: Settings = _READING) -> SweepSettings:
        """Return the settings that the options of a command or a flow ask for."""
        return cls(
            dry_run=options.dry_run,
            settle_s=parse_duration(options.min_age),
            retry_failed=options.retry_failed,
            relist=options.relist,
            strict=options.strict,
            reading=reading,
        )


DEFAULTS = SweepSettings()


def sweep(
    catalog: Catalog,
    convert: Convert,
    names: Sequence[str] = (),
    settings: SweepSettings = DEFAULTS,
    *,
    who: str | None = None,
    on_item: OnItem | None = None,
    convert_each: ConvertEach | None = None,
) -> Swept:
    """Search the watched roots, and convert the checkpoints that are ready.

    Args:
        catalog: The catalog.
        convert: Carries out one request; an error of it does not stop the sweep.
        names: Of roots, also paused ones; none means all that are not paused.
        settings: What is looked at.
        who: The worker; it takes its own claims again at once.
        on_item: Called for each checkpoint.
        convert_each: See `convert_ready`.
    """
    swept_items: list[SweepItem] = []
    who = who or owner()

    def pass_over(root: RootRow) -> Iterator[SweepItem]:
        items: Sequence[SweepItem] = look_through(catalog, root, settings)
        if settings.dry_run:
            for item in items:
                (on_item or _ignore)(item)
        else:
            items = convert_ready(catalog, items, convert, who, on_item=on_item, convert_each=convert_each)
        yield from items
        # After the conversions: what a step was converted to is proven before the step loses anything.
        thinned = thin_swept(
            catalog,
            root,
            items,
            settings.reading,
            settle_s=settings.settle_s,
            dry_run=settings.dry_run,
            on_item=on_item,
        )
        changed = [*of_root(root, thinned, on_item)]
        yield from changed
        if not settings.dry_run:
            note_swept(catalog, root, [*items, *changed])

    for root in watched(catalog, names):
        swept_items += of_root(root, pass_over(root), on_item)
    if not settings.dry_run:
        end_interrupted(catalog)
        forget_events(catalog)
    return Swept(tuple(swept_items), settings.dry_run, settings.strict)


def watched(catalog: Catalog, names: Sequence[str] = ()) -> tuple[RootRow, ...]:
    """Return the roots of these names, or all that are not paused. Raise `UsageError` for unknown names."""
    with catalog.reading() as conn:
        return tuple(roots.get(conn, n) for n in names) if names else roots.every(conn, enabled=True)


def of_root(root: RootRow, items: Iterable[SweepItem], on_item: OnItem | None = None) -> Iterator[SweepItem]:
    """Yield the checkpoints of a root; one more item is the root itself, if its part of the sweep ends early.

    Args:
        root: The root.
        items: Its checkpoints. What looks through it, converts and records them may raise any `Exception`.
        on_item: Called for the item of the root.
    """
    try:
        yield from items
    except CatalogUnavailable:
        raise  # as it would be for all of them
    except Exception as error:
        item = _root_in_trouble(root, error)
        (on_item or _ignore)(item)
        yield item


def _root_in_trouble(root: RootRow, error: Exception) -> SweepItem:
    ended = error_of(error)
    # Exit code 2 is a mistake of the root's own settings: the next sweep would refuse it in the same way.
    standing = SweepState.UNREAD if ended.transient or ended.exit_code != 2 else SweepState.REFUSED
    return SweepItem(root.name, root.uri, None, standing, ended.message)


def end_interrupted(catalog: Catalog) -> None:
    """End the rows of conversions whose process was killed on this machine."""
    ended = catalog.end_interrupted()
    if ended:
        _log.info("%d conversions ended without a word; their process is gone", len(ended))


def forget_events(catalog: Catalog) -> None:
    """Delete events and messages that ended longer ago than `queues.KEEP`."""
    with catalog.queueing() as conn:
        gone = queues.forget(conn, clock(conn))
    if gone:
        _log.info("deleted %d events and messages that ended %d days ago", gone, queues.KEEP.days)


def note_swept(catalog: Catalog, root: RootRow, items: Sequence[SweepItem]) -> None:
    """Record that a root was swept, and what a sweep of it alone would answer."""
    counts = Swept(tuple(items)).counts
    with catalog.writing() as conn:
        if any(r.name == root.name for r in roots.every(conn)):  # it may have been removed meanwhile
            note = ", ".join(f"{n} {s}" for s, n in sorted(counts.items())) or "nothing there"
            roots.swept(conn, clock(conn), root.name, note)


def look_through(
    catalog: Catalog, root: RootRow, settings: SweepSettings = DEFAULTS
) -> tuple[SweepItem, ...]:
    """Determine the standing of every checkpoint below a root, and record it unless this is a dry run."""
    now = catalog.now()
    try:
        targets = targets_of(root)
        with catalog.reading() as conn:
            # Outputs may be below the root as well, and are no sources.
            before, outputs = sightings.below(conn, root.uri), sightings.outputs_below(conn, root.uri)
            # Objects cannot be moved: what is retired stays in sight until it is purged.
            outputs |= {row.uri for row in set_aside.every(conn) if local_path(row.uri) is None}
            # Of all recorded outputs, the few that may be below this root under another name.
            written = perhaps_within([root.uri], sightings.outputs(conn)) if local_path(root.uri) else ()
        remembered = () if settings.relist else _remembered(before, now)
        candidates = discover(root.uri, include=root.include, skip=outputs, remembered=remembered)
    except Exception as error:
        return (_root_in_trouble(root, error),)
    # An output that was recorded under another name of its place, such as one behind a mount.
    elsewhere = Spellings(output_uri for output_uri in written if output_uri not in outputs)
    candidates = tuple(c for c in candidates if Relation.SAME not in elsewhere.of(c.uri).values())
    steps: dict[str, dict[int, str]] = {}
    for candidate in candidates:
        if candidate.step is not None:
            steps.setdefault(candidate.run, {})[candidate.step] = candidate.uri
    planned = [(c, _requests(targets, c, steps.get(c.run, {}))) for c in candidates]
    # The folders of all checkpoints are compared at once: a destination that is one of them leads back.
    places = [["" if r is None else r.destination for r, _ in requests] for _, requests in planned]
    sources, back = sources_among([c.uri for c, _ in planned], places)
    planned = [
        (planned[n][0], [_BACK if (n, k) in back else request for k, request in enumerate(planned[n][1])])
        for n in sources
    ]
    doubled = colliding(r.destination for _, requests in planned for r, _ in requests if r is not None)
    looking = _LookThrough(catalog, root, now, settings)
    items: list[SweepItem] = []
    # SQLite flushes its log once, and not at the end of each transaction.
    with catalog.kept_open():
        for candidate, requests in planned:
            # Both are refused: which one would win depends on the order of the sweep.
            apart = [
                (None, f"two checkpoints would both go to {request.destination}")
                if request is not None and request.destination in doubled
                else (request, why)
                for request, why in requests
            ]
            try:
                items += looking.items(candidate, apart, before.get(normal_uri(candidate.uri)))
            except CatalogUnavailable:
                raise  # as it would be for all of them
            except Exception as error:
                items.append(looking.unread(candidate.uri, candidate.step, error_of(error)))
        looking.record()
    return tuple(_with_failures(items, looking.failures))


def convert_ready(
    catalog: Catalog,
    items: Sequence[SweepItem],
    convert: Convert,
    who: str,
    *,
    on_item: OnItem | None = None,
    convert_each: ConvertEach | None = None,
) -> list[SweepItem]:
    """Convert those of the checkpoints of a root that are ready, small ones in batches.

    Args:
        catalog: The catalog.
        items: The checkpoints of `look_through`.
        convert: Carries out one request; an error of it does not stop the others.
        who: The worker; it takes its own claims again at once.
        on_item: Called for each checkpoint, in the order of ``items``.
        convert_each: Carries out the requests of a batch, and returns for each a result or a `CkptError`;
            None to convert all checkpoints one by one.

    Returns:
        The checkpoints with their new standing, in the same order.
    """
    ready = [n for n, item in enumerate(items) if item.standing is SweepState.READY]
    by_position = {n: items[n] for n in set(range(len(items))) - set(ready)}
    reported = 0
    for batch in batches(items, ready) if convert_each is not None else ([n] for n in ready):
        group = [items[n] for n in batch]
        if len(group) == 1 or convert_each is None:
            converted = [work(catalog, item, convert, who) for item in group]
        else:
            converted = work_each(catalog, group, convert_each, who)
        by_position |= zip(batch, converted, strict=True)
        while reported in by_position:
            (on_item or _ignore)(by_position[reported])
            reported += 1
    for n in range(reported, len(items)):
        (on_item or _ignore)(by_position[n])
    return [by_position[n] for n in range(len(items))]


@dataclass(frozen=True)
class _LookThrough:
    """One pass over a root.

    unrecorded: states to note. failures: URI -> why its state could not be noted. The others: arguments of
    `look_through`.
    """

    catalog: Catalog
    root: RootRow
    now: datetime
    settings: SweepSettings
    unrecorded: list[SightingRow] = field(default_factory=list)
    failures: dict[str, CkptError] = field(default_factory=dict)

    def items(self, candidate: Candidate, requests: Wanted, before: SightingRow | None) -> list[SweepItem]:
        """Return the standings of a candidate, one for each wanted request."""
        if storable(candidate.uri) != candidate.uri:
            uri, why = (storable(candidate.uri), "its name is not UTF-8, so no catalog names it: rename it")
            return [SweepItem(self.root.name, uri, candidate.step, SweepState.REFUSED, why)] * len(requests)
        recovering = list(dict.fromkeys(_recovers(request) for request, _ in requests))
        if candidate.remembered:
            recalled_looks = {
                r: recalled_look for r in recovering if (recalled_look := recalled(before, r)) is not None
            }
            if len(recalled_looks) == len(recovering):
                swept_items = self._compared(candidate, requests, recalled_looks)
                if all(item.standing is not SweepState.READY for item in swept_items):
                    return swept_items
            files = survey(candidate.uri)
            if not files:
                return []  # removed meanwhile
            candidate = replace(candidate, files=files, remembered=False)
        # Each once, whatever is made of it.
        looks = {recover: self._looked(candidate, before, recover) for recover in recovering}
        return self._compared(candidate, requests, looks)

    def _compared(
        self, candidate: Candidate, requests: Wanted, looks: Mapping[bool, Readiness]
    ) -> list[SweepItem]:
        swept_items = []
        for request, why in requests:
            item = _item(self.root, candidate, request, why, looks[_recovers(request)])
            if request is not None and item.standing is SweepState.READY:
                # Only what is ready is compared with its target: any other state says why nothing is done.
                item = _compared_with_target(
                    self.catalog, item, request, self.now, self.settings.retry_failed
                )
            swept_items.append(item)
        return swept_items

    def _looked(self, candidate: Candidate, before: SightingRow | None, recover: bool) -> Readiness:
        readiness = look(
            normal_uri(candidate.uri),
            candidate.files,
            before,
            self.now,
            settle_s=self.settings.settle_s,
            recover=recover,
            retry_failed=self.settings.retry_failed,
        )
        if not self.settings.dry_run:
            # In memory until there are some: a transaction for each of
            # thousands would wait for the disk each time.
            self.unrecorded.append(_sighting(self.root, candidate, readiness, self.now))
            if readiness.manifest is not None and readiness.state is Condition.BROKEN:
                # Recorded like the findings of conversions, where users search for damaged checkpoints.
                broken = facts(readiness.manifest, normal_uri(candidate.uri))
                self.catalog.record_validation(broken, readiness.findings, level="coverage")
            if len(self.unrecorded) >= _NOTED:
                self.record()
        return replace(readiness, manifest=None)  # thousands of them need not be kept

    def record(self) -> None:
        """Record the states of checkpoints in one transaction, or where it fails each in one of its own."""
        rows = [*self.unrecorded]
        self.unrecorded.clear()
        try:
            if rows:
                with self.catalog.writing() as conn:
                    for row in rows:
                        sightings.note(conn, row)
        except CatalogUnavailable:
            raise
        except Exception as error:
            # One row that cannot be stored must not keep the others from being recorded.
            if len(rows) == 1:
                self.failures[rows[0].uri] = error_of(error)
            for row in rows if len(rows) > 1 else ():
                self.unrecorded.append(row)
                self.record()

    def unread(self, uri: str, step: int | None, error: CkptError) -> SweepItem:
        """Return the item of a checkpoint that could not be read."""
        return SweepItem(self.root.name, normal_uri(uri), step, SweepState.UNREAD, error.message)


def _remembered(before: Mapping[str, SightingRow], now: datetime) -> list[str]:
    """Return the URIs that were listed lately and were complete."""
    return [
        uri
        for uri, row in before.items()
        if row.state == Condition.COMPLETE and now - row.last_seen_at < _REMEMBERED
    ]


def _recovers(request: Request | None) -> bool:
    return request is not None and request.recover


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
            if _made_before(catalog, item):
                return _converted(item)
            convert(request)
    except Exception as error:
        return _failed(item, error_of(error))
    return replace(item, standing=SweepState.MADE, why="")


def work_each(
    catalog: Catalog, items: Sequence[SweepItem], convert_each: ConvertEach, who: str
) -> list[SweepItem]:
    """Convert several checkpoints that are ready, unless other processes do or did; see `work`.

    Raises:
        Interrupted: The user stopped it. What was converted before is recorded.
    """
    keys_and_sources = [(key_of(_request(item), item.source_digest), item.source) for item in items]
    by_position = dict(enumerate(items))
    stop: Interrupted | None = None
    try:
        # SQLite flushes its log once, when the batch ends, and not in each transaction.
        with catalog.kept_open(), claimed_each(catalog, keys_and_sources, who) as taken:
            todo = []
            for n, (item, claim) in enumerate(zip(items, taken.rows, strict=True)):
                if not claim.mine:
                    by_position[n] = _with_claim(item, claim)
                    continue
                try:
                    if _made_before(catalog, item):
                        by_position[n] = _converted(item)
                    else:
                        todo.append(n)
                except Exception as error:
                    ended = error_of(error)
                    taken.failures[n], by_position[n] = ended, _failed(item, ended)
            results = convert_each([_request(items[n]) for n in todo]) if todo else ()
            for n, result in zip(todo, results, strict=True):
                if isinstance(result, CkptError):
                    taken.failures[n], by_position[n] = result, _failed(items[n], result)
                    stop = result if isinstance(result, Interrupted) else stop
                else:
                    by_position[n] = replace(items[n], standing=SweepState.MADE, why="")
    except Exception as error:
        ended = error_of(error)
        any_made = any(item.standing is SweepState.MADE for item in by_position.values())
        # Nothing was made, so each can be tried alone without doing anything twice.
        if len(items) > 1 and not any_made and not ended.transient:
            # One of them may be at fault, such as by a name that the catalog cannot store. What was published
            # is registered now.
            return [retried for item in items for retried in work_each(catalog, [item], convert_each, who)]
        open_ends = (SweepState.READY, SweepState.MADE)  # without a claim that is done, nothing is
        by_position = {
            n: _failed(item, ended) if item.standing in open_ends else item for n, item in by_position.items()
        }
    if stop is not None:
        raise stop
    return [by_position[n] for n in range(len(items))]


def _request(item: SweepItem) -> Request:
    assert item.request is not None  # it is ready
    return item.request


def _made_before(catalog: Catalog, item: SweepItem) -> bool:
    """Return whether the output of a claimed checkpoint is there; remove what a killed run left beside it."""
    request = _request(item)
    if _outdated(catalog, item) or not made_from(
        catalog, request.destination, item.source, item.manifest_digest
    ):
        return False
    remove_leftover_staging(request.destination, catalog)
    return True


def _converted(item: SweepItem) -> SweepItem:
    return replace(item, standing=SweepState.CONVERTED, why="made from this checkpoint before")


def _failed(item: SweepItem, error: CkptError) -> SweepItem:
    standing = SweepState.CLAIMED if isinstance(error, Busy) else SweepState.FAILED
    return replace(item, standing=standing, why=f"{error.code}: {error.message}")


def _with_failures(items: Iterable[SweepItem], failures: Mapping[str, CkptError]) -> Iterator[SweepItem]:
    """Yield items; one whose state could not be noted is not converted: every sweep would begin it anew."""
    for item in items:
        error = failures.get(item.source)
        yield item if error is None else replace(item, standing=SweepState.UNREAD, why=error.message)


def _ignore(item: SweepItem) -> None:
    """Tell nobody."""


def _requests(
    targets: Sequence[ExportTarget], candidate: Candidate, steps: Mapping[int, str]
) -> list[tuple[Request | None, str]]:
    """Return the request of each target, or why there is none. steps: of the run, each with its place.

    The target of an average has one where a window ends with the candidate.
    """
    place = TemplateFields(candidate.root, candidate.run, candidate.step, candidate.name, candidate.path)
    requests: list[tuple[Request | None, str]] = []
    for target in targets:
        source: str | None = candidate.uri
        if target.window is not None:
            newest = candidate.step
            source = None if newest is None else target.window.source(steps, newest)
        if source is None:
            continue
        try:
            requests.append((target.request(source, place), ""))
        except Exception as error:
            # A template may need a field that this checkpoint does not have: only its own target is refused.
            requests.append((None, error_of(error).message))
    return requests


def _item(
    root: RootRow, candidate: Candidate, request: Request | None, why: str, readiness: Readiness
) -> SweepItem:
    """Return a checkpoint with the standing of its state. why: the reason if there is no request for it."""
    item = SweepItem(
        root.name,
        normal_uri(candidate.uri),
        candidate.step,
        SweepState.READY,
        "",
        request.destination if request else "",
        readiness.findings,
        request,
        _digest_of(request, readiness),
        readiness.manifest_digest or "",
        sum(file.nbytes for file in candidate.files.values()),
    )
    if readiness.state is not Condition.COMPLETE:
        return replace(item, standing=SweepState(readiness.state.value), why=readiness.message)
    return item if request is not None else replace(item, standing=SweepState.REFUSED, why=why)


def _digest_of(request: Request | None, readiness: Readiness) -> str:
    """Return the digest of a source for its claim. An average is made once of the same steps and weights."""
    if request is not None and is_average(request.source):
        return blake3(request.source.encode("utf-8", "surrogateescape")).hexdigest()
    return readiness.source_digest or ""


def _compared_with_target(
    catalog: Catalog, item: SweepItem, request: Request, now: datetime, retry_failed: bool
) -> SweepItem:
    """Return a complete checkpoint with the standing of its conversion."""
    with catalog.reading() as conn:
        claim = claims.current(conn, key_of(request, item.source_digest))
    if claim is not None:
        # A claim that is done or in use decides, whatever is at the destination.
        if claim.state == DONE or claim.is_in_use(now):
            return _with_claim(item, claim)
        # The wait doubles with each attempt, up to a day.
        if claim.state == FAILED and not retry_failed and (due := _due(claim)) > now:
            why = f"{claim.error_code}: {claim.error}; retried after {due:%Y-%m-%d %H:%M} UTC"
            return replace(item, standing=SweepState.FAILED, why=why)
        return item
    if _outdated(catalog, item) and not request.overwrite:
        return replace(
            item,
            standing=SweepState.OUTDATED,
            why=f"{request.destination} was made from an earlier checkpoint here; remove it, or set "
            '"overwrite": true in the target',
        )
    # Without a claim, such as in a new catalog, the output itself says what it was made from.
    if not _outdated(catalog, item) and made_from(
        catalog, request.destination, item.source, item.manifest_digest
    ):
        return _converted(item)
    return item


def _outdated(catalog: Catalog, item: SweepItem) -> bool:
    return rewritten(catalog, key_of(_request(item), item.source_digest), item.source)


def _with_claim(item: SweepItem, claim: ClaimRow) -> SweepItem:
    """Return a checkpoint with the standing of its claim."""
    if claim.state == DONE:
        when = claim.ended_at or claim.taken_at
        return replace(item, standing=SweepState.CONVERTED, why=f"made on {when:%Y-%m-%d %H:%M} UTC")
    return replace(item, standing=SweepState.CLAIMED, why=f"{claim.owner} is converting it")


def _due(claim: ClaimRow) -> datetime:
    first, most = _PATIENCE
    # Bounded before it is shifted: attempts may be any number.
    return (claim.ended_at or claim.taken_at) + min(first * (1 << min(claim.attempts - 1, 20)), most)


def _sighting(root: RootRow, candidate: Candidate, readiness: Readiness, now: datetime) -> SightingRow:
    return SightingRow(
        normal_uri(candidate.uri),
        root.uri,
        candidate.step,
        readiness.state.value,
        readiness.stamp,
        readiness.source_digest,
        readiness.manifest_digest,
        readiness.findings,
        first_seen_at=now,
        last_seen_at=now,
        changed_at=readiness.changed_at,
    )


def batches(items: Sequence[SweepItem], ready: Sequence[int], most: int = MOST) -> Iterator[list[int]]:
    """Yield the positions of checkpoints to convert together, in their order.

    A batch has small checkpoints that replace nothing, with local destinations of which none is inside
    another one: their conversions cannot meet. Any other checkpoint is a batch of its own.

    Args:
        items: The checkpoints of a root.
        ready: Positions of those to convert.
        most: The most checkpoints of a batch.
    """
    batch: list[int] = []
    places: list[str] = []
    for n in ready:
        place = _place(items[n])
        # Two conversions of which one writes inside of the other's destination must follow each other.
        meets = place is None or any(_is_inside(place, p) or _is_inside(p, place) for p in places)
        if batch and (meets or len(batch) >= most):
            yield batch
            batch, places = [], []
        if place is None:
            yield [n]
        else:
            batch.append(n)
            places.append(place)
    if batch:
        yield batch


def _place(item: SweepItem) -> str | None:
    """Return the destination of a checkpoint that may be in a batch, else None."""
    request = item.request
    if request is None or request.replaces or item.nbytes > SMALL or is_average(request.source):
        return None
    path = local_path(request.destination)
    return None if path is None else str(path.absolute())


def _is_inside(place: str, outer: str) -> bool:
    return place == outer or place.startswith(f"{outer.rstrip('/')}/")
