"""Name flow runs, and format errors for the messages of their states."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from prefect import State, runtime
from prefect.states import Failed
from prefect.utilities.annotations import quote

from ckptcore.errors import CkptError
from ckptcore.redaction import redacted
from ckptcore.utils.merged_url import roots_of
from tasks.logs import log, send_logs

T = TypeVar("T")

MAX_FINDINGS = 5  # a state's message is one paragraph; the artifact has all findings


def run_name() -> str:
    """Return a run's name for lists of runs: ``export llama/step-300 to models/llama``."""
    parameters: dict[str, Any] = runtime.flow_run.parameters
    verb = parameters.get("verb", runtime.flow_run.flow_name)
    ends = (_place(parameters[end]) for end in ("source", "destination") if parameters.get(end))
    return f"{verb} {' to '.join(ends)}"


def explain(error: CkptError) -> str:
    """Format an error: code and message, its findings, the next step.

    >>> from ckptcore.errors import DiskFull
    >>> print(explain(DiskFull("7 bytes are missing", hint="delete something")))
    disk-full: 7 bytes are missing
    next: delete something
    """
    findings = error.values.get("findings", ())
    lines = [f"{error.code}: {error.message}"]
    if len(findings) > 1:
        lines += [f"- {finding.code}: {finding.message}" for finding in findings[:MAX_FINDINGS]]
    if len(findings) > MAX_FINDINGS:
        lines.append(f"- and {len(findings) - MAX_FINDINGS} more")
    if error.hint:
        lines.append(f"next: {error.hint}")
    return "\n".join(lines)


def failed(error: CkptError) -> State[Any]:
    """Return the state of a failed run, with the error in its message, and log the error.

    ``prefect deployment run --watch`` shows logs, not messages of states, and ends soon after the state: the
    log is sent before.
    """
    log.error("%s", explain(error))
    send_logs()
    # The state's message should show the finding, not "encountered an exception".
    return Failed(message=explain(error), data=error)


def closed(value: T) -> T:
    """Wrap `value` as an argument that Prefect passes on without a search for futures.

    Prefect would visit every element of a manifest.
    """
    return cast("T", quote(value))


def _place(source: str | list[str]) -> str:
    """Return the end of a path or URL; of a source in several folders, that of the first and their number."""
    urls = [source] if isinstance(source, str) else source
    folders = [folder for url in urls for folder in roots_of(url) or (url,)]
    remainder = f" and {len(folders) - 1} more" if folders[1:] else ""
    return "/".join(redacted(folders[0]).rstrip("/").split("/")[-2:]) + remainder
