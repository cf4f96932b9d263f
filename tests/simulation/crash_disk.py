"""What a power cut leaves of a disk: each change since the last fsync of its file or folder may be undone.

A file's bytes are durable when the file is synced, a name when its folder is. Changes of one folder become
durable in their order; those of several folders in any; a rename is durable in both of its folders, or in
none. That is what POSIX and the common file systems together promise, and no more:
https://pubs.opengroup.org/onlinepubs/9799919799/functions/fsync.html,
https://www.usenix.org/conference/osdi14/technical-sessions/presentation/pillai.

The disk is a real folder, and stays in place: what is undone is undone by renames, so that every file keeps
its inode. `tests.simulation.seam` moves what is removed into a folder beside it, from where it comes back.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

Change = tuple[int, str, int | None, int | None]  # folder, name, inode before and behind
Folders = dict[int, dict[str, int]]  # inode of a folder -> its names


class CrashDisk:
    """The names and bytes of a folder that are durable, and the changes that are not.

    Attributes:
        ctimes: What a power cut has undone: inode -> its time of change now, and the one that it had. No call
            sets that; `tests.simulation.seam` lets processes see it.

    Args:
        root: The folder. All that is in it now is durable.
        grave: Where removed files are, by the number of their inode.
    """

    def __init__(self, root: Path, grave: Path) -> None:
        self.root, self.grave = root, grave
        self._paths: dict[int, str] = {}
        self._folders = self._scan()
        self._bytes = self._files()
        self._pending: list[list[Change]] = []
        self._changed: dict[int, int] = {}  # inode -> its time of change, before what is pending
        self._note_times()
        self.ctimes: dict[int, tuple[int, int]] = {}

    def look(self, *together: str) -> None:
        """Note what has changed; changes of the paths that one call names are one change."""
        before, self._folders = self._folders, self._scan()
        changes = [
            (folder, name, was.get(name), now.get(name))
            for folder in sorted(before.keys() | self._folders.keys())
            for was, now in [(before.get(folder, {}), self._folders.get(folder, {}))]
            for name in sorted(was.keys() | now.keys())
            if was.get(name) != now.get(name) and folder in self._folders
        ]
        parents = {(self._inode(os.path.dirname(path)), os.path.basename(path)) for path in together if path}
        one = [each for each in changes if each[:2] in parents]
        for inode in {inode for change in changes for inode in change[2:] if inode is not None}:
            self._changed.setdefault(inode, self._time(inode))
        self._pending += ([one] if one else []) + [[each] for each in changes if each not in one]

    def sync(self, path: str) -> None:
        """Make a file's bytes, or a folder's names, durable."""
        inode = self._inode(path)
        if inode is None or not path.startswith(str(self.root)):
            return
        if not os.path.isdir(path):
            self._bytes[inode] = Path(path).read_bytes()
            return
        due, left = {inode}, []
        for change in reversed(self._pending):
            if due & _folders_of(change):
                due |= _folders_of(change)  # what is older in these folders goes first
            else:
                left.append(change)
        self._pending = left[::-1]
        self._note_times()

    def cut(self, draw: random.Random) -> str:
        """Let the power fail; return what it did, for people."""
        times = {inode: os.lstat(path) for inode, path in self._paths.items()}
        chance, stopped, undone = draw.choice([0.05, 0.2, 0.5, 1.0]), set[int](), list[list[Change]]()
        for change in self._pending:
            if _folders_of(change) & stopped or draw.random() < chance:
                stopped |= _folders_of(change)
                undone.append(change)
        for change in reversed(undone):
            self._undo(change)
        self._folders, self._pending = self._scan(), []
        torn = self._tear(draw)
        for inode in self._paths.keys() & times.keys():
            before = times[inode].st_mtime_ns
            if os.lstat(self._paths[inode]).st_mtime_ns != before:
                os.utime(self._paths[inode], ns=(before, before), follow_symlinks=False)
        revived = {inode for change in undone for each in change for inode in each[2:] if inode is not None}
        self.ctimes = {
            inode: (self._time(inode), self._changed[inode] if inode in revived else times[inode].st_ctime_ns)
            for inode in self._paths.keys() & (times.keys() | revived)
            if inode in (self._changed if inode in revived else times)
        }
        self._bytes = self._files()
        return f"{len(undone)} names undone, {torn} files torn"

    def _note_times(self) -> None:
        waiting = {inode for change in self._pending for each in change for inode in each[2:]}
        for inode in self._paths.keys() - waiting:
            self._changed[inode] = self._time(inode)

    def _time(self, inode: int) -> int:
        """Return when the status of a file changed; 0 if it is gone."""
        for path in (self._paths.get(inode, ""), str(self.grave / str(inode))):
            with contextlib.suppress(FileNotFoundError):
                return os.lstat(path).st_ctime_ns
        return 0

    def _undo(self, change: list[Change]) -> None:
        waiting = []
        for folder, name, _, behind in change:
            place = self._place(folder)
            if place is not None and behind is not None and os.path.lexists(f"{place}/{name}"):
                aside = str(self.grave / str(behind))
                os.rename(f"{place}/{name}", aside)
        for folder, name, before, _ in change:
            place, aside = self._place(folder), str(self.grave / str(before))
            if before is not None and place is not None and os.path.lexists(aside):
                waiting.append((aside, f"{place}/{name}"))
        for aside, back in waiting:
            os.rename(aside, back)

    def _place(self, folder: int) -> str | None:
        """Return where a folder is: in the tree, or among what was removed."""
        self._scan()
        if folder in self._paths:
            return self._paths[folder]
        grave = self.grave / str(folder)
        return str(grave) if grave.exists() else None

    def _tear(self, draw: random.Random) -> int:
        torn = 0
        for inode, data in self._files().items():
            old = self._bytes.get(inode, b"")
            if data == old or draw.random() < 0.3:
                continue
            cut = draw.randrange(len(data) + 1) if data else 0
            other = draw.choice([old, b"", data[:cut], data[:cut] + bytes(len(data) - cut)])
            torn += other != data
            with open(self._paths[inode], "r+b") as file:
                file.write(other)
                file.truncate()
        return torn

    def _files(self) -> dict[int, bytes]:
        return {
            inode: Path(path).read_bytes()
            for inode, path in sorted(self._paths.items())
            if os.path.isfile(path) and not os.path.islink(path)
        }

    def _scan(self) -> Folders:
        found: Folders = {}
        self._paths = {os.stat(self.root).st_ino: str(self.root)}
        waiting = [str(self.root)]
        while waiting:
            path = waiting.pop()
            names = found.setdefault(os.stat(path).st_ino, {})
            with os.scandir(path) as entries:
                for entry in entries:
                    names[entry.name] = entry.inode()
                    self._paths[entry.inode()] = entry.path
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        return found

    def _inode(self, path: str) -> int | None:
        try:
            return os.lstat(path).st_ino
        except FileNotFoundError:
            return None


def _folders_of(change: list[Change]) -> set[int]:
    return {folder for folder, _, _, _ in change}
