"""Check that every file named by a page exists, and that every needed page is linked."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *ROOT.glob("*.md"),
        *(
            p
            for top in ("changes", "ckptcore", "deployments", "docs", "tests")
            for p in (ROOT / top).rglob("*.md")
        ),
    )
)
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(?:#[^)\s]*)?\)")
# A file or folder in backticks. A text with <a place>, * or { names several files and is not checked.
NAMED = re.compile(r"`((?:\.ci|alembic|ckptcore|deployments|docs|flows|tasks|tests)/[\w./-]*)`")
# A module, or something in it, in backticks.
DOTTED = re.compile(r"`((?:ckptcore|deployments|flows|tasks)(?:\.\w+)+)`")
# This page also names files of decisions that were replaced.
HISTORY = {"DESIGN.md"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def is_there(name: str) -> bool:
    """Whether a file, folder or, without its suffix, a module is there."""
    return (ROOT / name).exists() or (ROOT / f"{name}.py").exists()


def is_defined(dotted: str) -> bool:
    """Whether a dotted name is a module, or begins with one that defines or imports the next part."""
    parts = dotted.split(".")
    folder = ROOT
    while parts and (folder / parts[0]).is_dir():
        folder = folder / parts.pop(0)
    file = folder / f"{parts[0]}.py" if parts else folder / "__init__.py"
    if file.is_file():
        parts = parts[1:]
    else:
        file = folder / "__init__.py"
    return file.is_file() and (not parts or parts[0] in names_of(file))


@cache
def names_of(file: Path) -> frozenset[str]:
    """What a module defines or imports, by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_of_the_project(page: str) -> None:
    gone = [link for link in LINK.findall(text_of(page)) if not (ROOT / page).parent.joinpath(link).exists()]
    assert gone == [], f"{page} links to what is not there"


@pytest.mark.parametrize("page", sorted(set(PAGES) - HISTORY))
def test_files_that_a_page_names_are_there(page: str) -> None:
    gone = [
        name
        for name in NAMED.findall(text_of(page))
        if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()
    ]
    assert gone == [], f"{page} names what is not there"


@pytest.mark.parametrize("top", ["ckptcore", "deployments", "flows", "tasks", "tests"])
def test_modules_and_files_that_docstrings_name_are_there(top: str) -> None:
    gone = []
    for path in sorted((ROOT / top).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        names = [name for name in NAMED.findall(text) if not is_there(name)]
        names += [name for name in DOTTED.findall(text) if not is_defined(name)]
        gone += [f"{path.relative_to(ROOT)}: {name}" for name in names]
    assert gone == [], "they moved, or were called otherwise"


def test_pages_that_say_how_to_contribute_name_every_room_and_folder_of_tests() -> None:
    page = text_of("CONTRIBUTING.md")
    rooms = [path.parent.name for path in (ROOT / "ckptcore").glob("*/__init__.py")]
    assert rooms
    silent = [room for room in rooms if f"| `ckptcore/{room}` |" not in page]
    assert silent == [], "run `make docs`; a new room needs its row in the contract of pyproject.toml"
    folders = [path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/*.py"))]
    silent = [name for name in folders if f"`tests/{name}" not in page]
    assert silent == [], "add these folders of tests to the table of CONTRIBUTING.md"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_what_others_read_our_files_by_is_found(page: str) -> None:
    assert "docs/reference/objects.md" in LINK.findall(text_of(page))


@pytest.mark.parametrize(
    ("text", "links", "named"),
    [
        ("[a](b.md#c), [d](https://e/f), [g](#h)", ["b.md"], []),
        ("`tests/formats/<family>`, `tests/quick.txt`, `ckptcore/`", [], ["tests/quick.txt", "ckptcore/"]),
    ],
)
def test_the_checks_above_see_names(text: str, links: list[str], named: list[str]) -> None:
    assert (LINK.findall(text), NAMED.findall(text)) == (links, named)


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("ckptcore.core.box", True),
        ("ckptcore.core.box.Box", True),
        ("ckptcore.formats.registry", True),
        ("ckptcore.core.nothing", False),
        ("ckptcore.nothing.box", False),
    ],
)
def test_the_check_above_sees_modules(name: str, there: bool) -> None:
    assert is_defined(name) is there


def test_figures_of_the_walks_are_those_of_their_pictures() -> None:
    rows = re.findall(
        r"\| \w+, \[\w+\]\((\S+walk-\S+\.svg)\) \| (\d+) \| (\d+) \| (\d+) \|", text_of("DESIGN.md")
    )
    assert len(rows) == 4
    for picture, *figures in rows:
        drawn = re.search(r"(\d+) stays in .*, (\d+) crossings, (\d+) of them back", text_of(picture))
        assert drawn is not None
        assert [*drawn.groups()] == figures, picture
