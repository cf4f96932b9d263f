"""Fixtures of the flow tests: a Prefect server for all of them, and a checkpoint to convert."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

# Before anything imports Prefect: no test may write into the user's home.
if "PREFECT_HOME" not in os.environ:
    os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="ckptcore-test-prefect-")
    atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)

import pytest
import torch.distributed.checkpoint as dcp
from lasting import Lasting

import flows  # noqa: F401  # settles Prefect's environment, before `observe` imports Prefect

from observe import TENSORS  # isort: skip


@contextmanager
def _server() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Prefect's own deprecations are not errors
        from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
        from prefect.testing.utilities import prefect_test_harness

        with (
            prefect_test_harness(server_startup_timeout=180),
            # The heartbeat thread makes every flow run last a second.
            temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
        ):
            yield str(PREFECT_API_URL.value())


SERVER = Lasting(_server, Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None]:
    try:
        return (yield)
    finally:
        SERVER.leave(nextitem)


@pytest.fixture(scope="module")
def prefect_api() -> str:
    """The URL of a Prefect server for all tests here."""
    return SERVER()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A real DCP checkpoint of `TENSORS`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process": it is
        dcp.save(dict(TENSORS), checkpoint_id=tmp_path / "run" / "step-7", no_dist=True)
    return tmp_path / "run" / "step-7"


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    """The URL of a catalog for this test only."""
    return f"sqlite:///{tmp_path / 'catalog.sqlite'}"
