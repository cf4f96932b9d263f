"""Create artifacts, without failing the run if Prefect's server does not accept them.

A missing server costs the artifact and a line in the log. Credentials in URLs are removed. A conversion does
not wait for each of its artifacts: a thread sends them, in order, and its flow waits for that at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from hashlib import sha256
from typing import Any, ParamSpec, TypeVar

from prefect import runtime
from prefect.artifacts import create_table_artifact

from ckptcore.redaction import redacted_value
from ckptcore.utils.terminal import printable
from tasks.logs import log

MAX_ROWS = 500  # a browser draws the table; the catalog keeps every row
MAX_TEXT_ROWS = 200  # a browser renders the Markdown; a 405B export has about 190 files
_RUN, _OUTPUT = 12, 8  # hexadecimal digits
P = ParamSpec("P")
T = TypeVar("T")

# In a context variable, because tasks run in threads that copy the context of their flow.
_SENDING: ContextVar[ThreadPoolExecutor | None] = ContextVar("sending", default=None)


def key_of(kind: str, output: str = "") -> str:
    """Return the key of an artifact of the current run, and of one of its outputs.

    Prefect shows the newest artifact of each key. With one key for all runs, a run's page would lose its
    artifacts to the next run, and a run with several outputs would show the last one only.
    """
    run: str | None = runtime.flow_run.id
    parts = [kind]
    if run is not None:
        parts.append(run.replace("-", "")[:_RUN])
    if output:
        parts.append(sha256(output.encode()).hexdigest()[:_OUTPUT])
    return "-".join(parts)


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


def table_or_none(key: str, rows: Sequence[dict[str, Any]], description: str) -> None:
    """Create a table artifact of the first `MAX_ROWS` rows, if there are any and the server accepts it."""
    if rows:
        artifact_or_none(create_table_artifact, list(rows[:MAX_ROWS]), key=key, description=description)


def artifact_later(create: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T | None]:
    """Call `artifact_or_none` as soon as earlier artifacts are sent; outside `sending_artifacts`, at once."""
    sending = _SENDING.get()
    if sending is not None:
        # In a copy of the context, by which Prefect knows the task that an artifact belongs to.
        return sending.submit(copy_context().run, partial(artifact_or_none, create, *args, **kwargs))
    sent: Future[T | None] = Future()
    sent.set_result(artifact_or_none(create, *args, **kwargs))
    return sent


@contextmanager
def sending_artifacts() -> Iterator[None]:
    """Send artifacts beside the block; its end waits until all are sent. A stopped block sends no more.

    Inside another such block it does nothing: the outer one sends them.
    """
    if _SENDING.get() is not None:
        yield
        return
    sending = ThreadPoolExecutor(1, thread_name_prefix="artifacts")
    token = _SENDING.set(sending)
    try:
        yield
    except Exception:
        raise
    except BaseException:  # Ctrl-C or a cancellation
        sending.shutdown(cancel_futures=True)
        raise
    finally:
        _SENDING.reset(token)
        sending.shutdown()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Format a Markdown table of at most `MAX_TEXT_ROWS` rows; each stays on one line.

    >>> print(table(("file", "bytes"), [("a|b", "1")]))
    | file | bytes |
    | --- | --- |
    | a\|b | 1 |
    """
    lines = [tuple(head), ("---",) * len(head), *rows[:MAX_TEXT_ROWS]]
    cells = ([printable(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
