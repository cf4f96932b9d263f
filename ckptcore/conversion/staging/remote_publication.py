"""Stage an output on an object store, below a prefix beside its destination, and publish it without a rename.

Any file system that fsspec reaches will do. Such a store has no conditions: equal runs write equal bytes.
`ckptcore.conversion.staging.s3_staging` is for stores that have them.

Objects are copied one at a time, by lists that were recorded before the first change:

    removing   remove the files that make the old output loadable: readers find nothing rather than a mixture
    putting    write the new files, except those that make the folder loadable; remove the rest of the old
               ones; then write the files that make the folder loadable
    done       the output is complete; a rerun verifies that, and changes nothing

Every object is checked right before it is removed or overwritten. An object that is neither the recorded old
one nor the new one is foreign: it stays, and the publication stops. Where the store knows conditions, each
request states what was found there, so that an object that appears after the check stays, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptcore.conversion.staging.staged_plan import put_extra
from ckptcore.conversion.staging.staging import (
    DONE,
    ITSELF,
    PUTTING,
    RECORDS,
    REMOVING,
    THINNING,
    Publication,
    Staging,
    note,
    noted,
)
from ckptcore.errors import (
    Busy,
    CkptError,
    Conflict,
    DestinationExists,
    DestinationUnwritable,
    OutputMismatch,
)
from ckptcore.execution.receipts import Receipt
from ckptcore.planning.compose import Composed
from ckptcore.reading.file_digests import digest_of, has_digest
from ckptcore.store import Readable, Store, fetch, join_url, open_store
from ckptcore.store.file_status import FileStatus, same_object
from ckptcore.store.listing import Inventory, list_destination
from ckptcore.utils.part_digest import hasher_like

if TYPE_CHECKING:
    from ckptcore.store.objects.uploaded import Uploaded

_log = logging.getLogger("ckptcore")
HINT = "inspect it, move it away, and run the same command again"
_TRIES = 4  # of a conditional request: what was found there may change, or the reply was lost


class Destination:
    """The destination of a publication by names below it; `ITSELF` is the object of its own name.

    Attributes:
        staging: The staging prefix.
        publication: What is published.
        handles: Name -> upload, of the files that are uploaded to the destination.
    """

    def __init__(
        self, staging: Staging, publication: Publication, handles: Mapping[str, Uploaded] | None = None
    ) -> None:
        self.staging, self.publication, self.handles = staging, publication, handles or {}

    def store_of(self, name: str) -> tuple[Store, str]:
        """Return (store, name in it) of a name of the destination."""
        if name == ITSELF:
            return open_store(self.staging.parent), self.staging.name
        return open_store(self.staging.destination), name

    def url_of(self, name: str) -> str:
        """Return the URL of a name."""
        return self.staging.destination if name == ITSELF else f"{self.staging.destination}/{name}"

    def look(self, name: str) -> FileStatus | None:
        """Return the current object of a name, or None."""
        store, inner = self.store_of(name)
        return list_destination(join_url(store.url, inner)).get("")

    def written_meanwhile(self, name: str) -> DestinationExists:
        """Return the error for an object that is neither the recorded old one nor the new one."""
        return DestinationExists(f"{self.url_of(name)} was written meanwhile", hint=HINT)

    def remove(self, name: str, old: FileStatus) -> None:
        """Remove one object, which is still the recorded one."""
        store, inner = self.store_of(name)
        store.remove(inner)

    def write(self, name: str, old: FileStatus | None) -> None:
        """Write a staged file to its place, if the store still has there what was found."""
        store, inner = self.store_of(name)
        self.staging.files.copy_to(name or self.staging.name, store, inner)

    def put(self, name: str, beside: Callable[[], object] | None = None) -> None:
        """Put one file into place: if the name is free or has the recorded object, but not over its equal.

        beside: Called when an upload is completed, while it is looked at.
        """
        self.staging.require_lease()
        from ckptcore.store.objects.retry import Kind, kind_of  # a late import: others send no requests

        refused: CkptError | None = None
        # What is at the name is looked at anew each time, since each refusal says that it changed.
        for _ in range(_TRIES):
            now = self.look(name)
            recorded = self.publication.replaces.inventory.get(name)
            if now is not None and not same_object(now, recorded):
                # Written by an earlier try, or by the run that was killed: it is in its place.
                if self.holds(name, now):
                    return
                raise self.written_meanwhile(name)
            try:
                self.write(name, now)
            except CkptError as error:
                # Something else is there now. It may be this very file: the reply to a request was lost.
                # These say that the condition failed, not that the store failed.
                if kind_of(error) not in (Kind.EXISTS, Kind.CHANGED, Kind.MISSING):
                    raise
                refused = error
            else:
                return
        assert refused is not None  # else it returned
        raise refused

    def each(self, call: Callable[[str], Any], names: Collection[str]) -> Iterable[Any]:
        """Return what a call returns for each name; a client sends several requests at once."""
        return map(call, names)

    def together(self, calls: Sequence[Callable[[], object]]) -> None:
        """Make calls in turn; where uploads are completed, the order is in their journal, and all at once."""
        for call in calls:
            call()

    def looks(self, names: Sequence[str]) -> list[Callable[[], object]]:
        """Return calls that look at what is about to be completed, while the first step is recorded."""
        return []

    def ends(self, publication: Publication) -> list[Callable[[], object]]:
        """Return calls that settle what is left, while the last step is recorded."""
        return []

    def staged(self, name: str) -> bytes:
        """Return the bytes of a staged file; raise `OutputMismatch` if they are not those of its receipt."""
        nbytes, digest = self.publication.puts[name]
        data = fetch(self.staging.files, name or self.staging.name)
        if data is not None and len(data) == nbytes:
            # Digests of one file may be of different kinds, by what was recorded.
            hasher = hasher_like(digest or "")
            hasher.update(data)
            if digest in (None, hasher.hexdigest()):
                return data
        raise self.staged_changed(name)

    def staged_changed(self, name: str) -> OutputMismatch:
        """Return the error for a staged file that is not the one of its receipt."""
        return OutputMismatch(
            f"the staged file of {self.url_of(name)} was changed since it was written",
            hint="run the command again: the file is rewritten",
        )

    def holds(self, name: str, entry: FileStatus) -> bool:
        """Return whether an object has the size and the digest of the file for its name."""
        if name not in self.publication.puts or entry.nbytes != self.publication.puts[name][0]:
            return False
        nbytes, digest = self.publication.puts[name]
        staged = name or self.staging.name
        if digest is None:  # digests were off: compare with the staged file, if it still exists
            # Nothing to compare with: a size alone proves nothing.
            if self.staging.files.size(staged) != nbytes:
                return False
            digest = digest_of(self.staging.files, staged, nbytes)
        store, inner = self.store_of(name)
        return has_digest(store, inner, nbytes, (digest,))

    def close(self) -> None:
        """Close the stores."""
        self.staging.files.close()


def publish_remote(
    destination: Destination,
    commit: Collection[str],
    read: Callable[[], object] | None = None,
    inventory: Inventory | None = None,
) -> None:
    """Complete the uploads, copy the staged files into place, and remove the files that they replace.

    Args:
        destination: The destination, for a publication that is new, or as an earlier run recorded it.
        commit: The files that make the folder loadable.
        read: Reads and checks the output after its tensors are in place, before the last files are written.
        inventory: The content of the destination a moment ago; None to look.

    Raises:
        DestinationExists: There is a foreign object, which stays. Replaceable objects may be removed by
            then; the same command resumes.
        OutputMismatch: A written object is missing or has another size.
    """
    with closing(destination) as target:
        publication, url = target.publication, target.staging.destination
        old, puts, uploaded = publication.replaces, publication.puts, target.handles
        # Uploaded tensors become objects when their uploads are completed; everything else is copied from the
        # staging prefix. Either way the files of `commit`, which make the folder loadable, come last.
        beside = [name for name in puts if name not in commit and name not in uploaded]
        tensors = [name for name in puts if name not in commit and name in uploaded]
        last = [name for name in puts if name in commit and name in uploaded]
        end = [*(beside if uploaded else ()), *(n for n in puts if n in commit and n not in uploaded)]
        alone = False  # whether the destination was seen to have only ours
        # A resumed publication was judged when it began.
        if publication.step not in (REMOVING, PUTTING):
            _require_as_judged(target, list_destination(url) if inventory is None else inventory)
            # Removing is only needed where an old output could be loaded together with new files.
            first = REMOVING if old.inventory else PUTTING  # there is nothing to remove
            publication = replace(publication, step=first)
            begin = tensors if uploaded else beside
            # Then nothing changes before the last files: record and list need not wait for each other.
            alone = first == PUTTING and not begin
            _begin(target, publication, () if first == REMOVING else begin or last, alone=alone)
        if publication.step == REMOVING:
            # Every removal again after a kill: one that is gone already is no error.
            # Its order is that of the record: what makes the old output loadable first.
            for name in old.first:
                _remove(target, name)
            # The step is recorded before the next one begins: a run that
            # resumes must not remove what was put since.
            before, publication = publication, replace(publication, step=PUTTING)
            note(target.staging, publication, before)
        _put_all(target, tensors if uploaded else beside)
        # Old files that no new one replaces, after the new tensors are complete:
        # until then the old bytes are still there.
        for name in old.inventory:
            if name not in old.first and name not in puts:
                _remove(target, name)
        # Right before the folder becomes loadable, as a loader takes every file that it finds.
        if not alone:
            _require_only_ours(target)
        listed: list[Inventory] = []  # after the last change, if that is a Complete
        for name in last:
            ends = name == last[-1] and not end
            target.put(name, (lambda: listed.append(list_destination(url))) if ends else None)
        # Uploads have no address before they are completed, so nothing could be read back earlier.
        if read is not None:
            read()
        # Small files beside uploads come after the reading back: while
        # they are missing no loader opens the folder.
        if uploaded:
            _put_all(target, beside)
        for name in puts:
            if name in commit and name not in uploaded:
                target.put(name)
        # A last look at everything: what was written may have been removed by another program.
        now = listed[-1] if listed else list_destination(url)
        lost = [n for n, (nbytes, _) in puts.items() if n not in now or now[n].nbytes != nbytes]
        if lost:
            raise OutputMismatch(f"{target.url_of(lost[0])} was written, but is missing", hint="run again")
        _end(target, replace(publication, step=DONE, published={n: now[n] for n in puts}), publication)


def is_published(destination: Destination) -> bool:
    """Return whether all written objects are unchanged, by size and version, or else by their bytes."""
    publication, now = destination.publication, list_destination(destination.staging.destination)
    with closing(destination) as target:
        return all(
            name in now
            and (same_object(now[name], publication.published.get(name)) or target.holds(name, now[name]))
            for name in publication.puts
        )


def _begin(destination: Destination, publication: Publication, names: Sequence[str], *, alone: bool) -> None:
    """Record the first step of a publication, and look meanwhile at what it will find at ``names``.

    alone: require that only its own objects are there, because nothing is changed before that is asked.
    """
    destination.staging.require_lease()
    calls: list[Callable[[], object]] = [
        partial(note, destination.staging, publication),
        *destination.looks(names),
    ]
    if alone:
        calls.append(partial(_require_only_ours, destination))
    destination.together(calls)


def _end(destination: Destination, publication: Publication, before: Publication) -> None:
    """Record that a publication is done; forget its uploads and list what is left to remove meanwhile.

    None of these needs the others: an upload that was completed is found without its entry, too.
    """
    destination.together(
        [partial(note, destination.staging, publication, before), *destination.ends(publication)]
    )


def _require_as_judged(destination: Destination, inventory: Inventory) -> None:
    old = destination.publication.replaces.inventory
    for name, entry in inventory.items():
        # Ours from an earlier try counts as judged: it has the bytes of the plan.
        if not same_object(old.get(name), entry) and not destination.holds(name, entry):
            raise DestinationExists(f"{destination.url_of(name)} appeared meanwhile", hint=HINT)


def _remove(destination: Destination, name: str) -> None:
    """Remove one object, if it is still the recorded one; do nothing if it no longer exists."""
    destination.staging.require_lease()
    now = destination.look(name)
    if now is None:
        return
    if not same_object(now, destination.publication.replaces.inventory.get(name)):
        raise destination.written_meanwhile(name)
    destination.remove(name, now)


def _put_all(destination: Destination, names: Collection[str]) -> None:
    """Put files into place that no reader accepts alone.

    One whose bytes were altered on their way to the store is removed; the others are tried, too, so that one
    more run mends all of them. Raises `OutputMismatch` for the first.
    """
    for altered in list(destination.each(partial(_tried, destination), names)):
        if altered is not None:
            raise altered


def _tried(destination: Destination, name: str) -> OutputMismatch | None:
    """Put one file into place; return the error if its bytes were altered."""
    try:
        destination.put(name)
    except OutputMismatch as error:
        return error
    return None


def _require_only_ours(destination: Destination) -> None:
    """Refuse other objects before the folder becomes loadable: a loader could read them, too."""
    for name in list_destination(destination.staging.destination):
        if name not in destination.publication.puts:
            raise DestinationExists(f"{destination.url_of(name)} appeared meanwhile", hint=HINT)


class ObjectStaging(Staging):
    """The staging prefix of a destination on an object store."""

    def _store(self, *inside: str) -> Store:
        return open_store("/".join([self.url, *inside]))

    def _at(self, publication: Publication) -> Destination:
        """Return the destination, for one publication."""
        return Destination(self, publication)

    @contextmanager
    def lock(self, *, shared: bool = False, make: bool = False) -> Iterator[None]:
        """Do nothing: this store cannot decide who may write."""
        yield

    def require_lease(self) -> None:
        """Raise `Interrupted` if this run lost its row in the catalog: there is no lease."""
        self.require_row()

    def finish_interrupted_publish(self) -> None:
        """Do nothing: what was begun is in the record, and `publish` goes on with it."""

    def sweep_gone(self) -> None:
        """Do nothing: a prefix is removed where it is."""

    def sweep_parts(self, *, joints: bool = False) -> None:
        """Do nothing: an object appears when it is complete."""

    def require_room(self, nbytes: int) -> None:
        """Do nothing: an object store has room."""

    def published_plan(self, record: Publication | None) -> str | None:
        """Return the digest of the plan whose output is at the destination, or None."""
        return record.plan if record is not None and record.step == DONE else None

    def publishing_plan(self, record: Publication | None) -> str | None:
        """Return the digest of the plan that an earlier run began to copy to the destination, or None."""
        return record.plan if record is not None and record.step != DONE else None

    def publish(self, publication: Publication, commit: Collection[str], *, single: bool) -> None:
        """Copy the staged files to the destination, and remove those that they replace."""
        publish_remote(self._at(publication), commit)

    def is_unchanged(self, record: Publication | None, receipts: Sequence[Receipt], output: Readable) -> bool:
        """Report whether all published objects are what was written, as it is recorded."""
        return record is not None and is_published(self._at(record))

    def staged(self) -> dict[str, int]:
        """Return the files that are staged as a whole: path -> size. With uploads there may be none."""
        return self.files.list()

    def require_planned(self, planned: Collection[str]) -> dict[str, int]:
        """Raise `OutputMismatch` for staged files that are not in the plan; return path -> bytes of all."""
        # Listed once: both what is not in the plan and the sizes come from it.
        sizes = self.staged()
        if names := sorted(set(sizes) - set(planned)):
            raise self._unplanned(names)
        return sizes

    def check_staged_plan(self, composed: Composed, stamps: dict[str, str | None]) -> None:
        """Write the small files anew that an earlier run's staging prefix lacks."""
        put_extra(self, composed.plan.extra, composed.extra)

    def clear(self, *, publication: bool = True, names: Collection[str] | None = None) -> None:
        """Remove everything from the prefix, unless a step is half thinned."""
        self._require_none_half_thinned()
        super().clear(publication=publication, names=names)

    def remove(self) -> None:
        """Remove the staging prefix, if these credentials may: its output does not need it any more.

        It stays where another run has taken over the destination by now. Raises `Conflict` as `clear` does.
        """
        try:
            self._remove()
        except (Busy, DestinationUnwritable) as error:
            _log.warning("%s is kept: %s", self.url, error.message)

    def _require_none_half_thinned(self) -> None:
        """Raise `Conflict` if the place is complete only with what is staged: it was being thinned."""
        record = noted(self)
        if record is not None and record.plan.startswith(THINNING) and record.step in (REMOVING, PUTTING):
            raise Conflict(
                f"{self.destination} is half thinned, by a run that ended early",
                hint=f"run it again, and it ends that: ckptcore thin {self.destination}",
            )

    def _remove(self) -> None:
        self._require_none_half_thinned()
        for part in (self.files, self.plan, self.receipts):
            part.remove_all()
        for name in RECORDS:  # the record of the publication last: while it exists, the next run resumes
            self.root.remove(name)
