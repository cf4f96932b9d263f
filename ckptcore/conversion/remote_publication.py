"""Publish an output on an object store, where nothing can be renamed.

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

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckptcore.conversion.publication_record import DONE, PUTTING, REMOVING, Publication, note
from ckptcore.conversion.staging import Staging
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, DestinationExists, Finding, OutputMismatch, finding
from ckptcore.execution.receipts import digest_of, has_digest
from ckptcore.store import Readable, Store, fetch, join_url, open_store
from ckptcore.store.file_status import NO_VERSION, FileStatus, same_object
from ckptcore.store.listing import Inventory, list_destination
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.part_digest import hasher_like

if TYPE_CHECKING:
    from ckptcore.conversion.staged_uploads import ObjectPlaces
    from ckptcore.store.objects import ObjectClient, ObjectSeen
    from ckptcore.store.objects.uploaded import Uploaded
    from ckptcore.store.objects.uploads import AtKey, Uploads

ITSELF = ""  # the name, below the destination, of a destination that is one file
_HINT = "inspect it, move it away, and run the same command again"
_LOOKS = 8  # at keys, before what is uploaded to them is completed
_TRIES = 4  # of a conditional request: what was found there may change, or the reply was lost


class Completing:
    """The uploads that a publication completes.

    Attributes:
        uploads: The uploads of the plan.
        handles: Name below the destination -> upload.
        staged: Path -> bytes of the files that are staged as a whole.
        looks: Name -> what its key had while the first step was recorded.
        seen: Name -> object, of those that are completed.
        written: The output's manifest, once it was read.
    """

    def __init__(self, uploads: Uploads, handles: Mapping[str, Uploaded], staged: Mapping[str, int]) -> None:
        self.uploads, self.handles, self.staged = uploads, handles, staged
        self.looks: dict[str, AtKey] = {}
        self.seen: dict[str, ObjectSeen] = {}
        self.written: Manifest | None = None

    @property
    def unproven(self) -> tuple[Finding, ...]:
        """Return a finding if the store keeps no checksums of what it received."""
        from ckptcore.store.objects.uploaded import require_checksum

        without = [name for name, seen in self.seen.items() if not require_checksum(seen, self.handles[name])]
        if not without:
            return ()
        message = f"the store keeps no checksum of {len(without)} uploaded files"
        hint = "compare them with the source: ckptcore diff SRC DST, or ckptcore scrub"
        return (finding("unproven", "bytes", message, file=without[0] or None, hint=hint),)


def publish_remote(
    staging: Staging,
    publication: Publication,
    commit: Collection[str],
    completing: Completing | None = None,
    read: Callable[[Readable], Manifest] | None = None,
    there: Inventory | None = None,
) -> None:
    """Complete the uploads, copy the staged files into place, and remove the files that they replace.

    Args:
        staging: The staging folder.
        publication: New, or as an earlier run recorded it.
        commit: The files that make the folder loadable.
        completing: The uploads.
        read: Reads and checks the output after its tensors are in place, before the last files are written.
        there: The content of the destination a moment ago; None to look.

    Raises:
        DestinationExists: There is a foreign object, which stays. Replaceable objects may be removed by
            then; the same command resumes.
        OutputMismatch: A written object is missing or has another size.
    """
    with closing(_Here(staging, publication, completing)) as here:
        old, puts = publication.replaces, publication.puts
        uploaded = completing.handles if completing is not None else {}
        beside = [name for name in puts if name not in commit and name not in uploaded]
        tensors = [name for name in puts if name not in commit and name in uploaded]
        last = [name for name in puts if name in commit and name in uploaded]
        end = [*(beside if uploaded else ()), *(n for n in puts if n in commit and n not in uploaded)]
        alone = False  # whether the destination was seen to have only ours
        if publication.step not in (REMOVING, PUTTING):
            _require_as_judged(here, list_destination(staging.destination) if there is None else there)
            first = REMOVING if old.inventory else PUTTING  # there is nothing to remove
            publication = replace(publication, step=first)
            begin = tensors if uploaded else beside
            alone = first == PUTTING and not begin
            _begin(here, publication, () if first == REMOVING else begin or last, alone=alone)
        if publication.step == REMOVING:
            for name in old.first:
                _remove(here, name)
            before, publication = publication, replace(publication, step=PUTTING)
            note(staging, publication, before)
        _put_all(here, tensors if uploaded else beside)
        for name in old.inventory:
            if name not in old.first and name not in puts:
                _remove(here, name)
        if not alone:
            _require_only_ours(here)
        found: list[Inventory] = []  # after the last change, if that is a Complete
        for name in last:
            ends = name == last[-1] and not end
            _put(here, name, (lambda: found.append(list_destination(staging.destination))) if ends else None)
        if completing is not None and read is not None:
            completing.written = read(_as_it_will_be(here, completing))
        if uploaded:
            _put_all(here, beside)
        for name in puts:
            if name in commit and name not in uploaded:
                _put(here, name)
        now = found[-1] if found else list_destination(staging.destination)
        lost = [n for n, (nbytes, _) in puts.items() if n not in now or now[n].nbytes != nbytes]
        if lost:
            raise OutputMismatch(f"{here.url_of(lost[0])} was written, but is missing", hint="run again")
        _end(here, replace(publication, step=DONE, there={n: now[n] for n in puts}), publication)


def is_published(staging: Staging, publication: Publication) -> bool:
    """Return whether all written objects are unchanged, by size and version, or else by their bytes."""
    there = list_destination(staging.destination)
    with closing(_Here(staging, publication)) as here:
        return all(
            name in there
            and (same_object(there[name], publication.there.get(name)) or here.holds(name, there[name]))
            for name in publication.puts
        )


@dataclass(frozen=True, slots=True)
class _Here:
    """The destination by names below it; `ITSELF` is the object of its own name."""

    staging: Staging
    publication: Publication
    completing: Completing | None = None

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
        places = self.staging.places
        if places is not None:
            # A late import: local conversions send no requests.
            from ckptcore.store.objects import of_object

            seen = places.client.head(places.key_of(name))
            return None if seen is None else of_object(seen)
        store, inner = self.store_of(name)
        return list_destination(join_url(store.url, inner)).get("")

    def staged(self, name: str) -> bytes:
        """Return the bytes of a staged file; raise `OutputMismatch` if they are not those of its receipt."""
        nbytes, digest = self.publication.puts[name]
        data = fetch(self.staging.files, name or self.staging.name)
        if data is not None and len(data) == nbytes:
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
            if self.staging.files.size(staged) != nbytes:
                return False
            digest = digest_of(self.staging.files, staged, nbytes)
        store, inner = self.store_of(name)
        return has_digest(store, inner, nbytes, (digest,))

    def close(self) -> None:
        """Close the stores."""
        self.staging.files.close()


def _begin(here: _Here, publication: Publication, names: Sequence[str], *, alone: bool) -> None:
    """Record the first step of a publication, and look meanwhile at what it will find.

    Args:
        here: The destination.
        publication: What is recorded.
        names: What is put into place first, if it is uploaded. Only a few are looked at: a look gets old.
        alone: Require that only its own objects are there, because nothing is changed before that is asked.
    """
    completing, places = here.completing, here.staging.places
    record = partial(note, here.staging, publication)
    if completing is None or places is None:
        record()
        if alone:
            _require_only_ours(here)
        return
    # A late import: other stores have no uploads.
    from ckptcore.store.objects.uploads import AtKey

    def look(name: str) -> None:
        completing.looks[name] = AtKey(places.client.head(places.key_of(name)))

    asked: list[Callable[[], object]] = [record, *(partial(look, n) for n in names[:_LOOKS])]
    if alone:
        asked.append(partial(_require_only_ours, here))
    places.client.each(lambda ask: ask(), asked)


def _end(here: _Here, publication: Publication, before: Publication) -> None:
    """Record that a publication is done; forget its uploads and list what is left to remove meanwhile.

    None of these needs the others: an upload that was completed is found without its entry, too.

    Args:
        here: The destination.
        publication: What is recorded.
        before: What was recorded last.
    """
    staging, completing = here.staging, here.completing
    record = partial(note, staging, publication, before)
    if completing is None or staging.places is None:
        record()
        return
    ended = {r.index: r.uploaded for r in publication.receipts if r.uploaded is not None}
    forget = partial(completing.uploads.forget, ended)
    asked: list[Callable[[], None]] = [record, forget, staging.list_leftovers]
    staging.places.client.each(lambda ask: ask(), asked)


def _require_as_judged(here: _Here, there: Inventory) -> None:
    old = here.publication.replaces.inventory
    for name, entry in there.items():
        if not same_object(old.get(name), entry) and not here.holds(name, entry):
            raise DestinationExists(f"{here.url_of(name)} appeared meanwhile", hint=_HINT)


def _remove(here: _Here, name: str) -> None:
    """Remove one object, if it is still the recorded one; do nothing if it no longer exists."""
    now = here.look(name)
    if now is None:
        return
    meanwhile = DestinationExists(f"{here.url_of(name)} was written meanwhile", hint=_HINT)
    if not same_object(now, here.publication.replaces.inventory.get(name)):
        raise meanwhile
    places = here.staging.places
    if places is None:
        store, inner = here.store_of(name)
        store.remove(inner)
        return
    # A late import: local conversions send no requests.
    from ckptcore.store.objects.retry import Kind, kind_of

    key = places.key_of(name)
    try:
        places.client.delete(key, match=_etag(now))
    except CkptError as error:
        if kind_of(error) is Kind.CHANGED:
            if here.look(name) is None:  # the reply was lost
                return
            raise meanwhile from error
        if kind_of(error) is not Kind.UNSUPPORTED:
            raise
        places.client.delete(key)


def _put_all(here: _Here, names: Collection[str]) -> None:
    """Put files into place that no reader accepts alone.

    One whose bytes were altered on their way to the store is removed; the others are tried, too, so that one
    more run mends all of them. Raises `OutputMismatch` for the first.
    """
    places, tried = here.staging.places, partial(_tried, here)
    found = list(map(tried, names)) if places is None else places.client.each(tried, names)
    for altered in found:
        if altered is not None:
            raise altered


def _tried(here: _Here, name: str) -> OutputMismatch | None:
    """Put one file into place; return the error if its bytes were altered."""
    try:
        _put(here, name)
    except OutputMismatch as error:
        return error
    return None


def _put(here: _Here, name: str, beside: Callable[[], object] | None = None) -> None:
    """Put one file into place: if the name is free or has the recorded object, but not over its equal.

    beside: Called when an upload is completed, while it is looked at.
    """
    here.staging.require_lease()
    if here.completing is not None and name in here.completing.handles:
        _complete(here, here.completing, name, beside)
        return
    from ckptcore.store.objects.retry import Kind, kind_of

    refused: CkptError | None = None
    for _ in range(_TRIES):
        now = here.look(name)
        recorded = here.publication.replaces.inventory.get(name)
        if now is not None and not same_object(now, recorded):
            if here.holds(name, now):
                return
            raise DestinationExists(f"{here.url_of(name)} was written meanwhile", hint=_HINT)
        try:
            _write(here, name, now)
        except CkptError as error:
            # Something else is there now. It may be this very file: the reply to a request was lost.
            if kind_of(error) not in (Kind.EXISTS, Kind.CHANGED, Kind.MISSING):
                raise
            refused = error
        else:
            return
    assert refused is not None  # else it returned
    raise refused


def _write(here: _Here, name: str, now: FileStatus | None) -> None:
    """Write a staged file to its place, if the store still has there what was found."""
    from ckptcore.store.objects import IN_ONE
    from ckptcore.store.objects.retry import Kind, kind_of

    places = here.staging.places
    if places is None:
        store, inner = here.store_of(name)
        here.staging.files.copy_to(name or here.staging.name, store, inner)
        return
    if here.publication.puts[name][0] > IN_ONE:  # the store copies what is larger
        _copy(here, name, places, now)
        return
    data, key = here.staged(name), places.key_of(name)
    try:
        places.client.put(key, data, create=now is None, match=None if now is None else _etag(now))
    except CkptError as error:
        if kind_of(error) is not Kind.UNSUPPORTED:
            raise
        places.client.put(key, data)  # this store has no such condition


def _copy(here: _Here, name: str, places: ObjectPlaces, now: FileStatus | None) -> None:
    """Copy a staged file to its place inside the store: the version that is proven, and no other one."""
    from ckptcore.store.objects.retry import Kind, kind_of

    client, staged = places.client, name or here.staging.name
    source, target = f"{places.staging}/files/{staged}", places.key_of(name)
    nbytes, digest = here.publication.puts[name]
    seen = client.head(source)
    if seen is None or (digest is not None and not has_digest(here.staging.files, staged, nbytes, (digest,))):
        raise here.staged_changed(name)
    try:
        made = _copied(client, source, target, seen.etag or None, now)
    except CkptError as error:
        if kind_of(error) not in (Kind.CHANGED, Kind.MISSING) or _is_now(client, source, seen.etag):
            raise  # also where the name has another object by now
        raise here.staged_changed(name) from error
    if not _is_now(client, source, seen.etag):  # some stores take the condition, and ignore it
        _remove_copy(client, target, made)
        raise here.staged_changed(name)


def _copied(client: ObjectClient, source: str, target: str, match: str | None, now: FileStatus | None) -> str:
    """Copy an object with the conditions that the store knows; return the copy's ETag."""
    from ckptcore.store.objects.retry import Kind, kind_of

    replaces = None if now is None else _etag(now)
    for copy in (
        partial(client.copy, match=match, create=now is None, replaces=replaces),
        partial(client.copy, match=match),
    ):
        try:
            return copy(source, target)
        except CkptError as error:
            if kind_of(error) not in (Kind.UNSUPPORTED, Kind.INVALID):
                raise
    return client.copy(source, target)


def _is_now(client: ObjectClient, key: str, etag: str) -> bool:
    seen = client.head(key)
    return seen is not None and seen.etag == etag


def _remove_copy(client: ObjectClient, key: str, etag: str) -> None:
    """Remove what was just copied to a key, and no object that another program has put there since."""
    from ckptcore.store.objects.retry import Kind, kind_of

    try:
        client.delete(key, match=etag or None)
    except CkptError as error:
        if kind_of(error) is Kind.UNSUPPORTED:
            client.delete(key)
        elif kind_of(error) is not Kind.CHANGED:
            raise


def _complete(here: _Here, completing: Completing, name: str, beside: Callable[[], object] | None) -> None:
    """Complete an upload, if its name is free, or has the recorded object or the upload's own."""
    from ckptcore.store.objects.pinned import MOST_PAGES

    uploaded, old = completing.handles[name], here.publication.replaces.inventory.get(name)
    now = here.look(name) if old is not None else None
    if now is not None and not same_object(now, old) and completing.uploads.find(uploaded) is None:
        raise DestinationExists(f"{here.url_of(name)} was written meanwhile", hint=_HINT)
    completing.seen[name] = completing.uploads.complete(
        uploaded,
        create=now is None,
        match=None if now is None else _etag(now),
        look=completing.looks.pop(name, None),
        page=len(completing.handles) <= MOST_PAGES,
        beside=beside,
    )


def _etag(entry: FileStatus) -> str | None:
    """Return the ETag of an object for a condition, or None where the store has none."""
    return None if entry.version == NO_VERSION else entry.version


def _as_it_will_be(here: _Here, completing: Completing) -> Readable:
    """Return the output: completed objects, by their ETags, and the files that are still staged."""
    from ckptcore.store.objects.pinned import PinnedFiles

    places, staged = here.staging.places, here.staging.files
    assert places is not None  # there are uploads
    objects = {name or here.staging.name: seen for name, seen in completing.seen.items()}
    return PinnedFiles(places.client, objects, staged, completing.staged)


def _require_only_ours(here: _Here) -> None:
    """Refuse other objects before the folder becomes loadable: a loader could read them, too."""
    for name in list_destination(here.staging.destination):
        if name not in here.publication.puts:
            raise DestinationExists(f"{here.url_of(name)} appeared meanwhile", hint=_HINT)
