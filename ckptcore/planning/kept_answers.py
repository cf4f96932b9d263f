"""Keep answers of transformers on disk, so that an equal question is not asked again.

To import transformers and to build a model without weights takes 4 s, and all exports of a run ask the same.
An answer is a file in the user's cache folder. Its name is a digest of what the answer depends on: the
question, ckptcore's own code, the interpreter, and the installed libraries, whose folder changes with every
installation. Errors are not kept. Where something may differ without a trace (a library in a development
tree, a file or folder that another user may write), transformers is asked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from ckptcore.planning import transformers_process
from ckptcore.planning.transformers_process import Answer

VARIABLE = "CKPTCORE_CACHE"
_LIBRARIES = ("transformers", "torch")
# Begin the names of variables that transformers reads, or that say from where it reads and is imported.
_SETTINGS = ("TRANSFORMERS_", "USE_", "HF_HOME", "HF_HUB_CACHE", "PYTHONPATH")
# Keys of answers that another attempt may change. The last is empty where nothing failed.
_FAILED = ("error", "unknown", "rejected", "broken")
_FOLDER = "answers-of-transformers"
_OURS = re.compile(r"[0-9a-f]{64}\.(?:json|[0-9]+\.draft)")  # names of files, below that folder
_MOST_BYTES = 4 << 20  # of a file
_MOST_FILES = 256


def ask_once(module: str, asked: object, *, seconds: float | None) -> Answer:
    """Ask as `transformers_process.ask`, unless the answer is kept; keep it, if it is no failure."""
    place = _place(module, asked)
    stored_answer = None if place is None else _kept(place)
    if stored_answer is not None:
        return stored_answer
    answer = transformers_process.ask(module, asked, seconds=seconds)
    if place is not None and not any(answer.get(key) for key in _FAILED):
        with suppress(OSError):  # a full disk, a read-only home: the next command asks again
            _keep(place, answer)
    return answer


def _place(module: str, asked: object) -> Path | None:
    """Return the file of an answer; None where none is kept."""
    folder = _folder()
    if folder is None:
        return None
    try:
        depends = [module, asked, sys.version, sys.executable, *_settings(), *_installed(), *_code()]
    except (OSError, ValueError):  # not installed as files, by no known installer, or not imported as usual
        return None
    return folder / f"{blake3(json.dumps(depends).encode()).hexdigest()}.json"


def _folder() -> Path | None:
    cache_path = os.environ.get(VARIABLE)
    if cache_path is not None:
        return Path(cache_path) / _FOLDER if cache_path else None
    import platformdirs

    folder = platformdirs.user_cache_path("ckptcore")
    return folder / _FOLDER if folder.is_absolute() else None  # a user without a home has none


def _settings() -> list[tuple[str, str]]:
    return sorted((k, v) for k, v in os.environ.items() if k.startswith(_SETTINGS))


def _installed() -> Iterator[object]:
    """Yield where the libraries are and which they are; raise `FileNotFoundError` where that is not certain.

    An installer adds and removes entries of the folder with all packages, which changes its time.
    """
    for library in _LIBRARIES:
        spec = importlib.util.find_spec(library)
        origin = "" if spec is None or spec.origin is None else spec.origin
        packages = Path(origin).parent.parent
        records = sorted(p.name for p in packages.glob(f"{library}-*.dist-info"))
        if len(records) != 1:
            raise FileNotFoundError(f"{origin} has no record of its installation")
        yield [origin, records, packages.stat().st_mtime_ns, Path(origin).stat().st_mtime_ns]


def _code() -> Iterator[object]:
    """Yield names, sizes and times of the modules that ask, answer and compare, and of their tables."""
    for folder in (Path(__file__).parent, Path(__file__).parent.parent / "naming"):
        yield from _files(folder)


def _files(folder: Path) -> Iterable[object]:
    with os.scandir(folder) as entries:
        children = sorted(entries, key=lambda child: child.name)
    for entry in children:
        if entry.is_dir():
            yield from _files(Path(entry.path))
        elif entry.name.endswith((".py", ".toml")):
            yield [entry.path, entry.stat().st_size, entry.stat().st_mtime_ns]


def _kept(place: Path) -> Answer | None:
    """Return the answer in a file, if this user wrote it, nobody else may write it, and it is complete."""
    try:
        _require_private(place.parent)
        # To open a FIFO for reading would wait for a writer, but for O_NONBLOCK.
        with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not _is_private(status) or status.st_size > _MOST_BYTES:
                return None
            digest, _, text = file.read().partition(b"\n")
    except OSError:
        return None
    if digest != _digest(place, text):
        return None
    answer: Answer = json.loads(text)
    return answer


def _keep(place: Path, answer: Answer) -> None:
    text = json.dumps(answer).encode()
    data = b"%s\n%s" % (_digest(place, text), text)
    if len(data) > _MOST_BYTES:
        return
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(place.parent)
    # Other processes may read this answer: the rename shows them all of it, or none.
    draft = place.with_suffix(f".{os.getpid()}.draft")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(data)
        draft.replace(place)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    _remove_oldest(place.parent)


def _digest(place: Path, text: bytes) -> bytes:
    """Return the digest of an answer and of its question: a file under another name has another one."""
    return blake3(place.stem.encode() + text).hexdigest().encode()


def _remove_oldest(folder: Path) -> None:
    dated_paths = []
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            with suppress(FileNotFoundError):  # another process removed it
                dated_paths.append((path.lstat().st_mtime_ns, path))
    for _, old in sorted(dated_paths)[:-_MOST_FILES]:
        with suppress(OSError):  # a folder of that name
            old.unlink()


def _require_private(folder: Path) -> None:
    """Require a folder, no link to one, where this user alone may write: files of others stay untouched."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or not _is_private(status):
        raise PermissionError(f"{folder} is not this user's alone")


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
