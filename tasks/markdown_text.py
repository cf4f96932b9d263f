"""Format counts, tables and names for artifacts and logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefect import runtime

from ckptcore.redaction import redacted
from ckptcore.utils.terminal import printable
from ckptcore.utils.text import count

__all__ = ["count", "named", "table"]

MAX_ROWS = 200  # a browser renders the table; a 405B export has about 190 files


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Format a Markdown table of the first `MAX_ROWS` rows; a line break in a cell is a character of it.

    >>> print(table(("file", "bytes"), [("a|b", "1")]))
    | file | bytes |
    | --- | --- |
    | a\|b | 1 |
    """
    lines = [tuple(head), ("---",) * len(head), *rows[:MAX_ROWS]]
    cells = ([printable(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def named(verb: str) -> Callable[[], str]:
    """Return a function that names a task's runs: the verb and its source, without credentials."""

    def name() -> str:
        return f"{verb} {redacted(str(runtime.task_run.parameters.get('source', '')))}"

    return name
