"""Wait until an announced checkpoint is complete."""

from __future__ import annotations

from typing import Any

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun

from ckptcore.operations.automation import wait
from ckptcore.utils.text import count
from tasks.logs import log
from tasks.retry import ONCE, is_transient, named


def is_pending(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Return whether the source of the failed task may still become a complete checkpoint."""
    return may_complete(state.result(raise_on_failure=False))


def may_complete(error: object) -> bool:
    """Return whether a source that could not be read may still become a complete checkpoint."""
    return wait.may_become_complete(error) or is_transient(error)


@task(task_run_name=named("wait for"), retry_condition_fn=is_pending, **ONCE)
def wait_until_complete(source: str, recover: bool = False) -> str:
    """Return the digest of a checkpoint's manifest once it is complete; Prefect retries while it is not.

    Raises the errors of reading, and `DamagedCheckpoint` with the findings. The pauses between tries are
    those of `ckptcore.operations.automation.wait.delays`.
    """
    manifest = wait.read_complete(source, recover)
    log.info("%s is complete: %s, %s", source, manifest.format, count(manifest.num_tensors, "tensor"))
    return manifest.digest
