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
from dataclasses import dataclass

from ckptcore.errors import StagingForeign, UsageError

VARIABLE = "CKPTCORE_TRUSTED_UIDS"
_GROUP_OR_OTHERS, _OTHERS = 0o022, 0o002


@dataclass(frozen=True, slots=True)
class Owners:
    """The trusted users: this process's (``process_uid``) and the configured ones (``further_uids``)."""

    process_uid: int
    further_uids: frozenset[int] = frozenset()

    @classmethod
    def of_process(cls) -> Owners:
        """Return the trusted users of this process, now; raises `UsageError` for an invalid setting."""
        text = os.environ.get(VARIABLE, "")
        spelled = [uid for uid in re.split(r"[,\s]+", text) if uid]
        wrong = [uid for uid in spelled if not re.fullmatch(r"[0-9]{1,10}", uid)]
        if wrong:
            raise UsageError(
                f"cannot read {VARIABLE}: must be a list of user ids (got {text!r})",
                hint=f"try {VARIABLE}=1000,65534",
            )
        # The effective user owns what this process creates.
        process_uid = os.geteuid()
        return cls(process_uid, frozenset(map(int, spelled)) - {process_uid})

    def __contains__(self, uid: int) -> bool:
        return uid == self.process_uid or uid in self.further_uids

    @property
    def folder_mode(self) -> int:
        """Return the mode of a folder that only these users work in; the umask still applies."""
        return 0o775 if self.further_uids else 0o700

    def strangers_may_write(self, mode: int) -> bool:
        """Report whether other users may write to a folder of this mode; several owners share its group."""
        return bool(mode & (_OTHERS if self.further_uids else _GROUP_OR_OTHERS))

    def require(self, status: os.stat_result, path: str) -> None:
        """Raise `StagingForeign` unless one of these users owns it."""
        if status.st_uid not in self:
            uids = ", ".join(map(str, sorted({self.process_uid, *self.further_uids})))
            raise StagingForeign(
                f"cannot use {path}: it belongs to another user (got uid {status.st_uid}, "
                f"trusted are {uids})",
                hint="find out who put it there, then remove it; if that is a worker's user, or nobody "
                f"for root on NFS, try {VARIABLE}={status.st_uid}",
                path=path,
                uid=status.st_uid,
            )

    def require_folder(self, status: os.stat_result, path: str) -> None:
        """Raise `StagingForeign` unless it is a folder of a trusted user."""
        if not stat.S_ISDIR(status.st_mode):
            raise untrusted_entry(path, f"it must be a folder (got {kind_of(status)})")
        self.require(status, path)

    def require_file(self, status: os.stat_result, path: str) -> None:
        """Raise `StagingForeign` unless it is a regular file of a trusted user."""
        if not stat.S_ISREG(status.st_mode):
            raise untrusted_entry(path, f"it must be a regular file (got {kind_of(status)})")
        self.require(status, path)

    def require_only_name(self, status: os.stat_result, path: str) -> None:
        """Raise `StagingForeign` unless it is a regular file of a trusted user, without other hard links."""
        self.require_file(status, path)
        if status.st_nlink > 1:
            raise untrusted_entry(path, f"it must have no other hard links (got {status.st_nlink} links)")


def untrusted_entry(path: str, why: str) -> StagingForeign:
    """Return the error for an entry that ckptcore does not create there."""
    return StagingForeign(f"cannot use {path}: {why}", path=path)


def kind_of(status: os.stat_result) -> str:
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
    return kinds.get(stat.S_IFMT(status.st_mode), "something else")
