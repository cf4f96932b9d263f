"""Destinations: may this place be written at all?

Two questions, asked before any work. Is the place apart from what the conversion reads, under every
name that either of them has (`require_place`)? And is it free (`refuse_existing`)? What lies at a place that
is to be replaced, and whose that is, `ckptcore.conversion.foreign_files` tells.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptcore.errors import DestinationExists, DestinationUnwritable, UsageError
from ckptcore.planning.hub_files import CONFIG, NONE
from ckptcore.planning.request import Request
from ckptcore.store import join_url, local_path, open_store, split_url
from ckptcore.store.inventory import MOUNT, look, take
from ckptcore.store.place import Relation, identify, relation
from ckptcore.utils.text import short_repr

_ELSEWHERE = "choose another destination"
# The machine's own, by the Filesystem Hierarchy Standard and its macOS counterparts. No word replaces these
# folders or what holds them, and nothing that is in the trees.
SYSTEM_FOLDERS = (
    "/Applications",
    "/Library",
    "/System",
    "/Users",
    "/home",
    "/media",
    "/mnt",
    "/opt",
    "/private",
    "/root",
    "/run",
    "/srv",
    "/tmp",
    "/usr",
    "/usr/local",
    "/var",
    "/var/tmp",
)
SYSTEM_TREES = (
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/proc",
    "/sbin",
    "/sys",
    "/usr/bin",
    "/usr/include",
    "/usr/lib",
    "/usr/libexec",
    "/usr/local/bin",
    "/usr/local/etc",
    "/usr/local/lib",
    "/usr/local/sbin",
    "/usr/local/share",
    "/usr/sbin",
    "/usr/share",
    "/var/backups",
    "/var/cache",
    "/var/lib/apt",
    "/var/lib/dpkg",
    "/var/lib/postgresql",
    "/var/lib/rpm",
    "/var/log",
    "/var/mail",
    "/var/spool",
)
_STAGING = re.compile(r"^\..+\.ckptcore(\.gone-[0-9a-f-]+)?$")
_SAYS = {Relation.SAME: "is", Relation.INSIDE: "lies in", Relation.AROUND: "contains"}


def require_place(
    destination: str,
    source: str,
    *,
    config: str | None = None,
    tokenizer: str | None = None,
    plan: Path | None = None,
) -> None:
    """Raises `UsageError` unless a destination can be written without touching what is not its own.

    It must not be, hold, or lie in the source or a saved plan, whatever it is called, nor be or hold the
    folder of the config or of the tokenizer; nor may its staging folder. It must not be a device, a FIFO, a
    socket, a mount point, or a whole bucket.
    """
    _require_plain(destination)
    parent, name = split_url(destination)
    staging = identify(join_url(parent, f".{name}.ckptcore"))
    here = identify(destination)
    if here.is_bucket:
        raise UsageError(f"{destination} is a whole bucket", hint="name a folder in it")
    others = {
        "source": source,
        "--config folder": _named_folder(config),
        "--tokenizer folder": _named_folder(tokenizer),
        "saved plan": os.fspath(plan) if plan is not None else None,
    }
    for what, url in others.items():
        if url is None:
            continue
        there = identify(url)
        how = relation(here, there)
        # Of these folders the files at their top are read: a folder in one is apart from them.
        if how is not Relation.APART and not (what.startswith("--") and how is Relation.INSIDE):
            raise UsageError(f"{destination} {_SAYS[how]} the {what}, {url}", hint=_ELSEWHERE)
        if relation(staging, there) in (Relation.SAME, Relation.AROUND):
            raise UsageError(
                f"the {what}, {url}, lies in the staging folder of {destination}", hint=_ELSEWHERE
            )
    _require_replaceable_kind(destination)


def require_apart(place: str, request: Request) -> None:
    """Raises `UsageError` when a plan is to be saved in, around or at what its request reads or writes."""
    here = identify(place)
    others = {
        "source": request.source,
        "destination": request.destination,
        "--config folder": _named_folder(request.config),
        "--tokenizer folder": _named_folder(request.tokenizer),
    }
    for what, url in others.items():
        if url is not None and (how := relation(here, identify(url))) is not Relation.APART:
            raise UsageError(
                f"{place} {_SAYS[how]} the {what}, {url}", hint="name another folder for the plan"
            )


def refuse_existing(request: Request) -> None:
    """Raises `DestinationExists` unless a request's destination is free or may be replaced, and `UsageError`
    as `require_place` does. A link is never replaced, nor is what it leads to."""
    require_place(request.destination, request.source, config=request.config, tokenizer=request.tokenizer)
    path = local_path(request.destination)
    if path is not None and _is_link(path):
        raise DestinationExists(
            f"{request.destination} exists, and is a link to {os.readlink(path)}",
            hint="name what it leads to, or remove the link",
        )
    if not request.replaces and not is_free(request.destination, single=request.single is not None):
        raise DestinationExists(f"{request.destination} exists")


def _is_link(path: Path) -> bool:
    """Raises `DestinationUnwritable` for what no file can be called, and what may not be looked at."""
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DestinationUnwritable(f"cannot write {short_repr(str(path))}: {error.strerror}") from error


def is_free(destination: str, *, single: bool) -> bool:
    """Whether nothing is at a destination. An empty folder is nothing for a folder, not for a file."""
    path = local_path(destination)
    if path is not None:
        if not os.path.lexists(path):
            return True
        try:
            return not single and path.is_dir() and not path.is_symlink() and not any(path.iterdir())
        except OSError as error:
            raise DestinationUnwritable(f"cannot look at {destination}: {error.strerror}") from error
    parent, name = split_url(destination)
    return open_store(parent).size(name) is None and not take(destination)


def protected(catalogs: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """(path, what it is) of what no destination may hold. catalogs: what each SQLite file is -> its path."""
    home = os.path.expanduser("~")
    yield home, "the home folder"
    yield from ((folder, "a folder of the system") for folder in (*SYSTEM_FOLDERS, *SYSTEM_TREES))
    yield from ((folder, "a user's home folder") for folder in _homes())
    yield sys.prefix, "the Python that this runs in"
    with contextlib.suppress(FileNotFoundError):  # it was removed: there is nothing to keep
        yield os.getcwd(), "the folder that this runs in"
    for what, path in catalogs.items():
        for suffix in ("", "-wal", "-shm", "-journal"):
            yield f"{path}{suffix}", what


def require_unprotected(destination: str, catalogs: Mapping[str, Path]) -> None:
    """Raises `UsageError` when a destination that exists is or holds what is `protected`, or lies in a tree
    of the system or of the running program."""
    if local_path(destination) is None:
        return
    here = identify(destination)
    if not here.exists:
        return
    package = os.path.dirname(os.path.dirname(__file__))
    program = (package, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    for tree in filter(os.path.isdir, (*SYSTEM_TREES, *program)):
        if relation(here, identify(tree)) is Relation.INSIDE and not _is_ram(destination):
            raise UsageError(
                f"cannot replace {destination}: it lies in {tree}, which is the system's or this program's",
                hint=_ELSEWHERE,
            )
    for path, what in protected(catalogs):
        how = relation(here, identify(path))
        if how is Relation.SAME or (how is Relation.AROUND and os.path.lexists(path)):
            raise UsageError(f"{destination} {_SAYS[how]} {what}, {path}", hint=_ELSEWHERE)


def _homes() -> Iterator[str]:
    """The home folders of the users of this machine; accounts of services may name a whole system folder."""
    try:
        import pwd
    except ImportError:  # not a Unix
        return
    yield from {user.pw_dir for user in pwd.getpwall() if os.path.isdir(user.pw_dir)} - {"/"}


def _is_ram(destination: str) -> bool:
    """Whether a place is on the disk in memory that Linux keeps below /dev."""
    path = local_path(destination)
    return path is not None and os.path.realpath(path).startswith("/dev/shm/")


def _named_folder(named: str | None) -> str | None:
    """The folder, or file, that `ckptcore.planning.hub_files.read_named` reads."""
    if named is None or named == NONE:
        return None
    return split_url(named)[0] if named.endswith(f"/{CONFIG}") or named == CONFIG else named


def _require_plain(destination: str) -> None:
    """Raises unless a destination has one reading: here, in its store, and for whoever comes after."""
    if "::" in destination:
        raise UsageError(
            f"{destination} is a chain of file systems, which nothing is written through",
            hint="name the place at its end",
        )
    path = local_path(destination)
    parent, name = split_url(destination)
    _, sign, rest = destination.partition("://")
    if not name or name in (".", "..") or (sign and not rest.strip("/")):
        raise UsageError(
            f"{destination!r} is no place to write to", hint="name the new folder or file itself"
        )
    if path is not None and ".." in path.parts:
        physical, lexical = os.path.realpath(path.parent), os.path.realpath(parent)
        if path.name == ".." or physical != lexical:
            raise UsageError(f"{destination} goes up behind a link", hint="name the place without ..")
    parts = os.path.abspath(path).split("/") if path is not None else destination.split("/")
    if any(_STAGING.match(p) for p in parts):
        raise UsageError(f"{destination} lies in a staging folder", hint=_ELSEWHERE)


def _require_replaceable_kind(destination: str) -> None:
    path = local_path(destination)
    if path is None:
        return
    try:
        followed = stat.S_IFMT(os.stat(path).st_mode)
        found = look(os.fspath(path))
    except (OSError, ValueError):  # nothing there, or nothing that can be looked at: the write will say so
        return
    if followed not in (stat.S_IFREG, stat.S_IFDIR):
        raise UsageError(
            f"cannot write {destination}: it is a device, a FIFO or a socket, which is never replaced",
            hint=_ELSEWHERE,
        )
    if found is not None and found.kind == MOUNT:
        raise UsageError(f"cannot replace {destination}: it is a mount point", hint="name a new folder in it")
