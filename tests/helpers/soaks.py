"""Leave soaks out before they are collected: each worker would make thousands of items for none of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def are_asked_for(config: pytest.Config) -> bool:
    """Whether `-m` takes tests with the mark `soak`; by default it says `not soak`."""
    return "not soak" not in config.option.markexpr


def is_soak(marks: Iterable[Any]) -> bool:
    return any(mark.name == "soak" for mark in marks)


def rows_to_collect(config: pytest.Config, rows: Iterable[Any]) -> list[Any]:
    """The rows (`pytest.param`) without those with the mark, where nobody asks for them."""
    asked = are_asked_for(config)
    return [row for row in rows if asked or not is_soak(row.marks)]
