"""Publishing: how do staged files become visible at their destination, and what becomes of what was there?

On a local disk two folders change places in one step; what was there is then looked at once more, where
nobody finds it, and goes file by file as it was recorded, or comes back. All steps are of names in folders
that are held open since the staging folder was: a parent that is swapped for a link leads none of them
elsewhere. On an object store see `ckptcore.conversion.remote_publication`. What a run stages, and where, is
`ckptcore.conversion.staging`'s.
"""

from __future__ import annotations

import contextlib
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
from ckptcore.store.folder_tree import FOLDER as OPEN_FOLDER
from ckptcore.store.folder_tree import Spot, closing_fd, exchange, rename_new
from ckptcore.store.inventory import FOLDER, Entry, Inventory, differs, entry_at, same, take_at
from ckptcore.store.local_writer import sync_folder

_log = logging.getLogger("ckptcore")
_exchange = exchange
_Inode = tuple[int, int] | None


def publish_local(staging: Staging, publication: Publication, *, single: bool) -> None:
    """Moves the staged files into place, recorded first.

    publication: with what it may replace. Raises `DestinationExists` when anything else lies at the
    destination by now, which stays as it is, and `DestinationUnwritable`.
    """
    staging.files.close()
    with staging.spots() as spots:
        assert spots is not None  # its lock is held
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
    """Ends a local publication that a killed run left in its middle: what was replaced is removed when the
    new output is in its place, and comes back when it is not. Does nothing otherwise.

    Raises `StagingForeign`, before anything else, when something in the staging folder is not the trusted
    users', and for what waits there without a record that says by what it was replaced; `DestinationExists`
    when that can neither go nor come back: then somebody else's lies at the destination.
    """
    begun = noted(staging)
    if staging.root.local is None:
        return
    with staging.spots() as spots:
        if spots is None:
            return
        try:
            held = _waiting(spots, begun)
        except OSError as error:
            raise _unpublished(spots, error) from error
        # What was exchanged may be anybody's, and lie where the staged files did.
        moved = held in (spots.folder, spots.file) or (begun is not None and _is_in_place(spots, begun))
        staging.require_ours(published=moved)
        if held is None:
            return
        if begun is None:
            raise StagingForeign(
                f"cannot go on in {os.path.dirname(held.path)}: {held.name} in it was moved away from "
                f"{staging.destination}, and no record says what for",
                hint="move it to where it belongs; nothing of it was removed",
                path=held.path,
            )
        try:
            _end(spots, held, begun)
        except OSError as error:
            raise _unpublished(spots, error) from error


def is_in_place(staging: Staging, begun: Publication) -> bool:
    """Whether the output of a publication on this machine is at its destination, and nothing came to it."""
    try:
        with staging.spots() as spots:
            return spots is not None and _is_in_place(spots, begun)
    except OSError:  # what cannot be looked at was not put there by this
        return False


def _is_in_place(spots: Spots, begun: Publication) -> bool:
    return begun.identity is not None and _identity(spots.target) == begun.identity


def _identity(spot: Spot) -> tuple[int, ...] | None:
    """(device, inode, time of its last change in ns) of what bears a name; a rename keeps it."""
    seen = spot.look()
    return None if seen is None else (seen.st_dev, seen.st_ino, seen.st_mtime_ns)


def _inode(spot: Spot) -> tuple[int, ...] | None:
    found = _identity(spot)
    return None if found is None else found[:2]


def _waiting(spots: Spots, begun: Publication | None) -> Spot | None:
    """Where that lies which a killed run replaced, or was about to; None where nothing does."""
    if spots.aside.look() is not None:
        return spots.aside
    if begun is None or begun.identity is None:
        return None
    top, new = begun.replaces.inventory.get(""), begun.identity[:2]
    if _inode(spots.target) == new:  # killed behind the exchange, whatever was exchanged
        seen = spots.target.look()
        staged = spots.folder if seen is not None and stat.S_ISDIR(seen.st_mode) else spots.file
        linked = _inode(staged) == new  # it has both names still
        return None if linked or _is_nothing(staged) else staged
    for staged in (spots.file, spots.folder):
        if top is not None and _inode(staged) == top.inode != new:
            return staged
    return None


def _is_nothing(spot: Spot) -> bool:
    """Whether nothing bears a name, or an empty folder."""
    seen = spot.look()
    if seen is None or not stat.S_ISDIR(seen.st_mode):
        return seen is None
    with closing_fd(os.open(spot.name, OPEN_FOLDER, dir_fd=spot.at)) as below:
        return not os.listdir(below)


def _end(spots: Spots, held: Spot, begun: Publication) -> None:
    target, top = spots.target, begun.replaces.inventory.get("")
    if begun.identity is not None and _inode(target) == begun.identity[:2]:
        if not begun.step:
            return  # an earlier version replaced it, on a word that was enough then
        seen = target.look()
        staged = spots.folder if seen is not None and stat.S_ISDIR(seen.st_mode) else spots.file
        if held != spots.aside:
            rename_new(held, spots.aside)
        _let_go(staged, spots, begun.replaces, begun=True)
    elif target.look() is not None:
        raise DestinationExists(
            f"{target.path} appeared meanwhile, and what it was to replace lies in {held.path}",
            hint=f"move one of the two to where it belongs: nothing of {held.path} was removed",
        )
    elif top is not None and _inode(held) != top.inode:
        raise StagingForeign(
            f"cannot move {held.path} to {target.path}: it is not what was moved away from there "
            f"(got inode {_inode(held)}, recorded was {top.inode})",
            hint="find out who put it there, and take it away; nothing of it was changed",
            path=held.path,
        )
    else:
        rename_new(held, target)


def _move(staged: Spot, spots: Spots, replaces: Replaced) -> None:
    target, aside = spots.target, spots.aside
    if not replaces.inventory or (_is_folder(staged) and not _worth_keeping(replaces.inventory)):
        _move_to_free(staged, target)
        return
    now = take_at(target)
    name = differs(replaces.inventory, now)
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
    _let_go(staged, spots, replaces, begun=False)


def _changed(target: Spot, name: str, was: Entry | None, now: Entry | None) -> DestinationExists:
    """The refusal to replace what is not as it was judged."""
    path = os.path.join(target.path, name) if name else target.path
    if was is not None and now is not None and same(was, now, status=False):
        return DestinationExists(
            f"cannot replace {path}: its status changed since it was judged, and a rewrite could hide behind "
            f"that (got ctime {now.ctime} ns, judged was {was.ctime} ns)",
            hint="look at it, and run the same command again: it is judged anew",
        )
    return DestinationExists(f"{path} came, went or changed meanwhile", hint="look at it, run again")


def _is_folder(spot: Spot) -> bool:
    seen = spot.look()
    return seen is not None and stat.S_ISDIR(seen.st_mode)


def _worth_keeping(inventory: Inventory) -> bool:
    """Whether there is anything but an empty folder."""
    return any(name or entry.kind != FOLDER for name, entry in inventory.items())


def _move_to_free(staged: Spot, target: Spot) -> None:
    at = {"src_dir_fd": staged.at, "dst_dir_fd": target.at}
    if _is_folder(staged):
        try:
            os.rename(staged.name, target.name, **at)  # replaces an empty folder, and nothing else
        except OSError as error:
            if target.look() is not None:
                raise DestinationExists(f"{target.path} appeared meanwhile") from error
            raise
        return
    try:
        os.link(staged.name, target.name, **at, follow_symlinks=False)  # unlike rename, over no file
    except FileExistsError as error:
        raise DestinationExists(f"{target.path} appeared meanwhile") from error
    os.unlink(staged.name, dir_fd=staged.at)


def _let_go(staged: Spot, spots: Spots, replaces: Replaced, *, begun: bool) -> None:
    """Removes what was moved aside, when it is what was judged. Raises `DestinationExists` otherwise, with
    everything back in its place.

    begun: a killed run may have removed a part of it. Then nothing comes back: what is not as it was judged
    is kept beside the destination.
    """
    found, target, aside = take_at(spots.aside), spots.target, spots.aside
    # Moving it has changed the status of a file itself.
    strangers = [n for n, e in found.items() if not same(replaces.inventory.get(n), e, status=bool(n))]
    if not strangers or (begun and not found.keys() >= replaces.inventory.keys()):
        _discard(spots, replaces.inventory)
        return
    if not _exchange(aside, target):
        rename_new(target, staged)
        rename_new(aside, target)
    else:
        rename_new(aside, staged)
    raise DestinationExists(
        f"{os.path.join(target.path, strangers[0])} came or changed in the moment of publishing; "
        "it is back in its place",
        hint="look at it, and run again",
    )


def _discard(spots: Spots, inventory: Inventory) -> None:
    """Removes what was replaced, name by name; what nobody recorded is kept beside the destination."""
    aside = spots.aside
    seen = aside.look()
    if seen is None:
        return
    if stat.S_ISDIR(seen.st_mode):
        # The status of a file with several names changes when one of the others goes.
        names = Counter(entry.inode for entry in inventory.values())
        with closing_fd(os.open(aside.name, OPEN_FOLDER, dir_fd=aside.at)) as below:
            _remove_recorded(below, aside.path, "", inventory, {inode for inode, n in names.items() if n > 1})
        with contextlib.suppress(OSError):  # something is left
            os.rmdir(aside.name, dir_fd=aside.at)
            return
    elif same(inventory.get(""), entry_at(aside, seen), status=False):
        os.unlink(aside.name, dir_fd=aside.at)
        return
    kept = spots.target.beside(f"{spots.target.name}.kept-{os.getpid()}-{time.time_ns():x}")
    rename_new(aside, kept)
    _log.warning("what came to %s while it was replaced is kept in %s", spots.target.path, kept.path)


def _remove_recorded(
    at: int, path: str, prefix: str, inventory: Inventory, twins: Collection[_Inode]
) -> None:
    """Removes recorded names below a descriptor, depth first, each looked at right before."""
    for name in os.listdir(at):
        spot, was = Spot(at, name, f"{path}/{name}"), inventory.get(prefix + name)
        try:
            seen = spot.look()
            if seen is None or was is None:
                continue
            now = entry_at(spot, seen)
            if not same(was, now, status=was.inode not in twins):
                continue
            if was.kind != FOLDER:
                os.unlink(name, dir_fd=at)
                continue
            with closing_fd(os.open(name, OPEN_FOLDER, dir_fd=at)) as below:
                if os.path.samestat(os.fstat(below), seen):
                    _remove_recorded(below, spot.path, f"{prefix}{name}/", inventory, twins)
            os.rmdir(name, dir_fd=at)
        except OSError as error:  # not empty, or not to be removed: it is kept
            _log.debug("%s is kept: %s", spot.path, error.strerror)


def _unpublished(spots: Spots, error: OSError) -> DestinationUnwritable:
    return DestinationUnwritable(f"cannot publish {spots.target.path}: {error.strerror or error}")
