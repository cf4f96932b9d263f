"""Let steps lose their optimizer in their own format and place. Nothing is changed by default.

1. `decide` names what a step would lose, and why it may not: it is among the newest of its run, is being
   written, is held by a user, is read now, or its format cannot be cut.
2. `carry_out` writes the thinned step beside it, reads both, and asks custody's gate. Then the two change
   places in one step, and the old one is set aside for a grace period, as `retire` does it.
3. A purge (`ckptcore retire --purge`) deletes the old one, once what stays is read in another place again.

A killed run leaves the old step at its place or the thinned one, complete; the next run on it ends the rest.
On an object store nothing can be set aside: there the old one is replaced object by object, without grace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from ckptcore.catalog import CheckpointDetail, maintenance, retirements
from ckptcore.catalog import holdings as recorded
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.database import clock
from ckptcore.catalog.heartbeats import RUNNING
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.retirements import THINNED, GivenUp, RetirementRecord
from ckptcore.catalog.sightings import Condition
from ckptcore.catalog.types import CheckpointRow, State
from ckptcore.catalog.watched_roots import RootRow
from ckptcore.checking.examine import inspect
from ckptcore.checking.source_stamps import published_stamp
from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.conversion.file_fingerprints import matching
from ckptcore.conversion.registration import facts, with_fingerprints
from ckptcore.conversion.staging.local_staging import LocalStaging
from ckptcore.conversion.staging.open_staging import at_rest, open_staging
from ckptcore.conversion.staging.staging import THINNING, Publication, Replaced, Staging, noted
from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import used
from ckptcore.custody.gate import judge
from ckptcore.custody.holdings import objects_of
from ckptcore.custody.place_ties import inside_of_place, ties_of_places, writer_of_place
from ckptcore.custody.replacing import GRACE, set_aside
from ckptcore.custody.set_aside import require_files
from ckptcore.errors import Busy, CkptError, Conflict, UsageError
from ckptcore.fingerprints.holdings import ids_of, numbered, pack_ids, tensor_holdings
from ckptcore.fingerprints.sums import Fingerprinted
from ckptcore.formats import FilePiece, SourceRange
from ckptcore.operations.claims import source_digest
from ckptcore.operations.readiness import SETTLE_S, look
from ckptcore.operations.recorded_run import recorded_run
from ckptcore.operations.retention.policy import user_reasons
from ckptcore.operations.retention.purge import purge
from ckptcore.operations.retention.root_retention import optimizers_kept
from ckptcore.operations.retention.setting_aside import retention_entry
from ckptcore.operations.retention.thin_plan import (
    OPTIMIZER,
    ProvenThin,
    ThinPlan,
    names_to_drop,
    plan_thin,
    prove_thin,
    size_of,
)
from ckptcore.planning.request import Settings
from ckptcore.store import FileWriter, Store, fetch, join_url, local_path, open_source_store, split_url
from ckptcore.store.file_status import FileStatus
from ckptcore.store.listing import contents, folder_at, list_settled_destination, require_no_mount, survey
from ckptcore.utils.foreign_text import load_json_object, parsing
from ckptcore.utils.isolation import attempt
from ckptcore.utils.merged_url import is_merged
from ckptcore.utils.step_names import step_of

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

VERB = "thin"


class ThinOutcome(StrEnum):
    """What becomes of a step.

    kept: by the policy, or by a user. unsafe: it cannot be thinned. thin: it has nothing of that. ready: it
    would be thinned. thinned: it was.
    """

    KEPT = "kept"
    UNSAFE = "unsafe"
    THIN = "thin"
    READY = "ready"
    THINNED = "thinned"


@dataclass(frozen=True)
class ThinDecision:
    """One step.

    Attributes:
        uri: Its path or URL.
        outcome: What becomes of it.
        why: The reasons.
        run: Its training run.
        step: Its step.
        plan: What it would lose, or lost.
        given_up: What goes, by name.
        checkpoint: Id in the catalog of what is there now.
        home: Where the old one can be restored from; empty: nowhere.
    """

    uri: str
    outcome: ThinOutcome
    why: tuple[str, ...] = ()
    run: str | None = None
    step: int | None = None
    plan: ThinPlan | None = field(default=None, repr=False)
    given_up: tuple[GivenUp, ...] = field(default=(), repr=False)
    checkpoint: str | None = None
    home: str = ""

    @property
    def before(self) -> int:
        """Bytes of its files."""
        return self.plan.before if self.plan is not None else 0

    @property
    def freed(self) -> int:
        """Bytes of files that it loses."""
        return self.plan.before - self.plan.after if self.plan is not None else 0

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        form = {name: getattr(self, name) for name in ("uri", "run", "step", "checkpoint", "home")}
        return form | {
            "outcome": self.outcome.value,
            "why": list(self.why),
            "bytes": self.before,
            "freed_bytes": self.freed,
            "given_up": [content.as_dict() for content in self.given_up],
            "given_up_totals": retirements.totals(self.given_up),
        }


@dataclass(frozen=True)
class ThinReport:
    """The result.

    Attributes:
        items: The steps.
        done: Whether this was more than a dry run.
        grace: How long what was set aside can be restored.
    """

    items: tuple[ThinDecision, ...]
    done: bool
    grace: timedelta = GRACE

    @property
    def counts(self) -> dict[str, int]:
        """ThinOutcome -> number of steps."""
        return {each.value: n for each in ThinOutcome if (n := sum(i.outcome is each for i in self.items))}

    @property
    def freed(self) -> int:
        """Bytes of files that the steps lose, now or by a purge."""
        return sum(i.freed for i in self.items)

    @property
    def exit_code(self) -> int:
        """0, or 1 if a step could not be thinned."""
        return int(any(i.outcome is ThinOutcome.UNSAFE for i in self.items))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "thinned": self.done,
            "counts": self.counts,
            "bytes": sum(i.before for i in self.items),
            "freed_bytes": self.freed,
            "grace_seconds": self.grace.total_seconds(),
            "checkpoints": [i.as_dict() for i in self.items],
        }


@dataclass(frozen=True, slots=True)
class ThinRules:
    """What goes, and which steps stay as they are.

    Attributes:
        drop: Kinds of training state, and globs on names of tensors, objects and files.
        keep_last: How many of the newest complete steps of a run keep what would go; None for what the
            retention of a watched root says that is named, otherwise one.
        min_age_s: Seconds without a change before a step may be thinned.
        grace: How long the old one can be restored; zero deletes it at once.
    """

    drop: tuple[str, ...] = (OPTIMIZER,)
    keep_last: int | None = None
    min_age_s: float = SETTLE_S
    grace: timedelta = GRACE

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise UsageError(
                f"--keep-optimizer-last must be at least 1 (got {self.keep_last})",
                hint="a run resumes from its newest step",
            )
        if not self.drop:
            raise UsageError("--drop must name something", hint=f"the default is {OPTIMIZER}")

    @property
    def newest(self) -> int:
        """How many of the newest steps keep what would go."""
        return 1 if self.keep_last is None else self.keep_last

    def of_root(self, root: RootRow) -> ThinRules:
        """Return the rules for all steps of a watched root."""
        return replace(self, keep_last=optimizers_kept(root)) if self.keep_last is None else self


_Newest = Callable[[str, str | None, ThinRules], Sequence[int]]


def thin(
    catalog: Catalog,
    sources: Sequence[str],
    rules: ThinRules,
    settings: Settings,
    *,
    yes: bool = False,
    on_item: Callable[[ThinDecision], None] | None = None,
) -> ThinReport:
    """Thin steps.

    Args:
        catalog: The catalog.
        sources: Paths or URLs of steps, or names of watched roots or runs for all of their steps.
        rules: What goes, and which steps stay as they are.
        settings: Memory and threads for reading.
        yes: Thin them; otherwise nothing is changed.
        on_item: Called for each step.

    Returns:
        The steps, each with what became of it.

    Raises:
        UsageError: A name is no step, root or run.
    """
    items = []
    newest = cache(partial(_newest, catalog))
    rules_of: dict[str, ThinRules] = {}
    for source in sources:
        for uri, source_rules in _places(catalog, source, rules):
            rules_of.setdefault(uri, source_rules)
    for uri, own_rules in rules_of.items():
        item = attempt(_decided, catalog, uri, own_rules, newest, settings, yes)
        if isinstance(item, CkptError):
            outcome = ThinOutcome.KEPT if isinstance(item, (Busy, Conflict)) else ThinOutcome.UNSAFE
            item = ThinDecision(uri, outcome, (f"{item.code}: {item.message}",), step=_step(uri))
        items.append(item)
        if on_item is not None:
            on_item(item)
    return ThinReport(tuple(items), yes, rules.grace)


def _places(catalog: Catalog, source: str, rules: ThinRules) -> Iterator[tuple[str, ThinRules]]:
    """Yield the steps that a name means, oldest first, and their rules."""
    with catalog.reading() as conn:
        root = next((root for root in roots.every(conn) if root.name == source), None)
        rows = maintenance.sources(conn, [root.uri]) if root is not None else ()
        if root is None and "/" not in source:
            rows = maintenance.sources(conn, (), source)
    if root is not None:
        rules = rules.of_root(root)
    elif not rows:
        yield normal_uri(source), rules
    for row in sorted(rows, key=lambda row: (row.run or "", row.step or 0)):
        yield row.uri, rules


def _step(uri: str) -> int | None:
    return step_of(split_url(uri)[1])


def _decided(
    catalog: Catalog, uri: str, rules: ThinRules, newest: _Newest, settings: Settings, yes: bool
) -> ThinDecision:
    """Return what becomes of one step; raise `CkptError` if it cannot be thinned."""
    if yes:
        _end_killed_run(catalog, uri, rules, settings)
    files = survey(uri)  # a place where nothing is, is no step
    row = _row(catalog, uri)
    step = row.step if row is not None and row.step is not None else _step(uri)
    item = ThinDecision(uri, ThinOutcome.KEPT, (), row.run if row is not None else None, step)
    reason = _reason_to_keep(catalog, uri, files, row, step, rules, newest)
    if reason:
        return replace(item, why=(reason,))
    _require_place(uri, rules)
    plan = plan_thin(uri, rules.drop)
    if plan is None:
        return replace(item, outcome=ThinOutcome.THIN, why=(f"it has nothing of {', '.join(rules.drop)}",))
    ready = replace(item, outcome=ThinOutcome.READY, plan=plan, given_up=plan.given_up)
    return _carried_out(catalog, ready, rules, settings) if yes else ready


def _row(catalog: Catalog, uri: str) -> CheckpointRow | None:
    row_and_files = catalog.at(uri)
    row = row_and_files[0] if row_and_files is not None else None
    return row if row is not None and row.state == State.PRESENT.value else None


def _reason_to_keep(
    catalog: Catalog,
    uri: str,
    files: Mapping[str, FileStatus],
    row: CheckpointRow | None,
    step: int | None,
    rules: ThinRules,
    newest: _Newest,
) -> str:
    """Return why a step stays as it is; empty if it may be thinned."""
    if step is None:
        return "no step is known"
    kept_steps = newest(split_url(uri)[0], row.run if row is not None else None, rules)
    if not kept_steps or step >= kept_steps[-1]:
        return f"one of the last {rules.newest} complete steps" if kept_steps else "no newer step is complete"
    ready = look(uri, files, None, catalog.now(), settle_s=rules.min_age_s)
    if ready.state is not Condition.COMPLETE:
        return f"it is {ready.state.value}: {ready.message}"
    with catalog.reading() as conn:
        return _ties(conn, uri, row)


def _ties(conn: Any, uri: str, row: CheckpointRow | None, conversion: str = "") -> str:
    """Return a user's reason to keep a step, or what is at work on it. conversion: the one that asks."""
    now = clock(conn)
    if row is not None:
        ties = ties_of_places(conn, now, [row])[row.id]
        ties = replace(
            ties, readers=tuple(reader for reader in ties.readers if reader.split(" ")[0] != conversion)
        )
        reasons = user_reasons(retention_entry(row, ties))
        if reasons:
            return reasons[0]
    else:
        readers = maintenance.ties_at(conn, now, [uri]).get(uri, maintenance.Ties()).readers
        if other_readers := [reader for reader in readers if reader != conversion]:
            return f"{other_readers[0]} reads it"
    if inner := inside_of_place(conn, uri):
        return f"{inner[0]} is inside it"
    writer = writer_of_place(conn, uri)
    return f"conversion {writer} writes to it" if writer not in (None, conversion) else ""


def _newest(catalog: Catalog, folder: str, run: str | None, rules: ThinRules) -> tuple[int, ...]:
    """Return the newest complete steps of a run that have what would go, the last one first.

    There are as many as the policy keeps, or none: what is being written, or was thinned, does not count. The
    steps are those in the same folder, and those of the run in the catalog.
    """
    steps: dict[int, str] = {}
    for name in folder_at(folder).folders:
        step = step_of(name)
        if step is not None and not name.startswith("."):
            steps.setdefault(step, join_url(folder, name))
    if run is not None:
        with catalog.reading() as conn:
            for row in maintenance.sources(conn, (), run):
                if row.step is not None:
                    steps.setdefault(row.step, row.uri)
    newest = []
    for step in sorted(steps, reverse=True):
        if _resumes(catalog, steps[step], rules):
            newest.append(step)
        if len(newest) == rules.newest:
            return tuple(newest)
    return ()


def _resumes(catalog: Catalog, uri: str, rules: ThinRules) -> bool:
    """Return whether a step is complete, and has what would go."""
    files = attempt(survey, uri)
    if isinstance(files, CkptError):
        return False
    ready = look(uri, files, None, catalog.now(), settle_s=0)
    if ready.state is not Condition.COMPLETE or ready.manifest is None:
        return False
    names = names_to_drop(ready.manifest, rules.drop)
    if any(name in ready.manifest.index for name in names):
        return True
    # Objects that are stored with others stay in a thinned step, too.
    return attempt(plan_thin, uri, rules.drop) is not None


def _require_place(uri: str, rules: ThinRules) -> None:
    """Raise `UsageError` for a place that is several, is mounted, is another user's, or needs no grace."""
    path = local_path(uri)
    if is_merged(uri):
        raise UsageError(f"cannot thin {uri}: it is several folders")
    if path is None:
        if rules.grace > timedelta(0):
            raise UsageError(
                f"cannot set {uri} aside: objects cannot be moved",
                hint="--grace 0 replaces it object by object; no reader can use it meanwhile",
            )
        return
    if os.path.realpath(path) != os.path.abspath(path):
        raise UsageError(f"cannot thin {uri}: a link is on the way", hint=f"name {os.path.realpath(path)}")
    require_no_mount(uri)
    owner = os.stat(path).st_uid
    if owner != os.geteuid():
        raise UsageError(
            f"cannot thin {uri}: it is another user's (uid {owner}), who could not write to the new one",
            hint="run the command as that user",
        )


def _carried_out(catalog: Catalog, item: ThinDecision, rules: ThinRules, settings: Settings) -> ThinDecision:
    """Thin one step; raise `CkptError` if it stays as it is."""
    plan = item.plan
    assert plan is not None  # it is ready
    with _recorded(catalog, plan.uri, rules.drop) as conversion:
        staging = open_staging(plan.uri, catalog)
        with staging.lock(make=True):
            _begin_staging(staging)
            try:
                staged = _staged(catalog, staging, plan, rules, settings, conversion)
            except BaseException:
                staging.remove()
                raise
            commit = _loadable(staged.proven.manifest, plan.files)
            staging.publish(staged.publication, commit, single=False)
            checkpoint = _record(catalog, conversion, plan.uri, staged.begun, staged.proven.tensors)
            staging.remove()
    name = staged.publication.replaces.home
    home = join_url(split_url(plan.uri)[0], name) if name else ""
    item = replace(
        item, outcome=ThinOutcome.THINNED, given_up=staged.begun.given_up, checkpoint=checkpoint, home=home
    )
    if not home or rules.grace > timedelta(0):
        return item
    purged = [row for row in purge(catalog, settings, [plan.uri], due=catalog.now()) if row.record == home]
    left = tuple(row.why for row in purged if row.why)
    return replace(item, why=left, home=home if left else "")


@dataclass(frozen=True, slots=True)
class _Staged:
    """A thinned step that may change places with the old one: read, and admitted by the gate."""

    proven: ProvenThin
    publication: Publication
    begun: _Begun


def _staged(
    catalog: Catalog, staging: Staging, plan: ThinPlan, rules: ThinRules, settings: Settings, conversion: str
) -> _Staged:
    """Write a thinned step beside the old one, read both, and ask whether they may change places."""
    written = stage(staging, plan.uri, plan.manifest.versions, plan.files)
    proven = prove_thin(plan, staging.files.url, settings)
    given_up = tuple(content for content in plan.given_up if content.name in proven.gone)
    judged = judge(catalog, plan.uri, settings, at_rest, staying=ids_of(proven.holdings))
    if judged.moves:
        raise Conflict(
            f"an obligation counts on what would go from {plan.uri}",
            hint="see ckptcore catalog obligation list",
        )
    row = _row(catalog, plan.uri)
    if row is None:
        catalog.record_validation(facts(plan.manifest, plan.uri, verified="coverage", training=True))
        row = _row(catalog, plan.uri)
    assert row is not None  # it was recorded
    inventory = list_settled_destination(plan.uri)
    require_files(plan.uri, plan.things, contents(plan.uri))
    with catalog.reading() as conn:
        if reason := _ties(conn, plan.uri, row, conversion):
            raise Conflict(f"{reason}, meanwhile")
    RUNNING.require(catalog.renew, conversion)  # else others may count on the step by now
    begun = _Begun(row.id, source_digest(plan.manifest), plan.before - plan.after, given_up)
    staging.plan.put(_BEGUN, begun.dump())
    home = ""
    if local_path(plan.uri) is not None:
        home = set_aside(catalog, plan.uri, rules.grace, proven.holdings, given_up)
    first = tuple(name for name in inventory if name not in used(plan.manifest).data)
    replaces = Replaced(inventory, first, judged, home)
    return _Staged(proven, Publication(plan.digest, None, "", replaces, written), begun)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What a run records beside a step before it changes places: the next one registers what it published.

    Attributes:
        checkpoint: Id of the step until now.
        source: Its `ckptcore.operations.claims.source_digest`.
        freed: Bytes of files that it loses.
        given_up: What goes, by name.
    """

    checkpoint: str
    source: str
    freed: int
    given_up: tuple[GivenUp, ...]

    def dump(self) -> bytes:
        """Return the JSON form."""
        form = {"checkpoint": self.checkpoint, "source": self.source, "freed": self.freed}
        return canonical_json(form | {"given_up": [content.as_dict() for content in self.given_up]})

    @classmethod
    def load(cls, data: bytes) -> _Begun:
        """Read the form of `dump`; raise `InvalidText` for other data."""
        with parsing("a record of thin"):
            form = load_json_object(data)
            given_up = tuple(GivenUp(g["name"], g["kind"], g["bytes"]) for g in form["given_up"])
            return cls(str(form["checkpoint"]), str(form["source"]), int(form["freed"]), given_up)


_BEGUN = "thin.json"
_BLOCK = 8 << 20
Written = tuple[int, str | None]  # bytes, and the BLAKE3 of a file whose bytes passed through this process


def stage(
    staging: Staging, root: str, versions: Mapping[str, str | None], files: Mapping[str, Sequence[FilePiece]]
) -> dict[str, Written]:
    """Write the files of a checkpoint from which names are left out into its staging folder, durably.

    Nothing is encoded: every file is pieces of the source's files, copied by the kernel where both are local,
    and as extents that they share where the file system can do that (copy_file_range(2)).

    Args:
        staging: The staging folder of the checkpoint's place, locked and without files.
        root: Path or URL of the checkpoint.
        versions: Path -> version of its files, which must still be there.
        files: Path -> pieces of each file.

    Returns:
        Path -> bytes and digest of each.

    Raises:
        DiskFull: There is no room for them.
        SourceChanged: A file of the source was rewritten.
    """
    staging.require_room(sum(map(size_of, files.values())))
    written: dict[str, Written] = {}
    with closing(open_source_store(root, versions)) as source, closing(staging.files):
        for path, pieces in files.items():
            staging.require_lease()
            written[path] = _write(source, staging.files, path, pieces)
    if isinstance(staging, LocalStaging):
        staging.take_times(root)
    return written


def _write(source: Store, target: Store, path: str, pieces: Sequence[FilePiece]) -> Written:
    nbytes, offset = size_of(pieces), 0
    hasher = blake3()
    writer = target.writer(path, nbytes)
    try:
        for piece in pieces:
            if isinstance(piece, SourceRange):
                offset += _copy(source, writer, piece, offset, hasher)
            else:
                writer.write(offset, piece)
                hasher.update(piece)
                offset += len(piece)
    except BaseException:
        writer.abort()
        raise
    writer.commit()
    return nbytes, hasher.hexdigest() if writer.sequential else None


def _copy(source: Store, writer: FileWriter, piece: SourceRange, offset: int, hasher: blake3) -> int:
    if not piece.nbytes or writer.copy(source, piece.path, piece.start, piece.nbytes, offset):
        return piece.nbytes
    for first in range(0, piece.nbytes, _BLOCK):
        data = source.read(piece.path, piece.start + first, min(_BLOCK, piece.nbytes - first))
        writer.write(offset + first, data)
        hasher.update(data)
    return piece.nbytes


def _begin_staging(staging: Staging) -> None:
    """Empty the staging folder of a step, unless a conversion to its place was begun there."""
    staging.finish_interrupted_publish()
    if fetch(staging.plan, "head.json") is not None:
        raise Conflict(
            f"a conversion to {staging.destination} was begun, and is not published",
            hint=f"run it again, or remove what is left of it: ckptcore gc {staging.parent}",
        )
    staging.clear()


def _loadable(manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return the files that make a checkpoint loadable: those without tensors."""
    data = used(manifest).data
    return [name for name in names if name not in data]


def _recorded(catalog: Catalog, uri: str, drop: Sequence[str]) -> AbstractContextManager[str]:
    """Record in the catalog that a step is written; yield the id."""
    return recorded_run(catalog, VERB, uri, uri, {"drop": list(drop)})


def _record(
    catalog: Catalog, conversion: str, uri: str, begun: _Begun, tensors: Sequence[Fingerprinted]
) -> str:
    """Record a thinned step that is at its place; return its id."""
    manifest = inspect(uri)
    step_facts = with_fingerprints(
        facts(manifest, uri, verified="coverage", training=True), matching(manifest, tensors, {})
    )
    stamp = published_stamp(manifest) if step_facts.fingerprint is not None else None
    record = RetirementRecord("", THINNED, step_facts.fingerprint, begun.freed, begun.given_up)
    warnings = [f for f in manifest.findings if f.severity == "warning"]
    detail = catalog.show(begun.checkpoint, tensors=False)
    assert isinstance(detail, CheckpointDetail)  # it is the id of a checkpoint
    digests = (begun.source, source_digest(manifest))
    public = catalog.thinned(
        conversion, detail.checkpoint, replace(step_facts, stamp=stamp), warnings, record, digests
    )
    ids = ids_of(numbered(tensor_holdings(tensors, {}))) | ids_of(objects_of(manifest))
    with catalog.writing() as conn:  # where a gate looks for what stays
        recorded.keep(conn, public, pack_ids(ids), stamp)
    return public


def _end_killed_run(catalog: Catalog, uri: str, rules: ThinRules, settings: Settings) -> None:
    """Finish what a killed run began at a step: what it published is recorded, anything else removed."""
    staging = open_staging(uri, catalog)
    record, data = noted(staging), fetch(staging.plan, _BEGUN)
    if data is None or (record is not None and not record.plan.startswith(THINNING)):
        return
    begun = _Begun.load(data)
    with staging.lock():
        staging.finish_interrupted_publish()
        record = noted(staging)
        halfway = record is not None and staging.publishing_plan(record) == record.plan
        if record is not None and (halfway or staging.published_plan(record) == record.plan):
            with _recorded(catalog, uri, rules.drop) as conversion:
                if halfway:
                    names = _loadable(inspect(staging.files.url), record.puts)
                    staging.publish(record, names, single=False)
                manifest = inspect(uri)
                sums = fingerprint(manifest, settings).tensors if manifest.tensors else ()
                _record(catalog, conversion, uri, begun, sums)
        staging.remove()
