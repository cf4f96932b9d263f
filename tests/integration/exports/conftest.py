"""Fixtures of the export tests: transformers, asked in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from older_transformers import VARIABLE, Older

Ask = Callable[..., dict[str, Any]]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker imports what transformers has of models, and makes the models of these files."""
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.xdist_group("transformers"))


@pytest.fixture
def process_of_its_own(_asked_here_by_default: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets transformers be asked in a process of its own, as users do: seconds for each question."""
    monkeypatch.setattr("ckptcore.planning.transformers_process.ask", _asked_here_by_default)


@pytest.fixture(scope="module", autouse=True)  # before what a module makes once
def _asked_here_by_default() -> Iterator[Ask]:
    """Yields what asks otherwise."""
    from strict_exports import ask_here

    from ckptcore.planning import transformers_process

    by_a_process = transformers_process.ask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_process, "ask", ask_here)
        yield by_a_process


@pytest.fixture(scope="module")
def kept_answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what transformers answers, as for users: a command need not ask what was asked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTCORE_CACHE", str(tmp_path_factory.mktemp("answers")))
        yield


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
