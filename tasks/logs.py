"""Send log lines of ckptcore to the flow run's log, on whatever machine a task runs.

Known errors are logged without a traceback. Control characters and passwords are removed from every line.
"""

from __future__ import annotations

import logging

from prefect.logging.handlers import APILogHandler

from ckptcore.errors import CkptError
from ckptcore.utils import terminal
from ckptcore.utils.log_format import JsonFormatter, log_format

# Below ckptcore's logger, so that both reach the flow run's log the same way.
log = logging.getLogger("ckptcore.tasks")


def listen(level: int = logging.INFO) -> None:
    """Send ckptcore's log lines to the flow run's log, and remove tracebacks of known errors.

    ``PREFECT_LOGGING_EXTRA_LOGGERS=ckptcore`` does the first, but not in processes that import Prefect before
    this package (workers, tests), and it does not set the level.
    """
    core = logging.getLogger("ckptcore")
    core.setLevel(level)
    for handler in logging.getLogger("prefect.extra").handlers:
        if handler not in core.handlers:
            core.addHandler(handler)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_known_traceback)
    as_json = log_format() == "json"
    # On the handlers, which see the records of every logger below.
    for name in ("", "prefect", "prefect.extra", "prefect.flow_runs", "prefect.task_runs"):
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(f, terminal.Clean) for f in handler.filters):
                handler.addFilter(terminal.Clean())
            if as_json and isinstance(handler, logging.StreamHandler):
                handler.setFormatter(JsonFormatter())


def send_logs() -> None:
    """Send all log lines of the run that Prefect has not sent yet."""
    for handler in logging.getLogger("prefect.flow_runs").handlers:
        if isinstance(handler, APILogHandler):
            handler.flush()


def _without_known_traceback(record: logging.LogRecord) -> bool:
    # A CkptError has its location and next step; a traceback would add forty lines of Prefect.
    if record.exc_info and isinstance(record.exc_info[1], CkptError):
        record.exc_info = None
    return True


listen()
