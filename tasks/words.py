"""Words: how do tasks speak, in artifacts and in the log?"""

from __future__ import annotations

import logging
from collections.abc import Sequence

# Below the core's logger, so that both reach the flow run's log the same way.
log = logging.getLogger("ckptcore.tasks")


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "file"), count(2, "file")
    ('1 file', '2 files')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(("file", "bytes"), [("a|b", "1")]))
    | file | bytes |
    | --- | --- |
    | a\\|b | 1 |
    """
    lines = [tuple(head), ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)
