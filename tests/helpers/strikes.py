"""Let a process end at its n-th change of a file system, or commit, as a kill would."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

from ckptcore.store import folder_tree

STRUCK = 9  # its exit status


def strike_at(last: int) -> None:
    """Let this process end at its n-th change of a file system or commit."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == last:
            os._exit(STRUCK)

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            count()
            return function(*given, **options)

        return counted

    for name in ("rename", "unlink", "rmdir", "mkdir", "link", "fsync", "replace", "remove"):
        setattr(os, name, counting(getattr(os, name)))
    folder_tree._renameat2 = counting(folder_tree._renameat2)  # type: ignore[assignment]
    event.listen(Engine, "commit", count)
