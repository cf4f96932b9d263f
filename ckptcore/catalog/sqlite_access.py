"""Explain why SQLite cannot open or write the file of a catalog, and name the next step.

SQLite says "disk I/O error" for a full disk and "unable to open database file" for a folder in which nothing
can be created. A module of its own, imported when an error is there.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LEAST = 64 << 10  # bytes that SQLite's files beside the catalog need for any change
_WITHOUT = "conversions also run without a catalog: --no-catalog"
_ELSEWHERE = f"name another place with CKPTCORE_CATALOG_URL or --catalog; {_WITHOUT}"
FREE_SPACE = f"free space there, then run the command again; {_WITHOUT}"


class Refusal(NamedTuple):
    """Why SQLite refuses a file.

    Attributes:
        message: What cannot be done, and why.
        hint: The next step.
        values: More for programs.
    """

    message: str
    hint: str
    values: dict[str, object]


def refusal(error: BaseException | None, path: Path) -> Refusal | None:
    """Return why SQLite refused the file ``path`` of a catalog; None where only SQLite knows."""
    name = getattr(error, "sqlite_errorname", "") if isinstance(error, sqlite3.Error) else ""
    values: dict[str, object] = {"path": str(path)}
    if name == "SQLITE_NOTADB":
        return Refusal(
            f"{path} is not a SQLite database", "name the catalog's file with --catalog URL", values
        )
    free = _free_bytes(path.parent)
    if name == "SQLITE_FULL" or (name.startswith("SQLITE_IOERR") and free is not None and free < _LEAST):
        free_text = "" if free is None else f": {free} bytes are free"
        values |= {"reason": "disk-full", "free": free}
        return Refusal(f"the disk of the catalog {path} is full{free_text}", FREE_SPACE, values)
    if not name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
        return None
    folder, file = _read_only(path.parent), _read_only(path)
    if not os.path.exists(path):
        why = folder or _lookup_error(path)
        return Refusal(f"cannot create the catalog {path}: {why}", _ELSEWHERE, values) if why else None
    if path.is_dir():
        return Refusal(f"{path} is a folder", "name the catalog's file with --catalog URL", values)
    if not os.access(path, os.R_OK, effective_ids=True):
        hint = f"ask its owner for the right, or {_ELSEWHERE}"
        return Refusal(f"this user may not read the catalog {path}", hint, values)
    beside = [Path(f"{path}{end}") for end in ("-wal", "-shm")]
    if folder is not None and _logs_ahead(path) and not all(log.exists() for log in beside):
        return Refusal(
            f"cannot open the catalog {path}: {folder}; it is in SQLite's WAL mode, and even readers need "
            f"{beside[1].name} beside it",
            "copy it, with its -wal file if there is one, to a folder that can be written, and name the copy "
            "with --catalog URL",
            values,
        )
    why = file or folder or next(filter(None, (_read_only(log) for log in beside)), None)
    if why is None:
        return None
    return Refusal(
        f"cannot write the catalog {path}: {why}",
        f"make the file and its folder writable, or {_ELSEWHERE}",
        values,
    )


def _free_bytes(folder: Path) -> int | None:
    with suppress(OSError):
        filesystem = os.statvfs(folder)
        return filesystem.f_bavail * filesystem.f_frsize
    return None


def _lookup_error(path: Path) -> str | None:
    """Return why the file system cannot look for a file, such as a name that is too long; None if it can."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror
    return None


def _read_only(path: Path) -> str | None:
    """Return why a file or folder cannot be written; None if it can, or is not there."""
    with suppress(OSError):
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return f"the file system of {path} is read-only"
    # `Path.exists` raises for a name that is too long.
    if os.path.exists(path) and not os.access(path, os.W_OK, effective_ids=True):
        return f"this user may not {'create files in' if path.is_dir() else 'write'} {path}"
    return None


def _logs_ahead(path: Path) -> bool:
    """Report whether a database is in WAL mode (https://www.sqlite.org/fileformat.html, bytes 18 and 19)."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(20)[18:] == b"\x02\x02"
    return False
