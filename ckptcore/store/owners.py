"""Ours: whose files may a run go on from?

Nothing in a staging folder is signed: a key per user would keep another host, or another user of one service,
from going on. What is trusted is the owner. Ours is what belongs to this process's user, or to one of those
that ``CKPTCORE_TRUSTED_UIDS`` names: the users that workers run as, and 65534 where a server maps root to
nobody (``root_squash``). Root is nobody special: on a squashing mount, and in a folder that others may rename
things in, its files are no more ours than anybody's.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass

from ckptcore.errors import StagingForeign, UsageError

VARIABLE = "CKPTCORE_TRUSTED_UIDS"
_GROUP_OR_OTHERS, _OTHERS = 0o022, 0o002


@dataclass(frozen=True, slots=True)
class Owners:
    """The users whose files are ours. own: this process's. more: those that are configured."""

    own: int
    more: frozenset[int] = frozenset()

    @classmethod
    def of_process(cls) -> Owners:
        """Those of this process, now; raises `UsageError` for a setting that is no list of numbers."""
        text = os.environ.get(VARIABLE, "")
        spelled = [each for each in re.split(r"[,\s]+", text) if each]
        wrong = [each for each in spelled if not re.fullmatch(r"[0-9]{1,10}", each)]
        if wrong:
            raise UsageError(
                f"cannot read {VARIABLE}: not numbers of users (got {text!r})",
                hint=f"try {VARIABLE}=1000,65534",
            )
        own = os.geteuid()
        return cls(own, frozenset(map(int, spelled)) - {own})

    def __contains__(self, uid: int) -> bool:
        return uid == self.own or uid in self.more

    @property
    def folder_mode(self) -> int:
        """Of a folder that only these work in: below the umask, and never for everybody."""
        return 0o775 if self.more else 0o700

    def strangers_may_write(self, mode: int) -> bool:
        """Whether a folder of this mode is open to others. Where there are several, its group is theirs."""
        return bool(mode & (_OTHERS if self.more else _GROUP_OR_OTHERS))

    def require(self, seen: os.stat_result, what: str) -> None:
        """Raises `StagingForeign` unless something belongs to one of these."""
        if seen.st_uid not in self:
            known = ", ".join(map(str, sorted({self.own, *self.more})))
            raise StagingForeign(
                f"cannot use {what}: it belongs to another user (got uid {seen.st_uid}, trusted are {known})",
                hint="find out who put it there, then remove it; if that is a worker's user, or nobody "
                f"for root on NFS, try {VARIABLE}={seen.st_uid}",
                path=what,
                uid=seen.st_uid,
            )

    def require_folder(self, seen: os.stat_result, what: str) -> None:
        """Raises `StagingForeign` unless it is a folder of ours."""
        if not stat.S_ISDIR(seen.st_mode):
            raise strange(what, f"a folder should be there (got {kind_of(seen)})")
        self.require(seen, what)

    def require_file(self, seen: os.stat_result, what: str) -> None:
        """Raises `StagingForeign` unless it is a regular file of ours."""
        if not stat.S_ISREG(seen.st_mode):
            raise strange(what, f"a regular file should be there (got {kind_of(seen)})")
        self.require(seen, what)

    def require_only_name(self, seen: os.stat_result, what: str) -> None:
        """Raises `StagingForeign` unless it is a regular file of ours that has no other name anywhere."""
        self.require_file(seen, what)
        if seen.st_nlink > 1:
            raise strange(what, f"the same file has other names (got {seen.st_nlink} links)")


def strange(what: str, why: str) -> StagingForeign:
    """The refusal of something that ckptcore does not put there."""
    return StagingForeign(f"cannot use {what}: {why}", path=what)


def kind_of(seen: os.stat_result) -> str:
    """What something is, for people."""
    kinds = {
        stat.S_IFLNK: "a link",
        stat.S_IFDIR: "a folder",
        stat.S_IFREG: "a regular file",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(seen.st_mode), "something else")
