"""Stage an output until it is complete: one interface for local folders and for object stores.

The staging folder is beside the destination: ``/a/.b.ckptcore/`` for ``/a/b``, with ``plan/``, ``receipts/``,
``files/`` and the `Publication`, which describes a publication before its first change, so that a rerun can
finish it. A killed run leaves it, and the next one resumes from it.
`local_staging` beside this file is the folder on this machine, `remote_publication` the prefix of an object
store, and `s3_staging` that of a store with uploads and leases. `open_staging` chooses by the destination.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckptcore.checking.source_stamps import require_same
from ckptcore.core.columnar_file import canonical_json
from ckptcore.custody.judged import Judged
from ckptcore.errors import AlteredInTransit, CkptError, Finding, OutputMismatch, UsageError
from ckptcore.execution.join_parts import join_parts
from ckptcore.execution.parts import FilePart
from ckptcore.execution.plan_run import PlanRun
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.plan import Plan, PlannedFile, load_file_plan
from ckptcore.planning.request import Settings
from ckptcore.store import Readable, Store, fetch, join_url, split_url
from ckptcore.store.ahead import ReadsAhead
from ckptcore.store.file_status import FileStatus
from ckptcore.store.listing import Inventory
from ckptcore.utils.foreign_text import load_json

if TYPE_CHECKING:
    from ckptcore.planning.compose import Composed
    from ckptcore.store.objects.uploaded import Uploaded
    from ckptcore.store.objects.uploads import Uploads


REPLACES = "replaces.json"
ITSELF = ""  # the name, below the destination, of a destination that is one file
# Steps of a publication, in order. REMOVING, PUTTING: on an object store; MOVING: on this machine.
MOVING, REMOVING, PUTTING, DONE = "moving", "removing", "putting", "done"
THINNING = "thin-"  # of the plan of a publication that only leaves things out of what is at its place


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a publication may replace.

    Attributes:
        inventory: All of it; empty for nothing.
        first: Files that make it loadable; they are removed before the files with its tensors.
        judged: What the gate decided about it (`ckptcore.custody.gate`); None if it was not asked.
        home: Name of the folder beside the destination that it is moved into; "" if it is removed.
    """

    inventory: Inventory = field(default_factory=dict)
    first: tuple[str, ...] = ()
    judged: Judged | None = None
    home: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        form: dict[str, Any] = {"inventory": _listed(self.inventory)}
        judged = None if self.judged is None else self.judged.as_dict()
        return form | {"first": list(self.first), "judged": judged, "home": self.home}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Replaced:
        """Read the form of `as_dict`."""
        judged = form.get("judged")
        return cls(
            _inventory_of(form["inventory"]),
            tuple(form["first"]),
            None if judged is None else Judged.from_dict(judged),
            str(form.get("home", "")),
        )


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication that was begun.

    Attributes:
        plan: The plan's digest.
        identity: (device, inode, mtime in ns) of what is moved into place; None on an object store.
        step: The current step; "" before the first.
        replaces: What may be replaced.
        puts: Name -> (bytes, BLAKE3 or None) of every file.
        published: The content of the destination after all files were written.
        receipts: Of its files.
    """

    plan: str
    identity: tuple[int, ...] | None
    step: str = ""
    replaces: Replaced = field(default_factory=Replaced)
    puts: Mapping[str, tuple[int, str | None]] = field(default_factory=dict)
    published: Inventory = field(default_factory=dict)
    receipts: tuple[Receipt, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "plan": self.plan,
            "identity": None if self.identity is None else list(self.identity),
            "step": self.step,
            "replaces": self.replaces.as_dict(),
            "puts": {name: list(put) for name, put in self.puts.items()},
            "there": _listed(self.published),
            # Receipts are part of the record: the files of receipts may be removed before the record is.
            "receipts": [{**r.as_dict(), **r.packed()} for r in self.receipts],
        }

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Publication:
        """Read the form of `as_dict`."""
        identity = form["identity"]
        return cls(
            str(form["plan"]),
            None if identity is None else tuple(identity),
            str(form["step"]),
            Replaced.from_dict(form["replaces"]),
            {name: (int(nbytes), digest) for name, (nbytes, digest) in form["puts"].items()},
            _inventory_of(form["there"]),
            tuple(map(Receipt.from_dict, form["receipts"])),
        )


def packed_replaced(replaced: Replaced) -> tuple[str, bytes]:
    """Return the name and the bytes of the record of what may be replaced."""
    return REPLACES, canonical_json(replaced.as_dict())


def _listed(inventory: Inventory) -> dict[str, list[Any]]:
    return {name: status.as_list() for name, status in inventory.items()}


def _inventory_of(form: Mapping[str, list[Any]]) -> dict[str, FileStatus]:
    return {name: FileStatus.of_list(status) for name, status in form.items()}


PUBLISHING = "publishing.json"  # written right before the move: records the plan that is published
REPLACED = "replaced"  # the old output that a new one replaced
LOCK, PARTS = "lock", ("plan", "receipts", "files")
RECORDS = ("request.json", "replaces.json", PUBLISHING)
DRAFT = f"{PARTS[0]}/{PUBLISHING}"  # a record on its way, among what every version removes
UPLOADS, LEASE = "uploads", "lease.json"  # on object stores: the journal of uploads, and the lock
_RERUN = "run the same command again: it verifies the output, and records that"
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class UploadCompletion:
    """What completes the uploads of an output.

    Attributes:
        uploads: The uploads of the plan.
        handles: Name below the destination -> upload.
        publish: Completes them, and publishes the rest: see `ckptcore.conversion.staging.s3_staging`.
    """

    uploads: Uploads
    handles: Mapping[str, Uploaded]
    publish: Callable[
        [Publication, Collection[str], Mapping[str, int], Callable[[Readable], object], Inventory | None],
        tuple[Finding, ...],
    ]


class Staging(ABC):
    """The staging folder of one destination. Stores: root, plan, receipts, files.

    Args:
        destination: Path or URL of the output.
    """

    def __init__(self, destination: str) -> None:
        parent, name = split_url(destination)
        if not name:
            raise UsageError(f"cannot write to {destination!r}: it has no name")
        self.destination, self.name, self.parent = destination.rstrip("/") or "/", name, parent
        # Beside the destination: a rename needs one file system, and a hidden name
        # is skipped by those who list checkpoints.
        self.url = join_url(parent, f".{name}.ckptcore")
        self.root = self._store()
        self.plan, self.receipts, self.files = map(self._store, PARTS)
        # Raises if the catalog counts this run as ended.
        self.require_row: Callable[[], object] = lambda: None

    @abstractmethod
    def _store(self, *inside: str) -> Store:
        """Return the store of the staging folder, or of a folder in it."""

    @property
    def plan_uri(self) -> str:
        """Where the plan is stored; a worker needs nothing else."""
        return self.plan.url

    @property
    def lock_fd(self) -> int | None:
        """The descriptor of this object's lock, for processes that help its owner; None without one."""
        return None

    @property
    def scratch(self) -> str | None:
        """A folder on this machine for decoded items; None for the system's."""
        return None

    @abstractmethod
    def lock(self, *, shared: bool = False, make: bool = False) -> AbstractContextManager[None]:
        """Lock the destination against other runs.

        Args:
            shared: A shared lock, for several workers of one plan.
            make: The caller is about to plan: create what is missing.

        Raises:
            Busy: Another process has the lock.
        """

    @abstractmethod
    def require_lease(self) -> None:
        """Raise `Busy` if another run took over the destination."""

    def look_ahead(self, look: Callable[[], object]) -> Collection[str] | None:
        """Look at what a conversion needs before it plans; ``look`` looks at the destination.

        Returns:
            The names of the staged objects, if they were listed meanwhile.
        """
        look()
        return None

    def together(self, calls: Sequence[Callable[[], object]]) -> Sequence[object]:
        """Make calls that do not need each other: an object store gets their requests at once.

        Returns:
            What they return.
        """
        return [call() for call in calls]

    @abstractmethod
    def published_plan(self, record: Publication | None) -> str | None:
        """Return the digest of the plan whose output is at the destination, or None.

        There is one if an earlier run published it and stopped before it removed its staging folder.
        """

    def publishing_plan(self, record: Publication | None) -> str | None:
        """Return the digest of the plan that an earlier run began to copy to the destination, or None."""
        return None

    @abstractmethod
    def finish_interrupted_publish(self) -> None:
        """Finish or take back a publication in one step that a killed run left unfinished."""

    @abstractmethod
    def publish(self, publication: Publication, commit: Collection[str], *, single: bool) -> None:
        """Record a publication, then bring the staged files to the destination.

        Args:
            publication: New, or as an earlier run recorded it.
            commit: The files that make the folder loadable.
            single: The output is one file.

        Raises:
            DestinationExists: Something else appeared at the destination; it stays.
        """

    @abstractmethod
    def is_unchanged(self, record: Publication | None, receipts: Sequence[Receipt], output: Readable) -> bool:
        """Report whether an output that was published is still what was written."""

    @abstractmethod
    def require_planned(self, planned: Collection[str]) -> dict[str, int]:
        """Raise `OutputMismatch` for staged files and folders that are not in the plan.

        Returns:
            Path -> bytes of what is staged as a whole, on an object store; nothing on this machine.
        """

    def _unplanned(self, names: Sequence[str]) -> OutputMismatch:
        return OutputMismatch(
            f"cannot publish {self.files.url}: {len(names)} of its files are not in the plan "
            f"(got {', '.join(names[:5])!r})",
            hint="move them away if they are yours, or try --no-resume: it removes all staged files",
            files=list(names[:100]),
        )

    @abstractmethod
    def check_staged_plan(self, composed: Composed, stamps: dict[str, str | None]) -> None:
        """Compare an earlier run's staging folder with the same plan, before files are added.

        Raises `OutputMismatch` for staged files that are not in the plan.
        """

    @abstractmethod
    def require_room(self, nbytes: int) -> None:
        """Raise `DiskFull` if fewer bytes are free than are still to be written."""

    def run(
        self, plan: Plan, source: Store, stamps: Mapping[str, str | None], settings: Settings | None = None
    ) -> PlanRun:
        """Return what carries out a staged plan.

        Args:
            plan: The plan.
            source: The checkpoint's folder.
            stamps: The stamps of the source's files.
            settings: Memory of a run that writes.
        """
        return PlanRun(
            digest=plan.digest,
            load=partial(load_file_plan, self.plan),
            total=plan.bytes_out,
            source=source,
            items=plan.items,
            # Where every request is for the version of its stamp, each read proves it.
            unchanged=_ignore
            if isinstance(source, ReadsAhead) and source.pins
            else partial(require_same, stamps, source),
            files=self.files,
            receipts=self.receipts,
            scratch=self.scratch,
            uploads=self.uploads_of(plan, settings),
        )

    def uploads_of(self, plan: Plan, settings: Settings | None = None) -> Uploads | None:
        """Return the uploads of a plan; None where files are staged as a whole."""
        return None

    def begin_uploads(self, plan: Plan, settings: Settings) -> Uploads | None:
        """Begin the first uploads of a plan that this process carries out, while it is saved; return them."""
        return None

    def beside_uploads(self, files: tuple[PlannedFile, ...], settings: Settings) -> Settings:
        """Return the settings with the memory that uploads of files leave; raise `BudgetTooSmall`."""
        return settings

    def completion(self, plan: Plan, receipts: Sequence[Receipt]) -> UploadCompletion | None:
        """Return what completes the uploads of an output; None if it is staged as a whole."""
        return None

    def cut(self, plan: Plan, file: FilePlan, nbytes: int, settings: Settings) -> tuple[FilePart, ...]:
        """Cut an output file into parts of about ``nbytes``; empty if one worker must write it."""
        return ()

    def join(self, plan: Plan, file: FilePlan) -> Receipt:
        """Join the parts of an output file."""
        return join_parts(file, plan.digest, self.files, self.receipts)

    def put_record(self, data: bytes, *, over: bool) -> None:
        """Write the record of a publication. over: there is one, which stays if this arrives altered."""
        self.root.put(PUBLISHING, data)

    @abstractmethod
    def sweep_gone(self) -> None:
        """Remove what a run that was killed in `remove` left, if it is ours and can be removed."""

    @abstractmethod
    def sweep_parts(self, *, joints: bool = False) -> None:
        """Remove unfinished files of killed writers. joints: also files whose parts were never joined."""

    def is_unused(self) -> bool:
        """Return whether there is a staging folder without finished, published or foreign files."""
        return False

    def clear(self, *, publication: bool = True, names: Collection[str] | None = None) -> None:
        """Remove everything but the lock from the folder, and abort its uploads.

        Args:
            publication: Also remove the record of a publication.
            names: What is staged on an object store, if it was listed a moment ago under the same lease.
        """
        for part in (self.plan, self.receipts, self.files):
            part.remove_all()
        if publication and self.root.size(PUBLISHING) is not None:  # removing nothing needs a right, too
            self.root.remove(PUBLISHING)

    @abstractmethod
    def remove(self) -> None:
        """Remove the staging folder; no later run resumes in a part of it."""


def _ignore(paths: Sequence[str]) -> None:
    """Do nothing."""


def note(staging: Staging, publication: Publication, before: Publication | None = None) -> None:
    """Record a publication and its step.

    A record that arrives altered is removed, and without any the next run would take the output for another
    program's. So a step over another one is written beside it, and copied by the store when it is proven; on
    a store that does not copy, the one before is written once more.

    Args:
        staging: The staging folder.
        publication: What is recorded.
        before: The same publication as it is recorded now; None for no record.

    Raises:
        AlteredInTransit: The step could not be recorded.
    """
    try:
        staging.put_record(canonical_json(publication.as_dict()), over=before is not None)
    except AlteredInTransit as error:
        if before is None:
            raise
        # The altered record was removed, or the one before it is still
        # there: that decides what a rerun can do.
        has_record = _has_record(staging)
        if not has_record:
            with suppress(CkptError):  # the error that is raised says what to do without it
                note(staging, before)
                has_record = True
        # Before the last step the output is not complete: the rerun goes on, whatever is recorded.
        if publication.step != DONE:
            raise
        compare = f"compare it with its source (ckptcore diff SRC {staging.destination}), then remove "
        compare += f"what is left of the conversion: ckptcore gc {staging.parent}"
        raise AlteredInTransit(
            f"{staging.destination} is complete, but that cannot be recorded: {error.message}",
            hint=f"{_RERUN if has_record else compare}. Check this machine's memory and network",
        ) from error


def _has_record(staging: Staging) -> bool:
    """Return whether there is a record still, as far as the store answers."""
    with suppress(CkptError):
        return noted(staging) is not None
    return False


def noted(staging: Staging) -> Publication | None:
    """Return the publication that a run began, or None.

    Also None for a record that a crash truncated: nothing changes before the record is complete.
    """
    return _parsed(staging.root, PUBLISHING, Publication.from_dict)


def noted_replaced(staging: Staging) -> Replaced | None:
    """Return what may be replaced by the plan; None if there is no record, or it is truncated."""
    return _parsed(staging.root, REPLACES, Replaced.from_dict)


def _parsed(store: Store, name: str, parse: Callable[[Any], _Record]) -> _Record | None:
    """Return a record; None if there is none, or it is no JSON, or not of its form."""
    data = fetch(store, name)
    if data is None:
        return None
    try:
        return parse(load_json(data))
    # A damaged record of any form is no record: nothing changes before it is complete.
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
