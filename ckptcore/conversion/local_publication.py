"""Publishing: how do staged files become visible at their destination, and what becomes of what was there?

On a local disk two folders change places in one step; what was there is then looked at once more, where
nobody finds it, and goes file by file as it was recorded, or comes back. On an object store see
`ckptcore.conversion.remote_publication`. What a run stages, and where, is `ckptcore.conversion.staging`'s.
"""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import replace
from pathlib import Path

from ckptcore.conversion.publication_record import MOVING, Publication, Replaced, note, noted
from ckptcore.conversion.staging import Staging
from ckptcore.errors import DestinationExists, DestinationUnwritable, StagingForeign
from ckptcore.store import local_path
from ckptcore.store.inventory import FOLDER, Inventory, differs, look, take
from ckptcore.store.local_writer import sync_folder

ASIDE = "replaced"  # where, in the staging folder, what was replaced waits for its end
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_log = logging.getLogger("ckptcore")


def publish_local(staging: Staging, publication: Publication, *, single: bool) -> None:
    """Moves the staged files into place, recorded first.

    publication: with what it may replace. Raises `DestinationExists` when anything else lies at the
    destination by now, which stays as it is, and `DestinationUnwritable`.
    """
    assert staging.files.local is not None
    staged, target, aside = _paths(staging, single=single)
    staging.files.close()
    try:
        sync_folder(staging.files.local)
        publication = replace(publication, identity=identity(staged), step=MOVING)
        note(staging, publication)
        _move(staged, target, aside, publication.replaces)
        sync_folder(target.parent)
    except OSError as error:
        raise DestinationUnwritable(f"cannot publish {target}: {error.strerror or error}") from error


def conclude(staging: Staging) -> None:
    """Ends a local publication that a killed run left in its middle: what was replaced is removed when the
    new output is in its place, and comes back when it is not. Does nothing otherwise.

    Raises `DestinationExists` when neither can be: then somebody else's lies at the destination; and
    `StagingForeign` for what was replaced without a record that says by what.
    """
    begun = noted(staging)
    if staging.root.local is None:
        return
    if begun is None:
        kept = staging.root.local / ASIDE
        if os.path.lexists(kept):
            raise StagingForeign(
                f"cannot go on in {staging.root.local}: {ASIDE} in it was moved away from "
                f"{staging.destination}, and no record says what for",
                hint="move it to where it belongs; nothing of it was removed",
                path=str(kept),
            )
        return
    for single in (False, True):
        staged, target, aside = _paths(staging, single=single)
        published = identity(target) == begun.identity
        try:
            if published and _is(staged, begun.replaces):  # killed behind the exchange
                os.rename(staged, aside)
            if not os.path.lexists(aside):
                continue
            if published and not begun.step:
                continue  # an earlier version replaced it, on a word that was enough then
            if published:
                _require_as_judged(staged, target, aside, begun.replaces)
                _discard(aside, target, begun.replaces)
            elif not os.path.lexists(target):
                os.rename(aside, target)
            else:
                raise DestinationExists(
                    f"{target} appeared meanwhile, and what it was to replace lies in {aside}",
                    hint=f"move one of the two to where it belongs: nothing of {aside} was removed",
                )
        except OSError as error:
            raise DestinationUnwritable(f"cannot publish {target}: {error.strerror or error}") from error


def identity(path: Path) -> tuple[int, ...] | None:
    """(device, inode, time of its last change in ns) of a path; a rename keeps it."""
    try:
        seen = os.lstat(path)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino, seen.st_mtime_ns


def _paths(staging: Staging, *, single: bool) -> tuple[Path, Path, Path]:
    parent = local_path(staging.parent)
    assert parent is not None
    assert staging.files.local is not None
    assert staging.root.local is not None
    staged = staging.files.local / staging.name if single else staging.files.local
    return staged, parent / staging.name, staging.root.local / ASIDE


def _move(staged: Path, target: Path, aside: Path, replaces: Replaced) -> None:
    if not replaces.inventory or (staged.is_dir() and not _worth_keeping(replaces.inventory)):
        _move_to_free(staged, target)
        return
    name = differs(replaces.inventory, take(str(target)))
    if name is not None:
        raise DestinationExists(
            f"{target / name} came, went or changed meanwhile", hint="look at it, run again"
        )
    if _exchange(staged, target):
        os.rename(staged, aside)
    else:
        os.rename(target, aside)
        try:
            _move_to_free(staged, target)
        except BaseException:
            if not os.path.lexists(target):
                os.rename(aside, target)
            raise
    _require_as_judged(staged, target, aside, replaces)
    _discard(aside, target, replaces)


def _worth_keeping(inventory: Inventory) -> bool:
    """Whether there is anything but an empty folder."""
    return any(name or entry.kind != FOLDER for name, entry in inventory.items())


def _move_to_free(staged: Path, target: Path) -> None:
    if staged.is_dir():
        try:
            os.rename(staged, target)  # replaces an empty folder, and nothing else
        except OSError as error:
            if os.path.lexists(target):
                raise DestinationExists(f"{target} appeared meanwhile") from error
            raise
        return
    try:
        os.link(staged, target)  # unlike rename, never replaces a file
    except FileExistsError as error:
        raise DestinationExists(f"{target} appeared meanwhile") from error
    staged.unlink()


def _require_as_judged(staged: Path, target: Path, aside: Path, replaces: Replaced) -> None:
    """Raises `DestinationExists`, with everything back in its place, unless what was moved aside is what was
    judged. Of what a killed run removed already, nothing is missed."""
    found = take(str(aside))
    strangers = [n for n, e in found.items() if replaces.inventory.get(n) != e]
    if not strangers:
        return
    if not _exchange(aside, target):
        os.rename(target, staged)
        os.rename(aside, target)
    else:
        os.rename(aside, staged)
    raise DestinationExists(
        f"{target / strangers[0]} came or changed in the moment of publishing; it is back in its place",
        hint="look at it, and run again",
    )


def _is(path: Path, replaces: Replaced) -> bool:
    entry, top = look(str(path)), replaces.inventory.get("")
    return entry is not None and top is not None and entry.inode == top.inode


def _discard(aside: Path, target: Path, replaces: Replaced) -> None:
    """Removes what was replaced, name by name; what nobody recorded is kept beside the destination."""
    for name, entry in sorted(replaces.inventory.items(), key=lambda row: row[0].count("/"), reverse=True):
        if not name or "\0" in name or ".." in name.split("/") or name.startswith("/"):
            continue  # the place itself, or no name that an inventory has
        path = aside / name
        try:
            if look(str(path)) != entry:
                continue
            os.rmdir(path) if entry.kind == FOLDER else os.unlink(path)
        except OSError as error:  # not empty, or not to be removed: it is kept below
            _log.debug("%s is kept: %s", path, error.strerror)
    top = look(str(aside))
    if top is not None and top.kind != FOLDER:
        os.unlink(aside)
        return
    try:
        os.rmdir(aside)
    except OSError:
        kept = target.with_name(f"{target.name}.kept-{os.getpid()}")
        os.rename(aside, kept)
        _log.warning("what came to %s while it was replaced is kept in %s", target, kept)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two paths in one step, where the file system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    done: int = call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    return done == 0
