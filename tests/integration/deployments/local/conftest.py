"""Fixtures: the whole system, once for all tests here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from stack import TENSORS, Stack, whole_system


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """PostgreSQL, Prefect's server, a worker and the receiver, as `make up` starts them."""
    with whole_system("ckptcore-up-") as running:
        yield running


@pytest.fixture
def checkpoint(stack: Stack, request: pytest.FixtureRequest) -> Path:
    """A real DCP checkpoint of `TENSORS`, where checkpoints are announced."""
    place = stack.root / re.sub(r"\W+", "-", request.node.name).strip("-") / "step-7"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process": it is
        dcp.save(dict(TENSORS), checkpoint_id=place, no_dist=True)
    return place
