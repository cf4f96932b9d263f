"""Compare DESIGN.md, the index of decisions, with the pages that hold them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

PAGES = sorted(p for p in (ROOT / "docs/explanation/decisions").glob("*.md") if p.name != "index.md")
HEADING = re.compile(r"^## (D\d+(?:, D\d+)*): (.*)$", re.MULTILINE)
LINE = re.compile(
    r"^- (D\d+(?:, D\d+)*): \[(.*)\]\(docs/explanation/decisions/([\w-]+\.md)#(.*)\)$", re.MULTILINE
)
# "One page": a decision that needs more is two decisions, or an explanation page with a decision.
LENGTH_LIMIT = 400


def slug(heading: str) -> str:
    """Return the anchor that MyST and forges give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_index_lists_every_decision_in_the_order_of_its_page() -> None:
    lines = LINE.findall((ROOT / "DESIGN.md").read_text(encoding="utf-8"))
    for page in PAGES:
        headings = HEADING.findall(page.read_text(encoding="utf-8"))
        assert [(ids, title, slug(f"{ids}: {title}")) for ids, title in headings] == [
            (ids, title, anchor) for ids, title, name, anchor in lines if name == page.name
        ]
    assert {name for _, _, name, _ in lines} == {page.name for page in PAGES}


def test_every_number_names_one_decision() -> None:
    headings = [ids for page in PAGES for ids, _ in HEADING.findall(page.read_text(encoding="utf-8"))]
    numbers = sorted(int(number) for ids in headings for number in re.findall(r"\d+", ids))
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_decision_says_why_and_what_it_gives_up_on_one_page(page: Path) -> None:
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        assert "\n**Why.** " in section, title
        assert "\n**Gives up.** " in section, title
        assert len(section.split()) <= LENGTH_LIMIT, title
