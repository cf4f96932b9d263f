"""Check that each file in `changes/` is one change, named and written as `changes/README.md` says."""

from __future__ import annotations

import re

from paths import ROOT

FOLDER = ROOT / "changes"
NAME = re.compile(r"[a-z0-9-]+\.(feature|fix|change|removal)\.md")
MOST_CHARACTERS = 600


def problems(name: str, text: str) -> list[str]:
    """What is wrong with a file of this name and text."""
    found = [] if NAME.fullmatch(name) else [f"{name}: must be NAME.KIND.md, as README.md says"]
    if not text.strip():
        found.append(f"{name}: is empty")
    if len(text) > MOST_CHARACTERS or text.startswith(("#", "- ")):
        found.append(f"{name}: must be a sentence or two, without a heading or a list")
    return found


def test_changes_are_named_and_short() -> None:
    files = [p for p in FOLDER.iterdir() if p.name != "README.md"]
    assert [line for p in sorted(files) for line in problems(p.name, p.read_text())] == []


def test_other_names_and_texts_are_reported() -> None:
    assert problems("sweep-empty-roots.fix.md", "`sweep` accepts roots without a checkpoint.") == []
    assert "NAME.KIND.md" in problems("sweep.md", "x")[0]
    assert "NAME.KIND.md" in problems("Sweep.bug.md", "x")[0]
    assert "is empty" in problems("a.fix.md", " ")[0]
    assert "a sentence or two" in problems("a.fix.md", "- one")[0]
    assert "a sentence or two" in problems("a.fix.md", "word " * 200)[0]


def test_the_changelog_is_one_page_and_says_what_is_not_done() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.splitlines()) <= 60
    assert "### What it does not do" in text
