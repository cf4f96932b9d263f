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
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from ckptcore.conversion.publication_record import MOVING, Publication, Replaced, note, noted
from ckptcore.conversion.staging import Spots, Staging
from ckptcore.errors import DestinationExists, DestinationUnwritable, StagingForeign
from ckptcore.store.file_status import FileStatus, NameKind, difference, same_content
from ckptcore.store.folder_tree import FOLDER as OPEN_FOLDER
from ckptcore.store.folder_tree import Spot, closing_fd, exchange, rename_file_new, rename_new
from ckptcore.store.listing import Inventory, list_destination_at
from ckptcore.store.local_listing import status_at
from ckptcore.store.local_writer import sync_folder

_log = logging.getLogger("ckptcore")
_exchange = exchange
_Inode = tuple[int, int] | None
# What link(2) says where there are no hard links (FAT, exFAT, some of FUSE and SMB), or no more of one file.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)


def publish_local(staging: Staging, publication: Publication, *, single: bool) -> None:
    """Record a publication, then move the staged files into place.

    Args:
        staging: The staging folder, locked.
        publication: The plan's digest, and what may be replaced.
        single: The output is one file.

    Raises:
        DestinationExists: Something else appeared at the destination; it stays as it is.
        DestinationUnwritable: A file system call failed.
    """
    staging.files.close()
    with staging.spots() as spots:
        assert spots is not None  # it is locked
        staged = spots.file if single else spots.folder
        try:
            sync_folder(spots.folder.name, spots.folder.at)
            publication = replace(publication, identity=_identity(staged), step=MOVING)
            note(staging, publication)
            _move(staged, spots, publication.replaces)
            sync_folder(".", spots.target.at)
        except OSError as error:
            raise _unpublished(spots, error) from error


def conclude(staging: Staging) -> None:
    """Finish a local publication that a killed run left unfinished; do nothing if there is none.

    If the new output is in its place, the old one is removed; otherwise it is restored.

    Raises:
        StagingForeign: Something in the staging folder does not belong to the trusted users, or the old
            output is there without a record of its replacement. Nothing was changed.
        DestinationExists: Another process wrote to the destination: the old output can be neither removed nor
            restored.
    """
    if staging.root.local is None:
        return
    begun = noted(staging)
    with staging.spots() as spots:
        if spots is None:
            return
        try:
            old = _old_output(spots, begun)
        except OSError as error:
            raise _unpublished(spots, error) from error
        # The exchanged folder may be another user's, and be where the staged files were.
        moved = old in (spots.folder, spots.file) or (begun is not None and _is_in_place(spots, begun))
        staging.require_ours(published=moved)
        if old is None:
            return
        if begun is None:
            raise StagingForeign(
                f"cannot resume in {os.path.dirname(old.path)}: {old.name} in it was moved away from "
                f"{staging.destination}, and there is no record of the reason",
                hint="move it to where it belongs; nothing of it was removed",
                path=old.path,
            )
        try:
            _conclude(spots, old, begun)
        except OSError as error:
            raise _unpublished(spots, error) from error


def is_in_place(staging: Staging, begun: Publication) -> bool:
    """Return whether the output of a local publication is at its destination, unchanged."""
    try:
        with staging.spots() as spots:
            return spots is not None and _is_in_place(spots, begun)
    except OSError:  # this process did not write what it cannot read
        return False


def _is_in_place(spots: Spots, begun: Publication) -> bool:
    return begun.identity is not None and _identity(spots.target) == begun.identity


def _identity(spot: Spot) -> tuple[int, ...] | None:
    """Return (device, inode, mtime in ns) of the file or folder at a name; a rename keeps them."""
    seen = spot.look()
    return None if seen is None else (seen.st_dev, seen.st_ino, seen.st_mtime_ns)


def _inode(spot: Spot) -> tuple[int, ...] | None:
    found = _identity(spot)
    return None if found is None else found[:2]


def _old_output(spots: Spots, begun: Publication | None) -> Spot | None:
    """Return where the output is that a killed run replaced or was about to replace, or None."""
    if spots.aside.look() is not None:
        return spots.aside
    if begun is None or begun.identity is None:
        return None
    top, new = begun.replaces.inventory.get(""), begun.identity[:2]
    if _inode(spots.target) == new:  # killed after the exchange, whatever was exchanged
        seen = spots.target.look()
        staged = spots.folder if seen is not None and stat.S_ISDIR(seen.st_mode) else spots.file
        linked = _inode(staged) == new  # it still has both names
        return None if linked or _is_empty(staged) else staged
    for staged in (spots.file, spots.folder):
        if top is not None and _inode(staged) == top.identity != new:
            return staged
    return None


def _is_empty(spot: Spot) -> bool:
    """Return whether a name does not exist or is an empty folder."""
    seen = spot.look()
    if seen is None or not stat.S_ISDIR(seen.st_mode):
        return seen is None
    with closing_fd(os.open(spot.name, OPEN_FOLDER, dir_fd=spot.at)) as below:
        return not os.listdir(below)


def _conclude(spots: Spots, old: Spot, begun: Publication) -> None:
    target, top = spots.target, begun.replaces.inventory.get("")
    if begun.identity is not None and _inode(target) == begun.identity[:2]:
        seen = target.look()
        staged = spots.folder if seen is not None and stat.S_ISDIR(seen.st_mode) else spots.file
        if old != spots.aside:
            rename_new(old, spots.aside)
        _remove_aside(staged, spots, begun.replaces, begun=True)
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


def _move(staged: Spot, spots: Spots, replaces: Replaced) -> None:
    target, aside = spots.target, spots.aside
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
    _remove_aside(staged, spots, replaces, begun=False)


def _changed(target: Spot, name: str, was: FileStatus | None, now: FileStatus | None) -> DestinationExists:
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


def _is_folder(spot: Spot) -> bool:
    seen = spot.look()
    return seen is not None and stat.S_ISDIR(seen.st_mode)


def _worth_keeping(inventory: Inventory) -> bool:
    """Return whether there is anything but an empty folder."""
    return any(name or entry.kind is not NameKind.FOLDER for name, entry in inventory.items())


def _move_to_free(staged: Spot, target: Spot) -> None:
    at = {"src_dir_fd": staged.at, "dst_dir_fd": target.at}
    if _is_folder(staged):
        try:
            os.rename(staged.name, target.name, **at)  # replaces only an empty folder
        except OSError as error:
            if target.look() is not None:
                raise DestinationExists(f"{target.path} appeared meanwhile") from error
            raise
        return
    try:
        os.link(staged.name, target.name, **at, follow_symlinks=False)  # unlike rename, replaces no file
    except FileExistsError as error:
        raise DestinationExists(f"{target.path} appeared meanwhile") from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            rename_file_new(staged, target)
        except FileExistsError as found:
            raise DestinationExists(f"{target.path} appeared meanwhile") from found
        return
    os.unlink(staged.name, dir_fd=staged.at)


def _remove_aside(staged: Spot, spots: Spots, replaces: Replaced, *, begun: bool) -> None:
    """Remove what was moved aside, if it is unchanged since it was checked.

    begun: a killed run may have removed a part of it. Then nothing is restored: files that changed are kept
    beside the destination.

    Raises:
        DestinationExists: It changed; everything is restored to its place.
    """
    moved_aside, target, aside = list_destination_at(spots.aside), spots.target, spots.aside
    # Moving a file changes its own status.
    strangers = [
        n for n, e in moved_aside.items() if not same_content(replaces.inventory.get(n), e, status=bool(n))
    ]
    if not strangers and replaces.home:
        _keep_aside(spots, replaces.home)
        return
    if not strangers or (begun and not moved_aside.keys() >= replaces.inventory.keys()):
        _discard(spots, replaces.inventory)
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


def _keep_aside(spots: Spots, home: str) -> None:
    """Move what was replaced into the folder with its record, from which it can be restored."""
    aside = spots.aside
    path = os.path.join(os.path.dirname(spots.target.path), home)
    with closing_fd(os.open(home, OPEN_FOLDER, dir_fd=spots.target.at)) as at:
        rename_new(aside, Spot(at, spots.target.name, os.path.join(path, spots.target.name)))
        sync_folder(".", at)
    _log.warning("%s is replaced; what was there can be restored from %s", spots.target.path, path)


def _discard(spots: Spots, inventory: Inventory) -> None:
    """Remove what was replaced, name by name; names that are not recorded are kept beside the destination."""
    aside = spots.aside
    seen = aside.look()
    if seen is None:
        return
    if stat.S_ISDIR(seen.st_mode):
        # The status of a file with several names changes when another of its names is removed.
        names = Counter(entry.identity for entry in inventory.values())
        with closing_fd(os.open(aside.name, OPEN_FOLDER, dir_fd=aside.at)) as below:
            _remove_recorded(below, aside.path, "", inventory, {inode for inode, n in names.items() if n > 1})
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(aside.name, dir_fd=aside.at)
            return
    elif same_content(inventory.get(""), status_at(aside, seen), status=False):
        os.unlink(aside.name, dir_fd=aside.at)
        return
    kept = spots.target.beside(f"{spots.target.name}.kept-{os.getpid()}-{time.time_ns():x}")
    rename_new(aside, kept)
    _log.warning("files that appeared in %s while it was replaced are in %s", spots.target.path, kept.path)


def _remove_recorded(
    at: int, path: str, prefix: str, inventory: Inventory, twins: Collection[_Inode]
) -> None:
    """Remove recorded names below a descriptor, depth first; each is checked right before."""
    for name in os.listdir(at):
        spot, was = Spot(at, name, f"{path}/{name}"), inventory.get(prefix + name)
        try:
            seen = spot.look()
            if seen is None or was is None:
                continue
            now = status_at(spot, seen)
            if not same_content(was, now, status=was.identity not in twins):
                continue
            if was.kind is not NameKind.FOLDER:
                os.unlink(name, dir_fd=at)
                continue
            with closing_fd(os.open(name, OPEN_FOLDER, dir_fd=at)) as below:
                if os.path.samestat(os.fstat(below), seen):
                    _remove_recorded(below, spot.path, f"{prefix}{name}/", inventory, twins)
            os.rmdir(name, dir_fd=at)
        except OSError as error:  # not empty, or not removable: it is kept
            _log.debug("%s is kept: %s", spot.path, error.strerror)


def _unpublished(spots: Spots, error: OSError) -> DestinationUnwritable:
    return DestinationUnwritable(f"cannot publish {spots.target.path}: {error.strerror or error}")
