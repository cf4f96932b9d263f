"""Write log lines to standard error as they are, where it is no terminal.

Prefect's handler prints each line with Rich, in colours; a file or a pipe gets the same text without. Rich
takes a third of a millisecond for a line.
"""

from __future__ import annotations

import logging

from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import get_current_settings

from ckptcore.utils import terminal


def write_plainly() -> None:
    """Replace Prefect's handler of the root logger, unless it writes colours or markup."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler) is not PrefectConsoleHandler or handler.console.is_terminal:
            continue
        if get_current_settings().logging.markup:
            continue
        root.removeHandler(handler)
        root.addHandler(terminal.plain_handler(handler))
