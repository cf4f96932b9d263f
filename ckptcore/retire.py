"""Retiring: which sources are let go, and is it safe to delete them? Nothing is deleted unless told to.

1. `plan` applies the policy to the sources of the watched roots, and looks for what stands for each;
2. `carry_out` reads that child once more, byte for byte, and then deletes the source: in one transaction it
   is asked again who holds on to it, it is marked, and moved out of sight. Only then are its bytes removed.

Reading takes hours, and a trainer may save the step again meanwhile. So the files of both are noted before
anything of them is read, and compared behind the last read, and once more where nobody finds the source.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptcore.catalog import CheckpointDetail, roots, tending
from ckptcore.catalog.values import CheckpointRow
from ckptcore.convert import inspect
from ckptcore.errors import CkptError, Conflict, SourceChanged, UsageError
from ckptcore.proving import Proof, prove
from ckptcore.replaceable import Allowed, Stand, inner_names, stand_in
from ckptcore.request import Settings
from ckptcore.retention import Entry, Policy, decide, held
from ckptcore.store import join_url, local_path, open_store, split_url
from ckptcore.store.survey import Seen, changed, everything_at, newest, survey

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

_AWAY = "retired"  # part of the name under which a folder waits for its end


class Fate(StrEnum):
    """What becomes of a source. kept: by the policy, or by people. unsafe: nothing proves to stand for it."""

    KEPT = "kept"
    UNSAFE = "unsafe"
    LET_GO = "let go"
    DELETED = "deleted"


@dataclass(frozen=True)
class Retired:
    """One source. why: the reasons. stand: what stands for it, where it is let go."""

    source: CheckpointRow
    fate: Fate
    why: tuple[str, ...]
    stand: Stand | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON face."""
        child = self.stand.child if self.stand else None
        return {"checkpoint": self.source.id, "uri": self.source.uri, "run": self.source.run,
                "step": self.source.step, "fate": self.fate.value, "why": list(self.why),
                "bytes": self.source.nbytes, "child": child.uri if child else None}  # fmt: skip


@dataclass(frozen=True)
class Retirement:
    """What came of it. done: whether anything was to be deleted at all."""

    items: tuple[Retired, ...]
    done: bool

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
        return {"deleted": self.done, "counts": self.counts, "bytes": self.nbytes,
                "checkpoints": [i.as_dict() for i in self.items]}  # fmt: skip


def retire(catalog: Catalog, policy: Policy, scope: str | None = None, *, yes: bool = False,
           allowed: Allowed | None = None, take: Settings | None = None,
           told: Callable[[Retired], None] | None = None) -> Retirement:  # fmt: skip
    """Lets sources go as the policy says. scope: a watched root or a run by name, or None for all roots.

    yes: delete; otherwise nothing is changed. take: means to take fingerprints. told: is called for each.
    """
    if yes:
        clear_away(catalog)
    items = []
    for item in plan(catalog, policy, scope, allowed=allowed, take=take):
        done = carry_out(catalog, item) if yes and item.fate is Fate.LET_GO else item
        items.append(done)
        if told is not None:
            told(done)
    return Retirement(tuple(items), yes)


def plan(catalog: Catalog, policy: Policy, scope: str | None = None, *, allowed: Allowed | None = None,
         take: Settings | None = None) -> Iterable[Retired]:  # fmt: skip
    """What the policy says of each source, and whether something stands for those that it lets go."""
    now = datetime.now(UTC)
    with catalog.reading() as conn:
        rows = _in_scope(conn, scope)
        entries = {row.id: _entry(row, tending.ties(conn, now, row.id)) for row in rows}
    verdicts = decide(entries.values(), policy)
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict.keep:
            yield Retired(row, Fate.KEPT, verdict.why)
            continue
        try:
            stand = stand_in(catalog, row, allowed or Allowed(), take=take)
        except CkptError as error:
            stand = Stand(None, None, f"{error.code}: {error.message}")
        if stand.child is None:
            yield Retired(row, Fate.UNSAFE, (stand.why,))
        else:
            yield Retired(row, Fate.LET_GO, (*verdict.why, f"{stand.child.uri} holds it"), stand)


def carry_out(catalog: Catalog, item: Retired) -> Retired:
    """Deletes one source that is let go, unless something speaks against it now."""
    assert item.stand is not None
    assert item.stand.child is not None
    try:
        _require_unchanged(item.source, item.stand)
        detail = catalog.show(item.stand.child.id, tensors=False)
        assert isinstance(detail, CheckpointDetail)
        proven = prove(detail)
        if any(f.code == "no-checksum" for f in proven.findings) and not item.stand.fresh:
            told = f"{detail.checkpoint.uri} has no digests: --fingerprint reads both"
            return replace(item, fate=Fate.UNSAFE, why=(told,))
        if proven.proof not in (Proof.PROVEN, Proof.UNPROVEN):  # what it holds is proven: see above
            return replace(item, fate=Fate.UNSAFE, why=(f"{detail.checkpoint.uri}: {proven.message}",))
        _require_at_rest(item.stand.child_seen, detail.checkpoint.uri)
        _delete(catalog, item.source, item.stand.source_seen)
    except CkptError as error:
        fate = Fate.KEPT if isinstance(error, Conflict) else Fate.UNSAFE
        return replace(item, fate=fate, why=(error.message,))
    return replace(item, fate=Fate.DELETED)


def clear_away(catalog: Catalog) -> None:
    """Ends what runs that were killed left: what is deleted is removed, what was only moved comes back."""
    waiting: list[Path] = []
    with catalog.writing() as conn:  # nobody is between moving and committing now
        for root in roots.every(conn):
            living = {row.uri for row in tending.sources(conn, root.uri)}
            for uri in living:
                left = _left(uri)
                if len(left) == 1 and not os.path.lexists(uri):
                    left[0].rename(uri)
            for uri in set(tending.deleted_below(conn, root.uri)) - living:
                waiting += _left(uri)
    for path in waiting:
        _remove(path)


def _in_scope(conn: Any, scope: str | None) -> list[CheckpointRow]:
    every = roots.every(conn)
    named = [r for r in every if r.name == scope]
    found: dict[str, CheckpointRow] = {}
    for root in named or every:
        for row in tending.sources(conn, root.uri, None if named or scope is None else scope):
            found[row.id] = row
    if scope is not None and not named and not found:
        raise UsageError(f"there is no watched root or run {scope} with checkpoints below a watched root",
                         hint="only what lies below a watched root is ever deleted")  # fmt: skip
    return list(found.values())


def _entry(row: CheckpointRow, ties: tending.Ties) -> Entry:
    run = row.run or os.path.dirname(row.uri)
    readers = tuple(f"{reader} reads it" for reader in ties.readers)
    return Entry(row.id, run, row.step, ties.tags, ties.aliases, (*ties.holds, *readers))


def _require_unchanged(source: CheckpointRow, stand: Stand) -> None:
    """Raises unless what lies there is what the child was made from."""
    manifest = inspect(source.uri)
    if manifest.digest.rpartition(":")[2].lower() != source.manifest_digest:
        raise UsageError("another checkpoint stands there now")
    if stand.fresh:
        return
    assert stand.conversion is not None
    files = survey(manifest.root)
    used = {manifest.files[int(f)].path for f in set(manifest.items.file.tolist())}
    last = newest({path: seen for path, seen in files.items() if path in used})
    if last is None or datetime.fromtimestamp(last, UTC) > stand.conversion.started_at:
        raise UsageError(
            "it was written, moved or touched since it was converted; --fingerprint reads it anew"
        )


def _require_at_rest(seen: Mapping[str, Seen], uri: str, moved: Path | None = None) -> None:
    """Raises `SourceChanged` unless its files are those that were seen. moved: where they are now."""
    name = changed(seen, everything_at(str(moved or uri)), times=moved is None)
    if name is not None:
        raise SourceChanged(
            f"{join_url(uri, name) if name else uri} was written, moved or touched while this ran",
            hint="run again when nobody writes there",
        )


def _delete(catalog: Catalog, source: CheckpointRow, seen: Mapping[str, Seen]) -> None:
    moved: tuple[Path, Path] | None = None
    path = local_path(source.uri)
    names = _order(source.uri, seen) if path is None else []
    _require_at_rest(seen, source.uri)
    try:
        with catalog.writing() as conn:
            now = datetime.now(UTC)
            _mark(conn, now, source)
            if path is not None:
                moved = path, _moved_away(path)  # last in the transaction: no reader sees half of it
                _require_at_rest(seen, source.uri, moved[1])  # whoever saves from here on makes a new folder
            else:
                _require_at_rest(seen, source.uri)
    except BaseException:
        if moved is not None and not os.path.lexists(moved[0]):
            moved[1].rename(moved[0])
        raise
    if moved is not None:
        _remove(moved[1])
    else:
        _remove_remote(source.uri, names)


def _mark(conn: Any, now: datetime, source: CheckpointRow) -> None:
    _require_free(conn, now, source)
    if not tending.deleted(conn, now, source.id):
        raise Conflict("its row in the catalog changed meanwhile")


def _moved_away(path: Path) -> Path:
    away = path.with_name(f".{path.name}.{_AWAY}-{uuid.uuid4().hex[:8]}.ckptcore")
    try:
        path.rename(away)
    except OSError as error:
        raise UsageError(f"it cannot be moved away: {error.strerror}") from error
    return away


def _require_free(conn: Any, now: datetime, source: CheckpointRow) -> None:
    """Raises `Conflict` when somebody holds on to it now, or it is not below a watched root."""
    ties = tending.ties(conn, now, source.id)
    why: Sequence[str] = (*held(_entry(source, ties)),)
    if why:
        raise Conflict(f"{why[0]}, meanwhile")
    others = tending.inside(conn, source.uri)
    if others:
        raise Conflict(f"{others[0]} lies in it")
    above = [r.uri.rstrip("/") + "/" for r in roots.every(conn)]
    if not any(source.uri.startswith(a) for a in above):
        raise Conflict("it does not lie below a watched root")


def _order(uri: str, seen: Mapping[str, Seen]) -> list[str]:
    """What says where tensors lie goes first: a reader finds nothing rather than half of it."""
    used = inner_names(inspect(uri), uri)
    return sorted(seen, key=lambda name: name in used)


def _remove_remote(uri: str, names: Sequence[str]) -> None:
    """Removes what was seen and proven, and nothing that came since. An empty name: the place itself."""
    parent, itself = split_url(uri)
    with closing(open_store(parent if "" in names else uri)) as store:
        for name in names:
            store.remove(name or itself)


def _left(uri: str) -> list[Path]:
    path = local_path(uri)
    if path is None or not path.parent.is_dir():
        return []
    begins = f".{path.name}.{_AWAY}-"
    return [p for p in path.parent.iterdir() if p.name.startswith(begins) and p.name.endswith(".ckptcore")]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # what is left is removed by the next run
    else:
        path.unlink(missing_ok=True)
