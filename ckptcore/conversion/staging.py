"""Manage the staging folder, where an output is written until it is complete.

The folder is beside the destination: ``/a/.b.ckptcore/`` for ``/a/b``, with ``plan/``, ``receipts/``,
``files/`` and a lock. `ckptcore.conversion.local_publication` moves ``files/`` into place. A killed run
leaves the staging folder, and the next one resumes from it.

Its name can be guessed, so another user may have created it. A run uses, empties or removes only what belongs
to the trusted users (`ckptcore.store.sealed`); it refuses everything else with `StagingForeign`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ckptcore.conversion.staging_names import (
    DRAFT,
    LEASE,
    LOCK,
    PARTS,
    PUBLISHING,
    RECORDS,
    REPLACED,
    UPLOADS,
)
from ckptcore.errors import (
    Busy,
    CkptError,
    DestinationUnwritable,
    DiskFull,
    OutputMismatch,
    StagingForeign,
    UsageError,
)
from ckptcore.store import Store, join_url, local_path, open_store, split_url
from ckptcore.store.folder_tree import Spot, closing_fd, enter, look, remove_tree
from ckptcore.store.local_writer import unwritable
from ckptcore.store.owners import VARIABLE, strange
from ckptcore.store.sealed import Names, SealedFolder, SealedStore, names_in, refuse_odd
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.late_pattern import late_pattern
from ckptcore.utils.text import some
from ckptcore.utils.workers import finishing

if TYPE_CHECKING:
    from ckptcore.conversion.staged_uploads import ObjectPlaces
    from ckptcore.store.objects.kept_records import KeptRecords
    from ckptcore.store.objects.lease import Arbiter, Lease
    from ckptcore.store.objects.uploads import Uploads

_REMOTE = late_pattern(
    rf"(?:{'|'.join(map(re.escape, (*RECORDS, LEASE)))}|(?:{'|'.join((*PARTS, UPLOADS))})/.+)", re.DOTALL
)
# XFS counts the blocks of a file that was just removed, such as a killed run's, as free a moment later.
_FREED_WITHIN = (0.05, 0.2, 0.5, 1.0)  # seconds from one look to the next
# The files of a staging folder: its own, those being written, decoded items, and what an NFS client keeps of
# removed files that are open. All other files are foreign.
_FILES = late_pattern(r"lock|(publishing|replaces|request)\.json|\..+\.part|tmp\w{8}|\.nfs[0-9a-f]+")
_UNFINISHED = late_pattern(r"(?:.*/)?\..+\.(?P<kind>part|joint)")
_TRIES, _PAUSE_S = 50, 0.01
_log = logging.getLogger("ckptcore")


@dataclass(frozen=True, slots=True)
class Spots:
    """The places that a local publication moves files between.

    Attributes:
        folder: The new output, if it is a folder.
        file: The new output, if it is one file.
        target: The destination.
        aside: Where the old output is kept until it is removed.
    """

    folder: Spot
    file: Spot
    target: Spot
    aside: Spot


def is_of_staging(name: str) -> bool:
    """Report whether a conversion writes an object of this name below its staging prefix."""
    return _REMOTE.fullmatch(name) is not None


class Staging:
    """The staging folder of one destination. Stores: root, plan, receipts, files.

    Args:
        destination: Path or URL of the output.
        arbiter: Decides who may write it, on object stores that ignore create-only requests.
    """

    def __init__(self, destination: str, arbiter: Arbiter | None = None) -> None:
        parent, name = split_url(destination)
        if not name:
            raise UsageError(f"cannot write to {destination!r}: it has no name")
        self.destination, self.name, self.parent = destination.rstrip("/") or "/", name, parent
        self.url = join_url(parent, f".{name}.ckptcore")
        self.lease: Lease | None = None
        self.arbiter = arbiter
        self._kept: KeptRecords | None = None  # of a destination on an object store, under its lease
        self._leftovers: list[str] | None = None
        self.uploads: Uploads | None = None  # those of the plan that this process is about to carry out
        self.none_begun = False  # whether the journal of uploads was empty when the lease was taken
        here = local_path(self.url)
        self._home = SealedFolder(here, foreign=_refuse_foreign) if here is not None else None
        self.root = self._store()
        self.plan, self.receipts, self.files = map(self._store, PARTS)

    @cached_property
    def places(self) -> ObjectPlaces | None:
        """The keys of the destination on a store with upload handles; None on other stores."""
        if self._home is not None:
            return None
        # A late import: local conversions need no object store.
        from ckptcore.conversion.staged_uploads import object_places

        return object_places(self.destination, self.url)

    @property
    def plan_uri(self) -> str:
        """Where the plan is stored; a worker needs nothing else."""
        return self.plan.url

    @classmethod
    def of_plan(cls, plan_uri: str) -> Staging:
        """Return the staging folder that a plan is in; raise `UsageError` for other paths."""
        above, part = split_url(plan_uri)
        parent, name = split_url(above)
        if part != "plan" or not (name.startswith(".") and name.endswith(".ckptcore")):
            raise UsageError(f"{plan_uri!r} is not the plan of a conversion")
        return cls(join_url(parent, name[1 : -len(".ckptcore")]))

    @contextlib.contextmanager
    def lock(self, *, shared: bool = False, make: bool = False) -> Iterator[None]:
        """Lock the destination against other processes of this machine.

        Args:
            shared: A shared lock, for several workers of one plan.
            make: Create the staging folder if there is none, and empty our own folder if other users could
                write to it. Without ``make``, a missing folder is not locked. On an object store the caller
                proves the lease, while it looks at the destination (`staged_plan.look_ahead`).

        Raises:
            Busy: Another process has the lock.
            StagingForeign: Other users than the trusted ones could write to the folder.
            DestinationUnwritable: A file system call failed.
        """
        if self._home is None:
            with self._leased(shared=shared, prove=not make):
                yield
            return
        fd = self._lock_file(self._home, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, make=make)
        try:
            if fd is not None and self._home.strangers_may_write():
                self._shut_out(self._home, begin=make)
            yield
        finally:
            if fd is not None:
                os.close(fd)

    @contextlib.contextmanager
    def _leased(self, *, shared: bool, prove: bool) -> Iterator[None]:
        """Hold the lease of a destination on an object store, or check that no other process does."""
        lease = self.places.lease(self.arbiter) if self.places is not None else None
        if lease is None:
            yield  # this store has no conditions; equal runs write equal bytes
        elif shared:
            lease.require_free()
            yield
        else:
            lease.take(prove=prove)
            self.lease = lease
            try:
                with self._keeping():
                    yield
            except BaseException:
                if self.uploads is not None:
                    self.uploads.stop()
                lease.hurry()
                raise
            finally:
                with finishing():
                    if self.uploads is not None:
                        self.uploads.wait()
                    self.lease = None
                    lease.release()

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """Keep what this process writes and reads of the records, while nobody else writes them."""
        # Late imports: local conversions need no object store.
        from ckptcore.store.objects.kept_records import KeptRecords
        from ckptcore.store.s3 import S3Store

        stores = [store for store in (self.root, self.plan, self.receipts) if isinstance(store, S3Store)]
        self._kept = KeptRecords()
        for store in stores:
            store.kept = self._kept
        try:
            yield
        finally:
            for store in stores:
                store.kept = None

    def prove_lease(self) -> bool:
        """Complete taking the lease; return whether another run may have worked here until then."""
        return self.lease is not None and self.lease.prove()

    def forget_records(self) -> None:
        """Ask the store for every record from now on."""
        if self._kept is not None:
            self._kept.clear()

    def require_lease(self) -> None:
        """Raise `Busy` if another process took over the lease of the destination."""
        if self.lease is not None:
            self.lease.require()

    def require_ours(self, *, published: bool) -> None:
        """Raise `StagingForeign` if anything in the staging folder is a link, or another user's.

        published: the output was moved out already; the old output may be in its place, and be any user's.
        """
        if self._home is None or self._home.open() is None:
            return
        for store in (self.plan, self.receipts) if published else (self.plan, self.receipts, self.files):
            if isinstance(store, SealedStore) and store.is_there():
                store.entries()
        for name in RECORDS:
            self.root.size(name)

    def require_room(self, nbytes: int) -> None:
        """Raise `DiskFull` if fewer bytes are free than are still to be written."""
        free = self.root.free_bytes()
        for seconds in _FREED_WITHIN:
            if free is None or nbytes <= free:
                break
            time.sleep(seconds)
            free = self.root.free_bytes()
        if free is not None and nbytes > free:
            raise DiskFull(
                f"cannot write {nbytes} bytes beside {self.destination}: {free} bytes are free",
                needed=nbytes,
                free=free,
            )

    def staged(self) -> dict[str, int]:
        """Return the files that are staged as a whole: path -> size. With uploads there may be none."""
        if self.places is None:
            return self.files.list()
        prefix = f"{self.places.staging}/files/"
        return {seen.key[len(prefix) :]: seen.nbytes for seen in self.places.client.list(prefix)}

    def require_planned(self, planned: Collection[str]) -> dict[str, int]:
        """Raise `OutputMismatch` for staged files and folders that are not in the plan.

        Returns:
            What `staged` does, on an object store; nothing on this machine.
        """
        staged: dict[str, int] = {}
        if not isinstance(self.files, SealedStore):
            staged = self.staged()
            odd = sorted(set(staged) - set(planned))
        elif not self.files.is_there():
            return staged
        else:
            folders = {f"{path[:at]}/" for path in planned for at, sign in enumerate(path) if sign == "/"}
            odd = [path for path, _ in self.files.entries() if path not in planned and path not in folders]
        if odd:
            raise OutputMismatch(
                f"cannot publish {self.files.url}: {len(odd)} of its files are not in the plan "
                f"(got {', '.join(odd[:5])!r})",
                hint="move them away if they are yours, or try --no-resume: it removes all staged files",
                files=odd[:100],
            )
        return staged

    @contextlib.contextmanager
    def spots(self) -> Iterator[Spots | None]:
        """Open the places of a local publication, and keep them open; None without a staging folder.

        Raises `StagingForeign`.
        """
        if self._home is None or self._home.open() is None:
            yield None
            return
        with self._home.below(()) as root, self._home.below(("files",)) as files:
            assert root is not None  # it is open
            path, parent = str(self._home.path), self._home.parent_fd()
            yield Spots(
                Spot(root, "files", f"{path}/files"),
                Spot(-1 if files is None else files, self.name, f"{path}/files/{self.name}"),
                Spot(parent, self.name, str(self._home.path.with_name(self.name))),
                Spot(root, REPLACED, f"{path}/{REPLACED}"),
            )

    @contextlib.contextmanager
    def moving(self, *, single: bool) -> Iterator[None]:
        """Check that the block moves the content of this staging folder to the destination.

        A user who may rename in the parent could have exchanged folders or redirected the path.
        Raises `StagingForeign`.
        """
        if self._home is None:
            yield
            return
        with self._home.below(("files",) if single else ()) as fd:
            staged = look(fd, self.name if single else "files") if fd is not None else None
        if staged is None or not self._home.in_place():
            raise strange(str(self._home.path), "it was moved away while a run used it")
        self._require_parent(self._home)
        yield
        self._require_parent(self._home)
        target = str(self._home.path.with_name(self.name))
        now = look(self._home.parent_fd(), self.name)
        if now is None:
            raise strange(target, "it was removed while it was published")
        if not os.path.samestat(now, staged):  # another user did it, or a file system that changes inodes
            require = self._home.owners.require_file if single else self._home.owners.require_folder
            require(now, target)

    def clear(self, *, publication: bool = True, names: Collection[str] | None = None) -> None:
        """Remove everything but the lock from the folder, and abort its uploads.

        Args:
            publication: Also remove the record of a publication.
            names: What is staged on an object store, if it was listed a moment ago under the same lease.
        """
        if self.places is not None:
            there = self.places.staged_names() if names is None else names
            self._clear_remote(self.places, there, publication=publication)
            return
        for part in (self.plan, self.receipts, self.files):
            part.remove_all()
        if publication and self.root.size(PUBLISHING) is not None:  # removing nothing needs a right, too
            self.root.remove(PUBLISHING)

    def _clear_remote(self, places: ObjectPlaces, there: Collection[str], *, publication: bool) -> None:
        if any(name.startswith(f"{UPLOADS}/") for name in there):
            places.journal.abort_all()
        places.remove_staged(name for name in there if name.partition("/")[0] in PARTS)
        if self._kept is not None:
            self._kept.emptied(*(f"{places.staging}/{part}/" for part in PARTS))
        if publication and PUBLISHING in there:
            self.root.remove(PUBLISHING)

    def sweep_parts(self, *, joints: bool = False) -> None:
        """Remove unfinished files of killed writers. joints: also files whose parts were never joined."""
        kinds = ("part", "joint") if joints else ("part",)
        for store in (self.plan, self.receipts, self.files):
            if isinstance(store, SealedStore) and store.is_there():
                for path in store.list():
                    found = _UNFINISHED.fullmatch(path)
                    if found and found["kind"] in kinds:
                        store.remove(path)

    def remove(self) -> None:
        """Remove the staging folder.

        It is renamed first: if this run is killed here, no later run resumes in a partly removed folder.
        """
        if self._home is None:
            self._remove_remote()
            return
        for store in (self.root, self.plan, self.receipts, self.files):
            store.close()
        self.sweep_gone()
        if self._remove_but_odd(self._home):
            return
        # With the clock: another machine's folder of this name may be left, which could not be removed.
        try:
            self._home.remove(f"{self._home.name}.gone-{os.getpid()}-{time.time_ns():x}")
        except OSError as error:
            raise unwritable(str(self._home.path), error) from error

    def list_leftovers(self) -> None:
        """List what `remove` will remove of an object store, if nothing more is staged under this lease."""
        if self.places is None or self.lease is None:
            return
        with contextlib.suppress(DestinationUnwritable):  # `remove` asks again, and says so
            names = self.places.staged_names()
            # The journal removes its own at the same time; what it leaves is in the list at the end. The last
            # record is written at the same time, too: its draft may not be in this list yet.
            self._leftovers = [name for name in names if not name.startswith(f"{UPLOADS}/") and name != DRAFT]
            self._leftovers.append(DRAFT)

    def _remove_remote(self) -> None:
        """Remove the staging prefix, if these credentials may: its output does not need it any more."""
        try:
            if self.places is not None:
                self._remove_objects(self.places)
                return
            for part in (self.files, self.plan, self.receipts):
                part.remove_all()
            for name in RECORDS:  # the record of the publication last: while it exists, the next run resumes
                self.root.remove(name)
        except DestinationUnwritable as error:
            _log.warning("%s is kept: %s", self.url, error.message)

    def _remove_objects(self, places: ObjectPlaces) -> None:
        """Remove what a conversion writes below the staging prefix; what others put there is kept."""
        # While the first is there, the next run resumes; while the second is, no other run works here.
        last = (PUBLISHING, LEASE)

        def remove_record() -> list[str]:
            self.root.remove(PUBLISHING)
            return []

        there = places.staged_names() if self._leftovers is None else self._leftovers
        self._leftovers = None
        for first in (True, False):
            kept = [name for name in there if not is_of_staging(name)]
            if any(name.startswith(f"{UPLOADS}/") for name in there):
                places.journal.abort_all()
            # The journal removes its own entries: one that its list lacked has an upload that is still open.
            places.remove_staged(
                name for name in there if name not in (*last, *kept) and not name.startswith(f"{UPLOADS}/")
            )
            if first:  # a list may lack names: there is another one, while the record is removed
                _, there = places.client.each(lambda call: call(), (remove_record, places.staged_names))
        if self.lease is not None:
            self.lease.release()
        if kept:
            _log.warning("%s is kept: no conversion writes %s", self.url, some(kept))

    def _remove_but_odd(self, home: SealedFolder) -> bool:
        """Remove only the run's own files if the folder has foreign ones; return whether it has."""
        fd = home.open()
        odd = [] if fd is None or not home.in_place() else _odd(names_in(fd))
        # An old output that a version without lists replaced is removed with its folder.
        odd = [name for name in odd if name != REPLACED or self.root.size(PUBLISHING) is None]
        if not odd:
            return False
        for part in (self.files, self.plan, self.receipts):
            part.remove_all()
        for name in RECORDS:
            self.root.remove(name)
        _log.warning("%s is kept: %s", home.path, ", ".join(odd[:5]))
        return True

    def is_unused(self) -> bool:
        """Return whether there is a staging folder without finished, published or foreign files."""
        root = self._home.open() if self._home is not None else None
        if root is None:
            return False
        for name in os.listdir(root):
            seen = look(root, name)
            folder = seen is not None and stat.S_ISDIR(seen.st_mode)
            plain = seen is not None and stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1
            if name == PUBLISHING or not (folder if name in PARTS else plain):
                return False
        receipts = self.receipts
        return not (isinstance(receipts, SealedStore) and receipts.is_there() and receipts.list())

    def sweep_gone(self) -> None:
        """Remove what a run that was killed in `remove` left, if it is ours and can be removed."""
        if self._home is None:
            return
        gone = re.compile(re.escape(f"{self._home.name}.gone-") + r"[0-9a-f-]+")
        with self._home.beside() as (parent, names):
            for name in filter(gone.fullmatch, names):
                self._sweep(self._home, parent, name)

    def _store(self, *inside: str) -> Store:
        if self._home is not None:
            return SealedStore(self._home, *inside)
        return open_store("/".join([self.url, *inside]))

    def _sweep(self, home: SealedFolder, parent: int, name: str) -> None:
        """Remove one folder with the name of a removed staging folder, if it is ours."""
        path = str(home.path.with_name(name))
        # Another user's folder stays, and so does what cannot be removed: no run needs the name.
        with contextlib.suppress(OSError, StagingForeign):
            fd = enter(parent, name, path, home.owners)
            if fd is None:
                return
            with closing_fd(fd):
                refuse_odd(Path(path), [n for n in _odd(names_in(fd)) if n != REPLACED])
            remove_tree(parent, name, path, home.owners)

    def _require_parent(self, home: SealedFolder) -> None:
        if not home.parent_in_place():
            raise strange(str(home.parent), "another folder took its place while a run used it")

    def _shut_out(self, home: SealedFolder, *, begin: bool) -> None:
        """Remove other users' write access to the folder. begin: nothing in it is kept.

        A folder with a begun publication is refused: the old output may be in it.
        """
        fd = home.open()
        assert fd is not None  # it is locked
        before = os.fstat(fd)
        shut = False
        if begin and self.root.size(PUBLISHING) is None:
            self.require_ours(published=False)
            self.clear()
            shut = home.shut_out()
            _log.info("other users could write to %s: it was emptied", home.path)
        elif home.shut_out():
            os.fchmod(fd, stat.S_IMODE(before.st_mode))
            raise self._loose(home, before)
        # If the owner cannot change the mode, the file system has no modes: there is no better one.
        if not shut and before.st_uid != home.owners.own:
            raise self._loose(home, before)

    def _loose(self, home: SealedFolder, seen: os.stat_result) -> StagingForeign:
        return StagingForeign(
            f"cannot use {home.path}: other users than the trusted ones could write to it "
            f"(got mode {stat.S_IMODE(seen.st_mode):04o})",
            hint=f"check that its content is yours, then run `chmod go-w {home.path}`; if several users "
            f"run one service, list them in {VARIABLE}",
            path=str(home.path),
        )

    def _lock_file(self, home: SealedFolder, kind: int, *, make: bool) -> int | None:
        failed: OSError | None = None
        for _ in range(_TRIES):
            home.close()
            try:
                fd = self._open_lock(home, make=make)
            except FileNotFoundError as error:  # another run has just finished and removed the folder
                failed = error
                time.sleep(_PAUSE_S)
                continue
            except OSError as error:
                raise self._unwritable(error) from error
            if fd is None:
                return None
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(fd)
                raise Busy(f"another process is writing {self.destination}") from error
            except OSError as error:
                os.close(fd)
                raise self._unwritable(error) from error
            # A finished run removes its folder and lock: then this lock protects nothing.
            root = home.open()
            assert root is not None  # the lock is in it
            named = look(root, LOCK)
            if named is not None and os.path.samestat(named, os.fstat(fd)) and home.in_place():
                return fd
            os.close(fd)
            failed = None
        if failed is not None:
            raise self._unwritable(failed) from failed
        raise Busy(f"other processes keep finishing {self.destination}")

    def _open_lock(self, home: SealedFolder, *, make: bool) -> int | None:
        root = home.open(make=make)
        if root is None:
            return None
        path = str(home.path / LOCK)
        seen = look(root, LOCK)
        if seen is not None:
            home.owners.require_file(seen, path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(LOCK, flags, 0o666, dir_fd=root)
        try:
            home.owners.require_file(os.fstat(fd), path)
        except CkptError:
            os.close(fd)
            raise
        return fd

    def _unwritable(self, error: OSError) -> DestinationUnwritable:
        why = error.strerror or str(error)
        for at in map(str, (Path(self.parent), *Path(self.parent).parents)):
            if os.path.islink(at) and not os.path.exists(at):
                why = f"{at} is a broken link"
        return DestinationUnwritable(f"cannot write beside {self.destination}: {why}")


def _odd(names: Names) -> list[str]:
    """Return the names in a staging folder that no run creates, sorted."""
    ours = {name for name, seen in names.items() if _is_ours(name, seen.st_mode)}
    return sorted(names.keys() - ours)


def _is_ours(name: str, mode: int) -> bool:
    return stat.S_ISDIR(mode) if name in PARTS else stat.S_ISREG(mode) and bool(_FILES.fullmatch(name))


def _refuse_foreign(path: Path, names: Names) -> None:
    """Raise `StagingForeign` for a folder that no run of ours can have left."""
    refuse_odd(path, [name for name in _odd(names) if name != REPLACED or PUBLISHING not in names])
    if names and LOCK not in names:
        raise strange(str(path), "no run has used it: it has files, but no lock")
