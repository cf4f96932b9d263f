"""Stage an output in a folder of this machine, beside its destination.

Its name can be guessed, so another user may have created it. A run uses, empties or removes only what belongs
to the trusted users (`ckptcore.store.sealed`); it refuses everything else with `StagingForeign`.

To publish, two folders change places in one step. The old output is then checked once more, where no other
process finds it. It is removed file by file as recorded, or restored. All steps use names in folders that are
kept open since the staging folder was opened: replacing a parent by a link redirects none of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ckptcore.conversion.staging.staging import (
    LOCK,
    MOVING,
    PARTS,
    PUBLISHING,
    RECORDS,
    REPLACED,
    Publication,
    Replaced,
    Staging,
    note,
    noted,
)
from ckptcore.errors import (
    Busy,
    CkptError,
    DestinationExists,
    DestinationUnwritable,
    DiskFull,
    StagingForeign,
)
from ckptcore.execution.parts import FilePart, cut
from ckptcore.execution.receipts import Receipt, is_intact, joint_name
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.plan import Plan
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget
from ckptcore.store import Readable
from ckptcore.store.file_status import FileStatus, NameKind, difference, same_content
from ckptcore.store.folder_tree import FOLDER as OPEN_FOLDER
from ckptcore.store.folder_tree import (
    DirEntryAt,
    closing_fd,
    enter,
    exchange,
    look,
    remove_tree,
    rename_file_new,
    rename_new,
)
from ckptcore.store.listing import Inventory, list_destination_at
from ckptcore.store.local_listing import status_at
from ckptcore.store.local_writer import sync_folder, unwritable
from ckptcore.store.owners import VARIABLE, untrusted_entry
from ckptcore.store.sealed import Names, SealedFolder, SealedStore, names_in, refuse_odd
from ckptcore.utils import host

if TYPE_CHECKING:
    from ckptcore.planning.compose import Composed

_exchange = exchange
_Inode = tuple[int, int] | None
# What link(2) says where there are no hard links (FAT, exFAT, some of FUSE and SMB), or no more of one file.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class PublishPaths:
    """The paths that a local publication moves files between.

    Attributes:
        folder: The new output, if it is a folder.
        file: The new output, if it is one file.
        target: The destination.
        aside: Where the old output is kept until it is removed.
    """

    folder: DirEntryAt
    file: DirEntryAt
    target: DirEntryAt
    aside: DirEntryAt

    def staged_as(self, published: DirEntryAt) -> DirEntryAt:
        """Return where an output was staged that is published by now."""
        status = published.look()
        return self.folder if status is not None and stat.S_ISDIR(status.st_mode) else self.file


def publish_local(staging: Staging, paths: PublishPaths, publication: Publication, *, single: bool) -> None:
    """Record a publication, then move the staged files into place.

    Args:
        staging: The staging folder, locked.
        paths: What is moved, and where.
        publication: The plan's digest, and what may be replaced.
        single: The output is one file.

    Raises:
        DestinationExists: Something else appeared at the destination; it stays as it is.
        DestinationUnwritable: A file system call failed.
    """
    # Written files must be complete on disk before the move makes them visible.
    staging.files.close()
    output = paths.file if single else paths.folder
    with _reporting(paths):
        # The names in the folder first, then the record, then the move, each on disk before the next: after a
        # power cut the record is never of files that are gone.
        sync_folder(paths.folder.name, paths.folder.folder_fd)
        # With the inode that is about to be moved: a rename keeps it, so the next run can
        # recognise what it finds at the destination.
        publication = replace(publication, identity=_identity(output), step=MOVING)
        note(staging, publication)
        _move(output, paths, publication.replaces)
        sync_folder(".", paths.target.folder_fd)


def is_in_place(paths: PublishPaths, record: Publication) -> bool:
    """Return whether the output of a publication is at its destination, unchanged."""
    return record.identity is not None and _identity(paths.target) == record.identity


def is_moved_out(paths: PublishPaths, old: DirEntryAt | None, record: Publication | None) -> bool:
    """Return whether the new output has left the staging folder; the old one may be in its place."""
    # Either the old one took its place in the exchange, or the recorded output is at the destination.
    return old in (paths.folder, paths.file) or (record is not None and is_in_place(paths, record))


def _identity(spot: DirEntryAt) -> tuple[int, ...] | None:
    """Return (device, inode, mtime in ns) of the file or folder at a name; a rename keeps them."""
    status = spot.look()
    return None if status is None else (status.st_dev, status.st_ino, status.st_mtime_ns)


def _inode(spot: DirEntryAt) -> tuple[int, ...] | None:
    identity = _identity(spot)
    return None if identity is None else identity[:2]


def old_output(paths: PublishPaths, record: Publication | None) -> DirEntryAt | None:
    """Return where the output is that a killed run replaced or was about to replace, or None."""
    with _reporting(paths):
        # What was set aside has a name of its own, so it needs no record to be recognised.
        if paths.aside.look() is not None:
            return paths.aside
        if record is None or record.identity is None:
            return None
        top, new = record.replaces.inventory.get(""), record.identity[:2]
        if _inode(paths.target) == new:  # killed after the exchange, whatever was exchanged
            exchanged = paths.staged_as(paths.target)
            # A file that was linked to its destination, and whose staged name was not removed yet, is not
            # exchanged: both names are the new output.
            linked = _inode(exchanged) == new  # it still has both names
            return None if linked or _is_empty(exchanged) else exchanged
        # Killed between two renames, without an exchange: the old output is where the new one was staged.
        for staged in (paths.file, paths.folder):
            if top is not None and _inode(staged) == top.identity != new:
                return staged
    return None


def _is_empty(spot: DirEntryAt) -> bool:
    """Return whether a name does not exist or is an empty folder."""
    status = spot.look()
    if status is None or not stat.S_ISDIR(status.st_mode):
        return status is None
    with closing_fd(os.open(spot.name, OPEN_FOLDER, dir_fd=spot.folder_fd)) as below:
        return not os.listdir(below)


def finish_interrupted_publish(paths: PublishPaths, old: DirEntryAt, record: Publication) -> None:
    """Remove the old output if the new one is in its place, otherwise restore it."""
    target, top = paths.target, record.replaces.inventory.get("")
    with _reporting(paths):
        if record.identity is not None and _inode(target) == record.identity[:2]:
            staged = paths.staged_as(target)
            if old != paths.aside:
                rename_new(old, paths.aside)
            _remove_aside(staged, paths, record.replaces, resumed=True)
        # Neither ours nor the old one: somewhere a choice is needed that no program can make.
        elif target.look() is not None:
            raise DestinationExists(
                f"{target.path} appeared meanwhile, and the output that it replaces is in {old.path}",
                hint=f"move one of the two to where it belongs: nothing of {old.path} was removed",
            )
        # By inode: what would be restored must be exactly what was moved away.
        elif top is not None and _inode(old) != top.identity:
            raise StagingForeign(
                f"cannot move {old.path} to {target.path}: it is not what was moved away from there "
                f"(got inode {_inode(old)}, recorded was {top.identity})",
                hint="find out who wrote it, and move it away; nothing of it was changed",
                path=old.path,
            )
        else:
            rename_new(old, target)


def _move(staged: DirEntryAt, paths: PublishPaths, replaces: Replaced) -> None:
    target, aside = paths.target, paths.aside
    # An empty folder is replaced by rename(2) itself.
    if not replaces.inventory or (_is_folder(staged) and not _worth_keeping(replaces.inventory)):
        _move_to_free(staged, target)
        return
    # Listed again right before it is moved: the check before it may be hours old.
    now = list_destination_at(target)
    name = difference(replaces.inventory, now)
    if name is not None:
        raise _changed(target, name, replaces.inventory.get(name), now.get(name))
    # In one step where the file system has it: at no time is the destination without an output.
    if _exchange(staged, target):
        rename_new(staged, aside)
    else:
        rename_new(target, aside)
        # In two steps elsewhere; an error in between restores the old output, if nothing else took the place.
        try:
            _move_to_free(staged, target)
        except BaseException:
            if target.look() is None:
                rename_new(aside, target)
            raise
    _remove_aside(staged, paths, replaces, resumed=False)


def _changed(
    target: DirEntryAt, name: str, was: FileStatus | None, now: FileStatus | None
) -> DestinationExists:
    """Return the error for a destination that changed since it was checked."""
    path = os.path.join(target.path, name) if name else target.path
    if was is not None and now is not None and same_content(was, now, status=False):
        return DestinationExists(
            f"cannot replace {path}: its status changed since it was checked, and it may have been rewritten "
            f"(got ctime {now.ctime} ns, it was {was.ctime} ns)",
            hint="inspect it, and run the same command again: it is checked anew",
        )
    return DestinationExists(
        f"{path} appeared, disappeared or changed meanwhile", hint="inspect it, then run again"
    )


def _is_folder(spot: DirEntryAt) -> bool:
    status = spot.look()
    return status is not None and stat.S_ISDIR(status.st_mode)


def _worth_keeping(inventory: Inventory) -> bool:
    """Return whether there is anything but an empty folder."""
    return any(name or entry.kind is not NameKind.FOLDER for name, entry in inventory.items())


def _move_to_free(staged: DirEntryAt, target: DirEntryAt) -> None:
    folders = {"src_dir_fd": staged.folder_fd, "dst_dir_fd": target.folder_fd}
    if _is_folder(staged):
        try:
            # rename(2) refuses a folder with files, so no output that appeared meanwhile is lost.
            host.rename(staged.name, target.name, **folders)  # replaces only an empty folder
        except OSError as error:
            if target.look() is not None:
                raise DestinationExists(f"{target.path} appeared meanwhile") from error
            raise
        return
    try:
        # A hard link is the only way to create a name that must not exist, on file systems without renameat2.
        host.link(staged.name, target.name, **folders)  # unlike rename, replaces no file
    except FileExistsError as error:
        raise DestinationExists(f"{target.path} appeared meanwhile") from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            rename_file_new(staged, target)
        except FileExistsError as exists:
            raise DestinationExists(f"{target.path} appeared meanwhile") from exists
        return
    # Only the staged name goes: the output has its name at the destination by now.
    host.unlink(staged.name, dir_fd=staged.folder_fd)


def _remove_aside(staged: DirEntryAt, paths: PublishPaths, replaces: Replaced, *, resumed: bool) -> None:
    """Remove what was moved aside, if it is unchanged since it was checked.

    resumed: a killed run may have removed a part of it. Then nothing is restored: files that changed are kept
    beside the destination.

    Raises:
        DestinationExists: It changed; everything is restored to its place.
    """
    # Else a power cut could undo the move, and leave at the destination what is left of the old output.
    sync_folder(".", paths.target.folder_fd)
    moved_aside, target, aside = list_destination_at(paths.aside), paths.target, paths.aside
    # Moving a file changes its own status.
    strangers = [
        n
        for n, e in moved_aside.items()
        if not same_content(replaces.inventory.get(n), e, status=bool(n))
        # Resumed, with names missing: the killed run had begun to remove it, so nothing complete could be
        # restored.
    ]
    if not strangers and replaces.home:
        _keep_aside(paths, replaces.home)
        return
    if not strangers or (resumed and not moved_aside.keys() >= replaces.inventory.keys()):
        _discard(paths, replaces.inventory)
        return
    # Something was written to the old output while it was replaced: it is restored, and the new one staged
    # again.
    if not _exchange(aside, target):
        rename_new(target, staged)
        rename_new(aside, target)
    else:
        rename_new(aside, staged)
    raise DestinationExists(
        f"{os.path.join(target.path, strangers[0])} appeared or changed during publishing; "
        "it is restored to its place",
        hint="inspect it, then run again",
    )


def _keep_aside(paths: PublishPaths, home: str) -> None:
    """Move what was replaced into the folder with its record, from which it can be restored."""
    aside = paths.aside
    path = os.path.join(os.path.dirname(paths.target.path), home)
    # By a descriptor: a parent that is replaced by a link redirects nothing.
    with closing_fd(os.open(home, OPEN_FOLDER, dir_fd=paths.target.folder_fd)) as home_fd:
        rename_new(aside, DirEntryAt(home_fd, paths.target.name, os.path.join(path, paths.target.name)))
        sync_folder(".", home_fd)
    _log.warning("%s is replaced; what was there can be restored from %s", paths.target.path, path)


def _discard(paths: PublishPaths, inventory: Inventory) -> None:
    """Remove what was replaced, name by name; what is not recorded, or stays, is kept beside its place."""
    aside = paths.aside
    status = aside.look()
    if status is None:
        return
    if stat.S_ISDIR(status.st_mode):
        # The status of a file with several names changes when another of its names is removed.
        # Several hard links of one file have one status, which changes with the first that is removed.
        names = Counter(entry.identity for entry in inventory.values())
        with closing_fd(os.open(aside.name, OPEN_FOLDER, dir_fd=aside.folder_fd)) as below:
            _remove_recorded(below, aside.path, "", inventory, {inode for inode, n in names.items() if n > 1})
        with contextlib.suppress(OSError):  # it is not empty
            host.rmdir(aside.name, dir_fd=aside.folder_fd)
            # An empty folder is gone with that; one that is not empty is kept below.
            return
    elif same_content(inventory.get(""), status_at(aside, status), status=False):
        host.unlink(aside.name, dir_fd=aside.folder_fd)
        return
    # With process and time: several runs may keep something beside one destination.
    kept_beside = paths.target.beside(f"{paths.target.name}.kept-{os.getpid()}-{host.now_ns():x}")
    rename_new(aside, kept_beside)
    _log.warning(
        "what could not be removed of the output that %s replaced, or was written to it meanwhile, is in %s",
        paths.target.path,
        kept_beside.path,
    )


def _remove_recorded(
    folder_fd: int, path: str, prefix: str, inventory: Inventory, twins: Collection[_Inode]
) -> None:
    """Remove recorded names below a descriptor, depth first; each is checked right before."""
    for name in os.listdir(folder_fd):
        # The status now, and not of the listing: the entry may have been exchanged since.
        spot, was = DirEntryAt(folder_fd, name, f"{path}/{name}"), inventory.get(prefix + name)
        try:
            status = spot.look()
            if status is None or was is None:
                continue
            now = status_at(spot, status)
            if not same_content(was, now, status=was.identity not in twins):
                continue
            if was.kind is not NameKind.FOLDER:
                host.unlink(name, dir_fd=folder_fd)
                continue
            with closing_fd(os.open(name, OPEN_FOLDER, dir_fd=folder_fd)) as below:
                # The folder that was opened must be the one that was looked at.
                if os.path.samestat(os.fstat(below), status):
                    _remove_recorded(below, spot.path, f"{prefix}{name}/", inventory, twins)
            host.rmdir(name, dir_fd=folder_fd)
        except OSError as error:  # not empty, or not removable: it is kept
            _log.debug("%s is kept: %s", spot.path, error.strerror)


@contextlib.contextmanager
def _reporting(paths: PublishPaths) -> Iterator[None]:
    """Raise `DestinationUnwritable` for a file system call that fails in the block."""
    try:
        yield
    except OSError as error:
        raise DestinationUnwritable(
            f"cannot publish {paths.target.path}: {error.strerror or error}"
        ) from error


# XFS counts the blocks of a file that was just removed, such as a killed run's, as free a moment later.
_FREED_WITHIN = (0.05, 0.2, 0.5, 1.0)  # seconds from one look to the next
# The files of a staging folder: its own, those being written, decoded items, and what an NFS client keeps of
# removed files that are open. All other files are foreign.
_FILES = re.compile(r"lock|(publishing|replaces|request)\.json|\..+\.part|tmp\w{8}|\.nfs[0-9a-f]+")
_UNFINISHED = re.compile(r"(?:.*/)?\..+\.(?P<kind>part|joint)")
_TRIES, _PAUSE_S = 50, 0.01
_log = logging.getLogger("ckptcore")


class LocalStaging(Staging):
    """The staging folder of a destination on this machine, with a lock file."""

    root: SealedStore
    plan: SealedStore
    receipts: SealedStore
    files: SealedStore
    _lock_fd: int | None = None

    @cached_property
    def _home(self) -> SealedFolder:
        return SealedFolder(Path(self.url), foreign=_refuse_foreign)

    def _store(self, *inside: str) -> SealedStore:
        return SealedStore(self._home, *inside)

    @property
    def lock_fd(self) -> int | None:
        """The descriptor of the lock that this object has; None without one."""
        return self._lock_fd

    @property
    def scratch(self) -> str:
        """The staging folder."""
        return str(self.root.local)

    @contextlib.contextmanager
    def lock(self, *, shared: bool = False, make: bool = False) -> Iterator[None]:
        """Lock the destination against other processes of this machine.

        With ``make``, our own folder is emptied if other users could write to it; without, a missing folder
        is not locked. Also raises `StagingForeign` for what other users could write to, and
        `DestinationUnwritable`.
        """
        # The lock comes first: whoever finds the folder open to others must not empty it under another run.
        fd = self._lock_file(fcntl.LOCK_SH if shared else fcntl.LOCK_EX, make=make)
        try:
            if fd is not None and self._home.strangers_may_write():
                self._shut_out(begin=make)
            self._lock_fd = fd
            yield
        finally:
            self._lock_fd = None
            if fd is not None:
                os.close(fd)

    def require_lease(self) -> None:
        """Do nothing: a lock of this machine lasts until it is given back."""

    def published_plan(self, record: Publication | None) -> str | None:
        """Return the digest of the plan whose output is at the destination, or None."""
        return record.plan if record is not None and self._is_in_place(record) else None

    def _is_in_place(self, record: Publication) -> bool:
        """Return whether the recorded output is at its destination, unchanged."""
        try:
            with self._publish_paths() as paths:
                return paths is not None and is_in_place(paths, record)
        except OSError:  # this process did not write what it cannot read
            return False

    def finish_interrupted_publish(self) -> None:
        """Finish a publication that a killed run left unfinished; do nothing if there is none.

        If the new output is in its place, the old one is removed; otherwise it is restored.

        Raises:
            StagingForeign: Something in the staging folder does not belong to the trusted users, or the old
                output is there without a record of its replacement. Nothing was changed.
            DestinationExists: Another process wrote to the destination: the old output can be neither removed
                nor restored.
        """
        record = noted(self)
        with self._publish_paths() as paths:
            if paths is None:
                return
            old = old_output(paths, record)
            # The exchanged folder may be another user's, and be where the staged files were.
            self._require_ours(published=is_moved_out(paths, old, record))
            if old is None:
                return
            # Without a record nothing says to which side the old output belongs.
            if record is None:
                raise StagingForeign(
                    f"cannot resume in {os.path.dirname(old.path)}: {old.name} in it was moved away from "
                    f"{self.destination}, and there is no record of the reason",
                    hint="move it to where it belongs; nothing of it was removed",
                    path=old.path,
                )
            finish_interrupted_publish(paths, old, record)

    def publish(self, publication: Publication, commit: Collection[str], *, single: bool) -> None:
        """Move the staged files to the destination in one step.

        A user who may rename in the parent could have exchanged folders or redirected the path: what is at
        the destination then is compared with what was staged. Raises `StagingForeign`.
        """
        with self._home.below(("files",) if single else ()) as fd:
            staged_output = look(fd, self.name if single else "files") if fd is not None else None
        # Both: what is staged, and that the folder itself is still at its name.
        if staged_output is None or not self._home.in_place():
            raise untrusted_entry(str(self._home.path), "it was moved away while a run used it")
        # Once before and once after: the parent may be exchanged in between.
        self._require_parent()
        with self._publish_paths() as paths:
            assert paths is not None  # it is locked
            publish_local(self, paths, publication, single=single)
        self._require_parent()
        target = str(self._home.path.with_name(self.name))
        published = look(self._home.parent_fd(), self.name)
        if published is None:
            raise untrusted_entry(target, "it was removed while it was published")
        # Another user did it, or a file system that changes inodes.
        # The same inode is what rename promises; a file system that makes a new one is
        # accepted if it belongs to a trusted user.
        if not os.path.samestat(published, staged_output):
            require = self._home.owners.require_file if single else self._home.owners.require_folder
            require(published, target)

    def is_unchanged(self, record: Publication | None, receipts: Sequence[Receipt], output: Readable) -> bool:
        """Report whether an output that was published is still what was written, by sizes and digests."""
        return all(
            output.size(r.path) == r.nbytes and (r.digest is None or is_intact(output, r)) for r in receipts
        )

    def _require_ours(self, *, published: bool) -> None:
        """Raise `StagingForeign` if anything in the staging folder is a link, or another user's.

        published: the output was moved out already; the old output may be in its place, and be any user's.
        """
        if self._home.open() is None:
            return
        # Once published, `files` may be the exchanged old output, with anything in it.
        for store in (self.plan, self.receipts) if published else (self.plan, self.receipts, self.files):
            if store.is_there():
                store.entries()
        for name in RECORDS:
            self.root.size(name)

    def require_planned(self, planned: Collection[str]) -> dict[str, int]:
        """Raise `OutputMismatch` for staged files and folders that are not in the plan."""
        if self.files.is_there():
            # Every folder of a planned path, too: an unplanned empty folder would be published as well.
            folders = {f"{path[:n]}/" for path in planned for n, sign in enumerate(path) if sign == "/"}
            names = [path for path, _ in self.files.entries() if path not in planned and path not in folders]
            if names:
                raise self._unplanned(names)
        return {}

    def check_staged_plan(self, composed: Composed, stamps: dict[str, str | None]) -> None:
        """Compare an earlier run's staging folder with the same plan, before files are added.

        Files of the plan that differ are replaced: a head with the right digest may be stored beside the file
        plans of another. Raises `OutputMismatch` for staged files that are not in the plan.
        """
        # A late import: processes that write the files of a plan compose none.
        from ckptcore.conversion.staging.staged_plan import planned_paths, save

        paths = planned_paths(composed.plan.files, composed.plan.extra)
        self.require_planned(paths | set(map(joint_name, paths)))
        save(self, composed, stamps)

    def cut(self, plan: Plan, file: FilePlan, nbytes: int, settings: Settings) -> tuple[FilePart, ...]:
        """Cut an output file into parts of about ``nbytes``; empty if one worker must write it."""
        return cut(file, nbytes, Budget.of(settings))

    def take_times(self, place: str) -> None:
        """Give the staged files and folders the modes and the modification times of those at a place.

        Trainers that rotate their saves by time would take a changed one for the newest.
        """
        with self._home.below(("files",)) as staged:
            assert staged is not None  # it was filled
            # Deepest first: writing inside a folder changes the folder's own time.
            for below, folders, files, fd in os.fwalk(".", topdown=False, dir_fd=staged):
                for name in (*files, *folders, *(["."] if below == "." else [])):
                    original = look(None, os.path.join(place, below, name))
                    if original is not None:
                        os.chmod(name, stat.S_IMODE(original.st_mode), dir_fd=fd)
                        os.utime(name, ns=(original.st_atime_ns, original.st_mtime_ns), dir_fd=fd)

    def require_room(self, nbytes: int) -> None:
        """Raise `DiskFull` if fewer bytes are free than are still to be written."""
        free = self.root.free_bytes()
        # Looked at several times, as room may come back a moment after files were removed.
        for seconds in _FREED_WITHIN:
            if free is None or nbytes <= free:
                break
            host.sleep(seconds)
            free = self.root.free_bytes()
        if free is not None and nbytes > free:
            raise DiskFull(
                f"cannot write {nbytes} bytes beside {self.destination}: {free} bytes are free",
                needed=nbytes,
                free=free,
            )

    @contextlib.contextmanager
    def _publish_paths(self) -> Iterator[PublishPaths | None]:
        """Open the paths of a publication, and keep them open; None without a staging folder.

        Raises `StagingForeign`.
        """
        if self._home.open() is None:
            yield None
            return
        with self._home.below(()) as root, self._home.below(("files",)) as files:
            assert root is not None  # it is open
            path, parent = str(self._home.path), self._home.parent_fd()
            yield PublishPaths(
                DirEntryAt(root, "files", f"{path}/files"),
                DirEntryAt(-1 if files is None else files, self.name, f"{path}/files/{self.name}"),
                DirEntryAt(parent, self.name, str(self._home.path.with_name(self.name))),
                DirEntryAt(root, REPLACED, f"{path}/{REPLACED}"),
            )

    def sweep_parts(self, *, joints: bool = False) -> None:
        """Remove unfinished files of killed writers. joints: also files whose parts were never joined."""
        kinds = ("part", "joint") if joints else ("part",)
        for store in (self.plan, self.receipts, self.files):
            if store.is_there():
                for path in store.list():
                    match = _UNFINISHED.fullmatch(path)
                    if match and match["kind"] in kinds:
                        store.remove(path)

    def remove(self) -> None:
        """Remove the staging folder.

        It is renamed first: if this run is killed here, no later run resumes in a partly removed folder.
        """
        # Descriptors are closed first: a folder that is open cannot be removed on
        # every file system (NFS keeps its files).
        for store in (self.root, self.plan, self.receipts, self.files):
            store.close()
        self.sweep_gone()
        if self._remove_but_odd():
            return
        # With the clock: another machine's folder of this name may be left, which could not be removed.
        try:
            self._home.remove(f"{self._home.name}.gone-{os.getpid()}-{host.now_ns():x}")
        except OSError as error:
            raise unwritable(str(self._home.path), error) from error

    def _remove_but_odd(self) -> bool:
        """Remove only the run's own files if the folder has foreign ones; return whether it has."""
        fd = self._home.open()
        # Only a folder that is still at its name is looked at: another one there is not ours to judge.
        odd = [] if fd is None or not self._home.in_place() else _unexpected_names(names_in(fd))
        # An old output that a version without lists replaced is removed with its folder.
        odd = [name for name in odd if name != REPLACED or self.root.size(PUBLISHING) is None]
        if not odd:
            return False
        for part in (self.files, self.plan, self.receipts):
            part.remove_all()
        for name in RECORDS:
            self.root.remove(name)
        _log.warning("%s is kept: %s", self._home.path, ", ".join(odd[:5]))
        return True

    def is_unused(self) -> bool:
        """Return whether there is a staging folder without finished, published or foreign files."""
        root = self._home.open()
        if root is None:
            return False
        # A record or lock of ours has one name: a second one is another program's.
        for name in os.listdir(root):
            status = look(root, name)
            folder = status is not None and stat.S_ISDIR(status.st_mode)
            plain = status is not None and stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if name == PUBLISHING or not (folder if name in PARTS else plain):
                return False
        return not (self.receipts.is_there() and self.receipts.list())

    def sweep_gone(self) -> None:
        """Remove what a run that was killed in `remove` left, if it is ours and can be removed."""
        gone = re.compile(re.escape(f"{self._home.name}.gone-") + r"[0-9a-f-]+")
        with self._home.beside() as (parent, names):
            for name in filter(gone.fullmatch, names):
                self._sweep(parent, name)

    def _sweep(self, parent: int, name: str) -> None:
        """Remove one folder with the name of a removed staging folder, if it is ours."""
        path = str(self._home.path.with_name(name))
        # Another user's folder stays, and so does what cannot be removed: no run needs the name.
        with contextlib.suppress(OSError, StagingForeign):
            fd = enter(parent, name, path, self._home.owners)
            if fd is None:
                return
            with closing_fd(fd):
                refuse_odd(Path(path), [n for n in _unexpected_names(names_in(fd)) if n != REPLACED])
            remove_tree(parent, name, path, self._home.owners)

    def _require_parent(self) -> None:
        if not self._home.parent_in_place():
            raise untrusted_entry(str(self._home.parent), "another folder took its place while a run used it")

    def _shut_out(self, *, begin: bool) -> None:
        """Remove other users' write access to the folder. begin: nothing in it is kept.

        A folder with a begun publication is refused: the old output may be in it.
        """
        fd = self._home.open()
        assert fd is not None  # it is locked
        before = os.fstat(fd)
        shut = False
        if begin and self.root.size(PUBLISHING) is None:
            self._require_ours(published=False)
            self.clear()
            shut = self._home.shut_out()
            _log.info("other users could write to %s: it was emptied", self._home.path)
        elif self._home.shut_out():
            # The folder is refused, so its mode is what it was: its owner decides.
            os.fchmod(fd, stat.S_IMODE(before.st_mode))
            raise self._loose(before)
        # If the owner cannot change the mode, the file system has no modes: there is no better one.
        if not shut and before.st_uid != self._home.owners.process_uid:
            raise self._loose(before)

    def _loose(self, status: os.stat_result) -> StagingForeign:
        return StagingForeign(
            f"cannot use {self._home.path}: other users than the trusted ones could write to it "
            f"(got mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"check that its content is yours, then run `chmod go-w {self._home.path}`; if several "
            f"users run one service, list them in {VARIABLE}",
            path=str(self._home.path),
        )

    def _lock_file(self, kind: int, *, make: bool) -> int | None:
        """Open and lock the lock file of the staging folder; return None where there is none to open."""
        failed: OSError | None = None
        # A run that ends removes folder and lock while another one opens them: the loser tries again.
        for _ in range(_TRIES):
            self._home.close()
            try:
                fd = self._open_lock(make=make)
            except FileNotFoundError as error:  # another run has just finished and removed the folder
                failed = error
                host.sleep(_PAUSE_S)
                continue
            except OSError as error:
                raise self._unwritable(error) from error
            if fd is None:
                return None
            try:
                # Without waiting: a conversion takes hours, and its user
                # wants to know which process is at work.
                host.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(fd)
                raise Busy(f"another process is writing {self.destination}") from error
            except OSError as error:
                os.close(fd)
                raise self._unwritable(error) from error
            # A finished run removes its folder and lock: then this lock protects nothing.
            root = self._home.open()
            assert root is not None  # the lock is in it
            # A lock on a file without a name excludes nobody: the next run creates another one.
            named = look(root, LOCK)
            if named is not None and os.path.samestat(named, os.fstat(fd)) and self._home.in_place():
                return fd
            os.close(fd)
            failed = None
        if failed is not None:
            raise self._unwritable(failed) from failed
        raise Busy(f"other processes keep finishing {self.destination}")

    def _open_lock(self, *, make: bool) -> int | None:
        root = self._home.open(make=make)
        if root is None:
            return None
        path = str(self._home.path / LOCK)
        status = look(root, LOCK)
        if status is not None:
            self._home.owners.require_file(status, path)
        # Never through a link, without waiting for a FIFO's other end, and closed in child processes.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(LOCK, flags, 0o666, dir_fd=root)
        try:
            self._home.owners.require_file(os.fstat(fd), path)
        except CkptError:
            os.close(fd)
            raise
        return fd

    def _unwritable(self, error: OSError) -> DestinationUnwritable:
        why = error.strerror or str(error)
        # The usual reason for a path that cannot be created, and nothing that the error number says.
        for folder in map(str, (Path(self.parent), *Path(self.parent).parents)):
            if os.path.islink(folder) and not os.path.exists(folder):
                why = f"{folder} is a broken link"
        return DestinationUnwritable(f"cannot write beside {self.destination}: {why}")


def _unexpected_names(names: Names) -> list[str]:
    """Return the names in a staging folder that no run creates, sorted."""
    ours = {name for name, status in names.items() if _is_ours(name, status.st_mode)}
    return sorted(names.keys() - ours)


def _is_ours(name: str, mode: int) -> bool:
    return stat.S_ISDIR(mode) if name in PARTS else stat.S_ISREG(mode) and bool(_FILES.fullmatch(name))


def _refuse_foreign(path: Path, names: Names) -> None:
    """Raise `StagingForeign` for a folder that no run of ours can have left."""
    refuse_odd(
        path, [name for name in _unexpected_names(names) if name != REPLACED or PUBLISHING not in names]
    )
    # Every run creates its lock first, so files without a lock are of another program.
    if names and LOCK not in names:
        raise untrusted_entry(str(path), "no run has used it: it has files, but no lock")
