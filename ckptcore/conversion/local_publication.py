"""Publish staged files at a local destination, and remove or restore what was there.

Two folders change places in one step. The old output is then checked once more, where no other process finds
it. It is removed file by file as recorded, or restored. All steps use names in folders that are kept open
since the staging folder was opened: replacing a parent by a link redirects none of them. For object stores
see `ckptcore.conversion.remote_publication`; for the layout of staged files `ckptcore.conversion.staging`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from ckptcore.conversion.publication_record import MOVING, Publication, Replaced
from ckptcore.conversion.staging import Staging, note
from ckptcore.errors import DestinationExists, DestinationUnwritable, StagingForeign
from ckptcore.store.file_status import FileStatus, NameKind, difference, same_content
from ckptcore.store.folder_tree import FOLDER as OPEN_FOLDER
from ckptcore.store.folder_tree import DirEntryAt, closing_fd, exchange, rename_file_new, rename_new
from ckptcore.store.listing import Inventory, list_destination_at
from ckptcore.store.local_listing import status_at
from ckptcore.store.local_writer import sync_folder
from ckptcore.utils import host

_log = logging.getLogger("ckptcore")
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
    staging.files.close()
    output = paths.file if single else paths.folder
    with _reporting(paths):
        sync_folder(paths.folder.name, paths.folder.folder_fd)
        publication = replace(publication, identity=_identity(output), step=MOVING)
        note(staging, publication)
        _move(output, paths, publication.replaces)
        sync_folder(".", paths.target.folder_fd)


def is_in_place(paths: PublishPaths, record: Publication) -> bool:
    """Return whether the output of a publication is at its destination, unchanged."""
    return record.identity is not None and _identity(paths.target) == record.identity


def is_moved_out(paths: PublishPaths, old: DirEntryAt | None, record: Publication | None) -> bool:
    """Return whether the new output has left the staging folder; the old one may be in its place."""
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
        if paths.aside.look() is not None:
            return paths.aside
        if record is None or record.identity is None:
            return None
        top, new = record.replaces.inventory.get(""), record.identity[:2]
        if _inode(paths.target) == new:  # killed after the exchange, whatever was exchanged
            exchanged = paths.staged_as(paths.target)
            linked = _inode(exchanged) == new  # it still has both names
            return None if linked or _is_empty(exchanged) else exchanged
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
        elif target.look() is not None:
            raise DestinationExists(
                f"{target.path} appeared meanwhile, and the output that it replaces is in {old.path}",
                hint=f"move one of the two to where it belongs: nothing of {old.path} was removed",
            )
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
    if not replaces.inventory or (_is_folder(staged) and not _worth_keeping(replaces.inventory)):
        _move_to_free(staged, target)
        return
    now = list_destination_at(target)
    name = difference(replaces.inventory, now)
    if name is not None:
        raise _changed(target, name, replaces.inventory.get(name), now.get(name))
    if _exchange(staged, target):
        rename_new(staged, aside)
    else:
        rename_new(target, aside)
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
            host.rename(staged.name, target.name, **folders)  # replaces only an empty folder
        except OSError as error:
            if target.look() is not None:
                raise DestinationExists(f"{target.path} appeared meanwhile") from error
            raise
        return
    try:
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
        n for n, e in moved_aside.items() if not same_content(replaces.inventory.get(n), e, status=bool(n))
    ]
    if not strangers and replaces.home:
        _keep_aside(paths, replaces.home)
        return
    if not strangers or (resumed and not moved_aside.keys() >= replaces.inventory.keys()):
        _discard(paths, replaces.inventory)
        return
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
        names = Counter(entry.identity for entry in inventory.values())
        with closing_fd(os.open(aside.name, OPEN_FOLDER, dir_fd=aside.folder_fd)) as below:
            _remove_recorded(below, aside.path, "", inventory, {inode for inode, n in names.items() if n > 1})
        with contextlib.suppress(OSError):  # it is not empty
            host.rmdir(aside.name, dir_fd=aside.folder_fd)
            return
    elif same_content(inventory.get(""), status_at(aside, status), status=False):
        host.unlink(aside.name, dir_fd=aside.folder_fd)
        return
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
