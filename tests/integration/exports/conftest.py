"""Fixtures of the export tests: transformers, asked in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from ckptcore.planning.config_folder import ConfigFolder


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks transformers in this process, which has imported it already, and not in one of its own."""
    from ckptcore.planning.meta_model import describe

    def ask(config: ConfigFolder, found: Mapping[str, tuple[int, ...]]) -> Any:
        answer = describe(json.loads(config.content["config.json"]), {n: list(s) for n, s in found.items()})
        return json.loads(json.dumps(answer))

    monkeypatch.setattr("ckptcore.planning.config_folder._ask", ask)
