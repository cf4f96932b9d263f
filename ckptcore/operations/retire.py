"""Retiring: which sources may go, and is it safe to delete them? Nothing is deleted unless asked for.

1. `plan` applies the policy to the sources of the watched roots, and looks for what stands for each;
2. `carry_out` reads that child once more, byte for byte; in one transaction it is asked again who holds on
   to the source, and it is marked and moved out of sight; then the child is read again, from its own place,
   while the source is away: whatever led from the one to the other leads nowhere now. Only then exactly the
   names that were approved are removed. Where anything is not as it was, the source comes back.

Reading takes hours, and a trainer may save the step again meanwhile. So everything in both folders is noted
before anything of them is read, and compared behind the last read, status times included, and once more where
nobody finds the source.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import maintenance as tending
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.types import CheckpointRow
from ckptcore.errors import CkptError, Conflict, UsageError
from ckptcore.operations.child_proof import (
    changed,
    child_of,
    require_at_rest,
    require_holding,
    require_proven,
)
from ckptcore.operations.interrupted_retire import clear_away
from ckptcore.operations.registered_files import same_manifest
from ckptcore.operations.removal_record import drop_record, put_record
from ckptcore.operations.replacement import Allowed, Stand, require_as_converted, stand_in
from ckptcore.operations.retention import Policy, RetentionEntry, decide, held
from ckptcore.operations.set_aside import Aside, RemovalRecord
from ckptcore.operations.verify import prove
from ckptcore.planning.request import Settings
from ckptcore.store import Store, local_path, open_store, split_url
from ckptcore.store.below import open_above
from ckptcore.store.contents import Thing, contents, difference, require_no_mount

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_log = logging.getLogger("ckptcore")


class Fate(StrEnum):
    """What becomes of a source. kept: by the policy, or by people. unsafe: nothing proves to stand for it."""

    KEPT = "kept"
    UNSAFE = "unsafe"
    LET_GO = "let go"
    DELETED = "deleted"


@dataclass(frozen=True)
class Retired:
    """One source. why: the reasons. stand: what was found to stand for it, or why nothing does."""

    source: CheckpointRow
    fate: Fate
    why: tuple[str, ...]
    stand: Stand | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON face."""
        child = self.stand.child if self.stand else None
        return {
            "checkpoint": self.source.id,
            "uri": self.source.uri,
            "run": self.source.run,
            "step": self.source.step,
            "fate": self.fate.value,
            "why": list(self.why),
            "bytes": self.source.nbytes,
            "child": child.uri if child else None,
            "unproven": [{"name": name, "kind": kind} for name, kind in self.unproven],
        }

    @property
    def unproven(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of what lies in the source and nothing proves to hold: it goes by these names only."""
        return self.stand.lost if self.stand is not None else ()


@dataclass(frozen=True)
class Retirement:
    """What came of it. done: whether anything was to be deleted at all. left: what earlier runs that were
    killed left and nobody may remove, in sentences."""

    items: tuple[Retired, ...]
    done: bool
    left: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """fate -> how many."""
        return dict(Counter(i.fate.value for i in self.items))

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that were, or would be, deleted."""
        return sum(i.source.nbytes for i in self.items if i.fate in (Fate.LET_GO, Fate.DELETED))

    def as_dict(self) -> dict[str, Any]:
        """The JSON face."""
        return {
            "deleted": self.done,
            "counts": self.counts,
            "bytes": self.nbytes,
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
) -> Retirement:
    """Deletes sources as the policy says. scope: a watched root or a run by name, or None for all roots.

    yes: delete; otherwise nothing is changed. take: take fingerprints anew, with these means. means: those
    for reading a child again. on_retired: is called for each.
    """
    left = clear_away(catalog, take or means or Settings()) if yes else ()
    items = []
    for item in plan(catalog, policy, scope, allowed=allowed, take=take):
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
) -> Iterable[Retired]:
    """What the policy says of each source, and whether something stands for those that it lets go."""
    now = datetime.now(UTC)
    with catalog.reading() as conn:
        rows = _in_scope(conn, scope)
        above = roots.every(conn)
        entries = {row.id: _retention_entry(row, tending.ties(conn, now, row.id)) for row in rows}
    verdicts = decide(entries.values(), policy)
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict.keep:
            yield Retired(row, Fate.KEPT, verdict.why)
            continue
        try:
            _root_above(above, row)
            stand = stand_in(catalog, row, allowed or Allowed(), take=take)
        except CkptError as error:
            stand = Stand(None, None, f"{error.code}: {error.message}")
        if stand.child is None:
            yield Retired(row, Fate.UNSAFE, (stand.why,), stand)
        else:
            yield Retired(row, Fate.LET_GO, (*verdict.why, f"{stand.child.uri} holds it"), stand)


def carry_out(catalog: Catalog, item: Retired, means: Settings | None = None) -> Retired:
    """Deletes one source that may go, unless something speaks against it now. means: to read its child."""
    stand = item.stand
    assert stand is not None
    assert stand.child is not None
    try:
        _require_unchanged(item.source, stand)
        detail = child_of(catalog, stand.child.id)
        require_proven(detail.checkpoint.uri, prove(detail), digests=stand.cast or not stand.fresh)
        require_at_rest(stand, detail)
        left = _delete(catalog, item, means or Settings())
    except CkptError as error:
        fate = Fate.KEPT if isinstance(error, Conflict) else Fate.UNSAFE
        return replace(item, fate=fate, why=(error.message,))
    return replace(item, fate=Fate.DELETED, why=(*item.why, *left))


def _in_scope(conn: Any, scope: str | None) -> list[CheckpointRow]:
    every = roots.every(conn)
    named = [r for r in every if r.name == scope]
    found: dict[str, CheckpointRow] = {}
    for root in named or every:
        for row in tending.sources(conn, root.uri, None if named or scope is None else scope):
            found[row.id] = row
    if scope is not None and not named and not found:
        raise UsageError(
            f"there is no watched root or run {scope} with checkpoints below a watched root",
            hint="only what lies below a watched root is ever deleted",
        )
    return list(found.values())


def _retention_entry(row: CheckpointRow, ties: tending.Ties) -> RetentionEntry:
    run = row.run or os.path.dirname(row.uri)
    readers = tuple(f"{reader} reads it" for reader in ties.readers)
    return RetentionEntry(row.id, run, row.step, ties.tags, ties.aliases, (*ties.holds, *readers))


def _require_unchanged(source: CheckpointRow, stand: Stand) -> None:
    """Raises unless what lies there is what the child was made from."""
    manifest = same_manifest(source.uri, source.manifest_digest)
    if manifest is None:
        raise UsageError("another checkpoint stands there now")
    if not stand.fresh:
        assert stand.conversion is not None
        require_as_converted(manifest, stand.conversion)


def _require_same(uri: str, things: Mapping[str, Thing]) -> None:
    """Raises `SourceChanged` unless a source is, name by name, what was seen before it was read."""
    name = difference(things, contents(uri))
    if name is not None:
        raise changed(uri, name)


def _delete(catalog: Catalog, item: Retired, means: Settings) -> tuple[str, ...]:
    """Deletes a source whose child is proven; sentences on what had to stay."""
    stand = item.stand
    assert stand is not None
    assert stand.child is not None
    source = item.source
    _require_same(source.uri, stand.things)
    if local_path(source.uri) is None:
        _delete_objects(catalog, source, stand, means)
        return ()
    require_no_mount(source.uri)
    with catalog.reading() as conn:
        root = _root_above(roots.every(conn), source)
    record = RemovalRecord(source.id, stand.child.id, source.uri, stand.fingerprint, stand.things)
    with closing(Aside.begin(root, record)) as aside:
        marked = False
        try:
            with catalog.writing() as conn:
                _mark(conn, datetime.now(UTC), source)
                _moved_away(aside)  # last in the transaction: no reader sees half of it
                aside.require_approved()  # whoever saves from here on makes a new folder
            marked = True
            _require_read_again(catalog, stand, means)
            aside.require_approved()
        except BaseException as error:
            try:
                aside.put_back()
            except CkptError as second:  # it waits, whole, for the next run; both are told
                _log.warning("%s is not back in its place: %s", source.uri, second.message)
                raise UsageError(f"{error}; {second.message}") from error
            if marked:
                _unmark(catalog, source)
            raise
        left, trouble = aside.remove()
        if trouble:
            return (
                f"what could not be removed waits in {aside.home}: {trouble}; the next run goes on with it",
            )
        return _put_back(aside, left) if left else ()


def _require_read_again(catalog: Catalog, stand: Stand, means: Settings) -> None:
    """Raises unless a child, as the catalog has it now, holds what it must, and rested since it was seen."""
    assert stand.child is not None
    detail = child_of(catalog, stand.child.id)
    require_holding(detail, stand.fingerprint, means)
    require_at_rest(stand, detail)


def _put_back(aside: Aside, left: Sequence[str]) -> tuple[str, ...]:
    """What came while the source was removed goes back to where it was written."""
    names = ", ".join(left[:5])
    try:
        aside.put_back()
    except UsageError as error:
        return (f"{names} could not be removed: {error.message}",)
    return (f"{names} came or changed meanwhile, and is kept in {aside.path}",)


def _unmark(catalog: Catalog, source: CheckpointRow) -> None:
    """Notes that a source is there after all; the error that brought it back counts for more than this."""
    try:
        with catalog.writing() as conn:
            tending.restored(conn, source.id)
    except CkptError as error:
        _log.warning("%s is back, but the catalog calls it deleted: %s", source.uri, error.message)


def _delete_objects(catalog: Catalog, source: CheckpointRow, stand: Stand, means: Settings) -> None:
    """Removes a source from an object store, where nothing can be moved away; its child is read first."""
    _require_read_again(catalog, stand, means)
    parent, itself = split_url(source.uri)
    with closing(open_store(parent if "" in stand.things else source.uri)) as store:
        stamps = {name or itself: store.stamp(name or itself) for name in stand.things}
        with catalog.writing() as conn:
            _mark(conn, datetime.now(UTC), source)
            _require_same(source.uri, stand.things)  # what has these stamps is what was proven
            assert stand.child is not None
            record = RemovalRecord(source.id, stand.child.id, source.uri, stand.fingerprint, stand.things)
            home = put_record(
                record
            )  # last in the transaction: whoever is killed from here on is gone on with
        _remove_remote(source.uri, store, stamps)
    drop_record(home)


def _mark(conn: Any, now: datetime, source: CheckpointRow) -> None:
    _require_free(conn, now, source)
    if not tending.deleted(conn, now, source):
        raise Conflict("its row in the catalog changed meanwhile")


def _moved_away(aside: Aside) -> None:
    aside.take()


def _root_above(above: Iterable[roots.RootRow], source: CheckpointRow) -> str:
    """The watched root that a source really lies below: not by its name, and not through a link. Any place on
    an object store is what it is called.

    Raises `UsageError`.
    """
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
    """Raises `Conflict` when somebody holds on to it now, or it is not below a watched root."""
    ties = tending.ties(conn, now, source.id)
    why: Sequence[str] = (*held(_retention_entry(source, ties)),)
    if why:
        raise Conflict(f"{why[0]}, meanwhile")
    others = tending.inside(conn, source.uri)
    if others:
        raise Conflict(f"{others[0]} lies in it")
    try:
        _root_above(roots.every(conn), source)
    except UsageError as error:
        raise Conflict(error.message) from error


def _remove_remote(uri: str, store: Store, stamps: Mapping[str, str | None]) -> None:
    """Removes what was seen and proven, each name looked at right before: whoever saves there meanwhile keeps
    what was saved. Raises `SourceChanged` at the first that is another, and removes nothing after it."""
    for name, stamp in stamps.items():
        now = store.stamp(name)
        if now is None:
            continue
        if now != stamp:
            raise changed(uri, name)
        store.remove(name)
