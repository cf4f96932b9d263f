"""Settle: is a checkpoint that somebody announced there, and whole?"""

from __future__ import annotations

import logging
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from ckptcore.operations import wait as waiting
from tasks.markdown_text import count, named
from tasks.retry import passes

log = logging.getLogger("ckptcore.tasks")


def is_pending(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether what the task found may still become a whole checkpoint."""
    return may_become_complete(state.result(raise_on_failure=False))


def may_become_complete(error: object) -> bool:
    """Whether what could not be read may still become a whole checkpoint, here or once a server answers."""
    return waiting.may_become_complete(error) or passes(error)


@task(
    task_run_name=named("wait for"),
    retry_condition_fn=is_pending,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def settle(source: str, recover: bool = False) -> str:
    """The digest of a checkpoint's manifest once it is whole; looked at again while it is not.

    Raises what reading raises, and `DamagedCheckpoint` with the findings. `ckptcore.operations.wait.delays`
    says when to look again.
    """
    manifest = waiting.read_complete(source, recover)
    log.info("%s is whole: %s, %s", source, manifest.format, count(manifest.num_tensors, "tensor"))
    return manifest.digest
