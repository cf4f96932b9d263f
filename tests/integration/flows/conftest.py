"""Fixtures of the flow tests: a Prefect server for the session, and a checkpoint to convert."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

# Before anything imports Prefect: no test may write into the user's own home.
if "PREFECT_HOME" not in os.environ:
    os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="ckptcore-test-prefect-")
    atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)

import pytest
import torch.distributed.checkpoint as dcp

import flows  # noqa: F401  # settles Prefect's environment, before `observe` imports Prefect

from observe import TENSORS  # isort: skip


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[str]:
    """The URL of a Prefect server that lives as long as the session; asked for by flow tests only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Prefect's own deprecations are not ours to fail on
        from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
        from prefect.testing.utilities import prefect_test_harness

        with (
            prefect_test_harness(server_startup_timeout=180),
            # The heartbeat thread makes every flow run last a second.
            temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
        ):
            yield str(PREFECT_API_URL.value())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A real DCP checkpoint of `TENSORS`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process": it is
        dcp.save(dict(TENSORS), checkpoint_id=tmp_path / "run" / "step-7", no_dist=True)
    return tmp_path / "run" / "step-7"


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    """The URL of a catalog of this test's own."""
    return f"sqlite:///{tmp_path / 'catalog.sqlite'}"
