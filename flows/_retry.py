"""Repeat the work of a run after transient errors, as if the run had been killed and resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_chain, wait_fixed

from ckptcore.errors import Busy
from tasks.logs import log
from tasks.retry import passes

T = TypeVar("T")

# Seconds between tries; a database or a server is back by then, or its operators know.
PAUSES: Sequence[float] = (5, 15, 30, 60, 120)


def patiently(work: Callable[[], T]) -> T:
    """Return the result of `work`; repeat it from its beginning after errors that `passes`.

    The work must recognise what it has done before. Raises the error of the last try, and `Busy` at once,
    because that has waited for the other process already.
    """
    retrying = Retrying(
        wait=wait_chain(*map(wait_fixed, PAUSES)),
        stop=stop_after_attempt(len(PAUSES) + 1),
        retry=retry_if_exception(lambda error: passes(error) and not isinstance(error, Busy)),
        before_sleep=_log_retry,
        reraise=True,
    )
    return retrying(work)


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.warning("next try in %d s, after %s: %s", state.upcoming_sleep, type(error).__name__, error)
