"""Fixtures: the whole system, once for all tests here."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

# Under `--import-mode=importlib` pytest adds nothing to `sys.path`.
sys.path.insert(0, str(Path(__file__).parent))

import postgres as postgresql
import pytest
import torch.distributed.checkpoint as dcp
from stack import TENSORS, Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """PostgreSQL, Prefect's server, a worker and the receiver, as `make up` starts them."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'ckptcore[postgres]'")
    if postgresql.programs() is None:
        pytest.skip("no PostgreSQL programs on this machine: apt-get install postgresql")
    # Not below pytest's own folder: as root, PostgreSQL runs as a user who may not look into that.
    folder = Path(tempfile.mkdtemp(prefix="ckptcore-up-"))
    running = None
    try:
        running = Stack(folder)
        yield running
    finally:
        if running is not None:
            running.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def checkpoint(stack: Stack, request: pytest.FixtureRequest) -> Path:
    """A real DCP checkpoint of `TENSORS`, where checkpoints are announced."""
    place = stack.root / re.sub(r"\W+", "-", request.node.name).strip("-") / "step-7"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process": it is
        dcp.save(dict(TENSORS), checkpoint_id=place, no_dist=True)
    return place
