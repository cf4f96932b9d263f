"""The bar of a conversion on a terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from ckptcore.cli import render
from ckptcore.utils import terminal


def test_the_bar_has_the_units_of_all_other_output(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = Console(file=written, force_terminal=True, width=200)
    monkeypatch.setattr(terminal, "console", lambda err: console)
    with render.progress() as advance:
        for done in (0, 2 << 20, 5 << 20):
            advance("write", done, 5 << 20)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    assert "5.0/5.0 MiB" in text
    assert re.search(r"[0-9.]+ [KMGT]iB/s", text), text
    assert not re.search(r"[0-9.]+ [kKMGT]B", text)
