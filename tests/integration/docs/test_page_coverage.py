"""Check that pages cover what users meet: every error code, and commands that run on every how-to page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

DOCS = ROOT / "docs"


def test_troubleshooting_has_an_entry_for_every_error_code() -> None:
    table = (DOCS / "reference/errors.md").read_text(encoding="utf-8")
    codes = set(re.findall(r"^\| \d+ \| `([\w-]+)` \|", table, re.MULTILINE))
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    entries = set()
    for line in re.findall(r"^(`[\w-]+`.*\(\d+\).*)\n: ", page, re.MULTILINE):
        entries |= set(re.findall(r"`([\w-]+)`", line))
    assert codes
    assert codes - entries == set()


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("*.md")), ids=lambda page: page.stem)
def test_a_how_to_page_has_commands_that_the_tests_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.search(r"<!-- sandbox: .*? -->", text, re.DOTALL)
    assert re.search(r"^```sh$", text, re.MULTILINE)
