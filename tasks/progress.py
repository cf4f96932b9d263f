"""Show how far a batch is as an artifact of its run, and end it when the run is to end."""

from __future__ import annotations

import math
import threading
import time
from contextvars import copy_context
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from ckptcore.errors import Interrupted
from ckptcore.utils.units import show_size
from tasks.logs import log

STOP = threading.Event()  # set when the run is to end now: the core asks between any two tiles
SECONDS = 2.0  # between two updates; a batch that is done sooner needs none


class BatchProgress:
    """The `ckptcore.utils.workers.Progress` of one batch; safe to call from the core's threads.

    The core's threads do not know which run they belong to: the artifact is written in the context
    of the task that made this object.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self._name, self._nbytes = name, nbytes
        self._context, self._one = copy_context(), threading.Lock()
        self._artifact: UUID | None = None
        self._next = time.monotonic() + SECONDS

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Bytes done of this batch; ``total`` is that of the whole plan. Raises `Interrupted`."""
        if STOP.is_set():
            raise Interrupted(f"{self._name} was stopped")
        if time.monotonic() < self._next or not self._one.acquire(blocking=False):
            return
        try:
            self._context.run(self._show, done)
            self._next = time.monotonic() + SECONDS
        except Exception as error:  # whatever ails the server, the bytes go on being written
            self._context.run(log.warning, "progress of %s is no longer shown: %s", self._name, error)
            self._next = math.inf
        finally:
            self._one.release()

    def _show(self, done: int) -> None:
        percent = min(100.0, 100.0 * done / max(self._nbytes, 1))
        described = f"{self._name}: {show_size(done)} of {show_size(self._nbytes)}"
        if self._artifact is None:
            self._artifact = cast("UUID", create_progress_artifact(percent, description=described))
        else:
            update_progress_artifact(self._artifact, percent, description=described)
