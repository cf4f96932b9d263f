"""Publish an output on an object store, where nothing can be renamed.

Objects are copied one at a time, by lists that were recorded before the first change:

    removing   remove the files that make the old output loadable: readers find nothing rather than a mixture
    putting    write the new files, except those that make the folder loadable; remove the rest of the old
               ones; then write the files that make the folder loadable
    done       the output is complete; a rerun verifies that, and changes nothing

Every object is checked right before it is removed or overwritten. An object that is neither the recorded old
one nor the new one is foreign: it stays, and the publication stops.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, replace

from ckptcore.conversion.publication_record import DONE, PUTTING, REMOVING, Publication, note
from ckptcore.conversion.staging import Staging
from ckptcore.errors import DestinationExists, OutputMismatch
from ckptcore.execution.receipts import digest_of, has_digest
from ckptcore.store import Store, join_url, open_store
from ckptcore.store.inventory import Entry, take

ITSELF = ""  # the name, below the destination, of a destination that is one file
_HINT = "inspect it, move it away, and run the same command again"


def publish_remote(staging: Staging, publication: Publication, commit: Collection[str]) -> None:
    """Copy the staged files into place, and remove the files that they replace.

    Args:
        staging: The staging folder.
        publication: New, or as an earlier run recorded it.
        commit: The files that make the folder loadable.

    Raises:
        DestinationExists: There is a foreign object, which stays. Replaceable objects may be removed by
            then; the same command resumes.
        OutputMismatch: A written object is missing or has another size.
    """
    with closing(_Here(staging, publication)) as here:
        if publication.step not in (REMOVING, PUTTING):
            _require_as_judged(here)
            publication = replace(publication, step=REMOVING)
            note(staging, publication)
        old, puts = publication.replaces, publication.puts
        if publication.step == REMOVING:
            for name in old.first:
                _remove(here, name)
            publication = replace(publication, step=PUTTING)
            note(staging, publication)
        for name in puts:
            if name not in commit:
                _put(here, name)
        for name in old.inventory:
            if name not in old.first and name not in puts:
                _remove(here, name)
        _require_only_ours(here)
        for name in puts:
            if name in commit:
                _put(here, name)
        there = take(staging.destination)
        lost = [n for n, (nbytes, _) in puts.items() if n not in there or there[n].nbytes != nbytes]
        if lost:
            raise OutputMismatch(f"{here.url_of(lost[0])} was written, but is missing", hint="run again")
        note(staging, replace(publication, step=DONE, there={n: there[n] for n in puts}))


def is_published(staging: Staging, publication: Publication) -> bool:
    """Return whether all written objects are unchanged, by size and version, or else by their bytes."""
    there = take(staging.destination)
    with closing(_Here(staging, publication)) as here:
        return all(
            name in there and (there[name] == publication.there.get(name) or here.holds(name, there[name]))
            for name in publication.puts
        )


@dataclass(frozen=True, slots=True)
class _Here:
    """The destination by names below it; `ITSELF` is the object of its own name."""

    staging: Staging
    publication: Publication

    def store_of(self, name: str) -> tuple[Store, str]:
        """Return (store, name in it) of a name of the destination."""
        if name == ITSELF:
            return open_store(self.staging.parent), self.staging.name
        return open_store(self.staging.destination), name

    def url_of(self, name: str) -> str:
        """Return the URL of a name."""
        return self.staging.destination if name == ITSELF else f"{self.staging.destination}/{name}"

    def look(self, name: str) -> Entry | None:
        """Return the current object of a name, or None."""
        store, inner = self.store_of(name)
        return take(join_url(store.url, inner)).get("")

    def holds(self, name: str, entry: Entry) -> bool:
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


def _require_as_judged(here: _Here) -> None:
    old = here.publication.replaces.inventory
    for name, entry in take(here.staging.destination).items():
        if old.get(name) != entry and not here.holds(name, entry):
            raise DestinationExists(f"{here.url_of(name)} appeared meanwhile", hint=_HINT)


def _remove(here: _Here, name: str) -> None:
    """Remove one object, if it is still the recorded one; do nothing if it no longer exists."""
    now = here.look(name)
    if now is None:
        return
    if now != here.publication.replaces.inventory.get(name):
        raise DestinationExists(f"{here.url_of(name)} was written meanwhile", hint=_HINT)
    store, inner = here.store_of(name)
    store.remove(inner)


def _put(here: _Here, name: str) -> None:
    """Copy one file into place: if the name is free or has the recorded object, but not over its equal."""
    now = here.look(name)
    if now is not None and now != here.publication.replaces.inventory.get(name):
        if here.holds(name, now):
            return
        raise DestinationExists(f"{here.url_of(name)} was written meanwhile", hint=_HINT)
    store, inner = here.store_of(name)
    here.staging.files.copy_to(name or here.staging.name, store, inner)


def _require_only_ours(here: _Here) -> None:
    """Refuse other objects before the folder becomes loadable: a loader could read them, too."""
    for name in take(here.staging.destination):
        if name not in here.publication.puts:
            raise DestinationExists(f"{here.url_of(name)} appeared meanwhile", hint=_HINT)
