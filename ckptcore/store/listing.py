"""List the files below a folder with sizes and times, without opening a file: all in one listing, or some."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from blake3 import blake3

from ckptcore.errors import SourceUnreadable, StorageTrouble, UsageError
from ckptcore.store import join_url, local_path
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.foreign_text import InvalidText, parse_time
from ckptcore.utils.merged_url import is_merged, roots_of

MAX_FILES = 2_000_000
# Keys of a file's time and version in fsspec file systems.
_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")
_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", *_TIMES)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file.

    Attributes:
        nbytes: Its size.
        stamp: Changes when it is rewritten.
        at: When it last changed, seconds since 1970, or None where the store does not report it.
    """

    nbytes: int
    stamp: str
    at: float | None


def survey(url: str, *, max_files: int = MAX_FILES) -> dict[str, ListedFile]:
    """Return every file below a folder by its relative path, sorted; links to folders are not followed.

    Raises:
        SourceUnreadable: The folder cannot be listed.
        StorageTrouble: The store failed.
        UsageError: There are more than ``max_files``.
    """
    path = local_path(url)
    files = _local_files(os.fspath(path)) if path is not None else _remote(url)
    return _bounded(url, files, max_files)


def survey_around(
    url: str, left_out: Collection[str], *, max_files: int = MAX_FILES
) -> tuple[dict[str, ListedFile], frozenset[str]]:
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
    above = {path[:at] for path in left_out for at, letter in enumerate(path) if letter == "/"}
    there: set[str] = set()

    def files(folder: str) -> Iterator[tuple[str, ListedFile]]:
        own, folders = _remote_level(join_url(url, folder) if folder else url)
        prefix = f"{folder}/" if folder else ""
        yield from ((prefix + name, _listed(info)) for name, info in own.items())
        for name in folders:
            path = prefix + name
            if path in left_out:
                there.add(path)
            elif path in above:
                yield from files(path)
            else:
                yield from ((f"{path}/{below}", seen) for below, seen in _remote(join_url(url, path)))

    return _bounded(url, files(""), max_files), frozenset(there)


def _bounded(url: str, files: Iterable[tuple[str, ListedFile]], max_files: int) -> dict[str, ListedFile]:
    found: dict[str, ListedFile] = {}
    for name, seen in files:
        found[name] = seen
        if len(found) > max_files:
            raise UsageError(
                f"cannot list {url}: it holds more than {max_files} files",
                hint="watch folders below it instead",
            )
    return dict(sorted(found.items()))


def nothing_at(url: str) -> bool:
    """Return whether an object store has nothing at a URL; raises `StorageTrouble`, `SourceUnreadable`."""
    return not any(True for _ in _remote(url, itself=True))


def everything_at(url: str) -> dict[str, ListedFile]:
    """Return `survey`'s files, or for a checkpoint that is one file, that file under the empty name.

    Raises:
        SourceUnreadable: The place is missing or cannot be listed.
        StorageTrouble: The store failed.
        UsageError: There are more than `MAX_FILES`.
    """
    path = local_path(url)
    if path is not None:
        try:
            return {"": _seen(os.stat(path))} if path.is_file() else survey(url)
        except OSError as error:
            raise SourceUnreadable(f"cannot look at {url}: {error.strerror}") from error
    found = dict(_remote(url, itself=True))
    if not found:
        raise SourceUnreadable(f"{url} does not exist or is empty")
    if len(found) > 1:
        found.pop("", None)  # an empty object that some tools create as a folder marker
    return found


def names_at(url: str) -> tuple[str, ...]:
    """Return the names directly in a folder of an object store, sorted; none if there is no such folder.

    Raises:
        StorageTrouble: The store failed.
        UsageError: The URL cannot be opened.
    """
    import fsspec

    try:
        fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
        fs.invalidate_cache()
        found: list[str] = fs.ls(root.rstrip("/"), detail=False)
    except (ValueError, ImportError) as error:
        raise UsageError(f"cannot open {url!r}: {error}") from error
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except Exception as error:
        raise StorageTrouble(f"cannot list {url}: {error or type(error).__name__}") from error
    return tuple(sorted({name.rstrip("/").rpartition("/")[2] for name in found}))


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
        each = [folder_at(root) for root in reversed(roots)]  # the first that has a file counts
        files = {name: nbytes for folder in each for name, nbytes in folder.files.items()}
        names = {name for folder in each for name in folder.folders}
        return Folder(dict(sorted(files.items())), tuple(sorted(names)))
    path = local_path(url)
    if path is not None:
        return _folder_here(os.fspath(path))
    rows, folders = _remote_level(url)
    return Folder({name: int(info.get("size") or 0) for name, info in rows.items()}, folders)


def _remote_level(url: str) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Return fsspec's records of the files directly in a folder, and the names of its folders, all sorted."""
    import fsspec

    try:
        fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
        fs.invalidate_cache()
        rows: list[dict[str, Any]] = fs.ls(root.rstrip("/"), detail=True)
    except (ValueError, ImportError) as error:
        raise UsageError(f"cannot open {url!r}: {error}") from error
    except (FileNotFoundError, NotADirectoryError):
        return {}, ()
    except PermissionError as error:
        raise SourceUnreadable(f"cannot list {url}: {error or 'permission denied'}") from error
    except Exception as error:
        raise StorageTrouble(f"cannot list {url}: {error or type(error).__name__}") from error
    files, folders = dict[str, dict[str, Any]](), set[str]()
    for row in rows:
        name = str(row["name"]).rstrip("/").rpartition("/")[2]
        if str(row["name"]).rstrip("/") == root.rstrip("/"):
            continue  # the folder's own marker, or the named file itself
        if row.get("type") == "directory":
            folders.add(name)
        else:
            files[name] = row
    return dict(sorted(files.items())), tuple(sorted(folders))


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


def changed(
    before: Mapping[str, ListedFile], now: Mapping[str, ListedFile], *, times: bool = True
) -> str | None:
    """Return the first name that was added, removed or written in between, or None.

    Args:
        before: Files of the earlier survey.
        now: Files of the later survey.
        times: Count a change of status alone as a write (moving a file changes its status).
    """
    for name in sorted(before.keys() | now.keys()):
        was, seen = before.get(name), now.get(name)
        if was is None or seen is None or (was.nbytes, was.stamp) != (seen.nbytes, seen.stamp):
            return name
        if times and was.at != seen.at:
            return name
    return None


def stamp_of(files: Mapping[str, ListedFile]) -> str:
    """Return one digest of names, sizes and stamps."""
    total = blake3()
    for name in sorted(files):
        line = f"{name}\0{files[name].nbytes}\0{files[name].stamp}\n"
        total.update(line.encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def newest(files: Mapping[str, ListedFile]) -> float | None:
    """Return when the last of the files changed, or None if no file has a time."""
    return max((f.at for f in files.values() if f.at is not None), default=None)


def _local_files(root: str) -> Iterator[tuple[str, ListedFile]]:
    if not os.path.isdir(root):
        raise SourceUnreadable(f"{root} does not exist or is not a folder", hint="check the path")
    todo = [root]
    while todo:
        folder = todo.pop()
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError as error:
            raise SourceUnreadable(f"cannot list {folder}: {error.strerror}") from error
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                    continue
                if not entry.is_file():
                    continue
                status = entry.stat()
            except OSError:
                continue  # removed meanwhile, or a link to nothing
            yield os.path.relpath(entry.path, root), _seen(status)


def _seen(status: os.stat_result) -> ListedFile:
    # A copied file keeps its old mtime; the ctime shows when it arrived.
    return ListedFile(
        status.st_size, f"{status.st_mtime_ns} {status.st_ino}", max(status.st_mtime, status.st_ctime)
    )


def _remote(url: str, *, itself: bool = False) -> Iterator[tuple[str, ListedFile]]:
    if is_merged(url):
        raise UsageError(f"cannot list {url} as one folder", hint="name each of its folders alone")
    import fsspec

    try:
        fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
        root = root.rstrip("/")
        fs.invalidate_cache()
        found: dict[str, Any] = fs.find(root, detail=True)
    except (ValueError, ImportError) as error:
        raise UsageError(f"cannot open {url!r}: {error}") from error
    except FileNotFoundError as error:
        raise SourceUnreadable(f"{url} does not exist") from error
    except Exception as error:
        raise StorageTrouble(f"cannot list {url}: {error or type(error).__name__}") from error
    for name, info in found.items():
        if (itself or name != root) and info.get("type", "file") == "file":
            yield name[len(root) :].lstrip("/"), _listed(info)


def _listed(info: Mapping[str, Any]) -> ListedFile:
    version = next((info[k] for k in _VERSIONS if info.get(k)), "unknown")
    at = next((info[k] for k in _TIMES if info.get(k)), None)
    return ListedFile(int(info["size"] or 0), str(version), _seconds(at))


def _seconds(at: Any) -> float | None:
    if isinstance(at, datetime):
        return at.timestamp()
    if isinstance(at, int | float):
        return float(at)
    try:
        return parse_time(str(at)).timestamp() if at else None
    except InvalidText:
        return None
