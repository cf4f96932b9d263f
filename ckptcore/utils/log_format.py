"""Write log records as JSON, with what the work is about, if ``CKPTCORE_LOG_FORMAT=json`` asks for it.

Work that has a source, a destination or a run names them once, with `log_fields`; each record that is logged
within has them, also in the threads of `ckptcore.utils.workers`.
"""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from ckptcore.errors import CkptError, UsageError
from ckptcore.redaction import redacted, redacted_value

VARIABLE = "CKPTCORE_LOG_FORMAT"
FORMATS = ("text", "json")
# Of records that Prefect's loggers make: attribute -> field.
_OF_PREFECT = {
    "flow_run_id": "flow_run",
    "flow_run_name": "flow_run_name",
    "flow_name": "flow",
    "task_run_id": "task_run",
    "task_run_name": "task_run_name",
}
_FIELDS: ContextVar[Mapping[str, Any]] = ContextVar("ckptcore log fields")


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Add fields to the records of a block, and of what it calls. None leaves a field out.

    >>> with log_fields(source="/runs/a"), log_fields(destination="/exports/a", conversion=None):
    ...     current_fields()
    {'source': '/runs/a', 'destination': '/exports/a'}
    """
    new_fields = {name: value for name, value in fields.items() if value is not None}
    token = _FIELDS.set({**current_fields(), **new_fields})
    try:
        yield
    finally:
        _FIELDS.reset(token)


def current_fields() -> Mapping[str, Any]:
    """Return the fields of the current block."""
    return _FIELDS.get({})


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object in ASCII on one line, without credentials.

    Fields: time (UTC), level, logger, message; those of `log_fields` and of Prefect's records; for an error,
    code and, if it is not a known one, traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        of_prefect = {
            field: str(getattr(record, name))
            for name, field in _OF_PREFECT.items()
            if getattr(record, name, None)
        }
        of_record: Mapping[str, Any] = getattr(record, "ckptcore", {})
        fields |= redacted_value({**of_prefect, **current_fields(), **of_record})
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, CkptError):
            fields["code"] = error.code
        elif error is not None:
            fields["traceback"] = redacted("".join(traceback.format_exception(error)))
        elif record.exc_text:
            fields["traceback"] = redacted(record.exc_text)
        return json.dumps(fields, ensure_ascii=True, default=str)


def log_format() -> str:
    """Return ``text`` or ``json``, as ``CKPTCORE_LOG_FORMAT`` says. Raises `UsageError`."""
    name = os.environ.get(VARIABLE) or "text"
    if name not in FORMATS:
        raise UsageError(f"{VARIABLE} must be {' or '.join(FORMATS)} (got {name!r})")
    return name
