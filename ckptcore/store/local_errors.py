"""Errors of the local file system: which of ours is one of its own?"""

from __future__ import annotations

import errno

from ckptcore.errors import CkptError, DestinationUnwritable, DiskFull, SourceUnreadable, StorageTrouble

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def short(url: str, path: str, start: int, length: int, got: int) -> SourceUnreadable:
    """A file that is shorter than what was asked of it."""
    return SourceUnreadable(
        f"{url}/{path} ends early: {length} bytes wanted at {start}, {got} there",
        hint="the file is truncated; copy it again",
        file=path,
    )


def unreadable(what: str, error: OSError) -> CkptError:
    """Reading failed."""
    if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR):
        return StorageTrouble(f"cannot read {what}: {error.strerror}")
    return SourceUnreadable(f"cannot read {what}: {error.strerror or error}")


def unwritable(what: str, error: OSError, nbytes: int | None = None) -> CkptError:
    """Writing a file of ``nbytes`` failed."""
    if error.errno in FULL:
        need = "" if nbytes is None else f" ({nbytes} bytes)"
        return DiskFull(f"no room to write {what}{need}: {error.strerror}", path=what)
    if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
        return StorageTrouble(f"cannot write {what}: {error.strerror}")
    return DestinationUnwritable(f"cannot write {what}: {error.strerror or error}")
