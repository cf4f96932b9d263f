"""Begun: how often did a run begin anew because something had gone wrong?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.client.schemas.objects import FlowRun

LOOKS = "ckptcore.looks"  # a label of a run: how often it was put off, to look at its checkpoint later


def looks_of(labels: Mapping[str, Any]) -> int:
    """How often a run was put off, by its labels."""
    found = labels.get(LOOKS, 0)
    return found if isinstance(found, int) else 0


def begun(run: FlowRun) -> int:
    """How often a run began, less the times at which it had put itself off."""
    return run.run_count - looks_of(run.labels)
