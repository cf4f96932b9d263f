"""What `make up` would give to its programs, without starting them."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deployments.local import system
from deployments.local.system import State, complete, initial


def state(folder: Path = Path("/state"), **values: Any) -> State:
    """The state of a new installation, with these values."""
    return complete(folder, {**initial(), **values})


def environment(state: State, program: str, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """The variables that a program of the configuration gets, with those of all programs."""
    # PostgreSQL need not be installed.
    monkeypatch.setattr(system.database_server, "programs", lambda: Path("/usr/bin"))
    sections = configparser.RawConfigParser()
    sections.read_string(system.filled("supervisord.conf", state))
    texts = [sections[name]["environment"] for name in ("supervisord", f"program:{program}")]
    return dict(re.findall(r'(\w+)="([^"]*)"', "".join(texts).replace("%%", "%")))
