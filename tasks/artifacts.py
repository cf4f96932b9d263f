"""Create artifacts, without failing the run if Prefect's server does not accept them.

A missing server costs the artifact and a line in the log. Credentials in URLs are removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ckptcore.redaction import redacted_value
from tasks.logs import log

P = ParamSpec("P")
T = TypeVar("T")


def artifact_or_none(create: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Call one of Prefect's functions that create or update an artifact. Return None if it fails.

    >>> artifact_or_none(divmod, 7, 2), artifact_or_none(divmod, 7, 0)
    ((3, 1), None)
    """
    try:
        return create(*redacted_value(args), **redacted_value(kwargs))
    except Exception as error:  # the files are still written, whatever the server's error
        log.warning("cannot save an artifact: %s: %s", type(error).__name__, error)
        return None
