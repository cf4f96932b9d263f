"""Provide inputs for flow tests, and observe what a run leaves on disk and at the server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
)
from safetensors import safe_open

TENSORS = {f"model.layers.{i}.weight": torch.arange(4096.0).reshape(64, 64) + i * 4096 for i in range(6)}
ONE_FILE_EACH = {"max_file_size": "16KiB", "batch": "1KiB"}  # 6 files and the index, 7 batches


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder of safetensors files, by name."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Same names, dtypes and bits."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name])
        for name in expected
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, byte for byte."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def artifacts(flow_run_id: UUID) -> dict[str, Any]:
    """The artifacts of a run, by key, without the digits of the run and of the output."""
    with get_client(sync_client=True) as client:
        only = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        found = client.read_artifacts(artifact_filter=only)
        return {re.sub(r"(-[0-9a-f]{12})?(-[0-9a-f]{8})?$", "", a.key or ""): a for a in found}


def sent_logs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every log line from now on that Prefect takes over, at the door of its sender.

    Not read back from the server: a batch that a busy SQLite server refuses is dropped by Prefect.
    """
    from prefect.logging import handlers

    sent: list[dict[str, Any]] = []
    send = handlers.emit_api_log

    def record(log: dict[str, Any]) -> None:
        sent.append(dict(log))
        send(log)

    monkeypatch.setattr(handlers, "emit_api_log", record)
    return sent


def eventually(holds: Callable[[], bool], seconds: float = 240.0) -> bool:
    """Whether a condition comes true in time."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def name(flow_run_id: UUID) -> str:
    """What a run is called."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id).name


def tasks(flow_run_id: UUID) -> list[str]:
    """What the tasks of a run are called."""
    with get_client(sync_client=True) as client:
        only = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        return sorted(task.name for task in client.read_task_runs(flow_run_filter=only))
