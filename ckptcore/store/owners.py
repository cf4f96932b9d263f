"""Decide whose files a run may resume from.

Nothing in a staging folder is signed: with a key per user, another host, or another user of one service,
could not resume. The owner is what is trusted. Trusted owners are this process's user and the users that
``CKPTCORE_TRUSTED_UIDS`` names: those that workers run as, and 65534 where a server maps root to
nobody (``root_squash``). Root is not special: on a squashing mount, and in a folder where others may rename
entries, its files deserve no more trust than anybody's.
"""

from __future__ import annotations

import os
import re
import stat

from ckptcore.errors import StagingForeign, UsageError
from ckptcore.utils.dataclass import dataclass

VARIABLE = "CKPTCORE_TRUSTED_UIDS"
_GROUP_OR_OTHERS, _OTHERS = 0o022, 0o002


@dataclass(frozen=True, slots=True)
class Owners:
    """The trusted users: this process's (``own``) and the configured ones (``more``)."""

    own: int
    more: frozenset[int] = frozenset()

    @classmethod
    def of_process(cls) -> Owners:
        """Return the trusted users of this process, now; raises `UsageError` for an invalid setting."""
        text = os.environ.get(VARIABLE, "")
        spelled = [each for each in re.split(r"[,\s]+", text) if each]
        wrong = [each for each in spelled if not re.fullmatch(r"[0-9]{1,10}", each)]
        if wrong:
            raise UsageError(
                f"cannot read {VARIABLE}: must be a list of user ids (got {text!r})",
                hint=f"try {VARIABLE}=1000,65534",
            )
        own = os.geteuid()
        return cls(own, frozenset(map(int, spelled)) - {own})

    def __contains__(self, uid: int) -> bool:
        return uid == self.own or uid in self.more

    @property
    def folder_mode(self) -> int:
        """Return the mode of a folder that only these users work in; the umask still applies."""
        return 0o775 if self.more else 0o700

    def strangers_may_write(self, mode: int) -> bool:
        """Report whether other users may write to a folder of this mode; several owners share its group."""
        return bool(mode & (_OTHERS if self.more else _GROUP_OR_OTHERS))

    def require(self, seen: os.stat_result, what: str) -> None:
        """Raise `StagingForeign` unless one of these users owns it."""
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
        """Raise `StagingForeign` unless it is a folder of a trusted user."""
        if not stat.S_ISDIR(seen.st_mode):
            raise strange(what, f"it must be a folder (got {kind_of(seen)})")
        self.require(seen, what)

    def require_file(self, seen: os.stat_result, what: str) -> None:
        """Raise `StagingForeign` unless it is a regular file of a trusted user."""
        if not stat.S_ISREG(seen.st_mode):
            raise strange(what, f"it must be a regular file (got {kind_of(seen)})")
        self.require(seen, what)

    def require_only_name(self, seen: os.stat_result, what: str) -> None:
        """Raise `StagingForeign` unless it is a regular file of a trusted user, without other hard links."""
        self.require_file(seen, what)
        if seen.st_nlink > 1:
            raise strange(what, f"it must have no other hard links (got {seen.st_nlink} links)")


def strange(what: str, why: str) -> StagingForeign:
    """Return the error for an entry that ckptcore does not create there."""
    return StagingForeign(f"cannot use {what}: {why}", path=what)


def kind_of(seen: os.stat_result) -> str:
    """Return the kind of an entry, for people."""
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
