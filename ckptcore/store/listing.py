"""List what is at a place, on this machine, on S3 or in any other file system, without opening a file.

`survey` lists the files that readers see, links followed. `contents` lists everything that a deletion would
remove, of any kind. `list_destination` lists everything that replacing a place would remove, also where
nothing is. Every answer is in `FileStatus`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from ckptcore.errors import SourceUnreadable, UsageError
from ckptcore.store import join_url, local_path, open_store
from ckptcore.store.file_status import NO_VERSION, YOUNG, FileStatus, NameKind
from ckptcore.store.folder_tree import DirEntryAt
from ckptcore.store.local_listing import Walk, everything_in, opened_parent
from ckptcore.store.place import mounts
from ckptcore.utils import host
from ckptcore.utils.merged_url import is_merged, roots_of

if TYPE_CHECKING:
    from ckptcore.store.remote import FsspecStore

MAX_FILES = 2_000_000
_WAITS_S = (0.03, 2.2)  # until file times advance: on most file systems, and on older ones

Inventory = Mapping[str, FileStatus]  # relative path -> status, sorted; "" is the place itself


def survey(url: str, *, max_files: int = MAX_FILES) -> dict[str, FileStatus]:
    """Return every file below a folder by its relative path, sorted; links to folders are not followed.

    Raises:
        SourceUnreadable: The folder cannot be listed.
        StorageTrouble: The store failed.
        UsageError: There are more than ``max_files``.
    """
    return _bounded(url, _files_below(url), max_files)


def survey_around(
    url: str, left_out: Collection[str], *, max_files: int = MAX_FILES
) -> tuple[dict[str, FileStatus], frozenset[str]]:
    """Return the files below a folder of an object store, but nothing of some folders in it.

    A folder above one of them is listed by itself, in one request for 1,000 names; any other is listed with
    everything below it, in one request for 1,000 objects.

    Args:
        url: The folder.
        left_out: Paths below it.
        max_files: The most files to list.

    Returns:
        The files by relative path, sorted, and those of the folders left out that are there.

    Raises:
        SourceUnreadable: The folder cannot be listed.
        StorageTrouble: The store failed.
        UsageError: There are more than ``max_files``.
    """
    if not left_out:
        return survey(url, max_files=max_files), frozenset()
    # Every folder on the way to one that is left out.
    above = {path[:end] for path in left_out for end, letter in enumerate(path) if letter == "/"}
    left_out_there: set[str] = set()

    def files(folder: str) -> Iterator[tuple[str, FileStatus]]:
        statuses, folders = _level(join_url(url, folder) if folder else url)
        prefix = f"{folder}/" if folder else ""
        yield from ((prefix + name, status) for name, status in statuses.items())
        for name in folders:
            path = prefix + name
            if path in left_out:
                left_out_there.add(path)
            elif path in above:
                yield from files(path)
            else:
                below = _files_below(join_url(url, path))
                yield from ((f"{path}/{inner}", status) for inner, status in below)

    return _bounded(url, files(""), max_files), frozenset(left_out_there)


def contents(url: str, *, follow: bool = False) -> dict[str, FileStatus]:
    """Return everything at a place by its relative name, sorted; names of folders end with a slash.

    For deletions and for comparing identities: no link is followed unless requested, nothing is skipped, and
    a name that cannot be examined is an error. A place that is one file is that file under the empty name.

    Args:
        url: The place.
        follow: List a link to a file as that file, and what is mounted as a folder, as readers see them.

    Raises:
        SourceUnreadable: Nothing is there, or a name cannot be examined.
        SourceChanged: A name was removed meanwhile.
        StorageTrouble: The store failed.
        UsageError: A deletion would be unsafe: a mount, an object without a version, too many names.
    """
    if is_merged(url):
        raise UsageError(f"cannot list {url} as one place", hint="name each of its folders alone")
    path = local_path(url)
    statuses = _remote_contents(url) if path is None else _local_contents(os.path.abspath(path), follow)
    if len(statuses) > MAX_FILES:
        raise UsageError(f"cannot list {url}: it holds more than {MAX_FILES} names")
    return statuses


def list_destination(url: str) -> dict[str, FileStatus]:
    """Return everything at a place; empty where nothing is. An object store's folder has no own entry.

    Links are not followed, and nothing is opened.

    Raises:
        SourceUnreadable: A name cannot be examined.
        SourceChanged: A name was removed meanwhile.
        StorageTrouble: The store failed.
        UsageError: Folders are nested too deeply, or the URL cannot be opened.
    """
    path = local_path(url)
    if path is None:
        return _everything_remote(url)
    with opened_parent(os.fspath(path)) as dir_entry:
        return {} if dir_entry is None else list_destination_at(dir_entry)


def list_destination_at(dir_entry: DirEntryAt) -> dict[str, FileStatus]:
    """Return what `list_destination` does of a name in an open folder."""
    return dict(sorted(everything_in(dir_entry, Walk())))


def list_settled_destination(url: str) -> dict[str, FileStatus]:
    """Call `list_destination`, and wait a little if needed, until every ctime would reveal a later write."""
    statuses: dict[str, FileStatus] = {}
    # At most once for each clock; the last look has no wait behind it.
    for wait_s in (*_WAITS_S, 0.0):
        statuses = list_destination(url)
        if all(status.settled_ctime != YOUNG for status in statuses.values()):
            break
        host.sleep(wait_s)
    return statuses


def nothing_at(url: str) -> bool:
    """Return whether an object store has nothing at a URL; raises `StorageTrouble`, `SourceUnreadable`."""
    return not _everything_remote(url)


def names_at(url: str) -> tuple[str, ...]:
    """Return the names directly in a folder of an object store, sorted; none if there is no such folder.

    Raises:
        SourceUnreadable: The folder cannot be listed.
        StorageTrouble: The store failed.
        UsageError: The URL cannot be opened.
    """
    files, folders = _level(url)
    return tuple(sorted({*files, *folders}))


@dataclass(frozen=True, slots=True)
class Folder:
    """What is directly in a folder: its files (name -> bytes), and the names of its folders, sorted."""

    files: Mapping[str, int]
    folders: tuple[str, ...]


def folder_at(url: str) -> Folder:
    """Return what is directly in a folder, links followed; nothing if there is no such folder.

    Raises:
        SourceUnreadable: The folder cannot be listed.
        StorageTrouble: The store failed.
        UsageError: The URL cannot be opened.
    """
    if roots := roots_of(url):
        root_folders = [folder_at(root) for root in reversed(roots)]  # the first that has a file counts
        files = {name: nbytes for folder in root_folders for name, nbytes in folder.files.items()}
        names = {name for folder in root_folders for name in folder.folders}
        return Folder(dict(sorted(files.items())), tuple(sorted(names)))
    path = local_path(url)
    if path is not None:
        return _folder_here(os.fspath(path))
    statuses, folders = _level(url)
    return Folder({name: status.nbytes for name, status in statuses.items()}, folders)


def stamp_of(files: Mapping[str, FileStatus]) -> str:
    """Return one digest of names, sizes and stamps."""
    total = blake3()
    for name in sorted(files):
        # Names that are not UTF-8 are digested by their bytes.
        total.update(f"{name}\0{files[name].stamp}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def newest(files: Mapping[str, FileStatus]) -> float | None:
    """Return when the last of the files changed, seconds since 1970, or None if no file has a time."""
    return max((s.changed_at for s in files.values() if s.changed_at is not None), default=None)


def require_no_mount(path: str) -> None:
    """Raise `UsageError` when something is mounted at a path or below it.

    A bind mount of the same file system has the same device number: its files would pass for this folder's.
    """
    # Compared by real paths, as the kernel lists mounts.
    above = os.path.realpath(path)
    for _, _, point in mounts():
        if point == above or point.startswith(above.rstrip("/") + "/"):
            raise UsageError(
                f"cannot delete {path}: another folder is mounted at {point}", hint="unmount it first"
            )


def _bounded(url: str, files: Iterable[tuple[str, FileStatus]], max_files: int) -> dict[str, FileStatus]:
    statuses: dict[str, FileStatus] = {}
    for name, status in files:
        statuses[name] = status
        # Counted while they are listed: an answer of millions of files would not fit into memory.
        if len(statuses) > max_files:
            raise UsageError(
                f"cannot list {url}: it holds more than {max_files} files",
                hint="watch folders below it instead",
            )
    return dict(sorted(statuses.items()))


def _files_below(url: str) -> Iterator[tuple[str, FileStatus]]:
    path = local_path(url)
    if path is None:
        with closing(_remote(url)) as store:
            yield from store.below().items()
        return
    if not os.path.isdir(path):
        raise SourceUnreadable(f"{path} does not exist or is not a folder", hint="check the path")
    with opened_parent(os.fspath(path)) as dir_entry:
        walk = Walk(follow=True, lenient=True)
        for name, status in everything_in(dir_entry, walk) if dir_entry is not None else ():
            if status.kind is NameKind.FILE:
                yield name, status


def _level(url: str) -> tuple[dict[str, FileStatus], tuple[str, ...]]:
    """Return the objects directly in a folder, and the names of its folders, all sorted."""
    with closing(_remote(url)) as store:
        return store.level()


def _everything_remote(url: str) -> dict[str, FileStatus]:
    with closing(_remote(url)) as store:
        return store.everything()


def _remote(url: str) -> FsspecStore:
    if is_merged(url):
        raise UsageError(f"cannot list {url} as one folder", hint="name each of its folders alone")
    store = open_store(url)
    if TYPE_CHECKING:
        assert isinstance(store, FsspecStore)  # which takes long to import, and `open_store` has just done it
    return store


def _remote_contents(url: str) -> dict[str, FileStatus]:
    statuses = _everything_remote(url)
    if not statuses:
        raise SourceUnreadable(f"{url} does not exist or is empty")
    # Beside other objects it is only a marker; alone it is the object itself.
    if len(statuses) > 1:
        statuses.pop("", None)  # an empty object that some tools create as a folder marker
    for name, status in statuses.items():
        if status.version == NO_VERSION and status.mtime is None:
            raise UsageError(f"cannot prove that {url}/{name} is unchanged: the store reports no version")
    return statuses


def _local_contents(root: str, follow: bool) -> dict[str, FileStatus]:
    with opened_parent(root) as dir_entry:
        statuses = {} if dir_entry is None else dict(everything_in(dir_entry, Walk(follow=follow)))
    if not statuses:
        raise SourceUnreadable(f"cannot look at {root}: No such file or directory")
    for name, status in statuses.items():
        if status.kind is NameKind.MOUNT:
            # Before anything is deleted: what is mounted would go with it.
            raise UsageError(f"cannot delete {root}: another folder is mounted at {root}/{name}".rstrip("/"))
    if statuses[""].kind is NameKind.FOLDER:
        del statuses[""]
    ends = {name: "/" if status.kind is NameKind.FOLDER else "" for name, status in statuses.items()}
    return dict(sorted((name + ends[name], status) for name, status in statuses.items()))


def _folder_here(path: str) -> Folder:
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return Folder({}, ())
    except OSError as error:
        raise SourceUnreadable(f"cannot list {path}: {error.strerror}") from error
    files, folders = dict[str, int](), list[str]()
    for entry in entries:
        try:
            if entry.is_dir():
                folders.append(entry.name)
            elif entry.is_file():
                files[entry.name] = entry.stat().st_size
        except OSError:
            continue  # removed meanwhile, or a link to nothing
    return Folder(dict(sorted(files.items())), tuple(sorted(folders)))
