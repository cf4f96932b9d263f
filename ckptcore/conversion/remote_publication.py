"""Remote publishing: how does an output become visible on an object store, where nothing can be renamed?

By copies, one object at a time, along lists that were recorded before the first change:

    removing   what made the old output loadable goes first: readers find nothing rather than a mixture
    putting    the new files, those that make the folder loadable last; then the rest of the old ones goes
    done       all is there; a rerun looks that it still is, and changes nothing

Every object is looked at right before it is removed or written over. One that is neither what was judged nor
what is being put is somebody's: it stays, and the publication stops.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, replace

from ckptcore.conversion.publication_record import DONE, PUTTING, REMOVING, Publication, note
from ckptcore.conversion.staging import Staging
from ckptcore.errors import DestinationExists, OutputMismatch
from ckptcore.execution.receipts import digest_of
from ckptcore.store import Store, join_url, open_store
from ckptcore.store.inventory import Entry, take

ITSELF = ""  # the name, below the destination, of the one file that the destination is
_AGAIN = "look at it, move it away, and run the same command again"


def publish_remote(staging: Staging, publication: Publication, commit: Collection[str]) -> None:
    """Copies the staged files into place, and removes what they replace.

    publication: new, or as an earlier run recorded it. commit: the files that make the folder loadable.
    Raises `DestinationExists` when anything else lies there: it stays. What was judged to be replaceable is
    gone then as far as that went; the same command goes on.
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
            raise OutputMismatch(f"{here.url_of(lost[0])} was put, and is not there", hint="run again")
        note(staging, replace(publication, step=DONE, there={n: there[n] for n in puts}))


def is_published(staging: Staging, publication: Publication) -> bool:
    """Whether all that was put is still there, as it was put: by sizes and versions, and where a version is
    another one by its bytes."""
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
        """Where a name of the destination lies: (store, name in it)."""
        if name == ITSELF:
            return open_store(self.staging.parent), self.staging.name
        return open_store(self.staging.destination), name

    def url_of(self, name: str) -> str:
        """The URL of a name, as it is written."""
        return self.staging.destination if name == ITSELF else f"{self.staging.destination}/{name}"

    def look(self, name: str) -> Entry | None:
        """What bears a name now."""
        store, inner = self.store_of(name)
        return take(join_url(store.url, inner)).get("")

    def holds(self, name: str, entry: Entry) -> bool:
        """Whether an object has the size and the digest of what is put under its name."""
        if name not in self.publication.puts or entry.nbytes != self.publication.puts[name][0]:
            return False
        nbytes, digest = self.publication.puts[name]
        staged = name or self.staging.name
        if digest is None:  # digests were off: what is staged tells, if it is still there
            if self.staging.files.size(staged) != nbytes:
                return False
            digest = digest_of(self.staging.files, staged, nbytes)
        store, inner = self.store_of(name)
        return digest_of(store, inner, nbytes) == digest

    def close(self) -> None:
        """Releases what the stores hold open."""
        self.staging.files.close()


def _require_as_judged(here: _Here) -> None:
    old = here.publication.replaces.inventory
    for name, entry in take(here.staging.destination).items():
        if old.get(name) != entry and not here.holds(name, entry):
            raise DestinationExists(f"{here.url_of(name)} appeared meanwhile", hint=_AGAIN)


def _remove(here: _Here, name: str) -> None:
    """Removes one object, if it still is what was judged; what is gone already is fine."""
    now = here.look(name)
    if now is None:
        return
    if now != here.publication.replaces.inventory.get(name):
        raise DestinationExists(f"{here.url_of(name)} was written meanwhile", hint=_AGAIN)
    store, inner = here.store_of(name)
    store.remove(inner)


def _put(here: _Here, name: str) -> None:
    """Copies one file into place, over nothing, over what was judged, or not at all over its equal."""
    now = here.look(name)
    if now is not None and now != here.publication.replaces.inventory.get(name):
        if here.holds(name, now):
            return
        raise DestinationExists(f"{here.url_of(name)} was written meanwhile", hint=_AGAIN)
    store, inner = here.store_of(name)
    here.staging.files.copy_to(name or here.staging.name, store, inner)


def _require_only_ours(here: _Here) -> None:
    """Before the folder becomes loadable: what lies beside the new files could be taken for one of them."""
    for name in take(here.staging.destination):
        if name not in here.publication.puts:
            raise DestinationExists(f"{here.url_of(name)} appeared meanwhile", hint=_AGAIN)
