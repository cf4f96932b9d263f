"""Fixtures: the whole system, once for all tests here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from lasting import Lasting
from stack import TENSORS, Stack, running_stack

SYSTEM = Lasting(lambda: running_stack("ckptcore-up-"), Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None]:
    try:
        return (yield)
    finally:
        SYSTEM.leave(nextitem)


@pytest.fixture(scope="module")
def stack() -> Stack:
    """PostgreSQL, Prefect's server, a worker and the receiver, as `make up` starts them."""
    return SYSTEM()


@pytest.fixture
def checkpoint(stack: Stack, request: pytest.FixtureRequest) -> Path:
    """A real DCP checkpoint of `TENSORS`, below an allowed root."""
    place = stack.root / re.sub(r"\W+", "-", request.node.name).strip("-") / "step-7"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process": it is
        dcp.save(dict(TENSORS), checkpoint_id=place, no_dist=True)
    return place
