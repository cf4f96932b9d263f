"""Check that the documentation site builds without a warning, and is complete in itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

# What a browser would fetch from another host to show the page: scripts, styles, fonts, pictures, frames.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|link(?![^>]*rel="(?:canonical|prev|next)"))[^>]*(?:src|href)="(?:https?:)?//"""
)
FETCHED_BY_STYLE = re.compile(r"""(?:url\(|@import\s+)["']?(?:https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.xdist_group("site")
def test_every_page_is_in_the_navigation(site: Path) -> None:
    pages = {str(p.relative_to(ROOT / "docs").with_suffix(".html")) for p in (ROOT / "docs").rglob("*.md")}
    index = (site / "index.html").read_text(encoding="utf-8")
    assert {p for p in pages if f'href="{p}"' not in index} <= {"index.html"}


@pytest.mark.xdist_group("site")
def test_nothing_comes_from_another_host(site: Path) -> None:
    pages = [p for p in site.rglob("*.html") if FETCHED.search(p.read_text(encoding="utf-8"))]
    styles = [p for p in site.rglob("*.css") if FETCHED_BY_STYLE.search(p.read_text(encoding="utf-8"))]
    assert not pages
    assert not styles


@pytest.mark.xdist_group("site")
def test_the_command_line_is_there_with_every_option(site: Path) -> None:
    page = (site / "reference/cli.html").read_text(encoding="utf-8")
    for text in ("ckptcore export", "--max-file-size", "ckptcore catalog alias set", "--keep-every"):
        assert text in page


@pytest.mark.xdist_group("site")
def test_search_knows_a_finding(site: Path) -> None:
    assert "truncat" in (site / "searchindex.js").read_text(encoding="utf-8")
