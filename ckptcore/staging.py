"""Staging: how does an output become visible whole, or not at all?

Everything is written into a folder beside the destination: ``/a/.b.ckptcore/`` for ``/a/b``, with
``plan/``, ``receipts/``, ``files/`` and a lock. Publishing moves ``files/`` into place: one rename on
a local disk; on an object store copies, with the file that makes the folder loadable last. A run
that is killed leaves the staging folder, from which the next one goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptcore.errors import (
    Busy,
    DestinationExists,
    DestinationUnwritable,
    SourceUnreadable,
    UsageError,
)
from ckptcore.store import Store, join_url, local_path, open_store, split_url
from ckptcore.store.localwrite import sync_folder

PUBLISHING = "publishing.json"  # written right before the move: names the plan that is published
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class Staging:
    """The staging folder of one destination. Stores: root, plan, receipts, files."""

    def __init__(self, destination: str) -> None:
        parent, name = split_url(destination)
        if not name:
            raise UsageError(f"{destination!r} is no place to write to")
        self.destination, self.name, self.parent = destination.rstrip("/") or "/", name, parent
        self.url = join_url(parent, f".{name}.ckptcore")
        self.root = open_store(self.url)
        self.plan, self.receipts, self.files = (
            open_store(join_url(self.url, part)) for part in ("plan", "receipts", "files")
        )

    @property
    def plan_uri(self) -> str:
        """Where the plan lies; all that a worker must be told."""
        return self.plan.url

    @classmethod
    def of_plan(cls, plan_uri: str) -> Staging:
        """The staging folder that a plan lies in; raises `UsageError`."""
        above, part = split_url(plan_uri)
        parent, name = split_url(above)
        if part != "plan" or not (name.startswith(".") and name.endswith(".ckptcore")):
            raise UsageError(f"{plan_uri!r} is no plan of a conversion")
        return cls(join_url(parent, name[1 : -len(".ckptcore")]))

    @contextlib.contextmanager
    def lock(self, *, shared: bool = False) -> Iterator[None]:
        """Holds the destination against other processes of this machine; raises `Busy`.

        shared: for workers of one plan beside each other.
        """
        if self.root.local is None:
            yield  # object stores have no locks; equal runs write equal bytes
            return
        fd = self._lock_file(self.root.local, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(fd)

    def _lock_file(self, root: Path, kind: int) -> int:
        path = root / "lock"
        while True:
            try:
                root.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # the folder went between the two calls: another run has just finished
            except OSError as error:
                raise DestinationUnwritable(
                    f"cannot write beside {self.destination}: {error.strerror}"
                ) from error
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(fd)
                raise Busy(f"another process is writing {self.destination}") from error
            # A finished run takes its lock file away: then this is the lock of nothing.
            if path.exists() and os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
            os.close(fd)

    def clear(self) -> None:
        """Empties the staging folder of everything but the lock."""
        for part in (self.plan, self.receipts, self.files):
            part.remove_all()
        self.root.remove(PUBLISHING)

    def sweep_parts(self, *, joints: bool = False) -> None:
        """Removes what killed writers left unfinished. joints: also files whose parts were never joined."""
        if self.files.local is not None and self.files.local.is_dir():
            for pattern in (".*.part", ".*.joint") if joints else (".*.part",):
                for left in self.files.local.rglob(pattern):
                    left.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the staging folder: at once under its name, so that a run that is killed here
        leaves none that looks as if work could go on in it."""
        here = self.root.local
        if here is None:
            self.root.remove_all()
            return
        for store in (self.root, self.plan, self.receipts, self.files):
            store.close()
        self.sweep_gone()
        with contextlib.suppress(FileNotFoundError):
            here.rename(here.with_name(f"{here.name}.gone-{os.getpid()}"))
        self.sweep_gone()

    def sweep_gone(self) -> None:
        """Removes what a run that was killed in `remove` left, as far as that can be removed."""
        here = self.root.local
        if here is None or not here.parent.is_dir():
            return
        for left in here.parent.iterdir():
            if left.name.startswith(f"{here.name}.gone-"):
                shutil.rmtree(left, ignore_errors=True)


def refuse_existing(destination: str, source: str, *, overwrite: bool, single: bool) -> None:
    """Raises `DestinationExists` unless the destination is free, and `UsageError` when it would
    replace its own source or lie in it. An empty folder is free for a folder, not for a file."""
    path, origin = local_path(destination), local_path(source)
    if path is not None and origin is not None:
        real, of = os.path.realpath(path), os.path.realpath(origin)
        if real == of or of.startswith(real + os.sep):
            raise UsageError(f"{destination} is, or contains, the source", hint="choose another destination")
        if real.startswith(of + os.sep) and os.path.isdir(of):
            raise UsageError(f"{destination} lies in the source folder", hint="choose another destination")
    if destination.rstrip("/") == source.rstrip("/"):
        raise UsageError(f"{destination} is the source", hint="choose another destination")
    if overwrite:
        return
    if path is not None:
        empty = not single and path.is_dir() and not path.is_symlink() and not any(path.iterdir())
        if os.path.lexists(path) and not empty:
            raise DestinationExists(f"{destination} exists")
        return
    parent, name = split_url(destination)
    if open_store(parent).size(name) is not None or _lists(open_store(destination)):
        raise DestinationExists(f"{destination} exists")


def publish(staging: Staging, commit: Sequence[str], *, single: bool, overwrite: bool) -> None:
    """Moves the staged files into place; the ``commit`` files last where a move is not one step.

    Raises `DestinationExists` when somebody else has written there meanwhile.
    """
    if staging.root.local is None:
        _publish_remote(staging, commit, single=single, overwrite=overwrite)
        return
    parent = local_path(staging.parent)
    assert staging.files.local is not None
    assert parent is not None
    target = parent / staging.name
    staged = staging.files.local / staging.name if single else staging.files.local
    staging.files.close()
    try:
        sync_folder(staging.files.local)
        _move(staged, target, staging, overwrite=overwrite)
        sync_folder(parent)
    except OSError as error:
        raise DestinationUnwritable(f"cannot publish {target}: {error.strerror or error}") from error


def _move(staged: Path, target: Path, staging: Staging, *, overwrite: bool) -> None:
    if not overwrite or not os.path.lexists(target):
        if staged.is_dir():
            try:
                os.rename(staged, target)  # replaces an empty folder, and nothing else
            except OSError as error:
                if os.path.lexists(target):
                    raise DestinationExists(f"{target} appeared meanwhile") from error
                raise
        else:
            try:
                os.link(staged, target)  # unlike rename, never replaces a file
            except FileExistsError as error:
                raise DestinationExists(f"{target} appeared meanwhile") from error
            staged.unlink()
        return
    assert staging.root.local is not None
    if staged.is_file() and not target.is_dir():
        os.replace(staged, target)
        return
    old = staging.root.local / "replaced"
    if old.exists():
        shutil.rmtree(old)
    if not _exchange(staged, target):
        os.rename(target, old)
        os.rename(staged, target)
    # What was replaced goes with the staging folder.


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two paths in one step, where the file system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    done: int = call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    return done == 0


def _publish_remote(staging: Staging, commit: Sequence[str], *, single: bool, overwrite: bool) -> None:
    staged = staging.files
    target = open_store(staging.parent if single else staging.destination)
    names = list(staged.list())
    old = [] if single else _lists(target)
    if old and not overwrite:
        raise DestinationExists(f"{staging.destination} appeared meanwhile")
    last = [n for n in names if n in commit]
    # Readers must find nothing rather than a mixture: the old commit files go first.
    for name in sorted(old, key=lambda n: n not in commit):
        if name in commit or name not in names:
            target.remove(name)
    for name in [n for n in names if n not in commit] + last:
        staged.copy_to(name, target, name)


def _lists(store: Store) -> list[str]:
    try:
        return list(store.list())
    except SourceUnreadable:
        return []
