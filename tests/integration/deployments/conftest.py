"""Fixtures of the receiver's tests: an application with a fixed clock, on a catalog."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

if "PREFECT_HOME" not in os.environ:
    os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="ckptcore-test-prefect-")
    atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)

import pytest
import webhooks
from starlette.testclient import TestClient

from deployments.receiver.app import make_app
from deployments.receiver.inbox import EventQueues
from deployments.receiver.settings import Sender, load


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of an empty catalog."""
    return f"sqlite:///{tmp_path / 'catalog.sqlite'}"


@pytest.fixture
def box(url: str) -> Iterator[EventQueues]:
    """Inbox and outbox of that catalog."""
    opened = EventQueues(url)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def senders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sender]:
    """The configured senders, one of each kind."""
    config = tmp_path_factory.mktemp("receiver") / "receiver.toml"
    config.write_text(webhooks.CONFIG)
    return load(config, webhooks.SECRETS)[1]


@pytest.fixture(scope="session")
def application(
    senders: dict[str, Sender], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, Path]]:
    """A client of one application for all tests, and the file of its catalog."""
    path = tmp_path_factory.mktemp("inbox") / "catalog.sqlite"
    app = make_app(senders, EventQueues(str(path)), clock=lambda: webhooks.NOW)
    with TestClient(app, raise_server_exceptions=True) as running:
        yield running, path


@pytest.fixture
def rows(application: tuple[TestClient, Path]) -> webhooks.Rows:
    """The rows of the inbox; empty at first."""
    found = webhooks.Rows(application[1])
    found.clear()
    return found


@pytest.fixture
def client(application: tuple[TestClient, Path], rows: webhooks.Rows) -> TestClient:
    """A client of the application, whose clock shows `webhooks.NOW`."""
    return application[0]
