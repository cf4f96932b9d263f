"""Retire source checkpoints that a verified conversion fully replaces. Nothing is changed by default.

1. `plan` applies the policy to the sources of the watched roots, and finds the child that replaces each, from
   recorded digests and stamps.
2. `retire` sets those sources aside, where they can be restored during the grace period.
3. A purge reads the child, asks the gate again, and deletes (`ckptcore.operations.retention.purge`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import maintenance, retirements, training_rows
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.database import clock
from ckptcore.catalog.retirements import GivenUp
from ckptcore.catalog.row_values import require_sound
from ckptcore.catalog.types import CheckpointRow
from ckptcore.custody.place_ties import ties_of_places
from ckptcore.custody.replacing import GRACE
from ckptcore.errors import CkptError, Conflict, UsageError
from ckptcore.operations.registered_files import same_manifest
from ckptcore.operations.retention.part_replacement import CAST
from ckptcore.operations.retention.policy import KeepBest, Policy, Verdict, decide
from ckptcore.operations.retention.purge import KEPT, PURGED, WAITING, Purged, purge, purge_one, waiting
from ckptcore.operations.retention.replacement import Allowed, Replacement, find_replacement
from ckptcore.operations.retention.setting_aside import (
    freed_bytes,
    inside_of,
    put_aside,
    put_back,
    retention_entry,
    root_above,
)
from ckptcore.planning.request import Settings
from ckptcore.store import local_path
from ckptcore.store.listing import contents, require_no_mount
from ckptcore.utils.isolation import attempt
from ckptcore.utils.near_names import did_you_mean

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_log = logging.getLogger("ckptcore")
_RANKED = 100_000  # steps of a run that have a metric
Rules = tuple[Policy, Allowed]
OfRoot = Callable[[roots.RootRow], Rules]


class Fate(StrEnum):
    """What happens to a source.

    kept: by the policy, or by a user. unsafe: no child provably replaces it. to retire: it would be set
    aside. retired: it is. deleted: it was purged at once.
    """

    KEPT = "kept"
    UNSAFE = "unsafe"
    TO_RETIRE = "to retire"
    RETIRED = "retired"
    DELETED = "deleted"


_GOES = (Fate.TO_RETIRE, Fate.RETIRED, Fate.DELETED)


@dataclass(frozen=True)
class RetireDecision:
    """One source.

    Attributes:
        source: The source.
        fate: What happens to it.
        why: The reasons.
        replacement: The child that replaces it, if any.
        files: Bytes of its files when they were listed; None if they were not.
    """

    source: CheckpointRow
    fate: Fate
    why: tuple[str, ...]
    replacement: Replacement | None = None
    files: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        child = self.replacement.child if self.replacement else None
        return {
            "checkpoint": self.source.id,
            "uri": self.source.uri,
            "run": self.source.run,
            "step": self.source.step,
            "fate": self.fate.value,
            "why": list(self.why),
            "bytes": self.source.nbytes,
            "child": child.uri if child else None,
            "proof": self.replacement.proof if self.replacement and child else None,
            "files_bytes": self.files,
            "freed_bytes": self.freed,
            "given_up": [content.as_dict() for content in self.given_up],
            "given_up_totals": retirements.totals(self.given_up),
            "unproven": [{"name": name, "kind": kind} for name, kind in self.unproven],
        }

    @property
    def unproven(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of what its child does not prove."""
        losses = self.replacement.losses if self.replacement is not None else ()
        return tuple((loss.name, loss.kind) for loss in losses if loss.kind != CAST)

    @property
    def given_up(self) -> tuple[GivenUp, ...]:
        """What is lost with the source, as it was allowed."""
        replacement = self.replacement
        return () if replacement is None or replacement.child is None else replacement.losses

    @property
    def freed(self) -> int:
        """Bytes of files that its deletion frees, or would free."""
        if self.fate not in _GOES or self.replacement is None:
            return 0
        return freed_bytes(self.replacement.things)


@dataclass(frozen=True)
class RetireReport:
    """The result.

    Attributes:
        items: The sources.
        done: Whether this was more than a dry run.
        set_aside: What was set aside before, and what a purge did with it.
    """

    items: tuple[RetireDecision, ...]
    done: bool
    set_aside: tuple[Purged, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Fate -> number of sources."""
        return dict(Counter(i.fate.value for i in self.items))

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that were, or would be, set aside or deleted."""
        return sum(i.source.nbytes for i in self.items if i.fate in _GOES)

    @property
    def before(self) -> int:
        """Bytes of files of all sources that could be listed."""
        return sum(i.files or 0 for i in self.items)

    @property
    def freed(self) -> int:
        """Bytes of files that were freed, or would be."""
        fates = (Fate.DELETED,) if self.done else _GOES
        return sum(i.freed for i in self.items if i.fate in fates)

    @property
    def waiting(self) -> int:
        """Bytes of files that a purge frees later."""
        earlier = sum(row.nbytes for row in self.set_aside if row.fate == WAITING)
        return earlier + sum(i.freed for i in self.items if i.fate is Fate.RETIRED)

    @property
    def purged(self) -> int:
        """Bytes of files that were set aside before, and were deleted now."""
        return sum(row.nbytes for row in self.set_aside if row.fate == PURGED)

    @property
    def left(self) -> tuple[str, ...]:
        """Messages about what was set aside, and could not be purged."""
        unpurged = (row for row in self.set_aside if row.fate == KEPT)
        return tuple(f"{row.uri} is kept in {row.record}: {row.why}" for row in unpurged)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        given_up = [content for i in self.items if i.freed for content in i.given_up]
        return {
            "deleted": self.done,
            "counts": self.counts,
            "bytes": self.nbytes,
            "files": {
                "before": self.before,
                "freed": self.freed,
                "purged": self.purged,
                "after": self.before - self.freed,
                "waiting": self.waiting,
            },
            "given_up_totals": retirements.totals(given_up),
            "left": list(self.left),
            "checkpoints": [i.as_dict() for i in self.items],
            "set_aside": [row.as_dict() for row in self.set_aside],
        }


def retire(
    catalog: Catalog,
    policy: Policy,
    scope: str | None = None,
    *,
    yes: bool = False,
    purging: bool = False,
    grace: timedelta = GRACE,
    allowed: Allowed | None = None,
    fingerprint_settings: Settings | None = None,
    verify_settings: Settings | None = None,
    on_retired: Callable[[RetireDecision], None] | None = None,
    of_root: OfRoot | None = None,
) -> RetireReport:
    """Set sources aside by the policy, and purge those whose grace period is over.

    Args:
        catalog: The catalog.
        policy: Which steps to keep.
        scope: The name of a watched root or a run, or None for all roots.
        yes: Set sources aside; otherwise they stay.
        purging: Purge what is due.
        grace: How long a source can be restored; zero deletes it at once.
        allowed: What may be lost.
        fingerprint_settings: Memory and threads for reading both sides of a proof; None to use the sums in
            the catalog.
        verify_settings: Memory and threads for reading children.
        on_retired: Called for each source.
        of_root: Policy and allowed losses of a root's sources; None for ``policy`` and ``allowed``.

    Returns:
        The sources, each with its fate, and what was set aside before.

    Raises:
        UsageError: There is no such root or run.
    """
    reading = fingerprint_settings or verify_settings or Settings()
    with catalog.kept_open():
        earlier = _earlier(catalog, scope, reading, yes=yes, purging=purging)
        items = []
        default = policy, allowed or Allowed()
        for item in plan(
            catalog,
            scope,
            lambda root: default if root is None or of_root is None else of_root(root),
            fingerprint_settings=fingerprint_settings,
            verify_settings=verify_settings,
        ):
            item = replace(item, files=_listed_bytes(item))
            if yes and item.fate is Fate.TO_RETIRE:
                item = carry_out(catalog, item, reading, grace)
            items.append(item)
            if on_retired is not None:
                on_retired(item)
    return RetireReport(tuple(items), yes, earlier)


def plan(
    catalog: Catalog,
    scope: str | None,
    rules_of: Callable[[roots.RootRow | None], Rules],
    *,
    fingerprint_settings: Settings | None = None,
    verify_settings: Settings | None = None,
    after: str | None = None,
    limit: int | None = None,
) -> Iterator[RetireDecision]:
    """Yield each source with the policy's verdict, and the child of those that may be deleted.

    Args:
        catalog: The catalog.
        scope: As in `retire`.
        rules_of: Policy and allowed losses of a root's sources; of None, those of all other sources.
        fingerprint_settings: As in `retire`.
        verify_settings: As in `retire`.
        after: Public id of a source: the plan is the part behind it, ordered by URI, with the same verdicts.
        limit: The most sources of that part.
    """
    with catalog.reading() as conn:
        now = clock(conn)
        above = roots.every(conn)
        # A scope is the name of a root, or else of a run below any of them.
        below, run = _scope(above, scope)
        rows = maintenance.sources(conn, below, run, after=after, limit=limit) if below else ()
        if not rows and run is not None and after is None:
            # An empty answer to a misspelt name would look like nothing to do.
            raise UsageError(
                f"there is no watched root or run {run} with checkpoints below a watched root",
                hint=did_you_mean(
                    run,
                    [*(root.name for root in above), *maintenance.run_names(conn)],
                    "only checkpoints below a watched root are ever deleted",
                ),
            )
        policy, _ = rules_of(None)
        # Rules of a root may be odd: then its sources are unsafe, and all others are planned.
        rules = {row.id: attempt(_rules, row, above, rules_of) for row in rows}
        ties = ties_of_places(conn, now, rows)
        promoted = maintenance.aliases_below(conn, [row.id for row in rows])
        entries = [
            replace(entry, promoted=promoted.get(entry.id, ()))
            for entry in (retention_entry(row, ties[row.id]) for row in rows)
        ]
        policies = {
            public: policy if isinstance(rule, CkptError) else rule[0] for public, rule in rules.items()
        }
        # Asked once for each run and rule, not for each of its steps.
        best = {
            (entry.run, rule): _best_steps(conn, entry.run, rule)
            for entry in {entry.run: entry for entry in entries}.values()
            for rule in dict.fromkeys(
                chain.from_iterable(row_policy.keep_best for row_policy in policies.values())
            )
        }
        steps = None
        if limit is not None:
            # The rows are a part of the sources: which steps are a run's newest is asked of the catalog.
            most: dict[str, int] = {}
            for entry in entries:
                most[entry.run] = max(most.get(entry.run, 0), policies[entry.id].keep_last)
            steps = maintenance.newest_steps(conn, most, below)
    # Pure, from entries alone: the same for a part of the list as for all of it.
    verdicts = decide(entries, policy, policies, steps, best)
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict.keep:
            yield RetireDecision(row, Fate.KEPT, verdict.why)
            continue
        item = attempt(
            _planned, catalog, row, verdict, rules[row.id], above, fingerprint_settings, verify_settings
        )
        if isinstance(item, CkptError):
            reason = f"{item.code}: {item.message}"
            item = RetireDecision(row, Fate.UNSAFE, (reason,), Replacement(None, reason))
        yield item


def _best_steps(conn: Any, run: str, rule: KeepBest) -> frozenset[int]:
    """Return the best steps of a run, of which sources and what is made from them may have the metric.

    Steps whose value is odd are among them: they may be the best.
    """
    try:
        ranked = training_rows.best(conn, rule.metric, rule.goal, run=run, limit=_RANKED)
    except UsageError:  # no checkpoint has it
        return frozenset()
    # Of sound rows as many as the rule says; odd ones are beside them.
    sound_rows = [row for row in ranked if not row.trouble][: rule.count]
    odd_rows = [row for row in ranked if row.trouble]
    return frozenset(
        row.checkpoint.step for row in (*sound_rows, *odd_rows) if row.checkpoint.step is not None
    )


def _planned(
    catalog: Catalog,
    row: CheckpointRow,
    verdict: Verdict,
    rule: Rules | CkptError,
    above: Sequence[roots.RootRow],
    fingerprint_settings: Settings | None,
    verify_settings: Settings | None,
) -> RetireDecision:
    """Return a source that its policy does not keep, with its child. Raises `CkptError`: it cannot go."""
    if isinstance(rule, CkptError):
        raise rule
    require_sound(row)
    # By its real place: a link below a root may lead out of it.
    root_above(above, row.uri)
    if local_path(row.uri) is not None:
        require_no_mount(row.uri)
    replacement = find_replacement(
        catalog, row, rule[1], fingerprint_settings=fingerprint_settings, verify_settings=verify_settings
    )
    if replacement.child is None:
        return RetireDecision(row, Fate.UNSAFE, (replacement.why,), replacement)
    # After the child, which takes longer: what is inside is asked as late as possible.
    with catalog.reading() as conn:
        inside = inside_of(conn, row)
    if inside:
        return RetireDecision(row, Fate.KEPT, (inside,), replacement)
    replaced_text = "its model part" if replacement.proof == retirements.PART else "it"
    why = (*verdict.why, f"{replacement.child.uri} replaces {replaced_text}")
    return RetireDecision(row, Fate.TO_RETIRE, why, replacement)


def carry_out(
    catalog: Catalog, item: RetireDecision, verify_settings: Settings, grace: timedelta
) -> RetireDecision:
    """Set one source of `plan` aside, after checking again that it may go; purge it without a grace period.

    Args:
        catalog: The catalog.
        item: A source with a child that replaces it.
        verify_settings: Memory and threads for reading the child.
        grace: How long it can be restored.

    Returns:
        The source with its new fate; errors become reasons.
    """
    outcome = attempt(_carried_out, catalog, item, verify_settings, grace)
    if isinstance(outcome, CkptError):
        fate = Fate.KEPT if isinstance(outcome, Conflict) else Fate.UNSAFE
        return replace(item, fate=fate, why=(outcome.message,))
    return outcome


def _carried_out(
    catalog: Catalog, item: RetireDecision, verify_settings: Settings, grace: timedelta
) -> RetireDecision:
    """Set a source aside, and purge it without a grace period. Raises `CkptError`: it stays."""
    replacement = item.replacement
    assert replacement is not None
    # The plan may be hours old.
    if same_manifest(item.source.uri, item.source.manifest_digest) is None:
        raise UsageError("another checkpoint is there now")
    with closing(put_aside(catalog, item.source, replacement, item.freed, grace)) as aside:
        if grace > timedelta(0):
            until = f"it can be restored until {aside.record.due_at:%Y-%m-%d %H:%M} UTC"
            return replace(item, fate=Fate.RETIRED, why=(*item.why, until))
        try:
            left = purge_one(catalog, aside, verify_settings)
        # Nothing was decided: it goes back to its place, as if it had not been touched.
        except BaseException:
            put_back(catalog, aside)
            raise
    return replace(item, fate=Fate.DELETED, why=(*item.why, *left))


def _earlier(
    catalog: Catalog, scope: str | None, verify_settings: Settings, *, yes: bool, purging: bool
) -> tuple[Purged, ...]:
    """Return what was set aside before, purged where that is due and asked for."""
    with catalog.reading() as conn:
        places, run = _scope(roots.every(conn), scope) if scope is not None else (None, None)
    if not yes and not purging:
        return tuple(waiting(catalog, places, run))
    # Without `purging` only what a killed run had decided is ended: no date is due by then.
    due = catalog.now() if purging else datetime.min.replace(tzinfo=UTC)
    return tuple(purge(catalog, verify_settings, places, due=due, run=run))


def _scope(watched_roots: Sequence[roots.RootRow], scope: str | None) -> tuple[list[str], str | None]:
    """Return the folders of the roots that a scope is about, and the run in them, if it names one."""
    named = [root.uri for root in watched_roots if root.name == scope]
    return (named, None) if named else ([root.uri for root in watched_roots], scope)


def _rules(
    row: CheckpointRow, above: Iterable[roots.RootRow], rules_of: Callable[[roots.RootRow | None], Rules]
) -> Rules:
    """Return the policy and the allowed losses of the innermost root above a source, or the default."""
    around = [root for root in above if row.uri.startswith(root.uri.rstrip("/") + "/")]
    # The innermost root, as its rules are the most particular.
    return rules_of(max(around, key=lambda root: len(root.uri), default=None))


def _listed_bytes(item: RetireDecision) -> int | None:
    """Return the bytes of a source's files; None if they cannot be listed."""
    if item.replacement is not None and item.replacement.things:
        return freed_bytes(item.replacement.things)
    listed = attempt(contents, item.source.uri)
    if isinstance(listed, CkptError):
        _log.info("cannot list %s: %s", item.source.uri, listed.message)
        return None
    return freed_bytes(listed)
