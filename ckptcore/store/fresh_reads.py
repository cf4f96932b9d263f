"""Read what a place holds now, not what this process kept of it.

A module of its own, for rooms that know nothing of object stores. Small pieces of objects are kept by their
ETag, for all commands of a process. An object that rots below its store keeps its ETag: a proof that reads
kept pieces would be one of the past.
"""

from __future__ import annotations

import sys


def forget_small_reads() -> None:
    """Drop the pieces of objects that this process keeps, before a place is read to prove what it holds."""
    # Local checkpoints need no object store: where nothing imported it, nothing is kept.
    small_reads = sys.modules.get("ckptcore.store.objects.small_reads")
    if small_reads is not None:
        small_reads.SHARED.clear()
