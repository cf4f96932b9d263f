"""Fixtures of the export tests: transformers, asked in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from older_transformers import VARIABLE, Older


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker imports what transformers has of models, and makes the models of these files."""
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.xdist_group("transformers"))


@pytest.fixture
def process_of_its_own() -> None:
    """Lets transformers be asked in a process of its own, as users do: seconds for each question."""


@pytest.fixture(autouse=True)
def _asked_here_by_default(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from strict_exports import ask_here

    if "process_of_its_own" not in request.fixturenames:
        monkeypatch.setattr("ckptcore.planning.transformers_process.ask", ask_here)


@pytest.fixture(scope="module")
def older() -> Iterator[Older]:
    """transformers 4.57, in a process of its own."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter that has transformers 4.57")
    one = Older(python)
    yield one
    one.process.communicate()


@pytest.fixture(scope="session")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The tiny model of a family, built once."""
    from export_sources import Tiny

    made: dict[str, Any] = {}

    def tiny(family: str) -> Any:
        if family not in made:
            made[family] = Tiny.make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return tiny
