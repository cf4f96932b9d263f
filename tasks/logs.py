"""Logs: whose lines stand in the log of a run, on whatever machine a task runs?

An error that explains itself comes without a traceback. No line steers a terminal, and none holds a password.
"""

from __future__ import annotations

import logging

from ckptcore.errors import CkptError
from ckptcore.utils import terminal

# Below the core's logger, so that both reach the flow run's log the same way.
log = logging.getLogger("ckptcore.tasks")


def listen(level: int = logging.INFO) -> None:
    """Send the core's log lines to the flow run's log, and take known errors' tracebacks out.

    What ``PREFECT_LOGGING_EXTRA_LOGGERS=ckptcore`` does, for processes too that have imported
    Prefect before this package (workers, tests); and the level, which that variable leaves alone.
    """
    core = logging.getLogger("ckptcore")
    core.setLevel(level)
    for handler in logging.getLogger("prefect.extra").handlers:
        if handler not in core.handlers:
            core.addHandler(handler)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_known_traceback)
    # At the handlers, where the records of every logger below come by.
    for name in ("", "prefect", "prefect.extra", "prefect.flow_runs", "prefect.task_runs"):
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(f, terminal.Clean) for f in handler.filters):
                handler.addFilter(terminal.Clean())


def _without_known_traceback(record: logging.LogRecord) -> bool:
    # A CkptError says what, where and what next; its traceback adds forty lines of Prefect.
    if record.exc_info and isinstance(record.exc_info[1], CkptError):
        record.exc_info = None
    return True


listen()
