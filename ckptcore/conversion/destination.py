"""Check before any work whether a destination may be written.

It must be apart from everything that the conversion reads, whatever names either of them has
(`require_place`), and it must be free (`refuse_existing`). `ckptcore.conversion.foreign_files` checks the
files at a destination that is to be replaced.
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
from ckptcore.formats.common.rank_file_names import part_name
from ckptcore.planning.hub_files import CONFIG, NONE
from ckptcore.planning.request import Request
from ckptcore.redaction import holds_credentials
from ckptcore.store import is_s3, join_url, local_path, open_store, split_url
from ckptcore.store.file_status import NameKind
from ckptcore.store.listing import list_destination
from ckptcore.store.local_listing import look
from ckptcore.store.place import Relation, identify, relation
from ckptcore.utils.merged_url import is_merged
from ckptcore.utils.text import short_repr

_ELSEWHERE = "choose another destination"
# System folders by the Filesystem Hierarchy Standard and its macOS counterparts. No option replaces these
# folders or their parents, nor anything inside the trees.
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
_VERBS = {Relation.SAME: "is", Relation.INSIDE: "is inside", Relation.AROUND: "contains"}


def require_place(
    destination: str,
    source: str,
    *,
    config: str | None = None,
    tokenizer: str | None = None,
    plan: Path | None = None,
) -> None:
    """Check that a destination can be written without touching other data.

    It must not be, contain, or be inside the source or a saved plan, under any of their names, nor be or
    contain the folder of the config or of the tokenizer. The same is true of its staging folder. It must not
    be a device, a FIFO, a socket, a mount point, or an entire bucket.

    Args:
        destination: Path or URL that is to be written.
        source: Path or URL that is read.
        config: The folder or file of ``--config``, or None.
        tokenizer: The folder of ``--tokenizer``, or None.
        plan: The folder of a saved plan, or None.

    Raises:
        UsageError: The destination breaks one of these rules.
    """
    # Before URLs are compared, since messages quote them.
    require_no_credentials(source, destination, config, tokenizer)
    path = _require_unambiguous(destination)
    parent, name = split_url(destination)
    # Checked, too: it is beside the destination, and would be written even where the destination itself is
    # apart.
    staging = identify(join_url(parent, f".{name}.ckptcore"))
    target = identify(destination)
    if target.is_bucket:
        raise UsageError(f"{destination} is an entire bucket", hint="name a folder in it")
    inputs = {
        "source": source,
        "--config folder": _named_folder(config),
        "--tokenizer folder": _named_folder(tokenizer),
        "saved plan": os.fspath(plan) if plan is not None else None,
    }
    for label, url in inputs.items():
        if url is None:
            continue
        place = identify(url)
        nesting = relation(target, place)
        # Only the files at the top of these folders are read: a folder inside is apart from them.
        if nesting is not Relation.APART and not (label.startswith("--") and nesting is Relation.INSIDE):
            raise UsageError(f"{destination} {_VERBS[nesting]} the {label}, {url}", hint=_ELSEWHERE)
        if relation(staging, place) in (Relation.SAME, Relation.AROUND):
            raise UsageError(
                f"the {label}, {url}, is inside the staging folder of {destination}", hint=_ELSEWHERE
            )
    if path is not None:
        _require_replaceable_kind(destination, path)


def require_apart(place: str, request: Request) -> None:
    """Raise `UsageError` if a plan would be saved in, around or at a place that its request uses."""
    target = identify(place)
    inputs = {
        "source": request.source,
        "destination": request.destination,
        "--config folder": _named_folder(request.config),
        "--tokenizer folder": _named_folder(request.tokenizer),
    }
    for label, url in inputs.items():
        if url is not None and (nesting := relation(target, identify(url))) is not Relation.APART:
            raise UsageError(
                f"{place} {_VERBS[nesting]} the {label}, {url}", hint="name another folder for the plan"
            )


def refuse_existing(request: Request) -> None:
    """Check that a request's destination is free or may be replaced. A link and its target never are.

    Raises:
        DestinationExists: The destination exists and may not be replaced.
        UsageError: As `require_place`.
    """
    require_place(request.destination, request.source, config=request.config, tokenizer=request.tokenizer)
    # A sole file named as part 1 of 1 is complete; any other part makes readers look for more.
    part = part_name(split_url(request.destination)[1]) if request.single is not None else None
    if part is not None and part.count != 1 and not part.sole:
        raise UsageError(
            f"{request.destination} is named like one part of several: its readers would ask for the others",
            hint="name it model.safetensors, for example",
        )
    path = local_path(request.destination)
    if path is None:
        _refuse_objects(request)
    else:
        _refuse_local(path, request.destination, file=request.single is not None, replaces=request.replaces)


def _refuse_local(path: Path, destination: str, *, file: bool, replaces: bool) -> None:
    if _is_link(path):
        raise DestinationExists(
            f"{destination} exists, and is a link to {os.readlink(path)}",
            hint="name its target, or remove the link",
        )
    if replaces or not os.path.lexists(path):
        return
    # An empty folder is replaced by a folder in one rename; a file cannot take its place.
    try:  # an empty folder is free for a folder, but not for a file
        is_folder = path.is_dir() and not path.is_symlink()
        free = not file and is_folder and not any(path.iterdir())
    except OSError as error:
        raise DestinationUnwritable(f"cannot read {destination}: {error.strerror}") from error
    if not free:
        raise DestinationExists(f"{destination} exists")


def _refuse_objects(request: Request) -> None:
    """Refuse objects below a destination. A folder of them is not replaced at once: only one object is."""
    # With both options the caller accepts that there is a time without an output.
    if request.overwrite_in_place and request.replaces:
        return
    objects = list_destination(request.destination)
    if not request.replaces:
        parent, name = split_url(request.destination)
        # The inventory of S3 has the object of this very name, too.
        if objects or not (is_s3(request.destination) or open_store(parent).size(name) is None):
            raise DestinationExists(f"{request.destination} exists")
    # One object is replaced in one request, so the old or the new one is there at any time.
    elif objects and not (request.single is not None and set(objects) == {""}):
        raise DestinationExists(
            f"cannot replace {request.destination} at once: an object store replaces one object at a time, "
            f"and {len(objects)} are there",
            hint="write to another destination and move what points to it (`ckptcore catalog alias`), or add "
            "--overwrite-in-place: until it ends, readers find no index, or no config.json",
            count=len(objects),
        )


def require_no_credentials(*places: str | None) -> None:
    """Raise `UsageError` for a URL with a password or a signature: plans, results and journals keep URLs."""
    for url in places:
        if url is not None and holds_credentials(url):
            raise UsageError(
                f"cannot convert with {url}: the URL has credentials in it, which plans would keep",
                hint="set them in the environment or in a profile, or give them with --storage-option",
            )


def _is_link(path: Path) -> bool:
    """Return whether a path is a link; raise `DestinationUnwritable` for invalid names and missing access."""
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DestinationUnwritable(f"cannot write {short_repr(str(path))}: {error.strerror}") from error


def protected(catalogs: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield (path, description) of what no destination may contain. catalogs: description -> SQLite file."""
    home = os.path.expanduser("~")
    yield home, "the home folder"
    yield from ((folder, "a folder of the system") for folder in (*SYSTEM_FOLDERS, *SYSTEM_TREES))
    yield from ((folder, "a user's home folder") for folder in _homes())
    yield sys.prefix, "the Python that this runs in"
    with contextlib.suppress(FileNotFoundError):  # it was removed: there is nothing to protect
        yield os.getcwd(), "the working folder"
    for label, path in catalogs.items():
        # SQLite's own files beside the database are part of it.
        for suffix in ("", "-wal", "-shm", "-journal"):
            yield f"{path}{suffix}", label


def require_unprotected(destination: str, catalogs: Mapping[str, Path]) -> None:
    """Check that an existing destination may be replaced.

    Args:
        destination: Path or URL.
        catalogs: Description -> SQLite file.

    Raises:
        UsageError: It is or contains a `protected` path, or is inside a tree of the system or of the running
            program.
    """
    target = identify(destination)
    if not target.exists:  # on this machine
        return
    package = os.path.dirname(os.path.dirname(__file__))
    program = (package, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    for tree in filter(os.path.isdir, (*SYSTEM_TREES, *program)):
        # /dev/shm is in a tree of the system, but users write there.
        if relation(target, identify(tree)) is Relation.INSIDE and not _is_ram(destination):
            raise UsageError(
                f"cannot replace {destination}: it is inside {tree}, which is part of the system or program",
                hint=_ELSEWHERE,
            )
    for path, label in protected(catalogs):
        nesting = relation(target, identify(path))
        # What does not exist cannot be lost inside of a destination, but the
        # destination itself may be meant by its name.
        if nesting is Relation.SAME or (nesting is Relation.AROUND and os.path.lexists(path)):
            raise UsageError(f"{destination} {_VERBS[nesting]} {label}, {path}", hint=_ELSEWHERE)


def _homes() -> Iterator[str]:
    """Yield the home folders of this machine's users; service accounts may name a system folder."""
    try:
        import pwd
    except ImportError:  # not a Unix
        return
    yield from {user.pw_dir for user in pwd.getpwall() if os.path.isdir(user.pw_dir)} - {"/"}


def _is_ram(destination: str) -> bool:
    """Return whether a place is on Linux's memory disk below /dev."""
    path = local_path(destination)
    return path is not None and os.path.realpath(path).startswith("/dev/shm/")


def _named_folder(named: str | None) -> str | None:
    """Return the folder or file that `ckptcore.planning.hub_files.read_named` reads."""
    if named is None or named == NONE:
        return None
    # A config file means its folder: its neighbours are read, too.
    return split_url(named)[0] if named.endswith(f"/{CONFIG}") or named == CONFIG else named


def _require_unambiguous(destination: str) -> Path | None:
    """Raise `UsageError` unless a destination has one meaning: here, in its store, and for later readers.

    Returns:
        Its path on this machine, or None.
    """
    if is_merged(destination):
        raise UsageError(f"cannot write {destination}: it is several folders", hint="name one folder")
    # fsspec's chains read through several systems, of which only the last one could be written to.
    if "::" in destination:
        raise UsageError(
            f"cannot write {destination}: it is a chain of file systems", hint="name the place at its end"
        )
    path = local_path(destination)
    parent, name = split_url(destination)
    _, sign, rest = destination.partition("://")
    # Without a name there is no folder to create, and the staging folder beside it would have none, either.
    if not name or name in (".", "..") or (sign and not rest.strip("/")):
        raise UsageError(
            f"cannot write to {destination!r}: it has no name", hint="name the new folder or file itself"
        )
    parts = destination.split("/")
    if path is not None:
        parts = os.path.abspath(path).split("/")
        if ".." in path.parts:
            # A '..' behind a link leads elsewhere for the kernel than for the text: two readers of
            # the same name would mean different places.
            physical, lexical = os.path.realpath(path.parent), os.path.realpath(parent)
            if path.name == ".." or physical != lexical:
                raise UsageError(f"{destination} has '..' after a link", hint="name the place without ..")
    if any(_STAGING.match(p) for p in parts):
        raise UsageError(f"{destination} is inside a staging folder", hint=_ELSEWHERE)
    return path


def _require_replaceable_kind(destination: str, path: Path) -> None:
    try:
        # Links followed: a link to a device is refused like the device.
        followed = stat.S_IFMT(os.stat(path).st_mode)
        status = look(os.fspath(path))
    except (OSError, ValueError):  # it does not exist or cannot be read: the write reports that
        return
    if followed not in (stat.S_IFREG, stat.S_IFDIR):
        raise UsageError(
            f"cannot write {destination}: it is a device, a FIFO or a socket, which is never replaced",
            hint=_ELSEWHERE,
        )
    if status is not None and status.kind is NameKind.MOUNT:
        raise UsageError(f"cannot replace {destination}: it is a mount point", hint="name a new folder in it")
