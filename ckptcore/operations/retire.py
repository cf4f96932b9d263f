"""Delete source checkpoints that a verified conversion fully replaces. Nothing is deleted by default.

1. `plan` applies the policy to the sources of the watched roots, and finds the child that replaces each.
2. `carry_out` reads that child once more, byte for byte. In one transaction it checks holds on the source,
   marks it, and moves it aside. Then it reads the child again, from its own place: a link from the child to
   the source is broken now. Only then it removes exactly the approved names. If anything changed, it restores
   the source.

Reading takes hours, and a trainer may save the step again meanwhile. So all files in both folders are
recorded before they are read, and compared after the last read, status times included, and once more while
the source is set aside.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import maintenance as tending
from ckptcore.catalog import retirements
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.retirements import FULL, PART, GivenUp, RetirementRecord
from ckptcore.catalog.types import CheckpointRow
from ckptcore.errors import CkptError, Conflict, UsageError
from ckptcore.operations.child_proof import changed, require_at_rest, require_holding, require_proven
from ckptcore.operations.interrupted_retire import finish_interrupted
from ckptcore.operations.place_ties import inside_of_place, ties_of_places
from ckptcore.operations.registered_files import same_manifest
from ckptcore.operations.removal_record import drop_record, put_record
from ckptcore.operations.replacement import (
    Allowed,
    Replacement,
    child_of,
    find_replacement,
    require_as_converted,
)
from ckptcore.operations.retention import Policy, RetentionEntry, decide, user_reasons
from ckptcore.operations.set_aside import Aside, RemovalRecord
from ckptcore.operations.verify import prove
from ckptcore.planning.request import Settings
from ckptcore.store import Store, local_path, open_store, split_url
from ckptcore.store.below import open_above
from ckptcore.store.contents import NameKind, Thing, contents, difference, require_no_mount
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.merged_url import is_merged

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_log = logging.getLogger("ckptcore")
OfRoot = Callable[[roots.RootRow], tuple[Policy, Allowed]]


class Fate(StrEnum):
    """What happens to a source.

    kept: by the policy, or by a user. unsafe: no child provably replaces it.
    """

    KEPT = "kept"
    UNSAFE = "unsafe"
    LET_GO = "let go"
    DELETED = "deleted"


@dataclass(frozen=True)
class Retired:
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
            "proof": self.proof,
            "files_bytes": self.files,
            "freed_bytes": self.freed,
            "given_up": [each.as_dict() for each in self.given_up],
            "given_up_totals": retirements.totals(self.given_up),
            "unproven": [{"name": name, "kind": kind} for name, kind in self.unproven],
        }

    @property
    def unproven(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of files and objects of the source that its child does not prove."""
        return self.replacement.lost if self.replacement is not None else ()

    @property
    def given_up(self) -> tuple[GivenUp, ...]:
        """What is lost with the source, as it was allowed."""
        return self.replacement.given_up if self.replacement is not None else ()

    @property
    def proof(self) -> str | None:
        """What the child holds: the whole source or its model part; None without a child."""
        if self.replacement is None or self.replacement.child is None:
            return None
        return PART if self.replacement.part and self.given_up else FULL

    @property
    def freed(self) -> int:
        """Bytes of files that its deletion frees, or would free."""
        if self.fate not in (Fate.LET_GO, Fate.DELETED) or self.replacement is None:
            return 0
        return freed_bytes(self.replacement.things)


@dataclass(frozen=True)
class Retirement:
    """The result.

    Attributes:
        items: The sources.
        done: Whether this was more than a dry run.
        left: Messages about files of earlier, killed runs that are kept.
    """

    items: tuple[Retired, ...]
    done: bool
    left: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Fate -> number of sources."""
        return dict(Counter(i.fate.value for i in self.items))

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that were, or would be, deleted."""
        return sum(i.source.nbytes for i in self.items if i.fate in (Fate.LET_GO, Fate.DELETED))

    @property
    def before(self) -> int:
        """Bytes of files of all sources that could be listed."""
        return sum(i.files or 0 for i in self.items)

    @property
    def freed(self) -> int:
        """Bytes of files that were, or would be, freed."""
        return sum(i.freed for i in self.items)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        every = [each for i in self.items if i.freed for each in i.given_up]
        return {
            "deleted": self.done,
            "counts": self.counts,
            "bytes": self.nbytes,
            "files": {"before": self.before, "freed": self.freed, "after": self.before - self.freed},
            "given_up_totals": retirements.totals(every),
            "left": list(self.left),
            "checkpoints": [i.as_dict() for i in self.items],
        }


def retire(
    catalog: Catalog,
    policy: Policy,
    scope: str | None = None,
    *,
    yes: bool = False,
    allowed: Allowed | None = None,
    take: Settings | None = None,
    means: Settings | None = None,
    on_retired: Callable[[Retired], None] | None = None,
    of_root: OfRoot | None = None,
) -> Retirement:
    """Delete sources by the policy.

    Args:
        catalog: The catalog.
        policy: Which steps to keep.
        scope: The name of a watched root or a run, or None for all roots.
        yes: Delete; otherwise nothing changes.
        allowed: What may be lost.
        take: Memory and threads for computing fingerprints anew; None to use those in the catalog.
        means: Memory and threads for reading children again.
        on_retired: Called for each source.
        of_root: Policy and allowed losses of a root's sources; None for ``policy`` and ``allowed``.

    Returns:
        The sources, each with its fate.

    Raises:
        UsageError: There is no such root or run.
    """
    left = finish_interrupted(catalog, take or means or Settings()) if yes else ()
    items = []
    for item in plan(catalog, policy, scope, allowed=allowed, take=take, means=means, of_root=of_root):
        item = replace(item, files=_listed_bytes(item))
        done = carry_out(catalog, item, take or means) if yes and item.fate is Fate.LET_GO else item
        items.append(done)
        if on_retired is not None:
            on_retired(done)
    return Retirement(tuple(items), yes, left)


def plan(
    catalog: Catalog,
    policy: Policy,
    scope: str | None = None,
    *,
    allowed: Allowed | None = None,
    take: Settings | None = None,
    means: Settings | None = None,
    of_root: OfRoot | None = None,
    after: str | None = None,
    limit: int | None = None,
) -> Iterator[Retired]:
    """Yield each source with the policy's verdict, and the child of those that may be deleted.

    The arguments are those of `retire`, and two for a part of the plan, with the verdicts of the whole: as
    many sources as ``limit`` at most, ordered by URI, behind the one with the public id ``after``.
    """
    now = datetime.now(UTC)
    with catalog.reading() as conn:
        above = roots.every(conn)
        below, run = _scope(above, scope)
        rows = tending.sources(conn, below, run, after=after, limit=limit) if below else ()
        if not rows and run is not None and after is None:
            raise UsageError(
                f"there is no watched root or run {run} with checkpoints below a watched root",
                hint="only checkpoints below a watched root are ever deleted",
            )
        rules = {row.id: _rules(row, above, of_root) or (policy, allowed or Allowed()) for row in rows}
        ties = ties_of_places(conn, now, rows)
        entries = [_retention_entry(row, ties[row.id]) for row in rows]
        own = {public: rule for public, (rule, _) in rules.items()}
        steps = None
        if limit is not None:
            most: dict[str, int] = {}
            for entry in entries:
                most[entry.run] = max(most.get(entry.run, 0), own[entry.id].keep_last)
            steps = tending.newest_steps(conn, most, below)
    verdicts = decide(entries, policy, own, steps)
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict.keep:
            yield Retired(row, Fate.KEPT, verdict.why)
            continue
        try:
            _root_above(above, row)
            if local_path(row.uri) is not None:
                require_no_mount(row.uri)
            replacement = find_replacement(catalog, row, rules[row.id][1], take=take, means=means)
        except CkptError as error:
            replacement = Replacement(None, None, f"{error.code}: {error.message}")
        if replacement.child is None:
            yield Retired(row, Fate.UNSAFE, (replacement.why,), replacement)
            continue
        with catalog.reading() as conn:
            inside = _inside(conn, row)
        if inside:
            yield Retired(row, Fate.KEPT, (inside,), replacement)
        else:
            what = "it" if not replacement.part else "its model part"
            why = (*verdict.why, f"{replacement.child.uri} replaces {what}")
            yield Retired(row, Fate.LET_GO, why, replacement)


def freed_bytes(things: Mapping[str, Thing]) -> int:
    """Return the bytes of files that are freed if all these names are removed.

    A file with several names counts once, and not at all if a name of it stays.
    """
    removed: Counter[tuple[int, int]] = Counter()
    total, linked = 0, dict[tuple[int, int], Thing]()
    for thing in things.values():
        if thing.kind is not NameKind.FILE:
            continue
        if thing.links in (None, 1) or thing.device is None or thing.inode is None:
            total += thing.nbytes
            continue
        removed[thing.device, thing.inode] += 1
        linked[thing.device, thing.inode] = thing
    return total + sum(t.nbytes for each, t in linked.items() if t.links == removed[each])


def carry_out(catalog: Catalog, item: Retired, means: Settings | None = None) -> Retired:
    """Delete one source of `plan`, after checking again that it may be deleted.

    Args:
        catalog: The catalog.
        item: A source with a child that replaces it.
        means: Memory and threads for reading the child again.

    Returns:
        The source with its new fate; errors become reasons.
    """
    replacement = item.replacement
    assert replacement is not None
    assert replacement.child is not None
    try:
        _require_unchanged(item.source, replacement)
        detail = child_of(catalog, replacement.child.id)
        digests = replacement.cast or not replacement.fresh
        require_proven(detail.checkpoint.uri, prove(detail), digests=digests)
        require_at_rest(replacement, detail)
        left = _delete(catalog, item, means or Settings())
    except CkptError as error:
        fate = Fate.KEPT if isinstance(error, Conflict) else Fate.UNSAFE
        return replace(item, fate=fate, why=(error.message,))
    return replace(item, fate=Fate.DELETED, why=(*item.why, *left))


def _scope(every: Sequence[roots.RootRow], scope: str | None) -> tuple[list[str], str | None]:
    """Return the folders of the roots that a scope is about, and the run in them, if it names one."""
    named = [root.uri for root in every if root.name == scope]
    return (named, None) if named else ([root.uri for root in every], scope)


def _retention_entry(row: CheckpointRow, ties: tending.Ties) -> RetentionEntry:
    run = row.run or os.path.dirname(row.uri)
    readers = tuple(f"{reader} reads it" for reader in ties.readers)
    return RetentionEntry(row.id, run, row.step, ties.tags, ties.aliases, (*ties.holds, *readers))


def _require_unchanged(source: CheckpointRow, replacement: Replacement) -> None:
    """Raise an error unless the source is still what the child was made from."""
    manifest = same_manifest(source.uri, source.manifest_digest)
    if manifest is None:
        raise UsageError("another checkpoint is there now")
    if not replacement.fresh:
        assert replacement.conversion is not None
        require_as_converted(manifest, replacement.conversion)


def _require_same(uri: str, things: Mapping[str, Thing]) -> None:
    """Raise `SourceChanged` unless a source is, name by name, unchanged since before it was read."""
    name = difference(things, contents(uri))
    if name is not None:
        raise changed(uri, name)


def _delete(catalog: Catalog, item: Retired, means: Settings) -> tuple[str, ...]:
    """Delete a source whose child is proven; return messages about files that are kept."""
    replacement = item.replacement
    assert replacement is not None
    assert replacement.child is not None
    source = item.source
    _require_same(source.uri, replacement.things)
    if local_path(source.uri) is None:
        _delete_objects(catalog, item, means)
        return ()
    require_no_mount(source.uri)
    with catalog.reading() as conn:
        root = _root_above(roots.every(conn), source)
    record = _record_of(source, replacement)
    with closing(Aside.begin(root, record)) as aside:
        marked = False
        try:
            with catalog.writing() as conn:
                _mark(conn, datetime.now(UTC), item)
                _moved_away(aside)  # last in the transaction: no reader sees half of it
                aside.require_approved()  # a trainer that saves from here on creates a new folder
            marked = True
            _require_replacement(catalog, replacement, means)
            aside.require_approved()
        except BaseException as error:
            try:
                aside.restore()
            except CkptError as second:  # it stays aside, complete, for the next run; both are reported
                _log.warning("cannot restore %s: %s", source.uri, second.message)
                raise UsageError(f"{error}; {second.message}") from error
            if marked:
                _unmark(catalog, source)
            raise
        left, trouble = aside.remove()
        if trouble:
            return (
                f"cannot remove all of it: {trouble}; the rest is in {aside.home}, and the next run resumes",
            )
        return _restore_rest(aside, left) if left else ()


def _record_of(source: CheckpointRow, replacement: Replacement) -> RemovalRecord:
    assert replacement.child is not None
    child = replacement.child.id
    return RemovalRecord(source.id, child, source.uri, replacement.fingerprint, replacement.things)


def _require_replacement(catalog: Catalog, replacement: Replacement, means: Settings) -> None:
    """Read a child again; raise an error unless it has the wanted tensors, and its files are unchanged."""
    assert replacement.child is not None
    detail = child_of(catalog, replacement.child.id)
    require_holding(detail, replacement.fingerprint, means)
    require_at_rest(replacement, detail)


def _restore_rest(aside: Aside, left: Sequence[str]) -> tuple[str, ...]:
    """Restore files that appeared while the source was removed to the place where they were written."""
    names = ", ".join(left[:5])
    try:
        aside.restore()
    except UsageError as error:
        return (f"{names} could not be removed: {error.message}",)
    return (f"{names} appeared or changed meanwhile, and is kept in {aside.path}",)


def _unmark(catalog: Catalog, source: CheckpointRow) -> None:
    """Record that a source exists after all; a failure is logged, because the first error matters more."""
    try:
        with catalog.writing() as conn:
            tending.restored(conn, source.id)
    except CkptError as error:
        _log.warning("%s is restored, but the catalog calls it deleted: %s", source.uri, error.message)


def _delete_objects(catalog: Catalog, item: Retired, means: Settings) -> None:
    """Remove a source from an object store, where nothing can be moved aside; its child is read first."""
    source, replacement = item.source, item.replacement
    assert replacement is not None
    _require_replacement(catalog, replacement, means)
    parent, itself = split_url(source.uri)
    with closing(open_store(parent if "" in replacement.things else source.uri)) as store:
        stamps = {name or itself: store.stamp(name or itself) for name in replacement.things}
        with catalog.writing() as conn:
            _mark(conn, datetime.now(UTC), item)
            _require_same(source.uri, replacement.things)  # the objects with these stamps are proven
            # Last in the transaction: if this run is killed from here on, the next one resumes.
            home = put_record(_record_of(source, replacement))
        _remove_remote(source.uri, store, stamps)
    drop_record(home)


def _mark(conn: Any, now: datetime, item: Retired) -> None:
    """Mark a source as deleted, and record how it was proven and what is given up."""
    _require_free(conn, now, item.source)
    if not tending.deleted(conn, now, item.source):
        raise Conflict("its row in the catalog changed meanwhile")
    proven = item.replacement
    assert proven is not None
    assert proven.child is not None
    record = RetirementRecord(
        proven.child.id, item.proof or FULL, proven.fingerprint, item.freed, item.given_up
    )
    retirements.note(conn, now, item.source.id, record)


def _rules(
    row: CheckpointRow, above: Iterable[roots.RootRow], of_root: OfRoot | None
) -> tuple[Policy, Allowed] | None:
    """Return the policy and the allowed losses of the innermost root above a source."""
    if of_root is None:
        return None
    around = [root for root in above if row.uri.startswith(root.uri.rstrip("/") + "/")]
    innermost = max(around, key=lambda root: len(root.uri), default=None)
    return None if innermost is None else of_root(innermost)


def _listed_bytes(item: Retired) -> int | None:
    """Return the bytes of a source's files; None if they cannot be listed."""
    if item.replacement is not None and item.replacement.things:
        return freed_bytes(item.replacement.things)
    try:
        return freed_bytes(contents(item.source.uri))
    except CkptError as error:
        _log.info("cannot list %s: %s", item.source.uri, error.message)
        return None


def _moved_away(aside: Aside) -> None:
    aside.take()


def _root_above(above: Iterable[roots.RootRow], source: CheckpointRow) -> str:
    """Return the watched root of a source, by its real place, not by its name or through a link.

    On an object store the name is the place. Raise `UsageError` if there is none.
    """
    if is_merged(source.uri):
        # Its folders may be of other machines and stores, and other saves may use them: what one deletion
        # cannot prove and undo as a whole is not begun.
        raise UsageError(
            f"cannot delete {source.uri}: it is several folders",
            hint="remove them by hand when they are replaced",
        )
    error: UsageError | None = None
    for root in above:
        if not source.uri.startswith(root.uri.rstrip("/") + "/"):
            continue
        if local_path(source.uri) is None:
            if ".." not in source.uri.split("/"):
                return root.uri
            continue
        try:
            os.close(open_above(root.uri, source.uri))
        except UsageError as found:
            error = error or found
        else:
            return root.uri
    raise error or UsageError(f"cannot delete {source.uri}: it is not below a watched root")


def _require_free(conn: Any, now: datetime, source: CheckpointRow) -> None:
    """Raise `Conflict` if a user wants to keep it now, or it is not below a watched root."""
    ties = ties_of_places(conn, now, [source])[source.id]
    why: Sequence[str] = (*user_reasons(_retention_entry(source, ties)),)
    if why:
        raise Conflict(f"{why[0]}, meanwhile")
    if inside := _inside(conn, source):
        raise Conflict(inside)
    try:
        _root_above(roots.every(conn), source)
    except UsageError as error:
        raise Conflict(error.message) from error


def _inside(conn: Any, source: CheckpointRow) -> str:
    """Return why a source must stay because of another checkpoint in its folder; empty if none is there."""
    others = inside_of_place(conn, source.uri)
    return f"{others[0]} is inside it" if others else ""


def _remove_remote(uri: str, store: Store, stamps: Mapping[str, str | None]) -> None:
    """Remove the proven objects, each checked right before: an object that is saved meanwhile is kept.

    Raises:
        SourceChanged: An object changed; nothing after it is removed.
    """
    for name, stamp in stamps.items():
        now = store.stamp(name)
        if now is None:
            continue
        if now != stamp:
            raise changed(uri, name)
        store.remove(name)
